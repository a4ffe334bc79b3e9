//! Writers that the kernel kills at a chosen byte, with SIGXFSZ at RLIMIT_FSIZE.

use std::{
    env,
    io::Write,
    os::unix::process::ExitStatusExt,
    process::{Command, Output, Stdio},
};

use nix::{
    libc,
    sys::{
        resource::{getrlimit, setrlimit},
        signal::{SigSet, Signal},
    },
};

use super::*;

/// The variable with the byte limit of a child process.
const BYTES: &str = "VMMFD_TEST_CATALOGUE_BYTES";

/// Runs the test `name` in a child process with the memfd as standard input. There, [`limit`] returns `bytes`.
fn child(name: &str, memfd: BorrowedFd<'_>, bytes: u64) -> Output {
    let (_, module) = module_path!().split_once("::").unwrap();
    let mut command = Command::new(env::current_exe().unwrap());
    command.args([&format!("{module}::{name}"), "--exact", "--nocapture"]).env(BYTES, bytes.to_string());
    command.stdin(memfd.try_clone_to_owned().unwrap()).stdout(Stdio::null()).output().unwrap()
}

/// The byte limit of a child process; `None` in the parent.
fn limit() -> Option<u64> {
    env::var(BYTES).ok().map(|bytes| bytes.parse().unwrap())
}

/// Makes the kernel kill this process when it writes beyond `bytes` of a file.
fn kill_beyond(bytes: u64) {
    setrlimit(Resource::RLIMIT_CORE, 0, 0).unwrap();
    let hard = getrlimit(Resource::RLIMIT_FSIZE).unwrap().1;
    setrlimit(Resource::RLIMIT_FSIZE, bytes, hard).unwrap();
}

fn stdin() -> OwnedFd {
    io::stdin().as_fd().try_clone_to_owned().unwrap()
}

fn records() -> Vec<Record> {
    let short = Version { metadata: None, parts: Vec::new(), ..version(1) };
    vec![
        lease(1),
        Record::Published(Box::new(short)),
        Record::Ended { token: token(1), at_ms: 6 },
        Record::Dropped { key: 1 },
    ]
}

#[test]
fn acknowledged_records_survive_killed_writer() {
    const NAME: &str = "acknowledged_records_survive_killed_writer";
    if let Some(bytes) = limit() {
        let mut catalogue = Catalogue::open(stdin()).unwrap().0;
        kill_beyond(bytes);
        for record in records() {
            catalogue.append(&record).unwrap();
            io::stderr().write_all(b"+").unwrap();
        }
        return;
    }
    let end = log(&records()).length;
    let mut torn = 0;
    for bytes in HEADER as u64..=end {
        let catalogue = new();
        let child = child(NAME, catalogue.as_fd(), bytes);
        let killed = if bytes < end { Some(libc::SIGXFSZ) } else { None };
        assert_eq!(child.status.signal(), killed, "of {bytes} bytes: {child:?}");
        assert!(child.stderr.iter().all(|&byte| byte == b'+'), "{child:?}");
        let acknowledged = child.stderr.len();

        assert_eq!(bytes_of(catalogue.as_fd()).len() as u64, bytes, "killed at another byte");
        let fd = catalogue.as_fd().try_clone_to_owned().unwrap();
        let (mut again, found) = Catalogue::open(fd).unwrap();
        torn += u32::from(again.length < bytes);
        assert!(found == records()[..acknowledged], "after {bytes} bytes: {acknowledged} of {found:?}");
        again.append(&lease(2)).unwrap();
        assert_eq!(read(again.as_fd()), [&records()[..acknowledged], &[lease(2)]].concat());
    }
    // All lengths except the ends of the header and of the four records.
    assert_eq!(u64::from(torn), end - HEADER as u64 + 1 - 5);
}

#[test]
fn unfinished_compaction_is_not_a_log() {
    const NAME: &str = "unfinished_compaction_is_not_a_log";
    if let Some(bytes) = limit() {
        let mut old = new();
        old.limit = u64::MAX;
        kill_beyond(bytes);
        compact(&mut old, stdin(), records()).unwrap();
        return;
    }
    let end = log(&records()).length;
    for bytes in 0..=end {
        let memfd = memfd_of(&[]);
        let child = child(NAME, memfd.as_fd(), bytes);
        let opened = Catalogue::open(memfd);
        if bytes < end {
            assert_eq!(child.status.signal(), Some(libc::SIGXFSZ), "of {bytes} bytes: {child:?}");
            assert!(matches!(opened, Err(Unreadable::Foreign { .. })), "after {bytes} bytes: {opened:?}");
        } else {
            assert!(child.status.success(), "{child:?}");
            assert_eq!(opened.unwrap().1, records());
        }
    }
}

#[test]
fn failed_write_leaves_log_unchanged() {
    const NAME: &str = "failed_write_leaves_log_unchanged";
    if let Some(bytes) = limit() {
        // With the signal blocked, the write fails with EFBIG.
        let blocked = SigSet::from_iter([Signal::SIGXFSZ]);
        blocked.thread_block().unwrap();
        let mut catalogue = Catalogue::open(stdin()).unwrap().0;
        kill_beyond(bytes);
        catalogue.append(&lease(1)).unwrap();
        let before = bytes_of(catalogue.as_fd());
        let error = catalogue.append(&Record::Published(Box::new(version(1)))).unwrap_err();
        assert!(matches!(error, CatalogueError::System { action: "write", .. }), "{error:?}");
        assert_eq!(bytes_of(catalogue.as_fd()), before);
        catalogue.append(&Record::Dropped { key: 1 }).unwrap();
        return;
    }
    let catalogue = new();
    let child = child(NAME, catalogue.as_fd(), 500);
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stderr));
    assert_eq!(read(catalogue.as_fd()), [lease(1), Record::Dropped { key: 1 }]);
}
