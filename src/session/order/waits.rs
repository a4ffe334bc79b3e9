//! Words of another process, for which streams and threads of this process wait.

use std::{
    ops::Range,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use nix::sys::epoll::EpollFlags;

use super::{Completion, LOST};
use crate::{
    channel::Cancel,
    driver::has_reached,
    error::{Error, Loss, PeerError, Result},
    session::watcher::{Source, Token, Watcher},
    sys::{Words, lock},
    wire::MAX_TURN,
};

/// The value that releases every wait: a stream compares signed differences.
const RELEASED: u64 = MAX_TURN;

/// How often released words are released again: a stopped peer's streams may still store lower values.
const AGAIN: Duration = Duration::from_millis(2);

/// How often the thread looks for a value that has a notice.
const NOTICE: Duration = Duration::from_millis(1);

/// How long a thread polls a word before it sleeps.
const SPIN: Duration = Duration::from_micros(30);

/// The words, and which of their values are awaited. The library's thread releases the waits if the peer exits or is late.
#[derive(Debug)]
pub(crate) struct Waits {
    words: Arc<Words>,
    /// The indices of the words that the peer's streams store.
    watched: Range<usize>,
    watcher: Arc<Watcher>,
    state: Mutex<State>,
    me: Weak<Waits>,
}

#[derive(Debug)]
struct State {
    /// Awaited values that were not seen yet.
    awaited: Vec<Awaited>,
    /// For each watched word, the highest value that was certainly stored by the peer.
    confirmed: Box<[u64]>,
    loss: Option<Loss>,
    /// Descriptors of the peer.
    peers: Vec<(OwnedFd, Token)>,
    /// Whether the peer's process can store nothing any more.
    is_gone: bool,
    /// When the thread looks at the deadlines.
    next: Option<Instant>,
    notice: Option<Notice>,
}

impl State {
    fn lost(&self) -> Error {
        Error::Peer(PeerError::WorkLost { reason: self.loss.unwrap_or(Loss::Released) })
    }
}

/// To be called once a value is reached or lost.
struct Notice {
    index: usize,
    value: u64,
    call: Box<dyn FnOnce() + Send>,
}

impl std::fmt::Debug for Notice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "at {} of word {}", self.value, self.index)
    }
}

#[derive(Debug, Clone, Copy)]
struct Awaited {
    index: usize,
    value: u64,
    deadline: Instant,
    limit: Duration,
}

impl Waits {
    /// # Errors
    /// [`Error::System`].
    pub(crate) fn new(words: Arc<Words>, watched: Range<usize>) -> Result<Arc<Self>> {
        let watcher = Watcher::get()?;
        let state = State {
            awaited: Vec::new(),
            confirmed: vec![0; watched.len()].into(),
            loss: None,
            peers: Vec::new(),
            is_gone: false,
            next: None,
            notice: None,
        };
        let state = Mutex::new(state);
        let waits = Arc::new_cyclic(|me: &Weak<Self>| Self { words, watched, watcher, state, me: me.clone() });
        waits.watcher.attach(waits.me.clone());
        Ok(waits)
    }

    /// Releases the waits when the peer's process exits (its pidfd) or closes the connection (its socket).
    ///
    /// # Errors
    /// [`Error::Forked`] in a fork, which has no such thread; [`Error::System`].
    pub(crate) fn release_with(&self, peer: OwnedFd) -> Result<()> {
        self.watcher.creator.check()?;
        let mut state = lock(&self.state);
        let source: Weak<dyn Source> = self.me.clone();
        let key = state.peers.len() as u64;
        let flags = if is_socket(&peer) { EpollFlags::EPOLLRDHUP } else { EpollFlags::EPOLLIN };
        let token = self.watcher.add(peer.as_fd(), flags, source, key);
        let token = token.map_err(|error| Error::system("watch a peer", error))?;
        state.peers.push((peer, token));
        Ok(())
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        &self.words.get()[index]
    }

    /// Whether the waits were released, by any process.
    pub(crate) fn is_lost(&self) -> bool {
        self.word(LOST).load(Ordering::Acquire) != 0
    }

    /// Notes a value that the peer's streams have stored, and returns whether they have certainly stored `value`.
    fn confirm(&self, state: &mut State, index: usize, value: u64) -> bool {
        let stored = self.word(index).load(Ordering::Acquire);
        // A release marks the words first, so this value is the peer's.
        let confirmed = &mut state.confirmed[index - self.watched.start];
        if !self.is_lost() && has_reached(stored, *confirmed) {
            *confirmed = stored;
        }
        has_reached(*confirmed, value)
    }

    fn settle(&self, state: &mut State) {
        for at in (0..state.awaited.len()).rev() {
            let Awaited { index, value, .. } = state.awaited[at];
            if self.confirm(state, index, value) {
                state.awaited.swap_remove(at);
            }
        }
    }

    /// Announces that a stream will wait for a value, at most for this time. Returns whether it has to.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a value that a release does not reach; [`PeerError::WorkLost`] if the waits were released, and the value was
    /// not reached before.
    pub(crate) fn expect(&self, index: usize, value: u64, limit: Duration) -> Result<bool> {
        if value > RELEASED {
            let problem = format!("a stream can't wait for the value {value}: at most {RELEASED} is possible");
            return Err(Error::Misuse { problem });
        }
        let state = &mut *lock(&self.state);
        match self.completion_in(state, index, value) {
            Completion::Done => return Ok(false),
            Completion::Lost => return Err(state.lost()),
            Completion::Pending => {}
        }
        // The thread does it only at the first deadline.
        if state.awaited.len() == state.awaited.capacity() {
            self.settle(state);
        }
        let now = Instant::now();
        let deadline = now.checked_add(limit).unwrap_or_else(|| crate::channel::deadline_after(limit));
        state.awaited.push(Awaited { index, value, deadline, limit });
        if state.next.is_none_or(|next| deadline < next) {
            state.next = Some(deadline);
            self.watcher.wake();
        }
        Ok(true)
    }

    /// Whether the peer's streams have stored a value.
    pub(crate) fn completion(&self, index: usize, value: u64) -> Completion {
        self.completion_in(&mut lock(&self.state), index, value)
    }

    fn completion_in(&self, state: &mut State, index: usize, value: u64) -> Completion {
        match self.confirm(state, index, value) {
            true => Completion::Done,
            false if self.is_lost() => Completion::Lost,
            false => Completion::Pending,
        }
    }

    /// Lets the thread call `call` soon after a value is reached or lost, in place of an earlier `call`. It must not block.
    pub(crate) fn notify(&self, index: usize, value: u64, call: Box<dyn FnOnce() + Send>) {
        lock(&self.state).notice = Some(Notice { index, value, call });
        self.watcher.wake();
    }

    /// The error of lost work, unless the peer has exited.
    pub(crate) fn late(&self) -> Option<Error> {
        // The peer can release the words too.
        let state = self.is_lost().then(|| lock(&self.state));
        state.filter(|state| state.loss != Some(Loss::Gone)).map(|state| state.lost())
    }

    /// The error of lost work.
    pub(crate) fn loss(&self) -> Error {
        lock(&self.state).lost()
    }

    /// Ends the waits of all processes for the words, now and for ever.
    pub(crate) fn release(&self, reason: Loss) {
        self.release_in(&mut lock(&self.state), reason);
    }

    fn release_in(&self, state: &mut State, reason: Loss) {
        for index in self.watched.clone() {
            self.confirm(state, index, 0);
        }
        self.settle(state);
        state.loss.get_or_insert(reason);
        self.word(LOST).store(1, Ordering::SeqCst);
        self.store_released();
        state.next = Some(Instant::now());
        self.watcher.wake();
    }

    /// Returns whether a notice remains.
    fn give_notice(&self, state: &mut State) -> bool {
        let Some(Notice { index, value, .. }) = state.notice else { return false };
        let is_due = self.confirm(state, index, value) || self.is_lost();
        if is_due && let Some(notice) = state.notice.take() {
            (notice.call)();
        }
        !is_due
    }

    fn store_released(&self) {
        self.watched.clone().for_each(|index| self.word(index).store(RELEASED, Ordering::SeqCst));
    }

    /// Waits on the CPU until a value is reached or lost: at first in a loop, then with pauses, because no call wakes a thread when a device
    /// stores a word. [`Completion::Pending`] after the limit.
    ///
    /// # Errors
    /// [`Error::Interrupted`].
    pub(crate) fn wait(&self, index: usize, value: u64, limit: Duration, cancel: &Cancel) -> Result<Completion> {
        let begun = Instant::now();
        loop {
            let completion = self.completion(index, value);
            let waited = begun.elapsed();
            match waited {
                _ if completion != Completion::Pending || waited >= limit => return Ok(completion),
                _ if waited < SPIN => thread::yield_now(),
                // Its short sleeps are exact.
                _ if waited < 50 * SPIN => thread::sleep(SPIN.min(limit - waited)),
                _ => cancel.pause(Duration::from_millis(1).min(limit - waited))?,
            }
        }
    }
}

fn is_socket(fd: &OwnedFd) -> bool {
    rustix::net::sockopt::socket_type(fd).is_ok()
}

impl Source for Waits {
    fn ready(&self, key: u64, _: EpollFlags) {
        let state = &mut *lock(&self.state);
        let Some(at) = usize::try_from(key).ok().filter(|at| *at < state.peers.len()) else { return };
        let (fd, token) = &state.peers[at];
        self.watcher.remove(*token, fd.as_fd());
        state.is_gone |= !is_socket(fd);
        if state.loss.is_none() {
            self.release_in(state, Loss::Gone);
        }
    }

    fn tick(&self, now: Instant) -> Option<Instant> {
        let state = &mut *lock(&self.state);
        self.settle(state);
        let polled = self.give_notice(state).then(|| now + NOTICE);
        if self.is_lost() {
            if !state.awaited.is_empty() {
                self.store_released();
            }
            // The device has finished the last stores of a process that is gone.
            state.next = (!state.awaited.is_empty() && !state.is_gone).then(|| now + AGAIN);
            return state.next.into_iter().chain(polled).min();
        }
        if let Some(late) = state.awaited.iter().find(|awaited| awaited.deadline <= now) {
            let reason = Loss::Late { limit: late.limit };
            self.release_in(state, reason);
            return Some(now + AGAIN);
        }
        state.next = state.awaited.iter().map(|awaited| awaited.deadline).min();
        state.next.into_iter().chain(polled).min()
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        for (fd, token) in state.peers.drain(..) {
            self.watcher.remove(token, fd.as_fd());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    fn waits() -> Arc<Waits> {
        let (words, _) = Words::create(c"vmmfd-words", NonZeroUsize::new(4096).unwrap()).unwrap();
        Waits::new(Arc::new(words), 8..9).unwrap()
    }

    #[test]
    fn waits_that_are_over_need_no_memory() {
        let waits = waits();
        for value in 1..10_000 {
            assert!(waits.expect(8, value, LIMIT).unwrap());
            waits.word(8).store(value, Ordering::Release);
        }
        assert!(lock(&waits.state).awaited.capacity() < 10);
    }

    #[test]
    fn one_notice_is_given() {
        let (waits, (send, called)) = (waits(), std::sync::mpsc::channel());
        for _ in 0..3 {
            let send = send.clone();
            waits.notify(8, 1, Box::new(move || send.send(()).unwrap()));
        }
        waits.word(8).store(1, Ordering::Release);
        called.recv_timeout(LIMIT).unwrap();
        drop(send);
        called.recv_timeout(LIMIT).unwrap_err();
    }

    #[test]
    fn release_by_a_peer_is_reported() {
        let waits = waits();
        assert!(waits.late().is_none());
        waits.word(LOST).store(1, Ordering::Release);
        assert!(waits.late().is_some());
    }
}
