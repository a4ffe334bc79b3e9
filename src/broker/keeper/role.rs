//! The roles of the broker's processes. The process that executes a program passes its role in the environment.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

/// The variable of the [`Role`].
const ROLE: &str = "VMMFD_ROLE";

/// The variable of the program's path: /proc/self/exe changes when the file is replaced.
const PROGRAM: &str = "VMMFD_PROGRAM";

/// The variable of the last server's report, which the keeper logs when it frees the descriptors.
const LAST_REPORT: &str = "VMMFD_LAST_REPORT";

/// The role of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Not executed by a process of the broker.
    First,
    /// A server under the keeper that executed it.
    Server,
    /// Checks whether this build can take over the keeper's descriptors.
    Check,
    /// A keeper executed in place of another. The pid of the server that the other keeper started, or 0.
    Reloaded(i32),
    /// The keeper that the server with this pid started.
    Another(i32),
}

impl Role {
    /// The role of this process.
    pub fn of_this_process() -> Self {
        std::env::var(ROLE).map_or(Self::First, |role| Self::parse(&role))
    }

    fn parse(text: &str) -> Self {
        let with_pid = |prefix| text.strip_prefix(prefix).and_then(|pid: &str| pid.parse().ok());
        match text {
            "server" => Self::Server,
            "check" => Self::Check,
            _ => with_pid("another:")
                .map(Self::Another)
                .or(with_pid("reloaded:").map(Self::Reloaded))
                .unwrap_or(Self::First),
        }
    }

    /// Whether a user or an init started this process.
    pub fn is_first(self) -> bool {
        self == Self::First
    }

    /// Whether this is a keeper that replaces another while a server runs.
    pub fn replaces_a_keeper(self) -> bool {
        matches!(self, Self::Reloaded(_) | Self::Another(_))
    }

    /// The environment variables for a program executed in this role.
    pub(super) fn variables(self, program: &Path, last_report: &str) -> [(&'static str, OsString); 3] {
        let role = match self {
            Self::First => String::new(),
            Self::Server => "server".to_owned(),
            Self::Check => "check".to_owned(),
            Self::Reloaded(pid) => format!("reloaded:{pid}"),
            Self::Another(pid) => format!("another:{pid}"),
        };
        [(ROLE, role.into()), (PROGRAM, program.into()), (LAST_REPORT, last_report.into())]
    }
}

/// The program's path, if a process of the broker executed this process.
pub(super) fn program() -> Option<PathBuf> {
    std::env::var_os(PROGRAM).filter(|_| !Role::of_this_process().is_first()).map(PathBuf::from)
}

/// The last server's report, passed on by the previous keeper.
pub(super) fn last_report() -> String {
    std::env::var(LAST_REPORT).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_are_read_as_written() {
        for role in [Role::Server, Role::Check, Role::Reloaded(0), Role::Another(71)] {
            let [(_, text), ..] = role.variables(Path::new("/vmmfd"), "");
            assert_eq!(Role::parse(text.to_str().unwrap()), role);
        }
        assert_eq!(["", "another:x", "other"].map(Role::parse), [Role::First; 3]);
    }
}
