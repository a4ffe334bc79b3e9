//! The whole idea in one file, with only the driver's own calls, without this library. Read this first.
//!
//! ```sh
//! cargo run --example bare      # the producer, which starts itself a second time as the consumer
//! ```
//!
//! Two processes see the same bytes of one GPU. The producer
//!
//! 1. allocates physical memory that can be exported (`cuMemCreate`), reserves a range of addresses (`cuMemAddressReserve`), maps
//!    the memory there (`cuMemMap`) and grants the GPU access to it (`cuMemSetAccess`);
//! 2. writes, and waits until the GPU's work is done (`cuCtxSynchronize`);
//! 3. exports the allocation as a file descriptor (`cuMemExportToShareableHandle`) and sends it over a Unix socket (`SCM_RIGHTS`),
//!    with the size, which the descriptor does not carry.
//!
//! The consumer imports it (`cuMemImportFromShareableHandle`), reserves, maps and sets access. Nothing is copied between the two.
//!
//! The library adds the parts that are missing here: it checks the device's UUID, the peer's user and the size; every wait has a deadline;
//! and a failure at any step releases the results of earlier steps.

#![allow(unsafe_code, reason = "the driver's calls are unsafe")]

use std::{
    env,
    error::Error,
    io::{self, Read, Write},
    mem,
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    process::Command,
    ptr,
};

use cudarc::driver::sys::{
    self, CUdevice, CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags,
    CUmemAllocationHandleType, CUmemAllocationProp, CUmemAllocationType, CUmemGenericAllocationHandle, CUmemLocation,
    CUmemLocationType, CUresult,
};
use sendfd::{RecvWithFd, SendWithFd};

type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

const DESCRIPTOR: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
const QUESTION: &[u8; 23] = b"written by the producer";
const ANSWER: &[u8; 23] = b"written by the consumer";

/// Makes a driver call. Any result but success is an error that names the call.
macro_rules! cu {
    ($call:ident($($argument:expr),*)) => {
        // SAFETY: the pointers point to variables that outlive the call; handles and addresses come from earlier calls.
        match unsafe { sys::$call($($argument),*) } {
            CUresult::CUDA_SUCCESS => {}
            error => return Err(format!("{} failed: {error:?}", stringify!($call)).into()),
        }
    };
}

fn main() -> Result {
    if env::args().nth(1).is_some() { consume() } else { produce() }
}

fn produce() -> Result {
    let device = start()?;
    let wanted = CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: DESCRIPTOR,
        location: CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device },
        win32HandleMetaData: ptr::null_mut(),
        // SAFETY: all fields are integers.
        allocFlags: unsafe { mem::zeroed() },
    };
    // Sizes are multiples of the granularity, usually 2 MiB.
    let minimum = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    let mut size = 0;
    let mut handle = 0;
    let mut fd = -1;
    cu!(cuMemGetAllocationGranularity(&mut size, &wanted, minimum));
    cu!(cuMemCreate(&mut handle, size, &wanted, 0));
    let address = map(handle, size, device)?;
    cu!(cuMemcpyHtoD_v2(address, QUESTION.as_ptr().cast(), QUESTION.len()));
    // The GPU's work on the memory must be done before another process is notified.
    cu!(cuCtxSynchronize());
    cu!(cuMemExportToShareableHandle((&raw mut fd).cast(), handle, DESCRIPTOR, 0));
    // SAFETY: the call above created it, and nothing else closes it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };

    // The consumer is this program again, with the other socket of the pair as its standard input.
    let (mut socket, theirs) = UnixStream::pair()?;
    let mut consumer = Command::new(env::current_exe()?).arg("consume").stdin(OwnedFd::from(theirs)).spawn()?;
    socket.send_with_fd(&size.to_le_bytes(), &[fd.as_raw_fd()])?;
    // One byte reports success. If the child fails, read returns 0 bytes, an error.
    socket.read_exact(&mut [0])?;
    consumer.wait()?;
    let mut found = [0; ANSWER.len()];
    cu!(cuMemcpyDtoH_v2(found.as_mut_ptr().cast(), address, found.len()));
    println!("producer: found `{}`", found.escape_ascii());
    unmap(handle, address, size)?;
    drop(fd); // The last descriptor, handle or mapping in any process keeps the memory.
    if &found == ANSWER { Ok(()) } else { Err("that is not what the consumer wrote".into()) }
}

fn consume() -> Result {
    let device = start()?;
    let mut socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let (mut size, mut fds) = ([0; 8], [-1]);
    assert_eq!(socket.recv_with_fd(&mut size, &mut fds)?, (8, 1), "a size and a descriptor");
    // SAFETY: the kernel just created it for this process.
    let fd = unsafe { OwnedFd::from_raw_fd(fds[0]) };
    let (size, mut handle) = (usize::from_le_bytes(size), 0);
    cu!(cuMemImportFromShareableHandle(&mut handle, ptr::without_provenance_mut(fd.as_raw_fd() as usize), DESCRIPTOR));
    drop(fd); // The driver does not take ownership.
    let address = map(handle, size, device)?;
    let mut found = [0; QUESTION.len()];
    cu!(cuMemcpyDtoH_v2(found.as_mut_ptr().cast(), address, found.len()));
    println!("consumer: found `{}` in {size} bytes", found.escape_ascii());
    cu!(cuMemcpyHtoD_v2(address, ANSWER.as_ptr().cast(), ANSWER.len()));
    cu!(cuCtxSynchronize());
    unmap(handle, address, size)?;
    Ok(socket.write_all(&[1])?)
}

/// Initialises the driver and the first device's primary context. Only the copies need a context.
fn start() -> Result<CUdevice> {
    let (mut device, mut context) = (0, ptr::null_mut());
    cu!(cuInit(0));
    cu!(cuDeviceGet(&mut device, 0));
    cu!(cuDevicePrimaryCtxRetain(&mut context, device));
    cu!(cuCtxSetCurrent(context));
    Ok(device)
}

/// Maps an allocation at a new address range, readable and writable by the device.
fn map(handle: CUmemGenericAllocationHandle, size: usize, device: CUdevice) -> Result<CUdeviceptr> {
    let location = CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device };
    let access = CUmemAccessDesc { location, flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
    let mut address = 0;
    cu!(cuMemAddressReserve(&mut address, size, 0, 0, 0));
    cu!(cuMemMap(address, size, 0, handle, 0));
    cu!(cuMemSetAccess(address, size, &access, 1));
    Ok(address)
}

/// Releases the mapping, the addresses and the handle.
fn unmap(handle: CUmemGenericAllocationHandle, address: CUdeviceptr, size: usize) -> Result {
    cu!(cuMemUnmap(address, size));
    cu!(cuMemAddressFree(address, size));
    cu!(cuMemRelease(handle));
    Ok(())
}
