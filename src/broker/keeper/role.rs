//! The roles of the broker's processes. The process that executes a program passes its role in the environment.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

/// The variable of the [`Role`].
const ROLE: &str = "VMMFD_ROLE";

/// The variable in which the supervisor of an older build passed the role. It must be cleared for an older program under check.
const SUPERVISOR_ROLE: &str = "VMMFD_SERVE_ROLE";

/// The variable of the program's path: /proc/self/exe changes when the file is replaced.
const PROGRAM: &str = "VMMFD_PROGRAM";

/// The variable of the last server's report, which the keeper logs when it frees the descriptors.
const LAST_REPORT: &str = "VMMFD_LAST_WORDS";

/// The role of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Not executed by a process of the broker.
    First,
    /// A server under the keeper that executed it.
    Server,
    /// Checks whether this build can take over the keeper's descriptors.
    Check,
    /// A keeper executed in place of an older build. The pid of the server that the older keeper started, or 0.
    Reloaded(i32),
    /// The keeper that the server with this pid started.
    Another(i32),
    /// A keeper executed in place of an older build's supervisor, whose server has this pid.
    AfterSupervisor(i32),
    /// A server that such a supervisor started.
    UnderSupervisor,
}

impl Role {
    /// The role of this process.
    pub fn of_this_process() -> Self {
        let variable = |name| std::env::var(name).ok();
        match variable(ROLE) {
            Some(role) => Self::parse(&role),
            None => variable(SUPERVISOR_ROLE).and_then(|role| Self::parse_supervisor(&role)).unwrap_or(Self::First),
        }
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

    fn parse_supervisor(text: &str) -> Option<Self> {
        match text {
            "server" => Some(Self::UnderSupervisor),
            "check" => Some(Self::Check),
            other => {
                let pid = other.strip_prefix("upgraded:").or_else(|| other.strip_prefix("another:"))?;
                pid.parse().ok().map(Self::AfterSupervisor)
            }
        }
    }

    /// Whether a user or an init started this process.
    pub fn is_first(self) -> bool {
        self == Self::First
    }

    /// Whether this is a keeper that replaces another while a server runs.
    pub fn replaces_a_keeper(self) -> bool {
        matches!(self, Self::Reloaded(_) | Self::Another(_) | Self::AfterSupervisor(_))
    }

    /// The environment variables for a program executed in this role.
    pub(super) fn variables(self, program: &Path, last_report: &str) -> [(&'static str, OsString); 4] {
        let role = match self {
            Self::First | Self::AfterSupervisor(_) | Self::UnderSupervisor => String::new(),
            Self::Server => "server".to_owned(),
            Self::Check => "check".to_owned(),
            Self::Reloaded(pid) => format!("reloaded:{pid}"),
            Self::Another(pid) => format!("another:{pid}"),
        };
        [
            (ROLE, role.into()),
            (PROGRAM, program.into()),
            (LAST_REPORT, last_report.into()),
            (SUPERVISOR_ROLE, OsString::new()),
        ]
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
        let of_supervisor = ["server", "check", "upgraded:7", "another:8", "other"].map(Role::parse_supervisor);
        let after = |pid| Some(Role::AfterSupervisor(pid));
        assert_eq!(of_supervisor, [Some(Role::UnderSupervisor), Some(Role::Check), after(7), after(8), None]);
    }
}
