//! Peers send the broker descriptors whose close(2) blocks: TCP sockets with `SO_LINGER` whose peer never reads.

use std::{
    fs,
    io::Write,
    net::{TcpListener, TcpStream},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::Duration,
};

use nix::libc::{self, sock_filter};
use rustix::net::sockopt;
use vmmfd::{error::ErrorCode, wire::broker::Message};

use crate::{
    broker::{filled, until},
    broker_process::{Process, Raw, Setup},
    seccomp::{self, ALLOW, require, rule},
    support::material::Material,
    support::{Subject, with_own_descriptors},
};

const MIB: u64 = 1 << 20;

/// Longer than any wait in these tests.
const LINGER: Duration = Duration::from_secs(600);

/// Descriptors whose close blocks until this value is dropped.
struct Lingering {
    files: Vec<OwnedFd>,
    _unread: TcpListener,
}

impl Lingering {
    fn new(count: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        rustix::net::listen(&listener, 4096).unwrap();
        sockopt::set_socket_recv_buffer_size(&listener, 4096).unwrap();
        let connect = |_| -> OwnedFd {
            let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            // More bytes than the receiver accepts.
            sockopt::set_socket_send_buffer_size(&stream, 1 << 16).unwrap();
            sockopt::set_socket_linger(&stream, Some(LINGER)).unwrap();
            stream.set_nonblocking(true).unwrap();
            while (&stream).write(&[0; 4096]).is_ok() {}
            stream.into()
        };
        Self { files: (0..count).map(connect).collect(), _unread: listener }
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.files.iter().map(AsFd::as_fd).collect()
    }

    /// Sends the descriptors while the server is stopped. The queued record keeps them open, so closing them here does not block.
    fn send(&mut self, raw: &Raw, record: &[u8]) {
        raw.send_bytes(record, &self.fds()).unwrap();
        self.files.clear();
    }
}

impl Drop for Lingering {
    fn drop(&mut self) {
        self.files.iter().for_each(|file| sockopt::set_socket_linger(file, None).unwrap());
    }
}

fn bytes_of(message: &Message) -> Vec<u8> {
    let mut record = Vec::new();
    message.encode_into(&mut record).unwrap();
    record
}

/// A put that declares `count` descriptors.
fn put_of(subject: &Subject, count: usize) -> Vec<u8> {
    let shared = filled(&subject.driver, 2 * MIB, None, 1);
    bytes_of(&Message::Put(Box::new(Material::of(&shared).repeated(count).put("hostile"))))
}

/// Queues a record that makes the broker close the connection, followed by an empty record with descriptors.
fn end_before_queued(raw: &Raw, files: &mut Lingering) {
    raw.send_bytes(b"no record of the protocol", &[]).unwrap();
    files.send(raw, b"");
}

/// Runs a test as on kernels before Linux 6.16, where every socket accepts descriptors.
fn without_passrights(test: fn()) {
    let option = rule(libc::SYS_setsockopt, &[(2, require, libc::BPF_JEQ, 83)], libc::ENOPROTOOPT);
    let program: Vec<sock_filter> = option.into_iter().chain([ALLOW]).collect();
    seccomp::under(program, move || with_own_descriptors(test));
}

#[test]
fn queued_descriptors_delay_no_other_user() {
    with_own_descriptors(|| {
        let subject = Subject::host();
        let server = Process::start(Setup::of(&subject));
        let client = server.client();
        let raw = Raw::greeted(&server.path).unwrap();
        let mut files = Lingering::new(1);
        server.while_stopped(|| end_before_queued(&raw, &mut files));
        assert_eq!(raw.ending().unwrap().code, ErrorCode::Protocol);
        client.list("").unwrap();
        // The connection counts until it is closed.
        assert_eq!(client.who("").unwrap().totals[0].connections, 2);
        drop(files);
        server.wait_for_ends(&client);
    });
}

#[test]
fn a_server_stops_while_closes_block() {
    with_own_descriptors(|| {
        let subject = Subject::host();
        let mut server = Process::start(Setup::of(&subject));
        let [put, ended, late] = [(); 3].map(|()| Raw::greeted(&server.path).unwrap());
        let mut files = [2, 2, 2].map(Lingering::new);
        let record = put_of(&subject, 2);
        server.while_stopped(|| {
            files[0].send(&put, &record);
            end_before_queued(&ended, &mut files[1]);
        });
        put.receive().unwrap();
        ended.ending();
        // Records that arrive with the stop, behind more records than the server reads in one turn.
        let mut server_stops = || {
            (0..20).for_each(|_| raw_list(&late));
            files[2].send(&late, b"");
        };
        server.while_stopped(&mut server_stops);
        server.stop();
        server.wait_for_exit();
    });
}

fn raw_list(raw: &Raw) {
    raw.send(&Message::List(vmmfd::wire::broker::List::default()), &[]).unwrap();
}

mod root {
    use std::os::{fd::AsRawFd, unix::net::UnixDatagram};

    use sendfd::{RecvWithFd, SendWithFd};
    use vmmfd::error::RefusalCode;

    use super::*;
    use crate::{
        broker_process::{become_user, connect},
        support::in_fork,
    };

    const SERVER: u32 = 24560;
    const HOSTILE: u32 = 24561;
    const OTHER: u32 = 24562;

    /// A connection made by another user.
    fn dial_as(uid: u32, server: &Process) -> Raw {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        in_fork(|| {
            become_user(uid, uid, &[]);
            let raw = Raw::dial(&server.path).unwrap();
            theirs.send_with_fd(b"c", &[raw.0.as_raw_fd()]).unwrap() == 1
        });
        received(&ours)
    }

    #[allow(unsafe_code, reason = "sendfd returns a number")]
    fn received(socket: &UnixDatagram) -> Raw {
        use std::os::fd::FromRawFd;
        let mut fds = [-1];
        assert_eq!(socket.recv_with_fd(&mut [0], &mut fds).unwrap(), (1, 1));
        // SAFETY: the kernel has just created this descriptor, and nothing else owns it.
        Raw::over(unsafe { OwnedFd::from_raw_fd(fds[0]) }).unwrap()
    }

    fn is_admitted(raw: &Raw) -> bool {
        raw.ask(&Raw::hello(), &[]).is_ok_and(|answer| matches!(answer, Some((Message::Hello(_), _))))
    }

    fn greeted_as(uid: u32, server: &Process) -> Raw {
        let raw = dial_as(uid, server);
        assert!(is_admitted(&raw));
        raw
    }

    #[track_caller]
    fn assert_served(uid: u32, server: &Process) {
        in_fork(|| {
            become_user(uid, uid, &[]);
            connect(&server.path, SERVER).unwrap().list("").is_ok()
        });
    }

    #[track_caller]
    fn refusal_of(uid: u32, server: &Process) -> (ErrorCode, String) {
        let failure = dial_as(uid, server).ending();
        let failure = failure.unwrap_or_else(|| panic!("uid {uid} is not refused"));
        (failure.code, failure.message)
    }

    fn start(subject: &Subject, allow: &[u32]) -> Process {
        Process::start(Setup { user: SERVER, allow_uids: allow.to_vec(), ..Setup::of(subject) })
    }

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn refused_user_can_not_send_descriptors() {
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|of| of.parse::<u32>().unwrap_or(0));
        let version = (numbers.next().unwrap(), numbers.next().unwrap());
        let server = start(&Subject::host(), &[OTHER]);
        // The listening socket refuses descriptors only once the server runs.
        let _client = server.client();
        let file = fs::File::open("/dev/null").unwrap();
        let (raw, sent) = server.while_stopped(|| {
            let raw = dial_as(HOSTILE, &server);
            let sent = raw.send_bytes(b"a", &[file.as_fd()]);
            (raw, sent)
        });
        if version >= (6, 16) {
            assert_eq!(sent.unwrap_err().raw_os_error(), Some(libc::EPERM));
        }
        assert_eq!(raw.ending().unwrap().code, ErrorCode::Refused);
    }

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn refused_descriptors_delay_no_other_user() {
        without_passrights(|| {
            let server = start(&Subject::host(), &[OTHER]);
            let mut files: Vec<Lingering> = (0..300).map(|_| Lingering::new(1)).collect();
            let refused: Vec<Raw> = server.while_stopped(|| {
                let send = |files: &mut Lingering| {
                    let raw = dial_as(HOSTILE, &server);
                    files.send(&raw, b"");
                    raw
                };
                files.iter_mut().map(send).collect()
            });
            refused.iter().for_each(|raw| assert_eq!(raw.ending().unwrap().code, ErrorCode::Refused));
            assert_served(OTHER, &server);
            assert_eq!(refusal_of(HOSTILE, &server).0, ErrorCode::Refused);
            let held = || server.files()["socket"];
            assert!(held() >= 300);
            drop(files);
            until(|| held() < 10);
        });
    }

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn blocked_closes_refuse_their_sender_alone() {
        with_own_descriptors(|| {
            let subject = Subject::host();
            let server = start(&subject, &[HOSTILE, OTHER, 0]);
            let raws = [(); 3].map(|()| greeted_as(HOSTILE, &server));
            let mut files = [150, 150].map(Lingering::new);
            let record = put_of(&subject, 150);
            for (raw, files) in raws.iter().zip(&mut files) {
                server.while_stopped(|| files.send(raw, &record));
                assert!(matches!(raw.receive().unwrap(), Some((Message::Refused(_), _))));
            }
            let why = "300 descriptors sent by uid 24561 are still being closed, and the limit is 256";
            let (code, message) = refusal_of(HOSTILE, &server);
            assert_eq!(code, ErrorCode::Full);
            assert!(message.starts_with(why), "{message}");
            // An existing connection is closed at its next record.
            raw_list(&raws[2]);
            assert!(raws[2].ending().unwrap().message.starts_with(why));
            for uid in [OTHER, 0] {
                assert_served(uid, &server);
            }
            drop(files);
            until(|| is_admitted(&dial_as(HOSTILE, &server)));
        });
    }

    /// A put that declares many segments of one memfd and sends only the first.
    fn reserving(material: &Material) -> Message {
        let mut put = material.put("hostile");
        put.sizes.truncate(1);
        Message::Put(Box::new(put))
    }

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn reservations_leave_other_users_their_share() {
        let subject = Subject::host();
        let allow_uids = vec![HOSTILE, OTHER, 0];
        let server = Process::start(Setup { files: 2000, user: SERVER, allow_uids, ..Setup::of(&subject) });
        let shared = filled(&subject.driver, 2 * MIB, None, 1);
        let material = Material::of(&shared).repeated(200);
        let mut refusal = None;
        let held: Vec<Raw> = (0..13)
            .map(|_| {
                let raw = greeted_as(HOSTILE, &server);
                match raw.ask(&reserving(&material), &material.fds()[..1]).unwrap() {
                    Some((Message::Send(_), _)) => {}
                    Some((Message::Refused(refused), _)) => refusal = Some(refused.message),
                    other => panic!("{other:?}"),
                }
                raw
            })
            .collect();
        let refusal = refusal.expect("all were admitted");
        assert!(
            refusal.starts_with("uid 24561 has ") && refusal.contains("asks for 202 more: its share is "),
            "{refusal}"
        );
        // Another user puts as many segments, and the put succeeds.
        let other = greeted_as(OTHER, &server);
        let answer = other.ask(&Message::Put(Box::new(material.put("fair"))), &material.fds()).unwrap();
        assert!(matches!(answer, Some((Message::Published(_), _))), "{answer:?}");
        // Closed connections free their reservation.
        drop(held);
        until(|| {
            let raw = dial_as(HOSTILE, &server);
            is_admitted(&raw) && {
                let answer = raw.ask(&Message::Put(Box::new(material.put("mine"))), &material.fds()).unwrap();
                matches!(answer, Some((Message::Published(_), _)))
            }
        });
    }

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn kept_memory_leaves_others_their_share() {
        let subject = Subject::host();
        let allow_uids = vec![HOSTILE, OTHER, 0];
        let server = Process::start(Setup { files: 600, user: SERVER, allow_uids, ..Setup::of(&subject) });
        let put = |raw: &Raw, name: &str| {
            let shared = filled(&subject.driver, 20 * 2 * MIB, Some(2 * MIB), 1);
            let material = Material::of(&shared);
            raw.ask(&Message::Put(Box::new(material.put(name))), &material.fds()).unwrap().unwrap().0
        };
        let hostile = greeted_as(HOSTILE, &server);
        let kept = (0..10).map(|at| put(&hostile, &format!("hostile/{at}")));
        let refused: Vec<Message> = kept.filter(|answer| !matches!(answer, Message::Published(_))).collect();
        let Some(Message::Refused(refusal)) = refused.last() else { panic!("{refused:?}") };
        assert_eq!(refusal.code, RefusalCode::Full);
        assert!(refusal.message.contains("its share is "), "{}", refusal.message);
        let other = greeted_as(OTHER, &server);
        assert!(matches!(put(&other, "fair"), Message::Published(_)));
    }
}
