//! Receives frames in an async program: no thread waits, and each await can be cancelled. A camera of 200 frames a second runs in a thread.
//!
//! ```sh
//! cargo run --example tokio_viewer
//! ```

#![allow(unsafe_code, reason = "tokio's registration")]

use std::{
    env,
    os::fd::{AsFd, OwnedFd},
    thread,
    time::{Duration, Instant},
};

use tokio::{io::unix::AsyncFd, runtime, time};
use vmmfd::{
    channel::Channel,
    driver::{Choice, open},
    memory::{Device, Region, Selector},
    session::{
        Config,
        stream::{Policy, PublishOptions, Publisher, Received, SubscribeOptions, Subscriber},
    },
};

const FRAMES: u32 = 200;
const PERIOD: Duration = Duration::from_millis(5);

/// The limit of the publisher's waits.
const LIMIT: Duration = Duration::from_secs(10);

fn publish(publisher: Publisher) -> vmmfd::Result<()> {
    let begun = Instant::now();
    for frame in 0..FRAMES {
        thread::sleep((begun + frame * PERIOD).saturating_duration_since(Instant::now()));
        let loan = publisher.loan(LIMIT)?;
        loan.copy_in(0, &frame.to_le_bytes())?;
        loan.publish(&[])?;
    }
    publisher.finish(LIMIT).map(drop)
}

/// The next sample, or the end. If the future is dropped before it is ready, nothing is lost: the sample stays in the socket.
async fn next(subscriber: &Subscriber, socket: &AsyncFd<OwnedFd>) -> vmmfd::Result<Received> {
    loop {
        if let Some(received) = subscriber.try_receive()? {
            return Ok(received);
        }
        let ready = socket.readable().await;
        // A record that arrives from here on makes it ready again.
        ready.map_err(|error| vmmfd::Error::system("wait for a frame", error))?.clear_ready();
    }
}

async fn view(subscriber: Subscriber) -> Result<(), Box<dyn std::error::Error>> {
    // SAFETY: the duplicate belongs to the `AsyncFd` alone, which closes it.
    let socket = unsafe { AsyncFd::register(subscriber.as_fd().try_clone_to_owned()?)? };
    let (mut frames, mut cancelled, mut last, mut longest) = (0, 0, Instant::now(), Duration::ZERO);
    loop {
        // A short time limit cancels the wait again and again.
        let Ok(received) = time::timeout(Duration::from_millis(2), next(&subscriber, &socket)).await else {
            cancelled += 1;
            continue;
        };
        let Received::Sample(sample) = received? else { break };
        let mut number = [0; 4];
        sample.copy_out(0, &mut number)?;
        assert_eq!((u32::from_le_bytes(number), sample.skipped_before()), (frames, 0));
        frames += 1;
        longest = longest.max(last.elapsed());
        last = Instant::now();
    }
    println!("viewer: {frames} frames, {cancelled} cancelled waits");
    eprintln!("viewer: the longest time between two frames was {longest:.1?}");
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let choice: Choice = env::var("VMMFD_BACKEND").as_deref().unwrap_or("auto").parse()?;
    let driver = open(choice)?.driver;
    let (ours, theirs) = Channel::socket_pair()?;
    let device = Device::find(&driver, Selector::default())?;
    let publisher = Publisher::create(&device, &PublishOptions::fixed(1 << 20, 12).every(LIMIT), &Config::default())?;
    publisher.admit(ours)?;
    let options = SubscribeOptions::default().policy(Policy::Every).held(8);
    let subscriber = Subscriber::over(theirs, &driver, None, &options, &Config::default())?;
    let camera = thread::spawn(move || publish(publisher));
    let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(view(subscriber))?;
    camera.join().expect("the camera does not panic")?;
    Ok(())
}
