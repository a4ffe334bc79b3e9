//! Shares memory through the program's own channel: without this library's sockets, protocol or sessions.
//!
//! ```sh
//! cargo run --example own_channel
//! ```
//!
//! The message is a text, the serialised `ArrayHandle`, and the descriptors beside it. Any channel that carries both works: here a socket
//! pair, with `sendmsg` and `recvmsg` of the crate rustix, which owns received descriptors. The sender's own messages define when the
//! memory may be used, and by which process.

use std::{
    env,
    error::Error,
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    process::Command,
};

use rustix::{cmsg_space, net};
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
    // The GPU's work on the memory must be done before the message is sent.
    shared.synchronize()?;

    let (socket, theirs) = UnixStream::pair()?;
    let mut receiver = Command::new(env::current_exe()?).arg("receive").stdin(OwnedFd::from(theirs)).spawn()?;
    let bytes = ArrayDescriptor::new("u8".parse()?, [shared.size()], Order::C)?;
    let (handle, fds) = ArrayHandle::of(&shared, bytes)?;
    let text = serde_json::to_string(&handle)?;
    println!("own_channel: sends {} descriptor and {text}", fds.len());
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut beside = net::SendAncillaryBuffer::new(&mut space);
    if !beside.push(net::SendAncillaryMessage::ScmRights(&fds)) {
        return Err("there is room for one descriptor".into());
    }
    net::sendmsg(&socket, &[IoSlice::new(text.as_bytes())], &mut beside, net::SendFlags::NOSIGNAL)?;
    if receiver.wait()?.success() { Ok(()) } else { Err("the receiver failed".into()) }
}

fn receive(driver: &Driver) -> Result<(), Box<dyn Error>> {
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let (mut text, mut space) = ([0; 4096], [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))]);
    let mut beside = net::RecvAncillaryBuffer::new(&mut space);
    let received = net::recvmsg(&socket, &mut [IoSliceMut::new(&mut text)], &mut beside, net::RecvFlags::CMSG_CLOEXEC)?;
    let fds: Vec<OwnedFd> = beside
        .drain()
        .filter_map(|message| match message {
            net::RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect();

    // Checks the text, and closes the descriptors, also on failure.
    let handle: ArrayHandle = serde_json::from_slice(&text[..received.bytes])?;
    let array = handle.open(driver, None, fds, Access::ReadOnly)?;
    let mut hello = [0; 5];
    array.memory().copy_out(0, &mut hello)?;
    println!("own_channel: received {} with `{}`", array.descriptor(), hello.escape_ascii());
    Ok(())
}
