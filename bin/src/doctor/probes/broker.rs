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
    ErrorDetails,
    report::{Figures, ProbeResult, failed, micros, ok, skipped},
};

/// The timeout for a connection, and again for the answer: the broker's event loop never blocks.
const TIMEOUT: Duration = Duration::from_secs(2);

pub(super) fn broker(_: Backend, figures: &mut Figures) -> ProbeResult {
    let socket = match default_broker_socket() {
        Ok(path) => path,
        Err(error) => return Ok(failed(error.in_full()).figure("problem", "folder")),
    };
    let shown = socket.display().to_string();
    figures.insert("socket".to_owned(), shown.clone().into());
    match fs::symlink_metadata(&socket) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Ok(skipped(format!("No broker of this user runs: there is no {shown}.")))
        }
        Err(error) => Err(Error::system(format!("inspect {shown}"), error).into()),
        Ok(_) => connect(&socket, &shown),
    }
}

/// Sends hello to the process at a socket.
fn connect(socket: &Path, shown: &str) -> ProbeResult {
    let started = Instant::now();
    let error = match Client::connect(socket, &Config::default().timeout(TIMEOUT)) {
        Ok(client) => {
            let meaning = format!("A broker answers, with pid {}.", client.peer().pid);
            return Ok(ok(meaning).figure("answer_us", micros(started.elapsed())));
        }
        Err(error) => error,
    };
    let (problem, meaning) = match &error {
        Error::Socket(SocketError::NoBroker { .. } | SocketError::Absent { .. }) => {
            ("stale", format!("No process listens on {shown}."))
        }
        Error::Socket(SocketError::NotAccepted { .. }) => {
            ("silent", format!("The process that listens on {shown} accepts no connection within {TIMEOUT:?}."))
        }
        Error::Peer(PeerError::Timeout { .. }) => {
            ("silent", format!("The process that listens on {shown} does not answer within {TIMEOUT:?}."))
        }
        Error::Socket(SocketError::Denied { .. }) => ("denied", format!("This user may not connect to {shown}.")),
        Error::Socket(SocketError::ClosedFolder { folder, .. }) => {
            ("denied", format!("This user may not enter {}, the folder of {shown}.", folder.display()))
        }
        Error::Peer(PeerError::NotAllowed { pid, uid }) => {
            ("other-program", format!("Process {pid} of another user, uid {uid}, listens on {shown}."))
        }
        Error::Peer(PeerError::Reported { message, .. }) => {
            ("refused", format!("The broker refuses this connection: {message}."))
        }
        Error::Socket(SocketError::Path { reason, .. }) => {
            ("other-program", format!("There is no broker at {shown}: {reason}."))
        }
        Error::Peer(PeerError::Gone { .. } | PeerError::Protocol(_) | PeerError::Mismatch { .. }) => {
            ("other-program", format!("The process that listens on {shown} does not answer as a broker does."))
        }
        _ => return Err(error.into()),
    };
    Ok(failed(meaning).figure("problem", problem).with_error(ErrorDetails::of(&error)))
}
