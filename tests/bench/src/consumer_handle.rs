//! The producer's side of a consumer process.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use vmmfd::{
    driver::Access,
    error::{ProtocolError, Result},
    memory::Shared,
    session::stream::{BufferId, Publisher},
};

use super::{
    process::BenchProcess,
    protocol::{ConsumerRequest, ConsumerResponse},
    stats::now,
};

/// The time for a consumer to fall asleep on its socket, as between two real handoffs.
const ASLEEP: Duration = Duration::from_micros(30);

/// A consumer process and the session to it.
pub(super) struct ConsumerHandle {
    pub(super) process: BenchProcess,
    pub(super) publisher: Option<Publisher>,
    /// The buffer that the consumer holds.
    pub(super) held: Option<BufferId>,
    /// The buffer of the current handoff, which is withdrawn afterwards.
    pub(super) fresh: Option<BufferId>,
}

impl ConsumerHandle {
    pub(super) fn call(&self, request: &ConsumerRequest) -> Result<()> {
        self.process.send(request)?;
        self.ready()
    }

    pub(super) fn ready(&self) -> Result<()> {
        match self.process.receive()? {
            ConsumerResponse::Ready => Ok(()),
            ConsumerResponse::Usable { .. } | ConsumerResponse::Got { .. } => {
                Err(ProtocolError::Unexpected { got: "usable", want: "ready" }.into())
            }
            ConsumerResponse::Failed(failure) => Err(failure.of(self.process.name())),
        }
    }

    /// Waits until the consumer has the memory, and returns the time.
    pub(super) fn usable(&self) -> Result<u64> {
        match self.process.receive()? {
            ConsumerResponse::Usable { at } => Ok(at),
            ConsumerResponse::Ready | ConsumerResponse::Got { .. } => {
                Err(ProtocolError::Unexpected { got: "ready", want: "usable" }.into())
            }
            ConsumerResponse::Failed(failure) => Err(failure.of(self.process.name())),
        }
    }

    pub(super) fn publisher(&mut self) -> Result<&mut Publisher> {
        self.publisher.as_mut().ok_or(ProtocolError::Unexpected { got: "request", want: "a session" }.into())
    }

    pub(super) fn withdraw(&mut self, buffer: BufferId) -> Result<()> {
        // The consumer responds twice: when it waits for the withdrawal, and when it has released the buffer.
        self.call(&ConsumerRequest::Release)?;
        self.publisher()?.withdraw(buffer)?;
        self.ready()
    }

    /// Adds memory to the session as a new buffer.
    pub(super) fn describe(&mut self, memory: &Arc<Shared>) -> Result<()> {
        self.fresh = Some(self.publisher()?.add(memory, None, Access::ReadWrite)?);
        Ok(())
    }

    /// Announces a buffer without pending GPU work, and returns the start time.
    pub(super) fn publish(&mut self, buffer: BufferId) -> Result<u64> {
        let begun = now();
        self.publisher()?.announce(buffer)?;
        Ok(begun)
    }

    /// Waits until the buffer is usable and then returned. Returns the time when it became usable.
    pub(super) fn end_of_turn(&mut self) -> Result<u64> {
        let at = self.usable()?;
        self.publisher()?.take_back()?;
        Ok(at)
    }
}

/// Spins until another process has had time to fall asleep on its socket.
pub(super) fn until_asleep() {
    let begun = Instant::now();
    while begun.elapsed() < ASLEEP {
        std::hint::spin_loop();
    }
}
