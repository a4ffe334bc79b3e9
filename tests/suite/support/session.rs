//! A program and all processes that it starts.

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
    libc,
    sys::signal::{Signal, kill, killpg},
    unistd::{Pid, setsid},
};

use super::pause;

/// The time limit for killing the processes.
const PATIENCE: Duration = Duration::from_secs(60);

/// A process that leads a session. Every descendant belongs to the session from its first moment, even after its parent has exited.
/// Dropping this kills the whole session.
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

pub(crate) fn lead(command: &mut Command) -> &mut Command {
    // SAFETY: both are plain system calls, safe between fork and exec.
    unsafe {
        command.pre_exec(|| {
            inherit_only_streams()?;
            setsid().map(drop).map_err(Into::into)
        })
    }
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

/// Kills all processes of the session. A live server starts another keeper, and a live keeper another server, so this repeats until no
/// process is left.
pub(crate) fn end(leader: &mut Child) {
    let session = Pid::from_raw(leader.id().cast_signed());
    // Scans miss processes that start and exit quickly. No fork of the leader's group escapes this. Fails if the group is empty.
    let _ = killpg(session, Signal::SIGKILL);
    let (begun, mut looks) = (Instant::now(), 0);
    // A single scan of /proc can miss a process that has just started.
    while looks < 3 {
        let left = living(session);
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

/// Lists the live processes of a session.
fn living(session: Pid) -> Vec<Pid> {
    let pids = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    let lives = |pid: &i32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // The command is in brackets and may contain brackets. The fields after it are state, parent, group and session.
        let mut fields = stat.rsplit(") ").next().unwrap_or_default().split(' ');
        !matches!(fields.next(), Some("Z" | "X") | None) && fields.nth(2) == Some(session.to_string().as_str())
    };
    pids.filter(lives).map(Pid::from_raw).collect()
}
