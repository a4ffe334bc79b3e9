//! A broker in its own process, so that its descriptors, memory and maps can be counted, and clients that write their records by hand.

use std::{
    collections::BTreeMap,
    env,
    fmt::Display,
    fs,
    io::{self, IoSliceMut, Read},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Mutex,
    thread,
    time::Duration,
};

use nix::{
    sys::{
        resource::{Resource, setrlimit},
        signal::{Signal, kill},
    },
    unistd::{Gid, Pid, Uid, setgid, setgroups, setuid},
};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags, SocketAddrUnix,
    SocketType, bind, socket,
};
use sendfd::SendWithFd;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;
use tracing_subscriber::filter::LevelFilter;
use vmmfd::{
    broker::{Client, Quota, Server, ServerConfig},
    channel::{Cancel, CancelReason, Trust},
    internals,
    session::Config,
    wire::{
        HEADER_LENGTH, Hello, MAX_BODY, MAX_FDS,
        broker::{BROKER, List, Measure, Measured, Message, NO_BACKEND, Summary},
    },
};

use crate::{
    broker::until,
    conversation::{PATIENCE, seqpacket},
    support::{Kind, Subject, pause, session::spawn_alone},
};

/// The setup of the serving child; only this child has the variable.
const SETUP: &str = "VMMFD_TEST_BROKER";

/// The test that the child runs in order to serve.
const SERVES: &str = "broker_process::the_server_maps_no_driver";

/// The setup of a broker process.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Setup {
    /// Accept memfds as GPU memory.
    pub(crate) emulated: bool,
    /// [`ServerConfig::timeout`], unless 0.
    pub(crate) timeout_ms: u64,
    /// The descriptor limit of the process, unless 0.
    pub(crate) files: u64,
    /// Its user and group, unless 0. Needs root.
    pub(crate) user: u32,
    pub(crate) allow_uids: Vec<u32>,
    pub(crate) allow_gids: Vec<u32>,
    /// [`Quota`]: bytes, objects, leases, connections.
    pub(crate) quota: [Option<u64>; 4],
    /// Whether a previous broker left its socket file, as after a kill.
    pub(crate) after_loss: bool,
    /// Whether it runs in a user namespace that maps no other users.
    pub(crate) alone: bool,
    pub(crate) path: PathBuf,
}

impl Setup {
    pub(crate) fn of(subject: &Subject) -> Self {
        Self { emulated: subject.kind == Kind::Fake, ..Self::default() }
    }

    fn config(&self) -> ServerConfig {
        let mut config = ServerConfig::default();
        (config.allow_uids, config.allow_gids) = (self.allow_uids.clone(), self.allow_gids.clone());
        if self.emulated {
            config = internals::emulated(config);
        }
        let mut quota = Quota::default();
        [quota.bytes, quota.objects, quota.leases, quota.connections] = self.quota;
        config.quota = quota;
        if self.timeout_ms > 0 {
            config.timeout = Duration::from_millis(self.timeout_ms);
        }
        config
    }
}

/// Whether a descriptor is memory, by its name in /proc.
pub(crate) fn is_memory(name: &str) -> bool {
    name.starts_with("/memfd:") || name.starts_with("/dev/nvidia")
}

/// The CPU time of a process in ns.
pub(crate) fn processor_time(pid: impl Display) -> u64 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let times = tasks.filter_map(|task| fs::read_to_string(task.unwrap().path().join("schedstat")).ok());
    times.map(|times| times.split(' ').next().unwrap().parse::<u64>().unwrap()).sum()
}

/// A broker in its own process.
pub(crate) struct Process {
    folder: TempDir,
    pub(crate) path: PathBuf,
    child: Child,
    user: u32,
}

/// Connects to a broker that runs as `user`.
pub(crate) fn connect(path: &Path, user: u32) -> vmmfd::Result<Client> {
    Client::connect(path, &Config::default().trust(Trust { uids: vec![user] }))
}

impl Process {
    /// Starts a broker, and waits until it serves.
    pub(crate) fn start(mut setup: Setup) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        let path = folder.path().join("broker.sock");
        setup.path.clone_from(&path);
        if setup.after_loss {
            // The drop leaves the socket file. The socket never listens: a fork of another test may hold a copy of it.
            let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
            bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
            std::os::unix::fs::chown(&path, Some(setup.user), None).unwrap();
        }
        let program = env::current_exe().unwrap();
        let mut command = if setup.alone {
            let mut command = Command::new("unshare");
            command.args(["--user", "--map-root-user"]).arg(program);
            command
        } else {
            Command::new(program)
        };
        command.args([SERVES, "--exact", "--nocapture"]).env(SETUP, serde_json::to_string(&setup).unwrap());
        // The server exits when its standard input closes, so it also exits if this process dies.
        command.stdin(Stdio::piped()).stdout(Stdio::null()).current_dir("/");
        let child = spawn_alone(&mut command);
        let process = Self { folder, path, child, user: setup.user };
        until(|| Raw::dial(&process.path).is_ok());
        process
    }

    pub(crate) fn client(&self) -> Client {
        connect(&self.path, self.user).unwrap()
    }

    /// Runs `body` while the server is stopped.
    pub(crate) fn while_stopped<T>(&self, body: impl FnOnce() -> T) -> T {
        let child = Pid::from_raw(self.child.id().cast_signed());
        kill(child, Signal::SIGSTOP).unwrap();
        let state = || fs::read_to_string(self.file("stat")).unwrap().rsplit(") ").next().unwrap().starts_with('T');
        until(state);
        let result = body();
        kill(child, Signal::SIGCONT).unwrap();
        result
    }

    /// Requests a shutdown.
    pub(crate) fn stop(&mut self) {
        self.child.stdin = None;
    }

    /// Waits until the process exits.
    #[track_caller]
    pub(crate) fn wait_for_exit(&mut self) {
        let begun = std::time::Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < PATIENCE, "the server does not end");
            pause(begun);
        }
    }

    fn file(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{name}", self.child.id()))
    }

    /// The number of descriptors by name.
    pub(crate) fn files(&self) -> BTreeMap<String, usize> {
        let mut files = BTreeMap::new();
        for entry in fs::read_dir(self.file("fd")).unwrap() {
            let Ok(link) = fs::read_link(entry.unwrap().path()) else { continue };
            let link = link.to_string_lossy().into_owned();
            // The names of sockets and pipes contain their inode numbers.
            *files.entry(link.split(":[").next().unwrap_or_default().to_owned()).or_default() += 1;
        }
        files
    }

    /// The number of memory descriptors.
    pub(crate) fn memory_files(&self) -> usize {
        self.files().iter().filter(|(name, _)| is_memory(name)).map(|(_, count)| count).sum()
    }

    /// Its resident memory in KiB.
    pub(crate) fn resident(&self) -> u64 {
        self.status("VmRSS:").strip_suffix(" kB").unwrap().parse().unwrap()
    }

    /// A value of /proc/PID/status.
    fn status(&self, name: &str) -> String {
        let status = fs::read_to_string(self.file("status")).unwrap();
        status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned()
    }

    fn maps(&self) -> String {
        fs::read_to_string(self.file("maps")).unwrap()
    }

    /// Its log, from level DEBUG.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap()
    }

    /// Waits until this client has the only connection.
    #[track_caller]
    pub(crate) fn wait_for_ends(&self, client: &Client) {
        self.wait_for_others(client, 0);
    }

    /// Waits until the broker has `others` connections besides this client's.
    #[track_caller]
    pub(crate) fn wait_for_others(&self, client: &Client, others: u64) {
        until(|| {
            // The prefix matches no name: the list of leases may be very long.
            let totals = client.who("no name begins so").unwrap().totals;
            totals.iter().map(|user| user.connections).sum::<u64>() == others + 1
        });
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!("{}", fs::read_to_string(self.folder.path().join("log")).unwrap_or_default());
        }
    }
}

/// Serves and does not return, if this process was started as a server.
fn serve_if_asked() {
    let Ok(setup) = env::var(SETUP) else { return };
    let setup: Setup = serde_json::from_str(&setup).unwrap();
    if setup.files > 0 {
        setrlimit(Resource::RLIMIT_NOFILE, setup.files, setup.files).unwrap();
    }
    if setup.user > 0 {
        become_user(setup.user, setup.user, &[]);
    }
    let log = fs::File::create(setup.path.with_file_name("log")).unwrap();
    tracing_subscriber::fmt().with_max_level(LevelFilter::DEBUG).with_ansi(false).with_writer(Mutex::new(log)).init();
    let cancel = Cancel::new().unwrap();
    let server = Server::bind(&setup.path, setup.config(), &cancel).unwrap();
    thread::spawn(move || {
        let _ = io::stdin().read_to_end(&mut Vec::new());
        cancel.cancel(CancelReason::Program);
    });
    server.run().unwrap();
    std::process::exit(0);
}

/// Changes this process's user. Needs root.
pub(crate) fn become_user(uid: u32, gid: u32, groups: &[u32]) {
    let groups: Vec<Gid> = groups.iter().copied().map(Gid::from_raw).collect();
    setgroups(&groups).unwrap();
    setgid(Gid::from_raw(gid)).unwrap();
    setuid(Uid::from_raw(uid)).unwrap();
}

/// A connection to a broker, with every record written by hand.
#[derive(Debug)]
pub(crate) struct Raw(pub(crate) UnixStream);

impl Raw {
    /// A connection without a hello.
    pub(crate) fn dial(path: &Path) -> io::Result<Self> {
        let socket = seqpacket();
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        Self::over(socket)
    }

    /// A connection made by another process.
    pub(crate) fn over(socket: OwnedFd) -> io::Result<Self> {
        let socket = UnixStream::from(socket);
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.set_write_timeout(Some(PATIENCE))?;
        Ok(Self(socket))
    }

    pub(crate) fn hello() -> Message {
        let (capabilities, backend) = (vec![BROKER.to_owned()], NO_BACKEND.to_owned());
        Message::Hello(Hello { version: 1, capabilities, backend, pid: std::process::id(), timeout_ms: 20_000 })
    }

    /// A connection after the exchange of hellos.
    pub(crate) fn greeted(path: &Path) -> io::Result<Self> {
        let raw = Self::dial(path)?;
        raw.send(&Self::hello(), &[])?;
        match raw.receive()? {
            Some((Message::Hello(_), _)) => Ok(raw),
            other => Err(io::Error::other(format!("{other:?}"))),
        }
    }

    pub(crate) fn send(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut record = Vec::new();
        message.encode_into(&mut record).map_err(io::Error::other)?;
        self.send_bytes(&record, fds)
    }

    pub(crate) fn send_bytes(&self, record: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let fds: Vec<RawFd> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
        if fds.is_empty() {
            rustix::net::send(&self.0, record, SendFlags::NOSIGNAL)?;
        } else {
            self.0.send_with_fd(record, &fds)?;
        }
        Ok(())
    }

    /// The next record, or `None` if the connection is closed.
    pub(crate) fn receive(&self) -> io::Result<Option<(Message, Vec<OwnedFd>)>> {
        let mut record = vec![0; HEADER_LENGTH + MAX_BODY];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut record)];
        let received = rustix::net::recvmsg(&self.0, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
        let rights = ancillary.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        });
        let fds: Vec<OwnedFd> = rights.flatten().collect();
        assert!(!received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC), "{:?}", received.flags);
        if received.bytes == 0 {
            return Ok(None);
        }
        let message = Message::decode(&record[..received.bytes], fds.len()).map_err(io::Error::other)?;
        Ok(Some((message, fds)))
    }

    #[track_caller]
    pub(crate) fn measured(&self) -> Measured {
        match self.ask(&Message::Measure(Measure {}), &[]).unwrap() {
            Some((Message::Measured(measured), _)) => *measured,
            other => panic!("{other:?}"),
        }
    }

    /// Waits until the server has closed all but this many connections: it is then idle.
    #[track_caller]
    pub(crate) fn until_connections(&self, left: usize) {
        until(|| self.measured().connections == left as u64);
    }

    /// Sends a request, and returns the first record of the answer.
    pub(crate) fn ask(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> io::Result<Option<(Message, Vec<OwnedFd>)>> {
        self.send(message, fds)?;
        self.receive()
    }

    /// All objects that this client may read, across all pages.
    #[track_caller]
    pub(crate) fn list(&self) -> Vec<Summary> {
        let mut objects: Vec<Summary> = Vec::new();
        loop {
            let after = objects.last().map(|last| last.name.clone());
            let list = Message::List(List { prefix: String::new(), after });
            match self.ask(&list, &[]).unwrap() {
                Some((Message::Objects(page), _)) => {
                    objects.extend(page.objects);
                    if !page.more {
                        return objects;
                    }
                }
                other => panic!("{other:?}"),
            }
        }
    }

    /// Reads until the connection is closed, and returns the last error received.
    pub(crate) fn ending(&self) -> Option<vmmfd::wire::Failure> {
        let (mut failure, mut resets) = (None, 0);
        loop {
            match self.receive() {
                Ok(Some((Message::Error(error), _))) => failure = Some(error),
                Ok(Some(_)) => {}
                // A reset is reported once, before the records sent earlier.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset && resets == 0 => resets += 1,
                Ok(None) | Err(_) => return failure,
            }
        }
    }
}

impl AsFd for Raw {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A child runs this test too, in order to serve: it must not load a driver first.
#[test]
fn the_server_maps_no_driver() {
    serve_if_asked();
    let subject = Subject::fake();
    let driver = &subject.driver;
    let server = Process::start(Setup::of(&subject));
    let client = server.client();
    let mapped = |maps: &str| maps.contains("cuda.so") || maps.contains("libcuda") || maps.contains("memfd:");
    {
        let memory = crate::broker::filled(driver, 8 << 20, Some(2 << 20), 4);
        let part = vmmfd::broker::PutPart::of("all", &memory).unwrap();
        client.put(&vmmfd::broker::Put::new("a").part(part)).unwrap();
        let object = client.get(&vmmfd::broker::Get::new("a")).unwrap().open(driver, None).unwrap();
        // This process maps both, which proves that the check can detect a driver.
        assert!(mapped(&fs::read_to_string("/proc/self/maps").unwrap()));
        assert!(!mapped(&server.maps()), "{}", server.maps());
        drop(object);
    }
    assert!(!mapped(&server.maps()), "{}", server.maps());
    // Four segments.
    until(|| server.memory_files() == 4);
}

/// Each growth of the descriptor table stops a multithreaded process for milliseconds.
#[test]
fn descriptor_table_is_allocated_at_start() {
    let server = Process::start(Setup::of(&Subject::host()));
    drop(server.client());
    let (_, hard) = nix::sys::resource::getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    let room: u64 = server.status("FDSize:").parse().unwrap();
    assert!(room >= hard.min(1 << 20), "room for {room} descriptors, at a limit of {hard}");
}
