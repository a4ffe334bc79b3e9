//! Takes over from the supervisor of an older build, which preceded the keeper and its protocol.
//!
//! A supervisor received datagrams as of sd_notify(3). On SIGHUP it executed the program at its path in place, and it started each server
//! from that path. So a newer program at that path is executed in three roles: as a check, as the next supervisor, and as the server after
//! a crash of the older server.

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

/// Names of passed descriptors: the supervisor's socket, the server's socket, a pipe that closes with the supervisor, the server's pidfd.
const NOTIFY: &str = "NTFY";
const PEER: &str = "PEER";
const LIFE: &str = "LIFE";
const SERVER: &str = "SELF";

/// The longest datagram, in bytes.
const MAX_DATAGRAM: usize = 4096;

/// How often to read the server's datagrams while waiting for its exit: its socket must not fill up.
const TICK: Duration = Duration::from_millis(20);

/// A keeper's name for a supervisor's descriptor.
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

/// The descriptors of a supervisor and its server, under a keeper's names.
#[derive(Debug)]
pub(super) struct Supervised {
    pub(super) kept: Vec<(String, OwnedFd)>,
    /// Whether the set is complete.
    pub(super) is_whole: bool,
}

/// Ends the server of the supervisor that this process replaced, and returns all its descriptors. Uses SIGKILL: on any other signal the
/// server kills a supervisor that it started itself, which is this process.
///
/// # Errors
/// `NotFound` if the supervisor did not pass the server; errors of recvmsg(2).
pub(super) fn take_over(pid: i32) -> io::Result<Supervised> {
    let (mut kept, mut socket, mut server) = (Kept::default(), None, None);
    // Keep the server's socket and the pipe open, or the server would consider this process dead.
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
    // A server that started this process itself first sends everything.
    while !kept.is_whole && !ready(&server, PollFlags::POLLIN, TICK) {
        kept.read(&socket)?;
    }
    let pid = Pid::from_raw(pid);
    let _ = kill(pid, Signal::SIGKILL);
    ready(&server, PollFlags::POLLIN, HANDOVER_TIMEOUT);
    kept.read(&socket)?;
    // Fails if the server is not a child.
    let _ = waitpid(pid, Some(WaitPidFlag::WNOHANG));
    drop(ends);
    let descriptors = kept.held.len();
    match kept.is_whole {
        true => tracing::info!(descriptors, "takes over from the supervisor of an older build"),
        false => {
            tracing::error!(
                descriptors,
                "the server of an older build died before it sent everything: versions are lost"
            );
        }
    }
    Ok(Supervised { is_whole: kept.is_whole, kept: kept.held.into_iter().collect() })
}

/// Makes the supervisor that started this server execute this program in place of itself. The new keeper then kills this process. Returns
/// only if the supervisor does not.
pub(in crate::broker) fn replace_supervisor() -> Error {
    // This process waits for SIGKILL, so it must not keep the signal mask inherited from the supervisor.
    let _ = SigSet::empty().thread_set_mask();
    let _ = kill(getppid(), Signal::SIGHUP);
    thread::sleep(3 * HANDOVER_TIMEOUT);
    let why = "the supervisor of an older build, which started this server, did not execute this program: see its log";
    Error::system("serve", io::Error::other(why))
}

/// The received descriptors.
#[derive(Debug, Default)]
struct Kept {
    held: BTreeMap<String, OwnedFd>,
    /// Whether the server has sent everything.
    is_whole: bool,
}

impl Kept {
    /// Keeps a descriptor from the supervisor. If a name appears twice, the first descriptor is the right one.
    fn keep(&mut self, of: &str, fd: OwnedFd) {
        // A supervisor passes a complete set to its successor, with the catalogue.
        self.is_whole |= of.starts_with("CAT");
        self.keep_sent(of, fd);
    }

    fn keep_sent(&mut self, of: &str, fd: OwnedFd) {
        if let Entry::Vacant(vacant) = self.held.entry(name(of)) {
            vacant.insert(fd);
        }
    }

    /// Reads all pending datagrams of the server.
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
                return Err(io::Error::other(
                    "no free descriptors to receive the server's: raise the open-file limit (ulimit -Hn)",
                ));
            }
            let text = String::from_utf8_lossy(&datagram[..bytes]);
            let value = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
            match (value("FDNAME"), value("FDSTORE"), value("FDSTOREREMOVE")) {
                (Some(of), Some("1"), _) => fds.into_iter().for_each(|fd| self.keep_sent(of, fd)),
                (Some(of), _, Some("1")) => drop(self.held.remove(&name(of))),
                // The server sends READY after it has sent everything again.
                _ => self.is_whole |= value("READY") == Some("1"),
            }
        }
    }
}
