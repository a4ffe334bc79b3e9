//! iceoryx2 beside `vmmfd bench stream --backend host`: the same ticks, sizes and rows. A subscriber waits for an event of its listener and
//! then receives, as in iceoryx2's example `event_based_communication`. Arguments: bytes, publications, subscribers.

use std::{
    env,
    error::Error,
    io::{self, BufRead, BufReader, Write},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use iceoryx2::prelude::*;
use iceoryx2::service::port_factory::{event, publish_subscribe};
use rustix::time::{ClockId, clock_gettime};

type Result<T> = std::result::Result<T, Box<dyn Error>>;
type Services = (publish_subscribe::PortFactory<ipc::Service, [u8], u64>, event::PortFactory<ipc::Service>);
const TICK: Duration = Duration::from_millis(2);

fn main() -> Result<()> {
    set_log_level_from_env_or(LogLevel::Error);
    let arguments: Vec<String> = env::args().skip(1).collect();
    match &arguments[..] {
        [size, count, subscribers] => publish(size.parse()?, count.parse()?, subscribers.parse()?),
        [name, subscribers] => follow(name, subscribers.parse()?),
        _ => Err("usage: bench-iceoryx2 BYTES PUBLICATIONS SUBSCRIBERS".into()),
    }
}

/// The header has the time of a publication in nanoseconds: 0 in the last, and the greatest in the publications of the warm-up.
/// As with the policy `latest` of `vmmfd`: one buffer waits, a newer one replaces it, and a subscriber has one at a time.
fn services(node: &Node<ipc::Service>, name: &str, subscribers: usize) -> Result<Services> {
    let builder = node.service_builder(&name.try_into()?).publish_subscribe::<[u8]>().user_header::<u64>();
    let builder = builder.max_subscribers(subscribers).max_nodes(subscribers + 1).history_size(0);
    let frames = builder.subscriber_max_buffer_size(1).subscriber_max_borrowed_samples(1).open_or_create()?;
    let builder = node.service_builder(&name.try_into()?).event();
    Ok((frames, builder.max_listeners(subscribers).max_nodes(subscribers + 1).open_or_create()?))
}

/// Prints the microseconds from the time of each publication to its receipt.
fn follow(name: &str, subscribers: usize) -> Result<()> {
    let node = NodeBuilder::new().create::<ipc::Service>()?;
    let (frames, event) = services(&node, name, subscribers)?;
    let (subscriber, listener) = (frames.subscriber_builder().create()?, event.listener_builder().create()?);
    println!("ready");
    let mut all = String::new();
    loop {
        listener.blocking_wait(|_| {})?;
        while let Some(sample) = subscriber.receive()? {
            let at = nanoseconds(ClockId::Monotonic);
            match *sample.user_header() {
                0 => return Ok(io::stdout().write_all(all.as_bytes())?),
                begun => all.extend(at.checked_sub(begun).map(|took| format!("{}\n", took as f64 / 1e3))),
            }
        }
    }
}

fn publish(size: usize, count: usize, subscribers: usize) -> Result<()> {
    let name = format!("vmmfd-bench-{}", std::process::id());
    let node = NodeBuilder::new().create::<ipc::Service>()?;
    let (frames, event) = services(&node, &name, subscribers)?;
    let publisher = frames.publisher_builder().initial_max_slice_len(size).create()?;
    let notifier = event.notifier_builder().create()?;
    let mut children = Vec::new();
    for _ in 0..subscribers {
        let mut command = Command::new(env::current_exe()?);
        let mut child = command.args([&name, &subscribers.to_string()]).stdout(Stdio::piped()).spawn()?;
        let mut output = BufReader::new(child.stdout.take().ok_or("no output")?);
        output.read_line(&mut String::new())?;
        children.push((child, output));
    }
    let send = |begun: u64| -> Result<()> {
        // SAFETY: the segment is zeroed memory, and every byte is valid.
        let mut sample = unsafe { publisher.loan_slice_uninit(size)?.assume_init() };
        *sample.user_header_mut() = begun;
        sample.send()?;
        Ok(notifier.notify().map(drop)?)
    };
    let (mut with, mut without) = (Vec::new(), Vec::new());
    (0..20).try_for_each(|_| tick(|| send(u64::MAX)).map(drop))?;
    for _ in 0..count {
        with.push(tick(|| send(nanoseconds(ClockId::Monotonic)))?);
        without.push(tick(|| Ok(()))?);
    }
    send(0)?;
    let mut receipts = Vec::new();
    for (mut child, output) in children {
        receipts.extend(io::read_to_string(output)?.split_whitespace().flat_map(str::parse::<f64>));
        child.wait()?;
    }
    let mean = |samples: &[f64]| samples.iter().sum::<f64>() / samples.len() as f64;
    let skipped = 100.0 - 100.0 * receipts.len() as f64 / (count * subscribers) as f64;
    println!("iceoryx2, {size} bytes, {subscribers} at once (us)        min    median       p99      n");
    println!("publisher's CPU for a publication {:.2}, skipped {skipped:.2} %", mean(&with) - mean(&without));
    print("publication to receipt", receipts);
    print("publisher's CPU, with a publication", with);
    print("publisher's CPU, without", without);
    Ok(())
}

fn print(name: &str, mut samples: Vec<f64>) {
    samples.sort_by(f64::total_cmp);
    let rank = |part: f64| samples[((part * samples.len() as f64).ceil() as usize).max(1) - 1];
    println!("{name:37} {:9.2} {:9.2} {:9.2} {:6}", rank(0.0), rank(0.5), rank(0.99), samples.len());
}

/// The CPU time of this process in microseconds, in a tick that begins with `work`.
fn tick(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let (begun, cpu) = (Instant::now(), nanoseconds(ClockId::ProcessCPUTime));
    work()?;
    thread::sleep(TICK.saturating_sub(begun.elapsed()));
    Ok((nanoseconds(ClockId::ProcessCPUTime) - cpu) as f64 / 1e3)
}

fn nanoseconds(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
