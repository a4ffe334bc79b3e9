//! `vmmfd exporter`, asked over plain HTTP.

use std::net::{SocketAddr, TcpListener, TcpStream};

use nix::unistd::geteuid;
use yaml_rust2::YamlLoader;

use crate::support::prelude::*;

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

    /// Sends the first lines of a request. Returns the response.
    fn ask(&self, lines: &str) -> String {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(600))).unwrap();
        write!(stream, "{lines}\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }

    fn metrics(&self) -> String {
        let text = self.ask("GET /metrics?whatever=1 HTTP/1.1");
        assert!(
            text.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"),
            "{text}"
        );
        text.split_once("\r\n\r\n").unwrap().1.to_owned()
    }

    fn is_healthy(&self) -> bool {
        let text = self.ask("GET /healthz HTTP/1.1");
        let is_healthy = text.starts_with("HTTP/1.1 200 OK\r\n");
        assert!(is_healthy || text.contains(" 503 ") && text.contains("\nthe broker does not answer: "), "{text}");
        is_healthy
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
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    let mut shell = Command::new("sh");
    shell.args(["-c", "LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" exporter 3<&0 </dev/null"]).arg(binary("vmmfd"));
    let mut run = place.bare("vmmfd").instead(shell);
    run.command.env("VMMFD_BROKER_SOCKET", place.socket()).stdin::<OwnedFd>(socket.into());
    let exporter = Exporter::of(run.start());
    assert_eq!((exporter.address, exporter.metrics().as_str()), (address, DOWN));
    exporter.end().code(0);
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

fn metrics_of(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("vmmfd_")).collect()
}

#[test]
fn figures_match_broker_and_files() {
    let place = Meeting::host();
    let limits = "bytes=1TiB,device-bytes=1TiB,objects=9,leases=9,connections=9";
    let mut server = vmmfd(&place, &["serve", "--quota", limits, "--total-quota", limits]).start();
    server.until("listening");
    let exporter = Exporter::start(&place, &[]);
    let file = place.folder().join("input");
    fs::write(&file, vec![7; 100_000]).unwrap();
    vmmfd(&place, &["put", "a", "--backend", "host", "--from", file.to_str().unwrap()]).end().code(0);
    vmmfd(&place, &["get", "nothing", "--backend", "host"]).end().code(1);
    let client = Client::connect(&place.socket(), &Config::default()).unwrap();
    let claim = client.get_or_claim(&Get::new("x"), &ClaimOf::whole()).unwrap();
    let body = exporter.metrics();
    drop(claim);
    exporter.end().code(0);
    let uid = geteuid();
    for (metric, want) in [
        ("vmmfd_objects", 1.0),
        (&format!("vmmfd_user_objects{{uid=\"{uid}\"}}"), 1.0),
        (&format!("vmmfd_user_claims{{uid=\"{uid}\"}}"), 1.0),
        ("vmmfd_restarts_total", 0.0),
        ("vmmfd_requests_total{verb=\"put\",outcome=\"ok\"}", 1.0),
        ("vmmfd_requests_total{verb=\"get\",outcome=\"absent\"}", 1.0),
        ("vmmfd_request_seconds_bucket{verb=\"put\",le=\"+Inf\"}", 1.0),
        (&format!("vmmfd_build_info{{version=\"{}\"}}", env!("CARGO_PKG_VERSION")), 1.0),
        ("vmmfd_store_info{kind=\"keeper\"}", 1.0),
        ("vmmfd_quota_objects", 9.0),
    ] {
        assert_eq!(value(&body, metric), want, "{metric}");
    }
    assert!(value(&body, "vmmfd_request_seconds_sum{verb=\"put\"}") > 0.0);
    assert!(value(&body, "vmmfd_start_time_seconds") > 1.7e9);
    assert!(body.contains("\nvmmfd_claimed_bytes{device=\"HOST-"), "{body}");

    let read = |name| fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name)).unwrap();
    let page = read("docs/operate.md");
    let table = page.split_once("| Metric |").unwrap().1.split_once("\n\n").unwrap().0;
    let families = body.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
    assert_eq!(metrics_of(table), families.collect());
    let titles = page.to_lowercase().replace(' ', "-");
    let rules = YamlLoader::load_from_str(&read("scripts/deploy/prometheus/rules.yml")).unwrap().remove(0);
    let mut queries = Vec::new();
    for alert in rules["groups"].as_vec().unwrap().iter().flat_map(|group| group["rules"].as_vec().unwrap()) {
        queries.push(alert["expr"].as_str().unwrap().to_owned());
        let section = alert["annotations"]["runbook"].as_str().unwrap().strip_prefix("docs/operate.md#").unwrap();
        assert!(titles.contains(&format!("#-{section}\n")), "docs/operate.md has no section {section}");
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
    let mut trickling = TcpStream::connect(exporter.address).unwrap();
    let long = format!("GET /{} HTTP/1.1", "x".repeat(9000));
    for (request, status) in [("GET / HTTP/1.1", 404), ("POST /metrics HTTP/1.1", 405), ("nonsense", 400), (&long, 400)]
    {
        let text = exporter.ask(request);
        assert!(text.starts_with(&format!("HTTP/1.1 {status} ")), "{request}: {text}");
    }
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
