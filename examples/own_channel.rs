//! Hands memory over through a channel of the program's own: no socket, protocol or session of this library.
//!
//! ```sh
//! cargo run --example own_channel
//! ```
//!
//! What has to travel is a text, the serialised `ArrayHandle`, and the descriptors beside it. Any way to send both will do: here it
//! is a socket pair and `sendfd`. The sender says when the memory may be used, and by whom, in its own messages.

#![allow(unsafe_code, reason = "a descriptor that sendfd received is a number")]

use std::{
    env,
    error::Error,
    io,
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    process::Command,
};

use sendfd::{RecvWithFd, SendWithFd};
use vmmfd::{
    array::{ArrayDescriptor, Order},
    driver::{Access, Choice, Driver, open},
    memory::{ArrayHandle, Device, Region, Selector, Shared, Spec},
};

fn main() -> Result<(), Box<dyn Error>> {
    let choice: Choice = env::var("VMMFD_BACKEND").as_deref().unwrap_or("auto").parse()?;
    let driver = open(choice)?.driver;
    if env::args().nth(1).is_some() { receive(&driver) } else { share(&driver) }
}

fn share(driver: &Driver) -> Result<(), Box<dyn Error>> {
    let shared = Shared::create(&Device::find(driver, Selector::default())?, Spec::vmm(1000))?;
    shared.copy_in(0, b"hello")?;
    // The GPU's work on it must be done before the message is sent.
    shared.synchronize()?;

    let (socket, theirs) = UnixStream::pair()?;
    let mut receiver = Command::new(env::current_exe()?).arg("receive").stdin(OwnedFd::from(theirs)).spawn()?;
    let bytes = ArrayDescriptor::new("u8".parse()?, [shared.size()], Order::C)?;
    let (handle, fds) = ArrayHandle::of(&shared, bytes)?;
    let text = serde_json::to_string(&handle)?;
    println!("own_channel: sends {} descriptor and {text}", fds.len());
    let fds: Vec<_> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
    socket.send_with_fd(text.as_bytes(), &fds)?;
    if receiver.wait()?.success() { Ok(()) } else { Err("the receiver failed".into()) }
}

fn receive(driver: &Driver) -> Result<(), Box<dyn Error>> {
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let (mut text, mut fds) = ([0; 4096], [-1; 1]);
    let (length, count) = socket.recv_with_fd(&mut text, &mut fds)?;
    // SAFETY: the kernel made these for this process just now.
    let fds: Vec<OwnedFd> = fds[..count].iter().map(|&fd| unsafe { OwnedFd::from_raw_fd(fd) }).collect();

    // What the text says is checked here; the descriptors are closed, also on failure.
    let handle: ArrayHandle = serde_json::from_slice(&text[..length])?;
    let array = handle.open(driver, None, fds, Access::ReadOnly)?;
    let mut hello = [0; 5];
    array.memory().copy_out(0, &mut hello)?;
    println!("own_channel: received {} with `{}`", array.descriptor(), hello.escape_ascii());
    Ok(())
}
