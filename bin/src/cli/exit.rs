//! Exit codes, the same for every command.

use std::io;

use vmmfd::{
    error::{CancelReason, Error, ErrorKind},
    session::handoff::{ServeReport, Served},
};

use super::output::complain;
use crate::error::kind_of;

/// How a command ends, as its exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// What was asked holds: everything was verified, every required probe is `ok`, everything was measured; or a service without end
    /// was stopped by a signal and nothing had failed.
    Verified,
    /// What was asked does not hold: the data did not verify, on either side; a required probe failed; a broker
    /// has no such object, or another than was expected.
    Mismatch,
    /// The command line is wrong.
    Usage,
    /// Not supported on this system.
    Unsupported,
    /// The peer failed.
    Peer,
    /// The driver or the system failed.
    System,
    /// A signal ended it.
    Signal(i32),
}

/// The exit codes of a command for `--help`: its meaning of 0 and, if it has them, of 1; then its other codes.
#[macro_export]
macro_rules! exit_codes {
    (@ 2) => { "\n  2    bad usage" };
    (@ 3) => { "\n  3    not supported here: no driver, no such device, no sharing by descriptor" };
    (@ 4) => { "\n  4    the peer failed: absent, gone, timed out, refused, or broke the protocol" };
    (@ 5) => { "\n  5    the driver or the system failed: out of memory, unsafe folder, live socket" };
    (@ 130) => { "\n  130  interrupted (SIGINT); 143 terminated (SIGTERM); 129 terminal closed (SIGHUP)" };
    ($ok:literal $(, $no:literal)?; $($code:tt)*) => {
        concat!("Exit codes:\n  0    ", $ok, $("\n  1    ", $no,)? $($crate::exit_codes!(@ $code)),*)
    };
}
pub(super) use crate::exit_codes;

/// The exit codes of `produce` and `consume`, for `--help`.
pub const EXIT_CODES: &str = exit_codes!("verified", "the data did not verify, on either side"; 2 3 4 5 130);

impl Exit {
    /// The code.
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

    /// Reports that the output could not be written: then a success is a failure.
    pub(super) fn unwritten(self, error: &io::Error) -> Self {
        complain(&format!("error: cannot write to standard output: {error}"));
        if self == Self::Verified { Self::System } else { self }
    }

    /// How a command ends that fails with an error.
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

    /// How a producer ends, of the service's own end and its consumers': the first of 1, 5, 4 that occurred; on a signal
    /// 0 if the service had no other end and nothing had failed.
    ///
    /// # Errors
    /// The error that decides, where one does.
    pub fn of_service(report: ServeReport, endless: bool) -> Result<Self, Error> {
        let ServeReport { served, error, .. } = report;
        let result = error.map_or(Ok(()), Err);
        if served.iter().any(Served::mismatched) {
            // A mismatch outweighs every error but a signal.
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
