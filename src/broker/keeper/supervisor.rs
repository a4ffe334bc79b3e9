//! Takes over from the supervisor, which was in the keeper's place before there was a protocol between server and keeper.
//!
//! A supervisor received datagrams as of sd_notify(3). At SIGHUP it executed the program at its path in place of itself, and it started
//! each server from that path too. So a program that replaces an older one is executed in three roles: to prove that it can go on, as the
//! next supervisor, or as a server after the older server has crashed.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    io,
    os::fd::OwnedFd,
    thread,
    time::Duration,
};

use nix::{
    poll::PollFlags,
    sys::{
        signal::{SigSet, Signal, kill},
        wait::{WaitPidFlag, waitpid},
    },
    unistd::{Pid, getppid},
};
use rustix::{
    io::Errno,
    net::{RecvFlags, ReturnFlags},
};

use super::{HANDOVER_TIMEOUT, peer::ready};
use crate::{
    channel::record::{Raw, receive_raw},
    error::Error,
    sys,
};

/// The supervisor's end of the socket, the server's, a pipe that ended with the supervisor, and a pidfd of the server.
const NOTIFY: &str = "NTFY";
const PEER: &str = "PEER";
const LIFE: &str = "LIFE";
const SERVER: &str = "SELF";

/// The longest datagram, in bytes.
const MAX_DATAGRAM: usize = 4096;

/// How long to wait for the server's end before its datagrams are read again: its socket must not become full.
const TICK: Duration = Duration::from_millis(20);

/// A keeper's name of a descriptor that a supervisor held under `name`.
pub(super) fn name(name: &str) -> String {
    let device = |digits: &str| u8::from_str_radix(digits, 16).ok().filter(|_| digits.len() == 2);
    match name {
        "SOCK" | "CAT0" | "CAT1" => format!(".{name}"),
        other => match other.strip_prefix('D').and_then(device) {
            Some(number) => format!(".DEV{number}"),
            None => other.to_owned(),
        },
    }
}

/// What a supervisor and its server held, under the names of a keeper.
#[derive(Debug)]
pub(super) struct Supervised {
    pub(super) kept: Vec<(String, OwnedFd)>,
    /// Whether these are all descriptors of the server.
    pub(super) is_whole: bool,
}

/// Ends the server of the supervisor that executed this program in its place, and returns everything that the two held. SIGKILL ends
/// it, since at any other signal it kills a supervisor that it started itself: this process.
///
/// # Errors
/// `NotFound` if the supervisor did not pass the server; those of recvmsg(2).
pub(super) fn take_over(pid: i32) -> io::Result<Supervised> {
    let (mut kept, mut socket, mut server) = (Kept::default(), None, None);
    // Without the other ends the server would take this process for dead.
    let mut ends = Vec::new();
    for (name, fd) in sys::take_passed()? {
        match name.as_str() {
            NOTIFY => socket = Some(fd),
            SERVER => server = Some(fd),
            PEER | LIFE => ends.push(fd),
            _ => kept.keep(&name, fd),
        }
    }
    let (Some(socket), Some(server)) = (socket, server) else { return Err(io::ErrorKind::NotFound.into()) };
    // A server that started this process itself sends everything first.
    while !kept.is_whole && !ready(&server, PollFlags::POLLIN, TICK) {
        kept.read(&socket)?;
    }
    let pid = Pid::from_raw(pid);
    let _ = kill(pid, Signal::SIGKILL);
    ready(&server, PollFlags::POLLIN, HANDOVER_TIMEOUT);
    kept.read(&socket)?;
    // Fails if it is no child.
    let _ = waitpid(pid, Some(WaitPidFlag::WNOHANG));
    drop(ends);
    let descriptors = kept.held.len();
    match kept.is_whole {
        true => tracing::info!(descriptors, "takes over from the supervisor of an older build"),
        false => {
            tracing::error!(
                descriptors,
                "the server of an older build ended before it had sent all: versions are lost"
            );
        }
    }
    Ok(Supervised { is_whole: kept.is_whole, kept: kept.held.into_iter().collect() })
}

/// Has the supervisor that started this program as its server execute it in place of itself, which ends this process. Returns only if
/// the supervisor does not.
pub(in crate::broker) fn replace_supervisor() -> Error {
    // The supervisor's mask is not for a process that waits for its end.
    let _ = SigSet::empty().thread_set_mask();
    let _ = kill(getppid(), Signal::SIGHUP);
    thread::sleep(3 * HANDOVER_TIMEOUT);
    let why =
        "the supervisor of an older build, which started this server, did not go on with this program: see its log";
    Error::system("serve", io::Error::other(why))
}

/// What a supervisor held.
#[derive(Debug, Default)]
struct Kept {
    held: BTreeMap<String, OwnedFd>,
    /// Whether the server has sent everything that it has.
    is_whole: bool,
}

impl Kept {
    /// Of several descriptors with one name, the first is the right one.
    fn keep(&mut self, of: &str, fd: OwnedFd) {
        // What a supervisor passes to the next one is whole, and has the catalogue.
        self.is_whole |= of.starts_with("CAT");
        self.keep_sent(of, fd);
    }

    fn keep_sent(&mut self, of: &str, fd: OwnedFd) {
        if let Entry::Vacant(vacant) = self.held.entry(name(of)) {
            vacant.insert(fd);
        }
    }

    /// Reads everything that the server has sent.
    fn read(&mut self, socket: &OwnedFd) -> io::Result<()> {
        let mut datagram = [0; MAX_DATAGRAM];
        loop {
            let Raw { bytes, flags, fds } = match receive_raw(socket, &mut datagram, RecvFlags::DONTWAIT) {
                Ok(raw) => raw,
                Err(error) if error.raw_os_error() == Some(Errno::AGAIN.raw_os_error()) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            if flags.contains(ReturnFlags::CTRUNC) {
                return Err(io::Error::other("no descriptor is free for those that the server sent: raise ulimit -Hn"));
            }
            let text = String::from_utf8_lossy(&datagram[..bytes]);
            let value = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
            match (value("FDNAME"), value("FDSTORE"), value("FDSTOREREMOVE")) {
                (Some(of), Some("1"), _) => fds.into_iter().for_each(|fd| self.keep_sent(of, fd)),
                (Some(of), _, Some("1")) => drop(self.held.remove(&name(of))),
                // Behind everything that a server sends anew.
                _ => self.is_whole |= value("READY") == Some("1"),
            }
        }
    }
}
