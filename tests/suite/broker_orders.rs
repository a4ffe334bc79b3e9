//! Kills, hangups and stops of the broker's two processes, in every order: no object is lost.

use std::{
    fs, io,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use vmmfd::{
    broker::{Client, Get, Put, PutPart},
    session::Config,
    wire::broker::Message,
};

use crate::{
    broker::filled,
    broker_faults::value,
    broker_process::Raw,
    running::binary,
    support::{
        Subject,
        served::{Keeper, Served, copied, stored, with_argument},
        session::Session,
    },
};

/// The time limit of each wait.
const DEADLINE: Duration = Duration::from_secs(120);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Process {
    Server,
    Keeper,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    Kill(Process),
    HangUp(Process),
    /// The process continues after the next event.
    Stop(Process),
}

const EVENTS: [Event; 6] = [
    Event::Kill(Process::Keeper),
    Event::Kill(Process::Server),
    Event::HangUp(Process::Keeper),
    Event::HangUp(Process::Server),
    Event::Stop(Process::Keeper),
    Event::Stop(Process::Server),
];

impl Event {
    fn send(self, [server, keeper]: [Pid; 2]) {
        let (process, signal) = match self {
            Self::Kill(process) => (process, Signal::SIGKILL),
            Self::HangUp(process) => (process, Signal::SIGHUP),
            Self::Stop(process) => (process, Signal::SIGSTOP),
        };
        kill(if process == Process::Server { server } else { keeper }, signal).unwrap();
    }

    /// Whether the event replaces the server, and whether it replaces the keeper.
    fn replaces(self) -> [bool; 2] {
        match self {
            Self::Kill(Process::Server) | Self::HangUp(_) => [true, false],
            Self::Kill(Process::Keeper) => [false, true],
            Self::Stop(_) => [false, false],
        }
    }
}

/// A broker, and the number of its objects. Each object is filled with its number.
struct Broker<'a> {
    subject: &'a Subject,
    served: Served,
    objects: u8,
    events: Vec<Event>,
}

impl<'a> Broker<'a> {
    fn over(subject: &'a Subject, served: Served) -> Self {
        let mut broker = Self { subject, served, objects: 0, events: Vec::new() };
        broker.check();
        broker
    }

    fn start(subject: &'a Subject, program: &Path, options: &[&str]) -> Self {
        Self::over(subject, Served::with(Keeper::Own, subject, program, options))
    }

    fn client(&self) -> Client {
        Client::connect(&self.served.path, &Config::default().timeout(DEADLINE)).unwrap()
    }

    #[track_caller]
    fn until<T>(&self, awaited: &str, condition: impl Fn() -> Option<T>) -> T {
        let begun = Instant::now();
        loop {
            if let Some(value) = condition() {
                return value;
            }
            assert!(begun.elapsed() < DEADLINE, "{awaited} did not happen after {:?}", self.events);
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// The server, if one answers.
    fn server(&self) -> Option<Pid> {
        let raw = Raw::dial(&self.served.path).ok()?;
        raw.send(&Raw::hello(), &[]).ok()?;
        match raw.receive() {
            Ok(Some((Message::Hello(hello), _))) => Some(Pid::from_raw(hello.pid.cast_signed())),
            _ => None,
        }
    }

    /// The server and the keeper, once only these two processes exist and the keeper has every descriptor.
    #[track_caller]
    fn pair(&self) -> [Pid; 2] {
        self.until("a full pair of processes", || {
            let [first, second] = with_argument(&self.served.path)[..] else { return None };
            let server = self.server()?;
            let keeper = if server == first { second } else { first };
            let count = stored(server);
            (count > usize::from(self.objects) && stored(keeper) == count).then_some([server, keeper])
        })
    }

    /// Puts another object, and gets it.
    #[track_caller]
    fn check(&mut self) {
        let client = self.client();
        let (name, memory) =
            (format!("object-{}", self.objects), filled(&self.subject.driver, 4096, None, self.objects));
        client.put(&Put::new(&name).part(PutPart::of("all", &memory).unwrap())).unwrap();
        assert_eq!(value(&client, &self.subject.driver, &name), [self.objects; 2], "after {:?}", self.events);
        self.objects += 1;
    }

    /// Gets each object.
    #[track_caller]
    fn check_all(&mut self) {
        self.check();
        let client = self.client();
        for number in 0..self.objects {
            let found = value(&client, &self.subject.driver, &format!("object-{number}"));
            assert_eq!(found, [number; 2], "after {:?}", self.events);
        }
    }

    /// Sends these events in order. Resumes stopped processes after the last event.
    #[track_caller]
    fn send(&mut self, events: &[Event]) {
        // A stopped process group that becomes orphaned gets SIGHUP (setpgid(2)), so its server exits shortly afterwards.
        let before = self.until("a pair that stays", || {
            let pair = self.pair();
            thread::sleep(Duration::from_millis(100));
            (pair == self.pair()).then_some(pair)
        });
        for event in events {
            self.events.push(*event);
            event.send(before);
        }
        for pid in before {
            match kill(pid, Signal::SIGCONT) {
                Ok(()) | Err(Errno::ESRCH) => {}
                Err(errno) => panic!("{errno}"),
            }
        }
        self.served.reap();
        let replaced = |at: usize| events.iter().any(|event| event.replaces()[at]);
        self.until("the next process", || {
            let pair = self.pair();
            (0..2).all(|at| !replaced(at) || pair[at] != before[at]).then_some(())
        });
        self.check();
    }
}

/// A cycle of events in which each ordered pair of them occurs once: a de Bruijn sequence, from its Lyndon words.
fn cycle_of_pairs() -> impl Iterator<Item = Event> {
    let words = |first: usize| {
        [EVENTS[first]].into_iter().chain(EVENTS[first + 1..].iter().flat_map(move |&second| [EVENTS[first], second]))
    };
    (0..EVENTS.len()).flat_map(words).chain([EVENTS[0]])
}

#[test]
fn every_order_of_ends_loses_nothing() {
    let subject = Subject::host();
    let mut broker = Broker::start(&subject, &binary("vmmfd"), &[]);
    let cycle: Vec<Event> = cycle_of_pairs().collect();
    broker.send(&cycle[..1]);
    for pair in cycle.windows(2) {
        match pair {
            // The process continues after the second event.
            [Event::Stop(_), _] => broker.send(pair),
            // The next pair sends it.
            [_, Event::Stop(_)] => {}
            _ => broker.send(&pair[1..]),
        }
    }
    broker.check_all();
}

#[test]
fn stopped_keeper_is_replaced() {
    let subject = Subject::host();
    let mut broker = Broker::start(&subject, &binary("vmmfd"), &["--time-limit", "silence=1s"]);
    for reports in 1..=2 {
        let [server, keeper] = broker.pair();
        broker.events.push(Event::Stop(Process::Keeper));
        kill(keeper, Signal::SIGSTOP).unwrap();
        // More messages than a socket's queue holds at the default `net.unix.max_dgram_qlen` of 10.
        (0..8).for_each(|_| broker.check());
        broker.until("the end of the stopped keeper", || {
            (!with_argument(&broker.served.path).contains(&keeper)).then_some(())
        });
        let after = broker.pair();
        assert_eq!(after[0], server);
        broker.served.wait_for_log("the keeper has read nothing for 1s", reports);
        // A server kill loses nothing either, although the stopped process was to take over.
        broker.send(&[Event::Kill(Process::Server)]);
    }
}

/// Only a program that starts as a keeper replaces the running one. Until then, kills restart the old program.
#[test]
fn upgrade_loses_nothing() {
    let subject = Subject::host();
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("vmmfd");
    copied(&binary("vmmfd"), &program);
    let mut broker = Broker::start(&subject, &program, &[]);
    let client = broker.client();
    let lease = client.get(&Get::new("object-0")).unwrap();
    let file = |path: &Path| fs::metadata(path).unwrap().ino();
    let images = |pair: [Pid; 2]| pair.map(|pid| file(Path::new(&format!("/proc/{pid}/exe"))));
    let upgrade = |broker: &mut Broker<'_>| {
        copied(&binary("vmmfd"), &program);
        let [_, keeper] = broker.pair();
        broker.send(&[Event::HangUp(Process::Keeper)]);
        // The keeper is the same process and executes the new program, as does the new server.
        let pair = broker.pair();
        assert_eq!((pair[1], images(pair)), (keeper, [file(&program); 2]));
        broker.until("the lease", || lease.is_held().then_some(()));
    };
    (0..2).for_each(|_| upgrade(&mut broker));
    let wrong = [
        ("#!/bin/sh\nexit 3\n", 0o755),
        ("#!/bin/sh\nexit 0\n", 0o755),
        ("no program\n", 0o755),
        ("#!/bin/sh\n", 0o644),
    ];
    for (refusals, file) in (1..).zip(wrong.map(Some).into_iter().chain([None])) {
        match file {
            Some((text, mode)) => {
                let beside = folder.path().join("other");
                fs::write(&beside, text).unwrap();
                fs::set_permissions(&beside, fs::Permissions::from_mode(mode)).unwrap();
                fs::rename(&beside, &program).unwrap();
            }
            None => fs::remove_file(&program).unwrap(),
        }
        let before = broker.pair();
        kill(before[1], Signal::SIGHUP).unwrap();
        broker.served.wait_for_log("not reloaded", refusals);
        assert_eq!(broker.pair(), before);
        broker.check();
    }
    for process in [Process::Server, Process::Keeper, Process::Server] {
        broker.send(&[Event::Kill(process)]);
    }
    copied(&binary("vmmfd"), &program);
    broker.send(&[Event::HangUp(Process::Keeper)]);
    broker.check_all();
}

/// The server dies while the socket's path is unusable. Its successor names the `remedy`, and listens there again after the repair.
fn unusable_path_keeps_objects(remedy: &str, spoil: impl Fn(&Path), repair: impl Fn(&Path)) {
    let subject = Subject::host();
    let mut broker = Broker::start(&subject, &binary("vmmfd"), &[]);
    let [server, keeper] = broker.pair();
    spoil(&broker.served.path);
    kill(server, Signal::SIGKILL).unwrap();
    broker
        .served
        .wait_for_log(&format!("new clients can't connect, but objects are held: {remedy} and send SIGHUP"), 1);
    repair(&broker.served.path);
    kill(keeper, Signal::SIGHUP).unwrap();
    broker.pair();
    broker.check_all();
}

#[test]
fn removed_folder_keeps_the_objects() {
    let folder = |path: &Path| path.parent().unwrap().to_owned();
    let spoil = |path: &Path| fs::remove_dir_all(folder(path)).unwrap();
    unusable_path_keeps_objects("recreate the socket's folder", spoil, |path| fs::create_dir(folder(path)).unwrap());
}

#[test]
fn replaced_socket_keeps_the_objects() {
    let spoil = |path: &Path| {
        fs::remove_file(path).unwrap();
        fs::write(path, "no socket").unwrap();
    };
    unusable_path_keeps_objects("remove that file", spoil, |path| fs::remove_file(path).unwrap());
}

/// What `serve` reports under a limit with which it can't hold an object.
fn refusal_under(limit: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", &format!("ulimit {limit}; exec \"$0\" serve --socket \"$1\"")]);
    let mut child =
        command.arg(binary("vmmfd")).arg(folder.path().join("socket")).stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > DEADLINE {
            child.kill().unwrap();
            panic!("it serves");
        }
        thread::sleep(Duration::from_millis(10));
    }
    io::read_to_string(child.stderr.take().unwrap()).unwrap()
}

#[test]
fn short_limits_are_refused() {
    for (limit, name, remedy) in
        [("-f 64", "RLIMIT_FSIZE", "ulimit -f unlimited"), ("-n 256", "RLIMIT_NOFILE", "ulimit -n")]
    {
        let text = refusal_under(limit);
        assert!(text.contains(name) && text.contains(remedy), "{limit}: {text}");
    }
}

#[test]
fn full_environment_keeps_restarts_possible() {
    let subject = Subject::host();
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("serve");
    fs::write(&program, FULL_ENVIRONMENT.replace("PROGRAM", binary("vmmfd").to_str().unwrap())).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let mut broker = Broker::start(&subject, &program, &[]);
    let client = broker.client();
    let memory = filled(&subject.driver, 16 << 20, Some(4096), 9);
    client.put(&Put::new("many").part(PutPart::of("all", &memory).unwrap())).unwrap();
    for event in [Event::Kill(Process::Server), Event::HangUp(Process::Keeper), Event::Kill(Process::Keeper)] {
        broker.send(&[event]);
        assert_eq!(value(&client, &subject.driver, "many"), [9; 2]);
    }
}

/// execve(2) limits arguments and environment to a quarter of the stack limit, but at least 128 KiB: this leaves 2 KiB of 256.
const FULL_ENVIRONMENT: &str = r#"#!/bin/sh
ulimit -s 1024
used=$(($(env | wc -c) + $(env | wc -l) * 8))
more=$(((256 * 1024 - used - 2048) / 2))
first=$(head -c $more /dev/zero | tr '\0' x)
export FIRST=$first SECOND=$first
exec PROGRAM "$@"
"#;

#[test]
fn unread_stderr_blocks_nothing() {
    let subject = Subject::host();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broker.sock");
    let mut child = Command::new(binary("vmmfd"));
    child.args(["serve", "-vv", "--socket"]).arg(&path).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = Session::start(&mut child).unwrap();
    let stderr = child.stderr.take().unwrap();
    let begun = Instant::now();
    let connect = || Client::connect(&path, &Config::default());
    while connect().is_err() {
        assert!(begun.elapsed() < DEADLINE, "it does not serve");
        thread::sleep(Duration::from_millis(10));
    }
    // Each connection writes several log lines: together more than the pipe and the queue hold.
    for _ in 0..1500 {
        connect().unwrap();
    }
    let client = connect().unwrap();
    let memory = filled(&subject.driver, 4096, None, 3);
    client.put(&Put::new("a").part(PutPart::of("all", &memory).unwrap())).unwrap();
    assert_eq!(value(&client, &subject.driver, "a"), [3; 2]);
    let read = thread::spawn(move || io::read_to_string(stderr).unwrap());
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM).unwrap();
    assert!(child.wait().unwrap().success());
    let log = read.join().unwrap();
    assert!(log.contains("lines of the log were dropped"), "{} bytes", log.len());
}

#[test]
fn folder_lock_prevents_no_start() {
    let subject = Subject::host();
    let mut served = Served::start(Keeper::Own, &subject);
    let folder = served.path.parent().unwrap().to_owned();
    assert_eq!(served.stop(), Some(0));
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0, "an end in order leaves no file");
    // Any user can lock a folder that it can open.
    let locked = fs::File::open(&folder).unwrap();
    locked.lock().unwrap();
    served.start_again();
    let broker = Broker::over(&subject, served);
    assert!(!broker.served.log().contains("previous"), "{}", broker.served.log());
    let lock = fs::metadata(folder.join(".broker.sock.lock")).unwrap();
    assert_eq!(lock.permissions().mode() & 0o777, 0o600);
}
