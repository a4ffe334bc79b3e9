//! What safe code must not be able to do: each of these compiled once, and corrupted memory.

/// Unmapping under an owner: the verbs are not public.
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
/// The same without that line:
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

/// A region that names memory which it does not own: the trait is sealed.
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
struct Foreign;

/// Memory that goes while a mirror of it is open: the mirror borrows it.
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
struct MirrorOfNothing;

/// Memory that is exchanged while a mirror of it is open: the mirror borrows the object.
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
/// The same with the mirror dropped before:
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
struct MirrorOfAnother;

/// Values of a type from bytes that may be none of it: `clone_dtoh` would make a `Vec<bool>` of what a peer wrote.
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
/// Nor are bytes shown to others that a value does not initialise, as between these two:
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
/// The same of words:
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
struct NoPlainData;
