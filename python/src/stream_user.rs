//! Streams of other libraries that use memory.

#![allow(unsafe_code)]

use std::{thread, time::Duration};

use pyo3::prelude::*;
use vmmfd::{driver::Stream, memory::Device};

use crate::{error::Outcome, signals::SignalPoll};

/// How often a waiting thread looks whether a stream is done.
const INTERVAL: Duration = Duration::from_micros(100);

/// The number of a stream, with DLPack's meaning, and the object that keeps it: see `vmmfd._order.given`.
pub(crate) type Given = (u64, Py<PyAny>);

/// A stream of another library that uses memory.
pub(crate) struct StreamUser {
    stream: Stream,
    /// Keeps the stream. Dropped on any thread: without the GIL, Python releases it later.
    _owner: Py<PyAny>,
}

impl StreamUser {
    /// Finds the stream. Makes driver calls: release the GIL.
    ///
    /// # Errors
    /// [`vmmfd::error::DeviceError::Unsupported`] on the host backend; [`Error::Driver`].
    pub(crate) fn new(device: &Device, (number, owner): Given) -> Outcome<Self> {
        // SAFETY: the owner keeps the stream, or else the caller, who named it by its number.
        let stream = unsafe { device.driver().stream(device.ordinal(), number) }?;
        Ok(Self { stream, _owner: owner })
    }

    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The number, as DLPack and the CUDA array interface have it.
    pub(crate) fn number(&self) -> u64 {
        self.stream.number()
    }

    /// Waits until the stream is done. Inside [`signals::run`], Ctrl-C interrupts it.
    ///
    /// # Errors
    /// [`Error::Driver`]; `Interrupted`.
    pub(crate) fn synchronize(&self) -> Outcome<()> {
        let mut poll = SignalPoll::new();
        while !self.stream.is_idle()? {
            thread::sleep(INTERVAL);
            poll.rest()?;
        }
        Ok(())
    }
}
