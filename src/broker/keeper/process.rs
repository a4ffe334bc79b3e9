//! The keeper process.

mod end;
#[cfg(test)]
pub(super) mod simulated;

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    process,
    time::{Duration, Instant},
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
    HANDOVER_TIMEOUT, OWN_DESCRIPTORS, RECEIVED_EACH, VERSION,
    entries::Entries,
    handover::{Handover, NO_ANSWER, hand_over, receive_all},
    link::{Process, dial_if_there, unreachable, until},
    message::{Arrival, Message, Role, receive, send},
    newcomers::{Newcomers, answer},
    twin::{Side, Twin},
};
use crate::{
    broker::notify::notify,
    channel::Cancel,
    error::{Error, Result, SocketError},
    sys::{self, Heap},
};

/// The most messages of the server to read before checking signals and other connections.
const MESSAGES_PER_TURN: usize = 256;

/// Retry interval while two keepers start at one path.
const START_RETRY: Duration = Duration::from_millis(5);

/// A server's connection.
#[derive(Debug)]
struct KeeperConnection {
    socket: OwnedFd,
    process: Process,
    /// Whether it announced its exit, or this keeper its own; and the sync to answer once a twin has everything too.
    leaves: bool,
    pending_sync: Option<u64>,
    /// Received descriptors that are not acknowledged yet.
    received: usize,
}

#[derive(Debug)]
pub(in crate::broker) struct KeeperProcess {
    held: Entries,
    server: Option<KeeperConnection>,
    /// Where servers connect; `None` in a simulation.
    newcomers: Option<Newcomers>,
    twin: Twin,
    /// The previous keeper, which waits until this one or its twin serves.
    predecessor: Option<(OwnedFd, Process)>,
    /// Whether a server started it: it has no init, and exits if no server uses it.
    is_detached: bool,
    /// Since when it has no server.
    alone_since: Instant,
    /// Whether the last server did not say that it exits for good: another will follow.
    awaits_server: bool,
    /// When a twin frees everything that no server has taken over, after its parent was asked to exit.
    frees_at: Option<Instant>,
    heap: Heap,
    /// The exit code, once it is to exit.
    exit: Option<i32>,
}

impl KeeperProcess {
    /// Creates the keeper that listens at a path. If one runs there, takes over everything from it, and it exits.
    ///
    /// # Errors
    /// [`Error::Socket`](crate::Error::Socket) if the path can't be used; [`Error::System`] if the running keeper does not hand over.
    pub(in crate::broker) fn at(path: &Path, is_detached: bool, cancel: &Cancel) -> Result<Self> {
        let deadline = Instant::now() + HANDOVER_TIMEOUT;
        loop {
            if let Some((socket, keeper)) = dial_if_there(path, Duration::ZERO, cancel)? {
                let handover = receive_all(&socket, &keeper, Role::NextKeeper, cancel);
                let handover = handover.map_err(|error| unreachable(path, error))?;
                if !handover.is_cut
                    && let Some(keeper) = Self::after((socket, keeper), handover, path, is_detached, cancel)?
                {
                    return Ok(keeper);
                }
                // It died, or this process was too slow. Its twin, the server or itself has everything.
                if Instant::now() >= deadline {
                    return Err(unreachable(path, io::Error::other(NO_ANSWER)));
                }
            } else {
                match Newcomers::at(path, cancel) {
                    // Another keeper starts at this moment.
                    Err(Error::Socket(SocketError::AlreadyServed { .. })) if Instant::now() < deadline => {}
                    newcomers => {
                        let held = Entries::none();
                        return Ok(Self::new(held, Some(newcomers?), is_detached));
                    }
                }
            }
            cancel.pause(START_RETRY)?;
        }
    }

    /// Creates the keeper that continues with the state of another. `None` if the other one did not wait for it.
    fn after(
        predecessor: (OwnedFd, Process),
        handover: Handover,
        path: &Path,
        is_detached: bool,
        cancel: &Cancel,
    ) -> Result<Option<Self>> {
        let Handover { entries: held, listener, .. } = handover;
        let newcomers = match listener {
            Some(listener) => Newcomers::inherited(listener, path, cancel)?,
            None => return Err(unreachable(path, io::Error::other("it did not hand over its socket"))),
        };
        let awaits_server = held.last_report.is_empty();
        let mut keeper =
            Self { predecessor: Some(predecessor), awaits_server, ..Self::new(held, Some(newcomers), is_detached) };
        // The twin must not handle signals before it is the keeper.
        block_signals()?;
        let parent = process::id();
        keeper.keep_twin();
        if let Some((socket, predecessor)) = keeper.predecessor.take() {
            // In the twin, whose parent was killed, perhaps after it had sent this: then the previous keeper exits.
            let is_done = || process::id() != parent && predecessor.exits_within(HANDOVER_TIMEOUT);
            if send(&socket, &Message::Serving, &[]).is_err() && !is_done() {
                keeper.twin.end();
                keeper.leave_socket();
                return Ok(None);
            }
            tracing::info!("took over {} descriptors from the previous keeper", keeper.held.descriptors());
        }
        Ok(Some(keeper))
    }

    fn new(held: Entries, newcomers: Option<Newcomers>, is_detached: bool) -> Self {
        Self {
            held,
            server: None,
            newcomers,
            twin: Twin::default(),
            predecessor: None,
            is_detached,
            alone_since: Instant::now(),
            awaits_server: false,
            frees_at: None,
            heap: Heap::default(),
            exit: None,
        }
    }

    /// Holds descriptors until SIGTERM, SIGINT, the server or another keeper ends it. Returns the exit code. Blocks.
    ///
    /// # Errors
    /// [`Error::System`].
    pub(in crate::broker) fn run(mut self) -> Result<i32> {
        let result = self.serve();
        self.finish();
        result
    }

    fn serve(&mut self) -> Result<i32> {
        let signals = SignalFd::with_flags(&block_signals()?, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
            .map_err(|errno| Error::system("wait for signals", errno))?;
        // Process 1 of a container is the parent of all orphans.
        let is_init = process::id() == 1;
        if !self.is_detached {
            notify("READY=1");
        }
        while self.exit.is_none() {
            let is_from_server = self.wait(&signals)?;
            self.read_server(MESSAGES_PER_TURN);
            if is_from_server {
                // Nothing else has happened, and a put waits for this.
                self.keep_twin();
                self.heap.note(self.held.iter().len());
                continue;
            }
            self.check_server();
            self.serve_newcomers();
            // A second signal must not end the twin that continues after the first.
            while self.exit.is_none()
                && let Ok(Some(signal)) = signals.read_signal()
            {
                match Signal::try_from(signal.ssi_signo.cast_signed()) {
                    Ok(Signal::SIGHUP) => {
                        tracing::info!("ignored SIGHUP: to upgrade, start another keeper at this path")
                    }
                    Ok(Signal::SIGINT | Signal::SIGTERM) => self.end(),
                    _ => {}
                }
            }
            self.twin.reap();
            if is_init {
                self.reap_orphans();
            }
            if self.server.is_none() && self.frees_at.is_some_and(|at| at <= Instant::now()) {
                self.log_end();
                self.exit = Some(0);
            } else if self.unused_at().is_some_and(|at| at <= Instant::now()) {
                tracing::info!("exiting: no server has used this keeper for {HANDOVER_TIMEOUT:?}");
                self.exit = Some(0);
            }
            self.keep_twin();
            self.heap.note(self.held.iter().len());
        }
        Ok(self.exit.unwrap_or_default())
    }

    /// Waits for children that this process did not start, so that they do not remain zombies.
    fn reap_orphans(&self) {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        while let Ok(WaitStatus::Exited(pid, _) | WaitStatus::Signaled(pid, ..)) = waitid(Id::All, flags) {
            // The next turn reaps the twin.
            if self.twin.pid() == Some(pid.as_raw()) {
                return;
            }
            let _ = waitpid(pid, None);
        }
    }

    /// Waits for an event. Returns whether it is only a message of the server.
    fn wait(&self, signals: &SignalFd) -> Result<bool> {
        fn watch(fd: BorrowedFd<'_>) -> PollFd<'_> {
            PollFd::new(fd, PollFlags::POLLIN)
        }
        let mut fds = vec![watch(signals.as_fd())];
        fds.extend(self.server.as_ref().and_then(|server| server.process.pidfd()).map(watch));
        fds.extend(self.newcomers.iter().flat_map(Newcomers::watched).map(watch));
        fds.extend(self.twin.pidfd().map(watch));
        let others = fds.len();
        fds.extend(self.server.as_ref().map(|server| watch(server.socket.as_fd())));
        let frees_at = self.frees_at.filter(|_| self.server.is_none());
        let newcomers = self.newcomers.as_ref().and_then(Newcomers::deadline);
        let deadlines = [newcomers, self.twin.next_fork, self.unused_at(), frees_at];
        let timeout = deadlines.into_iter().flatten().min().map_or(PollTimeout::NONE, |at| {
            PollTimeout::try_from(until(at) + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX)
        });
        match poll(&mut fds, timeout) {
            Ok(0) | Err(Errno::EINTR) => Ok(false),
            Ok(_) => Ok(newcomers.is_none() && fds[..others].iter().all(|fd| fd.any() == Some(false))),
            Err(errno) => Err(Error::system("wait for the server", errno)),
        }
    }

    /// When a keeper that a server started exits because it is not used.
    fn unused_at(&self) -> Option<Instant> {
        let is_unused = self.is_detached && self.server.is_none() && self.held.descriptors() == 0;
        is_unused.then(|| self.alone_since + HANDOVER_TIMEOUT)
    }

    /// Keeps a twin while no server has the descriptors, and before a server that leaves gets its answer. Only the main loop and the start
    /// may call it: in the twin, it returns when the parent has died.
    fn keep_twin(&mut self) {
        let is_needed = self.server.as_ref().is_none_or(|server| server.pending_sync.is_some());
        if !is_needed || self.exit.is_some() {
            return;
        }
        if self.held.descriptors() == 0 {
            self.twin.end();
        } else if self.twin.is_due() {
            self.fork_twin();
        }
        if let Some(server) = &mut self.server
            && let Some(number) = server.pending_sync.take()
            && let Err(error) = reply(&server.socket, &Message::Synced(number))
        {
            tracing::warn!("cannot answer the server: {error}");
        }
    }

    /// Forks a twin. In the twin, returns when the parent has died; it is the keeper then. Returns whether this process is the parent.
    fn fork_twin(&mut self) -> bool {
        let parent = match self.twin.fork() {
            Ok(Side::Parent) => return true,
            Ok(Side::Twin(parent)) => parent,
            Err(error) => {
                tracing::warn!(%error, "cannot fork the keeper's twin: only this process holds the descriptors");
                return true;
            }
        };
        // The peers of these connections must see the parent's end.
        self.server = None;
        if let Some(newcomers) = &mut self.newcomers {
            newcomers.waiting.clear();
        }
        parent.wait_for_death();
        (self.alone_since, self.exit) = (Instant::now(), None);
        // The fork has no thread that writes the log.
        let _ = sys::never_block_on_stderr();
        if let Some(Err(error)) = self.newcomers.as_ref().map(Newcomers::listen_again) {
            tracing::error!(%error, "cannot listen");
        }
        tracing::info!(
            pid = process::id(),
            "the keeper, pid {}, has exited: its twin holds {} descriptors",
            parent.pid,
            self.held.descriptors()
        );
        self.restore_file();
        self.keep_twin();
        false
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
                self.close_server();
            }
        }
    }

    /// Notices the server's death even if another process has a copy of its socket.
    fn check_server(&mut self) {
        if self.server.as_ref().is_some_and(|server| server.process.is_dead()) {
            self.read_server(usize::MAX);
            if self.server.is_some() {
                self.lose_server();
            }
        }
    }

    fn close_server(&mut self) {
        self.server = None;
        self.alone_since = Instant::now();
    }

    fn lose_server(&mut self) {
        let ended = self.server.as_ref().map(|server| (server.process.pid, server.leaves));
        let Some((pid, leaves)) = ended else {
            return;
        };
        self.close_server();
        let count = self.held.descriptors();
        match leaves {
            true => tracing::info!("the server, pid {pid}, has left: {count} descriptors are held for the next one"),
            false => tracing::warn!("the server, pid {pid}, crashed: {count} descriptors are held for the next one"),
        }
        self.restore_file();
    }

    /// The next server must find this keeper.
    fn restore_file(&mut self) {
        let Some(newcomers) = &mut self.newcomers else { return };
        if let Err(error) = Cancel::new().and_then(|cancel| newcomers.restore_file(&cancel)) {
            tracing::error!(error = error.in_full(), "the next server can't find this keeper");
        }
    }

    /// Handles one message of the server.
    fn handle(&mut self, message: Message, fds: Vec<OwnedFd>) -> io::Result<()> {
        let Some(server) = &mut self.server else { return Ok(()) };
        if message.outdates_twin() {
            // The server has everything.
            self.twin.end();
        }
        match message {
            Message::Entry(piece) => {
                server.received += fds.len();
                self.held.take(piece, fds)?;
                if server.received >= RECEIVED_EACH {
                    let received = std::mem::take(&mut server.received) as u64;
                    reply(&server.socket, &Message::Received(received))?;
                }
            }
            Message::Remove(keys) => keys.into_iter().for_each(|key| self.held.remove(key)),
            Message::Complete(_) => self.held.complete(),
            // Acknowledges the last descriptors of the handover.
            Message::Received(_) => {}
            Message::Sync(number) if server.leaves => server.pending_sync = Some(number),
            Message::Sync(number) => reply(&server.socket, &Message::Synced(number))?,
            Message::Serving => self.held.last_report = String::new(),
            Message::Stopping(report) => {
                (server.leaves, self.awaits_server) = (true, report.is_empty());
                self.held.last_report = report;
            }
            Message::Exit(report) => {
                self.held.last_report = report;
                self.close_server();
                self.log_end();
                self.exit = Some(0);
            }
            other => return Err(io::Error::other(format!("it sent {other:?}, which servers do not send"))),
        }
        Ok(())
    }

    /// Handles the requests of new connections.
    fn serve_newcomers(&mut self) {
        let requests = self.newcomers.as_mut().map(Newcomers::requests).unwrap_or_default();
        for (socket, pid, version, role) in requests {
            if self.exit.is_some() {
                // Closes the connections: the peers connect to the next keeper.
                return;
            }
            if version != VERSION {
                let why = format!(
                    "this keeper has version {VERSION} of its protocol, and pid {pid} has version {version}: start the keeper of that version"
                );
                tracing::warn!("refused a connection: {why}");
                answer(&socket, &Message::Refused(why));
                continue;
            }
            match role {
                Role::NextKeeper => self.serve_successor(&socket, pid),
                Role::NextServer => self.replace_server(socket, pid, false),
                Role::SameServer => self.replace_server(socket, pid, true),
            }
        }
    }

    /// Serves a new connection unless another server is connected. `resends`: the server has everything, and sends it.
    fn replace_server(&mut self, socket: OwnedFd, pid: i32, resends: bool) {
        // The previous server may have unread messages.
        self.read_server(usize::MAX);
        self.check_server();
        if let Some(server) = &self.server {
            let why = format!("it already serves pid {}: a keeper has one server", server.process.pid);
            tracing::warn!("refused pid {pid}: {why}");
            return answer(&socket, &Message::Refused(why));
        }
        (self.awaits_server, self.frees_at) = (true, None);
        let welcome = Message::Welcome { version: VERSION, allowed: descriptor_limit() };
        let mut served = reply(&socket, &welcome);
        if resends {
            self.held.begin_resend();
        } else {
            served = served.and_then(|()| hand_over(&mut self.held, &socket));
        }
        match served {
            Ok(()) => {
                let process = Process::of(pid);
                let (leaves, pending_sync, received) = (false, None, 0);
                self.server = Some(KeeperConnection { socket, process, leaves, pending_sync, received });
                tracing::info!("serves pid {pid}, with {} descriptors", self.held.descriptors());
            }
            Err(error) => {
                tracing::warn!("can't serve pid {pid}: {error}");
                self.alone_since = Instant::now();
            }
        }
    }
}

/// Blocks the signals that the keeper handles. Process 1 of a container also handles the exits of orphans.
fn block_signals() -> Result<SigSet> {
    let mut signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]);
    if process::id() == 1 {
        signals.add(Signal::SIGCHLD);
    }
    signals.thread_block().map_err(|errno| Error::system("block signals", errno))?;
    Ok(signals)
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
