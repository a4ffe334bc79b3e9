//! The descriptors that one program of the broker passes to the next one that it executes.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
};

use super::{
    peer::Process,
    role::{self, Role},
    supervisor::{self, Supervised},
};
use crate::sys;

/// Names of passed descriptors. A kept one has its own name behind `KEPT`.
const KEPT: &str = "=";
pub(super) const LINK: &str = "LINK";
const LISTENER: &str = "LISTENER";
const ASKER: &str = "ASKER";
pub(super) const SERVER: &str = "SERVER";
pub(super) const KEEPER: &str = "KEEPER";
pub(super) const ANSWER: &str = "ANSWER";

/// A keeper's descriptors, for the program that it executes in place or has checked.
#[derive(Debug, Default)]
pub(super) struct Passed<'a> {
    pub(super) kept: Vec<(&'a str, BorrowedFd<'a>)>,
    pub(super) server: Option<BorrowedFd<'a>>,
    pub(super) listener: Option<BorrowedFd<'a>>,
    pub(super) asker: Option<BorrowedFd<'a>>,
    pub(super) last_report: &'a str,
}

impl<'a> Passed<'a> {
    /// The names under which the kept descriptors are passed.
    pub(super) fn names(&self) -> Vec<String> {
        self.kept.iter().map(|(name, _)| format!("{KEPT}{name}")).collect()
    }

    /// The kept descriptors and the one for the answer of a check.
    pub(super) fn for_check<'n>(&self, names: &'n [String], answer: BorrowedFd<'a>) -> Vec<(&'n str, BorrowedFd<'a>)> {
        self.numbered(names, [(ANSWER, Some(answer))])
    }

    /// All descriptors, and the server's process.
    pub(super) fn for_successor<'n>(
        &self,
        names: &'n [String],
        process: Option<BorrowedFd<'a>>,
    ) -> Vec<(&'n str, BorrowedFd<'a>)> {
        let others = [(LINK, self.server), (LISTENER, self.listener), (ASKER, self.asker), (SERVER, process)];
        self.numbered(names, others)
    }

    /// The kept descriptors under their names, and others, in the order of their numbers: none must make room for another when they are
    /// numbered anew, as at the limit of open files there is no room.
    fn numbered<'n>(
        &self,
        names: &'n [String],
        others: impl IntoIterator<Item = (&'n str, Option<BorrowedFd<'a>>)>,
    ) -> Vec<(&'n str, BorrowedFd<'a>)> {
        let kept = names.iter().map(String::as_str).zip(self.kept.iter().map(|(_, fd)| *fd));
        let others = others.into_iter().filter_map(|(name, fd)| Some((name, fd?)));
        let mut fds: Vec<_> = kept.chain(others).collect();
        fds.sort_by_key(|(_, fd)| fd.as_raw_fd());
        fds
    }
}

/// The descriptors that a keeper was passed.
#[derive(Debug, Default)]
pub(super) struct Received {
    pub(super) kept: Vec<(String, OwnedFd)>,
    pub(super) server: Option<OwnedFd>,
    pub(super) listener: Option<OwnedFd>,
    pub(super) asker: Option<OwnedFd>,
    /// The server's process, as a pidfd.
    pub(super) process: Option<OwnedFd>,
    pub(super) last_report: String,
    /// Whether the server has descriptors that are not among `kept`.
    pub(super) is_incomplete: bool,
}

impl Received {
    pub(super) fn take(role: Role) -> io::Result<Self> {
        if let Role::AfterSupervisor(server) = role {
            let Supervised { kept, is_whole } = supervisor::take_over(server)?;
            return Ok(Self { kept, is_incomplete: !is_whole, ..Self::default() });
        }
        let mut received = Self { last_report: role::last_report(), ..Self::default() };
        for (name, fd) in sys::take_passed()? {
            match name.as_str() {
                LINK => received.server = Some(fd),
                LISTENER => received.listener = Some(fd),
                ASKER => received.asker = Some(fd),
                SERVER => received.process = Some(fd),
                other => {
                    if let Some(kept) = other.strip_prefix(KEPT) {
                        received.kept.push((kept.to_owned(), fd));
                    }
                }
            }
        }
        Ok(received)
    }
}

/// The connection that the keeper passed to this server, and that keeper.
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

/// The descriptors that were passed to a program which is checked.
#[derive(Default)]
pub(super) struct PassedForCheck {
    pub(super) kept: Vec<(String, OwnedFd)>,
    /// For the program's answer: a supervisor passes none.
    pub(super) answer: Option<OwnedFd>,
}

impl PassedForCheck {
    pub(super) fn take() -> io::Result<Self> {
        let mut passed = Self::default();
        for (name, fd) in sys::take_passed()? {
            match name.strip_prefix(KEPT) {
                Some(own) => passed.kept.push((own.to_owned(), fd)),
                None if name == ANSWER => passed.answer = Some(fd),
                None => passed.kept.push((supervisor::name(&name), fd)),
            }
        }
        Ok(passed)
    }
}
