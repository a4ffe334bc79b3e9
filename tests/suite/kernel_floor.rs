//! On Linux 4.18, the kernel of RHEL 8: a seccomp filter refuses every newer system call, seal, flag and option with the error of an older
//! kernel.

#![allow(unsafe_code, reason = "the calls that are refused are made as the C library has them")]

use nix::libc::{self, sock_filter};

use crate::{
    seccomp::{self, ALLOW, NUMBER, Test, load, refuse, require, rule, unless},
    support::prelude::*,
};

/// The first system call after Linux 4.18, on every architecture (Linux 5.1).
const FIRST_NEWER: u32 = libc::SYS_pidfd_send_signal as u32;

/// The last consecutive option of prctl(2) in Linux 4.18, and an older option with a larger number.
const LAST_PRCTL: u32 = 53;
const PR_SET_PTRACER: u32 = 0x5961_6d61;

/// The last option of getsockopt(2) at `SOL_SOCKET` in Linux 4.18: SO_ZEROCOPY.
const LAST_SOCKET_OPTION: u32 = 60;

/// The last consecutive advice of madvise(2) in Linux 4.18, MADV_KEEPONFORK, and the first advice for memory failures.
const LAST_ADVICE: u32 = 19;
const FIRST_POISON: u32 = 100;

/// F_SEAL_FUTURE_WRITE (5.1) and F_SEAL_EXEC (6.3).
const NEWER_SEALS: u32 = 0x10 | 0x20;

const ADD_SEALS: u32 = libc::F_ADD_SEALS as u32;
const SOCKET_LEVEL: u32 = libc::SOL_SOCKET as u32;

fn program() -> Vec<sock_filter> {
    use libc::{BPF_JEQ, BPF_JGE, BPF_JGT, BPF_JSET, EINVAL, ENOPROTOOPT, ENOSYS};
    let newer_option: &[Test] = &[(1, require, BPF_JEQ, SOCKET_LEVEL), (2, require, BPF_JGT, LAST_SOCKET_OPTION)];
    let rules = [
        rule(libc::SYS_memfd_create, &[(1, require, BPF_JSET, libc::MFD_NOEXEC_SEAL | libc::MFD_EXEC)], EINVAL),
        rule(libc::SYS_fcntl, &[(1, require, BPF_JEQ, ADD_SEALS), (2, require, BPF_JSET, NEWER_SEALS)], EINVAL),
        rule(libc::SYS_getsockopt, newer_option, ENOPROTOOPT),
        rule(libc::SYS_setsockopt, newer_option, ENOPROTOOPT),
        rule(libc::SYS_prctl, &[(0, require, BPF_JGT, LAST_PRCTL), (0, unless, BPF_JEQ, PR_SET_PTRACER)], EINVAL),
        rule(libc::SYS_madvise, &[(2, require, BPF_JGT, LAST_ADVICE), (2, unless, BPF_JGE, FIRST_POISON)], EINVAL),
    ];
    let newer = [load(NUMBER), require(BPF_JGE, FIRST_NEWER, 1), refuse(ENOSYS)];
    newer.into_iter().chain(rules.into_iter().flatten()).chain([ALLOW]).collect()
}

fn on_linux_4_18(test: impl FnOnce() + Send + 'static) {
    seccomp::under(program(), test);
}

#[test]
fn the_commands_run() {
    for on in [On::Host, On::Fake] {
        on_linux_4_18(move || {
            let meeting = Meeting::new(on);
            let (from, to) = (meeting.folder().join("from"), meeting.folder().join("to"));
            fs::write(&from, vec![7; 100_000]).unwrap();
            let (from, to) = (from.to_str().unwrap(), to.to_str().unwrap());
            for (of_producer, of_consumer) in [
                (&["--round-trip"][..], &[][..]),
                (&["--seal"], &["--verify", "host"]),
                (&["--from", from], &["--to", to]),
            ] {
                let producer = meeting.listening(of_producer);
                meeting.consumer(of_consumer).end().code(0);
                producer.end().code(0);
            }
            assert_eq!(fs::read(to).unwrap(), fs::read(from).unwrap());
            let tool = |options: &[&str]| {
                let mut run = meeting.bare("vmmfd");
                run.command.args(options).args(["--json", "--backend", meeting.backend()]);
                run.env("TMPDIR", meeting.folder()).end().code(0).json()
            };
            assert_eq!(tool(&["doctor"])["environment"]["seccomp"], 2);
            tool(&["bench", "handoff", "--size", "2MiB", "--count", "3"]);
        });
    }
}

#[test]
fn streams_and_sessions_pass() {
    on_linux_4_18(|| {
        let tests = ["stream::policies::host::", "stream::formats::host::", "sessions::", "shared::handles::host::"];
        // Tests that wait for a timer.
        let skipped = ["busy_in_time", "slow_subscriber_sends_busy"];
        let skipped = skipped.iter().flat_map(|test| ["--skip", test]);
        let ended = Command::new(env::current_exe().unwrap()).args(tests).args(skipped).output().unwrap();
        let output = String::from_utf8_lossy(&ended.stdout);
        assert!(ended.status.success(), "{output}\n{}", String::from_utf8_lossy(&ended.stderr));
        assert!(!output.contains("running 0 tests"), "{output}");
    });
}
