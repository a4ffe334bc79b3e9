//! An engine with vLLM's HTTP interface, which sleeps before its process is suspended, and wakes after the process was resumed.

use std::{
    io::{self, Write},
    net::{TcpStream, ToSocketAddrs},
    os::fd::AsFd,
    str::FromStr,
    time::Instant,
};

use nix::poll::PollFlags;
use vmmfd::internals::{clean, shorten, wait};

use crate::{
    cli::{parse_timeout, prelude::*, run::GRACE},
    error::ToolError,
};

/// The longest answer, in bytes.
const MOST: usize = 64 << 10;

#[derive(Debug, Args)]
pub(super) struct EngineOptions {
    /// Address of a vLLM server of this process, as http://127.0.0.1:8000: it sleeps before the suspend, and wakes after the resume
    #[arg(long, value_name = "URL", help_heading = "Engine")]
    http: Option<Address>,

    /// Longest time to wait for each answer of the server
    #[arg(long, value_name = "TIME", value_parser = parse_timeout, default_value = "60s", requires = "http", help_heading = "Engine")]
    http_timeout: Duration,
}

impl EngineOptions {
    /// The time after a signal in which the engine can wake.
    pub(super) fn grace(&self) -> Duration {
        if self.http.is_some() { self.http_timeout.max(GRACE) } else { GRACE }
    }

    pub(super) fn engine<'a>(&'a self, cancel: &'a Cancel) -> Option<Engine<'a>> {
        Some(Engine { address: self.http.as_ref()?, timeout: self.http_timeout, cancel })
    }
}

/// An address of HTTP, without TLS.
#[derive(Debug, Clone)]
struct Address {
    /// Host and port.
    authority: String,
    /// Before each path, without a slash at its end.
    base: String,
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let problem = |problem: &str| format!("`{text}` {problem}: write it as http://127.0.0.1:8000");
        let rest = text.strip_prefix("http://").ok_or_else(|| problem("is not an address of HTTP without TLS"))?;
        let (authority, base) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let is_plain = |part: &str| part.bytes().all(|byte| byte.is_ascii_graphic()) && !part.contains(['@', '?', '#']);
        if !is_plain(rest) || authority.is_empty() {
            return Err(problem("is not an address of a server"));
        }
        // An IPv6 address has its own colons, in brackets.
        let has_port = authority.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        let authority = if has_port { authority.to_owned() } else { format!("{authority}:80") };
        Ok(Self { authority, base: base.trim_end_matches('/').to_owned() })
    }
}

/// A server that answers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Engine<'a> {
    address: &'a Address,
    timeout: Duration,
    cancel: &'a Cancel,
}

impl Engine<'_> {
    /// Lets the engine sleep. Returns whether it was awake before.
    pub(super) fn sleep(self, level: u8) -> Result<bool> {
        if self.request("GET", "/is_sleeping")?.contains("true") {
            return Ok(false);
        }
        self.request("POST", &format!("/sleep?level={level}")).map(|_| true).map_err(|error| {
            // It may be asleep, or fall asleep.
            self.wake_after(error)
        })
    }

    /// Wakes the engine after a failure, also if this command was cancelled. Returns the error, with the engine's state if the wake fails.
    pub(super) fn wake_after(self, error: Error) -> Error {
        match Cancel::new().and_then(|cancel| Engine { cancel: &cancel, ..self }.wake()) {
            Ok(()) => error,
            Err(woken) => {
                let Address { authority, base } = self.address;
                let problem =
                    format!("failed, so that the engine may be asleep: {woken}; it was to wake after: {error}");
                let request = format!("POST http://{authority}{base}/wake_up");
                ToolError::Http { request, problem, hint: None }.into()
            }
        }
    }

    pub(super) fn wake(self) -> Result<()> {
        self.request("POST", "/wake_up").map(drop)
    }

    /// Returns the body of a successful answer.
    fn request(self, method: &str, path: &str) -> Result<String> {
        let deadline = Instant::now() + self.timeout;
        let failed = |problem: String, hint: Option<&'static str>| {
            let Address { authority, base } = self.address;
            Error::from(ToolError::Http { request: format!("{method} http://{authority}{base}{path}"), problem, hint })
        };
        let answer = match self.exchange(method, path, deadline) {
            Ok(answer) => answer,
            Err(Exchange::Cancelled(error)) => return Err(error),
            Err(Exchange::Failed(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {
                return Err(failed("was refused: no server listens there".to_owned(), Some(NO_SERVER)));
            }
            Err(Exchange::Failed(error)) if error.kind() == io::ErrorKind::TimedOut => {
                return Err(failed(format!("was not answered within {:?}", self.timeout), Some(NO_ANSWER)));
            }
            Err(Exchange::Failed(error)) => return Err(failed(format!("failed: {error}"), None)),
        };
        let mut headers = [httparse::EMPTY_HEADER; 64];
        let mut response = httparse::Response::new(&mut headers);
        let parsed = response.parse(&answer);
        let (Ok(httparse::Status::Complete(head)), Some(status)) = (parsed, response.code) else {
            return Err(failed("was answered by something else than HTTP".to_owned(), None));
        };
        let mut body = String::from_utf8_lossy(&answer[head..]).into_owned();
        if (200..300).contains(&status) {
            return Ok(body);
        }
        clean(&mut body);
        shorten(&mut body, 300);
        Err(failed(format!("was answered with status {status}: {body}"), Some(NO_SLEEP_MODE)))
    }

    /// Sends a request and reads the whole answer.
    fn exchange(self, method: &str, path: &str, deadline: Instant) -> Result<Vec<u8>, Exchange> {
        let Address { authority, base } = self.address;
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        let mut connected = None;
        for address in authority.to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, left(deadline)?) {
                Ok(stream) => {
                    connected = Some(stream);
                    break;
                }
                Err(error) => last = error,
            }
        }
        let Some(mut stream) = connected else { return Err(last.into()) };
        stream.set_write_timeout(Some(left(deadline)?))?;
        write!(
            stream,
            "{method} {base}{path} HTTP/1.1\r\nHost: {authority}\r\nAccept: application/json\r\nContent-Length: 0\r\n\
             Connection: close\r\n\r\n"
        )?;
        stream.set_nonblocking(true)?;
        let mut answer = Vec::new();
        let mut chunk = [0; 4096];
        while answer.len() < MOST {
            match io::Read::read(&mut stream, &mut chunk) {
                Ok(0) => break,
                Ok(read) => {
                    answer.extend_from_slice(&chunk[..read]);
                    if is_complete(&answer) {
                        break;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if !wait(self.cancel, stream.as_fd(), PollFlags::POLLIN, deadline).map_err(Exchange::Cancelled)? {
                        return Err(io::Error::from(io::ErrorKind::TimedOut).into());
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(answer)
    }
}

const NO_SERVER: &str = "start `vllm serve`, or give --http its --host and --port";

const NO_ANSWER: &str = "wait longer with --http-timeout";

const NO_SLEEP_MODE: &str =
    "start the server with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode --sleep-mode-backend vmmfd";

/// The failures of an exchange.
enum Exchange {
    Cancelled(Error),
    Failed(io::Error),
}

impl From<io::Error> for Exchange {
    fn from(error: io::Error) -> Self {
        Self::Failed(error)
    }
}

/// Whether an answer is complete by its content length, or is not HTTP. Without that header it is complete when the server closes.
fn is_complete(answer: &[u8]) -> bool {
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut response = httparse::Response::new(&mut headers);
    let head = match response.parse(answer) {
        Ok(httparse::Status::Complete(head)) => head,
        Ok(httparse::Status::Partial) => return false,
        Err(_) => return true,
    };
    let length = response.headers.iter().find(|header| header.name.eq_ignore_ascii_case("content-length"));
    let length = length.and_then(|header| str::from_utf8(header.value).ok()?.trim().parse::<usize>().ok());
    length.is_some_and(|length| answer.len() - head >= length)
}

fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}
