//! Serves a buffer: accepts consumers, and gives each a conversation.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{Mutex, MutexGuard, PoisonError},
    thread::{self, Scope},
    time::{Duration, Instant},
};

use nix::sys::eventfd::EventFd;

use super::{
    buffer::Buffer,
    connection::{Context, Conversation},
    gate::Turn,
    options::ServeOptions,
};
use crate::{
    channel::{Cancel, CancelReason, Listener, Peer, deadline_after, eventfd},
    driver::Backend,
    error::{Error, ErrorCode, PeerError, Result},
    memory::Region,
    session::{
        Config, Event, Observer, Verdict,
        acceptor::{Acceptor, Arrival, Dialect, MAX_IDLE, Next, Wish},
    },
};

/// How many consumers a service without end remembers.
const REMEMBERED: usize = 1000;

/// A consumer that was served, or refused.
#[derive(Debug)]
#[non_exhaustive]
pub struct Served {
    /// Who it was.
    pub peer: Peer,
    /// What both sides together found, if it came to that: the verdict of the side that found a mismatch, if one did.
    pub found: Option<Verdict>,
    /// What went wrong with the conversation, before or after.
    pub error: Option<Error>,
}

impl Served {
    /// Whether the data was found wrong: that outweighs how the conversation ended.
    pub fn mismatched(&self) -> bool {
        self.found.as_ref().is_some_and(|found| !found.verified)
    }
}

/// What came of a service.
#[derive(Debug)]
#[must_use]
#[non_exhaustive]
pub struct ServeReport {
    /// The consumers, in the order in which they ended; of a service without end the last thousand, the failed before the others.
    pub served: Vec<Served>,
    /// Why the service ended early, if it did: see [`serve`].
    pub error: Option<Error>,
}

impl ServeReport {
    /// The consumers, if the service ended as it should. What went wrong with one of them is in [`Served::error`].
    ///
    /// # Errors
    /// [`ServeReport::error`].
    pub fn into_result(self) -> Result<Vec<Served>> {
        self.error.map_or(Ok(self.served), Err)
    }
}

/// Serves a buffer to consumers that connect to a listener, at the same time if they come at the same time. Blocks until as many
/// were served as the options say.
///
/// A peer that sends a well-formed request is a consumer and counts, also if the request is refused. Others delay no consumer and
/// change nothing. The listener's file is removed before the last conversation has ended.
///
/// # Errors
/// In the report: [`PeerError::NoConsumer`] if none is connected and none comes for as long as the timeout;
/// [`Error::Interrupted`] if
/// it was cancelled, also where serving has no other end; what filling the buffer fails with; [`Error::System`]. What goes wrong
/// with a consumer is in [`Served::error`].
pub fn serve(
    listener: Listener,
    buffer: &Buffer<'_>,
    options: &ServeOptions,
    config: &Config,
    observer: Observer<'_>,
) -> ServeReport {
    match Server::new(buffer, options, config, observer) {
        Ok(server) => server.run(listener),
        Err(error) => ServeReport { served: Vec::new(), error: Some(error) },
    }
}

/// Serves a buffer to the one peer of a connected socket: of a socket pair, say, or accepted by the caller. Blocks until the
/// conversation has ended. Several threads may serve one buffer. [`ServeOptions::consumers`] has no meaning here.
///
/// # Errors
/// What went wrong before the peer had asked for anything: [`Error::Socket`] for anything else than a connected socket of type
/// `SOCK_SEQPACKET`; [`PeerError::NotAllowed`], [`PeerError::Gone`], [`PeerError::Timeout`], [`PeerError::Protocol`],
/// [`Error::Interrupted`],
/// [`Error::System`]. After that it is in [`Served::error`].
pub fn serve_connection(
    socket: OwnedFd,
    buffer: &Buffer<'_>,
    options: &ServeOptions,
    config: &Config,
    observer: Observer<'_>,
) -> Result<Served> {
    let cancel = config.cancellation()?;
    let arrival = Acceptor::new(Dialect::Handoff, backend(buffer), config, &cancel)?.meet(socket)?;
    let context = Context { buffer, options, observer, failure: &|| None };
    Ok(attend(arrival, context))
}

fn backend(buffer: &Buffer<'_>) -> Backend {
    buffer.shared().device().backend()
}

/// The conversation with a consumer, from its first request on.
fn attend(arrival: Arrival, context: Context<'_>) -> Served {
    let Arrival { link, backend, wish } = arrival;
    let peer = link.peer();
    (context.observer)(Event::Requested { peer });
    let (found, error) = match wish {
        Wish::Buffer(request) => Conversation::new(link, backend, context).run(request),
        Wish::Stream(_) => (None, None),
    };
    let served = Served { peer, found, error };
    (context.observer)(Event::Ended { served: &served });
    served
}

/// What the threads of a service share.
struct Server<'a> {
    buffer: &'a Buffer<'a>,
    options: &'a ServeOptions,
    config: &'a Config,
    observer: Observer<'a>,
    /// Ends all conversations.
    over: Cancel,
    /// Readable when the thread that accepts has to look at the state again.
    wake: EventFd,
    state: Mutex<ServiceState>,
}

#[derive(Default)]
struct ServiceState {
    /// Why the buffer will never be filled.
    failure: Option<Error>,
    /// How many consumers have asked, of those that count.
    admitted: u64,
    /// How many of them are still connected.
    connected: u64,
    /// Since when no consumer could have been served: from the first fill, and from the last consumer's end.
    idle_since: Option<Instant>,
    served: Vec<Served>,
}

impl ServiceState {
    /// What a consumer gets to know of a fill that failed. If it was interrupted, so is the consumer.
    fn refusal(&self) -> Option<Error> {
        match self.failure.as_ref()? {
            Error::Interrupted { reason } => Some(Error::Interrupted { reason: *reason }),
            error => {
                let message = format!("the producer could not fill the buffer: {}", error.in_full());
                Some(Error::Peer(PeerError::Mismatch { code: ErrorCode::Failed, message }))
            }
        }
    }
}

impl<'a> Server<'a> {
    fn new(
        buffer: &'a Buffer<'a>,
        options: &'a ServeOptions,
        config: &'a Config,
        observer: Observer<'a>,
    ) -> Result<Self> {
        let (over, wake) = (Cancel::new()?, eventfd()?);
        Ok(Self { buffer, options, config, observer, over, wake, state: Mutex::default() })
    }

    fn run(self, listener: Listener) -> ServeReport {
        (self.observer)(Event::Listening { path: listener.path(), consumers: self.options.consumers });
        let refusal = || self.state().refusal();
        let accepted = thread::scope(|scope| {
            let mut acceptor = match Acceptor::new(Dialect::Handoff, backend(self.buffer), self.config, &self.over) {
                Ok(acceptor) => acceptor,
                Err(error) => return Err(error),
            };
            let accepted = self.accept_all(scope, &listener, &mut acceptor, &refusal);
            // No other consumer can come.
            drop(listener);
            let reason = match &accepted {
                Err(Error::Interrupted { reason }) => *reason,
                _ => CancelReason::Program,
            };
            self.over.cancel(reason);
            let full = || full("this producer has served all that it was to serve".to_owned());
            acceptor.close_all(&match (reason, refusal()) {
                (CancelReason::Program, None | Some(Error::Interrupted { .. })) => full(),
                (CancelReason::Program, Some(refusal)) => refusal,
                (reason, _) => Error::Interrupted { reason },
            });
            accepted
        });
        let ServiceState { failure, served, .. } = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        let error = match (accepted, failure) {
            // Interrupted only because all consumers were refused before it was done.
            (Ok(()), Some(Error::Interrupted { .. })) => None,
            (Ok(()), failure) => failure,
            (Err(error), _) => Some(error),
        };
        ServeReport { served, error }
    }

    fn state(&self) -> MutexGuard<'_, ServiceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look_again(&self) {
        if let Err(errno) = self.wake.write(1) {
            tracing::error!(%errno, "an eventfd can't be written");
        }
    }

    /// Fills the buffer while the first consumers may already wait, and accepts until there is nothing more to wait for.
    fn accept_all<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        listener: &Listener,
        acceptor: &mut Acceptor<'_>,
        failure: &'scope (dyn Fn() -> Option<Error> + Sync),
    ) -> Result<()> {
        let cancel = self.config.cancellation()?;
        let alone = self.buffer.turn(Turn::Alone, Duration::from_millis(100), &mut || cancel.check())?;
        spawn(scope, "fill", move || {
            let filled = self.buffer.fill(&mut || self.over.check(), self.observer);
            let mut state = self.state();
            (state.idle_since, state.failure) = (Some(Instant::now()), filled.err());
            drop((state, alone));
            self.look_again();
        })?;
        while let Some(deadline) = self.patience() {
            let expected = match self.options.consumers {
                0 => MAX_IDLE,
                consumers => usize::try_from(consumers - self.state().admitted).unwrap_or(usize::MAX).min(1024),
            };
            acceptor.expected = expected;
            match acceptor.next(listener, Some(self.wake.as_fd()), deadline)? {
                Next::Arrived(arrival) => self.admit(scope, *arrival, failure),
                // Looking again is what follows anyway; reading makes it quiet.
                Next::Woken => drop(self.wake.read()),
                Next::Late if self.state().connected == 0 => {
                    return Err(Error::Peer(PeerError::NoConsumer { waited: self.config.timeout }));
                }
                Next::Late => {}
            }
        }
        Ok(())
    }

    /// Until when to wait for the next consumer; `None` when there is nothing more to wait for.
    fn patience(&self) -> Option<Instant> {
        let state = self.state();
        let all_served = self.options.consumers > 0 && state.served.len() as u64 >= self.options.consumers;
        if all_served || state.failure.is_some() {
            return None;
        }
        let since = state.idle_since.filter(|_| self.options.consumers > 0 && state.connected == 0);
        Some(match since {
            Some(since) => since.checked_add(self.config.timeout).unwrap_or_else(|| deadline_after(Duration::MAX)),
            None => deadline_after(Duration::MAX),
        })
    }

    /// Gives a consumer a conversation, if one is still expected.
    fn admit<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        mut arrival: Arrival,
        failure: &'scope (dyn Fn() -> Option<Error> + Sync),
    ) {
        let expected = self.options.consumers;
        let mut state = self.state();
        if expected > 0 && state.admitted == expected {
            drop(state);
            let message = format!("this producer serves {expected} consumers, and all of them have come");
            arrival.link.report(&full(message));
            arrival.link.channel.shut_down_writing();
            return;
        }
        state.admitted += 1;
        state.connected += 1;
        drop(state);
        let peer = arrival.link.peer();
        let context = Context { buffer: self.buffer, options: self.options, observer: self.observer, failure };
        if let Err(error) = spawn(scope, "consumer", move || self.ended(attend(arrival, context))) {
            self.ended(Served { peer, found: None, error: Some(error) });
        }
    }

    fn ended(&self, served: Served) {
        let mut state = self.state();
        if self.options.consumers == 0 && state.served.len() >= REMEMBERED {
            let harmless = |served: &Served| served.error.is_none() && !served.mismatched();
            let forgotten = state.served.iter().position(harmless).unwrap_or(REMEMBERED - 1);
            state.served.remove(forgotten);
        }
        state.served.push(served);
        state.connected -= 1;
        state.idle_since = Some(Instant::now());
        drop(state);
        self.look_again();
    }
}

fn full(message: String) -> Error {
    Error::Peer(PeerError::Mismatch { code: ErrorCode::Full, message })
}

fn spawn<'scope>(scope: &'scope Scope<'scope, '_>, name: &str, work: impl FnOnce() + Send + 'scope) -> Result<()> {
    let spawned = thread::Builder::new().name(name.to_owned()).spawn_scoped(scope, work);
    spawned.map(drop).map_err(|error| Error::system("start a thread", error))
}
