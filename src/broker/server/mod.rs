//! The server: one process that keeps memory under names, and needs no driver.
//!
//! | Folder | What it has |
//! |---|---|
//! | `io/` | sockets, the event loop, timers |
//! | `verbs/` | what each request does |
//! | `state/` | what the server holds |

mod io;
mod state;
mod verbs;

use std::{
    collections::HashMap,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::FileTypeExt,
    },
    path::Path,
    sync::mpsc,
    thread,
    time::Duration,
};

pub(crate) use self::state::inspect::inspect_and_classify;
pub use self::state::quota::Quota;
use self::{
    io::{
        admission::Admission,
        devices,
        keeper::Keeping,
        reactor::{self, Reactor},
    },
    state::{
        history::History,
        objects::{self, Counts, Objects, Total},
        quota::Rules,
        root::State,
        time::Time,
    },
};
use super::keeper::{Inherited, KeeperPath, Kept, Name, Store, Taken};
use crate::{
    channel::{Cancel, Listener, SocketName},
    error::{Error, Result},
};

/// How a broker serves.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ServerConfig {
    /// Users besides the server's own and root that may connect.
    pub allow_uids: Vec<u32>,
    /// Groups whose users may connect.
    pub allow_gids: Vec<u32>,
    /// What each user may have. A limit that is `None` is that of [`Quota::user`], for all users but the server's own and root, who have
    /// none then.
    pub quota: Quota,
    /// What all users together may have. A limit that is `None` is that of [`Quota::total`]. A user other than the server's own and root
    /// may have at most half of what the others leave.
    pub total_quota: Quota,
    /// How long a connection may stay without a hello, and a client may leave unread what was sent to it: 30 s by default.
    pub timeout: Duration,
    /// Whether to hold the nodes of NVIDIA's devices open (`/dev/nvidia0` and so on): a device's driver state then stays, and the
    /// memory on it, also where persistence is off. A device that is held open can't be reset.
    pub hold_devices: bool,
    /// The keeper, with which objects outlive this process. Without one they go with it.
    pub keeper: Option<KeeperPath>,
    /// Set in a server that its keeper started. Cancelling it ends the server for the next one.
    pub(crate) started_by_keeper: Option<Cancel>,
    /// Accepts memfds as a GPU's memory, as the emulated driver of the project's tests makes it.
    pub(crate) emulated: bool,
}

impl Default for ServerConfig {
    fn default() -> Self {
        let (allow_uids, allow_gids, timeout) = (Vec::new(), Vec::new(), Duration::from_secs(30));
        let (quota, total_quota) = (Quota::default(), Quota::default());
        let (hold_devices, emulated, keeper, started_by_keeper) = (false, false, None, None);
        Self { allow_uids, allow_gids, quota, total_quota, timeout, hold_devices, keeper, started_by_keeper, emulated }
    }
}

impl ServerConfig {
    fn is_open_to_others(&self) -> bool {
        !self.allow_uids.is_empty() || !self.allow_gids.is_empty()
    }

    /// Lets those open the socket's file who may connect: this user alone, one group, or all users, whom the broker then tells apart.
    fn set_rights(&self, file: &SocketName<'_>) -> std::io::Result<()> {
        let mode = match (&*self.allow_uids, &*self.allow_gids) {
            ([], []) => 0o600,
            ([], &[group]) => match file.set_rights(0o660, Some(group)) {
                Err(error) if error.raw_os_error() == Some(nix::libc::EPERM) => {
                    tracing::info!(
                        group,
                        "the socket is open to all users, whom the broker refuses unless they are allowed: this process is not of the \
                         group, and so can't give it the socket"
                    );
                    0o666
                }
                set => return set,
            },
            // A file has one group.
            _ => 0o666,
        };
        file.set_rights(mode, None)
    }
}

/// What a broker still held when it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerReport {
    /// Names.
    pub objects: u64,
    /// Versions, also of names that were deleted.
    pub versions: u64,
    /// Leases.
    pub leases: u64,
    /// Bytes of memory, as their makers claimed.
    pub bytes: u64,
}

/// A broker that listens.
pub struct Server {
    reactor: Reactor,
    path: std::path::PathBuf,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("path", &self.path).finish_non_exhaustive()
    }
}

/// How long the end of a server waits for descriptors to be closed.
const CLOSING: Duration = Duration::from_secs(2);

/// How many connections may wait to be accepted; the kernel has a bound of its own (`net.core.somaxconn`).
const BACKLOG: i32 = 4096;

/// Listens at a path, for the users that the config allows. Reports that the objects of a broker there are lost, unless this one goes on
/// with them. Also returns whether names must be reserved for offers: the objects of the broker before this one are lost, and other
/// users may connect; and that broker's process, if it did not end in order.
fn listen(path: &Path, config: &ServerConfig, goes_on: bool, cancel: &Cancel) -> Result<(Listener, bool, Option<u32>)> {
    let open_to_others = config.is_open_to_others();
    let left = std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket());
    let (listener, marked_by) =
        Listener::bind_and_mark(path, |file| config.set_rights(file), true, config.timeout, cancel)?;
    if let Some(pid) = marked_by.filter(|_| !goes_on) {
        tracing::warn!(
            pid,
            path = %path.display(),
            "the broker before this one ended, and its keeper if it had one, without removing its socket: its objects are lost, but for \
             those that connected clients still hold and offer again"
        );
    }
    lengthen_queue(&listener)?;
    let lost = (left || marked_by.is_some()) && !goes_on;
    Ok((listener, lost && open_to_others, marked_by.and_then(|pid| u32::try_from(pid).ok())))
}

/// Has many connections wait, and has the kernel name this process to those that connect: of a socket that was taken over it names the
/// process that listened first. See `SO_PEERCRED` in unix(7).
fn lengthen_queue(listener: &Listener) -> Result<()> {
    rustix::net::listen(listener.as_fd(), BACKLOG).map_err(|errno| Error::system("listen", errno))
}

/// Says whether this build could go on with these catalogues.
///
/// # Errors
/// Why not.
pub(super) fn check_catalogues(catalogues: [Option<OwnedFd>; 2]) -> Result<()> {
    let Some((_, records)) = objects::Journal::open(catalogues)? else { return Ok(()) };
    records.into_iter().try_for_each(|record| record.map(drop)).map_err(objects::unusable)
}

impl Server {
    /// Listens at a path. The socket's file has mode 0600; 0660 and the group if one group is allowed and this process is of it; else 0666
    /// if other users or groups are allowed. The limit of open files of this process is raised as far as it may be.
    ///
    /// With [`ServerConfig::keeper`] it goes on with the objects of the server before it, and its socket's file stays when it ends. Blocks
    /// until the keeper has handed over its descriptors and the catalogue is read; for a keeper that does not answer, 10 s at most.
    ///
    /// # Errors
    /// [`Error::Socket`] if the path is served already or can't be used; [`Error::System`] if there is a keeper and it can't be reached
    /// or started, refuses this server or has the catalogue of a newer build; [`Error::System`], [`Error::Interrupted`].
    pub fn bind(path: &Path, config: ServerConfig, cancel: &Cancel) -> Result<Self> {
        // Each descriptor that is taken over counts.
        reactor::make_room(cancel.as_fd(), reactor::raise_limit());
        let kept = match (&config.started_by_keeper, &config.keeper) {
            (Some(_), _) => Kept::of_parent(cancel)?,
            (None, Some(keeper)) => Kept::of(keeper, path, cancel)?,
            (None, None) => return Self::bind_alone(path, config, cancel),
        };
        let started = kept.0.keeper.clone_of_child();
        Self::resume(path, config, kept, cancel).inspect_err(|_| {
            if let Some(keeper) = started {
                keeper.kill();
            }
        })
    }

    fn bind_alone(path: &Path, config: ServerConfig, cancel: &Cancel) -> Result<Self> {
        let (listener, reserves, before) = listen(path, &config, false, cancel)?;
        let path = listener.path().to_owned();
        let mut store = Store::none();
        let devices = devices::hold(&mut store, HashMap::new(), config.hold_devices)?;
        let mut objects = Objects::restore(
            Time::now(),
            Rules::new(config.quota, config.total_quota),
            store,
            [None, None],
            HashMap::new(),
        )?;
        let mut history = History::default();
        history.begin(before, objects.store_mut());
        let keeping = Keeping::default().holding(devices);
        Ok(Self { reactor: react(listener, config, objects, history, reserves, keeping, cancel)?, path })
    }

    fn resume(path: &Path, config: ServerConfig, kept: Kept, cancel: &Cancel) -> Result<Self> {
        let Kept(Taken { mut store, inherited, whole, link, keeper }) = kept;
        let Inherited { socket, history, catalogues, segments, devices, others } = inherited;
        // The keeper has it under its name, also if the file is gone.
        let in_store = socket.is_some();
        store.count(usize::from(in_store) + usize::from(history.is_some()));
        let mut history = History::read(history);
        let failed = |error| Error::system("duplicate a descriptor", error);
        let without_file = socket.as_ref().map(OwnedFd::try_clone).transpose().map_err(failed)?;
        let taken = socket.map(|socket| Listener::take_over(socket, path)).transpose()?.flatten();
        let (mut reserves, mut before) = (false, None);
        let listener =
            match taken.map_or_else(|| listen(path, &config, in_store, cancel).map(Err), |taken| Ok(Ok(taken))) {
                Ok(Ok(taken)) => {
                    // The options may be others now. Clients hold objects: this is no reason not to serve them.
                    let _ = taken
                        .set_rights(|file| config.set_rights(file))
                        .inspect_err(|error| tracing::error!(error = error.in_full()));
                    taken
                }
                Ok(Err((listener, left, marked_by))) => {
                    let listener = listener.leave_file();
                    before = marked_by;
                    reserves = left && catalogues.iter().all(Option::is_none);
                    if in_store {
                        store.remove(Name::Socket);
                    }
                    store.keep_own(Name::Socket, listener.as_fd().try_clone_to_owned().map_err(failed)?);
                    listener
                }
                // The objects stay, also where the folder was removed.
                Err(error) => {
                    let Some(socket) = without_file else { return Err(error) };
                    tracing::error!(
                        error = error.in_full(),
                        "clients can't connect, and the objects stay: make the socket's folder again and send SIGHUP"
                    );
                    Listener::inherited(socket, path)?
                }
            };
        others.into_iter().for_each(|name| store.remove_other(name));
        let goes_on = catalogues.iter().any(Option::is_some);
        let devices = devices::hold(&mut store, devices, config.hold_devices).or_else(|error| {
            // An option is no reason to keep from clients what is there.
            if goes_on { Ok(Vec::new()) } else { Err(error) }.inspect(|_: &Vec<_>| {
                tracing::error!("the devices can't be held open");
            })
        })?;
        match (whole, goes_on) {
            (true, _) => {}
            (false, true) => tracing::error!(
                "the keeper before this one ended too, before the server had sent the next one everything: versions that are lost follow"
            ),
            (false, false) => tracing::error!(
                "everything is lost: the keeper before this one ended too, before the server had sent the next one the catalogue"
            ),
        }
        lengthen_queue(&listener)?;
        let mut objects =
            Objects::restore(Time::now(), Rules::new(config.quota, config.total_quota), store, catalogues, segments)?;
        let lost = objects.lost().clone();
        match goes_on {
            true => history.take_over(whole, &lost, objects.store_mut()),
            false => history.begin(before.or((!whole).then_some(0)), objects.store_mut()),
        }
        objects.store_mut().complete();
        objects.store_mut().serving();
        let path = listener.path().to_owned();
        let keeping = Keeping::new(link, keeper, config.started_by_keeper.clone()).holding(devices);
        Ok(Self { reactor: react(listener, config, objects, history, reserves, keeping, cancel)?, path })
    }

    /// Whether it goes on with what a server before it held.
    pub(crate) fn is_restarted(&self) -> bool {
        self.reactor.is_restarted()
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Serves until it is cancelled. Blocks. Its objects go with it, unless a keeper holds them; what clients have mapped stays mapped. With a
    /// keeper it ends once the keeper has everything, after 10 s at most.
    ///
    /// # Errors
    /// [`Error::System`] if the event loop fails.
    pub fn run(mut self) -> Result<ServerReport> {
        let result = self.reactor.run();
        let is_unused = matches!(&result, Ok(total) if total.counts.versions == 0) && self.reactor.end_unused_keeper();
        drop_elsewhere(self.reactor);
        if is_unused {
            let removed = Cancel::new().and_then(|cancel| Listener::remove_unserved(&self.path, CLOSING, &cancel));
            let _ = removed.inspect_err(|error| tracing::debug!(%error, "the socket's file stays"));
        }
        let Total { counts: Counts { objects, versions, leases }, bytes } = result?;
        Ok(ServerReport { objects, versions, leases, bytes })
    }
}

/// Puts the parts of a server together.
fn react(
    listener: Listener,
    config: ServerConfig,
    objects: Objects,
    history: History,
    reserves: bool,
    keeping: Keeping,
    cancel: &Cancel,
) -> Result<Reactor> {
    let mut state = State::new(objects, config.timeout, config.emulated);
    state.history = history;
    state.storing.reserves = reserves;
    Reactor::new(state, Admission::new(listener, config.allow_uids, config.allow_gids), keeping, cancel)
}

/// Drops a reactor in a thread, as its peers may block the close of descriptors that they sent. The end of the process does not wait
/// for those.
fn drop_elsewhere(reactor: Reactor) {
    let (done, ended) = mpsc::channel();
    let close = move || {
        drop(reactor);
        // Fails if the wait is over.
        let _ = done.send(());
    };
    match thread::Builder::new().name("closer".to_owned()).spawn(close) {
        Ok(_) if ended.recv_timeout(CLOSING).is_err() => {
            tracing::warn!("descriptors that peers sent can't be closed: the broker ends without");
        }
        Ok(_) => {}
        Err(error) => tracing::warn!(%error, "no thread could be started to close descriptors"),
    }
}
