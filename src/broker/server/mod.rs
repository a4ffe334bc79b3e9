//! The server: a process that keeps memory under names. It does not need a GPU driver.
//!
//! | Folder | Contents |
//! |---|---|
//! | `admit` | the limits of each user |
//! | `io/` | sockets, the event loop, timers |
//! | `verbs/` | the handlers of requests |
//! | `state/` | the server's data |

mod admit;
mod io;
#[cfg(test)]
#[path = "../simulation/mod.rs"]
mod simulation;
#[macro_use]
mod state;
mod verbs;

use std::{
    collections::BTreeMap,
    ffi::OsString,
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
pub use self::state::objects::ServerReport;
use self::{
    admit::Limits,
    io::{
        admission::Admission,
        devices,
        keeper::KeeperLink,
        reactor::{self, Reactor},
    },
    state::{
        objects::Objects,
        root::{State, Time},
    },
};
#[cfg(feature = "internals")]
pub use self::{admit::MIN_FILE_LIMIT, state::caller::command_of};
use super::{
    keeper::{KeeperPath, Link, Store, Takeover},
    manifest::BROKER,
};
use crate::{
    channel::{Cancel, Listener, SocketName},
    error::{Error, Result, SocketError},
    wire::broker::Quota,
};

/// Configuration of a broker.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ServerConfig {
    /// Users that may connect, besides the server's own user and root.
    pub allow_uids: Vec<u32>,
    /// Groups whose members may connect.
    pub allow_gids: Vec<u32>,
    /// Limits per user. `None` means the limit of [`Quota::user`], or no limit for the server's own user and root.
    pub quota: Quota,
    /// Limits for all users together. `None` means the limit of [`Quota::total`].
    pub total_quota: Quota,
    /// Time limit for a connection's hello, and for a client that does not read its records: 30 s by default.
    pub timeout: Duration,
    /// Whether to hold the NVIDIA device nodes open (`/dev/nvidia0` and so on). This keeps the driver state of a device, and its memory,
    /// even without persistence mode. A device that is held open can't be reset.
    pub hold_devices: bool,
    /// The keeper, which lets objects outlive this process. Without a keeper, the objects are dropped with the process.
    pub keeper: Option<KeeperPath>,
    /// The arguments of a keeper that this server starts from its own program, and ends when it exits on request. Only for `vmmfd serve`.
    pub(crate) own_keeper: Option<Vec<OsString>>,
    /// Cancelling it stops this server so that another takes over from its keeper.
    pub(crate) leave: Option<Cancel>,
    /// Accepts memfds as GPU memory, for the project's emulated driver in tests.
    pub(crate) emulated: bool,
    pub(crate) limits: TimeLimits,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            allow_uids: Vec::new(),
            allow_gids: Vec::new(),
            quota: Quota::default(),
            total_quota: Quota::default(),
            timeout: Duration::from_secs(30),
            hold_devices: false,
            keeper: None,
            own_keeper: None,
            leave: None,
            emulated: false,
            limits: TimeLimits::default(),
        }
    }
}

/// How long a server waits for others. Not for users: tests that wait for a limit shorten it.
#[derive(Debug, Clone, Copy)]
pub struct TimeLimits {
    /// How long clients can resume leases of the previous server.
    pub resume: Duration,
    /// How long a starting server waits for the socket of its keeper, and a stopping server for the keeper to confirm everything.
    pub keeper: Duration,
    /// How long a keeper may read nothing before it is killed and replaced.
    pub silence: Duration,
    /// How often to check that the socket's file still exists.
    pub file: Duration,
}

impl Default for TimeLimits {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { resume: seconds(10), keeper: seconds(10), silence: seconds(5), file: seconds(10) }
    }
}

impl TimeLimits {
    /// Sets a limit by its name. Returns whether it exists.
    pub fn set(&mut self, name: &str, limit: Duration) -> bool {
        let field = match name {
            "resume" => &mut self.resume,
            "keeper" => &mut self.keeper,
            "silence" => &mut self.silence,
            "file" => &mut self.file,
            _ => return false,
        };
        *field = limit;
        true
    }
}

impl ServerConfig {
    fn user_limits(&self) -> Limits {
        Limits::new(self.quota, self.total_quota, reactor::raise_limit())
    }
}

/// Sets the mode of the socket's file: this user only, one group, or all users. The broker then checks each connection.
fn set_rights(file: &SocketName<'_>, allow_uids: &[u32], allow_gids: &[u32]) -> std::io::Result<()> {
    let mode = match (allow_uids, allow_gids) {
        ([], []) => 0o600,
        ([], &[group]) => match file.set_rights(0o660, Some(group)) {
            Err(error) if error.raw_os_error() == Some(nix::libc::EPERM) => {
                tracing::info!(
                    group,
                    "the socket is open to all users, but the broker still refuses disallowed users: this process is not a member of the group, \
                    so it can't assign the socket to it"
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

/// A listening broker.
///
/// ```
/// use std::thread;
/// use vmmfd::{broker::{Client, Server, ServerConfig}, channel::{Cancel, CancelReason}, session::Config};
/// # let folder = vmmfd::internals::ExampleFolder::new()?;
/// # let path = folder.path().join("broker.sock");
///
/// let cancel = Cancel::new()?;
/// let server = Server::bind(&path, ServerConfig::default(), &cancel)?;
/// let serving = thread::spawn(move || server.run());
/// assert!(Client::connect(&path, &Config::default())?.list("")?.is_empty());
/// cancel.cancel(CancelReason::Program);
/// serving.join().expect("no panic")?;
/// # Ok::<(), vmmfd::Error>(())
/// ```
pub struct Server {
    reactor: Reactor,
    path: std::path::PathBuf,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("path", &self.path).finish_non_exhaustive()
    }
}

/// How long a stopping server waits for descriptors to be closed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Length of the accept queue. The kernel's own limit also applies (`net.core.somaxconn`).
const BACKLOG: i32 = 4096;

/// Listens at a path for the allowed users. `takes_over`: a keeper has the previous server's objects. If not, logs that they are lost. Returns
/// whether to reserve names for restores: objects are lost, and other users may connect.
fn listen(path: &Path, config: &ServerConfig, takes_over: bool, cancel: &Cancel) -> Result<(Listener, bool)> {
    let left = std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket());
    let (listener, marked_by) = Listener::bind_and_mark(
        path,
        |file| set_rights(file, &config.allow_uids, &config.allow_gids),
        true,
        config.timeout,
        cancel,
    )?;
    if let Some(pid) = marked_by.filter(|_| !takes_over) {
        tracing::warn!(
            pid,
            path = %path.display(),
            "the previous broker, and its keeper if it had one, stopped without removing its socket: its objects are lost, except those \
            that connected clients hold and restore"
        );
    }
    lengthen_queue(&listener)?;
    let lost = (left || marked_by.is_some()) && !takes_over;
    let is_open_to_others = !config.allow_uids.is_empty() || !config.allow_gids.is_empty();
    Ok((listener, lost && is_open_to_others))
}

fn duplication_failed(error: std::io::Error) -> Error {
    Error::system("duplicate a descriptor", error)
}

/// Listens on the socket of the previous server. If its file is gone, binds the path like [`listen`]. Clients hold objects, so neither
/// an unusable path nor a failure to set permissions prevents serving them.
fn listen_again(
    socket: Option<OwnedFd>,
    path: &Path,
    config: &ServerConfig,
    cancel: &Cancel,
) -> Result<(Listener, bool)> {
    let inherited = socket.as_ref().map(OwnedFd::try_clone).transpose().map_err(duplication_failed)?;
    let bind = || {
        let (listener, reserves_names) = listen(path, config, inherited.is_some(), cancel)?;
        Ok((listener.leave_file(), reserves_names))
    };
    let listening = match socket.map(|socket| Listener::take_over(socket, path)).transpose() {
        Ok(Some(Some(mut taken))) => {
            taken.renew_mark();
            // The options may have changed.
            let set = taken.set_rights(|file| set_rights(file, &config.allow_uids, &config.allow_gids));
            let _ = set.inspect_err(|error| tracing::error!(error = error.in_full()));
            Ok((taken, false))
        }
        Ok(_) => bind(),
        Err(error) => Err(error),
    };
    match (listening, inherited) {
        (Err(error), Some(socket)) => {
            let remedy = match &error {
                Error::Socket(SocketError::AlreadyServed { .. } | SocketError::ServedWithoutFile { .. }) => {
                    "stop that process"
                }
                Error::Socket(SocketError::Path { .. }) => "remove that file",
                _ => "recreate the socket's folder",
            };
            tracing::error!(
                error = error.in_full(),
                "new clients can't connect, but objects are held: {remedy} and restart this server"
            );
            let mut listener = Listener::inherited(socket, path)?;
            listener.renew_mark();
            Ok((listener, false))
        }
        (listening, _) => listening,
    }
}

/// Lengthens the accept queue. Also makes the kernel report this process to connecting clients: for an inherited socket, it would report
/// the process that listened first. See `SO_PEERCRED` in unix(7).
fn lengthen_queue(listener: &Listener) -> Result<()> {
    rustix::net::listen(listener.as_fd(), BACKLOG).map_err(|errno| Error::system("listen", errno))
}

impl Server {
    /// Listens at a path. The socket's file gets mode 0600; 0660 and the group if a single group is allowed and this process is a member;
    /// else 0666 if other users or groups are allowed. Raises this process's open-file limit as far as allowed.
    ///
    /// With [`ServerConfig::keeper`], takes over the previous server's objects, and leaves the socket's file in place on exit. Blocks until
    /// the keeper has handed over its entries; if the keeper does not answer, for at most 10 s.
    ///
    /// # Errors
    /// [`Error::Socket`] if the path is already served or can't be used; a server that takes over a socket logs this error instead, because
    /// clients hold objects. [`Error::System`] if the keeper can't be reached or started, refuses this server, or has another version;
    /// [`Error::System`], [`Error::Interrupted`].
    pub fn bind(path: &Path, config: ServerConfig, cancel: &Cancel) -> Result<Self> {
        // Inherited descriptors need room too.
        reactor::preallocate_descriptor_table(cancel.as_fd(), reactor::raise_limit());
        let link = match (&config.own_keeper, &config.keeper) {
            (Some(arguments), _) => Link::own(arguments.clone(), path)?,
            (None, Some(keeper)) => Link::of(keeper, path)?,
            (None, None) => return Self::bind_alone(path, config, cancel),
        };
        let starts_keeper = link.starts_keeper();
        let taken = Takeover::of(link, config.limits.keeper, cancel).map_err(|error| match starts_keeper {
            // Its keeper refuses a second server; the path is the better explanation.
            true => Listener::check_unserved(path).err().unwrap_or(error),
            false => error,
        })?;
        let ender = taken.ender();
        Self::resume(path, config, taken, cancel).inspect_err(|_| ender.into_iter().for_each(|end| end()))
    }

    fn bind_alone(path: &Path, config: ServerConfig, cancel: &Cancel) -> Result<Self> {
        let (listener, reserves_names) = listen(path, &config, false, cancel)?;
        let objects = Objects::restore(
            Time::now(),
            config.user_limits(),
            config.limits.resume,
            Store::default(),
            BTreeMap::new(),
        );
        Self::with(listener, config, objects, Vec::new(), reserves_names, KeeperLink::default(), cancel)
    }

    fn resume(path: &Path, config: ServerConfig, taken: Takeover, cancel: &Cancel) -> Result<Self> {
        let Takeover { store, mut inherited, whole, link, keeper } = taken;
        // The keeper has the socket even if its file is gone.
        let mut own = inherited.get_mut(&BROKER).map(|own| std::mem::take(&mut own.fds)).unwrap_or_default();
        let nodes = own.split_off(own.len().min(1));
        let socket = own.pop();
        let takes_over = socket.is_some();
        let (listener, reserves_names) = listen_again(socket, path, &config, cancel)?;
        match (whole, takes_over) {
            (true, _) => {}
            (false, true) => tracing::error!(
                "server and keeper both died before the new keeper had everything: only the objects that it had got are left"
            ),
            (false, false) => {
                tracing::error!("everything is lost: server and keeper both died before the new keeper had anything")
            }
        }
        lengthen_queue(&listener)?;
        let objects = Objects::restore(Time::now(), config.user_limits(), config.limits.resume, store, inherited);
        let keeper_link = KeeperLink::new(link, keeper, config.leave.clone());
        Self::with(listener, config, objects, nodes, reserves_names, keeper_link, cancel)
    }

    /// `nodes` are the device nodes of the previous server. They stay open until the others are.
    fn with(
        listener: Listener,
        config: ServerConfig,
        mut objects: Objects,
        nodes: Vec<OwnedFd>,
        reserves_names: bool,
        keeper_link: KeeperLink,
        cancel: &Cancel,
    ) -> Result<Self> {
        let devices = if config.hold_devices { devices::open() } else { Ok(Vec::new()) };
        let devices = devices.or_else(|error| match objects.events.restarts() {
            0 => Err(error),
            // A failing option must not withhold existing objects from clients.
            _ => {
                tracing::error!(error = error.in_full(), "cannot hold all devices open");
                Ok(objects.events.identity.devices.iter().copied().zip(nodes).collect())
            }
        })?;
        let socket = listener.as_fd().try_clone_to_owned().map_err(duplication_failed)?;
        objects.hold_own(socket, devices);
        objects.store.complete();
        objects.store.serving();
        let path = listener.path().to_owned();
        let mut state = State::new(objects, config.timeout, config.emulated);
        state.changes.reserves_names = reserves_names;
        let admission = Admission::new(listener, config.allow_uids, config.allow_gids);
        Ok(Self { reactor: Reactor::new(state, admission, keeper_link, config.limits, cancel)?, path })
    }

    /// The path of its socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Serves until cancelled. Blocks. Drops the objects unless a keeper holds them; clients keep their mappings. With a keeper, returns
    /// after the keeper has everything, or after 10 s.
    ///
    /// # Errors
    /// [`Error::Misuse`] if a parent of this process created the `Cancel`; [`Error::System`] if the event loop fails.
    pub fn run(mut self) -> Result<ServerReport> {
        let result = self.reactor.run();
        let ended_keeper = self.reactor.ended_keeper();
        drop_in_thread(self.reactor);
        if ended_keeper {
            let removed =
                Cancel::new().and_then(|cancel| Listener::remove_unserved(&self.path, CLOSE_TIMEOUT, &cancel));
            let _ = removed.inspect_err(|error| tracing::debug!(%error, "cannot remove the socket's file"));
        }
        result
    }
}

/// Drops a reactor in a thread, because peers can block the close of descriptors that they sent. The process exits without waiting for
/// them.
fn drop_in_thread(reactor: Reactor) {
    let (done, ended) = mpsc::channel();
    let close = move || {
        drop(reactor);
        // Fails if the wait has timed out.
        let _ = done.send(());
    };
    match thread::Builder::new().name("closer".to_owned()).spawn(close) {
        Ok(_) if ended.recv_timeout(CLOSE_TIMEOUT).is_err() => {
            tracing::warn!("peers block the close of their descriptors: exiting anyway");
        }
        Ok(_) => {}
        Err(error) => tracing::warn!(%error, "cannot start a thread to close descriptors"),
    }
}
