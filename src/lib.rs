//! Hands GPU memory from one process to another on the same machine without copying it: as a file descriptor over a Unix socket.
//!
//! A producer allocates with CUDA's virtual memory management, exports the allocation as a file descriptor and sends the descriptor
//! over a Unix socket. A consumer imports and maps it. Both then see the same bytes. Memory pools and legacy handles are shared the
//! same way: see [`memory::Shared`] and [`memory::Imported`]. On a machine without a GPU the same code runs on ordinary shared
//! memory, and every output names that backend.
//!
//! Pages: [library](https://docs.rs/crate/vmmfd/latest/source/docs/library.md) ("I want to …", and which call blocks for how long) ·
//! [streams](https://docs.rs/crate/vmmfd/latest/source/docs/streams.md) ·
//! [broker](https://docs.rs/crate/vmmfd/latest/source/docs/broker.md) ·
//! [guarantees](https://docs.rs/crate/vmmfd/latest/source/docs/guarantees.md) ·
//! [security](https://docs.rs/crate/vmmfd/latest/source/docs/SECURITY.md) ·
//! [performance](https://docs.rs/crate/vmmfd/latest/source/docs/performance.md) ·
//! [diagnose](https://docs.rs/crate/vmmfd/latest/source/docs/diagnose.md) ·
//! [all](https://docs.rs/crate/vmmfd/latest/source/docs/index.md).
//! Programs to start from: [`share`](https://docs.rs/crate/vmmfd/latest/source/examples/share.rs),
//! [`receive`](https://docs.rs/crate/vmmfd/latest/source/examples/receive.rs) and
//! [others](https://docs.rs/crate/vmmfd/latest/source/examples/).
//!
//! # Getting started
//!
//! | To … | Use |
//! |---|---|
//! | serve a buffer at a path, or receive one | [`session::handoff`] |
//! | reuse the same buffers for a stream of data | [`session::stream`] |
//! | keep memory under a name after its creator exits | [`broker`] |
//! | load a model's weights into shareable memory | [`weights::Checkpoint`] |
//! | hand memory over through your own channel | [`memory::ArrayHandle`], or [`memory::Allocation`] |
//! | allocate shareable memory | [`memory::Shared`] with a [`memory::Spec`] |
//! | view memory as a typed array | [`memory::Array`] |
//! | read and write memory on the CPU | [`memory::Region`], [`memory::Mirror`] |
//! | launch kernels on memory | `launch`, with the feature of that name |
//! | write a client in another language | the pages [protocol](https://docs.rs/crate/vmmfd/latest/source/docs/protocol.md) and [broker-protocol](https://docs.rs/crate/vmmfd/latest/source/docs/broker-protocol.md) |
//! | handle errors | [`Error`] |
//!
//! # Modules
//!
//! A module uses only the modules in the rows below it.
//!
//! | Layer | Module | Contents |
//! |---|---|---|
//! | service | [`weights`] | reads the tensors of safetensors files into shared memory |
//! | service | [`broker`] | memory under names: a server that needs no driver, and its client |
//! | meeting | [`session`] | the conversation between producer and consumer |
//! | parts | [`memory`], [`channel`] | shared and imported memory; one record with its descriptors |
//! | ground | [`driver`], [`array`](mod@array) | one method per driver call; descriptors of typed arrays |
//! | base | [`error`], [`fork`] | [`Error`]; detection of forks |
//!
//! # Cargo
//!
//! | Feature | Effect |
//! |---|---|
//! | `weights` (default) | adds [`weights`] |
//! | `launch` | adds `vmmfd::launch`: memory as cudarc's `DevicePtr` |
//! | `bindings` | `launch`, with a CUDA version for builds of this library alone |
//!
//! A program that uses `launch` selects the CUDA version of cudarc's bindings, which may differ from the driver's version:
//!
//! ```toml
//! vmmfd = { version = "0.1", features = ["launch"] }
//! cudarc = { version = "0.19", default-features = false, features = ["std", "driver", "dynamic-loading", "cuda-13000"] }
//! ```
//!
//! # Memory
//!
//! Sharing memory without a socket, step by step:
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
//! // Another process receives the descriptor and the size:
//! let fd = allocation.export()?.try_clone_to_owned().expect("a spare descriptor");
//! let imported = Allocation::import(&device, fd, allocation.size())?;
//! let reader = Mapping::new(&imported, Access::ReadOnly)?;
//! let mut bytes = [0; 6];
//! reader.copy_out(0, &mut bytes)?;
//! assert_eq!(&bytes, b"shared");
//! # Ok(())
//! # }
//! ```

// Every build contains the internals that the commands and the tests use.
#![cfg_attr(not(feature = "internals"), allow(dead_code, unreachable_pub, unused_imports))]

#[cfg(all(target_os = "linux", not(target_pointer_width = "64")))]
compile_error!("vmmfd needs a 64-bit target: addresses and sizes of a GPU's memory have 64 bits.");

#[cfg(not(target_os = "linux"))]
compile_error!("vmmfd needs Linux: it passes memory as file descriptors over Unix sockets of type SOCK_SEQPACKET.");

#[cfg(target_os = "linux")]
pub mod array;
#[cfg(target_os = "linux")]
mod base;
#[cfg(target_os = "linux")]
#[doc(hidden)]
pub mod bindings;
#[cfg(target_os = "linux")]
pub mod broker;
#[cfg(target_os = "linux")]
pub mod channel;
#[cfg(target_os = "linux")]
pub mod driver;
#[cfg(target_os = "linux")]
mod encoding;
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
#[cfg(target_os = "linux")]
pub(crate) mod sys;
pub mod topic;
#[cfg(all(target_os = "linux", feature = "weights"))]
pub mod weights;
#[cfg(target_os = "linux")]
#[doc(hidden)]
pub mod wire;

#[cfg(target_os = "linux")]
pub use self::{
    error::{Error, ErrorKind, Result},
    sys::fork,
};

/// Compiles and runs the code blocks of the pages.
#[cfg(all(doctest, feature = "internals"))]
mod pages {
    #[doc = include_str!("../docs/library.md")]
    struct Library;

    #[doc = include_str!("../docs/streams.md")]
    struct Streams;

    #[doc = include_str!("../docs/gpu-order.md")]
    struct GpuOrder;

    #[doc = include_str!("../docs/broker.md")]
    struct Broker;
}

#[cfg(all(doctest, target_os = "linux"))]
mod must_not_compile;
