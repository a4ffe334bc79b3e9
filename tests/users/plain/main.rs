//! Shares memory with itself, by a descriptor.

#![deny(warnings)]

use vmmfd::{
    driver::{open, Access, Backend, Choice},
    memory::{Allocation, Device, Mapping, Region, Selector},
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let driver = open(Choice::Only(Backend::Cuda))?.driver;
    let device = Device::find(&driver, Selector::default())?;
    let allocation = Allocation::create(&device, 4096)?;
    Mapping::new(&allocation, Access::ReadWrite)?.copy_in(0, b"shared")?;

    let fd = allocation.export()?.try_clone_to_owned()?;
    let imported = Allocation::import(&device, fd, allocation.size())?;
    let mut bytes = [0; 6];
    Mapping::new(&imported, Access::ReadOnly)?.copy_out(0, &mut bytes)?;
    assert_eq!(&bytes, b"shared");
    Ok(())
}
