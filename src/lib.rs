//! Hands GPU memory from one process to another.
//!
//! A producer allocates with CUDA's virtual memory management, exports the allocation as a file descriptor and sends it
//! over a Unix socket; a consumer imports and maps it. Both then see the same bytes, with no copy. Memory pools and legacy
//! handles go the same way: see [`memory::Shared`] and [`memory::Imported`]. Where there is no GPU the same runs on ordinary
//! shared memory, which never passes for a GPU.
//!
//! | Floor | Module | What it does |
//! |---|---|---|
//! | work | [`tools::doctor`], [`tools::bench`] | whether a machine can share memory, found out by doing it; and what that costs |
//! | meeting | [`session`] | the conversation between producer and consumer |
//! | data | [`tools::check`] | what is written and how it is checked: a pattern, or a file's bytes |
//! | parts | [`memory`], [`channel`] | memory that is shared and memory that was given; one record and its descriptors |
//! | ground | [`driver`], [`wire`], [`array`](mod@array) | a verb for each driver call; messages as bytes; typed arrays, described |
//! | base | [`error`] | [`Error`] |
//!
//! # The library alone
//!
//! The feature `tools`, on by default, is what the commands are made of. A program takes the library without it, and names the
//! version of CUDA whose bindings cudarc is to have, which need not be the driver's:
//!
//! ```toml
//! vmmfd = { version = "0.1", default-features = false }
//! cudarc = { version = "0.19", default-features = false, features = ["std", "driver", "dynamic-loading", "cuda-13000"] }
//! ```
//!
//! Without a version cudarc's build stops with `Must specify one of the following features: [cuda-version-from-build-system,
//! cuda-13040, ...]`. The feature `launch` adds `vmmfd::launch`: memory as cudarc's `DevicePtr`.
//!
//! # Memory
//!
//! Memory without any socket, as it is owned here:
//!
//! ```
//! use vmmfd::{
//!     driver::{Access, Backend, Choice, open},
//!     memory::{Allocation, Device, Mapping, Region, Selector},
//! };
//!
//! # fn main() -> vmmfd::Result<()> {
//! let driver = open(Choice::Only(Backend::Host))?.driver;
//! let device = Device::find(&driver, Selector::default())?;
//! let allocation = Allocation::create(&device, 1000)?;
//! let writer = Mapping::new(&allocation, Access::ReadWrite)?;
//! writer.copy_in(0, b"shared")?;
//!
//! // What another process does with the descriptor and the size that it is sent:
//! let fd = allocation.export()?.try_clone_to_owned().expect("a spare descriptor");
//! let imported = Allocation::import(&device, fd, allocation.size())?;
//! let reader = Mapping::new(&imported, Access::ReadOnly)?;
//! let mut bytes = [0; 6];
//! reader.copy_out(0, &mut bytes)?;
//! assert_eq!(&bytes, b"shared");
//! # Ok(())
//! # }
//! ```

#[cfg(all(target_os = "linux", not(target_pointer_width = "64")))]
compile_error!("vmmfd needs a 64-bit target: addresses and sizes of a GPU's memory have 64 bits.");

#[cfg(not(target_os = "linux"))]
compile_error!("vmmfd needs Linux: it passes memory as file descriptors over Unix sockets of type SOCK_SEQPACKET.");

#[cfg(target_os = "linux")]
pub mod array;
#[cfg(target_os = "linux")]
pub mod channel;
#[cfg(target_os = "linux")]
pub mod driver;
#[cfg(target_os = "linux")]
pub mod error;
#[cfg(all(target_os = "linux", feature = "internals"))]
#[doc(hidden)]
pub mod internals;
#[cfg(all(target_os = "linux", feature = "launch"))]
pub mod launch;
#[cfg(target_os = "linux")]
pub mod memory;
#[cfg(target_os = "linux")]
pub mod session;
#[cfg(all(target_os = "linux", feature = "tools"))]
pub mod tools;
#[cfg(target_os = "linux")]
pub mod wire;

#[cfg(target_os = "linux")]
pub use error::{Error, ErrorKind, Result};

/// The examples of the README, so that they are compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadMe;

#[cfg(all(doctest, target_os = "linux"))]
mod must_not_compile;
