//! `vmmfd exporter`, asked over plain HTTP.

use std::{
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::net::UnixListener,
};

use nix::unistd::geteuid;
use vmmfd::broker::ClaimOf;
use yaml_rust2::YamlLoader;

use crate::{running::binary, support::prelude::*};

/// The response without a broker.
const DOWN: &str = "# HELP vmmfd_up Whether the broker answers\n# TYPE vmmfd_up gauge\nvmmfd_up 0\n";

struct Exporter {
    running: Running,
    address: SocketAddr,
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

    fn of(running: Running) -> Self {
        wait_for("the line", || running.so_far().contains("/metrics"));
        let address = running.so_far().split_once("http://").unwrap().1.split_once('/').unwrap().0.parse().unwrap();
        Self { running, address }
    }

    /// Sends the first lines of a request. Returns the head and the body of the response.
    fn ask(&self, lines: &str) -> (String, String) {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(600))).unwrap();
        write!(stream, "{lines}\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text:?}"));
        (format!("{head}\r\n"), body.to_owned())
    }

    fn metrics(&self) -> String {
        let (head, body) = self.ask("GET /metrics?whatever=1 HTTP/1.1");
        let kind = "Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n";
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains(kind), "{head}");
        body
    }

    #[track_caller]
    fn is_healthy(&self) -> bool {
        let (head, body) = self.ask("GET /healthz HTTP/1.1");
        let healthy = head.starts_with("HTTP/1.1 200 OK\r\n") && body == "the broker answers\n";
        let unhealthy = head.starts_with("HTTP/1.1 503 ") && body.starts_with("the broker does not answer: ");
        assert!(healthy != unhealthy && body.lines().count() == 1, "{head}{body}");
        healthy
    }

    fn end(self) -> Ended {
        self.running.signal(Signal::SIGTERM);
        self.running.end()
    }
}

#[track_caller]
fn value(body: &str, metric: &str) -> f64 {
    let line = body.lines().find_map(|line| line.strip_prefix(metric)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {metric} in {body}")).parse().unwrap()
}

#[test]
fn passed_socket_is_served() {
    let place = Meeting::host();
    let with_socket = |socket| {
        let mut shell = Command::new("sh");
        shell.args(["-c", "LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" exporter 3<&0 </dev/null"]).arg(binary("vmmfd"));
        let mut run = place.bare("vmmfd").instead(shell);
        run.command.env("VMMFD_BROKER_SOCKET", place.socket()).stdin::<OwnedFd>(socket);
        run
    };
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    let exporter = Exporter::of(with_socket(socket.into()).start());
    assert_eq!(exporter.address, address);
    assert_eq!(exporter.metrics(), DOWN);
    exporter.end().code(0);
    let unix = UnixListener::bind(place.folder().join("unix")).unwrap();
    with_socket(unix.into()).end().code(5).says("use the listening socket of LISTEN_FDS");
}

#[test]
fn next_broker_is_found() {
    let place = Meeting::host();
    let exporter = Exporter::start(&place, &["--timeout", "500ms"]);
    for _ in 0..2 {
        assert_eq!((exporter.metrics().as_str(), exporter.is_healthy()), (DOWN, false));
        let mut server = vmmfd(&place, &["serve", "--no-keeper"]).start();
        server.until("listening");
        wait_for("the broker's figures", || value(&exporter.metrics(), "vmmfd_up") == 1.0);
        wait_for("the health", || exporter.is_healthy());
        server.signal(Signal::SIGSTOP);
        assert_eq!((exporter.metrics().as_str(), exporter.is_healthy()), (DOWN, false));
        server.signal(Signal::SIGCONT);
        server.signal(Signal::SIGTERM);
        server.end().code(0);
    }
    let ended = exporter.end();
    // One line for each change. It was absent, and stopped twice.
    for (line, count) in [("the broker does not answer", 3), ("the broker answers again", 2)] {
        assert_eq!(ended.code(0).stderr.matches(line).count(), count, "{}", ended.stderr);
    }
}

#[test]
fn figures_match_what_the_broker_did() {
    let place = Meeting::host();
    let mut server = vmmfd(&place, &["serve", "--quota", "objects=4"]).start();
    server.until("listening");
    let exporter = Exporter::start(&place, &[]);
    let file = place.folder().join("input");
    fs::write(&file, vec![7; 100_000]).unwrap();
    for name in ["a", "b"] {
        vmmfd(&place, &["put", name, "--backend", "host", "--from", file.to_str().unwrap()]).end().code(0);
    }
    vmmfd(&place, &["get", "nothing", "--backend", "host"]).end().code(1);
    let client = Client::connect(&place.socket(), &Config::default()).unwrap();
    let claims = ["x", "y"].map(|name| client.get_or_claim(&Get::new(name), &ClaimOf::whole()).unwrap());
    let body = exporter.metrics();
    let uid = geteuid();
    for (metric, want) in [
        ("vmmfd_up", 1.0),
        ("vmmfd_objects", 2.0),
        (&format!("vmmfd_user_objects{{uid=\"{uid}\"}}"), 2.0),
        (&format!("vmmfd_user_claims{{uid=\"{uid}\"}}"), 2.0),
        ("vmmfd_restarts_total", 0.0),
        ("vmmfd_requests_total{verb=\"put\",outcome=\"ok\"}", 2.0),
        ("vmmfd_requests_total{verb=\"get\",outcome=\"absent\"}", 1.0),
        ("vmmfd_request_seconds_count{verb=\"put\"}", 2.0),
        ("vmmfd_request_seconds_bucket{verb=\"put\",le=\"+Inf\"}", 2.0),
        (&format!("vmmfd_build_info{{version=\"{}\"}}", env!("CARGO_PKG_VERSION")), 1.0),
        ("vmmfd_store_info{kind=\"keeper\"}", 1.0),
        ("vmmfd_quota_objects", 4.0),
        ("vmmfd_quota_leases", 100_000.0),
    ] {
        assert_eq!(value(&body, metric), want, "{metric}");
    }
    assert!(value(&body, "vmmfd_request_seconds_sum{verb=\"put\"}") > 0.0);
    assert!(value(&body, "vmmfd_start_time_seconds") > 1.7e9);
    let claimed = body.lines().find(|line| line.starts_with("vmmfd_claimed_bytes{device=\"HOST-")).unwrap();
    assert!(claimed.contains(&format!("uid=\"{uid}\"}} ")), "{claimed}");
    drop(claims);
    assert!(!body.contains("vmmfd_total_quota_bytes"), "a limit that does not exist has no metric: {body}");
    exporter.end().code(0);
}

fn metrics_of(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("vmmfd_")).collect()
}

#[test]
fn files_and_page_use_served_metrics() {
    let place = Meeting::host();
    let limits = "bytes=1TiB,device-bytes=1TiB,objects=9,leases=9,connections=9";
    let mut server = vmmfd(&place, &["serve", "--quota", limits, "--total-quota", limits]).start();
    server.until("listening");
    let exporter = Exporter::start(&place, &[]);
    // The second scrape has the figures of the first.
    exporter.metrics();
    let body = exporter.metrics();
    exporter.end().code(0);
    let read = |name| fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name)).unwrap();
    let page = read("docs/operate.md");
    let table = page.split_once("| Metric |").unwrap().1.split_once("\n\n").unwrap().0;
    let families = body.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
    assert_eq!(metrics_of(table), families.collect());

    let mut queries = Vec::new();
    let titles: Vec<String> = page.lines().map(|line| line.to_lowercase().replace(' ', "-")).collect();
    let file = YamlLoader::load_from_str(&read("scripts/deploy/prometheus/rules.yml")).unwrap().remove(0);
    for alert in file["groups"].as_vec().unwrap().iter().flat_map(|group| group["rules"].as_vec().unwrap()) {
        queries.push(alert["expr"].as_str().unwrap().to_owned());
        let section = alert["annotations"]["runbook"].as_str().unwrap().strip_prefix("docs/operate.md#").unwrap();
        let is_title = |line: &String| line.trim_start_matches('#').strip_prefix('-') == Some(section);
        assert!(titles.iter().any(is_title), "docs/operate.md has no section {section}");
    }
    let board: Value = serde_json::from_str(&read("scripts/deploy/grafana/vmmfd.json")).unwrap();
    let targets = board["panels"].as_array().unwrap().iter().flat_map(|panel| panel["targets"].as_array().unwrap());
    queries.extend(targets.map(|target| target["expr"].as_str().unwrap().to_owned()));
    assert!(queries.len() > 10);
    for query in &queries {
        let named = metrics_of(query);
        assert!(!named.is_empty() && named.is_subset(&metrics_of(&body)), "{query}");
    }
}

#[test]
fn other_requests_have_other_answers() {
    let place = Meeting::host();
    let exporter = Exporter::start(&place, &["--timeout", "100ms", "--json"]);
    let mut silent = TcpStream::connect(exporter.address).unwrap();
    let long = format!("GET /{} HTTP/1.1", "x".repeat(9000));
    let headers = "GET /metrics HTTP/1.1\r\n".to_owned() + &"a: b\r\n".repeat(65);
    for (request, status) in [
        ("GET / HTTP/1.1", 404),
        ("HEAD / HTTP/1.1", 404),
        ("POST /metrics HTTP/1.1", 405),
        ("nonsense", 400),
        (long.as_str(), 431),
        (&long.replace("GET", "HEAD"), 431),
        (headers.trim_end(), 431),
    ] {
        let (head, body) = exporter.ask(request);
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{request}: {head}");
        assert_eq!(head.contains("\r\nAllow: GET, HEAD\r\n"), status == 405, "{head}");
        assert_eq!(body.is_empty(), request.starts_with("HEAD"), "{request}: {body}");
    }
    let (head, body) = exporter.ask("HEAD /metrics HTTP/1.0");
    assert!(head.contains(&format!("Content-Length: {}\r\n", DOWN.len())) && body.is_empty(), "{head}{body}");
    silent.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    assert_eq!(silent.read(&mut [0]).unwrap(), 0);
    let mut trickling = TcpStream::connect(exporter.address).unwrap();
    // Each byte comes in time, and the request does not.
    let is_disconnected = (0..500).any(|_| {
        thread::sleep(Duration::from_millis(20));
        trickling.write_all(b"G").is_err()
    });
    assert!(is_disconnected);
    let other = exporter.address.to_string();
    vmmfd(&place, &["exporter", "--listen", &other]).end().code(5).says(&format!("listen on {other}"));
    vmmfd(&place, &["exporter", "--listen", "localhost"]).end().code(2);
    exporter.end().code(0).json();
}
