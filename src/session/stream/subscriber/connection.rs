//! The part of a subscriber that its samples share.

use std::{
    os::unix::net::UnixStream,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use rustix::net::SendFlags;

use super::super::turns::Turns;
use crate::{
    driver::Stream,
    error::Result,
    memory::{Imported, Region},
    sys::fork::ProcessIdentity,
    wire::{Done, Message},
};

/// What samples need after the subscriber is gone. The connection closes with the last of them.
#[derive(Debug)]
pub(in super::super) struct Connection {
    /// Before the words: unmapping it must not meet a stream that waits.
    pub(in super::super) memory: Imported,
    /// The words, if the publisher's streams order its work.
    pub(in super::super) turns: Option<Turns>,
    pub(super) socket: Arc<UnixStream>,
    /// The numbers of the samples that exist, 0 for none: as many entries as the subscriber may hold buffers.
    pub(super) held: Box<[AtomicU64]>,
    pub(super) creator: ProcessIdentity,
}

impl Connection {
    /// Whether this process subscribed, and is not a fork of it.
    pub(in super::super) fn is_own(&self) -> bool {
        self.creator.is_current()
    }

    /// Gives a buffer back, with the turn after which no stream reads it. Takes no lock.
    pub(in super::super) fn give_back(&self, entry: usize, number: u64, done_at: Option<u64>) {
        if !self.is_own() {
            return;
        }
        // First: the publisher may use the room at once.
        self.held[entry].store(0, Ordering::Release);
        self.send(&Message::Done(Done { number, done_at }));
    }

    /// Gives a buffer back behind the work of a stream.
    ///
    /// # Errors
    /// [`Error::Misuse`] while the stream is being captured; [`Error::Driver`]. The buffer is then not given back.
    pub(in super::super) fn give_back_on(&self, stream: &Stream, entry: usize, number: u64) -> Result<()> {
        let done_at = match &self.turns {
            Some(turns) => turns.finish_on(stream)?,
            None => stream.synchronize().map(|()| None)?,
        };
        self.give_back(entry, number, done_at);
        Ok(())
    }

    /// Sends a message that fits into the socket's buffer, because each side limits what it sends. A failure means that the publisher is
    /// gone.
    pub(super) fn send(&self, message: &Message) {
        let Ok(record) = message.encode() else { return };
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        if let Err(errno) = rustix::io::retry_on_intr(|| rustix::net::send(&*self.socket, &record, flags)) {
            tracing::debug!(%errno, kind = message.name(), "can't send to the publisher");
        }
    }
}

impl Drop for Connection {
    /// Waits for the streams that use the buffers: each waits for the publisher at most as long as its limit.
    fn drop(&mut self) {
        if self.is_own()
            && self.turns.as_ref().is_some_and(Turns::is_used)
            && let Err(error) = self.memory.device().wait_for_work()
        {
            tracing::error!(%error, "GPU work on a stream's buffers may not be finished");
        }
    }
}
