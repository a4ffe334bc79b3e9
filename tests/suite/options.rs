//! Options, environment and machine conditions of the commands, on the host backend and the emulated driver.
//!
//! One file of more than 500 lines: a test for each option.

#![allow(unsafe_code, reason = "limits that a child sets for itself")]

use std::{
    fs::{self, File},
    io::Write,
    os::unix::{
        fs::{MetadataExt, PermissionsExt, symlink},
        net::UnixListener,
        process::CommandExt,
    },
    process::Stdio,
    time::Duration,
};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use vmmfd::{
    driver::{Backend, Choice, open},
    session::{
        Config,
        handoff::{Consumer, Request},
    },
};
use vmmfd_cli::check::DataVerifier;

use crate::running::{HANGS, Meeting, On, wait_for};

fn host() -> Meeting {
    Meeting::new(On::Host)
}

#[test]
fn bad_usage_is_a_sentence_and_exit_2() {
    let meeting = host();
    for (options, words) in [
        (&["--size", "64MB"][..], "write 64MiB"),
        (&["--size", "0"], "at least 1 byte"),
        (&["--size", "-1"], "-1"),
        (&["--size", "16EiB"], "16EiB"),
        (&["--size", "lots"], "`lots` is not a size"),
        (&["--elements", "0"], "at least 1"),
        (&["--elements", "4611686018427387904"], "write fewer"),
        (&["--elements", "1", "--size", "1"], "cannot be used with"),
        (&["--seed", "0x1ffffffff"], "32-bit"),
        (&["--consumers", "-1"], "-1"),
        (&["--timeout", "30"], "30s"),
        (&["--timeout", "0s"], "is no time: write more than zero"),
        (&["--device", "gpu0"], "is not a device: write an ordinal"),
        (&["--backend", "metal"], "[possible values: auto, cuda, host]"),
        (&["--allow-uid", "root"], "root"),
        (&["--frobnicate"], "--frobnicate"),
        (&["-v", "-q"], "cannot be used with"),
        (&["stray"], "stray"),
    ] {
        let mut plain = meeting.bare("producer");
        plain.command.args(options);
        let ended = plain.end();
        assert_eq!(ended.code(2).says(words).stdout, "", "{options:?}");

        let mut json = meeting.bare("producer");
        json.command.args(options).arg("--json");
        let report = json.end().code(2).json();
        assert_eq!((&report["role"], &report["error"]["kind"]), (&json!("producer"), &json!("usage")), "{options:?}");
        let message = report["error"]["message"].as_str().unwrap();
        assert!(message.contains(words) && !message.contains('\n'), "{options:?}: {message}");
        assert_eq!((&report["consumers"], &report["verified"]), (&json!([]), &Value::Null));
    }
    meeting.consumer(&["--access", "wo"]).end().code(2).says("[possible values: ro, rw]");
}

#[test]
fn help_states_defaults_and_exit_codes() {
    for (name, words) in [
        ("producer", ["default: 1MiB", "default: 2m", "$XDG_RUNTIME_DIR/vmmfd/vmmfd.sock", "VMMFD_BACKEND", "143"]),
        ("consumer", ["default: rw in a round trip, else ro", "default: 2m", "vmmfd-UID", "VMMFD_SOCKET", "130"]),
    ] {
        let mut run = host().bare(name);
        run.command.arg("--help");
        let ended = run.end();
        // The help is wrapped to the terminal width, so a break may be at any space.
        let help = ended.code(0).stdout.split_whitespace().collect::<Vec<_>>().join(" ");
        for word in words {
            assert!(help.contains(word), "no `{word}` in {help}");
        }
        for code in
            ["0 verified", "1 the data did not verify", "2 bad usage", "3 not supported", "4 the peer", "5 the driver"]
        {
            assert!(help.contains(code), "no `{code}` in {help}");
        }
    }
}

#[test]
fn options_come_from_the_environment_too() {
    let meeting = host();
    let run = |name| meeting.bare(name).env("VMMFD_SOCKET", meeting.socket()).env("VMMFD_BACKEND", "host");
    let producer = run("producer").start();
    let consumer = run("consumer").end();
    // The backend was selected explicitly, so no notice is printed.
    assert_eq!(consumer.code(0).stderr, "");
    producer.end().code(0);
}

#[test]
fn empty_variables_are_unset() {
    let meeting = host();
    let run = |name, arguments: &[&str]| {
        let mut run = meeting.bare(name).env("XDG_RUNTIME_DIR", meeting.folder());
        for variable in ["VMMFD_SOCKET", "VMMFD_BROKER_SOCKET", "VMMFD_BACKEND"] {
            run = run.env(variable, "");
        }
        run.command.args(arguments);
        run
    };
    let producer = run("producer", &[]).start();
    run("consumer", &[]).end().code(0);
    producer.end().code(0);
    let own = meeting.folder().join("vmmfd/broker.sock");
    run("vmmfd", &["ls"]).end().code(4).says(own.to_str().unwrap());
}

#[test]
fn default_socket_folder_is_private() {
    let meeting = host();
    let run = |name| {
        let mut run = meeting.bare(name).env("XDG_RUNTIME_DIR", meeting.folder());
        run.command.args(["--backend", "host"]);
        run
    };
    let mut producer = run("producer").start();
    producer.until("shared");
    let folder = meeting.folder().join("vmmfd");
    assert_eq!(fs::metadata(&folder).unwrap().permissions().mode() & 0o7777, 0o700);
    assert!(folder.join("vmmfd.sock").exists());
    run("consumer").end().code(0);
    producer.end().code(0);
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);

    fs::set_permissions(&folder, PermissionsExt::from_mode(0o777)).unwrap();
    run("producer").end().code(5).says("others may write in it");
    fs::remove_dir(&folder).unwrap();
    let elsewhere = meeting.folder().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    symlink(&elsewhere, &folder).unwrap();
    run("producer").end().code(5).says("symbolic link");
    run("consumer").end().code(5).says("symbolic link");
    assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 0);
}

#[test]
fn paths_without_a_socket_are_refused() {
    let meeting = host();
    let long = meeting.folder().join("x".repeat(108 - meeting.folder().as_os_str().len()));
    let missing = meeting.folder().join("no").join("s.sock");
    let taken = meeting.folder().join("file");
    fs::write(&taken, "precious").unwrap();
    for (path, words) in [
        (long.to_str().unwrap(), "at most 107"),
        (missing.to_str().unwrap(), "its folder"),
        (taken.to_str().unwrap(), "not a socket"),
        ("", "a value is required"),
        ("/", "names no file"),
        ("/dev/null/s.sock", "/dev/null is not a folder"),
    ] {
        let mut run = meeting.bare("producer");
        run.command.args(["--backend", "host", "--socket", path]);
        run.end().code(2).says(words);
    }
    assert_eq!(fs::read_to_string(&taken).unwrap(), "precious");
    // Connecting fails immediately too, without a wait.
    for path in [taken.to_str().unwrap(), meeting.folder().to_str().unwrap()] {
        let mut run = meeting.bare("consumer");
        run.command.args(["--backend", "host", "--timeout", "1h", "--socket", path]);
        run.end().code(2).says("exists and is not a socket");
    }
}

#[test]
fn path_of_107_bytes_works() {
    let meeting = host();
    let path = meeting.folder().join("s".repeat(106 - meeting.folder().as_os_str().len()));
    assert_eq!(path.as_os_str().len(), 107);
    let run = |name| {
        let mut run = meeting.bare(name);
        run.command.args(["--backend", "host", "--socket"]).arg(&path);
        run
    };
    let producer = run("producer").start();
    run("consumer").end().code(0);
    producer.end().code(0);
    assert!(meeting.files().is_empty());
}

#[test]
fn only_stale_sockets_are_replaced() {
    let meeting = host();
    let mut first = meeting.producer(&["--consumers", "2"]).start();
    first.until("shared");
    let second = meeting.producer(&[]).end();
    second.code(5).says(&format!("already served by pid {}", first.pid()));
    // The first producer is not affected.
    meeting.consumer(&[]).end().code(0);
    meeting.consumer(&[]).end().code(0);
    first.end().code(0);

    drop(UnixListener::bind(meeting.socket()).unwrap());
    assert!(meeting.socket().exists());
    let producer = meeting.listening(&[]);
    meeting.consumer(&[]).end().code(0);
    producer.end().code(0);

    let other = UnixListener::bind(meeting.socket()).unwrap();
    meeting.producer(&[]).end().code(2).says("another type of socket");
    meeting.consumer(&[]).end().code(2).says("another type of socket");
    drop(other);
}

#[test]
fn only_ones_own_socket_is_removed() {
    let meeting = host();
    let producer = meeting.listening(&["--timeout", "1s"]);
    fs::remove_file(meeting.socket()).unwrap();
    fs::write(meeting.socket(), "somebody else's").unwrap();
    producer.end().code(4);
    assert_eq!(fs::read_to_string(meeting.socket()).unwrap(), "somebody else's");
}

#[test]
fn socket_is_private_by_default() {
    let meeting = host();
    for (options, mode) in [(&[][..], 0o600), (&["--allow-uid", "12345"], 0o666)] {
        let producer = meeting.listening(options);
        assert_eq!(fs::metadata(meeting.socket()).unwrap().mode() & 0o7777, mode);
        meeting.consumer(&[]).end().code(0);
        producer.end().code(0);
    }
}

#[test]
fn nobody_comes_and_the_wait_ends() {
    let meeting = host();
    let waited = meeting.consumer(&["--timeout", "200ms"]).end();
    waited.code(4).says("no producer on");
    assert!(waited.took >= Duration::from_millis(200));
    meeting.producer(&["--timeout", "200ms"]).end().code(4).says("no consumer within 200ms");
    assert!(meeting.files().is_empty());
}

#[test]
fn late_consumer_is_refused() {
    let meeting = host();
    let producer = meeting.listening(&[]);
    let driver = open(Choice::Only(Backend::Host)).unwrap().driver;
    let config = Config::default();
    let mut first = Consumer::connect(&driver, None, &meeting.socket(), &config, &|_| {}).unwrap();
    let object = first.request(&Request::default()).unwrap();
    meeting.consumer(&[]).end().code(4).says("all of them have come");
    let found = first.verify(&object, &mut DataVerifier::new(&|_| {})).unwrap();
    first.report(&object, &found).unwrap();
    // The producer waits until the consumer closes the connection.
    first.close();
    producer.end().code(0);
}

#[test]
fn different_backends_are_refused_by_both() {
    let (gpu, ordinary) = (Meeting::new(On::Fake), host());
    let producer = gpu.producer(&["--json"]).start();
    wait_for("the socket", || gpu.socket().exists());
    let mut consumer = ordinary.bare("consumer");
    consumer.command.args(["--backend", "host", "--json", "--socket"]).arg(gpu.socket());
    let (consumer, producer) = (consumer.end(), producer.end());
    for report in [consumer.code(4).json(), producer.code(4).json()] {
        let message = report["error"]["message"].as_str().unwrap();
        assert!(message.contains("backend cuda") && message.contains("host"), "{message}");
        assert_eq!(report["verified"], Value::Null);
    }
    assert_eq!(producer.json()["consumers"][0]["outcome"], "failed");
}

const NO_GPU: &str = "(no GPU: see vmmfd doctor)\n";

#[test]
fn only_auto_falls_back_without_a_driver() {
    let meeting = host();
    let run = |name, backend: &str, options: &[&str]| {
        let mut run = meeting.bare(name).env("LD_LIBRARY_PATH", meeting.folder());
        run.command.args(["--backend", backend, "--socket"]).arg(meeting.socket()).args(options);
        run
    };
    // Invalid libraries, which the loader finds before this machine's driver.
    for name in ["libcuda.so.1", "libcuda.so"] {
        fs::write(meeting.folder().join(name), "not a library").unwrap();
    }
    for (options, notices) in [(&[][..], 1), (&["-q"], 0), (&["--json"], 0)] {
        let producer = run("producer", "auto", options).start();
        let consumer = run("consumer", "auto", options).end();
        for ended in [&producer.end(), &consumer] {
            assert_eq!((ended.code(0).stdout.matches(NO_GPU).count(), &*ended.stderr), (notices, ""));
            if options.contains(&"--json") {
                let report = ended.json();
                assert_eq!(report["backend"], "host");
                assert!(report["fallback"].as_str().unwrap().contains("libcuda.so.1"), "{report}");
            }
        }
    }
    for name in ["producer", "consumer"] {
        let report = run(name, "cuda", &["--json"]).end().code(3).json();
        assert_eq!((&report["error"]["kind"], &report["backend"]), (&json!("unsupported"), &Value::Null));
    }
}

#[test]
fn only_missing_device_falls_back() {
    let meeting = Meeting::new(On::Fake);
    let auto = |faults: &str| {
        let mut run = meeting.bare("producer").env("FAKECUDA_FAIL", faults);
        run.command.args(["--timeout", "100ms", "--socket"]).arg(meeting.socket());
        run.end()
    };
    // No consumer connects: the error shows how far the producer got.
    assert!(auto("cuInit:1:100").code(4).stdout.contains(NO_GPU));
    auto("cuInit:1:999").code(5).says("cuInit failed: CUDA_ERROR_UNKNOWN (999)");
    auto("cuInit:1:803").code(5).says("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH");
    auto("cuInit:1:34").code(3).says("stub library");
    auto("cuInit:1:4242").code(5).says("(4242)");
    auto("cuMemCreate:1:999").code(5).says("cuMemCreate failed");
    auto("cuMemExportToShareableHandle:1:801").code(3).says("cuMemExportToShareableHandle failed");
    auto("cuDevicePrimaryCtxRetain:1:2").code(5).says("cuDevicePrimaryCtxRetain failed");
}

#[test]
fn unsupported_device_names_missing_features() {
    let meeting = Meeting::new(On::Fake);
    for (attribute, words) in [("102:0", "virtual memory management"), ("103:0", "POSIX file descriptor")] {
        let ended = meeting.producer(&[]).env("FAKECUDA_ATTRIBUTE", attribute).end();
        ended.code(3).says(words).says("fakecuda");
    }
}

#[test]
fn second_device_is_found_by_uuid() {
    let meeting = Meeting::new(On::Fake);
    let two = |run: crate::running::Run| run.env("FAKECUDA_DEVICES", "2");
    let producer = two(meeting.producer(&["--device", "1", "--json", "--consumers", "2"])).start();
    let consumer = two(meeting.consumer(&["--json"])).end();
    assert_eq!(consumer.code(0).json()["device"]["ordinal"], 1);
    // A consumer on the other device can use the same memory.
    let other = two(meeting.consumer(&["--device", "0", "--json"])).end();
    assert_eq!(other.code(0).json()["device"]["ordinal"], 0);
    let report = producer.end().code(0).json();
    assert_eq!(report["device"]["uuid"], consumer.json()["device"]["uuid"]);
    assert_ne!(report["device"]["uuid"], other.json()["device"]["uuid"]);
}

#[test]
fn driver_failure_reaches_the_peer() {
    for (fault, words) in [
        ("cuMemImportFromShareableHandle:1:2", "cuMemImportFromShareableHandle failed"),
        ("cuMemAddressReserve:1:1", "cuMemAddressReserve failed"),
        ("cuMemSetAccess:1:999", "cuMemSetAccess failed"),
        ("cuMemcpyDtoH_v2:1:700", "cuMemcpyDtoH_v2 failed"),
    ] {
        let meeting = Meeting::new(On::Fake);
        let producer = meeting.listening(&[]);
        meeting.consumer(&[]).env("FAKECUDA_FAIL", fault).end().code(5).says(words);
        producer.end().code(4).says(words);
    }
    let meeting = Meeting::new(On::Fake);
    let producer = meeting.producer(&["--round-trip"]).env("FAKECUDA_FAIL", "cuMemcpyDtoH_v2:1:700").start();
    let consumer = meeting.consumer(&[]).end();
    producer.end().code(5).says("cuMemcpyDtoH_v2 failed");
    consumer.code(4).says("cuMemcpyDtoH_v2 failed");
}

#[test]
fn slow_driver_start_can_be_interrupted() {
    let meeting = Meeting::new(On::Fake);
    for name in ["producer", "consumer"] {
        let mut run = meeting.bare(name).env("FAKECUDA_SLOW", format!("cuInit:{HANGS}"));
        run.command.args(["--json", "--socket"]).arg(meeting.socket());
        let running = run.start();
        std::thread::sleep(Duration::from_millis(100));
        running.signal(Signal::SIGINT);
        let ended = running.end();
        assert_eq!(ended.code(130).json()["error"]["kind"], "interrupted");
    }
}

#[test]
fn broken_pipe_succeeds_and_full_disk_fails() {
    let meeting = host();
    let producer = meeting.listening(&["--consumers", "3"]);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    meeting.consumer(&[]).stdout(Stdio::from(writer)).end().code(0);
    for option in ["--json", "-v"] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        meeting.consumer(&[option]).stdout(full).end().code(5).says("cannot write to standard output");
    }
    producer.end().code(0);
}

#[test]
fn unwritable_logs_lose_only_logs() {
    let meeting = host();
    let full = || File::options().write(true).open("/dev/full").unwrap();
    let mut producer = meeting.producer(&["-v", "--json"]);
    producer.command.stderr(full());
    let producer = producer.start();
    let mut consumer = meeting.consumer(&["-v", "--json"]);
    consumer.command.stderr(full());
    assert_eq!(consumer.end().code(0).json()["verified"], true);
    assert_eq!(producer.end().code(0).json()["verified"], true);
}

#[test]
fn stopped_reader_blocks_no_signal() {
    let meeting = host();
    for option in ["--json", "-v"] {
        let (reader, mut writer) = std::io::pipe().unwrap();
        let size = nix::fcntl::fcntl(&writer, nix::fcntl::FcntlArg::F_SETPIPE_SZ(4096)).unwrap();
        writer.write_all(&vec![b' '; size as usize]).unwrap();
        let running = meeting.producer(&[option]).stdout(Stdio::from(writer)).start();
        std::thread::sleep(Duration::from_millis(200));
        running.signal(Signal::SIGTERM);
        let ended = running.end();
        ended.code(143);
        drop(reader);
    }
}

#[test]
fn two_signals_leave_a_complete_report() {
    let meeting = host();
    for _ in 0..10 {
        let running = meeting.producer(&["--json"]).start();
        wait_for("the socket", || meeting.socket().exists());
        running.signal(Signal::SIGINT);
        running.signal(Signal::SIGTERM);
        let ended = running.end();
        assert!(matches!(ended.status.code(), Some(130 | 143)), "{:?}", ended.status);
        assert_eq!(ended.json()["error"]["kind"], "interrupted");
        assert!(meeting.files().is_empty());
    }
}

#[test]
fn unexplained_out_of_memory_has_no_figures() {
    let meeting = Meeting::new(On::Fake);
    let ended = meeting.producer(&[]).env("FAKECUDA_FAIL", "cuMemCreate:1:2").end();
    assert!(!ended.code(5).says("cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY").stderr.contains("are more than"));
}

#[test]
fn full_disk_hides_no_mismatch() {
    let meeting = host();
    let producer =
        meeting.producer(&["--corrupt"]).stdout(File::options().write(true).open("/dev/full").unwrap()).start();
    meeting.consumer(&[]).stdout(File::options().write(true).open("/dev/full").unwrap()).end().code(1);
    producer.end().code(1);
}

#[test]
fn socket_mode_ignores_the_umask() {
    let meeting = host();
    let mut run = meeting.bare("producer").env("XDG_RUNTIME_DIR", meeting.folder());
    run.command.args(["--backend", "host", "--timeout", "20s"]);
    // SAFETY: umask is a plain system call, safe between fork and exec.
    unsafe {
        run.command.pre_exec(|| {
            nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o777));
            Ok(())
        });
    }
    let mut producer = run.start();
    producer.until("shared");
    let folder = meeting.folder().join("vmmfd");
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().mode() & 0o7777;
    assert_eq!((mode(&folder), mode(&folder.join("vmmfd.sock"))), (0o700, 0o600));
    let mut consumer = meeting.bare("consumer").env("XDG_RUNTIME_DIR", meeting.folder());
    consumer.command.args(["--backend", "host"]);
    consumer.end().code(0);
    producer.end().code(0);
}

#[test]
fn file_size_limit_is_an_error() {
    let meeting = host();
    let mut run = meeting.producer(&["--size", "64MiB"]);
    // SAFETY: setrlimit is a plain system call, safe between fork and exec.
    unsafe {
        run.command.pre_exec(|| {
            use nix::sys::resource::{Resource, setrlimit};
            setrlimit(Resource::RLIMIT_FSIZE, 1 << 20, 1 << 20).map_err(std::io::Error::from)
        });
    }
    run.end().code(5).says("File too large");
}

#[test]
fn missing_runtime_folder_is_named() {
    let mut run = host().bare("producer").env("XDG_RUNTIME_DIR", "/nonexistent");
    run.command.args(["--backend", "host"]);
    run.end().code(5).says("/nonexistent/vmmfd").says("XDG_RUNTIME_DIR");
}

#[test]
fn failed_fill_reaches_waiting_consumers() {
    let meeting = Meeting::new(On::Fake);
    // The consumer connects while the producer fills the first slices.
    let producer = meeting
        .producer(&["--size", "32M"])
        .env("FAKECUDA_SLOW", "cuMemcpyHtoD_v2:300")
        .env("FAKECUDA_FAIL", "cuMemcpyHtoD_v2:3:700")
        .start();
    let consumer = meeting.consumer(&[]).end();
    consumer.code(4).says("could not fill the buffer").says("cuMemcpyHtoD_v2 failed");
    producer.end().code(5).says("cuMemcpyHtoD_v2 failed");
}

/// Sixteen slow copies of 2 MiB make a step of 3 s, which exceeds the peer's timeout. `busy` is sent after a third of the sender's timeout.
const SLOW_STEP: [&str; 4] = ["--size", "32M", "--timeout", "2s"];

fn a_slow_consumer_says_so(slow: &str) {
    let meeting = Meeting::new(On::Fake);
    let producer = meeting.listening(&[&SLOW_STEP[..], &["--round-trip"]].concat());
    meeting.consumer(&["--timeout", "2s"]).env("FAKECUDA_SLOW", slow).end().code(0);
    producer.end().code(0);
}

/// The producer fills its buffer for the first consumer, and again for the second.
fn a_slow_producer_says_so(slow: &str) {
    let meeting = Meeting::new(On::Fake);
    let producer = meeting.producer(&[&SLOW_STEP[..], &["--round-trip", "--consumers", "2"]].concat());
    let producer = producer.env("FAKECUDA_SLOW", slow).start();
    for _ in 0..2 {
        meeting.consumer(&["--timeout", "2s"]).end().code(0);
    }
    producer.end().code(0);
}

#[test]
fn slow_consumer_check_sends_busy() {
    a_slow_consumer_says_so("cuMemcpyDtoH_v2:200");
}

#[test]
fn slow_consumer_reply_sends_busy() {
    a_slow_consumer_says_so("cuMemcpyHtoD_v2:200");
}

#[test]
fn slow_producer_check_sends_busy() {
    a_slow_producer_says_so("cuMemcpyDtoH_v2:200");
}

#[test]
fn slow_fill_sends_busy() {
    a_slow_producer_says_so("cuMemcpyHtoD_v2:200");
}

#[test]
fn slow_device_start_is_awaited() {
    let meeting = Meeting::new(On::Fake);
    let producer = meeting.producer(&["--timeout", "2s"]).env("FAKECUDA_DEVICES", "2").start();
    let consumer =
        meeting.consumer(&[]).env("FAKECUDA_DEVICES", "2").env("FAKECUDA_SLOW", "cuDevicePrimaryCtxRetain:3000");
    consumer.end().code(0);
    producer.end().code(0);
}

#[test]
fn busy_socket_is_refused_before_allocation() {
    let meeting = Meeting::new(On::Fake);
    let first = meeting.listening(&[]);
    let log = meeting.folder().join("calls");
    meeting.producer(&[]).env("FAKECUDA_LOG", &log).end().code(5).says("already served");
    assert!(!log.exists(), "{}", fs::read_to_string(&log).unwrap());
    meeting.consumer(&[]).end().code(0);
    first.end().code(0);
}

#[test]
fn logs_come_only_when_asked_for() {
    let meeting = host();
    let producer = meeting.producer(&["-v"]).start();
    let consumer = meeting.consumer(&[]).end();
    assert_eq!(consumer.code(0).stderr, "");
    producer.end().code(0).says("received kind=\"hello\"").says("sent kind=\"segments\" fds=1");
}
