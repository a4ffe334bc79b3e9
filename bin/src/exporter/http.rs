//! An HTTP/1.1 server for monitoring: GET and HEAD, responses from memory, one thread that never blocks on a response.
//!
//! Each connection serves one request. At the connection limit, a new connection replaces a slow one. `httparse` parses the request head;
//! bodies are not read.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    os::fd::{AsFd, BorrowedFd},
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};

use vmmfd::{
    channel::Cancel,
    error::{Error, Result},
    internals::pause,
};

/// The most open connections.
const MAX_CONNECTIONS: usize = 128;

/// The longest request head in bytes.
const MAX_HEAD: usize = 8192;

/// The most headers of a request.
const MAX_HEADERS: usize = 64;

/// The timeout for reading the request, and again for writing the response.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(20);

/// How long to wait for the client to close after the response. Closing earlier makes the kernel discard the response if the client still
/// sends data.
const LINGER: Duration = Duration::from_secs(1);

pub(crate) struct HttpRequest {
    /// Without the query.
    pub(crate) path: String,
    /// The `Accept` headers.
    pub(crate) accept: String,
}

#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: Status,
    pub(crate) content_type: &'static str,
    pub(crate) body: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    Ok,
    BadRequest,
    NotFound,
    MethodNotAllowed,
    HeadTooLarge,
    Unavailable,
}

impl Status {
    fn line(self) -> &'static str {
        match self {
            Self::Ok => "200 OK",
            Self::BadRequest => "400 Bad Request",
            Self::NotFound => "404 Not Found",
            Self::MethodNotAllowed => "405 Method Not Allowed",
            Self::HeadTooLarge => "431 Request Header Fields Too Large",
            Self::Unavailable => "503 Service Unavailable",
        }
    }
}

impl Response {
    /// A plain-text response.
    pub(crate) fn sentence(status: Status, sentence: &str) -> Self {
        Self { status, content_type: "text/plain; charset=utf-8", body: format!("{sentence}\n") }
    }

    fn into_bytes(self, head_only: bool) -> Vec<u8> {
        let Self { status, content_type, body } = self;
        let allow = if status == Status::MethodNotAllowed { "Allow: GET, HEAD\r\n" } else { "" };
        let mut bytes = format!(
            "HTTP/1.1 {}\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\nCache-Control: no-store\r\n{allow}\
             Connection: close\r\n\r\n",
            status.line(),
            body.len()
        )
        .into_bytes();
        if !head_only {
            bytes.extend_from_slice(body.as_bytes());
        }
        bytes
    }
}

/// Answers requests. No method blocks.
pub(crate) trait Source {
    /// Answers a request. `None` if the request must wait.
    fn answer(&mut self, request: &HttpRequest) -> Option<Response>;

    /// The longest wait of a request.
    fn timeout(&self) -> Duration;

    /// Readable when waiting requests can be answered.
    fn ready(&self) -> BorrowedFd<'_>;

    /// Whether waiting requests can be answered. If so, all of them are.
    fn receive(&mut self) -> bool;

    /// Answers a waiting request, even after its timeout.
    fn answer_waiting(&mut self, request: &HttpRequest) -> Response;
}

/// The state of parsing a request.
enum Head {
    Partial,
    /// A request; the flag is set for HEAD.
    Complete(HttpRequest, bool),
    /// An invalid request, with its response.
    Invalid(Response),
}

fn parse(bytes: &[u8]) -> Head {
    let too_large = || Head::Invalid(Response::sentence(Status::HeadTooLarge, "the head of the request is too large"));
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(bytes) {
        Ok(httparse::Status::Partial) if bytes.len() >= MAX_HEAD => return too_large(),
        Ok(httparse::Status::Partial) => return Head::Partial,
        Ok(httparse::Status::Complete(_)) => {}
        Err(httparse::Error::TooManyHeaders) => return too_large(),
        Err(error) => {
            return Head::Invalid(Response::sentence(
                Status::BadRequest,
                &format!("this is no request of HTTP: {error}"),
            ));
        }
    }
    let head_only = match request.method {
        Some("GET") => false,
        Some("HEAD") => true,
        _ => return Head::Invalid(Response::sentence(Status::MethodNotAllowed, "only GET and HEAD are answered")),
    };
    let target = request.path.unwrap_or_default();
    let path = target.split_once('?').map_or(target, |(path, _)| path).to_owned();
    let accept = request.headers.iter().filter(|header| header.name.eq_ignore_ascii_case("accept"));
    let accept: Vec<_> = accept.map(|header| String::from_utf8_lossy(header.value)).collect();
    Head::Complete(HttpRequest { path, accept: accept.join(",") }, head_only)
}

struct Connection {
    stream: TcpStream,
    state: Exchange,
    deadline: Instant,
}

enum Exchange {
    Reading(Vec<u8>),
    /// Waits for the source; the flag is set for HEAD.
    Waiting(HttpRequest, bool),
    Writing(Vec<u8>, usize),
    Lingering,
}

enum Next {
    Wait,
    Close,
}

impl Connection {
    fn interest(&self) -> PollFlags {
        match self.state {
            Exchange::Reading(_) | Exchange::Lingering => PollFlags::POLLIN,
            // poll(2) always reports a hangup.
            Exchange::Waiting(..) => PollFlags::empty(),
            Exchange::Writing(..) => PollFlags::POLLOUT,
        }
    }

    fn respond(&mut self, response: Response, head_only: bool) {
        self.state = Exchange::Writing(response.into_bytes(head_only), 0);
        self.deadline = Instant::now() + CLIENT_TIMEOUT;
    }

    /// Answers the request if it waits. Returns whether it did.
    fn answer_waiting(&mut self, source: &mut dyn Source) -> bool {
        let Exchange::Waiting(request, head_only) = &self.state else { return false };
        let (response, head_only) = (source.answer_waiting(request), *head_only);
        self.respond(response, head_only);
        true
    }

    /// Reads and writes as far as possible without blocking. Returns false if the connection must be closed.
    fn advance(&mut self, source: &mut dyn Source) -> bool {
        match self.drive(source) {
            Ok(Next::Wait) => true,
            Ok(Next::Close) => false,
            // A broken connection is not an error of the server.
            Err(error) => matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted),
        }
    }

    fn drive(&mut self, source: &mut dyn Source) -> io::Result<Next> {
        let mut chunk = [0; 1024];
        loop {
            match &mut self.state {
                Exchange::Reading(bytes) => {
                    match self.stream.read(&mut chunk)? {
                        0 => return Ok(Next::Close),
                        got => bytes.extend_from_slice(&chunk[..got]),
                    }
                    match parse(bytes) {
                        Head::Partial => {}
                        Head::Invalid(response) => self.respond(response, false),
                        Head::Complete(request, head_only) => match source.answer(&request) {
                            Some(response) => self.respond(response, head_only),
                            None => {
                                self.state = Exchange::Waiting(request, head_only);
                                self.deadline = Instant::now() + source.timeout();
                            }
                        },
                    }
                }
                Exchange::Waiting(..) => return Ok(Next::Wait),
                Exchange::Writing(bytes, done) => {
                    *done += self.stream.write(&bytes[*done..])?;
                    if *done == bytes.len() {
                        self.stream.shutdown(Shutdown::Write)?;
                        self.state = Exchange::Lingering;
                        self.deadline = Instant::now() + LINGER;
                    }
                }
                Exchange::Lingering => match self.stream.read(&mut chunk)? {
                    0 => return Ok(Next::Close),
                    _ => return Ok(Next::Wait),
                },
            }
        }
    }
}

/// The pause after accept fails.
const PAUSE: Duration = Duration::from_millis(100);

/// Answers requests until cancelled.
///
/// # Errors
/// [`Error::Interrupted`] when cancelled; [`Error::System`] if the listening socket fails. See poll(2), accept(2).
pub(crate) fn serve(listener: &TcpListener, cancel: &Cancel, source: &mut dyn Source) -> Result<()> {
    listener.set_nonblocking(true).map_err(|error| Error::system("listen without blocking", error))?;
    // The oldest first.
    let mut connections: Vec<Connection> = Vec::new();
    loop {
        cancel.check()?;
        let ready = wait(listener, cancel, &connections, source)?;
        // Before new requests are read, which may start another scrape.
        if source.receive() {
            for connection in &mut connections {
                connection.answer_waiting(source);
            }
        }
        let now = Instant::now();
        let mut ready = ready.into_iter();
        connections.retain_mut(|connection| match (ready.next(), &connection.state) {
            _ if connection.deadline <= now => connection.answer_waiting(source),
            // The client has disconnected.
            (Some(true), Exchange::Waiting(..)) => false,
            (Some(true), _) => connection.advance(source),
            _ => true,
        });
        accept(listener, cancel, &mut connections)?;
    }
}

/// Accepts at most one connection, so that each is read before newer ones can replace it.
fn accept(listener: &TcpListener, cancel: &Cancel, connections: &mut Vec<Connection>) -> Result<()> {
    match listener.accept() {
        Ok((stream, _)) if stream.set_nonblocking(true).is_ok() => {
            if connections.len() >= MAX_CONNECTIONS {
                connections.remove(replaceable(connections));
            }
            let deadline = Instant::now() + CLIENT_TIMEOUT;
            connections.push(Connection { stream, state: Exchange::Reading(Vec::new()), deadline });
        }
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
        // The client has disconnected, or this process has no descriptors left: try again in the next iteration.
        Err(error) => {
            tracing::debug!(%error, "cannot accept a connection");
            if error.kind() != io::ErrorKind::ConnectionAborted {
                // The connection is still pending: pause to avoid spinning.
                pause(cancel, PAUSE)?;
            }
        }
    }
    Ok(())
}

/// The connection that a new one replaces: the oldest without a complete request, else the oldest with a response, else the oldest.
fn replaceable(connections: &[Connection]) -> usize {
    let reading = |connection: &Connection| matches!(connection.state, Exchange::Reading(_));
    let answered = |connection: &Connection| !matches!(connection.state, Exchange::Waiting(..));
    connections.iter().position(reading).or_else(|| connections.iter().position(answered)).unwrap_or(0)
}

/// Waits for events. Returns which connections are ready.
fn wait(listener: &TcpListener, cancel: &Cancel, connections: &[Connection], source: &dyn Source) -> Result<Vec<bool>> {
    let own = [cancel.as_fd(), source.ready(), listener.as_fd()];
    let mut waited: Vec<PollFd<'_>> = own.iter().map(|fd| PollFd::new(*fd, PollFlags::POLLIN)).collect();
    waited.extend(connections.iter().map(|connection| PollFd::new(connection.stream.as_fd(), connection.interest())));
    let now = Instant::now();
    let first = connections.iter().map(|connection| connection.deadline.saturating_duration_since(now)).min();
    // Round up: poll(2) takes whole milliseconds.
    let timeout = first.map_or(PollTimeout::NONE, |first| {
        PollTimeout::try_from(first + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX)
    });
    match poll(&mut waited, timeout) {
        Ok(_) | Err(Errno::EINTR) => {}
        Err(errno) => return Err(Error::system("wait for connections", errno)),
    }
    Ok(waited[own.len()..].iter().map(|fd| fd.any().unwrap_or(false)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(bytes: &[u8]) -> (String, String, bool) {
        match parse(bytes) {
            Head::Complete(request, head_only) => (request.path, request.accept, head_only),
            Head::Partial => panic!("partial"),
            Head::Invalid(response) => panic!("{}", response.body),
        }
    }

    fn status(bytes: &[u8]) -> Option<Status> {
        match parse(bytes) {
            Head::Invalid(response) => Some(response.status),
            _ => None,
        }
    }

    #[test]
    fn parses_path_and_accept() {
        let get = b"GET /metrics?a=b HTTP/1.1\r\nHost: x\r\naccept: text/plain\r\nAccept: */*\r\n\r\n";
        assert_eq!(whole(get), ("/metrics".to_owned(), "text/plain,*/*".to_owned(), false));
        assert_eq!(whole(b"HEAD / HTTP/1.0\r\n\r\n"), ("/".to_owned(), String::new(), true));
        for end in 0..get.len() {
            assert!(matches!(parse(&get[..end]), Head::Partial), "{end}");
        }
    }

    #[test]
    fn invalid_requests_get_a_status() {
        assert_eq!(status(b"POST / HTTP/1.1\r\n\r\n"), Some(Status::MethodNotAllowed));
        assert_eq!(status(b"\x16\x03\x01\x02\x00"), Some(Status::BadRequest));
        let long = format!("GET /{} ", "x".repeat(MAX_HEAD));
        assert_eq!(status(long.as_bytes()), Some(Status::HeadTooLarge));
        let many = format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(MAX_HEADERS + 1));
        assert_eq!(status(many.as_bytes()), Some(Status::HeadTooLarge));
    }

    #[test]
    fn response_has_length_and_closes() {
        let bytes = |head_only| Response::sentence(Status::NotFound, "not here").into_bytes(head_only);
        let text = String::from_utf8(bytes(false)).unwrap();
        assert!(text.starts_with("HTTP/1.1 404 Not Found\r\n") && text.ends_with("\r\n\r\nnot here\n"), "{text}");
        assert!(text.contains("\r\nContent-Length: 9\r\n") && text.contains("\r\nConnection: close\r\n"), "{text}");
        assert_eq!(bytes(true).len() + 9, bytes(false).len());
    }
}
