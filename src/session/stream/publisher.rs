//! The publisher of a stream.

use std::{
    any::Any,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::{Arc, Weak},
    time::Duration,
};

use super::{
    connection::Identity,
    event::{Event, Usage},
    format::{Format, FormatRecord},
    hub::{Hub, State},
    loan::Loan,
    member::Stage,
    misuse,
    options::PublishOptions,
};
use crate::{
    channel::{Listener, record::check_type},
    error::{Error, ErrorCode, Holder, PeerError, Result},
    memory::{Device, Region, Shared},
    session::{Config, link::mismatch, order::Order},
};

/// Publishes buffers of one pool to any number of subscribers, none of which delays it unless [`PublishOptions::every`] allows that.
///
/// All methods may be called from any thread. The library's thread accepts subscribers and watches them.
///
/// After [`Publisher::finish`], subscribers receive [`Received::Ended`](super::Received::Ended) behind the last buffer. If the publisher
/// is dropped before, or its process dies, they receive [`Received::Crashed`](super::Received::Crashed). Their samples remain readable.
#[derive(Debug)]
pub struct Publisher {
    hub: Arc<Hub>,
}

/// The state of a publisher's pool.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PublisherStats {
    /// The number of publications.
    pub published: u64,
    /// The number of free buffers, or of free bytes if the sizes vary.
    pub free: u64,
    /// The subscribers, and the former subscribers that still have buffers.
    pub subscribers: Vec<Usage>,
}

impl Publisher {
    /// Allocates the pool. The configuration's timeout is the longest silence of a subscriber that joins, and its trust decides who may.
    ///
    /// # Errors
    /// [`Error::Misuse`] for options without room for a buffer; the errors of [`Shared::create`]; [`Error::System`].
    ///
    /// Driver calls: see [`Shared::create`].
    pub fn create(device: &Device, options: &PublishOptions, config: &Config) -> Result<Self> {
        Hub::create(device, options, config).map(|hub| Self { hub })
    }

    /// Accepts subscribers at a socket path from now on. Does not wait for them.
    ///
    /// # Errors
    /// The errors of [`Listener::bind`].
    pub fn listen(&self, path: &Path) -> Result<()> {
        self.listen_at(Listener::bind(path, &self.hub.config)?)
    }

    /// Accepts subscribers at a listening socket from now on, which replaces an earlier one.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn listen_at(&self, listener: Listener) -> Result<()> {
        self.hub.creator.check()?;
        let former = self.hub.listen(&mut self.hub.lock(), listener)?;
        drop(former);
        Ok(())
    }

    /// Accepts the subscriber at the other end of a connected socket of type `SOCK_SEQPACKET`. Does not wait for it: if it does not
    /// subscribe, no event reports it.
    ///
    /// # Errors
    /// [`Error::Socket`] for any other descriptor; [`Error::System`].
    pub fn admit(&self, socket: OwnedFd) -> Result<()> {
        let identity = Identity::of(&socket)?;
        self.hub.creator.check()?;
        self.hub.admit(&mut self.hub.lock(), socket, identity)
    }

    /// Admits subscribers for which another process vouches.
    ///
    /// # Errors
    /// [`Error::Misuse`] in a fork.
    pub(crate) fn door(&self) -> Result<Door> {
        self.hub.creator.check()?;
        Ok(Door(Arc::downgrade(&self.hub)))
    }

    /// Keeps a value until the publisher finishes or is dropped.
    pub(crate) fn keep(&self, door: Box<dyn Any + Send>) {
        let mut state = self.hub.lock();
        if state.desk.is_finished {
            // Its drop waits for a thread that may want the lock.
            drop(state);
            drop(door);
        } else {
            state.doors.push(door);
        }
    }

    /// Describes the buffers that are published from now on.
    ///
    /// # Errors
    /// [`Error::Misuse`] if it is larger than the protocol allows; [`Error::Memory`] if an array does not fit into a buffer of the fixed
    /// size; [`Error::System`].
    pub fn set_format(&self, format: &Format) -> Result<()> {
        self.hub.creator.check()?;
        if let Some(size) = self.hub.options.size {
            format.arrays.iter().try_for_each(|(_, array)| array.check(size))?;
        }
        let record = FormatRecord::of(format)?;
        self.hub.lock().desk.format = Some(record);
        Ok(())
    }

    /// Takes a free buffer, and waits for one at most this long. It waits only for this process's own loans and the streams of its
    /// publications, for subscribers with [`Policy::Every`](super::Policy::Every), and, if the sizes vary, for room.
    ///
    /// # Errors
    /// [`PeerError::Starved`] after the limit, with the holders; [`Error::Misuse`] if the sizes vary; [`Error::Interrupted`];
    /// [`Error::System`].
    pub fn loan(&self, limit: Duration) -> Result<Loan> {
        self.loan_of(self.fixed_size()?, limit)
    }

    /// Like [`Publisher::loan`], without waiting. `None` if no buffer is free.
    ///
    /// # Errors
    /// The other errors of [`Publisher::loan`].
    pub fn try_loan(&self) -> Result<Option<Loan>> {
        self.try_loan_of(self.fixed_size()?)
    }

    /// Like [`Publisher::loan`], for a buffer of `size` bytes: of any size if the sizes vary, otherwise at most the fixed size.
    ///
    /// # Errors
    /// The errors of [`Publisher::loan`]; [`Error::Misuse`] for a buffer of 0 bytes, or larger than the pool or the fixed size.
    pub fn loan_of(&self, size: u64, limit: Duration) -> Result<Loan> {
        self.check_size(size)?;
        if let Some(loan) = self.hub.wait(limit, |state| Ok(self.lend(state, size)))? {
            return Ok(loan);
        }
        let state = &mut *self.hub.lock();
        let mut usage = Hub::usage(state);
        usage.retain(|usage| usage.buffers > 0);
        let holder = |of: &Usage| Holder { pid: of.subscriber.peer.pid, buffers: of.buffers, bytes: of.bytes };
        let holders = usage.iter().map(holder).collect();
        state.desk.report(Event::Starved { by: usage });
        self.hub.settle(state);
        Err(Error::Peer(PeerError::Starved { size, waited: limit, holders }))
    }

    /// Like [`Publisher::loan_of`], without waiting. `None` if no buffer is free.
    ///
    /// # Errors
    /// The other errors of [`Publisher::loan_of`].
    pub fn try_loan_of(&self, size: u64) -> Result<Option<Loan>> {
        self.check_size(size)?;
        Ok(self.hub.attempt(|state| self.lend(state, size)))
    }

    fn lend(&self, state: &mut State, size: u64) -> Option<Loan> {
        self.hub.note_written(&mut state.desk);
        // Returned buffers are read here, so that the publication is sent at once.
        let mut all_read = true;
        for member in state.members.values_mut().filter(|member| member.may_hold()) {
            all_read &= member.drain(true, &mut state.desk, &self.hub);
            if state.desk.ledger.has_waiting(member.id) {
                member.flush(&mut state.desk, &self.hub);
            }
        }
        let lent = state.desk.ledger.lend(size).or_else(|shortage| {
            if all_read {
                return Err(shortage);
            }
            self.hub.drain(state);
            state.desk.ledger.lend(size)
        });
        lent.ok().map(|slot| Loan::new(&self.hub, slot, state.desk.ledger.range(slot)))
    }

    fn fixed_size(&self) -> Result<u64> {
        self.hub
            .options
            .size
            .ok_or_else(|| misuse("the sizes of this publisher's buffers vary: name the size of the loan"))
    }

    fn check_size(&self, size: u64) -> Result<()> {
        self.hub.creator.check()?;
        let most = self.hub.options.size.unwrap_or(self.hub.options.room);
        match size {
            0 => Err(misuse("a buffer has at least 1 byte")),
            size if size > most => {
                Err(misuse(format!("a buffer of {size} bytes exceeds the {most} bytes of this publisher")))
            }
            _ => Ok(()),
        }
    }

    /// Removes the oldest event. Does not block. Events that the program does not remove are dropped beyond the last 1024.
    pub fn event(&self) -> Option<Event> {
        self.hub.creator.is_current().then(|| self.hub.event()).flatten()
    }

    /// The use of the pool now. Reads what subscribers have sent. Does not block.
    ///
    /// # Errors
    /// [`Error::Misuse`] in a fork.
    pub fn stats(&self) -> Result<PublisherStats> {
        self.hub.creator.check()?;
        let state = &mut *self.hub.lock();
        self.hub.drain(state);
        self.hub.settle(state);
        Ok(Self::stats_of(state))
    }

    fn stats_of(state: &State) -> PublisherStats {
        let ledger = &state.desk.ledger;
        PublisherStats { published: ledger.published(), free: ledger.free(), subscribers: Hub::usage(state) }
    }

    /// Whether streams order the publications of [`Loan::publish_on`], or why each waits for its stream on the CPU. Waits while another thread
    /// calls `publish_on`. Before the first publication on a stream, it is the device's claim.
    pub fn order(&self) -> Order {
        match &self.hub.turns {
            Some(turns) => turns.current_order(),
            None => Order::Cpu { reason: format!("{} has no stream memory operations", self.hub.memory.device()) },
        }
    }

    /// Ends the subscription of a subscriber, by its number in an event or in [`Publisher::stats`]. Its buffers remain out of use until
    /// it gives them back or its process exits. Returns false if there is no such subscriber. Does not block.
    ///
    /// # Errors
    /// [`Error::Misuse`] in a fork.
    pub fn evict(&self, id: u64) -> Result<bool> {
        self.hub.creator.check()?;
        let state = &mut *self.hub.lock();
        let member = state.members.get_mut(&id).filter(|member| member.is_subscribed());
        let is_there = member.is_some();
        if let Some(member) = member {
            let reason = mismatch(ErrorCode::Timeout, "the publisher has ended this subscription");
            member.evict(&reason, &mut state.desk, &self.hub);
        }
        self.hub.settle(state);
        Ok(is_there)
    }

    /// Identifies this publisher's run. A publisher that takes its place has another epoch.
    pub fn epoch(&self) -> u64 {
        self.hub.epoch
    }

    /// The pool.
    pub fn memory(&self) -> &Arc<Shared> {
        &self.hub.memory
    }

    /// Completes the stream: no more buffers can be published, and each subscriber receives
    /// [`Received::Ended`](super::Received::Ended) behind the buffers that wait for it. Waits until all subscribers have received and
    /// given back everything, at most this long, and returns the use of the pool at that time. It does not wait if the configuration's
    /// request to cancel was made before: to finish after a signal, create the publisher with another request.
    ///
    /// # Errors
    /// [`Error::Interrupted`]; [`Error::System`]. Subscribers then see a crash.
    pub fn finish(self, limit: Duration) -> Result<PublisherStats> {
        self.complete(limit)
    }

    /// [`Publisher::finish`] for the bindings, whose publishers have several users.
    #[doc(hidden)]
    pub fn complete(&self, limit: Duration) -> Result<PublisherStats> {
        let hub = &self.hub;
        hub.creator.check()?;
        let mut state = hub.lock();
        let closed = hub.close_doors(&mut state);
        state.desk.is_finished = true;
        drop(state);
        drop(closed);
        hub.wait(limit, |state| {
            hub.drain(state);
            let desk = &state.desk;
            let is_done = |id, stage: &Stage| match stage {
                Stage::Active => false,
                Stage::Complete => desk.ledger.holds(id).0 == 0,
                _ => true,
            };
            let is_written = desk.ledger.is_written();
            Ok((is_written && state.members.values().all(|member| is_done(member.id, &member.stage))).then_some(()))
        })?;
        let state = &mut *hub.lock();
        // What still waits is lost, but this is no crash.
        for member in state.members.values_mut().filter(|member| matches!(member.stage, Stage::Active)) {
            member.complete(&mut state.desk);
        }
        Ok(Self::stats_of(state))
    }
}

/// Admits subscribers while the publisher exists.
#[derive(Debug)]
pub(crate) struct Door(Weak<Hub>);

impl Door {
    /// Like [`Publisher::admit`], for a peer that another process has introduced: the socket does not show its identity.
    ///
    /// # Errors
    /// The errors of [`Publisher::admit`].
    pub(crate) fn admit(&self, socket: OwnedFd, identity: Identity) -> Result<()> {
        check_type(&socket)?;
        match self.0.upgrade() {
            Some(hub) => hub.admit(&mut hub.lock(), socket, identity),
            None => Ok(()),
        }
    }
}

impl AsFd for Publisher {
    /// Readable when a buffer may be free or an event waits. Call [`Publisher::event`] until it returns `None`, then
    /// [`Publisher::try_loan`]: they read what subscribers have sent.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.hub.watched().as_fd()
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        if self.hub.creator.is_current() {
            self.hub.close();
        }
    }
}
