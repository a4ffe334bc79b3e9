//! `vmmfd suspend` and `resume` of engines: those with several ranks, and those with vLLM's HTTP interface. No test needs memory.

use std::{
    ffi::CString,
    net::{TcpListener, TcpStream},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixDatagram},
    },
    sync::mpsc::{Receiver, channel},
};

use crate::support::prelude::*;

/// Runs the commands for this process, which uses the emulated driver.
struct Target {
    place: Meeting,
    subject: Subject,
}

impl Target {
    fn new() -> Self {
        let target = Self { place: Meeting::fake(), subject: Subject::fake() };
        fs::create_dir(target.states()).unwrap();
        target
    }

    fn states(&self) -> PathBuf {
        self.place.folder().join("states")
    }

    fn run(&self, verb: &str, options: &[&str]) -> Run {
        let mut run = self.place.bare("vmmfd").env("FAKECUDA_CHECKPOINTS", self.states());
        run.command.arg(verb).arg(process::id().to_string()).args(options);
        run
    }

    #[track_caller]
    fn is(&self, state: &str) {
        let found = fs::read_to_string(self.states().join(process::id().to_string())).unwrap_or_default();
        assert_eq!(found, state);
    }
}

const RUNNING: &str = "0";
const SUSPENDED: &str = "2";

/// Runs a test in a process of its own, which is the target.
fn alone(test: &str, body: fn(&Target)) {
    let body = || {
        body(&Target::new());
        String::new()
    };
    in_child(&format!("suspend_engines::{test}"), |_| (), body);
}

/// Publishes a text as an engine's rank does.
fn publish(pid: u32, text: &str) -> File {
    let name = CString::new("vmmfd-ranks").unwrap();
    let mut file = File::from(memfd_create(&*name, MFdFlags::MFD_CLOEXEC).unwrap());
    file.write_all(&u64::from(pid).to_ne_bytes()).unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

/// A socket as NCCL's: the whole array of bytes is its name.
fn nccl_socket(rank: u32) -> UnixDatagram {
    let mut name = format!("tmp/nccl-socket-{rank}-{:x}", process::id()).into_bytes();
    name.resize(107, 0);
    UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap()
}

#[test]
fn engines_with_tied_ranks_are_refused() {
    alone("engines_with_tied_ranks_are_refused", |target| {
        let suspended = |options: &[&str]| {
            target.run("suspend", options).end().code(0);
            target.is(SUSPENDED);
            target.run("resume", &[]).end().code(0);
        };
        let refused = |options: &[&str], words: [&str; 2]| {
            target.run("suspend", options).end().code(1).says(words[0]).says(words[1]);
        };
        let first = nccl_socket(0);
        suspended(&[]);
        // Another process's text does not count.
        let other = publish(1, "memory of nobody\nnothing");
        suspended(&[]);
        let further = nccl_socket(1);
        let unknown = [
            "may have mapped memory of other ranks, as it has a communicator of NCCL",
            "Then --ranks-apart suspends it",
        ];
        refused(&["--own-copies"], unknown);
        suspended(&["--ranks-apart"]);
        let apart = publish(process::id(), "");
        suspended(&[]);
        drop(apart);
        let tied = publish(process::id(), "memory of the engine's other ranks (NCCL)\nstart it\x1b[31m with A=1");
        let known = ["it has mapped memory of the engine's other ranks (NCCL)\n", "start it [31m with A=1"];
        refused(&[], known);
        refused(&["--ranks-apart", "--own-copies"], known);
        drop((first, further, other, tied));
        target.is(RUNNING);
    });
}

#[test]
fn refusal_names_the_leases() {
    alone("refusal_names_the_leases", |target| {
        let (broker, driver) = (Broker::start(&target.subject), &target.subject.driver);
        let client = broker.client();
        for name in ["b", "a"] {
            let memory = filled(driver, 1 << 20, None, 1);
            client.put(&Put::new(name).part(PutPart::of("all", &memory).unwrap())).unwrap();
        }
        let objects = ["b", "a"].map(|name| client.get(&Get::new(name)).unwrap().open(driver, None).unwrap());
        let suspend = || target.run("suspend", &[]).env("VMMFD_BROKER_SOCKET", &broker.path);
        let words =
            "it holds or has mapped 2 allocations of other processes (its leases: `a` version 1, `b` version 1)";
        suspend().end().code(1).says(words);
        // Without a broker there are no names.
        target.run("suspend", &[]).env("VMMFD_BROKER_SOCKET", "/none").end().code(1).says("of other processes\n");
        drop(objects);
        suspend().end().code(0);
    });
}

/// An HTTP server that sends these answers in order. Returns its address and the first line of each request.
fn serve(answers: &[&str]) -> (String, Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let (sender, requests) = channel();
    let answers: Vec<String> = answers.iter().map(|&answer| answer.to_owned()).collect();
    thread::spawn(move || {
        // Connections remain open, so the client must read the content length.
        let mut open = Vec::new();
        for answer in answers {
            let (mut stream, _) = listener.accept().unwrap();
            sender.send(head(&mut stream)).unwrap();
            stream.write_all(answer.as_bytes()).unwrap();
            open.push(stream);
        }
        drop(listener);
        thread::sleep(Duration::from_secs(3600));
    });
    (address, requests)
}

fn head(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    let mut chunk = [0; 1000];
    while !bytes.ends_with(b"\r\n\r\n") {
        let read = stream.read(&mut chunk).unwrap();
        bytes.extend_from_slice(&chunk[..read]);
    }
    String::from_utf8(bytes).unwrap().lines().next().unwrap().to_owned()
}

fn answer(status: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

/// Runs a command with a server, which must get exactly these requests. The last answers that no request needs are left out.
#[track_caller]
fn with_server(run: impl FnOnce(&str) -> Ended, answers: &[&str], expected: &[&str]) -> Ended {
    let (address, requests) = serve(answers);
    let ended = run(&address);
    let made: Vec<String> = requests.try_iter().collect();
    let expected: Vec<String> = expected.iter().map(|request| format!("{request} HTTP/1.1")).collect();
    assert_eq!(made, expected);
    ended
}

#[test]
fn engines_sleep_first_and_wake_last() {
    alone("engines_sleep_first_and_wake_last", |target| {
        let (awake, asleep) =
            (answer("200 OK", r#"{"is_sleeping":false}"#), answer("200 OK", r#"{"is_sleeping":true}"#));
        let done = answer("200 OK", "{}");
        let suspend = |options: &'static [&str]| {
            let target = &target;
            move |address: &str| target.run("suspend", &[&["--http", address], options].concat()).end()
        };
        let report = with_server(
            suspend(&["--level", "2", "--json"]),
            &[&awake, &done],
            &["GET /is_sleeping", "POST /sleep?level=2"],
        );
        assert!(report.code(0).json()["engine_seconds"].as_f64().unwrap() >= 0.0);
        target.is(SUSPENDED);
        // It is suspended already: a request would wait for it.
        assert!(with_server(suspend(&["--json"]), &[&awake], &[]).code(0).json()["engine_seconds"].is_null());
        let resume = |address: &str| target.run("resume", &["--json", "--http", &format!("{address}/v/")]).end();
        with_server(resume, &[&answer("500 Internal Server Error", "no memory")], &["POST /v/wake_up"])
            .code(4)
            .says("was answered with status 500: no memory");
        target.is(RUNNING);
        with_server(resume, &[&done], &["POST /v/wake_up"]).code(0);
        let fails = |address: &str| {
            target
                .run("suspend", &["--http", address])
                .env("FAKECUDA_FAIL", "cuCheckpointProcessCheckpoint:1:999")
                .end()
        };
        with_server(fails, &[&awake, &done, &done], &["GET /is_sleeping", "POST /sleep?level=1", "POST /wake_up"])
            .code(5)
            .says("failed: cuCheckpointProcessCheckpoint");
        // It was asleep before the command, and remains so.
        with_server(fails, &[&asleep, &done], &["GET /is_sleeping"]).code(5);
        target.is(RUNNING);
        // An engine with tied ranks is refused before it sleeps.
        let _tied = publish(process::id(), "memory of other ranks");
        with_server(suspend(&[]), &[&awake], &[]).code(1);
    });
}

#[test]
fn engines_without_sleep_are_left_running() {
    alone("engines_without_sleep_are_left_running", |target| {
        let suspend = |address: &str| target.run("suspend", &["--http", address, "--http-timeout", "1s"]).end();
        let awake = answer("200 OK", r#"{"is_sleeping":false}"#);
        let remedy = "VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode --sleep-mode-backend vmmfd";
        let probe = "GET /is_sleeping";
        with_server(suspend, &[&answer("404 Not Found", "{}")], &[probe]).code(4).says("status 404").says(remedy);
        with_server(suspend, &["SSH-2.0-x\r\n\r\n"], &[probe]).code(4).says("something else than HTTP");
        with_server(suspend, &["", &awake], &[probe]).code(4).says("was not answered within 1s").says("--http-timeout");
        let failed = [&*awake, &answer("500 Internal Server Error", "x"), &answer("200 OK", "{}")];
        with_server(suspend, &failed, &[probe, "POST /sleep?level=1", "POST /wake_up"])
            .code(4)
            .says("status 500: x")
            .says(remedy);
        let failed = [&*awake, "", &answer("503 Service Unavailable", "y")];
        with_server(suspend, &failed, &[probe, "POST /sleep?level=1", "POST /wake_up"])
            .code(4)
            .says("failed, so that the engine may be asleep")
            .says("status 503: y")
            .says("not answered within 1s");
        let unused = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        suspend(&format!("http://{unused}")).code(4).says("was refused: no server listens there");
        for wrong in ["https://a:1", "127.0.0.1:8000", "http://", "http://a b", "http://u@a:1"] {
            suspend(wrong).code(2).says("http://127.0.0.1:8000");
        }
        target.run("suspend", &["--level", "2"]).end().code(2).says("--http");
        target.is("");
    });
}

#[test]
fn interrupted_suspend_wakes_the_engine() {
    alone("interrupted_suspend_wakes_the_engine", |target| {
        let (awake, done) = (answer("200 OK", r#"{"is_sleeping":false}"#), answer("200 OK", "{}"));
        let (address, requests) = serve(&[&awake, "", &done]);
        let command = target.run("suspend", &["--http", &address]).start();
        let mut made = Vec::new();
        wait_for("the request to sleep", || {
            made.extend(requests.try_iter());
            made.len() == 2
        });
        command.signal(Signal::SIGINT);
        command.end().code(130);
        assert_eq!(requests.try_iter().collect::<Vec<_>>(), ["POST /wake_up HTTP/1.1"]);
        target.is("");
    });
}
