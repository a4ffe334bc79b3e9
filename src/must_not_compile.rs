//! Code that must not compile: each example compiled in an earlier version and corrupted memory.

/// Unmapping memory that has an owner: the verbs are not public.
///
/// ```compile_fail,E0599
/// use vmmfd::{driver::*, memory::*};
/// # fn main() -> vmmfd::Result<()> {
/// let device = Device::find(&open(Choice::Only(Backend::Host))?.driver, Selector::default())?;
/// let mapping = Mapping::new(&Allocation::create(&device, 1)?, Access::ReadWrite)?;
/// mapping.device().driver().unmap(mapping.address(), mapping.size())?;
/// # Ok(())
/// # }
/// ```
///
/// Without that line it compiles:
///
/// ```
/// use vmmfd::{driver::*, memory::*};
/// # fn main() -> vmmfd::Result<()> {
/// let device = Device::find(&open(Choice::Only(Backend::Host))?.driver, Selector::default())?;
/// let mapping = Mapping::new(&Allocation::create(&device, 1)?, Access::ReadWrite)?;
/// assert!(mapping.device().driver().version()? == 0 && mapping.size() > 0);
/// # Ok(())
/// # }
/// ```
struct Verbs;

/// A region over memory that it does not own: the trait is sealed.
///
/// ```compile_fail,E0277
/// use vmmfd::{driver::Access, memory::{Device, Region}};
///
/// #[derive(Debug)]
/// struct Anything(Device);
///
/// impl Region for Anything {
///     fn device(&self) -> &Device { &self.0 }
///     fn address(&self) -> u64 { 0x1000 }
///     fn size(&self) -> u64 { u64::MAX }
///     fn access(&self) -> Access { Access::ReadWrite }
/// }
/// ```
struct ForeignRegion;

/// Dropping memory that has an open mirror: the mirror borrows it.
///
/// ```compile_fail,E0505
/// use vmmfd::{driver::*, memory::*};
/// # fn main() -> vmmfd::Result<()> {
/// let device = Device::find(&open(Choice::Only(Backend::Host))?.driver, Selector::default())?;
/// let mapping = Mapping::new(&Allocation::create(&device, 1)?, Access::ReadWrite)?;
/// let mirror = Mirror::of(&mapping, 0, 1)?;
/// drop(mapping);
/// mirror.read(0, &mut [0])?;
/// # Ok(())
/// # }
/// ```
struct MirrorOfDropped;

/// Replacing memory that has an open mirror: the mirror borrows the object.
///
/// ```compile_fail,E0502
/// use vmmfd::{broker::{Object, Prepared}, memory::Mirror};
///
/// fn exchange(object: &mut Object, next: Prepared) -> vmmfd::Result<()> {
///     let mirror = Mirror::of(&**object.parts()[0].memory()?, 0, 1)?;
///     object.switch(next)?;
///     mirror.read(0, &mut [0])
/// }
/// ```
///
/// It compiles if the mirror is dropped first:
///
/// ```
/// use vmmfd::{broker::{Object, Prepared}, memory::Mirror};
///
/// fn exchange(object: &mut Object, next: Prepared) -> vmmfd::Result<()> {
///     let mirror = Mirror::of(&**object.parts()[0].memory()?, 0, 1)?;
///     mirror.read(0, &mut [0])?;
///     drop(mirror);
///     object.switch(next).map(drop)
/// }
/// ```
struct MirrorOfReplaced;

/// Values from bytes that may be invalid for their type: `clone_dtoh` would make a `Vec<bool>` of a peer's bytes.
///
/// ```compile_fail,E0277
/// use cudarc::driver::CudaContext;
/// use vmmfd::{driver::*, launch::View, memory::*};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = Device::find(&open(Choice::Only(Backend::Cuda))?.driver, Selector::default())?;
/// let mapping = Mapping::new(&Allocation::create(&device, 1)?, Access::ReadWrite)?;
/// let stream = CudaContext::new(0)?.default_stream();
/// let truths: Vec<bool> = stream.clone_dtoh(&View::<bool>::new(&mapping, &stream, 4)?)?;
/// # Ok(())
/// # }
/// ```
///
/// Writing uninitialised bytes to memory that other processes read, such as the padding between these fields:
///
/// ```compile_fail,E0277
/// use cudarc::driver::{CudaContext, DeviceRepr};
/// use vmmfd::{driver::*, launch::ViewMut, memory::*};
///
/// #[repr(C)]
/// #[derive(Clone, Copy)]
/// struct Padded(u8, u32);
/// # unsafe impl DeviceRepr for Padded {}
/// # unsafe impl bytemuck::Zeroable for Padded {}
/// # unsafe impl bytemuck::AnyBitPattern for Padded {}
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = Device::find(&open(Choice::Only(Backend::Cuda))?.driver, Selector::default())?;
/// let mapping = Mapping::new(&Allocation::create(&device, 1)?, Access::ReadWrite)?;
/// let stream = CudaContext::new(0)?.default_stream();
/// stream.memcpy_htod(&[Padded(1, 2)], &mut ViewMut::new(&mapping, &stream, 1)?)?;
/// # Ok(())
/// # }
/// ```
///
/// With integers it compiles:
///
/// ```no_run
/// use cudarc::driver::CudaContext;
/// use vmmfd::{driver::*, launch::{View, ViewMut}, memory::*};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = Device::find(&open(Choice::Only(Backend::Cuda))?.driver, Selector::default())?;
/// let mapping = Mapping::new(&Allocation::create(&device, 1)?, Access::ReadWrite)?;
/// let stream = CudaContext::new(0)?.default_stream();
/// stream.memcpy_htod(&[1, 2], &mut ViewMut::<u32>::new(&mapping, &stream, 2)?)?;
/// let words: Vec<u32> = stream.clone_dtoh(&View::<u32>::new(&mapping, &stream, 2)?)?;
/// # Ok(())
/// # }
/// ```
#[cfg(feature = "launch")]
struct InvalidBytes;
