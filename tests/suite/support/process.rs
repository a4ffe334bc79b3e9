//! Runs parts of a test in another process, with a deadline.

#![allow(unsafe_code, reason = "fork and close_range")]

use std::{
    fmt::Display,
    io::Seek,
    panic::{self, AssertUnwindSafe},
};

use nix::{
    libc,
    sys::{
        resource::{Resource, setrlimit},
        wait::{WaitStatus, waitpid},
    },
    unistd::{ForkResult, Gid, Uid, alarm, dup2_stderr, fork, setgid, setgroups, setuid},
};

use crate::support::prelude::*;

pub(crate) struct OpenFile {
    /// The path in `/proc`, which can be opened again.
    pub(crate) path: PathBuf,
    pub(crate) link: PathBuf,
}

/// Lists the open files of a process, or of `self`. Files closed during the call are skipped.
pub(crate) fn open_files(pid: impl Display) -> io::Result<Vec<OpenFile>> {
    let paths = fs::read_dir(format!("/proc/{pid}/fd"))?.filter_map(|entry| Some(entry.ok()?.path()));
    Ok(paths.filter_map(|path| Some(OpenFile { link: fs::read_link(&path).ok()?, path })).collect())
}

/// The parent of a process.
pub(crate) fn parent_of(pid: Pid) -> Option<Pid> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command is in brackets and may contain brackets. The fields after it are state and parent.
    let parent = stat.rsplit(") ").next()?.split(' ').nth(1)?.parse().ok()?;
    Some(Pid::from_raw(parent))
}

/// Sleeps between two checks of a condition: a sixteenth of the time so far, 1 to 20 ms. Other tests need the CPUs.
pub(crate) fn pause(begun: Instant) {
    thread::sleep((begun.elapsed() / 16).clamp(Duration::from_millis(1), Duration::from_millis(20)));
}

/// Runs `body` in a thread and passes its panic on.
pub(crate) fn in_thread(body: impl FnOnce() + Send + 'static) {
    if let Err(failure) = thread::spawn(body).join() {
        panic::resume_unwind(failure);
    }
}

/// Runs `test` in a thread whose descriptor table is empty except for the standard streams and is not shared: forks of other tests can't
/// inherit its descriptors, so the test knows which close(2) is the last.
pub(crate) fn with_own_descriptors(test: impl FnOnce() + Send + 'static) {
    in_thread(|| {
        let (first, last) = (libc::STDERR_FILENO + 1, libc::c_uint::MAX);
        // SAFETY: the thread owns no descriptor yet. The call closes only the copies in its new table.
        let closed = unsafe { libc::syscall(libc::SYS_close_range, first, last, libc::CLOSE_RANGE_UNSHARE) };
        assert_eq!(closed, 0, "{}", io::Error::last_os_error());
        test();
    });
}

const DEADLINE: Duration = Duration::from_secs(600);

/// The path of the child's answer file. Only a child has this variable.
const ANSWER: &str = "VMMFD_TEST_ANSWER";

/// Runs `body` in a new process of this test program and returns the result of `body`. `prepare` completes the environment.
///
/// `test` is the full name of the calling test. The child runs the same test up to this call, so code before the call runs in the child
/// too.
pub(crate) fn in_child(test: &str, prepare: impl FnOnce(&mut Command), body: impl FnOnce() -> String) -> String {
    if let Some(answer) = env::var_os(ANSWER) {
        fs::write(answer, body()).unwrap();
        process::exit(0);
    }
    let folder = tempfile::tempdir().unwrap();
    let answer = folder.path().join("answer");
    let mut command = Command::new(env::current_exe().unwrap());
    command.args([test, "--exact", "--include-ignored", "--nocapture"]).stdin(Stdio::null()).stdout(Stdio::null());
    // Resources that the child creates before this call are never freed: the folder's deletion removes them.
    prepare(command.env(ANSWER, &answer).env("TMPDIR", folder.path()));
    let mut child = command.spawn().unwrap();
    let started = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if started.elapsed() > DEADLINE {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("the child of {test} did not end in {DEADLINE:?}");
        }
        pause(started);
    };
    assert!(status.success(), "the child of {test} ended with {status}");
    fs::read_to_string(&answer).unwrap_or_else(|error| panic!("the child of {test} ran no such test: {error}"))
}

/// Runs `body` in a fork of this process, which exits afterwards; true is success.
///
/// Only the calling thread exists in the fork, so `body` must not wait for another thread.
#[track_caller]
pub(crate) fn in_fork(body: impl FnOnce() -> bool) {
    let status = forked(body);
    assert!(matches!(status, WaitStatus::Exited(_, 0)), "the fork ended otherwise: {status:?}");
}

/// Runs `body` in a fork of this process, which must abort, and returns its stderr.
#[track_caller]
pub(crate) fn aborts_in_fork(body: impl FnOnce()) -> String {
    let mut stderr = tempfile::tempfile().unwrap();
    let status = forked(|| {
        // The abort is expected: write no core file.
        setrlimit(Resource::RLIMIT_CORE, 0, 0).unwrap();
        dup2_stderr(&stderr).unwrap();
        body();
        false
    });
    let mut told = String::new();
    stderr.rewind().unwrap();
    stderr.read_to_string(&mut told).unwrap();
    assert!(matches!(status, WaitStatus::Signaled(_, Signal::SIGABRT, _)), "the fork did not abort: {status:?} {told}");
    told
}

fn forked(body: impl FnOnce() -> bool) -> WaitStatus {
    // SAFETY: the child runs `body`, which is a few calls and drops, and exits with `_exit`. If it deadlocks on a lock of another thread,
    // the alarm kills it.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            alarm::set(DEADLINE.as_secs() as libc::c_uint);
            let passed = panic::catch_unwind(AssertUnwindSafe(body)).unwrap_or(false);
            // SAFETY: ends the process; the parent's destructors and exit handlers must not run here.
            unsafe { libc::_exit(i32::from(!passed)) }
        }
        ForkResult::Parent { child } => waitpid(child, None).unwrap(),
    }
}

/// Changes this process's user. Needs root.
pub(crate) fn become_user(uid: u32, gid: u32, groups: &[u32]) {
    let groups: Vec<Gid> = groups.iter().copied().map(Gid::from_raw).collect();
    setgroups(&groups).unwrap();
    setgid(Gid::from_raw(gid)).unwrap();
    setuid(Uid::from_raw(uid)).unwrap();
}
