//! Peers in processes of their own, which are stopped and killed.

use std::{
    io::{BufRead, BufReader},
    process::{Child, ChildStdout},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::*;

/// The role of a peer process, the socket's path, and the number of samples that it keeps.
const ROLE: &str = "VMMFD_TEST_STREAM_PEER";

/// A process of this test program.
pub(super) struct Peer {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts a peer, and waits until it has subscribed or listens.
    pub(super) fn start(role: &str, path: &Path, keep: usize) -> Self {
        Self::run("stream::peers::process_of_a_test", ROLE, &format!("{role} {keep} {}", path.display()))
    }

    /// Starts a process that is not a test, with its role in a variable, and waits until it is ready.
    pub(super) fn run(function: &str, variable: &str, role: &str) -> Self {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args([function, "--exact", "--nocapture"]);
        command.env(variable, role).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        let mut peer = Self { child, lines };
        peer.expect("ready");
        peer
    }

    /// Reads until this line.
    #[track_caller]
    pub(super) fn expect(&mut self, wanted: &str) {
        let mut seen = String::new();
        loop {
            let begin = seen.len();
            assert!(self.lines.read_line(&mut seen).unwrap() > 0, "no `{wanted}`: {seen}");
            if seen[begin..].trim_end() == wanted {
                return;
            }
        }
    }

    pub(super) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal).unwrap();
    }

    pub(super) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Stops the process, and returns when it is stopped.
    pub(super) fn stop(&self) {
        self.signal(Signal::SIGSTOP);
        let state = || fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap();
        wait_for("stop", || state().rsplit(") ").next().unwrap().starts_with('T'));
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Not a test: the process of [`Peer::start`].
#[test]
fn process_of_a_test() {
    let Ok(role) = env::var(ROLE) else { return };
    let [role, keep, path] = role.splitn(3, ' ').collect::<Vec<_>>().try_into().unwrap();
    let (keep, path, subject): (usize, _, _) = (keep.parse().unwrap(), Path::new(path), Subject::host());
    if role == "publisher" {
        let options = PublishOptions::fixed(16, 8).history(1).every(LIMIT);
        let publisher = Publisher::create(&subject.device(), &options, &Config::default()).unwrap();
        publisher.listen(path).unwrap();
        if keep > 0 {
            forked_sleeper();
        }
        println!("\nready");
        for number in 1.. {
            publish(&publisher, number as u8);
            thread::sleep(Duration::from_micros(200));
        }
    }
    let policy = if role == "every" { Policy::Every } else { Policy::Latest };
    let options = SubscribeOptions::default().policy(policy).held(2);
    let subscriber = subscribe(&subject, path, &options).unwrap();
    println!("\nready");
    let mut kept = Vec::new();
    loop {
        match subscriber.receive(LIMIT).unwrap() {
            Received::Sample(sample) if kept.len() < keep => kept.push(sample),
            Received::Sample(sample) => drop(sample),
            Received::Ended => break println!("ended"),
            Received::Crashed(_) => break println!("crashed"),
            _ => {}
        }
    }
    drop(kept);
    drop(subscriber);
    // The subject counts its mappings.
    subject.assert_empty();
}

#[test]
fn killed_publisher_is_a_crash() {
    let subject = Subject::host();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let mut epochs = BTreeSet::new();
    for round in 0..kills() / 2 {
        let peer = Peer::start("publisher", &path, 0);
        let options = SubscribeOptions::default().policy(Policy::Queue(1)).held(2);
        let subscriber = subscribe(&subject, &path, &options).unwrap();
        epochs.insert(subscriber.epoch());
        let kept = take(&subscriber);
        for _ in 0..round % 4 * 10 {
            take(&subscriber);
        }
        let pid = peer.pid();
        drop(peer);
        let end = std::iter::repeat_with(|| subscriber.receive(LIMIT).unwrap()).find_map(|received| match received {
            Received::Sample(_) => None,
            end => Some(end),
        });
        assert!(matches!(end, Some(Received::Crashed(peer)) if peer.pid == pid), "{end:?}");
        let mut bytes = [0; 16];
        kept.copy_out(0, &mut bytes).unwrap();
        assert_eq!(bytes, [kept.user()[0]; 16]);
    }
    assert_eq!(epochs.len() as u64, kills() / 2);
}

/// Forks this process. The fork has all its descriptors.
fn forked_sleeper() {
    let sleep = || {
        thread::sleep(LIMIT);
        true
    };
    drop(thread::spawn(move || in_fork(sleep)));
}

#[test]
fn fork_of_a_killed_publisher_hides_no_crash() {
    let subject = Subject::host();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let peer = Peer::start("publisher", &path, 1);
    let subscriber = subscribe(&subject, &path, &SubscribeOptions::default()).unwrap();
    take(&subscriber);
    wait_for("a fork", || !children(peer.pid()).is_empty());
    let forks = children(peer.pid());
    drop(peer);
    let readable = || {
        let mut fds = [PollFd::new(subscriber.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).unwrap() == 1
    };
    let begun = Instant::now();
    while !matches!(subscriber.receive(LIMIT).unwrap(), Received::Crashed(_)) {}
    assert!(begun.elapsed() < LIMIT / 2 && readable());
    forks.into_iter().for_each(|pid| kill(Pid::from_raw(pid), Signal::SIGKILL).expect("it lives longer"));
}

fn children(pid: i32) -> Vec<i32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let children = tasks.map(|task| fs::read_to_string(task.path().join("children")).unwrap_or_default());
    children.collect::<String>().split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

#[test]
fn forks_of_a_publisher_change_nothing() {
    let subject = Subject::host();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let publisher = Publisher::create(&subject.device(), &PublishOptions::fixed(16, 4), &Config::default()).unwrap();
    publisher.listen(&path).unwrap();
    let subscriber = subscribe(&subject, &path, &SubscribeOptions::default()).unwrap();
    wait_for("a subscriber", || publisher.stats().unwrap().subscribers.len() == 1);
    publish(&publisher, 1);
    let sample = take(&subscriber);
    let mut shared = Some((publisher, subscriber, sample));
    in_fork(|| {
        let Some((publisher, subscriber, sample)) = shared.take() else { return false };
        let refused = publisher.stats().is_err() && publisher.evict(1).is_err() && publisher.try_loan().is_err();
        let refused = refused && publisher.event().is_none() && subscriber.try_receive().is_err();
        drop((sample, subscriber, publisher));
        refused
    });
    let (publisher, subscriber, sample) = shared.unwrap();
    assert_eq!(publisher.stats().unwrap().free, 3);
    drop(sample);
    wait_for("the buffer", || publisher.stats().unwrap().free == 4);
    publish(&publisher, 2);
    drop(take(&subscriber));
    let _other = subscribe(&subject, &path, &SubscribeOptions::default()).unwrap();
}

#[test]
fn finish_ends_other_processes() {
    let subject = Subject::host();
    let stage = Stage::fixed(&subject, 6);
    let mut peer = Peer::start("latest", &stage.path, 2);
    wait_for("a subscriber", || stage.stats().subscribers.len() == 1);
    stage.publish_all(1..=9);
    let stats = stage.publisher.finish(SHORT).unwrap();
    assert_eq!(stats.published, 9);
    peer.expect("ended");
    assert!(peer.child.wait().unwrap().success());
}

#[test]
fn inherited_socket_shows_its_process() {
    let subject = Subject::host();
    let stage = Stage::fixed(&subject, 4);
    let (ours, theirs) = Channel::socket_pair().unwrap();
    stage.publisher.admit(ours).unwrap();
    // The kernel reports the creator of the pair as the peer.
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["stream::peers::process_with_a_socket", "--exact", "--nocapture"]).env(ROLE, "socket");
    let mut child = command.stdin(Stdio::from(theirs)).stdout(Stdio::null()).spawn().unwrap();
    drop(command);
    stage.until(|event| matches!(event, Event::Joined(subscriber) if subscriber.peer.pid == child.id() as i32));
    stage.publish(1);
    child.kill().unwrap();
    child.wait().unwrap();
    stage.until_free(4);
}

/// Not a test: a subscriber whose standard input is the connection.
#[test]
fn process_with_a_socket() {
    if env::var(ROLE).as_deref() == Ok("socket") {
        let subject = Subject::host();
        let socket = io::stdin().as_fd().try_clone_to_owned().unwrap();
        let (options, config) = (SubscribeOptions::default(), Config::default());
        let _subscriber = Subscriber::over(socket, &subject.driver, None, &options, &config).unwrap();
        thread::sleep(LIMIT);
    }
}

/// How often to kill: `VMMFD_TEST_KILLS=1000` for a long run.
fn kills() -> u64 {
    env::var("VMMFD_TEST_KILLS").map_or(6, |kills| kills.parse().unwrap())
}

/// The open files and the threads of this process.
fn counts() -> [usize; 2] {
    ["/proc/self/fd", "/proc/self/task"].map(|folder| fs::read_dir(folder).unwrap().count())
}

#[test]
fn kills_lose_nothing() {
    in_child("stream::peers::kills_lose_nothing", |_| {}, kill_subscribers);
}

fn kill_subscribers() -> String {
    let subject = Subject::host();
    let before = counts();
    let stage = Stage::new(&subject, &PublishOptions::fixed(16, 12).every(SHORT).history(1));
    let healthy = stage.join(&subject, SubscribeOptions::default().policy(Policy::Queue(2)).held(2));
    let mut peers: Vec<Peer> = Vec::new();
    let roles = [("latest", 0), ("every", 0), ("latest", 2), ("every", 1)];
    for round in 0..kills() as usize {
        while peers.len() < 3 {
            let (role, keep) = roles[(round + peers.len()) % roles.len()];
            peers.push(Peer::start(role, &stage.path, keep));
        }
        for byte in 0..=round % 5 {
            stage.publish(byte as u8);
            drop(take(&healthy));
        }
        let peer = peers.swap_remove(round % 3);
        if round % 2 == 0 {
            peer.stop();
        }
        drop(peer);
        if round % 10 == 9 {
            peers.clear();
            // The last publication is the history.
            stage.until_free(11);
        }
    }
    peers.clear();
    stage.until_free(11);
    wait_for("the end of all", || stage.stats().subscribers.len() == 1);
    drop((healthy, stage));
    wait_for("the end of the thread", || counts() == before);
    String::new()
}

#[test]
fn one_thread_serves_all() {
    in_child("stream::peers::one_thread_serves_all", |_| {}, serve_128);
}

fn serve_128() -> String {
    let subject = Subject::host();
    let before = counts();
    let stages = [Stage::fixed(&subject, 66), Stage::fixed(&subject, 66)];
    let join = |stage: &Stage| stage.join(&subject, SubscribeOptions::default());
    let subscribers: Vec<_> = stages.iter().flat_map(|stage| (0..64).map(|_| join(stage))).collect();
    assert_eq!(counts()[1], before[1] + 1);
    for number in 1..=20 {
        stages.iter().for_each(|stage| assert_eq!(stage.publish(number).delivered, 64));
        subscribers.iter().for_each(|subscriber| assert_eq!(take(subscriber).number(), u64::from(number)));
    }
    drop((subscribers, stages));
    wait_for("the end of the thread", || counts() == before);
    String::new()
}
