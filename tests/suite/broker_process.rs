//! A broker as a process of its own, whose descriptors, memory and maps can be counted; and clients of it that speak by hand.

use std::{
    collections::BTreeMap,
    env, fs,
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
    unistd::{Gid, Pid, Uid, alarm, setgid, setgroups, setuid},
};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags, SocketAddrUnix};
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
    support::{Kind, Subject},
};

/// What the child that serves is to do; only that child has it.
const SETUP: &str = "VMMFD_TEST_BROKER";

/// The test that a child runs to serve.
const SERVES: &str = "broker_process::the_server_maps_no_driver";

/// A child that hangs ends after so many seconds.
const DEADLINE: u32 = 600;

/// How a broker in a process of its own serves.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Setup {
    /// Takes memfds for a GPU's memory.
    pub(crate) emulated: bool,
    /// [`ServerConfig::timeout`], unless 0.
    pub(crate) timeout_ms: u64,
    /// The most descriptors of the process, unless 0.
    pub(crate) files: u64,
    /// Its user and group, unless 0. Needs root.
    pub(crate) user: u32,
    pub(crate) allow_uids: Vec<u32>,
    pub(crate) allow_gids: Vec<u32>,
    /// [`Quota`]: bytes, objects, leases, connections.
    pub(crate) quota: [Option<u64>; 4],
    /// Whether a broker before it left its socket's file, as one that was killed does.
    pub(crate) after_loss: bool,
    /// Whether it runs in a user namespace that knows no other users.
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

/// Whether a descriptor is of memory or of a catalogue, by the name that /proc has for it.
pub(crate) fn is_memory(name: &str) -> bool {
    // The history of crashes is there whatever the broker keeps.
    let memfd = name.starts_with("/memfd:") && !name.contains("vmmfd-history");
    memfd || name.starts_with("/dev/nvidia")
}

/// A broker in a process of its own.
pub(crate) struct Process {
    folder: TempDir,
    pub(crate) path: PathBuf,
    child: Child,
    user: u32,
}

/// A client of a broker that runs as this process's user, or as another.
pub(crate) fn connect(path: &Path, user: u32) -> vmmfd::Result<Client> {
    Client::connect(path, &Config::default().trust(Trust { uids: vec![user] }))
}

impl Process {
    /// Starts one, and waits until it serves.
    pub(crate) fn start(mut setup: Setup) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        let path = folder.path().join("broker.sock");
        setup.path.clone_from(&path);
        if setup.after_loss {
            // Its file stays.
            drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
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
        // It ends when its standard input does: with this process, too.
        command.stdin(Stdio::piped()).stdout(Stdio::null()).current_dir("/");
        let child = command.spawn().unwrap();
        let process = Self { folder, path, child, user: setup.user };
        until(|| Raw::dial(&process.path).is_ok());
        process
    }

    pub(crate) fn client(&self) -> Client {
        connect(&self.path, self.user).unwrap()
    }

    /// Does something while the server does not run.
    pub(crate) fn while_stopped<T>(&self, body: impl FnOnce() -> T) -> T {
        let child = Pid::from_raw(self.child.id().cast_signed());
        kill(child, Signal::SIGSTOP).unwrap();
        let state = || fs::read_to_string(self.file("stat")).unwrap().rsplit(") ").next().unwrap().starts_with('T');
        until(state);
        let result = body();
        kill(child, Signal::SIGCONT).unwrap();
        result
    }

    /// Asks it to end.
    pub(crate) fn stop(&mut self) {
        self.child.stdin = None;
    }

    /// Waits until it has ended.
    #[track_caller]
    pub(crate) fn wait_for_exit(&mut self) {
        let begun = std::time::Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < PATIENCE, "the server does not end");
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn file(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{name}", self.child.id()))
    }

    /// How many descriptors it has, by what they are of.
    pub(crate) fn files(&self) -> BTreeMap<String, usize> {
        let mut files = BTreeMap::new();
        for entry in fs::read_dir(self.file("fd")).unwrap() {
            let Ok(link) = fs::read_link(entry.unwrap().path()) else { continue };
            let link = link.to_string_lossy().into_owned();
            // Sockets and pipes have their inodes' numbers in their names.
            *files.entry(link.split(":[").next().unwrap_or_default().to_owned()).or_default() += 1;
        }
        files
    }

    /// How many descriptors it has of memory.
    pub(crate) fn memory_files(&self) -> usize {
        self.files().iter().filter(|(name, _)| is_memory(name)).map(|(_, count)| count).sum()
    }

    /// [`Process::files`] without those of memory.
    pub(crate) fn other_files(&self) -> BTreeMap<String, usize> {
        self.files().into_iter().filter(|(name, _)| !is_memory(name)).collect()
    }

    /// How long it has run on a processor, in clock ticks.
    pub(crate) fn processor_ticks(&self) -> u64 {
        let stat = fs::read_to_string(self.file("stat")).unwrap();
        let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    }

    /// What it has resident, in KiB.
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

    /// What it has logged, from DEBUG on.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap()
    }

    /// Waits until it has no connection but this client's.
    #[track_caller]
    pub(crate) fn wait_for_ends(&self, client: &Client) {
        self.wait_for_others(client, 0);
    }

    /// Waits until it has so many connections besides this client's.
    #[track_caller]
    pub(crate) fn wait_for_others(&self, client: &Client, others: u64) {
        until(|| {
            // The leases are not listed, which may be very many.
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

/// Serves, if this process was started for it: then it does not return.
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

/// Makes this process one of another user. Needs root.
pub(crate) fn become_user(uid: u32, gid: u32, groups: &[u32]) {
    let groups: Vec<Gid> = groups.iter().copied().map(Gid::from_raw).collect();
    setgroups(&groups).unwrap();
    setgid(Gid::from_raw(gid)).unwrap();
    setuid(Uid::from_raw(uid)).unwrap();
}

/// What a child does that was started by [`Actor::start`]; only such a child has it.
const STEP: &str = "VMMFD_TEST_STEP";

/// Where it says that it has come there.
const THERE: &str = "VMMFD_TEST_THERE";

/// A process of this test program that does something up to a step, and stays there until it is killed.
pub(crate) struct Actor {
    child: Child,
    there: PathBuf,
    _folder: TempDir,
}

impl Actor {
    /// The step that this process is to go to and the socket of the broker, if it is such a child. `test` is the calling test.
    pub(crate) fn role() -> Option<(String, PathBuf)> {
        let step = env::var(STEP).ok()?;
        let (step, path) = step.split_once(' ').unwrap();
        alarm::set(DEADLINE);
        Some((step.to_owned(), PathBuf::from(path)))
    }

    /// Starts a child that runs the test again, in which it asks for its role.
    pub(crate) fn start(test: &str, step: &str, path: &Path) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let there = folder.path().join("there");
        let mut command = Command::new(env::current_exe().unwrap());
        command.args([test, "--exact", "--include-ignored", "--nocapture"]).stdin(Stdio::null()).stdout(Stdio::null());
        command.env(STEP, format!("{step} {}", path.display())).env(THERE, &there).env("TMPDIR", folder.path());
        Self { child: command.spawn().unwrap(), there, _folder: folder }
    }

    /// In the child: says that it is there, with a word, and stays.
    pub(crate) fn stay(word: &str) -> ! {
        let there = PathBuf::from(env::var_os(THERE).unwrap());
        let beside = there.with_extension("new");
        fs::write(&beside, word).unwrap();
        fs::rename(beside, there).unwrap();
        loop {
            thread::park();
        }
    }

    /// Waits until it is there, and returns its word.
    #[track_caller]
    pub(crate) fn until_there(&mut self) -> String {
        let begun = std::time::Instant::now();
        loop {
            if let Ok(word) = fs::read_to_string(&self.there) {
                return word;
            }
            if let Some(status) = self.child.try_wait().unwrap() {
                panic!("the child ended before: {status}");
            }
            assert!(begun.elapsed() < Duration::from_secs(DEADLINE.into()), "the child does not come there");
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Kills it, wherever it is.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A connection to a broker over which each record is made by hand.
#[derive(Debug)]
pub(crate) struct Raw(pub(crate) UnixStream);

impl Raw {
    /// A connection that has said nothing.
    pub(crate) fn dial(path: &Path) -> io::Result<Self> {
        let socket = seqpacket();
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        Self::over(socket)
    }

    /// A connection that another process made.
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

    /// A connection over which hellos were exchanged.
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

    /// The next record, or `None` at the end of the connection.
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

    /// The broker's figures.
    #[track_caller]
    pub(crate) fn measured(&self) -> Measured {
        match self.ask(&Message::Measure(Measure {}), &[]).unwrap() {
            Some((Message::Measured(measured), _)) => *measured,
            other => panic!("{other:?}"),
        }
    }

    /// Waits until the server has closed all connections but this many: it then has nothing to do.
    #[track_caller]
    pub(crate) fn until_connections(&self, left: usize) {
        until(|| self.measured().connections == left as u64);
    }

    /// Sends a request, and returns the first record of the answer.
    pub(crate) fn ask(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> io::Result<Option<(Message, Vec<OwnedFd>)>> {
        self.send(message, fds)?;
        self.receive()
    }

    /// All objects that this client may read, from as many pages as there are.
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

    /// Reads until the connection ends, and returns the last error that came.
    pub(crate) fn ending(&self) -> Option<vmmfd::wire::Failure> {
        let (mut failure, mut resets) = (None, 0);
        loop {
            match self.receive() {
                Ok(Some((Message::Error(error), _))) => failure = Some(error),
                Ok(Some(_)) => {}
                // Reported once, ahead of what was sent before.
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

/// Also what a child runs to serve: before it has loaded any driver.
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
        // This process has both mapped, so that the test can see it.
        assert!(mapped(&fs::read_to_string("/proc/self/maps").unwrap()));
        assert!(!mapped(&server.maps()), "{}", server.maps());
        drop(object);
    }
    assert!(!mapped(&server.maps()), "{}", server.maps());
    // Four segments and the catalogue.
    until(|| server.memory_files() == 5);
}

/// The kernel stops a process with several threads for milliseconds each time that its table of descriptors grows.
#[test]
fn descriptor_table_is_allocated_at_start() {
    let server = Process::start(Setup::of(&Subject::host()));
    drop(server.client());
    let (_, hard) = nix::sys::resource::getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    let room: u64 = server.status("FDSize:").parse().unwrap();
    assert!(room >= hard.min(1 << 20), "room for {room} descriptors, at a limit of {hard}");
}
