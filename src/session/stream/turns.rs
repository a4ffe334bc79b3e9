//! The order of GPU work between a publisher and its subscribers.
//!
//! Each pair of processes has words in a page of its own, so that no subscriber reaches another's. A turn of a side is a number, and
//! its word is stored by a stream of this side when earlier work is done. The publisher has a page for itself too: what is written there is
//! certain.

use std::{
    collections::BTreeMap,
    num::NonZeroUsize,
    ops::Range,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use super::{
    hub::{Desk, Hub, State},
    misuse,
};
use crate::{
    channel::Cancel,
    driver::{Attribute, Registered, code, has_reached},
    error::{Error, ProtocolError, Result},
    memory::Device,
    session::order::{Completion, Order, Stream, Tested, Waits, test},
    sys::{Words, lock},
    wire::{DONE_WORDS, READY_WORDS, TURNS, TURNS_SIZE},
};

const SIZE: NonZeroUsize = NonZeroUsize::new(TURNS_SIZE).unwrap();

/// The words that a publisher's streams store.
const READY: Range<usize> = READY_WORDS..READY_WORDS + TURNS;

/// More registered pages of former subscribers are given back. Each call may block: see [`Registered`].
const MAX_FORMER: usize = 64;

fn ready_word(turn: u64) -> usize {
    READY_WORDS + turn as usize % TURNS
}

fn done_word(turn: u64) -> usize {
    DONE_WORDS + turn as usize % TURNS
}

fn has_come(words: &Words, index: usize, turn: u64) -> bool {
    has_reached(words.get()[index].load(Ordering::Acquire), turn)
}

/// Words that streams use, or the reason why they can't.
type Usable = std::result::Result<Tested, String>;

fn order(usable: &Usable) -> Order {
    usable.as_ref().map_or_else(|reason| Order::Cpu { reason: reason.clone() }, |_| Order::Gpu)
}

/// A publisher's own words, and the registration of all its pages.
#[derive(Debug)]
pub(super) struct PublisherTurns {
    own: Arc<Words>,
    device: Device,
    /// Only the program's threads lock it: driver calls may block.
    streams: Mutex<Streams>,
}

#[derive(Debug, Default)]
struct Streams {
    own: Option<Usable>,
    /// By the subscriber's number.
    subscribers: BTreeMap<u64, Registered>,
    /// Those for which no turn was enqueued yet.
    added: Vec<u64>,
    former: Vec<Registered>,
    last: u64,
}

/// A publisher's side of the words that it shares with a subscriber.
#[derive(Debug)]
pub(super) struct SubscriberWords {
    words: Arc<Words>,
    /// The first turn that streams store here.
    first: Option<u64>,
}

impl PublisherTurns {
    /// `None` if the device's streams can't store words, as on the host backend.
    ///
    /// # Errors
    /// [`Error::System`].
    pub(super) fn new(device: &Device) -> Result<Option<Self>> {
        match device.attribute(Attribute::StreamMemoryOperations) {
            // An old driver does not know the attribute.
            Ok(0) | Err(Error::Driver { code: code::INVALID_VALUE, .. }) => return Ok(None),
            known => known?,
        };
        let (words, _) =
            Words::create(c"vmmfd-words", SIZE).map_err(|error| Error::system("create a publisher's words", error))?;
        Ok(Some(Self { own: Arc::new(words), device: device.clone(), streams: Mutex::default() }))
    }

    /// Whether the publisher's streams have written a publication.
    pub(super) fn is_written(&self, turn: u64) -> bool {
        has_come(&self.own, ready_word(turn), turn)
    }

    /// Waits until the streams that write to the pool are done: its memory goes.
    pub(super) fn wait(&mut self) {
        let streams = self.streams.get_mut().unwrap_or_else(PoisonError::into_inner);
        if streams.last > 0
            && let Err(error) = self.device.wait_for_work()
        {
            tracing::error!(%error, "GPU work on a publisher's pool may not be finished");
        }
    }

    /// Stores the next turn in the words of all subscribers, behind the work of a stream. `None` if this stream can't: then it has been
    /// synchronized.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a stream that is being captured; [`Error::Driver`].
    pub(super) fn record(&self, stream: &Stream, hub: &Hub) -> Result<Option<u64>> {
        let streams = &mut *lock(&self.streams);
        let own = streams.own.get_or_insert_with(|| {
            test(&self.device, &self.own).map_err(|error| {
                tracing::warn!(error = error.in_full(), "publications are ordered by the CPU");
                error.in_full()
            })
        });
        let Ok([own, _]) = &*own else {
            stream.check()?;
            stream.synchronize()?;
            return Ok(None);
        };
        let (new, gone) = hub.changed_words(&hub.lock(), &streams.subscribers);
        streams.former.extend(gone.iter().filter_map(|id| streams.subscribers.remove(id)));
        if streams.former.len() > MAX_FORMER {
            streams.former.clear();
        }
        for (id, words) in new {
            match self.device.driver().register(self.device.ordinal(), words) {
                Ok(registered) => {
                    streams.subscribers.insert(id, registered);
                    streams.added.push(id);
                }
                // It receives each publication once it is written.
                Err(error) => tracing::warn!(error = error.in_full(), "can't order GPU work with a subscriber"),
            }
        }
        let turn = streams.last + 1;
        let mut operations = Vec::with_capacity(streams.subscribers.len() + 2);
        // The word's last turn may be on another stream.
        let earlier = turn.checked_sub(TURNS as u64).filter(|earlier| *earlier > 0 && !self.is_written(*earlier));
        operations.extend(earlier.map(|earlier| own.wait(ready_word(earlier), earlier)));
        let all = streams.subscribers.values().chain([own]);
        operations.extend(all.map(|registered| registered.write(ready_word(turn), turn)));
        stream.enqueue(&operations)?;
        streams.last = turn;
        if !streams.added.is_empty() {
            hub.begin_turns(&mut hub.lock(), &streams.added, turn);
            streams.added.clear();
        }
        Ok(Some(turn))
    }

    /// Whether this process's streams order publications, or why not.
    pub(super) fn current_order(&self) -> Order {
        lock(&self.streams).own.as_ref().map_or(Order::Gpu, order)
    }
}

/// The publisher's side of the words of all its subscribers.
impl Hub {
    /// Takes back what the publisher's streams have written by now.
    pub(super) fn note_written(&self, desk: &mut Desk) {
        if let Some(turns) = self.turns.as_ref().filter(|_| !desk.ledger.is_written()) {
            desk.has_freed |= desk.ledger.written(|turn| turns.is_written(turn));
        }
    }

    /// The words of subscribers that are not among the known ones, and the known ones that are no longer subscribed.
    fn changed_words(&self, state: &State, known: &BTreeMap<u64, Registered>) -> (Vec<(u64, Arc<Words>)>, Vec<u64>) {
        let subscribed = |id| state.members.get(id).filter(|member| member.is_subscribed());
        let new = state.members.keys().filter(|id| !known.contains_key(id)).filter_map(subscribed);
        let new = new.filter_map(|member| Some((member.id, Arc::clone(member.words.as_ref()?.words()))));
        (new.collect(), known.keys().filter(|id| subscribed(id).is_none()).copied().collect())
    }

    /// From this turn on, streams store the turns of these subscribers.
    fn begin_turns(&self, state: &mut State, ids: &[u64], turn: u64) {
        for id in ids {
            if let Some(words) = state.members.get_mut(id).and_then(|member| member.words.as_mut()) {
                words.begin(turn);
            }
        }
    }
}

impl SubscriberWords {
    /// The words, and their descriptor for the subscriber.
    ///
    /// # Errors
    /// [`Error::System`].
    pub(super) fn create() -> Result<(Self, OwnedFd)> {
        let created = Words::create_for_one(c"vmmfd-words", SIZE);
        let (words, file) = created.map_err(|error| Error::system("create a subscriber's words", error))?;
        Ok((Self { words: Arc::new(words), first: None }, file))
    }

    pub(super) fn words(&self) -> &Arc<Words> {
        &self.words
    }

    pub(super) fn begin(&mut self, turn: u64) {
        self.first.get_or_insert(turn);
    }

    /// Whether the subscriber's streams have finished with a buffer.
    pub(super) fn is_finished(&self, turn: u64) -> bool {
        has_come(&self.words, done_word(turn), turn)
    }

    /// Whether a publication can be sent: streams store its turn here, or it is written.
    pub(super) fn covers(&self, turn: u64, own: &PublisherTurns) -> bool {
        if self.first.is_some_and(|first| first <= turn) {
            return true;
        }
        if !own.is_written(turn) {
            return false;
        }
        // Never a lower value than a stream's.
        let word = &self.words.get()[ready_word(turn)];
        let higher = |now| (!has_reached(now, turn)).then_some(turn);
        let _ = word.fetch_update(Ordering::Release, Ordering::Acquire, higher);
        true
    }
}

/// A subscriber's side of the words.
#[derive(Debug)]
pub(super) struct Turns {
    words: Arc<Words>,
    waits: Arc<Waits>,
    device: Device,
    /// Registered at first use.
    streams: OnceLock<Usable>,
    last: AtomicU64,
}

impl Turns {
    /// # Errors
    /// [`ProtocolError::Content`]; [`Error::System`].
    pub(super) fn open(file: &OwnedFd, device: &Device) -> Result<Self> {
        let words = Words::open_alone(file, SIZE).map_err(|error| match error.kind() {
            std::io::ErrorKind::InvalidData => ProtocolError::Content(format!("the words of a stream: {error}")).into(),
            _ => Error::system("map the words of a stream", error),
        })?;
        let words = Arc::new(words);
        let waits = Waits::new(Arc::clone(&words), READY)?;
        Ok(Self { words, waits, device: device.clone(), streams: OnceLock::new(), last: AtomicU64::new(0) })
    }

    pub(super) fn release_with(&self, peer: OwnedFd) -> Result<()> {
        self.waits.release_with(peer)
    }

    /// Registers the words at the first call, and tests them.
    fn tested(&self) -> &Usable {
        self.streams.get_or_init(|| test(&self.device, &self.words).map_err(|error| error.in_full()))
    }

    /// Whether streams use the words.
    pub(super) fn is_used(&self) -> bool {
        matches!(self.streams.get(), Some(Ok(_)))
    }

    pub(super) fn order(&self) -> Order {
        order(self.tested())
    }

    pub(super) fn completion(&self, turn: u64) -> Completion {
        self.waits.completion(ready_word(turn), turn)
    }

    /// The loss of the publisher's work, unless its process has ended.
    pub(super) fn is_late(&self) -> Option<Error> {
        self.waits.late()
    }

    /// Whether a publication is written, or lost, within the limit.
    ///
    /// # Errors
    /// [`Error::Interrupted`].
    pub(super) fn wait(&self, turn: u64, limit: Duration, cancel: &Cancel) -> Result<Completion> {
        self.waits.wait(ready_word(turn), turn, limit, cancel)
    }

    /// Calls `then` once when a publication is written or lost.
    pub(super) fn notify(&self, turn: u64, then: impl FnOnce() + Send + 'static) {
        self.waits.notify(ready_word(turn), turn, Box::new(then));
    }

    /// Lets a stream wait until a publication is written, at most this long. Returns false if it can't.
    ///
    /// # Errors
    /// [`PeerError::WorkLost`](crate::error::PeerError::WorkLost); [`Error::Driver`].
    pub(super) fn wait_on(&self, stream: &Stream, turn: u64, limit: Duration) -> Result<bool> {
        let Ok([registered, _]) = self.tested() else { return Ok(false) };
        let index = ready_word(turn);
        if self.waits.expect(index, turn, limit)? {
            stream.enqueue(&[registered.wait(index, turn)])?;
        }
        Ok(true)
    }

    /// Stores the next turn behind the work of a stream. `None` if it can't: then the stream has been synchronized.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a stream that is being captured; [`Error::Driver`].
    pub(super) fn finish_on(&self, stream: &Stream) -> Result<Option<u64>> {
        let turn = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        let index = done_word(turn);
        // A publisher lets a subscriber have fewer buffers than there are words.
        let is_free = turn.checked_sub(TURNS as u64).is_none_or(|earlier| has_come(&self.words, index, earlier));
        match self.tested() {
            Ok([registered, _]) if is_free => {
                stream.enqueue(&[registered.write(index, turn)])?;
                Ok(Some(turn))
            }
            _ => {
                stream.check()?;
                stream.synchronize()?;
                Ok(None)
            }
        }
    }
}

/// Checks that a stream and memory are of one device: a stream of another device does not order that device's work.
pub(super) fn check_device(stream: &Stream, device: &Device) -> Result<()> {
    if stream.ordinal() == device.ordinal() {
        return Ok(());
    }
    Err(misuse(format!("{stream:?} is of another device than the buffer, which is mapped for {device}")))
}
