//! The side that owns the memory and shares it.

mod desk;

use std::{os::fd::AsRawFd, thread, time::Instant};

use self::desk::Desk;
use super::{Event, Observer, Terms, activate};
use crate::{
    channel::{Cancel, Listener, Peer},
    driver::Access,
    error::{Error, Result},
    memory::{Allocation, Device, Mapping},
    pattern::{self, Pattern},
    wire::{DEFAULT_OBJECT, ELEMENT_U32, MECHANISM_VMM, Offer, OfferedDevice, Outcome},
};

/// A buffer to share.
#[derive(Debug)]
pub struct Buffer {
    mapping: Mapping,
    size: u64,
    salt: u32,
    corrupt: bool,
}

impl Buffer {
    /// Allocates, maps and exports a buffer for `size` bytes of the pattern of a salt. [`serve`] fills it.
    ///
    /// With `corrupt` one byte of it is flipped after each fill, so that every check of it must fail.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device can't share; those of [`Allocation::create`], [`Mapping::new`] and
    /// [`Allocation::export`].
    pub fn create(
        device: &Device,
        size: u64,
        salt: u32,
        corrupt: bool,
        cancel: &Cancel,
        observer: Observer<'_>,
    ) -> Result<Self> {
        device.require_sharing()?;
        activate(device, &mut || cancel.check(), observer)?;
        let begun = Instant::now();
        let allocation = Allocation::create(device, size)?;
        observer(Event::Created { size, mapped_size: allocation.size(), took: begun.elapsed() });
        let begun = Instant::now();
        let mapping = Mapping::new(&allocation, Access::ReadWrite)?;
        let (address, access) = (mapping.address(), mapping.access());
        observer(Event::Mapped { address, access, took: begun.elapsed() });
        let begun = Instant::now();
        let fd = allocation.export()?.as_raw_fd();
        observer(Event::Exported { fd, took: begun.elapsed() });
        Ok(Self { mapping, size, salt, corrupt })
    }

    /// Where it is mapped in this process.
    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    fn fill(&self, progress: &mut dyn FnMut() -> Result<()>, observer: Observer<'_>) -> Result<()> {
        let begun = Instant::now();
        pattern::fill(&self.mapping, self.size, Pattern::new(self.salt), &mut |_| progress())?;
        if self.corrupt {
            let (at, mut byte) = (self.size / 2, [0]);
            self.mapping.copy_out(at, &mut byte)?;
            self.mapping.copy_in(at, &[byte[0] ^ 0x01])?;
            self.mapping.synchronize()?;
        }
        observer(Event::Filled { words: pattern::words(self.size), salt: self.salt, took: begun.elapsed() });
        Ok(())
    }

    fn offer(&self, access: Access, reply_salt: Option<u32>) -> Offer {
        let device = self.mapping.device();
        Offer {
            object: DEFAULT_OBJECT.to_owned(),
            mechanism: MECHANISM_VMM.to_owned(),
            device: OfferedDevice { uuid: device.uuid(), name: device.name().to_owned() },
            size: self.size,
            mapped_size: self.mapping.size(),
            segments: 1,
            element_type: ELEMENT_U32.to_owned(),
            access,
            salt: self.salt,
            reply_salt,
        }
    }
}

/// How a buffer is served.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// How many consumers to serve, or 0 for any number until it is cancelled.
    pub consumers: u64,
    /// Whether each consumer has the buffer to itself and writes a reply into it.
    pub round_trip: bool,
}

/// A consumer that was served, or refused.
#[derive(Debug)]
pub struct Served {
    /// Who it was.
    pub peer: Peer,
    /// What both sides together found, if it came to that: with the figures of the side that found a mismatch, if one did.
    pub found: Option<Outcome>,
    /// What went wrong with the conversation, before or after.
    pub error: Option<Error>,
}

impl Served {
    /// Whether the data was found wrong: that outweighs how the conversation ended.
    pub fn mismatched(&self) -> bool {
        self.found.as_ref().is_some_and(|found| !found.verified)
    }
}

/// Serves a buffer to consumers that connect to a listener, at the same time if they come at the same time, and returns
/// when as many were served as planned. `served` gets one entry for each of them, also if this fails; of a service without
/// end the last thousand, those that failed before the others.
///
/// Whoever sends a well-formed request is a consumer and counts, also when refused. Anything less is a stranger, who delays
/// no consumer and changes nothing. The listener's file is removed before the last conversation has ended.
///
/// # Errors
/// [`Error::NoConsumer`] if none is connected and none comes for as long as the timeout; [`Error::Interrupted`] if it was
/// cancelled, also where serving has no other end; what filling the buffer fails with; [`Error::System`]. What goes wrong
/// with a consumer is in `served`.
pub fn serve(
    listener: Listener,
    buffer: &Buffer,
    plan: Plan,
    terms: &Terms,
    observer: Observer<'_>,
    served: &mut Vec<Served>,
) -> Result<()> {
    let desk = Desk::new(buffer, plan, terms, observer)?;
    observer(Event::Listening { path: listener.path(), consumers: plan.consumers });
    let result = thread::scope(|scope| {
        let result = desk.receive_all(scope, &listener);
        // Nobody else can come, and whoever has asked for nothing yet need not wait for an answer.
        drop(listener);
        desk.end_all(&result);
        result
    });
    desk.close(result, served)
}
