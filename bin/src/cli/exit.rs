//! Exit codes, the same for every command.

use std::io;

use vmmfd::{
    error::{CancelReason, Error, ErrorKind},
    session::handoff::{ServeReport, Served},
};

use super::output::complain;
use crate::error::kind_of;

/// The result of a command, which decides its exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// The data verified, all required probes are `ok`, or the measurements are complete. Also a service that a signal stopped, without
    /// earlier failures.
    Verified,
    /// The data did not verify on one side, a required probe failed, or the broker's object is absent or differs from the expected object.
    Mismatch,
    /// The command line is wrong.
    Usage,
    /// Not supported on this system.
    Unsupported,
    /// The peer failed.
    Peer,
    /// The driver or the system failed.
    System,
    /// Stopped by a signal.
    Signal(i32),
}

/// The exit codes of a command for `--help`: the meaning of 0 and optionally of 1, then the other codes.
#[macro_export]
macro_rules! exit_codes {
    (@ 2) => { "\n  2    bad usage" };
    (@ 3) => { "\n  3    not supported here: no driver, no such device, no sharing by descriptor" };
    (@ 4) => { "\n  4    the peer failed: absent, gone, timed out, refused, or broke the protocol" };
    (@ 5) => { "\n  5    the driver or system failed: out of memory, unsafe folder, live socket" };
    (@ 130) => { "\n  130  interrupted (SIGINT); 143 SIGTERM; 129 SIGHUP, as of a closed terminal" };
    ($ok:literal $(, $no:literal)?; $($code:tt)*) => {
        concat!("Exit codes:\n  0    ", $ok, $("\n  1    ", $no,)? $($crate::exit_codes!(@ $code)),*)
    };
}
pub(super) use crate::exit_codes;

/// The exit codes of `produce` and `consume`, for `--help`.
pub const EXIT_CODES: &str = exit_codes!("verified", "the data did not verify, on either side"; 2 3 4 5 130);

impl Exit {
    pub fn code(self) -> u8 {
        match self {
            Self::Verified => 0,
            Self::Mismatch => 1,
            Self::Usage => 2,
            Self::Unsupported => 3,
            Self::Peer => 4,
            Self::System => 5,
            Self::Signal(signal) => 128 + u8::try_from(signal).unwrap_or(0),
        }
    }

    /// Reports that the output could not be written, which makes a success a failure.
    pub(super) fn unwritten(self, error: &io::Error) -> Self {
        complain(&format!("error: cannot write to standard output: {error}"));
        if self == Self::Verified { Self::System } else { self }
    }

    /// The exit of a command that fails.
    pub fn of(error: &Error) -> Self {
        match (kind_of(error), error) {
            (_, Error::Interrupted { reason: CancelReason::Signal(signal) }) => Self::Signal(*signal),
            (ErrorKind::Usage, _) => Self::Usage,
            (ErrorKind::Object, _) => Self::Mismatch,
            (ErrorKind::Unsupported, _) => Self::Unsupported,
            (ErrorKind::Peer, _) => Self::Peer,
            _ => Self::System,
        }
    }

    /// The exit of a producer, from the results of the service and of its consumers: the first of 1, 5, 4 that occurred. After a signal it
    /// is 0 if the service was endless and nothing had failed.
    ///
    /// # Errors
    /// The error that decides the exit code.
    pub fn of_service(report: ServeReport, endless: bool) -> Result<Self, Error> {
        let ServeReport { served, error, .. } = report;
        let result = error.map_or(Ok(()), Err);
        if served.iter().any(Served::mismatched) {
            // A mismatch outweighs every error except a signal.
            return match result {
                Err(error @ Error::Interrupted { .. }) => Err(error),
                _ => Ok(Self::Mismatch),
            };
        }
        let failures: Vec<Error> = served.into_iter().filter_map(|served| served.error).collect();
        match result {
            Err(Error::Interrupted { .. }) if endless && failures.is_empty() => Ok(Self::Verified),
            Err(error @ Error::Interrupted { .. }) => Err(error),
            result => {
                let all = result.err().into_iter().chain(failures);
                all.min_by_key(|error| kind_of(error) == ErrorKind::Peer).map_or(Ok(Self::Verified), Err)
            }
        }
    }
}
