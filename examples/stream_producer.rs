//! Publishes frames in two buffers in rotation, to one consumer.
//!
//! ```sh
//! cargo run --example stream_producer     # in one terminal
//! cargo run --example stream_consumer     # in another
//! ```
//!
//! A buffer's descriptors travel when it is first published. After that a turn is one small record in each direction.

use std::{collections::BTreeMap, env, error::Error, path::PathBuf, sync::Arc};

use vmmfd::{
    channel::{Listener, socket_path},
    driver::{Access, Choice, open},
    memory::{Device, Region, Selector, Shared, Spec},
    session::{Config, stream::Publisher},
};

const FRAMES: u32 = 100;

fn main() -> Result<(), Box<dyn Error>> {
    let given = env::args_os().nth(1).map(PathBuf::from);
    let choice: Choice = env::var("VMMFD_BACKEND").as_deref().unwrap_or("auto").parse()?;
    let driver = open(choice)?.driver;
    let config = Config::default();
    let device = Device::find(&driver, Selector::default())?;
    let path = socket_path(given.as_deref())?;
    let listener = Listener::bind(&path, &config)?;
    println!("stream_producer: waits for a consumer at {}", path.display());

    // One consumer. For several, use a publisher each: they may share the memory.
    let mut publisher = Publisher::accept(&listener, &driver, &config)?;
    let mut memory = BTreeMap::new();
    for _ in 0..2 {
        let shared = Arc::new(Shared::create(&device, Spec::vmm(1 << 20))?);
        memory.insert(publisher.add(&shared, None, Access::ReadOnly)?, shared);
    }

    let mut free: Vec<_> = memory.keys().copied().collect();
    for frame in 0..FRAMES {
        // The consumer works on one buffer while this side fills the other.
        let id = match free.pop() {
            Some(id) => id,
            None => publisher.take_back()?,
        };
        memory[&id].copy_in_slice(0, &[frame])?;
        publisher.publish(id)?; // Waits for the GPU's work, then sends the record.
    }
    while memory.keys().any(|id| publisher.is_out(*id)) {
        publisher.take_back()?;
    }
    println!("stream_producer: published {FRAMES} frames to pid {}", publisher.peer().pid);
    Ok(())
}
