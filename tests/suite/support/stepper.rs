//! Kills a process before a chosen system call. Other processes can observe nothing else of its progress.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    libc,
    sys::{
        ptrace::{self, Options},
        signal::{Signal, kill},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};

/// After the answer to a request: how long the process must wait for events to count as finished.
const QUIET: Duration = Duration::from_millis(4);

/// How long a process must do nothing at all to count as finished.
const ASLEEP: Duration = Duration::from_secs(1);

/// The time limit for reaching a step.
const PATIENCE: Duration = Duration::from_secs(600);

/// A system call: its number, and the file of its first argument.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) number: libc::c_long,
    pub(crate) file: String,
}

/// The trace of a process.
#[derive(Debug)]
pub(crate) struct Traced {
    /// The visible system calls of the main thread, up to the call before which the process was killed.
    pub(crate) calls: Vec<Call>,
    pub(crate) killed: Option<Instant>,
}

/// Reports whether an idle process sleeps in this system call. An interrupted call continues as `restart_syscall`.
fn is_wait(number: libc::c_long) -> bool {
    #[cfg(target_arch = "x86_64")]
    let waits =
        [libc::SYS_epoll_wait, libc::SYS_epoll_pwait, libc::SYS_poll, libc::SYS_ppoll, libc::SYS_restart_syscall];
    #[cfg(not(target_arch = "x86_64"))]
    let waits = [libc::SYS_epoll_pwait, libc::SYS_ppoll, libc::SYS_restart_syscall];
    waits.contains(&number)
}

/// Reports whether other processes can observe a system call: messages, bytes of a file, a closed descriptor, processes. A kill before any
/// other call equals a kill before the next visible one.
fn has_effect(number: libc::c_long) -> bool {
    let messages = [libc::SYS_sendmsg, libc::SYS_sendto, libc::SYS_recvmsg, libc::SYS_accept4, libc::SYS_shutdown];
    let bytes = [libc::SYS_write, libc::SYS_pwrite64, libc::SYS_ftruncate, libc::SYS_fallocate, libc::SYS_close];
    let processes = [libc::SYS_execve, libc::SYS_clone, libc::SYS_clone3, libc::SYS_kill, libc::SYS_unlinkat];
    messages.contains(&number) || bytes.contains(&number) || processes.contains(&number)
}

/// Returns the next stop of a traced process; `Err` once the process is gone, and `None` if `block` is false and there is no stop yet.
fn next_stop(pid: Pid, block: bool) -> Result<Option<WaitStatus>, ()> {
    let flags = if block { WaitPidFlag::__WALL } else { WaitPidFlag::__WALL | WaitPidFlag::WNOHANG };
    loop {
        return match waitpid(pid, Some(flags)) {
            Ok(WaitStatus::StillAlive) => Ok(None),
            Ok(WaitStatus::Exited(..) | WaitStatus::Signaled(..)) | Err(Errno::ECHILD) => Err(()),
            Err(Errno::EINTR) => continue,
            Ok(status) => Ok(Some(status)),
            Err(errno) => panic!("waitpid: {errno}"),
        };
    }
}

/// Resumes a stopped process until the next system call.
fn go_on(pid: Pid, status: WaitStatus) {
    let signal = match status {
        WaitStatus::Stopped(_, signal) if signal != Signal::SIGTRAP => Some(signal),
        _ => None,
    };
    // Fails if the process has been killed.
    let _ = ptrace::syscall(pid, signal);
}

/// Returns the system call that the process is about to make, if it is stopped before one.
fn entered(pid: Pid, status: WaitStatus) -> Option<Call> {
    const ENTRY: u8 = 1;
    let WaitStatus::PtraceSyscall(_) = status else { return None };
    let info = ptrace::syscall_info(pid).ok().filter(|info| info.op == ENTRY)?;
    #[allow(unsafe_code, reason = "the kernel says which of a union's fields it wrote")]
    // SAFETY: `op` shows that the kernel wrote this field, which consists of integers.
    let (number, first) = unsafe { (info.u.entry.nr, info.u.entry.args[0]) };
    let file = std::fs::read_link(format!("/proc/{pid}/fd/{first}")).unwrap_or_default();
    Some(Call { number: number.cast_signed(), file: file.to_string_lossy().into_owned() })
}

/// The state of a process when tracing starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum From {
    /// Waits for events, or soon will.
    Idle,
    /// Has stopped itself.
    Stopped,
}

/// Runs `run` while a process is traced, from any state of the process. Kills the process before the first visible system call of its main
/// thread for which `kills` returns true. Returns the result of `run`.
///
/// The process must be a descendant, or this process may trace all processes.
pub(crate) fn trace<T: Send>(
    pid: Pid,
    from: From,
    mut kills: impl FnMut(&Call) -> bool,
    run: impl FnOnce() -> T + Send,
) -> (T, Traced) {
    ptrace::seize(pid, Options::PTRACE_O_TRACESYSGOOD).unwrap_or_else(|errno| panic!("cannot trace {pid}: {errno}"));
    ptrace::interrupt(pid).unwrap();
    let mut status = next_stop(pid, true).unwrap().unwrap();
    // Run the process until it waits for events.
    while from == From::Idle && !entered(pid, status).is_some_and(|call| is_wait(call.number)) {
        go_on(pid, status);
        status = next_stop(pid, true).unwrap().unwrap();
    }
    let mut traced = Traced { calls: Vec::new(), killed: None };
    let done = AtomicBool::new(false);
    let result = thread::scope(|scope| {
        let running = scope.spawn(|| {
            let result = run();
            done.store(true, Ordering::Release);
            result
        });
        go_on(pid, status);
        if from == From::Stopped {
            kill(pid, Signal::SIGCONT).unwrap();
        }
        let begun = Instant::now();
        let mut waits_since = None;
        loop {
            if begun.elapsed() > PATIENCE {
                // Kill the process before waiting for the thread that expects its answer.
                eprintln!("nothing comes of it: {:#?}", traced.calls);
                kill(pid, Signal::SIGKILL).unwrap();
                panic!("nothing comes of it");
            }
            let stop = match next_stop(pid, false) {
                Err(()) => break,
                Ok(stop) => stop,
            };
            let Some(stop) = stop else {
                let quiet = match waits_since {
                    Some(since) => Instant::elapsed(&since) > QUIET,
                    // The process was never woken.
                    None => traced.calls.is_empty() && begun.elapsed() > ASLEEP,
                };
                if quiet && (done.load(Ordering::Acquire) || running.is_finished()) {
                    break;
                }
                thread::sleep(Duration::from_micros(50));
                continue;
            };
            waits_since = None;
            if let Some(call) = entered(pid, stop) {
                let seen = has_effect(call.number);
                if seen && kills(&call) {
                    kill(pid, Signal::SIGKILL).unwrap();
                    traced.killed = Some(Instant::now());
                    while let Ok(Some(_)) = next_stop(pid, true) {}
                    break;
                }
                waits_since = is_wait(call.number).then(Instant::now);
                if seen {
                    traced.calls.push(call);
                }
            }
            go_on(pid, stop);
        }
        if traced.killed.is_none() && ptrace::interrupt(pid).is_ok() && next_stop(pid, true).is_ok() {
            let _ = ptrace::detach(pid, None);
        }
        running.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    (result, traced)
}
