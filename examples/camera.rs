//! A camera publishes frames, and any number of viewers receive the newest. A viewer may be slow, stop or die: the camera goes on.
//!
//! ```sh
//! cargo run --example camera publish     # in one terminal
//! cargo run --example camera view        # in others
//! ```

use std::{env, error::Error, path::Path, thread, time::Duration};

use vmmfd::{
    channel::socket_path,
    driver::{Choice, Driver, open},
    memory::{Device, Region, Selector},
    session::{
        Config,
        stream::{Event, PublishOptions, Publisher, Received, SubscribeOptions, Subscriber},
    },
};

const FRAMES: u32 = 100;

/// 200 frames a second.
const PERIOD: Duration = Duration::from_millis(5);

/// The limit of each wait.
const LIMIT: Duration = Duration::from_secs(10);

fn publish(driver: &Driver, path: &Path) -> Result<(), Box<dyn Error>> {
    let device = Device::find(driver, Selector::default())?;
    // Room for six viewers: one buffer each, one for the loan, and the newest.
    let publisher = Publisher::create(&device, &PublishOptions::fixed(1 << 20, 8), &Config::default())?;
    publisher.listen(path)?;
    println!("camera: at {}", path.display());
    let mut begun = false;
    let mut frame = 0;
    while frame < FRAMES {
        while let Some(event) = publisher.event() {
            println!("camera: {event:?}");
            begun |= matches!(event, Event::Joined(_));
        }
        if begun {
            let loan = publisher.loan(LIMIT)?; // Waits for no viewer.
            loan.copy_in_slice(0, &[frame])?; // Or kernels on `loan.address()`.
            loan.publish(&frame.to_le_bytes())?; // Waits for the GPU's work.
            frame += 1;
        }
        thread::sleep(PERIOD);
    }
    let stats = publisher.finish(LIMIT)?; // Until the viewers have given everything back.
    println!("camera: published {} frames to {} viewers", stats.published, stats.subscribers.len());
    Ok(())
}

fn view(driver: &Driver, path: &Path) -> Result<(), Box<dyn Error>> {
    // The default policy: a slow viewer skips to the newest frame.
    let subscriber = Subscriber::connect(driver, None, path, &SubscribeOptions::default(), &Config::default())?;
    let mut last = 0;
    loop {
        match subscriber.receive(LIMIT)? {
            Received::Sample(frame) => {
                let mut number = [0_u32];
                frame.copy_out_slice(0, &mut number)?;
                if number[0].to_le_bytes() != frame.user() {
                    return Err(format!("frame {} is torn", frame.number()).into());
                }
                last = frame.number();
            } // The frame is dropped here, which gives the buffer back.
            Received::Crashed(peer) => return Err(format!("the camera, pid {}, died", peer.pid).into()),
            _ => break,
        }
    }
    println!("viewer: the stream ended after frame {last}");
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args_os().skip(1);
    let role = arguments.next().unwrap_or_default();
    let path = arguments.next();
    let path = socket_path(path.as_deref().map(Path::new))?;
    let choice: Choice = env::var("VMMFD_BACKEND").as_deref().unwrap_or("auto").parse()?;
    let driver = open(choice)?.driver;
    match role.to_str() {
        Some("publish") => publish(&driver, &path),
        Some("view") => view(&driver, &path),
        _ => Err("camera publish|view [SOCKET]".into()),
    }
}
