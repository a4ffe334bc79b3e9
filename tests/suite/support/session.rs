//! A program and all processes that it starts.

#![allow(unsafe_code, reason = "a child makes a session of its own")]

use std::{
    ops::{Deref, DerefMut},
    process::Child,
};

use nix::{libc, sys::signal::killpg, unistd::setsid};

use super::pause;
use crate::support::prelude::*;

/// The time limit for killing the processes.
const PATIENCE: Duration = Duration::from_secs(60);

/// A process that leads a session. Every descendant belongs to the session from its first moment, even after its parent has exited; a
/// broker's keeper has its own session, and is found by its environment. Dropping this kills them all.
#[derive(Debug)]
pub(crate) struct Session(Child, Mark);

/// A variable in the environment of a session's processes.
#[derive(Debug)]
pub(crate) struct Mark(String);

impl Session {
    pub(crate) fn start(command: &mut Command) -> io::Result<Self> {
        let mark = lead(command);
        command.spawn().map(|child| Self(child, mark))
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
        end(&mut self.0, &self.1);
    }
}

/// Makes a command lead a session, for [`end`].
pub(crate) fn lead(command: &mut Command) -> Mark {
    const NAME: &str = "VMMFD_TEST_SESSION";
    static LAST: AtomicU64 = AtomicU64::new(0);
    let number = LAST.fetch_add(1, Ordering::Relaxed);
    let value = format!("{}-{number}", process::id());
    command.env(NAME, &value);
    // SAFETY: both are plain system calls, safe between fork and exec.
    unsafe {
        command.pre_exec(|| {
            inherit_only_streams()?;
            setsid().map(drop).map_err(Into::into)
        });
    }
    Mark(format!("{NAME}={value}"))
}

/// Starts a program that inherits only the standard streams.
pub(crate) fn spawn_alone(command: &mut Command) -> Child {
    // SAFETY: the call is a plain system call, safe between fork and exec.
    unsafe { command.pre_exec(inherit_only_streams) };
    command.spawn().unwrap()
}

/// Closes all descriptors except the standard streams on exec. Some functions return descriptors that are closed on exec only a moment
/// later, and tests count the memory that a server has open.
pub(crate) fn inherit_only_streams() -> io::Result<()> {
    let (first, last) = (libc::STDERR_FILENO + 1, libc::c_uint::MAX);
    // SAFETY: the call only sets flags of descriptors.
    let closed = unsafe { libc::syscall(libc::SYS_close_range, first, last, libc::CLOSE_RANGE_CLOEXEC) };
    if closed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Kills all processes of the session. A live server starts another keeper, and a keeper's twin continues, so this repeats until no process
/// is left.
pub(crate) fn end(leader: &mut Child, mark: &Mark) {
    let session = Pid::from_raw(leader.id().cast_signed());
    // Scans miss processes that start and exit quickly. No fork of the leader's group escapes this. Fails if the group is empty.
    let _ = killpg(session, Signal::SIGKILL);
    let (begun, mut looks) = (Instant::now(), 0);
    // A single scan of /proc can miss a process that has just started.
    while looks < 3 {
        let left = living(session, mark);
        looks = if left.is_empty() { looks + 1 } else { 0 };
        for pid in left {
            // Fails if the process has exited.
            let _ = kill(pid, Signal::SIGKILL);
        }
        // Fails if a test has already reaped the leader.
        let _ = leader.try_wait();
        if begun.elapsed() > PATIENCE {
            assert!(thread::panicking(), "processes of the session {session} can't be killed");
            return;
        }
        pause(begun);
    }
}

fn has(pid: Pid, mark: &Mark) -> bool {
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    environment.split(|&byte| byte == 0).any(|variable| variable == mark.0.as_bytes())
}

/// Lists the live processes of a session, or with its mark.
fn living(session: Pid, mark: &Mark) -> Vec<Pid> {
    let pids = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    let lives = |pid: &Pid| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // The command is in brackets and may contain brackets. The fields after it are state, parent, group and session.
        let mut fields = stat.rsplit(") ").next().unwrap_or_default().split(' ');
        !matches!(fields.next(), Some("Z" | "X") | None)
            && (fields.nth(2) == Some(session.to_string().as_str()) || has(*pid, mark))
    };
    pids.map(Pid::from_raw).filter(lives).collect()
}
