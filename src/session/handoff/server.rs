//! Serves a buffer: accepts consumers, and runs a session with each.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{Mutex, MutexGuard, PoisonError},
    thread::{self, Scope},
    time::{Duration, Instant},
};

use nix::sys::eventfd::EventFd;

use super::{
    buffer::Buffer,
    connection::{Context, Session},
    gate::Turn,
    options::ServeOptions,
};
use crate::{
    channel::{Cancel, CancelReason, Listener, Peer, cancel::eventfd, deadline_after},
    driver::Backend,
    error::{Error, ErrorCode, PeerError, Result},
    memory::Region,
    session::{
        Config, Event, Observer, Verdict,
        acceptor::{Acceptor, Arrival, MAX_IDLE, Next},
        link::mismatch,
    },
};

/// The number of consumers that a service without a limit remembers.
const MAX_REMEMBERED: usize = 1000;

/// A consumer that was served or refused.
#[derive(Debug)]
#[non_exhaustive]
pub struct Served {
    /// The consumer's process.
    pub peer: Peer,
    /// The combined verdict: that of the side that found a mismatch, if there is one. `None` if the session failed before.
    pub found: Option<Verdict>,
    /// The session's error, before or after the verdict.
    pub error: Option<Error>,
}

impl Served {
    /// Returns the consumer if its session succeeded.
    ///
    /// # Errors
    /// Returns [`Served::error`]; [`PeerError::Mismatch`] if either side found wrong data.
    pub fn into_result(self) -> Result<Self> {
        match self.error {
            Some(error) => Err(error),
            None if self.mismatched() => {
                Err(mismatch(ErrorCode::Failed, "the consumer reports that the data is wrong"))
            }
            None => Ok(self),
        }
    }

    /// Whether either side found wrong data. A mismatch outweighs [`Served::error`].
    pub fn mismatched(&self) -> bool {
        self.found.as_ref().is_some_and(|found| !found.verified)
    }
}

/// The result of a service.
#[derive(Debug)]
#[must_use]
#[non_exhaustive]
pub struct ServeReport {
    /// The consumers, in the order in which their sessions finished. A service without a limit remembers the last thousand, and forgets
    /// successful ones first.
    pub served: Vec<Served>,
    /// Why the service stopped early: see [`serve`].
    pub error: Option<Error>,
}

impl ServeReport {
    /// Returns the consumers if the service completed and every session succeeded. To tolerate failed consumers, read
    /// [`ServeReport::served`] instead.
    ///
    /// # Errors
    /// Returns [`ServeReport::error`], otherwise the first error of [`Served::into_result`].
    pub fn into_result(self) -> Result<Vec<Served>> {
        match self.error {
            Some(error) => Err(error),
            None => self.served.into_iter().map(Served::into_result).collect(),
        }
    }
}

/// Serves a buffer to consumers that connect to a listener. Readers are served concurrently. Blocks until the number of consumers in
/// `options` has been served.
///
/// A peer that sends a well-formed request is a consumer and counts, even if the request is refused. Other peers delay no consumer and
/// change nothing. The listener's file is removed when the last consumer has been accepted: sessions may still run.
///
/// # Errors
/// In the report: [`PeerError::NoConsumer`] if no consumer is connected and none connects within the timeout;
/// [`Error::Interrupted`] if the service was cancelled, which is the only way that a service without a limit ends; errors of filling the
/// buffer; [`Error::System`]. Errors of one consumer are in [`Served::error`].
///
/// ```
/// use vmmfd::{
///     channel::Listener,
///     session::{Config, handoff::{Buffer, ServeOptions, Unchecked, serve}},
/// };
/// # use vmmfd::{driver::{Backend, Choice, open}, memory::{Device, Selector, Shared, Spec}};
/// # use vmmfd::session::{Verdict, handoff::{Consumer, Request}};
/// # let driver = open(Choice::Only(Backend::Host))?.driver;
/// # let device = Device::find(&driver, Selector::default())?;
/// # let memory = Shared::create(&device, Spec::vmm(1000))?;
/// # let folder = vmmfd::internals::ExampleFolder::new()?;
/// # let path = folder.path().join("s.sock");
/// # let consumer_path = path.clone();
/// # let consumer = std::thread::spawn(move || -> vmmfd::Result<()> {
/// #     let mut consumer = Consumer::connect(&driver, None, &consumer_path, &Config::default(), &|_| {})?;
/// #     let object = consumer.request(&Request::default())?;
/// #     consumer.report(&object, &Verdict::unchecked(true))?;
/// #     Ok(())
/// # });
///
/// let config = Config::default();
/// let listener = Listener::bind(&path, &config)?;
/// let buffer = Buffer::new(memory, Unchecked, None)?;
/// for served in serve(listener, &buffer, &ServeOptions::default(), &config, &|_| {}).into_result()? {
///     println!("process {} has used the memory", served.peer.pid);
/// }
/// # consumer.join().expect("no panic")?;
/// # Ok::<(), vmmfd::Error>(())
/// ```
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

/// Serves a buffer to the one peer of a connected socket, such as a socket of a pair, or a socket that the caller accepted. Blocks
/// until the session is over. Several threads may serve one buffer. Ignores [`ServeOptions::consumers`].
///
/// # Errors
/// Errors before the peer's request: [`Error::Socket`] if the descriptor is not a connected `SOCK_SEQPACKET` socket;
/// [`PeerError::NotAllowed`], [`PeerError::Gone`], [`PeerError::Timeout`], [`PeerError::Protocol`], [`Error::Interrupted`],
/// [`Error::System`]. Later errors are in [`Served::error`].
pub fn serve_connection(
    socket: OwnedFd,
    buffer: &Buffer<'_>,
    options: &ServeOptions,
    config: &Config,
    observer: Observer<'_>,
) -> Result<Served> {
    let cancel = config.cancellation()?;
    let arrival = Acceptor::new(backend(buffer), config, &cancel)?.accept_one(socket)?;
    let context = Context { buffer, options, observer, failure: &|| None };
    Ok(serve_consumer(arrival, context))
}

fn backend(buffer: &Buffer<'_>) -> Backend {
    buffer.shared().device().backend()
}

/// Runs the session with a consumer, from its first request.
fn serve_consumer(arrival: Arrival, context: Context<'_>) -> Served {
    let Arrival { link, backend, request } = arrival;
    let peer = link.peer();
    (context.observer)(Event::Requested { peer });
    let (found, error) = Session::new(link, backend, context).run(request);
    let served = Served { peer, found, error };
    (context.observer)(Event::Ended { served: &served });
    served
}

/// The state that the threads of a service share.
struct Server<'a> {
    buffer: &'a Buffer<'a>,
    options: &'a ServeOptions,
    config: &'a Config,
    observer: Observer<'a>,
    /// Stops all sessions.
    stop: Cancel,
    /// Readable if `state` has changed: the accepting thread checks it again.
    wake: EventFd,
    state: Mutex<ServiceState>,
}

#[derive(Default)]
struct ServiceState {
    /// The error of filling the buffer, which remains empty.
    failure: Option<Error>,
    /// The number of consumers so far.
    admitted: u64,
    /// The number of connected consumers.
    connected: u64,
    /// When the time without a consumer started: at the end of the first fill, and of the last session.
    idle_since: Option<Instant>,
    served: Vec<Served>,
}

impl ServiceState {
    /// The error to send to consumers after a failed fill. An interruption is reported as one.
    fn refusal(&self) -> Option<Error> {
        match self.failure.as_ref()? {
            Error::Interrupted { reason } => Some(Error::Interrupted { reason: *reason }),
            error => {
                let message = format!("the producer could not fill the buffer: {}", error.in_full());
                Some(mismatch(ErrorCode::Failed, message))
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
        let stop = Cancel::new()?;
        let wake = eventfd()?;
        Ok(Self { buffer, options, config, observer, stop, wake, state: Mutex::default() })
    }

    fn run(self, listener: Listener) -> ServeReport {
        (self.observer)(Event::Listening { path: listener.path(), consumers: self.options.consumers });
        let refusal = || self.state().refusal();
        let accepted = thread::scope(|scope| {
            let mut acceptor = Acceptor::new(backend(self.buffer), self.config, &self.stop)?;
            let accepted = self.accept_all(scope, &listener, &mut acceptor, &refusal);
            // Removes the socket file: no other consumer can connect.
            drop(listener);
            let reason = match &accepted {
                Err(Error::Interrupted { reason }) => *reason,
                _ => CancelReason::Program,
            };
            self.stop.cancel(reason);
            acceptor.close_all(&match (reason, refusal()) {
                (CancelReason::Program, None | Some(Error::Interrupted { .. })) => {
                    mismatch(ErrorCode::Full, "this producer has served its last consumer")
                }
                (CancelReason::Program, Some(refusal)) => refusal,
                (reason, _) => Error::Interrupted { reason },
            });
            accepted
        });
        let ServiceState { failure, served, .. } = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        let error = match (accepted, failure) {
            // The fill was interrupted because all consumers had been refused.
            (Ok(()), Some(Error::Interrupted { .. })) => None,
            (Ok(()), failure) => failure,
            (Err(error), _) => Some(error),
        };
        ServeReport { served, error }
    }

    fn state(&self) -> MutexGuard<'_, ServiceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake_acceptor(&self) {
        if let Err(errno) = self.wake.write(1) {
            tracing::error!(%errno, "can't write to an eventfd");
        }
    }

    /// Fills the buffer in a thread, and accepts consumers until all are served or the fill has failed.
    fn accept_all<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        listener: &Listener,
        acceptor: &mut Acceptor<'_>,
        failure: &'scope (dyn Fn() -> Option<Error> + Sync),
    ) -> Result<()> {
        let cancel = self.config.cancellation()?;
        let exclusive = self.buffer.turn(Turn::Exclusive, Duration::from_millis(100), &mut || cancel.check())?;
        spawn(scope, "fill", move || {
            let filled = self.buffer.fill(&mut || self.stop.check(), self.observer);
            let mut state = self.state();
            (state.idle_since, state.failure) = (Some(Instant::now()), filled.err());
            drop((state, exclusive));
            self.wake_acceptor();
        })?;
        while let Some(deadline) = self.accept_deadline() {
            let expected = match self.options.consumers {
                0 => MAX_IDLE,
                consumers => usize::try_from(consumers - self.state().admitted).unwrap_or(usize::MAX).min(1024),
            };
            acceptor.expected = expected;
            match acceptor.next(listener, Some(self.wake.as_fd()), deadline)? {
                Next::Arrived(arrival) => self.admit(scope, *arrival, failure),
                // Resets the eventfd; the loop checks the state again.
                Next::Woken => drop(self.wake.read()),
                Next::TimedOut if self.state().connected == 0 => {
                    return Err(Error::Peer(PeerError::NoConsumer { waited: self.config.timeout }));
                }
                Next::TimedOut => {}
            }
        }
        Ok(())
    }

    /// The deadline for the next consumer. `None` if all consumers are served, or the fill has failed.
    fn accept_deadline(&self) -> Option<Instant> {
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

    /// Starts a session with a consumer, or refuses it if all expected consumers were admitted.
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
            arrival.link.report(&mismatch(ErrorCode::Full, message));
            arrival.link.channel.shut_down_writing();
            return;
        }
        state.admitted += 1;
        state.connected += 1;
        drop(state);
        let peer = arrival.link.peer();
        let context = Context { buffer: self.buffer, options: self.options, observer: self.observer, failure };
        if let Err(error) = spawn(scope, "consumer", move || self.record(serve_consumer(arrival, context))) {
            self.record(Served { peer, found: None, error: Some(error) });
        }
    }

    fn record(&self, served: Served) {
        let mut state = self.state();
        if self.options.consumers == 0 && state.served.len() >= MAX_REMEMBERED {
            let successful = |served: &Served| served.error.is_none() && !served.mismatched();
            let forgotten = state.served.iter().position(successful).unwrap_or(MAX_REMEMBERED - 1);
            state.served.remove(forgotten);
        }
        state.served.push(served);
        state.connected -= 1;
        state.idle_since = Some(Instant::now());
        drop(state);
        self.wake_acceptor();
    }
}

fn spawn<'scope>(scope: &'scope Scope<'scope, '_>, name: &str, work: impl FnOnce() + Send + 'scope) -> Result<()> {
    let spawned = thread::Builder::new().name(name.to_owned()).spawn_scoped(scope, work);
    spawned.map(drop).map_err(|error| Error::system("start a thread", error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn result_has_the_consumers_error() {
        let peer = Peer { pid: 1, uid: 2 };
        let served = |verified, error| Served { peer, found: Some(Verdict::unchecked(verified)), error };
        let gone = || Some(Error::Peer(PeerError::Gone { pid: 1, purpose: "for its result" }));
        let result = |served, error| ServeReport { served, error }.into_result().map(|served| served.len());
        assert_eq!(result(vec![served(true, None), served(true, None)], None).ok(), Some(2));
        let failed = |failed, error| result(vec![served(true, None), failed], error).unwrap_err();
        assert!(matches!(failed(served(true, gone()), None), Error::Peer(PeerError::Gone { .. })));
        assert!(matches!(failed(served(false, None), None), Error::Peer(PeerError::Mismatch { .. })));
        let none = Some(Error::Peer(PeerError::NoConsumer { waited: Duration::ZERO }));
        assert!(matches!(failed(served(false, gone()), none), Error::Peer(PeerError::NoConsumer { .. })));
    }
}
