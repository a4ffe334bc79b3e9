//! A program with all processes that it starts.

#![allow(unsafe_code, reason = "a child makes a session of its own")]

use std::{
    fs, io,
    ops::{Deref, DerefMut},
    os::unix::process::CommandExt,
    process::{Child, Command},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::{Pid, setsid},
};

/// After how long processes that can't be killed fail their test.
const PATIENCE: Duration = Duration::from_secs(60);

/// A process that leads a session: whatever it starts belongs to the session from its first moment, and stays in it when its parent ends.
/// Dropping this kills all of them.
#[derive(Debug)]
pub(crate) struct Session(Child);

impl Session {
    pub(crate) fn start(command: &mut Command) -> io::Result<Self> {
        lead(command).spawn().map(Self)
    }
}

impl Deref for Session {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for Session {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        end(&mut self.0);
    }
}

/// Has a program lead a session.
pub(crate) fn lead(command: &mut Command) -> &mut Command {
    // SAFETY: it makes one system call.
    unsafe { command.pre_exec(|| setsid().map(drop).map_err(Into::into)) }
}

/// Kills the processes of the session that a child leads. A server that lives starts another keeper, and a keeper another server: so
/// until there is none.
pub(crate) fn end(leader: &mut Child) {
    let session = Pid::from_raw(leader.id().cast_signed());
    let (begun, mut looks) = (Instant::now(), 0);
    // One look at /proc can miss a process that was just started.
    while looks < 3 {
        let left = living(session);
        looks = if left.is_empty() { looks + 1 } else { 0 };
        for pid in left {
            // Fails if it has ended.
            let _ = kill(pid, Signal::SIGKILL);
        }
        // Fails if a test has waited for it.
        let _ = leader.try_wait();
        if begun.elapsed() > PATIENCE {
            assert!(thread::panicking(), "processes of the session {session} can't be killed");
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// The processes of a session that live.
fn living(session: Pid) -> Vec<Pid> {
    let pids = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    let lives = |pid: &i32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // The command, in brackets, may have brackets itself. Behind it are state, parent, group and session.
        let mut fields = stat.rsplit(") ").next().unwrap_or_default().split(' ');
        !matches!(fields.next(), Some("Z" | "X") | None) && fields.nth(2) == Some(session.to_string().as_str())
    };
    pids.filter(lives).map(Pid::from_raw).collect()
}

#[test]
fn orphans_end_with_their_session() {
    // Each starts the next one and ends, as a server and its keeper do when they are killed in turn.
    let script = "again() { sleep 0.01; again & }; again & exec sleep 600";
    let mut session = Session::start(Command::new("sh").args(["-c", script])).unwrap();
    let leader = Pid::from_raw(session.id().cast_signed());
    crate::broker::until(|| living(leader).len() > 1);
    session.kill().unwrap();
    session.wait().unwrap();
    crate::broker::until(|| !living(leader).is_empty());
    drop(session);
    assert_eq!(living(leader), []);
}
