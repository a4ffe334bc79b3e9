//! Shares a buffer with one process that requests it.
//!
//! ```sh
//! cargo run --example share       # in one terminal
//! cargo run --example receive     # in another
//! ```
//!
//! Both take the socket's path as an argument; the default path belongs to this user. With `VMMFD_BACKEND=host` they use host memory even
//! on a machine with a GPU.

use std::{
    env,
    error::Error,
    path::{Path, PathBuf},
};

use vmmfd::{
    channel::{Listener, socket_path},
    driver::{Choice, open},
    memory::{Device, Region, Selector, Shared, Spec},
    session::{
        Config,
        handoff::{Buffer, ServeOptions, Unchecked, serve},
    },
};

fn main() -> Result<(), Box<dyn Error>> {
    let given = env::args_os().nth(1).map(PathBuf::from);
    let choice: Choice = env::var("VMMFD_BACKEND").as_deref().unwrap_or("auto").parse()?;
    let opened = open(choice)?;
    if let Some(reason) = &opened.fallback {
        eprintln!("share: no GPU is used: {reason}");
    }
    let device = Device::find(&opened.driver, Selector::default())?;

    // Rounded up to the granularity, mapped, and exported once.
    let shared = Shared::create(&device, Spec::vmm(1 << 20))?;
    shared.copy_in(0, b"hello from the producer")?;
    // A program launches its kernels on `shared.address()` here, and then waits for them:
    shared.synchronize()?;

    let config = Config::default();
    let path = socket_path(given.as_deref())?;
    let listener = Listener::bind(&path, &config)?;
    println!("share: {} bytes on {device}, at {}", shared.size(), Path::new(&path).display());
    let buffer = Buffer::new(shared, Unchecked, None)?;
    // Blocks until one consumer is served, or none connects within the timeout.
    for served in serve(listener, &buffer, &ServeOptions::default(), &config, &|_| {}).into_result()? {
        println!("share: pid {} had it", served.peer.pid);
    }
    Ok(()) // Unmapped, freed, released and closed in the right order.
}
