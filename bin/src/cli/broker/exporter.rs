//! `exporter`: broker metrics for Prometheus.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    thread,
    time::Duration,
};

use clap::Args;
use schemars::JsonSchema;
use serde::Serialize;
use vmmfd::{
    broker::{Client, Metrics},
    channel::{BrokerPath, Cancel},
    error::{Error, Result},
    internals::take_passed,
};

use super::MeetBroker;
use crate::{
    cli::{
        Exit, Output, Tool, ToolOutput,
        exit::exit_codes,
        options::{parse_timeout, parse_uid},
        output::{Progress, json_line},
    },
    exporter::{http::serve, scraper::Scraper},
    schema::{Named, VERSION, document},
    stamp,
};

/// Serves broker metrics over HTTP, for Prometheus
///
/// GET /metrics returns the metrics as text, or only `vmmfd_up 0` while the broker does not answer. GET /healthz returns 200 while the
/// broker answers, else 503 with the reason. The exporter reconnects after a restart of the broker, and runs until SIGTERM or SIGINT. It
/// sees the memory of all users only as the broker's user or root. If systemd passes a listening socket (LISTEN_FDS), --listen is ignored.
///
/// When it accepts connections, it prints one line, `exporter  listening  http://ADDRESS/metrics`, on stdout, or with --json on stderr.
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("stopped by a signal"; 2 5))]
pub(in super::super) struct ExporterOptions {
    /// Address to listen on; port 0 selects a free port
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:9464", help_heading = "HTTP")]
    listen: SocketAddr,

    /// Unix socket of the broker [default: $XDG_RUNTIME_DIR/vmmfd/broker.sock, else /tmp/vmmfd-UID/broker.sock; if no broker listens
    /// there, /run/vmmfd/broker.sock if it exists]
    #[arg(long, value_name = "PATH", env = "VMMFD_BROKER_SOCKET", help_heading = "Meeting")]
    socket: Option<PathBuf>,

    /// Other user that the broker may run as, besides this user and root; repeatable
    #[arg(long = "allow-uid", value_name = "UID", value_parser = parse_uid, help_heading = "Meeting")]
    allow_uids: Vec<u32>,

    /// Longest wait for an answer of the broker: 500ms, 30s, 2m
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = parse_timeout, help_heading = "Meeting")]
    timeout: Duration,

    #[command(flatten)]
    output: Output,
}

#[derive(Debug, Serialize, JsonSchema)]
struct ExporterReport {
    schema: u32,
    tool: String,
    listen: String,
    socket: String,
    /// HTTP requests answered, and how many of them without an answer of the broker.
    requests: u64,
    unanswered: u64,
}

/// The connection to the broker, opened on demand.
struct Connected<'a> {
    meet: MeetBroker,
    cancel: &'a Cancel,
    client: Option<Client>,
}

impl Connected<'_> {
    /// Requests the metrics, over a new connection if the old one is closed.
    fn ask(&mut self) -> Result<Metrics> {
        if let Some(client) = &self.client {
            match client.metrics() {
                Ok(metrics) => return Ok(metrics),
                Err(error) => {
                    self.client = None;
                    // The timeout is used up.
                    let waited = matches!(
                        error,
                        Error::Peer(vmmfd::error::PeerError::Timeout { .. })
                            | Error::Socket(vmmfd::error::SocketError::NoBroker { .. })
                            | Error::Interrupted { .. }
                    );
                    if waited {
                        return Err(error);
                    }
                }
            }
        }
        let client = self.meet.connect(self.cancel)?;
        let metrics = client.metrics()?;
        self.client = Some(client);
        Ok(metrics)
    }
}

impl Tool for ExporterOptions {
    const NAME: &'static str = "exporter";

    const REPORTS: &'static [Named] = &[("exporter", document::<ExporterReport>)];

    fn output(&self) -> &Output {
        &self.output
    }

    fn run(&self, cancel: &Cancel, _progress: &Progress) -> anyhow::Result<ToolOutput> {
        // The path may change: each request looks for a broker of this user, then for the system's.
        let path = BrokerPath::find(self.socket.as_deref())?;
        let (listener, address) = self.listener()?;
        self.output.announce(format!("exporter  listening  http://{address}/metrics"))?;
        let meet =
            MeetBroker { socket: self.socket.clone(), allow_uids: self.allow_uids.clone(), timeout: self.timeout };
        let mut broker = Connected { meet, cancel, client: None };
        let (requests, unanswered) = thread::scope(|scope| {
            let mut scraper = Scraper::start(scope, self.timeout, move || broker.ask())?;
            match serve(&listener, cancel, &mut scraper) {
                Ok(()) | Err(Error::Interrupted { .. }) => Ok(scraper.counts()),
                Err(error) => Err(error),
            }
        })?;
        let report = ExporterReport {
            schema: VERSION,
            tool: stamp::tool(),
            listen: address.to_string(),
            socket: BrokerPath::find(self.socket.as_deref()).unwrap_or(path).path().display().to_string(),
            requests,
            unanswered,
        };
        let text = if self.output.json { json_line(&report) } else { String::new() };
        Ok(ToolOutput { text, exit: Exit::Verified })
    }
}

impl ExporterOptions {
    /// The listening socket from systemd, else a new one.
    fn listener(&self) -> Result<(TcpListener, SocketAddr)> {
        let passed = |error| Error::system("use the listening socket of LISTEN_FDS", error);
        let bound = |error| Error::system(format!("listen on {}", self.listen), error);
        let mut sockets = take_passed().map_err(passed)?;
        match (sockets.pop(), sockets.len()) {
            (None, _) => {
                let listener = TcpListener::bind(self.listen).map_err(bound)?;
                let address = listener.local_addr().map_err(bound)?;
                Ok((listener, address))
            }
            (Some((_, socket)), 0) => {
                let listener = TcpListener::from(socket);
                let address = listener.local_addr().map_err(passed)?;
                Ok((listener, address))
            }
            (Some(_), others) => {
                let reason = format!("systemd passed {} sockets: pass one", others + 1);
                Err(passed(io::Error::new(io::ErrorKind::InvalidInput, reason)))
            }
        }
    }
}
