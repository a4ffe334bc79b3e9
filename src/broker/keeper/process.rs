//! The keeper process.

#[cfg(test)]
pub(super) mod simulated;

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
        wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid},
    },
};

use super::{
    OWN_DESCRIPTORS, RECEIVED_EACH, VERSION,
    held::Held,
    image::Image,
    message::{Arrival, Message, receive, send},
    newcomers::{NewcomerRequest, Newcomers, answer},
    passed::{Passed, PassedRecord},
    peer::until,
    role::Role,
    service::Service,
};
use crate::{
    broker::notify::notify,
    channel::{Cancel, Listener, Peer},
    error::{Error, Result},
};

/// The most messages of the server to read before checking signals and other connections.
const MESSAGES_PER_TURN: usize = 256;

/// A server's connection.
#[derive(Debug)]
struct KeeperConnection {
    socket: OwnedFd,
    pid: i32,
    /// Whether its hello was received.
    greeted: bool,
    /// Received descriptors that are not acknowledged yet.
    received: usize,
}

#[derive(Debug)]
pub(in crate::broker) struct KeeperProcess {
    image: Image,
    held: Held,
    server: Option<KeeperConnection>,
    /// Where servers connect; `None` if this process starts them.
    newcomers: Option<Newcomers>,
    service: Option<Service>,
    /// A requested reload, and the connection that waits for its result.
    reload: Option<Option<OwnedFd>>,
    /// Whether this process reports `READY=1` to its init.
    notifies: bool,
}

impl KeeperProcess {
    /// Creates the keeper that starts the broker's servers at a path.
    ///
    /// # Errors
    /// [`Error::System`].
    pub(in crate::broker) fn of_service(socket: &Path, role: Role) -> Result<Self> {
        let failed = |error| Error::system("start the keeper", error);
        if role.is_first() {
            // Another broker may already serve this path.
            Listener::check_free(socket)?;
        }
        let mut received = PassedRecord::take().map_err(failed)?;
        let service = Service::new(socket, role, received.process.take());
        Self::new(received, role, None, Some(service)).map_err(failed)
    }

    /// Creates a keeper that listens at a path for servers that others start.
    ///
    /// # Errors
    /// [`Error::Socket`](crate::Error::Socket) if another process listens there, or if other users can access the folder;
    /// [`Error::System`].
    pub(in crate::broker) fn at(path: &Path, role: Role, cancel: &Cancel) -> Result<Self> {
        let failed = |error| Error::system("start the keeper", error);
        let mut received = PassedRecord::take().map_err(failed)?;
        let newcomers = Newcomers::at(path, received.listener.take(), cancel)?;
        Self::new(received, role, Some(newcomers), None).map_err(failed)
    }

    fn new(
        received: PassedRecord,
        role: Role,
        newcomers: Option<Newcomers>,
        service: Option<Service>,
    ) -> io::Result<Self> {
        let PassedRecord { held, server, requester, last_report, .. } = received;
        let greeted = matches!(role, Role::Reloaded(_));
        let server = server.map(|socket| {
            let pid = service.as_ref().map_or_else(|| Peer::of(&socket).map_or(0, |peer| peer.pid), Service::pid);
            KeeperConnection { socket, pid, greeted, received: 0 }
        });
        let keeper = Self {
            image: Image::of_this_process()?,
            held: Held::new(held, last_report),
            server,
            // A server that starts its keeper is not an init, and the server's own init waits for the server's report.
            notifies: service.is_none() && !matches!(role, Role::Another(_)),
            newcomers,
            service,
            reload: None,
        };
        if let Some(requester) = requester {
            tracing::info!("reloaded: now executing {}", keeper.image.path.display());
            answer(&requester, &Message::Welcome { version: VERSION, allowed: descriptor_limit() });
        }
        Ok(keeper)
    }

    /// Holds descriptors until SIGTERM, SIGINT or the server's own exit ends it. Returns the exit code. Blocks.
    ///
    /// # Errors
    /// [`Error::System`].
    pub(in crate::broker) fn run(mut self) -> Result<i32> {
        let result = self.serve();
        self.finish();
        result
    }

    fn serve(&mut self) -> Result<i32> {
        let mut signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]);
        // Process 1 of a container is the parent of all orphans.
        let is_init = std::process::id() == 1;
        if is_init {
            signals.add(Signal::SIGCHLD);
        }
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
            self.read_server(MESSAGES_PER_TURN);
            self.serve_newcomers();
            while let Ok(Some(signal)) = signals.read_signal() {
                match Signal::try_from(signal.ssi_signo.cast_signed()) {
                    Ok(Signal::SIGHUP) => self.reload = self.reload.take().or(Some(None)),
                    Ok(Signal::SIGCHLD) => {}
                    Ok(signal) => return Ok(self.end(signal)),
                    Err(_) => {}
                }
            }
            if self.service.as_mut().is_some_and(Service::has_ended) {
                // Read the messages that it sent before it died.
                self.read_server(usize::MAX);
                self.server = None;
                if let Some(code) = self.service.as_mut().and_then(Service::after_end) {
                    return Ok(code);
                }
            }
            if is_init {
                self.reap_orphans();
            }
            if self.is_settled()
                && let Some(requester) = self.reload.take()
            {
                self.reload(requester)?;
            }
        }
    }

    /// Waits for children that this process did not start, so that they do not remain zombies.
    fn reap_orphans(&self) {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        while let Ok(WaitStatus::Exited(pid, _) | WaitStatus::Signaled(pid, ..)) = waitid(Id::All, flags) {
            // The next turn handles the server's end.
            if self.service.as_ref().is_some_and(|service| service.pid() == pid.as_raw()) {
                return;
            }
            let _ = waitpid(pid, None);
        }
    }

    /// Starts a server if one is due.
    fn start_server(&mut self) -> Result<()> {
        let Some(service) = &mut self.service else { return Ok(()) };
        if let Some(socket) = service.start_if_due(&self.image)? {
            let pid = service.pid();
            self.server = Some(KeeperConnection { socket, pid, greeted: false, received: 0 });
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
        let deadlines = service.and_then(|service| service.restart_at).into_iter();
        let deadlines = deadlines.chain(self.newcomers.as_ref().and_then(Newcomers::deadline));
        let timeout = deadlines.min().map_or(PollTimeout::NONE, |at| {
            PollTimeout::try_from(until(at) + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX)
        });
        match poll(&mut fds, timeout) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(errno) => Err(Error::system("wait for the server", errno)),
        }
    }

    /// Reads at most `limit` messages of the server.
    fn read_server(&mut self, limit: usize) {
        for _ in 0..limit {
            let Some(server) = &self.server else { return };
            let taken = match receive(&server.socket) {
                Ok(Arrival::Nothing) => return,
                Ok(Arrival::End) => return self.lose_server(),
                Ok(Arrival::Message(message, fds)) => self.handle(message, fds),
                Err(error) => Err(error),
            };
            if let Err(error) = taken {
                tracing::warn!("closing the connection with the server: {error}");
                // The server reconnects and sends everything again.
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

    /// Handles one message of the server.
    fn handle(&mut self, message: Message, fds: Vec<OwnedFd>) -> io::Result<()> {
        let Some(server) = &mut self.server else { return Ok(()) };
        if let Message::Hello { version, resends } = message {
            return self.greet(version, resends);
        }
        if !server.greeted {
            return Err(io::Error::other("its first message was not a hello"));
        }
        match message {
            Message::Hold(names) => {
                server.received += names.len();
                for (name, fd) in names.into_iter().zip(fds) {
                    self.held.hold(name, fd);
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
            // Acknowledges the last descriptors of the handover.
            Message::Received(_) => {}
            Message::Sync(number) => reply(&server.socket, &Message::Synced(number))?,
            Message::Serving => {
                self.held.last_report = String::new();
                if let Some(service) = &mut self.service {
                    service.mark_ready();
                }
            }
            Message::Stopping(report) => {
                self.held.last_report = report;
                if let Some(service) = &mut self.service {
                    service.mark_stopping();
                }
            }
            other => return Err(io::Error::other(format!("it sent {other:?}, which servers do not send"))),
        }
        Ok(())
    }

    /// Handles the server's hello.
    fn greet(&mut self, version: u32, resends: bool) -> io::Result<()> {
        let Some(server) = &mut self.server else { return Ok(()) };
        if version != VERSION {
            let why = format!(
                "this keeper has version {VERSION} of the protocol between server and keeper, and the server has version {version}: reload the keeper"
            );
            let _ = send(&server.socket, &Message::Refused(why.clone()), &[]);
            return Err(io::Error::other(why));
        }
        server.greeted = true;
        reply(&server.socket, &Message::Welcome { version: VERSION, allowed: descriptor_limit() })?;
        if resends {
            self.held.begin_resend();
            return Ok(());
        }
        let handed = self.held.hand_over(&server.socket);
        handed.map_err(|error| io::Error::other(format!("it did not take over the descriptors: {error}")))
    }

    /// Handles the requests of new connections.
    fn serve_newcomers(&mut self) {
        let requests = self.newcomers.as_mut().map(Newcomers::requests).unwrap_or_default();
        for request in requests {
            match request {
                NewcomerRequest::Serve { socket, pid, version, resends } => {
                    self.replace_server(socket, pid, version, resends)
                }
                NewcomerRequest::Reload(socket) if matches!(self.reload, Some(Some(_))) => {
                    answer(&socket, &Message::Refused("another reload is in progress".to_owned()));
                }
                NewcomerRequest::Reload(socket) => self.reload = Some(Some(socket)),
            }
        }
    }

    /// Serves a new connection unless another server is connected.
    fn replace_server(&mut self, socket: OwnedFd, pid: i32, version: u32, resends: bool) {
        // The previous server may have unread messages.
        self.read_server(usize::MAX);
        if let Some(server) = &self.server {
            let why = format!("it already serves pid {}: a keeper has one server", server.pid);
            tracing::warn!("refused pid {pid}: {why}");
            return answer(&socket, &Message::Refused(why));
        }
        self.server = Some(KeeperConnection { socket, pid, greeted: false, received: 0 });
        match self.greet(version, resends) {
            Ok(()) => tracing::info!("serves pid {pid}, with {} descriptors", self.held.len()),
            Err(error) => {
                tracing::warn!("can't serve pid {pid}: {error}");
                self.server = None;
            }
        }
    }

    /// Whether no handover is in progress.
    fn is_settled(&self) -> bool {
        self.held.is_whole && self.server.as_ref().is_none_or(|server| server.greeted)
    }

    /// Executes the program at this program's path in place, with all descriptors, if it can take over.
    fn reload(&mut self, requester: Option<OwnedFd>) -> Result<()> {
        // The next program starts to count at 0.
        if let Some(server) = self.server.as_mut().filter(|server| server.received > 0) {
            let received = std::mem::take(&mut server.received) as u64;
            // Fails if the server is gone: the next read reports it.
            let _ = send(&server.socket, &Message::Received(received), &[]);
        }
        let passed = Passed {
            held: self.held.iter().collect(),
            server: self.server.as_ref().map(|server| server.socket.as_fd()),
            listener: self.newcomers.as_ref().map(Newcomers::listener),
            requester: requester.as_ref().map(AsFd::as_fd),
            last_report: &self.held.last_report,
        };
        let file = match self.image.check(&passed) {
            Ok(file) => file,
            Err(why) => {
                tracing::warn!("not reloaded: {why}; the current program keeps running");
                if let Some(requester) = requester {
                    answer(&requester, &Message::Refused(why));
                }
                return Ok(());
            }
        };
        let process = self.service.as_ref().and_then(Service::pidfd);
        let role = Role::Reloaded(self.service.as_ref().map_or(0, Service::pid));
        let error = self.image.execute(&file, role, process, &passed);
        Err(Error::system(format!("execute {}", self.image.path.display()), error))
    }

    /// Ends the server that this process started, and waits for its exit.
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
                tracing::warn!("the server does not exit: killing it");
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

    /// Handles SIGTERM and SIGINT. Returns the exit code.
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
                tracing::info!("exiting: the server, pid {}, has all the descriptors", server.pid);
            }
            None if count == 0 => tracing::info!("exiting: no descriptors are held"),
            None if self.held.last_report.is_empty() => {
                tracing::warn!("exiting, and freeing {count} descriptors that no server has")
            }
            None => tracing::info!("exiting, and freeing {count} descriptors: {}", self.held.last_report),
        }
        0
    }

    /// Closes everything and removes the socket's file.
    fn finish(self) {
        let path = match (&self.newcomers, &self.service) {
            (Some(newcomers), _) => newcomers.path.clone(),
            (None, Some(service)) => service.socket.clone(),
            _ => return,
        };
        drop(self);
        let removed =
            Cancel::new().and_then(|cancel| Listener::remove_unserved(&path, Duration::from_millis(200), &cancel));
        if let Err(error) = removed {
            tracing::debug!(%error, "cannot remove the socket's file");
        }
    }
}

/// Sends a reply. The server may have died, but its earlier messages must still be read.
fn reply(socket: &OwnedFd, message: &Message) -> io::Result<()> {
    match send(socket, message, &[]) {
        Err(error) if matches!(error.raw_os_error(), Some(nix::libc::EPIPE | nix::libc::ECONNRESET)) => Ok(()),
        sent => sent,
    }
}

/// The most descriptors that this process may hold.
fn descriptor_limit() -> u64 {
    use nix::sys::resource::{Resource, getrlimit};
    getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft).saturating_sub(OWN_DESCRIPTORS)
}
