//! How a connection is made again, and what it held is taken up or offered back.

use std::{
    collections::{BTreeMap, HashSet},
    os::fd::AsFd,
    panic::{self, AssertUnwindSafe},
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{
    Client,
    connection::Connection,
    dial::Dialled,
    holdings::{Held, LossReason, Notice},
    put,
    records::{is_broken, lock, unexpected},
};
use crate::{
    channel::deadline_after,
    error::{Error, PeerError, Result},
    wire::broker::{MAX_RESUMED, Message, Release, Resume, Token},
};

/// How many leases one offer names: more would not fit its record beside the tables.
const LEASES_OF_AN_OFFER: usize = 256;

impl Connection {
    /// Makes the connection again after an error of a request, if that is because the broker has gone. Waits for the timeout at most
    /// until one listens. `tries` is how often this request has broken the connection before: it is not sent for ever.
    ///
    /// # Errors
    /// The error itself, if it is another one, if the socket was the caller's or the request's time is over; those of
    /// [`Client::connect`](super::Client::connect).
    pub(super) fn make_again(
        &self,
        incoming: &mut Vec<u8>,
        error: Error,
        mut tries: u32,
        begun: Instant,
        wait: Duration,
    ) -> Result<()> {
        let Some(dialler) = self.dialler.clone().filter(|_| is_broken(&error)) else { return Err(error) };
        if tries > 0 && begun.elapsed() > wait.saturating_add(dialler.timeout) {
            return Err(error);
        }
        tracing::debug!(%error, "the connection to the broker broke: it is made again");
        self.broke();
        let deadline = deadline_after(dialler.timeout);
        if tries > 0 {
            dialler.pause(tries)?;
        }
        loop {
            let dialled = dialler.dial_until(deadline, tries, incoming)?;
            match self.adopt(dialled, incoming) {
                Err(error) if is_broken(&error) && Instant::now() < deadline => {}
                adopted => return adopted,
            }
            tries += 1;
            dialler.pause(tries)?;
        }
    }

    /// It broke: nothing is expected of it any more.
    pub(super) fn broke(&self) {
        self.up.store(false, Ordering::Release);
        // So that it is over for each thread that uses it.
        let _ = self.socket.shared().shutdown(std::net::Shutdown::Both);
    }

    /// Whether the other end is closed. Does not block.
    pub(super) fn is_hung_up(&self) -> bool {
        // POLLHUP is reported unasked. See poll(2).
        let mut polled = [PollFd::new(self.socket.as_fd(), PollFlags::empty())];
        poll(&mut polled, PollTimeout::ZERO).is_ok_and(|count| count > 0)
    }

    /// Goes on over another connection: takes up what is held, and offers back what the broker has lost. `incoming` is the right to
    /// make a request.
    pub(super) fn adopt(&self, dialled: Dialled, incoming: &mut Vec<u8>) -> Result<()> {
        let Dialled { socket, peer, instance } = dialled;
        self.socket.replace(&socket)?;
        drop(socket);
        *lock(&self.peer) = peer;
        let taken = self.take_up(&instance, incoming);
        match &taken {
            Ok(_) => self.up.store(true, Ordering::Release),
            Err(_) => self.broke(),
        }
        // What they are called with is so by then.
        let taken = taken.map(|notices| lock(&self.handlers).add(notices));
        self.wake_watcher();
        taken
    }

    /// Returns what becomes of the leases.
    fn take_up(&self, instance: &str, incoming: &mut Vec<u8>) -> Result<Vec<Notice>> {
        let (another, leases, puts) = {
            let mut holdings = lock(&self.holdings);
            // None of them is taken up.
            holdings.unsent.clear();
            let leases: Vec<Arc<Held>> = holdings.leases.values().cloned().collect();
            (holdings.instance != instance, leases, holdings.puts.values().copied().collect::<Vec<Token>>())
        };
        let unknown = self.resume(&leases.iter().map(|held| held.token).collect::<Vec<_>>(), &puts, incoming)?;
        let (lost, taken): (Vec<_>, Vec<_>) = leases.iter().cloned().partition(|held| unknown.contains(&held.token));
        let mut notices: Vec<Notice> = Vec::new();
        let mut gone: Vec<Arc<Held>> = Vec::new();
        for held in taken {
            held.count(true);
            notices.push(Notice::restored(&held, false));
        }
        if another {
            tracing::info!(versions = lost.len(), "the broker has lost what it had: leases are offered back");
            for (held, outcome) in self.offer_back(lost, incoming)? {
                match outcome {
                    None => {
                        held.count(true);
                        notices.push(Notice::restored(&held, true));
                    }
                    Some(why) => {
                        notices.push(Notice::lost(&held, LossReason::NotRestored(why)));
                        gone.push(held);
                    }
                }
            }
        } else {
            notices.extend(lost.iter().map(|held| Notice::lost(held, LossReason::Ended)));
            gone.extend(lost);
        }
        let ended: Vec<Token> = {
            let mut holdings = lock(&self.holdings);
            instance.clone_into(&mut holdings.instance);
            holdings.puts.retain(|_, request| !unknown.contains(request));
            for held in &gone {
                held.count(false);
                holdings.leases.remove(&held.token);
            }
            // Those that were released while they were taken up.
            leases.iter().map(|held| held.token).filter(|token| !holdings.leases.contains_key(token)).collect()
        };
        for token in ended {
            // The broker ignores one that it does not know.
            self.send(&Message::Release(Release { token }), &[])?;
        }
        Ok(notices)
    }

    /// Takes leases and puts up. Returns those that the broker does not know.
    fn resume(&self, leases: &[Token], puts: &[Token], incoming: &mut Vec<u8>) -> Result<HashSet<Token>> {
        let mut unknown = HashSet::new();
        let chunks = leases.chunks(MAX_RESUMED).map(|leases| Resume { leases: leases.to_vec(), puts: Vec::new() });
        let puts = puts.chunks(MAX_RESUMED).map(|puts| Resume { leases: Vec::new(), puts: puts.to_vec() });
        for resume in chunks.chain(puts) {
            let mut exchange = self.exchange(incoming, self.socket.timeout());
            exchange.send_first(&Message::Resume(resume), &[])?;
            match exchange.receive("for leases to be taken up")? {
                (Message::Resumed(resumed), _) => unknown.extend(resumed.lost),
                (other, _) => return Err(unexpected(&other, "resumed")),
            }
            exchange.finish();
        }
        Ok(unknown)
    }

    /// Offers versions back that the broker has lost, each once. Returns for each lease why it could not be, if so.
    fn offer_back(&self, lost: Vec<Arc<Held>>, incoming: &mut Vec<u8>) -> Result<Vec<(Arc<Held>, Option<String>)>> {
        // The older versions of a name first: they would be refused behind a newer one.
        let mut versions: BTreeMap<(String, u64, String), Vec<Arc<Held>>> = BTreeMap::new();
        for held in lost {
            versions.entry((held.name.clone(), held.version, held.id.clone())).or_default().push(held);
        }
        let mut outcomes = Vec::new();
        for leases in versions.into_values() {
            let tokens: Vec<Token> = leases.iter().map(|held| held.token).collect();
            let problem = match leases.iter().find_map(|held| Some((held, held.offer()?))) {
                None => Some("this process does not hold all of it".to_owned()),
                Some((held, (whole, segments))) => {
                    let mut problem = None;
                    for tokens in tokens.chunks(LEASES_OF_AN_OFFER) {
                        let offered = put::restore(held, whole, &segments, tokens, |upload| {
                            let mut exchange = self.exchange(incoming, self.socket.timeout());
                            let published = upload.send(&mut exchange, Duration::ZERO)?;
                            exchange.finish();
                            Ok(published)
                        });
                        match offered {
                            Ok(_) => {}
                            Err(error) if ends_all(&error) => return Err(error),
                            Err(error) => {
                                tracing::debug!(%error, name = held.name, "a version is not taken back");
                                if !matches!(error, Error::Broker(_)) {
                                    held.offered_in_vain();
                                }
                                problem = Some(error.in_full());
                                break;
                            }
                        }
                    }
                    problem
                }
            };
            // Another reader may have been faster; and not all that were offered need be given.
            let unknown = self.resume(&tokens, &[], incoming)?;
            let problem = problem.unwrap_or_else(|| "the broker has no lease of it for this process".to_owned());
            outcomes.extend(leases.into_iter().map(|held| {
                let why = unknown.contains(&held.token).then(|| problem.clone());
                (held, why)
            }));
        }
        Ok(outcomes)
    }

    /// Nothing will come of it: its leases are lost. `forever` if none of them can be taken up later.
    pub(super) fn give_up(&self, forever: bool) {
        self.up.store(false, Ordering::Release);
        let held: Vec<Arc<Held>> = {
            let mut holdings = lock(&self.holdings);
            let held = holdings.leases.values().cloned().collect();
            if forever {
                holdings.leases.clear();
                holdings.puts.clear();
            }
            held
        };
        let lost: Vec<Notice> = held
            .iter()
            .filter(|held| held.count(false))
            .map(|held| Notice::lost(held, LossReason::Unreachable))
            .collect();
        lock(&self.handlers).add(lost);
    }

    /// Calls the handlers with what is due.
    pub(super) fn call_handlers(self: &Arc<Self>) {
        let (due, lost, restored) = {
            let mut handlers = lock(&self.handlers);
            if handlers.due.is_empty() {
                return;
            }
            (std::mem::take(&mut handlers.due), handlers.lost.clone(), handlers.restored.clone())
        };
        let client = Client(Arc::clone(self));
        for notice in due {
            // This thread has more to do.
            let called = panic::catch_unwind(AssertUnwindSafe(|| match &notice {
                Notice::Lost(notice) => lost.iter().for_each(|call| call(&client, notice)),
                Notice::Restored(notice) => restored.iter().for_each(|call| call(&client, notice)),
            }));
            if called.is_err() {
                tracing::error!("a handler of a lease's loss or return panicked");
            }
        }
    }
}

/// Whether an offer failed because of the connection, and not of itself.
fn ends_all(error: &Error) -> bool {
    is_broken(error) || matches!(error, Error::Interrupted { .. } | Error::Peer(PeerError::Timeout { .. }))
}
