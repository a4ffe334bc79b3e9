//! Shares a typed array, 3 by 4 numbers of type `f32`, with a process that it starts.
//!
//! ```sh
//! cargo run --example array
//! ```

use std::{
    env,
    error::Error,
    io,
    os::fd::{AsFd, OwnedFd},
    process::Command,
};

use vmmfd::{
    array::{ArrayDescriptor, Order},
    channel::Channel,
    driver::{Choice, Driver, open},
    memory::{Device, Region, Selector, Shared, Spec},
    session::{
        Config, Verdict,
        handoff::{Buffer, Consumer, Request, ServeOptions, Unchecked, serve_connection},
    },
};

fn main() -> Result<(), Box<dyn Error>> {
    let choice: Choice = env::var("VMMFD_BACKEND").as_deref().unwrap_or("auto").parse()?;
    let driver = open(choice)?.driver;
    if env::args().nth(1).is_some() { receive(&driver) } else { share(&driver) }
}

fn share(driver: &Driver) -> Result<(), Box<dyn Error>> {
    let array = ArrayDescriptor::new("f32".parse()?, [3, 4], Order::C)?;
    let shared = Shared::create(&Device::find(driver, Selector::default())?, Spec::vmm(array.bytes()?))?;
    let numbers: Vec<f32> = (0..12u8).map(|number| f32::from(number) / 2.0).collect();
    shared.copy_in_slice(0, &numbers)?;
    println!("array: shares {array}");

    // A socket pair instead of a path: the child gets the other socket as its standard input.
    let (ours, theirs) = Channel::socket_pair()?;
    let mut receiver = Command::new(env::current_exe()?).arg("receive").stdin(theirs).spawn()?;
    let buffer = Buffer::new(shared, Unchecked, Some(array))?;
    let served = serve_connection(ours, &buffer, &ServeOptions::default(), &Config::default(), &|_| {})?;
    let status = receiver.wait()?;
    match served.error {
        None if status.success() => Ok(()),
        None => Err("the receiver failed".into()),
        Some(error) => Err(error.into()),
    }
}

fn receive(driver: &Driver) -> Result<(), Box<dyn Error>> {
    let socket: OwnedFd = io::stdin().as_fd().try_clone_to_owned()?;
    let config = Config::default();
    let mut consumer = Consumer::over(socket, driver, None, &config, &|_| {})?;
    let object = consumer.request(&Request::default())?;
    consumer.report(&object, &Verdict::unchecked(true))?;

    let array = object.into_array()?.ok_or("the producer described no array")?;
    println!("array: received {}", array.descriptor());
    // Views copy nothing and keep the memory until the last view is dropped.
    let last_column = array.index(1, 3)?;
    println!("array: the last column is {}", last_column.first(3)?.join(", "));
    println!("array: every second number of row 1 is {}", array.index(0, 1)?.slice(0, 0..4, 2)?.first(2)?.join(", "));
    // The `__cuda_array_interface__` for CuPy, Numba and PyTorch:
    let interface = last_column.interface()?;
    println!("array: its interface has type {} and shape {:?}", interface.typestr, interface.shape);
    Ok(())
}
