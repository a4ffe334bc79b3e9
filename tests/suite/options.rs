//! Options, environment and machine conditions of the commands, on the host backend and the emulated driver.

#![allow(unsafe_code, reason = "limits that a child sets for itself")]

use std::os::unix::fs::symlink;

use crate::{running::hide_driver, support::prelude::*};

fn host() -> Meeting {
    Meeting::host()
}

#[test]
fn bad_usage_is_a_sentence_and_exit_2() {
    let meeting = host();
    let file = meeting.folder().join("data");
    fs::write(&file, vec![0; 24]).unwrap();
    let file = file.to_str().unwrap();
    for (options, words) in [
        (&["--elements", "1", "--size", "1"][..], "cannot be used with"),
        (&["--device", "gpu0"], "is not a device: write an ordinal"),
        (&["--allow-uid", "root"], "`root` is not a user's number"),
        (&["-v", "-q"], "cannot be used with"),
        (&["stray"], "stray"),
        (&["--order", "F"], "--shape"),
        (&["--from", file, "--round-trip"], "cannot be used with"),
        (&["--seal", "--round-trip"], "cannot be used with"),
        (&["--shape", "0x5"], "between 1 byte and 15.9 EiB"),
        (&["--dtype", "f32", "--size", "6"], "has 4 bytes, but the data has 6 bytes"),
        (&["--from", file, "--dtype", "f32", "--shape", "7"], "has 28 bytes, but the data has 24 bytes"),
        (&["--from", "-"], "`-` is not supported: the size"),
        (&["--from", ""], "an empty name"),
    ] {
        let mut producer = meeting.bare("producer");
        producer.command.args(options);
        producer.end().code(2).says(words);
    }
    for (options, words) in [
        (["--range", "5"], "write its offset and length"),
        (["--range", "0:0"], "no memory"),
        (["--range", "1:18446744073709551615"], "64 bits"),
        (["--range", "x:5"], "is not a size"),
    ] {
        meeting.consumer(&options).end().code(2).says(words);
    }
    let report = meeting.producer(&["stray", "--json"]).end().code(2).json();
    assert_eq!((&report["role"], &report["error"]["kind"]), (&json!("producer"), &json!("usage")));
    assert_eq!((&report["consumers"], &report["verified"]), (&json!([]), &Value::Null));
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
        run.command.args(["--backend", "host", "--timeout", "20s"]);
        run
    };
    let folder = meeting.folder().join("vmmfd");
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
    // Whatever the umask.
    let mut producer = run("producer");
    // SAFETY: umask is a plain system call, safe between fork and exec.
    unsafe {
        producer.command.pre_exec(|| {
            nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o777));
            Ok(())
        });
    }
    let mut producer = producer.start();
    producer.until("shared");
    assert_eq!((mode(&folder), mode(&folder.join("vmmfd.sock"))), (0o700, 0o600));
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
    let missing = run("producer").env("XDG_RUNTIME_DIR", "/nonexistent").end();
    missing.code(5).says("/nonexistent/vmmfd").says("XDG_RUNTIME_DIR");
}

#[test]
fn paths_without_a_socket_are_refused() {
    let meeting = host();
    let name = |length: usize| meeting.folder().join("s".repeat(length - 1 - meeting.folder().as_os_str().len()));
    let run = |name, path: &Path| {
        let mut run = meeting.bare(name);
        run.command.args(["--backend", "host", "--timeout", "1h", "--socket"]).arg(path);
        run
    };
    let missing = meeting.folder().join("no").join("s.sock");
    let taken = meeting.folder().join("file");
    fs::write(&taken, "precious").unwrap();
    for (path, words) in [
        (&*name(108), "at most 107"),
        (&*missing, "hint: create the folder, or use another path"),
        (&*taken, "not a socket"),
        (Path::new(""), "a value is required"),
        (Path::new("/"), "names no file"),
        (Path::new("/dev/null/s.sock"), "/dev/null is not a folder"),
    ] {
        run("producer", path).end().code(2).says(words);
    }
    assert_eq!(fs::read_to_string(&taken).unwrap(), "precious");
    // Connecting fails immediately too, without a wait.
    for path in [&*taken, meeting.folder()] {
        run("consumer", path).end().code(2).says("exists and is not a socket");
    }
    let longest = name(107);
    assert_eq!(longest.as_os_str().len(), 107);
    let producer = run("producer", &longest).start();
    run("consumer", &longest).end().code(0);
    producer.end().code(0);
    assert_eq!(meeting.files(), ["file"]);
}

#[test]
fn only_stale_sockets_are_replaced() {
    let meeting = Meeting::fake();
    let first = meeting.listening(&["--consumers", "2"]);
    let log = meeting.folder().join("calls");
    let second = meeting.producer(&[]).env("FAKECUDA_LOG", &log).end();
    second.code(5).says(&format!("already served by pid {}", first.pid()));
    assert!(!log.exists(), "{}", fs::read_to_string(&log).unwrap());
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

const NO_GPU: &str = "(no GPU: see vmmfd doctor)\n";

#[test]
fn only_auto_falls_back_without_a_driver() {
    let meeting = host();
    let run = |name, backend: &str, options: &[&str]| {
        let mut run = meeting.bare(name).env("LD_LIBRARY_PATH", meeting.folder());
        run.command.args(["--backend", backend, "--socket"]).arg(meeting.socket()).args(options);
        run
    };
    hide_driver(meeting.folder());
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
    let meeting = Meeting::fake();
    let auto = |setting: &str, value: &str| {
        let mut run = meeting.bare("producer").env(setting, value);
        run.command.args(["--timeout", "100ms", "--socket"]).arg(meeting.socket());
        run.end()
    };
    // No consumer connects: the error shows how far the producer got.
    assert!(auto("FAKECUDA_FAIL", "cuInit:1:100").code(4).stdout.contains(NO_GPU));
    for (setting, value, code, words) in [
        ("FAKECUDA_FAIL", "cuInit:1:999", 5, "cuInit failed: CUDA_ERROR_UNKNOWN (999)"),
        ("FAKECUDA_FAIL", "cuInit:1:34", 3, "stub library"),
        ("FAKECUDA_FAIL", "cuMemCreate:1:2", 5, "cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY"),
        ("FAKECUDA_FAIL", "cuMemExportToShareableHandle:1:801", 3, "cuMemExportToShareableHandle failed"),
        ("FAKECUDA_FAIL", "cuDevicePrimaryCtxRetain:1:2", 5, "cuDevicePrimaryCtxRetain failed"),
        ("FAKECUDA_ATTRIBUTE", "102:0", 3, "virtual memory management"),
        ("FAKECUDA_ATTRIBUTE", "103:0", 3, "POSIX file descriptor"),
    ] {
        auto(setting, value).code(code).says(words);
    }
}

#[test]
fn driver_failure_reaches_the_peer() {
    for (fault, words) in [
        ("cuMemImportFromShareableHandle:1:2", "cuMemImportFromShareableHandle failed"),
        ("cuMemAddressReserve:1:1", "cuMemAddressReserve failed"),
        ("cuMemSetAccess:1:999", "cuMemSetAccess failed"),
        ("cuMemcpyDtoH_v2:1:700", "cuMemcpyDtoH_v2 failed"),
    ] {
        let meeting = Meeting::fake();
        let producer = meeting.listening(&[]);
        meeting.consumer(&[]).env("FAKECUDA_FAIL", fault).end().code(5).says(words);
        producer.end().code(4).says(words);
    }
    // The second consumer connects while the producer fills the first slices.
    for (options, slow, fault, words) in [
        (["--round-trip", "--size", "4K"], "", "cuMemcpyDtoH_v2:1:700", "cuMemcpyDtoH_v2 failed"),
        (["--size", "32M", "-q"], "cuMemcpyHtoD_v2:500", "cuMemcpyHtoD_v2:3:700", "could not fill the buffer"),
    ] {
        let meeting = Meeting::fake();
        let producer = meeting.producer(&options).env("FAKECUDA_SLOW", slow).env("FAKECUDA_FAIL", fault).start();
        meeting.consumer(&[]).end().code(4).says(words);
        producer.end().code(5).says(&format!("{} failed", fault.split(':').next().unwrap()));
    }
}

#[test]
fn only_a_full_disk_fails_the_output() {
    let meeting = host();
    let full = || File::options().write(true).open("/dev/full").unwrap();
    let producer = meeting.listening(&["--consumers", "3"]);
    let (reader, writer) = io::pipe().unwrap();
    drop(reader);
    meeting.consumer(&[]).stdout(Stdio::from(writer)).end().code(0);
    for option in ["--json", "-v"] {
        meeting.consumer(&[option]).stdout(full()).end().code(5).says("cannot write to standard output");
    }
    producer.end().code(0);
    // A mismatch comes first.
    let producer = meeting.producer(&["--corrupt"]).stdout(full()).start();
    meeting.consumer(&[]).stdout(full()).end().code(1);
    producer.end().code(1);
    // Logs that can't be written are lost, and nothing else.
    let mut producer = meeting.producer(&["-v", "--json"]);
    producer.command.stderr(full());
    let producer = producer.start();
    let mut consumer = meeting.consumer(&["-v", "--json"]);
    consumer.command.stderr(full());
    assert_eq!(consumer.end().code(0).json()["verified"], true);
    assert_eq!(producer.end().code(0).json()["verified"], true);
    meeting
        .producer(&["--size", "64MiB"])
        .with_limit(nix::sys::resource::Resource::RLIMIT_FSIZE, 1 << 20)
        .end()
        .code(5)
        .says("File too large");
}

#[test]
fn stopped_reader_blocks_no_signal() {
    let meeting = host();
    for option in ["--json", "-v"] {
        let (reader, mut writer) = io::pipe().unwrap();
        let size = nix::fcntl::fcntl(&writer, nix::fcntl::FcntlArg::F_SETPIPE_SZ(4096)).unwrap();
        writer.write_all(&vec![b' '; size as usize]).unwrap();
        let running = meeting.producer(&[option]).stdout(Stdio::from(writer)).start();
        running.until_it_handles_signals();
        thread::sleep(Duration::from_millis(200));
        running.signal(Signal::SIGTERM);
        let ended = running.end();
        ended.code(143);
        drop(reader);
    }
}

#[test]
fn hanging_driver_blocks_no_signal() {
    let meeting = Meeting::fake();
    let log = meeting.folder().join("calls");
    let run = meeting.producer(&[]).env("FAKECUDA_SLOW", format!("cuMemCreate:{HANGS}")).env("FAKECUDA_LOG", &log);
    let running = run.start();
    wait_for("the call", || fs::read_to_string(&log).is_ok_and(|log| log.contains("cuMemCreate")));
    running.signal(Signal::SIGINT);
    running.end().code(130).says("error: interrupted");
}
