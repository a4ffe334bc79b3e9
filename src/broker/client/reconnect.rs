//! Reconnects a broken connection, resumes its leases and puts, and restores versions that the broker has lost.

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
    holdings::{Header, HeldPart, LossReason, Notice, OwnLease},
    put,
    socket::{Dialled, Exchange, answer, is_broken, no_broker},
};
use crate::{
    channel::deadline_after,
    error::{Error, PeerError, Result},
    sys::lock,
    wire::broker::{MAX_RESUMED, Message, Release, Resume, ResumedLease, Token},
};

/// The most leases in one restore: more would not fit its record beside the tables.
const MAX_LEASES_PER_RESTORE: usize = 256;

impl Connection {
    /// Reconnects if a request failed because the broker is gone. Waits up to the timeout for a listener. `tries` counts how often this
    /// request has already broken the connection, so that it is not repeated forever.
    ///
    /// # Errors
    /// `error` itself, if it has another cause, if there is no path to connect to, or if the request's time limit has passed;
    /// [`PeerError::BrokerGone`] if no broker listens in time; other errors of [`Client::connect`](super::Client::connect).
    pub(super) fn reconnect(
        &self,
        incoming: &mut Vec<u8>,
        error: Error,
        mut tries: u32,
        started: Instant,
        wait: Duration,
    ) -> Result<()> {
        let Some(dialler) = self.dialler.clone().filter(|_| is_broken(&error)) else { return Err(error) };
        if tries > 0 && started.elapsed() > wait.saturating_add(dialler.timeout) {
            return Err(error);
        }
        tracing::debug!(%error, "the connection to the broker broke: reconnecting");
        if self.is_hung_up() {
            self.mark_broken();
        }
        let deadline = deadline_after(dialler.timeout);
        if tries > 0 {
            dialler.pause(tries)?;
        }
        loop {
            let dialled = dialler
                .dial_until(deadline, tries, incoming)
                .map_err(|error| no_broker(error, dialler.timeout, true))?;
            match self.adopt(dialled, incoming) {
                Err(error) if is_broken(&error) && Instant::now() < deadline => {}
                adopted => return adopted,
            }
            tries += 1;
            dialler.pause(tries)?;
        }
    }

    /// Marks the connection as broken.
    pub(super) fn mark_broken(&self) {
        self.connected.store(false, Ordering::Release);
        // Wake every thread that uses the socket.
        let _ = self.socket.shared().shutdown(std::net::Shutdown::Both);
    }

    /// Whether the broker has closed its end. Does not block.
    pub(super) fn is_hung_up(&self) -> bool {
        // poll(2) always reports POLLHUP.
        let mut polled = [PollFd::new(self.socket.as_fd(), PollFlags::empty())];
        poll(&mut polled, PollTimeout::ZERO).is_ok_and(|count| count > 0)
    }

    /// Replaces the socket, resumes leases and puts, and restores lost versions. Holding `incoming` is the right to make requests.
    pub(super) fn adopt(&self, dialled: Dialled, incoming: &mut Vec<u8>) -> Result<()> {
        let Dialled { socket, peer, instance } = dialled;
        self.replace_socket(&socket)?;
        drop(socket);
        *lock(&self.peer) = peer;
        let taken = self.resume_all(&instance, incoming);
        match &taken {
            Ok(_) => {
                self.moved();
                self.connected.store(true, Ordering::Release);
            }
            // The broker may have moved the leases already, and would end them with this socket.
            Err(Error::Interrupted { .. }) => self.abandon(),
            Err(_) => self.mark_broken(),
        }
        // The state is final before handlers run.
        let taken = taken.map(|notices| lock(&self.handlers).add(notices));
        self.wake_watcher();
        taken
    }

    /// Returns the notices for the handlers.
    fn resume_all(&self, instance: &str, incoming: &mut Vec<u8>) -> Result<Vec<Notice>> {
        let (state_lost, leases, puts) = {
            let holdings = lock(&self.holdings);
            let leases: Vec<Arc<OwnLease>> = holdings.leases.values().cloned().collect();
            (holdings.instance != instance, leases, holdings.puts.values().copied().collect::<Vec<Token>>())
        };
        let unknown = self.resume(&leases, &puts, incoming)?;
        let (lost, taken): (Vec<_>, Vec<_>) = leases.iter().cloned().partition(|held| unknown.contains(&held.token));
        let mut notices: Vec<Notice> = Vec::new();
        let mut gone: Vec<Arc<OwnLease>> = Vec::new();
        // A move from the former socket, which the broker counted, is no restoration.
        let moved = !lock(&self.former).is_empty();
        for held in taken {
            if !held.set_counted(true) || !moved {
                notices.push(Notice::restored(&held, false));
            }
        }
        if state_lost {
            tracing::info!(
                versions = lost.len(),
                "the broker has lost its state: restoring the versions of this process's leases"
            );
            for (held, outcome) in self.restore_lost(lost, incoming)? {
                match outcome {
                    None => {
                        held.set_counted(true);
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
                held.set_counted(false);
                holdings.leases.remove(&held.token);
            }
            // Leases that this process dropped while they were resumed.
            leases.iter().map(|held| held.token).filter(|token| !holdings.leases.contains_key(token)).collect()
        };
        for token in ended {
            // The broker ignores unknown tokens.
            self.send(&Message::Release(Release { token }), &[])?;
        }
        Ok(notices)
    }

    /// Resumes leases and puts. Returns the tokens that the broker does not know.
    fn resume(&self, leases: &[Arc<OwnLease>], puts: &[Token], incoming: &mut Vec<u8>) -> Result<HashSet<Token>> {
        let mut unknown = HashSet::new();
        let leases: Vec<ResumedLease> = leases.iter().map(|held| held.resumption()).collect();
        let chunks = leases.chunks(MAX_RESUMED).map(|leases| Resume { leases: leases.to_vec(), puts: Vec::new() });
        let puts = puts.chunks(MAX_RESUMED).map(|puts| Resume { leases: Vec::new(), puts: puts.to_vec() });
        for resume in chunks.chain(puts) {
            unknown.extend(self.ask(incoming, |exchange| resume_on(exchange, resume))?);
        }
        Ok(unknown)
    }

    /// Makes a request of the reconnect itself.
    fn ask<T>(&self, incoming: &mut Vec<u8>, request: impl FnOnce(&mut Exchange<'_>) -> Result<T>) -> Result<T> {
        let mut exchange = self.exchange(incoming, self.timeout());
        let answer = request(&mut exchange)?;
        exchange.finish();
        Ok(answer)
    }

    /// Restores each lost version once. Returns, for each lease, why it is still lost, or `None`.
    fn restore_lost(
        &self,
        lost: Vec<Arc<OwnLease>>,
        incoming: &mut Vec<u8>,
    ) -> Result<Vec<(Arc<OwnLease>, Option<String>)>> {
        // Older versions of a name first: the broker refuses them after a newer one.
        let mut versions: BTreeMap<(String, u64, String), Vec<Arc<OwnLease>>> = BTreeMap::new();
        for held in lost {
            let Header { name, version, id, .. } = &*held.header;
            versions.entry((name.clone(), *version, id.clone())).or_default().push(held);
        }
        let mut outcomes = Vec::new();
        for leases in versions.into_values() {
            let tokens: Vec<Token> = leases.iter().map(|held| held.token).collect();
            let problem = match leases.iter().find_map(|held| Some((held, held.restorable()?))) {
                None => Some("this process does not hold the whole version".to_owned()),
                Some((held, parts)) => self.restore(held, &parts, &tokens, incoming)?,
            };
            // Another reader may have restored it first, and the broker may accept fewer leases than offered.
            let unknown = self.resume(&leases, &[], incoming)?;
            let problem = problem
                .unwrap_or_else(|| "the broker granted this process no lease on the restored version".to_owned());
            outcomes.extend(leases.into_iter().map(|held| {
                let why = unknown.contains(&held.token).then(|| problem.clone());
                (held, why)
            }));
        }
        Ok(outcomes)
    }

    /// Offers a version back with its leases. Returns why the broker does not accept it.
    fn restore(
        &self,
        held: &OwnLease,
        parts: &[HeldPart],
        tokens: &[Token],
        incoming: &mut Vec<u8>,
    ) -> Result<Option<String>> {
        for tokens in tokens.chunks(MAX_LEASES_PER_RESTORE) {
            let offered = put::restore(&held.header, parts, tokens, |upload| {
                self.ask(incoming, |exchange| upload.send(exchange, Duration::ZERO))
            });
            match offered {
                Ok(_) => {}
                Err(error) if is_connection_error(&error) => return Err(error),
                Err(error) => {
                    tracing::debug!(%error, name = held.header.name, "the broker did not accept a restored version");
                    return Ok(Some(error.in_full()));
                }
            }
        }
        Ok(None)
    }

    /// Marks all leases as lost. `forever`: no later attempt can resume them.
    pub(super) fn report_unreachable(&self, forever: bool) {
        self.connected.store(false, Ordering::Release);
        let held: Vec<Arc<OwnLease>> = {
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
            .filter(|held| held.set_counted(false))
            .map(|held| Notice::lost(held, LossReason::Unreachable))
            .collect();
        lock(&self.handlers).add(lost);
    }

    /// Calls the handlers with the queued notices.
    pub(super) fn call_handlers(self: &Arc<Self>) {
        let (due, recalled, lost, restored) = {
            let mut handlers = lock(&self.handlers);
            if handlers.due.is_empty() && handlers.recalled.is_empty() {
                return;
            }
            let (due, recalled) = (std::mem::take(&mut handlers.due), std::mem::take(&mut handlers.recalled));
            (due, recalled, handlers.lost.clone(), handlers.restored.clone())
        };
        // A panicking handler must not end this thread.
        let run = |handlers: &str, call: &mut dyn FnMut()| {
            if panic::catch_unwind(AssertUnwindSafe(call)).is_err() {
                tracing::error!("an {handlers} handler panicked");
            }
        };
        let client = Client(Arc::clone(self));
        for notice in due {
            run("on_lost or on_restored", &mut || match &notice {
                Notice::Lost(notice) => lost.iter().for_each(|call| call(&client, notice)),
                Notice::Restored(notice) => restored.iter().for_each(|call| call(&client, notice)),
            });
        }
        for call in recalled {
            let mut call = Some(call);
            run("on_recall", &mut || call.take().into_iter().for_each(|call| call()));
        }
    }
}

/// Resumes leases and puts. Returns the tokens that the broker does not know.
pub(super) fn resume_on(exchange: &mut Exchange<'_>, resume: Resume) -> Result<Vec<Token>> {
    exchange.send_first(&Message::Resume(resume), &[])?;
    let (resumed, _) = answer!(exchange.receive("for leases to be resumed")?, Resumed, "resumed");
    Ok(resumed.lost)
}

/// Whether a restore failed because of the connection, so that no other restore can succeed.
fn is_connection_error(error: &Error) -> bool {
    is_broken(error) || matches!(error, Error::Interrupted { .. } | Error::Peer(PeerError::Timeout { .. }))
}
