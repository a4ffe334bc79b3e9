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
