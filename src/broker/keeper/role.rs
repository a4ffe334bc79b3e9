//! What a process of the broker does: the process that executed its program says so in the environment.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

/// The variable with the [`Role`].
const ROLE: &str = "VMMFD_ROLE";

/// The variable in which the supervisor of an older build named the role. An older program that is checked must not see it.
const SUPERVISOR_ROLE: &str = "VMMFD_SERVE_ROLE";

/// The variable with the path of the program: the kernel's own name for it changes when the file is replaced.
const PROGRAM: &str = "VMMFD_PROGRAM";

/// The variable with the last report of a server, which the keeper logs when it frees the descriptors.
const LAST_REPORT: &str = "VMMFD_LAST_WORDS";

/// What a process that the broker executes does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// No process of the broker executed it.
    First,
    /// Serves, under the keeper that executed it.
    Server,
    /// Reports whether it can take over the descriptors that the keeper holds.
    Check,
    /// A keeper in place of an older build. A server that the older keeper started has this pid; 0 if there is none.
    Reloaded(i32),
    /// The keeper of the server with this pid, which executed it.
    Another(i32),
    /// A keeper in place of a supervisor, which an older build had instead, with the server of this pid.
    AfterSupervisor(i32),
    /// A server that such a supervisor started.
    UnderSupervisor,
}

impl Role {
    /// The role of this process.
    pub fn of_this_process() -> Self {
        let variable = |name| std::env::var(name).ok();
        match variable(ROLE) {
            Some(role) => Self::read(&role),
            None => variable(SUPERVISOR_ROLE).and_then(|role| Self::of_supervisor(&role)).unwrap_or(Self::First),
        }
    }

    fn read(text: &str) -> Self {
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

    fn of_supervisor(text: &str) -> Option<Self> {
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

    /// Whether it is a keeper that replaces another one while a server runs.
    pub fn replaces_a_keeper(self) -> bool {
        matches!(self, Self::Reloaded(_) | Self::Another(_) | Self::AfterSupervisor(_))
    }

    /// The variables of a program at a path that is executed in this role.
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

/// The path of the program, in a process that the broker executed.
pub(super) fn program() -> Option<PathBuf> {
    std::env::var_os(PROGRAM).filter(|_| !Role::of_this_process().is_first()).map(PathBuf::from)
}

/// What the last server reported at its end, as the keeper before this one passed it on.
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
            assert_eq!(Role::read(text.to_str().unwrap()), role);
        }
        assert_eq!(["", "another:x", "other"].map(Role::read), [Role::First; 3]);
        let of_supervisor = ["server", "check", "upgraded:7", "another:8", "other"].map(Role::of_supervisor);
        let after = |pid| Some(Role::AfterSupervisor(pid));
        assert_eq!(of_supervisor, [Some(Role::UnderSupervisor), Some(Role::Check), after(7), after(8), None]);
    }
}
