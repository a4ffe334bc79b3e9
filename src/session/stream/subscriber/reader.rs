//! The receiving half of a subscriber.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use super::{FOR_A_BUFFER, Received, Subscriber};
use crate::{
    channel::{Channel, Peer},
    driver::Stream,
    error::{Error, PeerError, Result},
    memory::Region,
    session::{
        link::{code_for, unexpected, violation},
        order::Completion,
        stream::{
            format::{self, Format},
            misuse,
            sample::Sample,
            turns::Turns,
        },
    },
    wire::{Failure, Message, Ready},
};

/// The most records without a buffer that a call reads after its deadline: a peer that never pauses can't keep it busy.
const MAX_LATE: usize = 16;

/// The receiving half.
#[derive(Debug)]
pub(super) struct Reader {
    pub(super) channel: Channel,
    pub(super) format: Arc<Format>,
    /// The number of the last buffer, 0 before the first.
    pub(super) last: u64,
    pub(super) size: Option<u64>,
    /// A received buffer that was not written yet.
    pub(super) unwritten: Option<Sample>,
    pub(super) end: Option<Final>,
}

impl Reader {
    /// Gives the unwritten buffer back: no work of this process uses it.
    pub(super) fn discard(&mut self) {
        if let Some(sample) = self.unwritten.take() {
            sample.give_back_idle();
        }
    }
}

/// Why no more buffers come.
#[derive(Debug, Clone, Copy)]
pub(super) enum Final {
    Ended,
    Crashed(Peer),
    /// An earlier call returned the reason.
    Failed,
}

impl Subscriber {
    pub(super) fn next(
        &self,
        reader: &mut Reader,
        deadline: Instant,
        on: Option<(&Stream, Duration)>,
    ) -> Result<Option<Received>> {
        match reader.end {
            Some(Final::Ended) => return Ok(Some(Received::Ended)),
            Some(Final::Crashed(peer)) => return Ok(Some(Received::Crashed(peer))),
            Some(Final::Failed) => return Err(misuse("the session has ended: an earlier call returned the reason")),
            None => {}
        }
        if let Some(late) = self.connection.turns.as_ref().and_then(Turns::is_late) {
            return self.fail(reader, late);
        }
        let mut late = 0;
        while late < MAX_LATE {
            if let Some(sample) = reader.unwritten.take() {
                match self.ordered(reader, sample, deadline, on)? {
                    Completion::Done => return Ok(reader.unwritten.take().map(Received::Sample)),
                    Completion::Pending => return Ok(None),
                    // The reason is next.
                    Completion::Lost => reader.discard(),
                }
            }
            let handled = match reader.channel.receive_by(deadline, FOR_A_BUFFER) {
                Ok((Message::Ready(ready), _)) => {
                    self.read(reader, ready).map(|sample| reader.unwritten = Some(sample))
                }
                Ok((Message::Format(format), fds)) => format::read(format, fds).map(|format| reader.format = format),
                Ok((Message::End(_), _)) => {
                    reader.end = Some(Final::Ended);
                    return Ok(Some(Received::Ended));
                }
                Ok((Message::Error(Failure { code, message }), _)) => {
                    Err(Error::Peer(PeerError::Reported { code, message }))
                }
                Ok((other, _)) => Err(unexpected(&other, "ready, format or end")),
                Err(Error::Peer(PeerError::Timeout { .. })) => return Ok(None),
                Err(interrupted @ Error::Interrupted { .. }) => return Err(interrupted),
                Err(Error::Peer(PeerError::Gone { .. })) => {
                    reader.end = Some(Final::Crashed(self.publisher));
                    return Ok(Some(Received::Crashed(self.publisher)));
                }
                Err(error) => Err(error),
            };
            handled.or_else(|error| self.fail(reader, error))?;
            late += usize::from(Instant::now() >= deadline);
        }
        Ok(None)
    }

    /// Waits until a buffer is written, or lets a stream wait. The buffer is then in the reader again.
    fn ordered(
        &self,
        reader: &mut Reader,
        mut sample: Sample,
        deadline: Instant,
        on: Option<(&Stream, Duration)>,
    ) -> Result<Completion> {
        let mut completion = Ok(Completion::Done);
        if let (Some(turn), Some(turns)) = (sample.turn, &self.connection.turns) {
            let is_ordered = match on {
                Some((stream, limit)) => turns.wait_on(stream, turn, limit),
                None => Ok(false),
            };
            completion = match is_ordered {
                Ok(true) => Ok(Completion::Done),
                Ok(false) => turns.wait(turn, deadline.saturating_duration_since(Instant::now()), &self.cancel),
                Err(Error::Peer(PeerError::WorkLost { .. })) => Ok(Completion::Lost),
                Err(error) => Err(error),
            };
        }
        if let Ok(Completion::Done) = completion {
            sample.stream = on.map(|(stream, _)| stream.clone());
        }
        reader.unwritten = Some(sample);
        match self.connection.turns.as_ref().and_then(Turns::is_late) {
            Some(late) if matches!(completion, Ok(Completion::Lost)) => self.fail(reader, late),
            _ => completion,
        }
    }

    /// Checks a publication.
    fn read(&self, reader: &mut Reader, ready: Ready) -> Result<Sample> {
        let Ready { number, time, offset, size, user, ready_at } = ready;
        let last = reader.last;
        if number <= last {
            return Err(violation(format!("publication {number} arrived after publication {last}")));
        }
        if ready_at.is_some() && self.connection.turns.is_none() {
            return Err(violation("`ready` has `ready_at`, but the stream has no `turns`"));
        }
        let Some(size) = size.or(reader.size) else {
            return Err(violation(format!("publication {number} has no size")));
        };
        let room = self.connection.memory.size();
        if offset.checked_add(size).is_none_or(|end| end > room) {
            return Err(violation(format!("publication {number} has {size} bytes at {offset} in a pool of {room}")));
        }
        let user = user.map_or(Ok(Vec::new()), hex::decode);
        let user = user.map_err(|error| violation(format!("the user bytes of publication {number}: {error}")))?;
        let held = &self.connection.held;
        let Some(entry) = held.iter().position(|entry| entry.load(Ordering::Acquire) == 0) else {
            let most = held.len();
            return Err(violation(format!("publication {number} is one more than the {most} that this side holds")));
        };
        held[entry].store(number, Ordering::Release);
        reader.last = number;
        Ok(Sample {
            connection: Arc::clone(&self.connection),
            entry,
            number,
            time: Duration::from_nanos(time),
            skipped: if last == 0 { 0 } else { number - last - 1 },
            offset,
            size,
            user,
            format: Arc::clone(&reader.format),
            turn: ready_at,
            stream: None,
            is_over: false,
        })
    }

    /// Ends the session, and reports the error to the publisher unless it comes from there. Samples can still be given back.
    fn fail<T>(&self, reader: &mut Reader, error: Error) -> Result<T> {
        reader.end = Some(Final::Failed);
        if let Some(code) = code_for(&error) {
            self.connection.send(&Message::Error(Failure { code, message: error.in_full() }));
        }
        Err(error)
    }
}
