//! A range of memory as the CPU sees it.

use std::ops::Range;

use super::{Region, check_range, locate, report};
use crate::{
    driver::{Access, PageLocked, Window, code},
    error::{Error, MemoryError, Result},
};

/// A range of memory in host memory: to be read, changed, and written back.
///
/// Memory of a GPU is copied into page-locked memory of this mirror's own. Memory that the CPU reaches itself (the host
/// backend's, and [`super::Placement::Host`]) is not copied: what is written is there at once, and as other processes may
/// write at any time, it is a slice only where it is sealed. So [`Mirror::read`] and [`Mirror::write`] serve everywhere, and
/// [`Mirror::bytes`] and [`Mirror::bytes_mut`] where they can.
///
/// What was changed is written back by [`Mirror::commit`], or when it is dropped; what goes wrong then is only logged.
#[derive(Debug)]
pub struct Mirror<'a> {
    region: &'a dyn Region,
    range: Range<u64>,
    memory: MirrorBacking,
    /// Whether the copy has what is to be written back.
    changed: bool,
}

#[derive(Debug)]
enum MirrorBacking {
    Direct(Window),
    Copy(PageLocked),
}

impl<'a> Mirror<'a> {
    /// A mirror of `length` bytes from `offset` on, as they are now.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`] if there are not as many; [`Error::Driver`].
    ///
    /// Driver calls: `cuMemHostAlloc`, `cuMemcpyDtoH`.
    #[doc(alias("cuMemHostAlloc", "cuMemcpyDtoH"))]
    pub fn of(region: &'a dyn Region, offset: u64, length: u64) -> Result<Self> {
        Self::sized(region, offset, length, length)
    }

    /// A mirror of `length` bytes from `offset` on that are to be written and not read: a copy begins as zeros, all of which are
    /// written back. Of memory that can't be written it is what [`Mirror::of`] is.
    ///
    /// # Errors
    /// As [`Mirror::of`].
    ///
    /// Driver call: `cuMemHostAlloc`.
    #[doc(alias = "cuMemHostAlloc")]
    pub fn to_fill(region: &'a dyn Region, offset: u64, length: u64) -> Result<Self> {
        if region.access() == Access::ReadOnly {
            return Self::of(region, offset, length);
        }
        Self::make(region, offset, length, length)
    }

    /// As [`Mirror::of`], with room for ranges of so many bytes to turn to.
    pub(crate) fn sized(region: &'a dyn Region, offset: u64, length: u64, room: u64) -> Result<Self> {
        let mut mirror = Self::make(region, offset, length, room)?;
        mirror.refresh()?;
        Ok(mirror)
    }

    fn make(region: &'a dyn Region, offset: u64, length: u64, room: u64) -> Result<Self> {
        let (device, address) = (region.device(), locate(region, offset, length)?);
        let window = if length > 0 { device.verbs().window(address, length).map(Some) } else { Ok(None) };
        let memory = match window {
            Ok(Some(window)) => MirrorBacking::Direct(window),
            // Out of the CPU's reach.
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

    /// How many bytes it mirrors.
    pub fn size(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Whether it is the memory itself, and no copy.
    pub fn is_direct(&self) -> bool {
        matches!(self.memory, MirrorBacking::Direct(_))
    }

    /// The bytes: of a copy, or of sealed memory. `None` where another process may write at any time: then [`Mirror::read`].
    pub fn bytes(&self) -> Option<&[u8]> {
        let length = self.length();
        match &self.memory {
            MirrorBacking::Direct(window) => window.slice(),
            MirrorBacking::Copy(copy) => Some(&copy[..length]),
        }
    }

    /// The bytes of a copy, to be changed: they are written back even if they are not. `None` for the memory itself, and for
    /// memory that is read-only.
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

    /// Copies bytes out of it.
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

    /// Copies bytes into it.
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

    /// Reads the memory again, in place of what was changed and not written back.
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

    /// Writes back what was changed: all of the range. It is there for all when this returns.
    ///
    /// # Errors
    /// [`Error::Driver`]; it can be tried again. Driver calls: `cuMemcpyHtoD`, `cuStreamSynchronize`.
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

    /// Writes back what was changed, and mirrors another range from then on: page-locked memory is made once. With `read` as
    /// [`Mirror::of`] does, else as [`Mirror::to_fill`], but a copy keeps what it held.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`] if the range is not inside; those of [`Mirror::of`] and [`Mirror::commit`].
    ///
    /// Driver calls: those of [`Mirror::commit`], `cuMemcpyDtoH`.
    #[doc(alias = "cuMemcpyDtoH")]
    pub fn turn_to(&mut self, offset: u64, length: u64, read: bool) -> Result<()> {
        self.commit()?;
        check_range(offset, length, self.region.size())?;
        match &self.memory {
            MirrorBacking::Copy(copy) if copy.len() as u64 >= length => self.range = offset..offset + length,
            _ => {
                *self = Self::make(self.region, offset, length, length)?;
            }
        }
        if read { self.refresh() } else { Ok(()) }
    }

    fn length(&self) -> usize {
        self.size() as usize
    }
}

impl Drop for Mirror<'_> {
    fn drop(&mut self) {
        report(self.commit(), "what was changed in a mirror can't be written back");
    }
}
