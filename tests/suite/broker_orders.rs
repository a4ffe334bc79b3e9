//! Kills, hangups and stops of the broker's two processes, in every order: no object is lost.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt,
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
    broker::{Client, Put, PutPart},
    session::Config,
    wire::broker::Message,
};

use crate::{
    broker::filled,
    broker_process::Raw,
    running::binary,
    support::{
        Subject,
        material::value,
        served::{Keeper, Served, stored},
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
    /// Only of the server.
    HangUp(Process),
    /// Only of the keeper.
    Terminate(Process),
    /// The process continues after the next event.
    Stop(Process),
}

const EVENTS: [Event; 6] = [
    Event::Kill(Process::Keeper),
    Event::Kill(Process::Server),
    Event::Terminate(Process::Keeper),
    Event::HangUp(Process::Server),
    Event::Stop(Process::Keeper),
    Event::Stop(Process::Server),
];

impl Event {
    fn send(self, [server, keeper]: [Pid; 2]) {
        let (process, signal) = match self {
            Self::Kill(process) => (process, Signal::SIGKILL),
            Self::HangUp(process) => (process, Signal::SIGHUP),
            Self::Terminate(process) => (process, Signal::SIGTERM),
            Self::Stop(process) => (process, Signal::SIGSTOP),
        };
        kill(if process == Process::Server { server } else { keeper }, signal).unwrap();
    }

    /// Whether the event replaces the server, and whether it replaces the keeper.
    fn replaces(self) -> [bool; 2] {
        match self {
            Self::Kill(Process::Server) | Self::HangUp(_) => [true, false],
            Self::Kill(Process::Keeper) | Self::Terminate(_) => [false, true],
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
            let [keeper] = self.served.keepers()[..] else { return None };
            let server = self.server()?;
            let count = stored(server);
            (count >= usize::from(self.objects) && stored(keeper) == count).then_some([server, keeper])
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
        // A keeper that its server started may still take over from the previous one.
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
        broker.until("the end of the stopped keeper", || (!broker.served.keepers().contains(&keeper)).then_some(()));
        let after = broker.pair();
        assert_eq!(after[0], server);
        broker.served.wait_for_log("the keeper has read nothing for 1s", reports);
        // A server kill loses nothing either, although the stopped process was to take over.
        broker.send(&[Event::Kill(Process::Server)]);
    }
}

/// The server dies while the socket's path is unusable. Its successor names the remedy, and the next one listens there again.
#[test]
fn replaced_socket_keeps_the_objects() {
    let subject = Subject::host();
    let mut broker = Broker::start(&subject, &binary("vmmfd"), &[]);
    let [server, _] = broker.pair();
    fs::remove_file(&broker.served.path).unwrap();
    fs::write(&broker.served.path, "no socket").unwrap();
    kill(server, Signal::SIGKILL).unwrap();
    let words = "new clients can't connect, but objects are held: remove that file and restart this server";
    broker.served.wait_for_log(words, 1);
    fs::remove_file(&broker.served.path).unwrap();
    kill(broker.served.manager.main(2), Signal::SIGHUP).unwrap();
    broker.pair();
    broker.check_all();
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
fn low_descriptor_limit_is_refused() {
    let text = refusal_under("-n 256");
    assert!(text.contains("RLIMIT_NOFILE") && text.contains("ulimit -n"), "{text}");
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
    for event in [Event::Kill(Process::Server), Event::Terminate(Process::Keeper), Event::Kill(Process::Keeper)] {
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
    let served = Served::start(Keeper::Own, &subject);
    let folder = served.path.parent().unwrap().to_owned();
    assert_eq!(served.stop(), Some(0));
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0, "an end in order leaves no file");
    // Any user can lock a folder that it can open.
    let locked = fs::File::open(&folder).unwrap();
    locked.lock().unwrap();
    served.manager.start_again();
    let broker = Broker::over(&subject, served);
    assert!(!broker.served.log().contains("previous"), "{}", broker.served.log());
    let lock = fs::metadata(folder.join(".broker.sock.lock")).unwrap();
    assert_eq!(lock.permissions().mode() & 0o777, 0o600);
}
