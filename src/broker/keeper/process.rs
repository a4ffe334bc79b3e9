//! The keeper's process.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    time::Duration,
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
    OWN_DESCRIPTORS, RECEIVED_EACH, VERSION,
    held::Held,
    image::Image,
    message::{Arrival, Message, receive, send},
    newcomers::{Newcomers, Request, answer},
    passed::{Passed, Received},
    peer::until,
    role::Role,
    service::Service,
};
use crate::{
    broker::notify::notify,
    channel::{Cancel, Listener, Peer},
    error::{Error, Result},
};

/// How many messages of the server are read before signals and other connections have their turn.
const AT_ONCE: usize = 256;

/// A connection with a server.
#[derive(Debug)]
struct Connection {
    socket: OwnedFd,
    pid: i32,
    /// Whether its hello has come.
    greeted: bool,
    /// How many descriptors came that were not reported to it.
    received: usize,
}

/// The keeper.
#[derive(Debug)]
pub(in crate::broker) struct KeeperProcess {
    image: Image,
    held: Held,
    server: Option<Connection>,
    /// Where servers connect, unless this process starts them.
    newcomers: Option<Newcomers>,
    service: Option<Service>,
    /// Whether to execute the program at this one's path, and the connection that waits for the result.
    reload: Option<Option<OwnedFd>>,
    /// Whether the init of this process waits to hear that the keeper is ready.
    notifies: bool,
}

impl KeeperProcess {
    /// The keeper that starts the broker at a path.
    ///
    /// # Errors
    /// [`Error::System`].
    pub(in crate::broker) fn of_service(socket: &Path, role: Role) -> Result<Self> {
        let failed = |error| Error::system("start the keeper", error);
        if role.is_first() {
            // Another broker may serve this path.
            Listener::check_free(socket)?;
        }
        let mut received = Received::take(role).map_err(failed)?;
        let service = Service::new(socket, role, received.process.take());
        Self::new(received, role, None, Some(service)).map_err(failed)
    }

    /// The keeper that listens at a path, for servers that another process starts.
    ///
    /// # Errors
    /// [`Error::Socket`](crate::Error::Socket) if another process listens there, or if others may look into the folder;
    /// [`Error::System`].
    pub(in crate::broker) fn at(path: &Path, role: Role, cancel: &Cancel) -> Result<Self> {
        let failed = |error| Error::system("start the keeper", error);
        let mut received = Received::take(role).map_err(failed)?;
        let newcomers = Newcomers::at(path, received.listener.take(), cancel)?;
        Self::new(received, role, Some(newcomers), None).map_err(failed)
    }

    fn new(received: Received, role: Role, newcomers: Option<Newcomers>, service: Option<Service>) -> io::Result<Self> {
        let Received { kept, server, asker, last_report, is_incomplete, .. } = received;
        let greeted = matches!(role, Role::Reloaded(_));
        let server = server.map(|socket| {
            let pid = service.as_ref().map_or_else(|| Peer::of(&socket).map_or(0, |peer| peer.pid), Service::pid);
            Connection { socket, pid, greeted, received: 0 }
        });
        let keeper = Self {
            image: Image::of_this_process()?,
            held: Held::new(kept, !is_incomplete, last_report),
            server,
            // A server that starts its keeper is no init, and its own init waits for its own word.
            notifies: service.is_none() && !matches!(role, Role::Another(_)),
            newcomers,
            service,
            reload: None,
        };
        if let Some(asker) = asker {
            tracing::info!("reloaded: executes {}", keeper.image.path().display());
            answer(&asker, &Message::Welcome { version: VERSION, allowed: allowed() });
        }
        Ok(keeper)
    }

    /// Keeps until it is asked to end (SIGTERM, SIGINT) or its server ends of itself. Returns the exit code. Blocks.
    ///
    /// # Errors
    /// [`Error::System`].
    pub(in crate::broker) fn run(mut self) -> Result<i32> {
        let result = self.keep();
        self.finish();
        result
    }

    fn keep(&mut self) -> Result<i32> {
        let signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]);
        let failed = |errno: Errno| Error::system("wait for signals", errno);
        signals.thread_block().map_err(failed)?;
        let signals = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK).map_err(failed)?;
        if self.notifies {
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
            self.serve_newcomers();
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
        fds.extend(self.newcomers.iter().flat_map(Newcomers::watched).map(watch));
        let service = self.service.as_ref();
        fds.extend(service.and_then(Service::pidfd).map(watch));
        let moments = service.and_then(Service::restart_at).into_iter();
        let moments = moments.chain(self.newcomers.as_ref().and_then(Newcomers::deadline));
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
                    self.held.keep(name, fd);
                }
                if server.received >= RECEIVED_EACH {
                    let received = std::mem::take(&mut server.received) as u64;
                    reply(&server.socket, &Message::Received(received))?;
                }
            }
            Message::Remove(names) => {
                names.iter().for_each(|name| self.held.remove(name));
            }
            Message::Complete(_) => self.held.complete(),
            // The last descriptors of the handover.
            Message::Received(_) => {}
            Message::Sync(number) => reply(&server.socket, &Message::Synced(number))?,
            Message::Serving => {
                self.held.set_last_report(String::new());
                if let Some(service) = &mut self.service {
                    service.is_ready();
                }
            }
            Message::Stopping(report) => {
                self.held.set_last_report(report);
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
            self.held.begin_resend();
            return Ok(());
        }
        let handed = self.held.hand_over(&server.socket);
        handed.map_err(|error| io::Error::other(format!("it did not take over what is held: {error}")))
    }

    /// Does what new connections ask for.
    fn serve_newcomers(&mut self) {
        let requests = self.newcomers.as_mut().map(Newcomers::requests).unwrap_or_default();
        for request in requests {
            match request {
                Request::Serve { socket, pid, version, resends } => self.replace_server(socket, pid, version, resends),
                Request::Reload(socket) if matches!(self.reload, Some(Some(_))) => {
                    answer(&socket, &Message::Refused("another reload is under way".to_owned()));
                }
                Request::Reload(socket) => self.reload = Some(Some(socket)),
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
            return answer(&socket, &Message::Refused(why));
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

    /// Whether nothing is under way.
    fn is_settled(&self) -> bool {
        self.held.is_whole() && self.server.as_ref().is_none_or(|server| server.greeted)
    }

    /// Executes the program that is at this one's path now in place of this one, with all that is held, if it can take over.
    fn execute_new(&mut self, asker: Option<OwnedFd>) -> Result<()> {
        // The next program counts from 0.
        if let Some(server) = self.server.as_mut().filter(|server| server.received > 0) {
            let received = std::mem::take(&mut server.received) as u64;
            // If it is gone the next read returns its end.
            let _ = send(&server.socket, &Message::Received(received), &[]);
        }
        let passed = Passed {
            kept: self.held.iter().collect(),
            server: self.server.as_ref().map(|server| server.socket.as_fd()),
            listener: self.newcomers.as_ref().map(Newcomers::listener),
            asker: asker.as_ref().map(AsFd::as_fd),
            last_report: self.held.last_report(),
        };
        let file = match self.image.check(&passed) {
            Ok(file) => file,
            Err(why) => {
                tracing::warn!("no upgrade: {why}; everything goes on as before");
                if let Some(asker) = asker {
                    answer(&asker, &Message::Refused(why));
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
                // Fails if the server is gone.
                let _ = send(&server.socket, &Message::Stopping(String::new()), &[]);
                tracing::info!("ends: the server, pid {}, has everything that was held here", server.pid);
            }
            None if count == 0 => tracing::info!("ends: it held nothing"),
            None if self.held.last_report().is_empty() => {
                tracing::warn!("ends, and frees {count} descriptors that no server has")
            }
            None => tracing::info!("ends, and frees {count} descriptors: {}", self.held.last_report()),
        }
        0
    }

    /// Closes everything, and removes the socket's file.
    fn finish(self) {
        let path = match (&self.newcomers, &self.service) {
            (Some(newcomers), _) => newcomers.path().to_owned(),
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

/// How many descriptors a keeper may hold.
fn allowed() -> u64 {
    use nix::sys::resource::{Resource, getrlimit};
    getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft).saturating_sub(OWN_DESCRIPTORS)
}
