//! `exporter`: broker metrics for Prometheus.

mod metrics;

use std::{
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Instant,
};

use httparse::Status;
use nix::poll::PollFlags;
use vmmfd::{
    channel::BrokerPath,
    internals::{pause, take_passed, wait},
};

use self::metrics::render;
use super::MeetBroker;
use crate::cli::{prelude::*, run::raise_file_limit};

const TIMEOUT: &str = "Longest silence of the broker, and time of an HTTP client to send its request: 500ms, 30s, 2m";

/// Serves broker metrics over HTTP, for Prometheus
///
/// GET /metrics returns the metrics as text, or only `vmmfd_up 0` while the broker does not answer. GET /healthz returns 200 while the
/// broker answers, else 503 with the reason. The exporter reconnects after a restart of the broker, and runs until SIGTERM or SIGINT. It
/// sees the memory of all users only as the broker's user or root. If systemd passes a listening socket (LISTEN_FDS), --listen is ignored.
///
/// When it accepts connections, it prints one line, `exporter  listening  http://ADDRESS/metrics`, on stdout, or with --json on stderr.
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("stopped by a signal"; 2 5))]
#[command(mut_arg("timeout", |timeout| timeout.default_value("2s").help(TIMEOUT)))]
pub(in super::super) struct ExporterOptions {
    /// Address to listen on; port 0 selects a free port
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:9464", help_heading = "HTTP")]
    listen: SocketAddr,

    #[command(flatten)]
    meet: MeetBroker,
}

#[derive(Debug, Serialize, JsonSchema)]
struct ExporterReport {
    listen: String,
    socket: String,
}

impl Tool for ExporterOptions {
    const NAME: &'static str = "exporter";

    const REPORTS: &'static [Named] = &[("exporter", document::<Stamped<ExporterReport>>)];

    fn run(&self, Running { output, cancel, .. }: Running<'_>) -> anyhow::Result<ToolOutput> {
        // Each connection has a descriptor.
        raise_file_limit();
        // Each request looks for a broker of this user, then for the system's.
        let path = BrokerPath::find(self.meet.socket.as_deref())?;
        let (listener, address) = self.listener()?;
        output.announce(format!("exporter  listening  http://{address}/metrics"))?;
        let server = Server { meet: self.meet.clone(), cancel: cancel.clone(), down: AtomicBool::new(false) };
        match Arc::new(server).serve(&listener) {
            Ok(()) | Err(Error::Interrupted { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        let report = ExporterReport { listen: address.to_string(), socket: path.path().display().to_string() };
        Ok(ToolOutput::of(output, Exit::Verified, report, |_, _| String::new()))
    }
}

impl ExporterOptions {
    /// The listening socket from systemd, else a new one.
    fn listener(&self) -> Result<(TcpListener, SocketAddr)> {
        let passed = |error| Error::system("use the listening socket of LISTEN_FDS", error);
        let bound = |error| Error::system(format!("listen on {}", self.listen), error);
        let mut sockets = take_passed().map_err(passed)?;
        if sockets.len() > 1 {
            let reason = format!("systemd passed {} sockets: pass one", sockets.len());
            return Err(passed(io::Error::new(io::ErrorKind::InvalidInput, reason)));
        }
        let listener = match sockets.pop() {
            Some((_, socket)) => TcpListener::from(socket),
            None => TcpListener::bind(self.listen).map_err(bound)?,
        };
        let address = listener.local_addr().map_err(passed)?;
        Ok((listener, address))
    }
}

/// Has a thread for each connection and one request on it.
struct Server {
    meet: MeetBroker,
    cancel: Cancel,
    /// Whether the broker did not answer the request before: only a change is logged.
    down: AtomicBool,
}

impl Server {
    /// Serves until cancelled. Exchanges in progress end with the process.
    fn serve(self: Arc<Self>, listener: &TcpListener) -> Result<()> {
        listener.set_nonblocking(true).map_err(|error| Error::system("listen without blocking", error))?;
        loop {
            wait(&self.cancel, listener.as_fd(), PollFlags::POLLIN, Instant::now() + Duration::from_secs(3600))?;
            let started = listener.accept().and_then(|(stream, _)| {
                let server = Arc::clone(&self);
                // A broken connection is not an error of the server.
                thread::Builder::new().name("http".to_owned()).spawn(move || server.exchange(stream).ok())
            });
            if let Err(error) = started {
                tracing::debug!(%error, "cannot serve a connection");
                // It may be pending still: without free descriptors, it can't be accepted.
                pause(&self.cancel, Duration::from_millis(100))?;
            }
        }
    }

    fn exchange(&self, mut stream: TcpStream) -> io::Result<()> {
        stream.set_write_timeout(Some(self.meet.timeout))?;
        let deadline = Instant::now() + self.meet.timeout;
        let mut head = Vec::new();
        let mut chunk = [0; 1024];
        let (status, body) = loop {
            match read(&stream, &mut chunk, deadline)? {
                0 => return Ok(()),
                read => head.extend_from_slice(&chunk[..read]),
            }
            let mut headers = [httparse::EMPTY_HEADER; 64];
            let mut request = httparse::Request::new(&mut headers);
            let parsed = request.parse(&head);
            break match (parsed, request.method) {
                (Ok(Status::Partial), _) if head.len() < 8192 => continue,
                (Ok(Status::Complete(_)), Some("GET")) => self.answer(request.path.unwrap_or_default()),
                (Ok(Status::Complete(_)), _) => ("405 Method Not Allowed", "the method is GET\n".to_owned()),
                _ => ("400 Bad Request", "this is not HTTP, or its head is too long\n".to_owned()),
            };
        };
        write!(
            stream,
            "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\nCache-Control: no-store\r\n\
             Allow: GET\r\nConnection: close\r\n\r\n{body}",
            body.len()
        )?;
        stream.shutdown(Shutdown::Write)?;
        // If the socket closed with unread bytes, the kernel would discard the response.
        let deadline = Instant::now() + self.meet.timeout;
        while read(&stream, &mut chunk, deadline)? > 0 {}
        Ok(())
    }

    /// Returns status and body.
    fn answer(&self, target: &str) -> (&'static str, String) {
        let path = target.split('?').next().unwrap_or_default();
        if !matches!(path, "/metrics" | "/healthz") {
            return ("404 Not Found", "the paths are /metrics and /healthz\n".to_owned());
        }
        let metrics =
            self.meet.connect(&self.cancel).and_then(|client| client.metrics()).map_err(|error| error.in_full());
        match (self.down.swap(metrics.is_err(), Ordering::Relaxed), &metrics) {
            (false, Err(error)) => tracing::warn!(error, "the broker does not answer"),
            (true, Ok(_)) => tracing::warn!("the broker answers again"),
            _ => {}
        }
        match metrics {
            metrics if path == "/metrics" => ("200 OK", render(metrics.as_ref().ok())),
            Ok(_) => ("200 OK", "the broker answers\n".to_owned()),
            Err(error) => ("503 Service Unavailable", format!("the broker does not answer: {error}\n")),
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
