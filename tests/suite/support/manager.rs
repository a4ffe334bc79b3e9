//! A minimal init: starts a service and restarts it immediately after each exit (`Restart=always`, `RestartSec=0`,
//! `StartLimitIntervalSec=0`).

#![allow(unsafe_code, reason = "a child is asked to end with its parent")]

use std::{
    ffi::OsString,
    sync::{Condvar, MutexGuard},
    thread::JoinHandle,
};

use nix::sys::prctl;
use rustix::{
    event::{PollFd, PollFlags, poll},
    process::{PidfdFlags, pidfd_open},
};

use super::session::inherit_only_streams;
use crate::support::prelude::*;

/// The time limit of a wait.
const PATIENCE: Duration = Duration::from_secs(600);

#[derive(Debug, Default)]
struct State {
    main: Option<Pid>,
    starts: usize,
    /// The exit codes. A process killed by a signal has no exit code.
    codes: Vec<i32>,
    /// If set, the service is not restarted.
    stopped: bool,
    ending: bool,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// An init for one service. Dropping it kills the service.
#[derive(Debug)]
pub(crate) struct Manager {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Manager {
    /// Starts a service and appends its standard error to `log`.
    pub(crate) fn start(command: Vec<OsString>, log: File) -> Self {
        let shared = Arc::new(Shared::default());
        let state = Arc::clone(&shared);
        // PR_SET_PDEATHSIG refers to the parent thread: this thread starts the children, and they die with it.
        let thread = thread::spawn(move || run(&state, &command, &log));
        Self { shared, thread: Some(thread) }
    }

    #[track_caller]
    fn wait<T>(&self, what: &str, mut look: impl FnMut(&mut State) -> Option<T>) -> T {
        let begun = Instant::now();
        let mut state = self.shared.lock();
        loop {
            if let Some(found) = look(&mut state) {
                return found;
            }
            assert!(begun.elapsed() < PATIENCE, "{what}: {state:?}");
            state = self.shared.changed.wait_timeout(state, Duration::from_millis(50)).unwrap().0;
        }
    }

    /// Returns the main process, once the service has been started at least `starts` times.
    #[track_caller]
    pub(crate) fn main(&self, starts: usize) -> Pid {
        self.wait("the service does not start", |state| state.main.filter(|_| state.starts >= starts))
    }

    /// Sends the main process a signal, disables the restart, and waits for the exit. Returns the exit code, if there is one.
    #[track_caller]
    pub(crate) fn stop(&self, signal: Signal) -> Option<i32> {
        let main = self.main(1);
        let codes = {
            let mut state = self.shared.lock();
            state.stopped = true;
            state.codes.len()
        };
        kill(main, signal).unwrap();
        self.wait("the service does not end", |state| state.main.is_none().then(|| state.codes.get(codes).copied()))
    }

    /// Starts the service after `stop`.
    pub(crate) fn start_again(&self) {
        self.shared.lock().stopped = false;
        self.shared.changed.notify_all();
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        self.end();
    }
}

impl Manager {
    /// Kills the service and starts it no more.
    pub(crate) fn end(&mut self) {
        let main = {
            let mut state = self.shared.lock();
            state.ending = true;
            state.main
        };
        self.shared.changed.notify_all();
        if let Some(main) = main {
            // Fails if the process has exited.
            let _ = kill(main, Signal::SIGKILL);
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn run(shared: &Shared, command: &[OsString], log: &File) {
    loop {
        let stays_away = |state: &mut State| state.stopped && !state.ending;
        let mut state = shared.changed.wait_while(shared.lock(), stays_away).unwrap();
        if state.ending {
            return;
        }
        let mut next = Command::new(&command[0]);
        next.args(&command[1..]).env_remove("NOTIFY_SOCKET").env_remove("WATCHDOG_USEC");
        next.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log.try_clone().unwrap());
        // SAFETY: both are plain system calls, safe between fork and exec.
        unsafe {
            next.pre_exec(|| {
                inherit_only_streams()?;
                prctl::set_pdeathsig(Signal::SIGKILL).map_err(Into::into)
            })
        };
        let mut child = next.spawn().unwrap();
        state.main = Some(Pid::from_raw(child.id().cast_signed()));
        state.starts += 1;
        shared.changed.notify_all();
        drop(state);
        // wait(2) would consume the ptrace stops of a process that a test traces. A pidfd reports the exit only.
        // Fails if the test has already reaped the process.
        if let Ok(end) = pidfd_open(rustix::process::Pid::from_child(&child), PidfdFlags::empty()) {
            while poll(&mut [PollFd::new(&end, PollFlags::IN)], None).is_err() {}
        }
        // Fails if the test has already reaped the process.
        let status = child.wait();
        let mut state = shared.lock();
        state.codes.extend(status.ok().and_then(|status| status.code()));
        state.main = None;
        shared.changed.notify_all();
    }
}
