//! Parts of a test in another process, never longer than a deadline.

#![allow(unsafe_code, reason = "fork")]

use std::{
    env,
    fmt::Display,
    fs,
    io::{self, Read, Seek},
    panic::{self, AssertUnwindSafe},
    path::PathBuf,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    libc,
    sys::{
        resource::{Resource, setrlimit},
        signal::Signal,
        wait::{WaitStatus, waitpid},
    },
    unistd::{ForkResult, alarm, dup2_stderr, fork},
};

/// An open file of a process.
pub(crate) struct OpenFile {
    /// Its path in `/proc`, which opens it again.
    pub(crate) path: PathBuf,
    pub(crate) link: PathBuf,
}

/// The open files of a process, or of `self`, without files that are closed meanwhile.
pub(crate) fn open_files(pid: impl Display) -> io::Result<Vec<OpenFile>> {
    let paths = fs::read_dir(format!("/proc/{pid}/fd"))?.filter_map(|entry| Some(entry.ok()?.path()));
    Ok(paths.filter_map(|path| Some(OpenFile { link: fs::read_link(&path).ok()?, path })).collect())
}

const DEADLINE: Duration = Duration::from_secs(600);

/// Where a child is to write what it found; only a child has it.
const ANSWER: &str = "VMMFD_TEST_ANSWER";

/// Runs `body` in a new process of this test program, with an environment that `prepare` completes, and returns what
/// `body` returned.
///
/// `test` is the full name of the calling test: the child runs that test again, as far as this call. What the calling
/// test does before the call runs in the child too.
pub(crate) fn in_child(test: &str, prepare: impl FnOnce(&mut Command), body: impl FnOnce() -> String) -> String {
    if let Some(answer) = env::var_os(ANSWER) {
        fs::write(answer, body()).unwrap();
        std::process::exit(0);
    }
    let folder = tempfile::tempdir().unwrap();
    let answer = folder.path().join("answer");
    let mut command = Command::new(env::current_exe().unwrap());
    command.args([test, "--exact", "--include-ignored", "--nocapture"]).stdin(Stdio::null()).stdout(Stdio::null());
    // What the child makes on its way to this call it never gives back: it goes with the folder.
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
        thread::sleep(Duration::from_millis(5));
    };
    assert!(status.success(), "the child of {test} ended with {status}");
    fs::read_to_string(&answer).unwrap_or_else(|error| panic!("the child of {test} ran no such test: {error}"))
}

/// Runs `body` in a fork of this process, which ends right after it; true is success.
///
/// Only the calling thread lives on there, so `body` must not wait for any other.
#[track_caller]
pub(crate) fn in_fork(body: impl FnOnce() -> bool) {
    let status = forked(body);
    assert!(matches!(status, WaitStatus::Exited(_, 0)), "the fork ended otherwise: {status:?}");
}

/// Runs `body` in a fork of this process, which must abort, and returns what it wrote to stderr.
#[track_caller]
pub(crate) fn aborts_in_fork(body: impl FnOnce()) -> String {
    let mut stderr = tempfile::tempfile().unwrap();
    let status = forked(|| {
        // The end is expected: no core file of it.
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
    // SAFETY: the child does what `body` does, which is a few calls and drops, and ends by `_exit`. Should it get stuck on
    // a lock that another thread held, the alarm ends it.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            alarm::set(DEADLINE.as_secs() as libc::c_uint);
            let passed = panic::catch_unwind(AssertUnwindSafe(body)).unwrap_or(false);
            // SAFETY: it ends the process; destructors and exit handlers of the parent must not run here.
            unsafe { libc::_exit(i32::from(!passed)) }
        }
        ForkResult::Parent { child } => waitpid(child, None).unwrap(),
    }
}
