//! CPU access to a range of memory.

use std::ops::Range;

use super::{Region, check_range, locate, report};
use crate::{
    driver::{Access, PageLocked, Window, code},
    error::{Error, MemoryError, Result},
};

/// Gives the CPU access to a range of memory: to read it, change it, and write it back.
///
/// A mirror of GPU memory is a copy in page-locked memory. Memory that the CPU reaches directly (on the host backend, and
/// [`super::Placement::Host`]) is not copied: writes take effect at once. Because other processes may write to it at any time, it is
/// available as a slice only if it is sealed. [`Mirror::read`] and [`Mirror::write`] work for all memory, [`Mirror::bytes`] and
/// [`Mirror::bytes_mut`] only for some.
///
/// [`Mirror::commit`] writes changes back. Dropping the mirror does the same, but only logs an error.
///
/// ```
/// # use vmmfd::{driver::{Backend, Choice, open}, memory::{Device, Mirror, Region, Selector, Shared, Spec}};
/// # let driver = open(Choice::Only(Backend::Host))?.driver;
/// # let device = Device::find(&driver, Selector::default())?;
/// # let memory = Shared::create(&device, Spec::vmm(1000))?;
/// let mut mirror = Mirror::of(&memory, 0, 1000)?;
/// mirror.write(990, b"end")?;
/// mirror.commit()?;  // Copies the changes to a GPU.
/// let mut bytes = [0; 3];
/// memory.copy_out(990, &mut bytes)?;
/// assert_eq!(&bytes, b"end");
/// # Ok::<(), vmmfd::Error>(())
/// ```
#[derive(Debug)]
pub struct Mirror<'a> {
    region: &'a dyn Region,
    range: Range<u64>,
    memory: MirrorBacking,
    /// Whether the copy has changes to write back.
    changed: bool,
}

#[derive(Debug)]
enum MirrorBacking {
    Direct(Window),
    Copy(PageLocked),
}

impl<'a> Mirror<'a> {
    /// Mirrors `length` bytes, starting at `offset`, with their current contents.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`] if the range exceeds the memory; [`Error::Driver`].
    ///
    /// Driver calls: `cuMemHostAlloc`, `cuMemcpyDtoH`.
    #[doc(alias("cuMemHostAlloc", "cuMemcpyDtoH"))]
    pub fn of(region: &'a dyn Region, offset: u64, length: u64) -> Result<Self> {
        Self::sized(region, offset, length, length)
    }

    /// Mirrors `length` bytes, starting at `offset`, to overwrite them. A copy starts as zeros, and the whole range is written back once
    /// it is changed. For read-only memory this is [`Mirror::of`].
    ///
    /// # Errors
    /// The errors of [`Mirror::of`].
    ///
    /// Driver call: `cuMemHostAlloc`.
    #[doc(alias = "cuMemHostAlloc")]
    pub fn to_fill(region: &'a dyn Region, offset: u64, length: u64) -> Result<Self> {
        if region.access() == Access::ReadOnly {
            return Self::of(region, offset, length);
        }
        Self::make(region, offset, length, length)
    }

    /// Like [`Mirror::of`], with a buffer of `room` bytes for later [`Mirror::turn_to`] calls.
    pub(crate) fn sized(region: &'a dyn Region, offset: u64, length: u64, room: u64) -> Result<Self> {
        let mut mirror = Self::make(region, offset, length, room)?;
        mirror.refresh()?;
        Ok(mirror)
    }

    fn make(region: &'a dyn Region, offset: u64, length: u64, room: u64) -> Result<Self> {
        let device = region.device();
        let address = locate(region, offset, length)?;
        let window = if length > 0 { device.verbs().window(address, length).map(Some) } else { Ok(None) };
        let memory = match window {
            Ok(Some(window)) => MirrorBacking::Direct(window),
            // The CPU can't reach the memory.
            Err(Error::Driver { code: code::INVALID_VALUE, .. }) if !device.is_host() => Self::copy(region, room)?,
            Ok(None) => Self::copy(region, room)?,
            Err(error) => return Err(error),
        };
        Ok(Self { region, range: offset..offset + length, memory, changed: false })
    }

    fn copy(region: &dyn Region, size: u64) -> Result<MirrorBacking> {
        let device = region.device();
        device.verbs().page_lock(device.ordinal(), size.max(1)).map(MirrorBacking::Copy)
    }

    /// The number of mirrored bytes.
    pub fn size(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Whether the mirror accesses the memory itself instead of a copy.
    pub fn is_direct(&self) -> bool {
        matches!(self.memory, MirrorBacking::Direct(_))
    }

    /// The bytes of a copy or of sealed memory. `None` if another process may write to the bytes at any time: use [`Mirror::read`].
    pub fn bytes(&self) -> Option<&[u8]> {
        let length = self.length();
        match &self.memory {
            MirrorBacking::Direct(window) => window.slice(),
            MirrorBacking::Copy(copy) => Some(&copy[..length]),
        }
    }

    /// The bytes of a copy, for changes. After this call they are written back even if nothing changed. `None` if the mirror is direct
    /// or the memory is read-only.
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        let length = self.length();
        match &mut self.memory {
            MirrorBacking::Copy(copy) if self.region.access() == Access::ReadWrite => {
                self.changed = true;
                Some(&mut copy[..length])
            }
            _ => None,
        }
    }

    /// Copies bytes out of the mirror.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`].
    pub fn read(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        check_range(offset, to.len() as u64, self.size())?;
        match &self.memory {
            MirrorBacking::Direct(window) => window.read(offset, to),
            MirrorBacking::Copy(copy) => {
                to.copy_from_slice(&copy[offset as usize..][..to.len()]);
                Ok(())
            }
        }
    }

    /// Copies bytes into the mirror.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`]; [`MemoryError::ReadOnly`].
    pub fn write(&mut self, offset: u64, from: &[u8]) -> Result<()> {
        check_range(offset, from.len() as u64, self.size())?;
        if self.region.access() == Access::ReadOnly {
            return Err(Error::Memory(MemoryError::ReadOnly));
        }
        match &mut self.memory {
            MirrorBacking::Direct(window) => window.write(offset, from),
            MirrorBacking::Copy(copy) => {
                copy[offset as usize..][..from.len()].copy_from_slice(from);
                self.changed = true;
                Ok(())
            }
        }
    }

    /// Reads the memory again and discards changes that are not written back.
    ///
    /// # Errors
    /// [`Error::Driver`]. Driver call: `cuMemcpyDtoH`.
    #[doc(alias = "cuMemcpyDtoH")]
    pub fn refresh(&mut self) -> Result<()> {
        let length = self.length();
        if let MirrorBacking::Copy(copy) = &mut self.memory {
            self.region.copy_out(self.range.start, &mut copy[..length])?;
        }
        self.changed = false;
        Ok(())
    }

    /// Writes the whole range back if it was changed. When this returns, other processes see the changes.
    ///
    /// # Errors
    /// [`Error::Driver`], after which the call can be repeated. Driver calls: `cuMemcpyHtoD`, `cuStreamSynchronize`.
    #[doc(alias("cuMemcpyHtoD", "cuStreamSynchronize"))]
    pub fn commit(&mut self) -> Result<()> {
        if let MirrorBacking::Copy(copy) = &self.memory
            && self.changed
        {
            self.region.copy_in(self.range.start, &copy[..self.length()])?;
            self.changed = false;
        }
        Ok(())
    }

    /// Writes changes back, and then mirrors another range, reusing the page-locked memory if it is large enough.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`] if the range exceeds the memory; the errors of [`Mirror::of`] and [`Mirror::commit`].
    ///
    /// Driver calls: those of [`Mirror::commit`], `cuMemcpyDtoH`.
    #[doc(alias = "cuMemcpyDtoH")]
    pub fn turn_to(&mut self, offset: u64, length: u64) -> Result<()> {
        self.turn_to_unread(offset, length)?;
        self.refresh()
    }

    /// As [`Mirror::turn_to`], without reading the range: a copy keeps its old bytes, to be overwritten.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`] if the range exceeds the memory; the errors of [`Mirror::commit`].
    pub fn turn_to_unread(&mut self, offset: u64, length: u64) -> Result<()> {
        self.commit()?;
        check_range(offset, length, self.region.size())?;
        match &self.memory {
            MirrorBacking::Copy(copy) if copy.len() as u64 >= length => self.range = offset..offset + length,
            _ => *self = Self::make(self.region, offset, length, length)?,
        }
        Ok(())
    }

    fn length(&self) -> usize {
        self.size() as usize
    }
}

impl Drop for Mirror<'_> {
    fn drop(&mut self) {
        report(self.commit(), "the changes in a mirror can't be written back");
    }
}
