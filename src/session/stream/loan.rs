//! A buffer that the publisher fills.

use std::{fmt, sync::Arc};

use super::{hub::Hub, misuse, turns::check_device};
use crate::{
    driver::{Access, Stream},
    error::Result,
    memory::{Region, region},
    sys::monotonic,
    wire::{MAX_USER_BYTES, Message, Ready},
};

/// A buffer of the pool that this process may write to, until it publishes or drops the buffer. It may move to another thread.
///
/// It contains the bytes of an earlier publication. [`Region::size`] is the size of the buffer. Dropping it, or a call that fails to publish
/// it, frees the buffer at once: wait for GPU work on the buffer first.
pub struct Loan {
    hub: Arc<Hub>,
    /// `None` once it is published.
    slot: Option<usize>,
    offset: u64,
    size: u64,
}

/// A publication.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Published {
    /// Its number in the epoch, counted from 1.
    pub number: u64,
    /// The number of subscribers that were given the buffer at once. For the others it waits, depending on their policies.
    pub delivered: usize,
}

impl Loan {
    pub(super) fn new(hub: &Arc<Hub>, slot: usize, (offset, size): (u64, u64)) -> Self {
        Self { hub: Arc::clone(hub), slot: Some(slot), offset, size }
    }

    /// Waits until the GPU's work on the device has finished, then publishes the buffer with the publisher's own bytes, at most
    /// [`MAX_USER_BYTES`]. Does not wait for subscribers.
    ///
    /// # Errors
    /// [`Error::Misuse`](crate::Error::Misuse) for too many bytes, and after [`Publisher::finish`](super::Publisher::finish);
    /// [`Error::Driver`](crate::Error::Driver) if the GPU's work failed. The buffer is then free again.
    ///
    /// Driver call: `cuCtxSynchronize`.
    #[doc(alias = "cuCtxSynchronize")]
    pub fn publish(self, user: &[u8]) -> Result<Published> {
        self.hub.memory.synchronize()?;
        self.announce(user)
    }

    /// Like [`Loan::publish`], behind the work that a stream of the device has now: waits neither for it nor for subscribers. The streams of
    /// subscribers wait for it ([`Subscriber::receive_on`](super::Subscriber::receive_on)), or their CPUs. The buffer is used again once all
    /// these streams have finished with it.
    ///
    /// If streams can't order the work ([`Publisher::order`](super::Publisher::order)), the call waits for the stream. The first call
    /// takes about a millisecond longer, and the first one after a subscriber has joined about 0.1 ms.
    ///
    /// # Errors
    /// [`Error::Misuse`](crate::Error::Misuse) for a stream of another device, and while it is being captured; the errors of
    /// [`Loan::publish`].
    ///
    /// Driver calls: `cuStreamIsCapturing`, `cuStreamBatchMemOp`; sometimes `cuMemHostRegister`, or `cuStreamSynchronize`.
    #[doc(alias("cuStreamBatchMemOp", "cuStreamWriteValue64"))]
    pub fn publish_on(self, stream: &Stream, user: &[u8]) -> Result<Published> {
        self.hub.creator.check()?;
        check_user(user)?;
        check_device(stream, self.hub.memory.device())?;
        let turn = match &self.hub.turns {
            Some(turns) => turns.record(stream, &self.hub)?,
            None => {
                stream.check()?;
                stream.synchronize()?;
                None
            }
        };
        self.send(user, turn)
    }

    /// Like [`Loan::publish`], without the synchronization: the caller has already synchronized all GPU work on the buffer, for example
    /// by synchronizing its own stream.
    ///
    /// # Errors
    /// The errors of [`Loan::publish`]. No driver call.
    pub fn announce(self, user: &[u8]) -> Result<Published> {
        self.hub.creator.check()?;
        check_user(user)?;
        self.send(user, None)
    }

    fn send(mut self, user: &[u8], turn: Option<u64>) -> Result<Published> {
        let user = (!user.is_empty()).then(|| hex::encode(user));
        let hub = Arc::clone(&self.hub);
        let state = &mut *hub.lock();
        if state.desk.is_finished {
            return Err(misuse("the stream is complete: nothing more can be published"));
        }
        let Some(slot) = self.slot.take() else { return Err(misuse("the buffer is published")) };
        let desk = &mut state.desk;
        let number = desk.ledger.publish(slot, turn);
        let publication = desk.ledger.data(slot);
        let size = (hub.options.size != Some(self.size)).then_some(self.size);
        let time = u64::try_from(monotonic().as_nanos()).unwrap_or(u64::MAX);
        let ready = Message::Ready(Ready { number, time, offset: self.offset, size, user, ready_at: turn });
        publication.turn = turn;
        let encoded = ready.encode_into(&mut publication.record);
        debug_assert!(encoded.is_ok(), "a checked message is short");
        if publication.format.is_some() || desk.format.is_some() {
            publication.format.clone_from(&desk.format);
        }
        let mut delivered = 0;
        for member in state.members.values_mut().filter(|member| member.is_subscribed()) {
            member.drain(true, desk, &hub);
            member.flush(desk, &hub);
            delivered += usize::from(!desk.ledger.has_waiting(member.id));
        }
        hub.settle(state);
        Ok(Published { number, delivered })
    }
}

fn check_user(user: &[u8]) -> Result<()> {
    if user.len() <= MAX_USER_BYTES {
        return Ok(());
    }
    Err(misuse(format!("{} bytes of a publication: at most {MAX_USER_BYTES} are allowed", user.len())))
}

region!(
    Loan,
    |this| this.hub.memory.device(),
    this.hub.memory.address() + this.offset,
    this.size,
    Access::ReadWrite,
    true
);

impl Drop for Loan {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take().filter(|_| self.hub.creator.is_current()) {
            let state = &mut *self.hub.lock();
            state.desk.ledger.unlend(slot);
            self.hub.settle(state);
        }
    }
}

impl fmt::Debug for Loan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a loan of {} bytes at {:#x}", self.size, self.address())
    }
}
