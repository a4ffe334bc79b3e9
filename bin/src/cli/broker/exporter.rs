//! `exporter`: broker metrics for Prometheus.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use vmmfd::{broker::Metrics, channel::BrokerPath, internals::take_passed};

use super::MeetBroker;
use crate::{
    cli::{prelude::*, run::raise_file_limit},
    exporter::{
        Response,
        metrics::{CONTENT_TYPE, render},
        serve,
    },
};

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
        // The path may change: each request looks for a broker of this user, then for the system's.
        let path = BrokerPath::find(self.meet.socket.as_deref())?;
        let (listener, address) = self.listener()?;
        output.announce(format!("exporter  listening  http://{address}/metrics"))?;
        let meet = self.meet.clone();
        let asked = cancel.clone();
        let down = AtomicBool::new(false);
        let answer: Arc<dyn Fn(&str) -> Response + Send + Sync> =
            Arc::new(move |path| answer(path, &down, || meet.connect(&asked).and_then(|client| client.metrics())));
        match serve(&listener, cancel, self.meet.timeout, &answer) {
            Ok(()) | Err(Error::Interrupted { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        let report = ExporterReport {
            listen: address.to_string(),
            socket: BrokerPath::find(self.meet.socket.as_deref()).unwrap_or(path).path().display().to_string(),
        };
        Ok(ToolOutput::of(output, Exit::Verified, report, |_, _| String::new()))
    }
}

/// Answers a request. `down` is whether the broker did not answer the request before: only a change is logged.
fn answer(path: &str, down: &AtomicBool, scrape: impl FnOnce() -> Result<Metrics>) -> Response {
    if !matches!(path, "/metrics" | "/healthz") {
        return Response::sentence("404 Not Found", "the paths are /metrics and /healthz");
    }
    let metrics = scrape().map_err(|error| error.in_full());
    match (down.swap(metrics.is_err(), Ordering::Relaxed), &metrics) {
        (false, Err(error)) => tracing::warn!(error, "the broker does not answer"),
        (true, Ok(_)) => tracing::warn!("the broker answers again"),
        _ => {}
    }
    match metrics {
        metrics if path == "/metrics" => Response("200 OK", CONTENT_TYPE, render(metrics.ok())),
        Ok(_) => Response::sentence("200 OK", "the broker answers"),
        Err(error) => Response::sentence("503 Service Unavailable", &format!("the broker does not answer: {error}")),
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
