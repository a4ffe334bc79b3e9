//! The probe of the broker at this user's default socket.

use std::{
    fs, io,
    path::Path,
    time::{Duration, Instant},
};

use vmmfd::{
    broker::Client,
    driver::Backend,
    error::{Error, PeerError, SocketError},
    internals::default_broker_socket,
    session::Config,
};

use crate::doctor::{
    ErrorDetails, Status,
    outcome::{ProbeFailure, ProbeOutcome, ProbeResult, micros},
};

/// The timeout for a connection, and again for the answer: the broker's event loop never blocks.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Values of the figure `problem`, which the rules use.
pub(in crate::doctor) mod problem {
    /// Clients refuse its folder.
    pub(in crate::doctor) const FOLDER: &str = "folder";
    /// No process listens on it.
    pub(in crate::doctor) const STALE: &str = "stale";
    /// The listening process does not answer.
    pub(in crate::doctor) const SILENT: &str = "silent";
    pub(in crate::doctor) const DENIED: &str = "denied";
    /// The socket belongs to something other than this user's broker.
    pub(in crate::doctor) const OTHER: &str = "other-program";
    pub(in crate::doctor) const REFUSED: &str = "refused";
}

pub(super) fn broker(_: Backend) -> ProbeResult {
    let path = default_broker_socket();
    let socket = match path {
        Ok(path) => path,
        Err(error) => return Ok(broken(problem::FOLDER, error.in_full())),
    };
    let shown = socket.display().to_string();
    let outcome = match fs::symlink_metadata(&socket) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            ProbeOutcome::new(Status::Skipped, format!("No broker of this user runs: there is no {shown}."))
        }
        Err(error) => return Err(failure(&Error::system(format!("inspect {shown}"), error), &shown)),
        Ok(_) => connect(&socket, &shown)?,
    };
    Ok(outcome.figure("socket", shown))
}

/// Sends hello to the process at a socket.
fn connect(socket: &Path, shown: &str) -> ProbeResult {
    let started = Instant::now();
    let error = match Client::connect(socket, &Config::default().timeout(TIMEOUT)) {
        Ok(client) => {
            let meaning = format!("A broker answers, with pid {}.", client.peer().pid);
            return Ok(ProbeOutcome::ok(meaning).figure("answer_us", micros(started.elapsed())));
        }
        Err(error) => error,
    };
    let (problem, meaning) = match &error {
        Error::Socket(SocketError::NoBroker { .. } | SocketError::Absent { .. }) => {
            (problem::STALE, format!("No process listens on {shown}."))
        }
        Error::Socket(SocketError::NotAccepted { .. }) => {
            (problem::SILENT, format!("The process that listens on {shown} accepts no connection within {TIMEOUT:?}."))
        }
        Error::Peer(PeerError::Timeout { .. }) => {
            (problem::SILENT, format!("The process that listens on {shown} does not answer within {TIMEOUT:?}."))
        }
        Error::Socket(SocketError::Denied { .. }) => {
            (problem::DENIED, format!("This user may not connect to {shown}."))
        }
        Error::Socket(SocketError::ClosedFolder { folder, .. }) => {
            (problem::DENIED, format!("This user may not enter {}, the folder of {shown}.", folder.display()))
        }
        Error::Peer(PeerError::NotAllowed { pid, uid }) => {
            (problem::OTHER, format!("Process {pid} of another user, uid {uid}, listens on {shown}."))
        }
        Error::Peer(PeerError::Reported { message, .. }) => {
            (problem::REFUSED, format!("The broker refuses this connection: {message}."))
        }
        Error::Socket(SocketError::Path { reason, .. }) => {
            (problem::OTHER, format!("There is no broker at {shown}: {reason}."))
        }
        Error::Peer(PeerError::Gone { .. } | PeerError::Protocol(_) | PeerError::Mismatch { .. }) => {
            (problem::OTHER, format!("The process that listens on {shown} does not answer as a broker does."))
        }
        _ => return Err(failure(&error, shown)),
    };
    Ok(broken(problem, meaning).with_error(ErrorDetails::of(&error)))
}

fn broken(problem: &'static str, meaning: String) -> ProbeOutcome {
    ProbeOutcome::failed(meaning).figure("problem", problem)
}

fn failure(error: &Error, socket: &str) -> ProbeFailure {
    ProbeFailure::from(ErrorDetails::of(error)).figure("socket", socket)
}
