//! The probe of the broker at this user's default socket.

use std::{fs, io};

use vmmfd::{broker::Client, error::SocketError, internals::default_broker_socket, session::Config};

use crate::doctor::{
    prelude::*,
    report::{Figures, micros, skipped},
};

/// The timeout for a connection, and again for the answer: the broker's event loop never blocks.
const TIMEOUT: Duration = Duration::from_secs(2);

pub(super) fn broker(_: Backend, figures: &mut Figures) -> ProbeResult {
    let socket = match default_broker_socket() {
        Ok(path) => path,
        Err(error) => return Ok(unusable("The folder of the broker's socket can't be used.", "folder", &error)),
    };
    let shown = socket.display().to_string();
    figures.insert("socket".to_owned(), shown.clone().into());
    match fs::symlink_metadata(&socket) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(skipped(format!("No broker of this user runs: there is no {shown}.")));
        }
        Err(error) => return Err(Error::system(format!("inspect {shown}"), error).into()),
        Ok(_) => {}
    }
    let started = Instant::now();
    let error = match Client::connect(&socket, &Config::default().timeout(TIMEOUT)) {
        Ok(client) => {
            let meaning = format!("A broker answers, with pid {}.", client.peer().pid);
            return Ok(ok(meaning).figure("answer_us", micros(started.elapsed())));
        }
        Err(error) => error,
    };
    let Some(problem) = problem_of(&error) else { return Err(error.into()) };
    Ok(unusable(&format!("The broker at {shown} can't be used."), problem, &error))
}

/// The problem for an error of the connection, as the rules name it.
fn problem_of(error: &Error) -> Option<&'static str> {
    Some(match error {
        Error::Socket(SocketError::NoBroker { .. } | SocketError::Absent { .. }) => "stale",
        Error::Socket(SocketError::NotAccepted { .. }) | Error::Peer(PeerError::Timeout { .. }) => "silent",
        Error::Socket(SocketError::Denied { .. } | SocketError::ClosedFolder { .. }) => "denied",
        Error::Peer(PeerError::Reported { .. }) => "refused",
        Error::Socket(SocketError::Path { .. })
        | Error::Peer(
            PeerError::NotAllowed { .. } | PeerError::Gone { .. } | PeerError::Protocol(_) | PeerError::Mismatch { .. },
        ) => "other-program",
        _ => return None,
    })
}

fn unusable(meaning: &str, problem: &str, error: &Error) -> Finding {
    failed(meaning).figure("problem", problem).with_error(ErrorDetails::of(error))
}

#[cfg(test)]
mod tests {
    use vmmfd::error::{ErrorCode, ProtocolError};

    use super::*;

    #[test]
    fn errors_of_the_socket_have_problems() {
        let path = || "s".into();
        let waited = TIMEOUT;
        let message = String::new;
        for (error, problem) in [
            (SocketError::NoBroker { path: path(), waited, otherwise: None }.into(), "stale"),
            (SocketError::NotAccepted { path: path(), waited }.into(), "silent"),
            (Error::Peer(PeerError::Timeout { purpose: "", waited }), "silent"),
            (SocketError::Denied { path: path(), group: None }.into(), "denied"),
            (SocketError::ClosedFolder { path: path(), folder: path() }.into(), "denied"),
            (Error::Peer(PeerError::Reported { code: ErrorCode::Refused, message: message() }), "refused"),
            (SocketError::Path { path: path(), reason: message() }.into(), "other-program"),
            (Error::Peer(PeerError::NotAllowed { pid: 1, uid: 1 }), "other-program"),
            (Error::Peer(PeerError::Gone { pid: 1, purpose: "" }), "other-program"),
            (ProtocolError::Content(message()).into(), "other-program"),
            (Error::Peer(PeerError::Mismatch { code: ErrorCode::Version, message: message() }), "other-program"),
        ] {
            assert_eq!(problem_of(&error), Some(problem), "{error}");
        }
    }
}
