//! The HTTP server of `vmmfd exporter`: GET and HEAD, with a thread for each connection and one request on it.

pub(super) mod metrics;

use std::{
    io::{self, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    os::fd::AsFd,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use nix::poll::PollFlags;
use vmmfd::{
    channel::Cancel,
    error::{Error, Result},
    internals::{pause, wait},
};

/// The longest request head, in bytes.
const MAX_HEAD: usize = 8192;

/// The longest body that a client may send, in bytes: it is ignored.
const MAX_BODY: usize = 1 << 20;

/// Status, content type and body.
#[derive(Debug)]
pub(crate) struct Response(pub(crate) &'static str, pub(crate) &'static str, pub(crate) String);

impl Response {
    pub(crate) fn sentence(status: &'static str, sentence: &str) -> Self {
        Self(status, "text/plain; charset=utf-8", format!("{sentence}\n"))
    }
}

/// Answers requests by their path. A client has `limit` to send its request, and again to read the answer. Exchanges in progress end with
/// the process.
///
/// # Errors
/// [`Error::Interrupted`] when cancelled; [`Error::System`] if the listening socket fails.
pub(crate) fn serve(
    listener: &TcpListener,
    cancel: &Cancel,
    limit: Duration,
    answer: &Arc<dyn Fn(&str) -> Response + Send + Sync>,
) -> Result<()> {
    listener.set_nonblocking(true).map_err(|error| Error::system("listen without blocking", error))?;
    loop {
        wait(cancel, listener.as_fd(), PollFlags::POLLIN, Instant::now() + Duration::from_secs(3600))?;
        let started = listener.accept().and_then(|(stream, _)| {
            let answer = Arc::clone(answer);
            // A broken connection is not an error of the server.
            thread::Builder::new().name("http".to_owned()).spawn(move || exchange(stream, limit, &*answer).ok())
        });
        if let Err(error) = started {
            tracing::debug!(%error, "cannot serve a connection");
            // It may be pending still: without free descriptors, it can't be accepted.
            pause(cancel, Duration::from_millis(100))?;
        }
    }
}

/// Reads more bytes before the deadline. Returns their number, which is 0 at the end of the stream.
fn read(mut stream: &TcpStream, chunk: &mut [u8], deadline: Instant) -> io::Result<usize> {
    let left = deadline.saturating_duration_since(Instant::now());
    // A timeout of 0 would be none.
    stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { stream.read(chunk) }
}

fn exchange(mut stream: TcpStream, limit: Duration, answer: &dyn Fn(&str) -> Response) -> io::Result<()> {
    stream.set_write_timeout(Some(limit))?;
    let deadline = Instant::now() + limit;
    let mut head = Vec::new();
    let mut chunk = [0; 1024];
    let (Response(status, content_type, body), has_body) = loop {
        match read(&stream, &mut chunk, deadline)? {
            0 => return Ok(()),
            read => head.extend_from_slice(&chunk[..read]),
        }
        let mut headers = [httparse::EMPTY_HEADER; 64];
        let mut request = httparse::Request::new(&mut headers);
        let parsed = request.parse(&head);
        let method = request.method.unwrap_or_default();
        let path = request.path.unwrap_or_default();
        let response = match (parsed, method) {
            (Ok(httparse::Status::Complete(_)), "GET" | "HEAD") => answer(path.split('?').next().unwrap_or_default()),
            (Ok(httparse::Status::Complete(_)), _) => {
                Response::sentence("405 Method Not Allowed", "the methods are GET and HEAD")
            }
            (Ok(httparse::Status::Partial), _) if head.len() < MAX_HEAD => continue,
            (Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders), _) => {
                let most = format!("a request has at most {MAX_HEAD} bytes and {} headers", headers.len());
                Response::sentence("431 Request Header Fields Too Large", &most)
            }
            (Err(_), _) => Response::sentence("400 Bad Request", "this is not an HTTP request"),
        };
        break (response, method != "HEAD");
    };
    let allow = if status.starts_with("405") { "Allow: GET, HEAD\r\n" } else { "" };
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\nCache-Control: no-store\r\n\
         {allow}Connection: close\r\n\r\n{}",
        body.len(),
        if has_body { &body } else { "" }
    )?;
    stream.shutdown(Shutdown::Write)?;
    // If the socket closed with unread bytes, the kernel would discard the response.
    let deadline = Instant::now() + limit;
    let mut ignored = 0;
    while ignored < MAX_BODY {
        match read(&stream, &mut chunk, deadline)? {
            0 => break,
            read => ignored += read,
        }
    }
    Ok(())
}
