//! `vmmfd exporter`, asked over plain HTTP.
//!
//! One file of more than 500 lines: all tests use its HTTP client and its reader of figures.

use std::{
    collections::BTreeSet,
    fs,
    io::{self, ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::{fd::OwnedFd, unix::net::UnixListener},
    path::Path,
    process::{Command, Stdio},
    sync::mpsc,
    time::Duration,
};

use nix::sys::signal::Signal;
use serde_json::Value;
use vmmfd::{
    broker::{DeviceBytes, Durations, Limits, Metrics, RequestCount, Room, StoreRoom, UserTotal},
    wire::{Device, broker::Message},
};
use yaml_rust2::{Yaml, YamlLoader};

use crate::{
    command_line::{fits, object},
    running::{Meeting, Run, Running, binary, wait_for},
    support::stand_in::{StandIn, answer, request},
};

struct Exporter {
    running: Running,
    address: SocketAddr,
}

/// An HTTP response.
struct Answer {
    status: String,
    head: String,
    body: String,
}

impl Answer {
    fn read(mut stream: TcpStream) -> Self {
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text:?}"));
        let status = head.lines().next().unwrap().strip_prefix("HTTP/1.1 ").unwrap().to_owned();
        Self { status, head: head.to_owned(), body: body.to_owned() }
    }
}

fn vmmfd(place: &Meeting, arguments: &[&str]) -> Run {
    let mut run = place.bare("vmmfd");
    run.command.args(arguments).env("VMMFD_BROKER_SOCKET", place.socket());
    run
}

impl Exporter {
    fn start(place: &Meeting, options: &[&str]) -> Self {
        Self::of(vmmfd(place, &[&["exporter", "--listen", "127.0.0.1:0"], options].concat()).start())
    }

    fn of(mut running: Running) -> Self {
        running.until("listening");
        let line = running.so_far();
        let address = line.split_once("http://").unwrap().1.split_once('/').unwrap().0.parse().unwrap();
        Self { running, address }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(600))).unwrap();
        stream
    }

    /// Sends raw bytes, and returns the response.
    fn send(&self, request: &str) -> Answer {
        let mut stream = self.connect();
        stream.write_all(request.as_bytes()).unwrap();
        Answer::read(stream)
    }

    /// Sends a request without waiting for the response.
    fn ask(&self, path: &str) -> TcpStream {
        let mut stream = self.connect();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {}\r\n\r\n", self.address).unwrap();
        stream
    }

    fn get(&self, path: &str) -> Answer {
        Answer::read(self.ask(path))
    }

    fn end(self) -> crate::running::Ended {
        self.running.signal(Signal::SIGTERM);
        self.running.end()
    }
}

/// The value of a metric.
#[track_caller]
fn value(body: &str, metric: &str) -> f64 {
    let line = body.lines().find_map(|line| line.strip_prefix(metric)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {metric} in {body}")).parse().unwrap()
}

fn measured() -> Metrics {
    let device =
        |name: &str| Device { uuid: "00112233-4455-6677-8899-aabbccddeeff".parse().unwrap(), name: name.to_owned() };
    Metrics {
        instance: "0b7e4d9a-6a3f-4f0e-9d5e-0a1b2c3d4e5f".to_owned(),
        started_ms: 1_700_000_000_500,
        restarts: 2,
        objects: 3,
        versions: 4,
        leases: 5,
        connections: 6,
        watchers: 1,
        descriptors: Room { used: 40, allowed: 1000 },
        store: StoreRoom { kind: "keeper\"\n".to_owned(), used: 7, allowed: 26_000 },
        requests: vec![
            RequestCount { verb: "get".to_owned(), outcome: "ok".to_owned(), count: 10 },
            RequestCount { verb: "get".to_owned(), outcome: "absent".to_owned(), count: 2 },
        ],
        durations: vec![Durations {
            verb: "get".to_owned(),
            bounds_us: vec![10, 100, 1_000_000],
            counts: vec![1, 4, 6, 1],
            sum_us: 2_500_000,
        }],
        totals: vec![UserTotal {
            uid: 1000,
            objects: 3,
            devices: vec![DeviceBytes { device: device("a GPU"), bytes: 1 << 30 }],
            leases: 5,
            connections: 2,
        }],
        version: Some("0.1.0".to_owned()),
        lost_versions: Some(1),
        total_quota: Some(Limits {
            bytes: Some(1 << 42),
            device_bytes: Some(1 << 41),
            objects: Some(1000),
            leases: Some(2000),
            connections: Some(500),
        }),
        pid: Some(4711),
        keeper: None,
        crashes: None,
        quota: Some(Limits {
            bytes: Some(1 << 40),
            device_bytes: Some(1 << 39),
            objects: Some(100),
            leases: Some(1000),
            connections: Some(50),
        }),
    }
}

/// The complete response for a broker with these figures.
const PLAIN: &str = "\
# HELP vmmfd_up Whether the broker answers
# TYPE vmmfd_up gauge
vmmfd_up 1
";

/// Runs the exporter with a socket passed as systemd passes it.
fn with_socket(place: &Meeting, socket: OwnedFd) -> Run {
    let mut shell = Command::new("sh");
    shell.args(["-c", "LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" exporter 3<&0 </dev/null"]).arg(binary("vmmfd"));
    shell.env("VMMFD_BROKER_SOCKET", place.socket());
    let mut run = place.bare("vmmfd").instead(shell);
    run.command.stdin(socket);
    run
}

#[test]
fn passed_socket_is_served() {
    let place = Meeting::host();
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    let exporter = Exporter::of(with_socket(&place, socket.into()).start());
    assert_eq!(exporter.address, address);
    assert_eq!(exporter.get("/metrics").status, "200 OK");
    exporter.end().code(0);
    let unix = UnixListener::bind(place.folder().join("unix")).unwrap();
    with_socket(&place, unix.into()).end().code(5).says("use the listening socket of LISTEN_FDS");
}

#[test]
fn figures_use_the_requested_format() {
    let place = Meeting::host();
    let broker = StandIn::start(
        &place.socket(),
        vec![Box::new(|raw| {
            for _ in 0..4 {
                assert!(matches!(request(&raw), Message::Measure(_)));
                answer(&raw, Message::Measured(Box::new(measured()))).unwrap();
            }
        })],
    );
    let exporter = Exporter::start(&place, &[]);
    let plain = exporter.get("/metrics?whatever=1");
    assert_eq!(plain.status, "200 OK");
    assert!(plain.head.contains("Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"), "{}", plain.head);
    let body = &plain.body;
    assert!(body.starts_with(PLAIN), "{body}");
    for (metric, want) in [
        ("vmmfd_objects", 3.0),
        ("vmmfd_versions", 4.0),
        ("vmmfd_leases", 5.0),
        ("vmmfd_connections", 6.0),
        ("vmmfd_watchers", 1.0),
        ("vmmfd_claimed_bytes{device=\"GPU-00112233-4455-6677-8899-aabbccddeeff\",uid=\"1000\"}", 1_073_741_824.0),
        ("vmmfd_user_objects{uid=\"1000\"}", 3.0),
        ("vmmfd_user_leases{uid=\"1000\"}", 5.0),
        ("vmmfd_user_connections{uid=\"1000\"}", 2.0),
        ("vmmfd_quota_bytes", 1_099_511_627_776.0),
        ("vmmfd_quota_objects", 100.0),
        ("vmmfd_quota_leases", 1000.0),
        ("vmmfd_quota_connections", 50.0),
        ("vmmfd_open_descriptors", 40.0),
        ("vmmfd_max_descriptors", 1000.0),
        ("vmmfd_stored_descriptors", 7.0),
        ("vmmfd_max_stored_descriptors", 26_000.0),
        ("vmmfd_lost_versions", 1.0),
        ("vmmfd_build_info{version=\"0.1.0\"}", 1.0),
        // Characters that would close the label are replaced. Line breaks are replaced as in every message.
        ("vmmfd_store_info{kind=\"keeper_ \"}", 1.0),
        ("vmmfd_start_time_seconds", 1_700_000_000.5),
        ("vmmfd_restarts_total", 2.0),
        ("vmmfd_requests_total{verb=\"get\",outcome=\"ok\"}", 10.0),
        ("vmmfd_requests_total{verb=\"get\",outcome=\"absent\"}", 2.0),
        // A bucket includes all smaller buckets.
        ("vmmfd_request_seconds_bucket{le=\"0.00001\",verb=\"get\"}", 1.0),
        ("vmmfd_request_seconds_bucket{le=\"0.0001\",verb=\"get\"}", 5.0),
        ("vmmfd_request_seconds_bucket{le=\"1.0\",verb=\"get\"}", 11.0),
        ("vmmfd_request_seconds_bucket{le=\"+Inf\",verb=\"get\"}", 12.0),
        ("vmmfd_request_seconds_count{verb=\"get\"}", 12.0),
        ("vmmfd_request_seconds_sum{verb=\"get\"}", 2.5),
    ] {
        assert_eq!(value(body, metric), want, "{metric}");
    }
    // Each sample belongs to a metric with a type and a help text.
    for line in body.lines().filter(|line| !line.starts_with('#')) {
        let name = line.split(['{', ' ']).next().unwrap();
        let family = ["_bucket", "_count", "_sum"].iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name);
        assert!(body.contains(&format!("# TYPE {family} ")) && body.contains(&format!("# HELP {family} ")), "{line}");
    }
    assert!(body.contains("# TYPE vmmfd_requests_total counter\n") && !body.contains("# EOF"), "{body}");
    checked_by_promtool(body);

    let request =
        "GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5\r\n\r\n";
    let open = exporter.send(request);
    assert!(open.head.contains("Content-Type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n"));
    assert!(open.body.contains("# TYPE vmmfd_requests counter\n") && open.body.ends_with("# EOF\n"), "{}", open.body);
    let head = exporter.send("HEAD /metrics HTTP/1.0\r\n\r\n");
    assert_eq!((&*head.status, &*head.body), ("200 OK", ""));
    assert!(head.head.contains(&format!("Content-Length: {}\r\n", body.len())), "{}", head.head);
    let health = exporter.get("/healthz");
    assert_eq!((&*health.status, &*health.body), ("200 OK", "the broker answers\n"));
    broker.end();
    exporter.end().code(0);
}

/// The metrics in a text of queries.
fn metrics_of(queries: &str) -> BTreeSet<&str> {
    let words = queries.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("vmmfd_")).collect()
}

#[track_caller]
fn assert_served(queries: &str, body: &str) {
    let served = metrics_of(body);
    let named = metrics_of(queries);
    let missing: Vec<&&str> = named.difference(&served).collect();
    assert!(!named.is_empty() && missing.is_empty(), "not served: {missing:?}");
}

fn text(yaml: &Yaml) -> &str {
    yaml.as_str().unwrap_or_else(|| panic!("no text: {yaml:?}"))
}

fn deployed(name: &str) -> String {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).join("scripts/deploy").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The metrics that the exporter serves for a broker with these figures.
fn served() -> String {
    let place = Meeting::host();
    let broker = StandIn::start(
        &place.socket(),
        vec![Box::new(|raw| {
            assert!(matches!(request(&raw), Message::Measure(_)));
            answer(&raw, Message::Measured(Box::new(measured()))).unwrap();
        })],
    );
    let exporter = Exporter::start(&place, &[]);
    let body = exporter.get("/metrics").body;
    broker.end();
    exporter.end().code(0);
    body
}

#[test]
fn alerts_use_served_metrics() {
    let (body, rules, page) = (served(), deployed("prometheus/rules.yml"), docs_page());
    let file = YamlLoader::load_from_str(&rules).unwrap().remove(0);
    let groups = file["groups"].as_vec().unwrap();
    let alerts: Vec<&Yaml> = groups.iter().flat_map(|group| group["rules"].as_vec().unwrap()).collect();
    assert!(alerts.len() >= 5, "{alerts:?}");
    for alert in alerts {
        let (name, notes) = (text(&alert["alert"]), &alert["annotations"]);
        assert_served(text(&alert["expr"]), &body);
        assert!(["warning", "critical"].contains(&text(&alert["labels"]["severity"])), "{name}");
        assert!(!text(&notes["summary"]).is_empty(), "{name}");
        let section = text(&notes["runbook"]).strip_prefix("docs/operate.md#").unwrap();
        let is_section = |line: &str| {
            line.trim_start_matches('#')
                .strip_prefix(' ')
                .is_some_and(|title| title.to_lowercase().replace(' ', "-") == section)
        };
        assert!(page.lines().any(is_section), "{name}: docs/operate.md has no section {section}");
    }
    let file = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).join("scripts/deploy/prometheus/rules.yml");
    match Command::new("promtool").args(["check", "rules"]).arg(file).output() {
        Ok(ended) => assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr)),
        Err(_) => left_out(),
    }
}

#[test]
fn dashboard_names_served_metrics() {
    let body = served();
    let board: Value = serde_json::from_str(&deployed("grafana/vmmfd.json")).unwrap();
    let panels = board["panels"].as_array().unwrap();
    let mut ids = BTreeSet::new();
    for panel in panels {
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{panel}");
        for target in panel["targets"].as_array().unwrap() {
            assert_served(target["expr"].as_str().unwrap(), &body);
        }
    }
    // The dashboard includes the main metrics.
    let all = panels.iter().flat_map(|panel| panel["targets"].as_array().unwrap());
    let all: String = all.map(|target| target["expr"].as_str().unwrap().to_owned() + "\n").collect();
    for metric in
        ["vmmfd_up", "vmmfd_claimed_bytes", "vmmfd_quota_bytes", "vmmfd_lost_versions", "vmmfd_open_descriptors"]
    {
        assert!(metrics_of(&all).contains(metric), "{metric}");
    }
}

#[test]
fn page_describes_each_served_metric() {
    let (body, page) = (served(), docs_page());
    let (_, table) = page.split_once("| Metric |").unwrap();
    let (table, _) = table.split_once("\n\n").unwrap();
    let documented = metrics_of(table);
    let families = body.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
    let families: BTreeSet<&str> = families.collect();
    assert_eq!(documented, families);
}

fn docs_page() -> String {
    fs::read_to_string(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).join("docs/operate.md")).unwrap()
}

/// Names what this run does not check. The harness would hide the output of `println` of a test that passes.
fn left_out() {
    let _ = io::stderr()
        .write_all(b"LEFT OUT, as promtool is not installed: Prometheus's own check of the exporter's files\n");
}

/// Checks the format with Prometheus's own parser, if it is installed.
fn checked_by_promtool(body: &str) {
    let tool = Command::new("promtool").args(["check", "metrics"]).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let Ok(mut tool) = tool else {
        return left_out();
    };
    tool.stdin.take().unwrap().write_all(body.as_bytes()).unwrap();
    let ended = tool.wait_with_output().unwrap();
    assert!(ended.status.success() && ended.stderr.is_empty(), "{}", String::from_utf8_lossy(&ended.stderr));
}

#[test]
fn reconnects_to_the_next_broker() {
    let place = Meeting::host();
    let exporter = Exporter::start(&place, &["--timeout", "3s"]);
    let down = |exporter: &Exporter| {
        let metrics = exporter.get("/metrics");
        assert_eq!(metrics.status, "200 OK");
        assert_eq!(metrics.body, PLAIN.replace("vmmfd_up 1", "vmmfd_up 0"));
        let health = exporter.get("/healthz");
        assert_eq!(health.status, "503 Service Unavailable");
        assert!(
            health.body.starts_with("the broker does not answer: ") && health.body.lines().count() == 1,
            "{}",
            health.body
        );
    };
    down(&exporter);
    for _ in 0..2 {
        let mut server = vmmfd(&place, &["serve"]).start();
        server.until("listening");
        wait_for("the broker's figures", || value(&exporter.get("/metrics").body, "vmmfd_up") == 1.0);
        assert_eq!(exporter.get("/healthz").status, "200 OK");
        server.signal(Signal::SIGTERM);
        server.end().code(0);
        down(&exporter);
    }
    exporter.end().code(0);
}

#[test]
fn figures_match_what_the_broker_did() {
    let place = Meeting::host();
    let mut server = vmmfd(&place, &["serve", "--quota", "objects=2"]).start();
    server.until("listening");
    let exporter = Exporter::start(&place, &[]);
    let before = exporter.get("/metrics").body;
    assert_eq!((value(&before, "vmmfd_up"), value(&before, "vmmfd_objects")), (1.0, 0.0));
    let file = place.folder().join("input");
    fs::write(&file, vec![7; 100_000]).unwrap();
    for name in ["a", "b"] {
        vmmfd(&place, &["put", name, "--backend", "host", "--from", file.to_str().unwrap()]).end().code(0);
    }
    vmmfd(&place, &["get", "a", "--backend", "host"]).end().code(0);
    vmmfd(&place, &["get", "nothing", "--backend", "host"]).end().code(1);
    let after = exporter.get("/metrics").body;
    assert_eq!(value(&after, "vmmfd_objects"), 2.0);
    assert_eq!(value(&after, "vmmfd_requests_total{verb=\"put\",outcome=\"ok\"}"), 2.0);
    // Each put first reads the claim on its name with a get.
    assert_eq!(value(&after, "vmmfd_requests_total{verb=\"get\",outcome=\"ok\"}"), 3.0);
    assert_eq!(value(&after, "vmmfd_requests_total{verb=\"get\",outcome=\"absent\"}"), 1.0);
    assert_eq!(value(&after, "vmmfd_request_seconds_count{verb=\"put\"}"), 2.0);
    assert!(value(&after, "vmmfd_request_seconds_sum{verb=\"put\"}") > 0.0);
    let used = |body: &str| value(body, "vmmfd_open_descriptors");
    assert!(used(&after) >= used(&before) + 2.0, "{after}");
    let claimed = after.lines().find(|line| line.starts_with("vmmfd_claimed_bytes{")).unwrap();
    assert!(claimed.contains("device=\"HOST-") && claimed.contains(&format!("uid=\"{}\"", nix::unistd::geteuid())));
    assert!(value(&after, "vmmfd_start_time_seconds") > 1.7e9);
    assert_eq!(value(&after, &format!("vmmfd_build_info{{version=\"{}\"}}", env!("CARGO_PKG_VERSION"))), 1.0);
    assert_eq!((value(&after, "vmmfd_lost_versions"), value(&after, "vmmfd_quota_objects")), (0.0, 2.0));
    assert_eq!(value(&after, &format!("vmmfd_user_objects{{uid=\"{}\"}}", nix::unistd::geteuid())), 2.0);
    assert_eq!(value(&after, "vmmfd_quota_leases"), 100_000.0, "the default");
    assert!(!after.contains("vmmfd_total_quota_bytes"), "a limit that does not exist has no metric: {after}");
    checked_by_promtool(&after);
    exporter.end().code(0);
}

#[test]
fn other_requests_have_other_answers() {
    let place = Meeting::host();
    let exporter = Exporter::start(&place, &[]);
    for (request, status) in [
        ("GET / HTTP/1.1\r\n\r\n", "404 Not Found"),
        ("POST /metrics HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody", "405 Method Not Allowed"),
        ("nonsense\r\n\r\n", "400 Bad Request"),
        (&format!("GET /{} HTTP/1.1\r\n", "x".repeat(9000)), "431 Request Header Fields Too Large"),
    ] {
        assert_eq!(exporter.send(request).status, status, "{request}");
    }
    exporter.end().code(0);
}

/// Whether the exporter has closed a connection without a response.
fn is_closed(mut stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    let read = stream.read(&mut [0; 16]);
    stream.set_nonblocking(false).unwrap();
    match read {
        Ok(got) => {
            assert_eq!(got, 0);
            true
        }
        Err(error) => error.kind() != ErrorKind::WouldBlock,
    }
}

#[test]
fn new_connections_replace_slow_ones() {
    let place = Meeting::host();
    let mut server = vmmfd(&place, &["serve"]).start();
    server.until("listening");
    let exporter = Exporter::start(&place, &["--timeout", "60s"]);
    // 32 connections above the exporter's limit, each with no data or half a request.
    let slow: Vec<TcpStream> = (0..160)
        .map(|index| {
            let mut stream = exporter.connect();
            stream.write_all(if index % 2 == 0 { b"" } else { b"GET /healthz HTT" }).unwrap();
            stream
        })
        .collect();
    assert_eq!(exporter.get("/healthz").status, "200 OK");
    // None has timed out: the newest are all open.
    let closed: Vec<bool> = slow.iter().map(is_closed).collect();
    let count = closed.iter().filter(|closed| **closed).count();
    assert!(count == 33 && closed[..33].iter().all(|closed| *closed), "{count} closed: {closed:?}");
    // Without newer connections, a slow client is closed at the timeout.
    assert!(matches!((&slow[159]).read(&mut [0; 16]), Ok(0) | Err(_)));
    exporter.end().code(0);
}

#[test]
fn waiting_requests_share_one_scrape() {
    let place = Meeting::host();
    let (release, released) = mpsc::channel();
    let broker = StandIn::start(
        &place.socket(),
        vec![Box::new(move |raw| {
            assert!(matches!(request(&raw), Message::Measure(_)));
            released.recv().unwrap();
            answer(&raw, Message::Measured(Box::new(measured()))).unwrap();
            // The exporter stops before another request.
            assert!(!matches!(raw.receive(), Ok(Some(_))));
        })],
    );
    let exporter = Exporter::start(&place, &["--timeout", "60s"]);
    let paths = ["/healthz", "/metrics"].repeat(20);
    let waiting: Vec<TcpStream> = paths.iter().map(|path| exporter.ask(path)).collect();
    // The exporter has read all other requests before this response, which needs no broker.
    assert_eq!(exporter.get("/").status, "404 Not Found");
    assert!(!waiting.iter().any(is_closed));
    release.send(()).unwrap();
    for (stream, path) in waiting.into_iter().zip(paths) {
        let answer = Answer::read(stream);
        assert_eq!(answer.status, "200 OK");
        assert!(path == "/healthz" || value(&answer.body, "vmmfd_up") == 1.0, "{}", answer.body);
    }
    exporter.end().code(0);
    broker.end();
}

#[test]
fn stopped_broker_is_unavailable_to_all() {
    let place = Meeting::host();
    let mut server = vmmfd(&place, &["serve", "--no-keeper"]).start();
    server.until("listening");
    // Over an existing connection, and over new ones.
    let exporter = Exporter::start(&place, &[]);
    assert_eq!(exporter.get("/healthz").status, "200 OK");
    server.signal(Signal::SIGSTOP);
    for _ in 0..2 {
        let waiting: Vec<TcpStream> = (0..40).map(|_| exporter.ask("/healthz")).collect();
        let metrics = exporter.ask("/metrics");
        for stream in waiting {
            let health = Answer::read(stream);
            assert_eq!(health.status, "503 Service Unavailable");
            assert!(health.body.starts_with("the broker does not answer: "), "{}", health.body);
        }
        assert_eq!(Answer::read(metrics).body, PLAIN.replace("vmmfd_up 1", "vmmfd_up 0"));
    }
    server.signal(Signal::SIGCONT);
    wait_for("the broker", || exporter.get("/healthz").status == "200 OK");
    assert_eq!(value(&exporter.get("/metrics").body, "vmmfd_up"), 1.0);
    exporter.end().code(0);
    server.signal(Signal::SIGTERM);
    server.end().code(0);
}

#[test]
fn binds_only_the_requested_address() {
    let place = Meeting::host();
    let exporter = Exporter::start(&place, &[]);
    let sockets = fs::read_to_string(format!("/proc/{}/net/tcp", exporter.running.pid())).unwrap();
    let port = format!("{:04X}", exporter.address.port());
    let listening =
        |line: &&str| line.split_whitespace().nth(1).is_some_and(|local| local.ends_with(&format!(":{port}")));
    let of_it: Vec<&str> = sockets.lines().filter(listening).collect();
    assert!(of_it.iter().all(|line| line.contains(" 0100007F:")) && !of_it.is_empty(), "{of_it:?}");
    let other = format!("{}", exporter.address);
    let taken = vmmfd(&place, &["exporter", "--listen", &other, "--json"]).end();
    let value = object(taken.code(5));
    fits("failure", &value);
    assert!(value["error"]["message"].as_str().unwrap().contains(&format!("listen on {other}")), "{value}");
    let json = vmmfd(&place, &["exporter", "--listen", "127.0.0.1:0", "--json", "--timeout", "100ms"]).start();
    wait_for("the line", || json.so_far().contains("http://"));
    let address = json.so_far().split_once("http://").unwrap().1.split_once('/').unwrap().0.parse().unwrap();
    let json = Exporter { running: json, address };
    assert_eq!(json.get("/healthz").status, "503 Service Unavailable");
    let report = object(json.end().code(0));
    fits("exporter", &report);
    assert_eq!((&report["requests"], &report["unanswered"]), (&1.into(), &1.into()));
    exporter.end().code(0);
    vmmfd(&place, &["exporter", "--listen", "localhost"]).end().code(2);
}
