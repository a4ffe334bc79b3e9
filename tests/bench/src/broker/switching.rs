//! Replaces a version of an object at the same addresses, compared with the driver's calls.

use std::time::Instant;

use vmmfd::{
    broker::{Client, Get, Object, Prepared},
    driver::{Access, Driver},
    error::Result,
    internals::{Handle, Location},
    memory::Device,
};

use crate::{
    protocol::{Method, not_prepared},
    stats::us,
};
use vmmfd_cli::verbs::HasVerbs;

/// Two objects that take turns at the same addresses.
pub(super) const OBJECTS: [&str; 2] = ["bench/switch-1", "bench/switch-2"];

/// Both objects, mapped by the library and again by the driver's calls.
pub(crate) struct Switching {
    object: Object,
    /// The object that is not mapped.
    next: Option<Prepared>,
    bare: Bare,
}

/// The same switch by the driver's calls.
struct Bare {
    driver: Driver,
    device: Device,
    address: u64,
    size: u64,
    /// The segments of both objects, with their sizes.
    segments: [Vec<(Handle, u64)>; 2],
    /// The index of the mapped object.
    mapped: usize,
}

impl Switching {
    pub(crate) fn open(client: &Client, driver: &Driver, device: &Device) -> Result<Self> {
        let object = client.get(&Get::new(OBJECTS[0]))?.open(driver, None)?;
        let next = Some(object.prepare(client.get(&Get::new(OBJECTS[1]))?)?);
        Ok(Self { object, next, bare: Bare::open(client, driver, device)? })
    }

    /// Switches to the other object, and returns the duration in microseconds.
    pub(crate) fn measure(&mut self, method: Method) -> Result<f64> {
        if method == Method::SwitchBare {
            return self.bare.switch();
        }
        let next = self.next.take().ok_or_else(not_prepared)?;
        let begun = Instant::now();
        let old = self.object.switch(next)?;
        let us = us(begun.elapsed());
        self.next = Some(old);
        Ok(us)
    }

    pub(crate) fn close(self) -> Result<()> {
        self.bare.close()
    }
}

impl Bare {
    fn open(client: &Client, driver: &Driver, device: &Device) -> Result<Self> {
        let (verbs, mut segments) = (driver.verbs(), [Vec::new(), Vec::new()]);
        for (name, segments) in OBJECTS.into_iter().zip(&mut segments) {
            for part in client.get(&Get::new(name))?.into_parts() {
                for (size, fd) in part.into_segments()? {
                    use std::os::fd::AsFd;
                    segments.push((verbs.import(fd.as_fd(), size)?, size));
                }
            }
        }
        let size = segments[0].iter().map(|(_, size)| size).sum();
        let address = verbs.reserve(size, 0)?;
        let bare = Self { driver: driver.clone(), device: device.clone(), address, size, segments, mapped: 0 };
        bare.map(0)?;
        Ok(bare)
    }

    fn map(&self, which: usize) -> Result<()> {
        let (verbs, mut at) = (self.driver.verbs(), self.address);
        for &(handle, size) in &self.segments[which] {
            verbs.map(at, size, 0, handle)?;
            at += size;
        }
        let location = Location::Device(self.device.ordinal());
        verbs.set_access(self.address, self.size, location, Some(Access::ReadOnly))
    }

    fn switch(&mut self) -> Result<f64> {
        let next = 1 - self.mapped;
        let begun = Instant::now();
        self.driver.verbs().unmap(self.address, self.size)?;
        self.map(next)?;
        let us = us(begun.elapsed());
        self.mapped = next;
        Ok(us)
    }

    fn close(self) -> Result<()> {
        let verbs = self.driver.verbs();
        verbs.unmap(self.address, self.size)?;
        verbs.free(self.address, self.size)?;
        self.segments.into_iter().flatten().try_for_each(|(handle, _)| verbs.release(handle))
    }
}
