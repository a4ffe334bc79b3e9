//! Receives a buffer from a producer, such as the example `share`, the command `producer`, or another program that speaks the protocol.
//!
//! ```sh
//! cargo run --example receive     # waits for a producer for half a minute
//! ```

use std::{env, error::Error, path::PathBuf};

use vmmfd::{
    channel::socket_path,
    driver::{Choice, open},
    memory::Region,
    session::{
        Config, Verdict,
        handoff::{Consumer, Request},
    },
};

fn main() -> Result<(), Box<dyn Error>> {
    let given = env::args_os().nth(1).map(PathBuf::from);
    let choice: Choice = env::var("VMMFD_BACKEND").as_deref().unwrap_or("auto").parse()?;
    let driver = open(choice)?.driver;
    let config = Config::default();

    // Finds the memory's device by its UUID.
    let mut consumer = Consumer::connect(&driver, None, &socket_path(given.as_deref())?, &config, &|_| {})?;
    let object = consumer.request(&Request::default())?;
    println!(
        "receive: {} bytes at {:#x} of {}, {}, from pid {}",
        object.size(),
        object.address(),
        object.device(),
        object.access(),
        consumer.peer().pid
    );
    let mut bytes = [0; 23];
    object.copy_out(0, &mut bytes)?;
    println!("receive: it begins with `{}`", bytes.escape_ascii());

    // If the work takes longer than the timeout, call `consumer.busy()` now and then. When it is done:
    object.synchronize()?;
    consumer.report(&object, &Verdict::unchecked(true))?;
    // Memory shared by descriptors is still valid after that, even if the producer has exited.
    consumer.close();
    Ok(())
}
