//! Launches a kernel with cudarc on memory that another process can map.
//!
//! ```sh
//! cargo run --example launch --features launch     # needs a GPU
//! ```

#![allow(unsafe_code, reason = "launching a kernel")]

use std::{error::Error, ffi::CStr};

use cudarc::driver::{CudaContext, result};
use vmmfd::{
    driver::{Access, Backend, Choice, open},
    launch::{View, ViewMut},
    memory::{Allocation, Device, Mapping, Region, Selector},
};

/// Adds a value to each of `count` words. A program with a CUDA toolkit would compile its kernels to this form.
const KERNEL: &CStr = c".version 6.0
.target sm_50
.address_size 64
.visible .entry add(.param .u64 to, .param .u32 count, .param .u32 value)
{
    .reg .pred %outside;
    .reg .u32 %index, %block, %width, %count, %value, %word;
    .reg .u64 %at;
    mov.u32 %index, %tid.x;
    mov.u32 %block, %ctaid.x;
    mov.u32 %width, %ntid.x;
    mad.lo.u32 %index, %block, %width, %index;
    ld.param.u32 %count, [count];
    setp.ge.u32 %outside, %index, %count;
    @%outside ret;
    ld.param.u64 %at, [to];
    mad.wide.u32 %at, %index, 4, %at;
    ld.param.u32 %value, [value];
    ld.u32 %word, [%at];
    add.u32 %word, %word, %value;
    st.u32 [%at], %word;
    ret;
}
";

fn main() -> Result<(), Box<dyn Error>> {
    // Without a driver library, cudarc panics: this returns an error.
    let driver = open(Choice::Only(Backend::Cuda))?.driver;
    let device = Device::find(&driver, Selector::default())?;
    let allocation = Allocation::create(&device, 4096)?;
    let memory = Mapping::new(&allocation, Access::ReadWrite)?;

    let context = CudaContext::new(device.ordinal() as usize)?;
    let stream = context.default_stream();
    // SAFETY: the text is a complete module that contains `add`. (With cudarc's feature `nvrtc`: `context.load_module`.)
    let add =
        unsafe { result::module::get_function(result::module::load_data(KERNEL.as_ptr().cast())?, c"add".into())? };
    let words: Vec<u32> = (0..1024).collect();
    let mut view = ViewMut::<u32>::new(&memory, &stream, words.len())?;
    stream.memcpy_htod(&words, &mut view)?;
    let mut address = view.address();
    let mut count = words.len() as u32;
    let mut value = 1000_u32;
    let mut arguments = [(&raw mut address).cast(), (&raw mut count).cast(), (&raw mut value).cast()];
    // SAFETY: the arguments match the kernel's parameters, and it accesses only the `count` words at `address`.
    unsafe { result::launch_kernel(add, (4, 1, 1), (256, 1, 1), 0, stream.cu_stream(), &mut arguments)? };
    // cudarc does not track memory that a kernel gets by address: wait before notifying another process.
    memory.synchronize()?;

    // Another mapping of the same memory, as in a process that received the descriptor.
    let fd = allocation.export()?.try_clone_to_owned()?;
    let imported = Mapping::new(&Allocation::import(&device, fd, allocation.size())?, Access::ReadOnly)?;
    let mut read = vec![0; words.len()];
    stream.memcpy_dtoh(&View::<u32>::new(&imported, &stream, words.len())?, &mut read)?;
    stream.synchronize()?;
    println!("launch: {} words, from {} to {}", read.len(), read[0], read[words.len() - 1]);
    if read.iter().zip(&words).all(|(found, word)| *found == word + value) { Ok(()) } else { Err("wrong words".into()) }
}
