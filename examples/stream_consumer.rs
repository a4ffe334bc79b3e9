//! Receives frames from the example `stream_producer` until it exits.
//!
//! ```sh
//! cargo run --example stream_consumer
//! ```

use std::{env, error::Error, path::PathBuf};

use vmmfd::{
    Error as Failure,
    channel::socket_path,
    driver::{Choice, open},
    error::PeerError,
    memory::Region,
    session::{Config, stream::Subscriber},
};

/// The most buffers to keep mapped. For another buffer, the least recently used buffer is closed first.
const KEEP: usize = 4;

fn main() -> Result<(), Box<dyn Error>> {
    let given = env::args_os().nth(1).map(PathBuf::from);
    let choice: Choice = env::var("VMMFD_BACKEND").as_deref().unwrap_or("auto").parse()?;
    let driver = open(choice)?.driver;
    let config = Config::default();
    let mut subscriber = Subscriber::connect(&driver, None, &socket_path(given.as_deref())?, KEEP, &config)?;

    let (mut frames, mut sum) = (0, 0);
    loop {
        // A mapped region, which this side owns until it returns it.
        let frame = match subscriber.receive() {
            Ok(frame) => frame,
            // The producer has closed the connection: the stream is complete.
            Err(Failure::Peer(PeerError::Gone { .. })) => break,
            Err(error) => return Err(error.into()),
        };
        let mut number = [0u32];
        frame.copy_out_slice(0, &mut number)?;
        frames += 1;
        sum += number[0];
        subscriber.give_back(frame)?; // Waits for the GPU's work, then sends the buffer back.
    }
    println!("stream_consumer: received {frames} frames, whose numbers add up to {sum}");
    Ok(())
}
