//! Shares memory with itself, by a descriptor, and writes to it through the user's own cudarc.

#![deny(warnings)]

use cudarc::driver::{sys, CudaContext};
use vmmfd::{
    driver::{open, Access, Backend, Choice},
    launch::{View, ViewMut},
    memory::{Allocation, Device, Mapping, Region, Selector},
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let driver = open(Choice::Only(Backend::Cuda))?.driver;
    let device = Device::find(&driver, Selector::default())?;
    let allocation = Allocation::create(&device, 4096)?;
    let writer = Mapping::new(&allocation, Access::ReadWrite)?;

    let context = CudaContext::new(device.ordinal() as usize)?;
    let stream = context.default_stream();
    let words: Vec<u32> = (0..1024).collect();
    let mut view = ViewMut::<u32>::new(&writer, &stream, words.len())?;
    stream.memset_zeros(&mut view)?;
    stream.memcpy_htod(&words[1..], &mut view)?;

    let fd = allocation.export()?.try_clone_to_owned()?;
    let imported = Allocation::import(&device, fd, allocation.size())?;
    let reader = Mapping::new(&imported, Access::ReadOnly)?;
    let view = View::<u32>::new(&reader, &stream, words.len())?;
    let mut read = vec![u32::MAX; words.len()];
    stream.memcpy_dtoh(&view, &mut read)?;
    stream.synchronize()?;
    let expected: Vec<u32> = words[1..].iter().copied().chain([0]).collect();
    assert_eq!(read, expected);
    let mut bytes = [0; 8];
    reader.copy_out(0, &mut bytes)?;
    assert_eq!(bytes, [1, 0, 0, 0, 2, 0, 0, 0]);
    println!("bindings of CUDA {} on {}", sys::CUDA_VERSION, device.name());
    Ok(())
}
