//! The keeper's process.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
    },
};

use super::{
    PATIENCE, RECEIVED_EACH, VERSION, WINDOW,
    image::{Image, Passed, Received, Role, allowed, until},
    link::{dial, ready, require_own_user},
    message::{Arrival, MAX_TOGETHER, Message, receive, send},
    service::Service,
};
use crate::{
    broker::notify::notify,
    channel::{Cancel, Listener, Peer},
    error::{Error, Result},
};

/// How many messages of the server are read before signals and other connections have their turn.
const AT_ONCE: usize = 256;

/// How many connections may be accepted and not have said what they are.
const NEWCOMERS: usize = 16;

/// How long to wait before a send is tried again that met the kernel's bound on descriptors in flight.
const IN_FLIGHT_PAUSE: Duration = Duration::from_millis(2);

/// A connection with a server.
#[derive(Debug)]
struct Connection {
    socket: OwnedFd,
    pid: i32,
    /// Whether its hello has come.
    greeted: bool,
    /// How many descriptors came that it was not told of.
    received: usize,
}

/// A connection that has not said what it is.
#[derive(Debug)]
struct Newcomer {
    socket: OwnedFd,
    pid: i32,
    deadline: Instant,
}

/// The keeper.
#[derive(Debug)]
pub struct KeeperProcess {
    image: Image,
    /// The descriptors, by their names.
    held: BTreeMap<String, OwnedFd>,
    /// Names of `held` that a server which sends everything anew has not sent yet.
    stale: BTreeSet<String>,
    /// Whether the server has sent everything that it has.
    whole: bool,
    server: Option<Connection>,
    newcomers: Vec<Newcomer>,
    /// Where servers connect, unless this process starts them.
    listener: Option<(Listener, PathBuf)>,
    service: Option<Service>,
    /// Whether to execute the program at this one's path, and the connection that waits for the result.
    reload: Option<Option<OwnedFd>>,
    /// What the last server said that it held, when it ended in order.
    words: String,
}

impl KeeperProcess {
    /// The keeper that starts the broker at a path.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn of_service(socket: &Path, role: Role) -> Result<Self> {
        let failed = |error| Error::system("start the keeper", error);
        if role == Role::First {
            // Another broker may serve this path.
            Listener::check_free(socket)?;
        }
        let mut received = Received::take(role).map_err(failed)?;
        let service = Service::new(socket, role, received.process.take());
        Self::new(received, role, None, Some(service)).map_err(failed)
    }

    /// The keeper that listens at a path, for servers that an init starts.
    ///
    /// # Errors
    /// [`Error::Socket`](crate::Error::Socket) if another process listens there, or if others may look into the folder;
    /// [`Error::System`].
    pub fn at(path: &Path, role: Role, cancel: &Cancel) -> Result<Self> {
        let failed = |error| Error::system("start the keeper", error);
        let mut received = Received::take(role).map_err(failed)?;
        let listener = match received.listener.take() {
            Some(listener) => Listener::inherited(listener, path)?,
            None => Listener::bind(path, false, PATIENCE, cancel)?,
        };
        // A connection that is closed in the meantime must not block accept(2).
        rustix::io::ioctl_fionbio(&listener, true).map_err(|errno| failed(errno.into()))?;
        Self::new(received, role, Some((listener, path.to_owned())), None).map_err(failed)
    }

    fn new(
        received: Received,
        role: Role,
        listener: Option<(Listener, PathBuf)>,
        service: Option<Service>,
    ) -> io::Result<Self> {
        let Received { kept, server, asker, words, is_incomplete, .. } = received;
        let greeted = matches!(role, Role::Reloaded(_));
        let server = server.map(|socket| {
            let pid = service.as_ref().map_or_else(|| Peer::of(&socket).map_or(0, |peer| peer.pid), Service::pid);
            Connection { socket, pid, greeted, received: 0 }
        });
        let keeper = Self {
            image: Image::of_this_process()?,
            held: kept.into_iter().collect(),
            stale: BTreeSet::new(),
            whole: !is_incomplete,
            server,
            newcomers: Vec::new(),
            listener,
            service,
            reload: None,
            words,
        };
        if let Some(asker) = asker {
            tracing::info!("reloaded: executes {}", keeper.image.path().display());
            keeper.answer(&asker, &Message::Welcome { version: VERSION, allowed: allowed() });
        }
        Ok(keeper)
    }

    /// Keeps until it is asked to end (SIGTERM, SIGINT) or its server ends of itself. Returns the exit code. Blocks.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn run(mut self) -> Result<i32> {
        let result = self.keep();
        self.finish();
        result
    }

    fn keep(&mut self) -> Result<i32> {
        let signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]);
        let failed = |errno: Errno| Error::system("wait for signals", errno);
        signals.thread_block().map_err(failed)?;
        let signals = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK).map_err(failed)?;
        if self.service.is_none() {
            notify("READY=1");
        }
        if self.service.as_mut().is_some_and(Service::take_outdated) {
            self.end_server(Signal::SIGHUP);
            if let Some(service) = &mut self.service {
                service.restart();
            }
        }
        loop {
            self.start_server()?;
            self.wait(&signals)?;
            self.read_server(AT_ONCE);
            self.accept();
            self.read_newcomers();
            while let Ok(Some(signal)) = signals.read_signal() {
                match Signal::try_from(signal.ssi_signo.cast_signed()) {
                    Ok(Signal::SIGHUP) => self.reload = self.reload.take().or(Some(None)),
                    Ok(signal) => return Ok(self.end(signal)),
                    Err(_) => {}
                }
            }
            if self.service.as_mut().is_some_and(Service::has_ended) {
                // What it sent before it died.
                self.read_server(usize::MAX);
                self.server = None;
                if let Some(code) = self.service.as_mut().and_then(Service::after_end) {
                    return Ok(code);
                }
            }
            if self.is_settled()
                && let Some(asker) = self.reload.take()
            {
                self.execute_new(asker)?;
            }
        }
    }

    /// Starts a server, if it is time to.
    fn start_server(&mut self) -> Result<()> {
        let Some(service) = &mut self.service else { return Ok(()) };
        if let Some(socket) = service.start_if_due(&self.image)? {
            let pid = service.pid();
            self.server = Some(Connection { socket, pid, greeted: false, received: 0 });
        }
        Ok(())
    }

    fn wait(&self, signals: &SignalFd) -> Result<()> {
        fn watch(fd: BorrowedFd<'_>) -> PollFd<'_> {
            PollFd::new(fd, PollFlags::POLLIN)
        }
        let mut fds = vec![watch(signals.as_fd())];
        fds.extend(self.server.as_ref().map(|server| watch(server.socket.as_fd())));
        fds.extend(
            self.listener
                .as_ref()
                .filter(|_| self.newcomers.len() < NEWCOMERS)
                .map(|(listener, _)| watch(listener.as_fd())),
        );
        fds.extend(self.newcomers.iter().map(|newcomer| watch(newcomer.socket.as_fd())));
        let service = self.service.as_ref();
        fds.extend(service.and_then(Service::pidfd).map(watch));
        let moments =
            service.and_then(Service::restart_at).into_iter().chain(self.newcomers.iter().map(|of| of.deadline));
        let timeout = moments.min().map_or(PollTimeout::NONE, |at| {
            PollTimeout::try_from(until(at) + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX)
        });
        match poll(&mut fds, timeout) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(errno) => Err(Error::system("wait for the server", errno)),
        }
    }

    /// Reads what the server has sent, at most so many messages.
    fn read_server(&mut self, most: usize) {
        for _ in 0..most {
            let Some(server) = &self.server else { return };
            let taken = match receive(&server.socket) {
                Ok(Arrival::Nothing) => return,
                Ok(Arrival::End) => return self.lose_server(),
                Ok(Arrival::Message(message, fds)) => self.take(message, fds),
                Err(error) => Err(error),
            };
            if let Err(error) = taken {
                tracing::warn!("the connection with the server is closed: {error}");
                // It connects again, and sends everything.
                self.server = None;
            }
        }
    }

    fn lose_server(&mut self) {
        if let Some(server) = self.server.take().filter(|_| self.service.is_none()) {
            let count = self.held.len();
            tracing::info!("the server, pid {}, is gone: {count} descriptors are held for the next one", server.pid);
        }
    }

    /// One message of the server.
    fn take(&mut self, message: Message, fds: Vec<OwnedFd>) -> io::Result<()> {
        let Some(server) = &mut self.server else { return Ok(()) };
        if let Message::Hello { version, resends } = message {
            return self.greet(version, resends);
        }
        if !server.greeted {
            return Err(io::Error::other("its first message was no hello"));
        }
        match message {
            Message::Keep(names) => {
                server.received += names.len();
                for (name, fd) in names.into_iter().zip(fds) {
                    self.stale.remove(&name);
                    self.held.insert(name, fd);
                }
                if server.received >= RECEIVED_EACH {
                    let received = std::mem::take(&mut server.received) as u64;
                    reply(&server.socket, &Message::Received(received))?;
                }
            }
            Message::Remove(names) => {
                for name in names {
                    self.stale.remove(&name);
                    self.held.remove(&name);
                }
            }
            Message::Complete(_) => {
                for name in std::mem::take(&mut self.stale) {
                    self.held.remove(&name);
                }
                if !std::mem::replace(&mut self.whole, true) {
                    tracing::info!("holds everything that the server has: {} descriptors", self.held.len());
                }
            }
            // The last descriptors of the handover.
            Message::Received(_) => {}
            Message::Sync(number) => reply(&server.socket, &Message::Synced(number))?,
            Message::Serving => {
                self.words.clear();
                if let Some(service) = &mut self.service {
                    service.is_ready();
                }
            }
            Message::Stopping(words) => {
                self.words = words;
                if let Some(service) = &mut self.service {
                    service.is_stopping();
                }
            }
            other => return Err(io::Error::other(format!("it sent {other:?}, which servers do not send"))),
        }
        Ok(())
    }

    /// The server's hello.
    fn greet(&mut self, version: u32, resends: bool) -> io::Result<()> {
        let Some(server) = &mut self.server else { return Ok(()) };
        if version != VERSION {
            let why = format!(
                "it has version {VERSION} of the protocol between server and keeper, and the server version {version}: reload the keeper"
            );
            let _ = send(&server.socket, &Message::Refused(why.clone()), &[]);
            return Err(io::Error::other(why));
        }
        server.greeted = true;
        reply(&server.socket, &Message::Welcome { version: VERSION, allowed: allowed() })?;
        if resends {
            self.stale = self.held.keys().cloned().collect();
            self.whole = false;
            return Ok(());
        }
        let handed = hand_over(&server.socket, &self.held, self.whole);
        handed.map_err(|error| io::Error::other(format!("it did not take over what is held: {error}")))
    }

    /// Accepts connections of processes of this user.
    fn accept(&mut self) {
        while let Some((listener, _)) = self.listener.as_ref().filter(|_| self.newcomers.len() < NEWCOMERS) {
            let socket = match listener.accept() {
                Ok(Some(socket)) => socket,
                Ok(None) => return,
                Err(error) => {
                    tracing::warn!("no connection can be accepted: {}", error.in_full());
                    return thread::sleep(Duration::from_millis(10));
                }
            };
            let peer = match Peer::of(&socket) {
                Ok(peer) => peer,
                Err(error) => {
                    tracing::warn!("{}", error.in_full());
                    continue;
                }
            };
            match require_own_user(peer) {
                Ok(()) => {
                    self.newcomers.push(Newcomer { socket, pid: peer.pid, deadline: Instant::now() + PATIENCE });
                }
                Err(why) => {
                    tracing::warn!("a connection is refused: {why}");
                    self.answer(&socket, &Message::Refused(why));
                }
            }
        }
    }

    /// Reads the first messages of new connections.
    fn read_newcomers(&mut self) {
        for newcomer in std::mem::take(&mut self.newcomers) {
            let Newcomer { socket, pid, deadline } = newcomer;
            match receive(&socket) {
                Ok(Arrival::Nothing) if deadline > Instant::now() => {
                    self.newcomers.push(Newcomer { socket, pid, deadline });
                }
                Ok(Arrival::Message(Message::Hello { version, resends }, _)) => {
                    self.replace_server(socket, pid, version, resends)
                }
                Ok(Arrival::Message(Message::Reload, _)) => match &self.reload {
                    Some(Some(_)) => self.answer(&socket, &Message::Refused("another reload is under way".to_owned())),
                    _ => self.reload = Some(Some(socket)),
                },
                // What is no server is closed.
                _ => {}
            }
        }
    }

    /// Serves a new connection, if the server before it is gone.
    fn replace_server(&mut self, socket: OwnedFd, pid: i32, version: u32, resends: bool) {
        // To its end.
        self.read_server(usize::MAX);
        if let Some(server) = &self.server {
            let why = format!("it already serves pid {}: a keeper has one server", server.pid);
            tracing::warn!("pid {pid} is refused: {why}");
            return self.answer(&socket, &Message::Refused(why));
        }
        self.server = Some(Connection { socket, pid, greeted: false, received: 0 });
        match self.greet(version, resends) {
            Ok(()) => tracing::info!("serves pid {pid}, with {} descriptors", self.held.len()),
            Err(error) => {
                tracing::warn!("pid {pid} is not served: {error}");
                self.server = None;
            }
        }
    }

    fn answer(&self, socket: &OwnedFd, message: &Message) {
        if let Err(error) = send(socket, message, &[]) {
            tracing::debug!(%error, "a connection can't be answered");
        }
    }

    /// Whether nothing is under way.
    fn is_settled(&self) -> bool {
        self.whole && self.server.as_ref().is_none_or(|server| server.greeted)
    }

    /// Executes the program that is at this one's path now in place of this one, with all that is held, if it can take over.
    fn execute_new(&mut self, asker: Option<OwnedFd>) -> Result<()> {
        // What it was told of is counted anew.
        if let Some(server) = self.server.as_mut().filter(|server| server.received > 0) {
            let received = std::mem::take(&mut server.received) as u64;
            // If it is gone the next read returns its end.
            let _ = send(&server.socket, &Message::Received(received), &[]);
        }
        let passed = Passed {
            kept: self.held.iter().map(|(name, fd)| (name.as_str(), fd.as_fd())).collect(),
            server: self.server.as_ref().map(|server| server.socket.as_fd()),
            listener: self.listener.as_ref().map(|(listener, _)| listener.as_fd()),
            asker: asker.as_ref().map(AsFd::as_fd),
            words: &self.words,
        };
        let file = match self.image.check(&passed) {
            Ok(file) => file,
            Err(why) => {
                tracing::warn!("no upgrade: {why}; everything goes on as before");
                if let Some(asker) = asker {
                    self.answer(&asker, &Message::Refused(why));
                }
                return Ok(());
            }
        };
        let process = self.service.as_ref().and_then(Service::pidfd);
        let role = Role::Reloaded(self.service.as_ref().map_or(0, Service::pid));
        let error = self.image.execute(&file, role, process, &passed);
        Err(Error::system(format!("execute {}", self.image.path().display()), error))
    }

    /// Ends the server that this process started, and waits for it.
    fn end_server(&mut self, signal: Signal) {
        let mut killed = false;
        let Some(deadline) = self.service.as_ref().and_then(|service| service.signal(signal)) else { return };
        loop {
            self.read_server(usize::MAX);
            let Some(service) = &mut self.service else { return };
            if service.has_ended() {
                self.read_server(usize::MAX);
                self.server = None;
                return;
            }
            if until(deadline).is_zero() && !std::mem::replace(&mut killed, true) {
                tracing::warn!("the server does not end: it is killed");
                service.signal(Signal::SIGKILL);
            }
            let mut fds = Vec::new();
            fds.extend(service.pidfd().map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
            fds.extend(self.server.as_ref().map(|server| PollFd::new(server.socket.as_fd(), PollFlags::POLLIN)));
            let _ = poll(
                &mut fds,
                PollTimeout::try_from(until(deadline).max(Duration::from_millis(20))).unwrap_or(PollTimeout::MAX),
            );
        }
    }

    /// The end that a signal asks for. Returns the exit code.
    fn end(&mut self, signal: Signal) -> i32 {
        if self.service.is_some() {
            self.end_server(Signal::SIGTERM);
            return self.service.as_mut().map_or(0, |service| service.code(signal as i32));
        }
        let count = self.held.len();
        match &self.server {
            Some(server) => {
                // If the server is gone there is nobody to tell.
                let _ = send(&server.socket, &Message::Stopping(String::new()), &[]);
                tracing::info!("ends: the server, pid {}, has everything that was held here", server.pid);
            }
            None if self.held.is_empty() => tracing::info!("ends: it held nothing"),
            None if self.words.is_empty() => tracing::warn!("ends, and frees {count} descriptors that no server has"),
            None => tracing::info!("ends, and frees {count} descriptors: {}", self.words),
        }
        0
    }

    /// Closes everything, and removes the socket's file.
    fn finish(self) {
        let path = match (&self.listener, &self.service) {
            (Some((_, path)), _) => path.clone(),
            (None, Some(service)) => service.socket().to_owned(),
            _ => return,
        };
        drop(self);
        let removed =
            Cancel::new().and_then(|cancel| Listener::remove_unserved(&path, Duration::from_millis(200), &cancel));
        if let Err(error) = removed {
            tracing::debug!(%error, "the socket's file stays");
        }
    }
}

/// Answers a server. It may be dead already: what it sent before that is still to be read.
fn reply(socket: &OwnedFd, message: &Message) -> io::Result<()> {
    match send(socket, message, &[]) {
        Err(error) if matches!(error.raw_os_error(), Some(nix::libc::EPIPE | nix::libc::ECONNRESET)) => Ok(()),
        sent => sent,
    }
}

/// Sends a server everything that is held. Blocks for at most [`PATIENCE`] without progress.
fn hand_over(socket: &OwnedFd, held: &BTreeMap<String, OwnedFd>, whole: bool) -> io::Result<()> {
    let all: Vec<(&String, &OwnedFd)> = held.iter().collect();
    let mut in_flight = 0;
    for some in all.chunks(MAX_TOGETHER) {
        while in_flight + some.len() > WINDOW {
            in_flight -= received(socket)?.min(in_flight);
        }
        let message = Message::Keep(some.iter().map(|(name, _)| (*name).clone()).collect());
        let fds: Vec<BorrowedFd<'_>> = some.iter().map(|(_, fd)| fd.as_fd()).collect();
        send_all(socket, &message, &fds)?;
        in_flight += some.len();
    }
    send_all(socket, &Message::Complete(whole), &[])
}

/// Waits until the server has received more. Returns how many descriptors.
fn received(socket: &OwnedFd) -> io::Result<usize> {
    loop {
        match receive(socket)? {
            Arrival::Message(Message::Received(count), _) => return Ok(usize::try_from(count).unwrap_or(usize::MAX)),
            Arrival::Message(other, _) => return Err(io::Error::other(format!("it sent {other:?} in the handover"))),
            Arrival::End => return Err(io::ErrorKind::UnexpectedEof.into()),
            Arrival::Nothing if ready(socket, PollFlags::POLLIN, PATIENCE) => {}
            Arrival::Nothing => return Err(io::ErrorKind::TimedOut.into()),
        }
    }
}

/// Sends a message once there is room for it.
fn send_all(socket: &OwnedFd, message: &Message, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match send(socket, message, fds) {
            Err(error) if Instant::now() < deadline => match error.raw_os_error() {
                Some(nix::libc::EAGAIN) => drop(ready(socket, PollFlags::POLLOUT, until(deadline))),
                Some(nix::libc::ETOOMANYREFS | nix::libc::ENOBUFS | nix::libc::ENOMEM) => {
                    thread::sleep(IN_FLIGHT_PAUSE)
                }
                _ => return Err(error),
            },
            sent => return sent,
        }
    }
}

/// Asks the keeper at a path to execute the program at its path in place, and waits for the result.
///
/// # Errors
/// [`Error::System`] if the keeper refuses that program, or can't be reached.
pub fn reload(path: &Path, cancel: &Cancel) -> Result<()> {
    let failed = |why: String| Error::system(format!("reload the keeper at {}", path.display()), io::Error::other(why));
    let (socket, _) = dial(path, Duration::ZERO, cancel)?;
    send(&socket, &Message::Reload, &[]).map_err(|error| failed(error.to_string()))?;
    loop {
        match receive(&socket).map_err(|error| failed(error.to_string()))? {
            Arrival::Message(Message::Welcome { .. }, _) => return Ok(()),
            Arrival::Message(Message::Refused(why), _) => return Err(failed(why)),
            Arrival::Nothing => {
                let deadline = Instant::now() + 3 * PATIENCE;
                if !cancel.wait(socket.as_fd(), PollFlags::POLLIN, deadline)? {
                    return Err(failed(format!("it does not answer within {:?}", 3 * PATIENCE)));
                }
            }
            Arrival::Message(other, _) => return Err(failed(format!("it answers {other:?}"))),
            Arrival::End => return Err(failed("it ended".to_owned())),
        }
    }
}
