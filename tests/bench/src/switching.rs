//! Replaces a version of an object at the same addresses, by the library and by the driver's calls.

use std::os::fd::AsFd;

use vmmfd::{
    broker::{Client, Get, Object, Prepared},
    driver::Access,
    error::Result,
    internals::{Handle, Location},
    memory::Device,
};
use vmmfd_cli::verbs::HasVerbs;

use crate::base::{not_prepared, now};

/// Two objects that take turns at the same addresses.
pub(crate) const OBJECTS: [&str; 2] = ["bench/switch-1", "bench/switch-2"];

/// Both objects, mapped by the library and again by the driver's calls.
pub(crate) struct Switching {
    object: Object,
    /// The object that the library has not mapped.
    next: Option<Prepared>,
    device: Device,
    address: u64,
    size: u64,
    /// The segment of each object. The driver's calls have mapped the first.
    segments: [Handle; 2],
}

impl Switching {
    pub(crate) fn open(client: &Client, device: &Device) -> Result<Self> {
        let get = |number: usize| client.get(&Get::new(OBJECTS[number]));
        let object = get(0)?.open(device.driver(), None)?;
        let next = Some(object.prepare(get(1)?)?);
        let verbs = device.verbs();
        let mut size = 0;
        let mut import = |number| {
            let part = get(number)?.into_parts().pop().ok_or_else(not_prepared)?;
            let (length, fd) = part.into_segments()?.pop().ok_or_else(not_prepared)?;
            size = length;
            verbs.import(fd.as_fd(), length)
        };
        let segments = [import(0)?, import(1)?];
        let address = verbs.reserve(size, 0)?;
        let switching = Self { object, next, device: device.clone(), address, size, segments };
        switching.map()?;
        Ok(switching)
    }

    fn map(&self) -> Result<()> {
        let verbs = self.device.verbs();
        verbs.map(self.address, self.size, 0, self.segments[0])?;
        let location = Location::Device(self.device.ordinal());
        verbs.set_access(self.address, self.size, location, Some(Access::ReadOnly))
    }

    /// Switches to the other object, and returns the duration in nanoseconds.
    pub(crate) fn switch(&mut self, bare: bool) -> Result<u64> {
        let next = self.next.take().ok_or_else(not_prepared)?;
        let begun = now();
        if bare {
            self.segments.reverse();
            self.device.verbs().unmap(self.address, self.size)?;
            self.map()?;
            self.next = Some(next);
            return Ok(now() - begun);
        }
        let old = self.object.switch(next)?;
        let took = now() - begun;
        self.next = Some(old);
        Ok(took)
    }

    pub(crate) fn close(self) -> Result<()> {
        let verbs = self.device.verbs();
        verbs.unmap(self.address, self.size)?;
        verbs.free(self.address, self.size)?;
        self.segments.into_iter().try_for_each(|handle| verbs.release(handle))
    }
}
