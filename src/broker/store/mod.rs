//! The store: another process that keeps the server's descriptors, so that they outlive it. It is systemd or the supervisor, and both
//! speak the protocol of sd_notify(3) and sd_pid_notify_with_fds(3).
//!
//! | Name | Descriptor |
//! |---|---|
//! | 1 to 4 digits and lower-case letters | a segment or a table, by its number |
//! | `SOCK` | the listening socket |
//! | `CAT0`, `CAT1` | the catalogue, and the memfd that the next one is written to |
//! | `D` and two digits | the node of a device, held open |
//! | `LIFE` | a pipe that ends with the supervisor |
//! | `NTFY`, `PEER` | the supervisor's end of a pair of sockets, and the server's |
//! | `SELF` | a pidfd of the server |
//! | `SUPV` | a pidfd of the supervisor |
//! | `ANSW` | a pipe for the proof of a program that is to take over |
//!
//! The last six are passed from one process to the next and never stored.

mod notice;
mod passed;
#[cfg(test)]
mod tests;

use std::{
    collections::VecDeque,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::net::UnixDatagram,
    },
    path::{Path, PathBuf},
};

use rustix::net::{SendFlags, SocketAddrUnix};
use sendfd::SendWithFd;

pub(super) use self::{
    notice::{Notice, read as read_notice},
    passed::{Inherited, LIFE, NOTIFY, Name, PEER, SERVER, SUPERVISOR},
};
use super::catalogue::SegmentId;
use crate::{
    error::{BrokerError, Error, RefusalCode, Result},
    sys,
};

/// How many bytes one variable of the environment may have, its name included (`MAX_ARG_STRLEN` of Linux): systemd gives the names of
/// all descriptors back in one.
const NAMES: usize = 128 * 1024 - "LISTEN_FDNAMES=".len() - 1;

/// Who keeps the descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keeper {
    /// No process does.
    None,
    /// `vmmfd serve`'s own: what was sent to it is kept, since it reads all before it starts the next server.
    Supervisor,
    /// systemd: what was sent is kept once a barrier behind it has passed.
    Systemd,
}

impl Keeper {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Supervisor => "supervisor",
            Self::Systemd => "systemd",
        }
    }
}

/// A point in what was sent to the store: [`Store::has_kept`] says whether everything before it is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) struct Mark(u64);

/// The server's end of the store. It never blocks: what the socket does not take waits here.
#[derive(Debug)]
pub(super) struct Store {
    keeper: Keeper,
    socket: Option<UnixDatagram>,
    path: PathBuf,
    /// The most descriptors.
    allowed: usize,
    /// How many are there, and how long their names are with a separator each.
    used: usize,
    names: usize,
    queue: VecDeque<Item>,
    /// How many items were ever queued, were sent, and are known to be kept.
    queued: u64,
    sent: u64,
    kept: u64,
    /// The barrier that was sent last: its end of the pipe, and what it stands behind.
    barrier: Option<(OwnedFd, u64)>,
}

/// A store, and what it gave back to this process.
#[derive(Debug)]
pub(crate) struct Kept {
    pub(super) store: Store,
    pub(super) inherited: Inherited,
}

impl Kept {
    /// systemd's store, if the environment says that there is one (`NOTIFY_SOCKET` and `FDSTORE`), with what systemd passed.
    ///
    /// # Errors
    /// [`Error::System`] if it can't be reached, or if the descriptors are not there.
    pub(crate) fn by_systemd() -> Result<Option<Self>> {
        let (Some(path), Some(allowed)) = (std::env::var_os("NOTIFY_SOCKET"), allowed()) else { return Ok(None) };
        let store = Store::connect(Path::new(&path), allowed)
            .map_err(|error| Error::system(format!("reach the store of descriptors at {}", path.display()), error))?;
        Ok(Some(Self { store, inherited: Inherited::of(passed()?) }))
    }

    /// Whether the environment says that systemd has a store for this process.
    pub(crate) fn is_by_systemd() -> bool {
        std::env::var_os("NOTIFY_SOCKET").is_some() && allowed().is_some()
    }

    /// Whether a server before this one left what it held.
    pub(crate) fn has_objects(&self) -> bool {
        self.inherited.catalogues.iter().any(Option::is_some)
    }

    /// The supervisor's store, with what it passed.
    ///
    /// # Errors
    /// [`Error::System`] if the descriptors are not there.
    pub(crate) fn by_supervisor() -> Result<Self> {
        let mut inherited = Inherited::of(passed()?);
        let failed = |error| Error::system("reach the supervisor", error);
        let peer = inherited.peer.take().ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
        let store = Store::over(UnixDatagram::from(peer), allowed().unwrap_or(0)).map_err(failed)?;
        Ok(Self { store, inherited })
    }
}

/// How many descriptors the store may have, as it says.
fn allowed() -> Option<usize> {
    std::env::var("FDSTORE").ok().and_then(|text| text.parse().ok()).filter(|most| *most > 0)
}

fn passed() -> Result<Vec<(String, OwnedFd)>> {
    sys::take_passed().map_err(|error| Error::system("take the descriptors that were passed", error))
}

/// Something to tell the store.
#[derive(Debug)]
enum Item {
    Keep(Name, Source),
    Remove(String),
    Barrier(OwnedFd),
    Text(&'static str),
    /// What was withdrawn.
    Nothing,
}

/// Where a descriptor is.
#[derive(Debug)]
enum Source {
    /// Among the segments.
    Segment(SegmentId),
    /// Here.
    Own(OwnedFd),
}

/// What became of a flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flushed {
    /// All was sent.
    All,
    /// The socket is full: it becomes writable.
    Full,
    /// The kernel's bound on descriptors in flight is reached: it is to be tried again soon.
    InFlight,
    /// There is no process at the other end.
    Gone,
}

impl Store {
    /// No store.
    pub(super) fn none() -> Self {
        Self {
            keeper: Keeper::None,
            socket: None,
            path: PathBuf::new(),
            allowed: 0,
            used: 0,
            names: 0,
            queue: VecDeque::new(),
            queued: 0,
            sent: 0,
            kept: 0,
            barrier: None,
        }
    }

    /// systemd's store, which may keep so many descriptors. `path` begins with `@` if it is no file. Does not block.
    ///
    /// # Errors
    /// Those of socket(2) and connect(2).
    pub(super) fn connect(path: &Path, allowed: usize) -> io::Result<Self> {
        let keeper = Keeper::Systemd;
        Ok(Self { keeper, socket: Some(connected(path)?), path: path.to_owned(), allowed, ..Self::none() })
    }

    /// The supervisor's store behind a socket that is connected with it, which may keep so many descriptors.
    ///
    /// # Errors
    /// Those of fcntl(2).
    pub(super) fn over(socket: UnixDatagram, allowed: usize) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self { keeper: Keeper::Supervisor, socket: Some(socket), allowed, ..Self::none() })
    }

    pub(super) fn keeper(&self) -> Keeper {
        self.keeper
    }

    /// The socket, and the end of the barrier that is waited for.
    pub(super) fn sources(&self) -> (Option<BorrowedFd<'_>>, Option<BorrowedFd<'_>>) {
        (self.socket.as_ref().map(AsFd::as_fd), self.barrier.as_ref().map(|(fd, _)| fd.as_fd()))
    }

    /// How many descriptors are in the store, and may be.
    pub(super) fn room(&self) -> (usize, usize) {
        (self.used, self.allowed)
    }

    /// Counts descriptors that are in the store already.
    pub(super) fn count(&mut self, names: impl IntoIterator<Item = Name>) {
        for name in names {
            self.used += 1;
            self.names += name.length() + 1;
        }
    }

    /// Refuses what would not fit. `longest` is the longest name that the descriptors may get.
    pub(super) fn require_room(&self, more: usize, longest: usize) -> Result<(), BrokerError> {
        let (used, allowed) = (self.used, self.allowed);
        let names = self.names + more * (longest + 1);
        let message = match self.keeper {
            Keeper::None => return Ok(()),
            _ if used + more > allowed => format!(
                "the store has {used} descriptors, and {more} more are asked for: it may have {allowed}; {}",
                match self.keeper {
                    Keeper::Systemd => "raise FileDescriptorStoreMax of the unit",
                    _ => "raise the limit of open files (ulimit -n)",
                }
            ),
            Keeper::Systemd if names > NAMES => format!(
                "the store has {used} descriptors, and {more} more are asked for: their names would have {names} bytes, and \
                 {NAMES} can be given back; put fewer and larger segments"
            ),
            _ => return Ok(()),
        };
        Err(BrokerError::new(RefusalCode::Full, message))
    }

    /// Has a segment kept.
    pub(super) fn keep(&mut self, id: SegmentId) {
        self.add(Name::Segment(id), Source::Segment(id));
    }

    /// Has another descriptor kept.
    pub(super) fn keep_own(&mut self, name: Name, fd: OwnedFd) {
        self.add(name, Source::Own(fd));
    }

    fn add(&mut self, name: Name, source: Source) {
        if self.keeper != Keeper::None {
            self.count([name]);
            self.push(Item::Keep(name, source));
        }
    }

    /// Has a descriptor removed.
    pub(super) fn remove(&mut self, name: Name) {
        if self.keeper == Keeper::None {
            return;
        }
        self.used -= 1;
        self.names -= name.length() + 1;
        // One that was not sent yet can't be: the descriptor may be closed before its turn comes.
        let waiting = self.queue.iter().position(|item| matches!(item, Item::Keep(of, _) if *of == name));
        match waiting {
            // What stands behind is counted by its place.
            Some(at) => self.queue[at] = Item::Nothing,
            None => self.push(Item::Remove(name.to_string())),
        }
    }

    /// Has descriptors removed that the server does not know.
    pub(super) fn remove_other(&mut self, name: &str) {
        if self.keeper != Keeper::None {
            self.push(Item::Remove(name.to_owned()));
        }
    }

    /// Says that the server serves (`READY=1`), or is about to end because it was asked to (`STOPPING=1`).
    pub(super) fn say(&mut self, text: &'static str) {
        if self.keeper != Keeper::None {
            self.push(Item::Text(text));
        }
    }

    fn push(&mut self, item: Item) {
        self.queue.push_back(item);
        self.queued += 1;
    }

    /// The point behind everything that was told it so far.
    pub(super) fn mark(&self) -> Mark {
        Mark(self.queued)
    }

    /// Whether everything before a point is kept.
    pub(super) fn has_kept(&self, mark: Mark) -> bool {
        match self.keeper {
            Keeper::None => true,
            // Without a supervisor there is none to wait for: all is sent to the next one.
            Keeper::Supervisor => self.socket.is_none() || self.sent >= mark.0,
            Keeper::Systemd => self.kept >= mark.0,
        }
    }

    /// A new point, which the keeper has not confirmed yet even if it has confirmed everything before.
    pub(super) fn new_mark(&mut self) -> Mark {
        self.push(Item::Nothing);
        self.mark()
    }

    /// Whether the keeper has confirmed that it has read everything before a point.
    pub(super) fn is_confirmed(&self, mark: Mark) -> bool {
        self.socket.is_some() && self.kept >= mark.0
    }

    /// Whether something that was sent was not received yet.
    pub(super) fn is_unread(&self) -> bool {
        self.socket.as_ref().is_some_and(|socket| sys::unread(socket.as_fd()).is_ok_and(|bytes| bytes > 0))
    }

    /// Sends what waits; behind it a barrier, if some of it is to be confirmed up to `mark`. Once the other end is gone the socket is
    /// forgotten.
    pub(super) fn flush<'a>(&mut self, segment: impl Fn(SegmentId) -> BorrowedFd<'a>, mark: Option<Mark>) -> Flushed {
        if let Err(error) = self.add_barrier(mark) {
            // The next flush tries again.
            tracing::error!(%error, "cannot make a pipe for a barrier");
            return Flushed::InFlight;
        }
        let Some(socket) = &self.socket else {
            return if self.keeper == Keeper::None { Flushed::All } else { Flushed::Gone };
        };
        while let Some(item) = self.queue.front() {
            let (notice, fd) = match item {
                Item::Keep(name, source) => (
                    Notice::Keep(name.to_string()),
                    Some(match source {
                        Source::Segment(id) => segment(*id).as_raw_fd(),
                        Source::Own(fd) => fd.as_raw_fd(),
                    }),
                ),
                Item::Remove(name) => (Notice::Remove(name.clone()), None),
                Item::Barrier(fd) => (Notice::Barrier, Some(fd.as_raw_fd())),
                Item::Text(text) => (Notice::Other((*text).to_owned()), None),
                Item::Nothing => {
                    self.queue.pop_front();
                    self.sent += 1;
                    continue;
                }
            };
            match send(socket, notice.to_string().as_bytes(), fd) {
                Ok(()) => {
                    self.queue.pop_front();
                    self.sent += 1;
                }
                Err(error) => match error.raw_os_error() {
                    Some(nix::libc::EINTR) => {}
                    Some(nix::libc::EAGAIN) => return Flushed::Full,
                    Some(nix::libc::ECONNREFUSED | nix::libc::ECONNRESET | nix::libc::ENOTCONN | nix::libc::EPIPE) => {
                        self.socket = None;
                        return Flushed::Gone;
                    }
                    // ETOOMANYREFS, ENOBUFS, ENOMEM: no event says when that is over.
                    _ => return Flushed::InFlight,
                },
            }
        }
        Flushed::All
    }

    /// Queues a barrier, if what is before `mark` waits for one and none is under way.
    fn add_barrier(&mut self, mark: Option<Mark>) -> io::Result<()> {
        let Some(mark) = mark.filter(|_| self.keeper != Keeper::None) else { return Ok(()) };
        // The next one stands behind everything that comes until this one has passed.
        if self.barrier.is_some() || self.kept >= mark.0 {
            return Ok(());
        }
        let (reader, writer) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC | nix::fcntl::OFlag::O_NONBLOCK)?;
        self.push(Item::Barrier(writer));
        self.barrier = Some((reader, self.queued));
        Ok(())
    }

    /// Looks whether the barrier has passed. Returns its end of the pipe, which is to be watched no more.
    pub(super) fn passed_barrier(&mut self) -> Option<OwnedFd> {
        let (fd, behind) = self.barrier.as_ref()?;
        let passed = match nix::unistd::read(fd, &mut [0; 8]) {
            // The death of a supervisor closes it too: a living one writes to it first.
            Ok(0) => self.keeper == Keeper::Systemd,
            read => read.is_ok(),
        };
        if !passed {
            return None;
        }
        self.kept = *behind;
        self.barrier.take().map(|(fd, _)| fd)
    }

    /// Forgets what was sent, for a new keeper behind this socket: everything is to be kept anew.
    pub(super) fn begin_anew(&mut self, socket: UnixDatagram) {
        self.socket = Some(socket);
        self.queue.clear();
        (self.used, self.names, self.barrier) = (0, 0, None);
        self.sent = self.queued;
    }

    /// The keeper is gone, and there is no other yet.
    pub(super) fn forget_keeper(&mut self) {
        self.socket = None;
    }

    /// Connects again to a keeper that keeps what it has, and was gone.
    ///
    /// # Errors
    /// Those of socket(2) and connect(2).
    pub(super) fn connect_again(&mut self) -> io::Result<()> {
        self.socket = Some(connected(&self.path)?);
        Ok(())
    }
}

fn connected(path: &Path) -> io::Result<UnixDatagram> {
    use std::os::unix::ffi::OsStrExt;
    let bytes = path.as_os_str().as_bytes();
    let address = match bytes.strip_prefix(b"@") {
        Some(name) => SocketAddrUnix::new_abstract_name(name)?,
        None => SocketAddrUnix::new(path)?,
    };
    let socket = UnixDatagram::unbound()?;
    rustix::net::connect(&socket, &address)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

fn send(socket: &UnixDatagram, text: &[u8], fd: Option<RawFd>) -> io::Result<()> {
    match fd {
        Some(fd) => socket.send_with_fd(text, &[fd]).map(drop),
        None => rustix::net::send(socket, text, SendFlags::NOSIGNAL).map(drop).map_err(io::Error::from),
    }
}
