//! The descriptors that a program of the broker passes to the next program.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
};

use super::{peer::Process, role};
use crate::sys;

/// Names of passed descriptors. A held descriptor's own name follows the prefix `HELD`.
const HELD: &str = "=";
pub(super) const LINK: &str = "LINK";
const LISTENER: &str = "LISTENER";
const REQUESTER: &str = "REQUESTER";
pub(super) const SERVER: &str = "SERVER";
pub(super) const KEEPER: &str = "KEEPER";
pub(super) const ANSWER: &str = "ANSWER";

/// A keeper's descriptors, for the program that it executes in place or checks.
#[derive(Debug, Default)]
pub(super) struct Passed<'a> {
    pub(super) held: Vec<(&'a str, BorrowedFd<'a>)>,
    pub(super) server: Option<BorrowedFd<'a>>,
    pub(super) listener: Option<BorrowedFd<'a>>,
    pub(super) requester: Option<BorrowedFd<'a>>,
    pub(super) last_report: &'a str,
}

impl<'a> Passed<'a> {
    /// The names for the held descriptors.
    pub(super) fn names(&self) -> Vec<String> {
        self.held.iter().map(|(name, _)| format!("{HELD}{name}")).collect()
    }

    /// The held descriptors, and a pipe for the answer of a check.
    pub(super) fn for_check<'n>(&self, names: &'n [String], answer: BorrowedFd<'a>) -> Vec<(&'n str, BorrowedFd<'a>)> {
        self.sorted(names, [(ANSWER, Some(answer))])
    }

    /// All descriptors, including the pidfd of the server.
    pub(super) fn for_successor<'n>(
        &self,
        names: &'n [String],
        process: Option<BorrowedFd<'a>>,
    ) -> Vec<(&'n str, BorrowedFd<'a>)> {
        let others = [(LINK, self.server), (LISTENER, self.listener), (REQUESTER, self.requester), (SERVER, process)];
        self.sorted(names, others)
    }

    /// Held and other descriptors, sorted by number: renumbering then never has to move a descriptor out of the way, which would fail at
    /// the open-file limit.
    fn sorted<'n>(
        &self,
        names: &'n [String],
        others: impl IntoIterator<Item = (&'n str, Option<BorrowedFd<'a>>)>,
    ) -> Vec<(&'n str, BorrowedFd<'a>)> {
        let held = names.iter().map(String::as_str).zip(self.held.iter().map(|(_, fd)| *fd));
        let others = others.into_iter().filter_map(|(name, fd)| Some((name, fd?)));
        let mut fds: Vec<_> = held.chain(others).collect();
        fds.sort_by_key(|(_, fd)| fd.as_raw_fd());
        fds
    }
}

/// The descriptors passed to a keeper.
#[derive(Debug, Default)]
pub(super) struct PassedRecord {
    pub(super) held: Vec<(String, OwnedFd)>,
    pub(super) server: Option<OwnedFd>,
    pub(super) listener: Option<OwnedFd>,
    pub(super) requester: Option<OwnedFd>,
    /// The server's pidfd.
    pub(super) process: Option<OwnedFd>,
    pub(super) last_report: String,
}

impl PassedRecord {
    pub(super) fn take() -> io::Result<Self> {
        let mut received = Self { last_report: role::last_report(), ..Self::default() };
        for (name, fd) in sys::take_passed()? {
            match name.as_str() {
                LINK => received.server = Some(fd),
                LISTENER => received.listener = Some(fd),
                REQUESTER => received.requester = Some(fd),
                SERVER => received.process = Some(fd),
                other => {
                    if let Some(held) = other.strip_prefix(HELD) {
                        received.held.push((held.to_owned(), fd));
                    }
                }
            }
        }
        Ok(received)
    }
}

/// The connection that the keeper passed to this server, and the keeper.
pub(super) fn passed_by_keeper() -> io::Result<(OwnedFd, Process)> {
    let (mut link, mut keeper) = (None, None);
    for (name, fd) in sys::take_passed()? {
        match name.as_str() {
            LINK => link = Some(fd),
            KEEPER => keeper = Some(fd),
            _ => {}
        }
    }
    match (link, keeper) {
        (Some(link), Some(keeper)) => Ok((link, Process::of_parent(keeper))),
        _ => Err(io::ErrorKind::NotFound.into()),
    }
}

/// The descriptors passed to a program under check.
#[derive(Default)]
pub(super) struct PassedForCheck {
    pub(super) held: Vec<(String, OwnedFd)>,
    pub(super) answer: Option<OwnedFd>,
}

impl PassedForCheck {
    pub(super) fn take() -> io::Result<Self> {
        let mut passed = Self::default();
        for (name, fd) in sys::take_passed()? {
            match name.strip_prefix(HELD) {
                Some(own) => passed.held.push((own.to_owned(), fd)),
                None if name == ANSWER => passed.answer = Some(fd),
                None => {}
            }
        }
        Ok(passed)
    }
}
