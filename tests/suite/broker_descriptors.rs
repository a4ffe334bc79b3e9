//! Peers send the broker descriptors whose close(2) blocks: TCP sockets with `SO_LINGER` whose peer never reads.

use std::net::{TcpListener, TcpStream};

use nix::libc;
use rustix::net::sockopt;
use vmmfd::wire::broker::{List, Message};

use crate::support::{material::Material, prelude::*, with_own_descriptors};

const MIB: u64 = 1 << 20;

/// Longer than any wait in these tests.
const LINGER: Duration = Duration::from_secs(600);

/// Descriptors whose close blocks until this value is dropped.
pub(crate) struct Lingering {
    files: Vec<OwnedFd>,
    _unread: TcpListener,
}

impl Lingering {
    pub(crate) fn new(count: usize) -> Self {
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

    /// Sends the descriptors while the server is stopped. The queued record keeps them open, so closing them here does not block.
    pub(crate) fn send(&mut self, raw: &Raw, record: &[u8]) {
        let fds: Vec<BorrowedFd<'_>> = self.files.iter().map(AsFd::as_fd).collect();
        raw.send_bytes(record, &fds).unwrap();
        self.files.clear();
    }

    /// The same after a record that makes the broker close the connection.
    fn send_behind_end(&mut self, raw: &Raw) {
        raw.send_bytes(b"no record of the protocol", &[]).unwrap();
        self.send(raw, b"");
    }
}

impl Drop for Lingering {
    fn drop(&mut self) {
        self.files.iter().for_each(|file| sockopt::set_socket_linger(file, None).unwrap());
    }
}

/// A put that declares `count` descriptors.
fn put_of(count: usize) -> Vec<u8> {
    let put = Material::of(&filled(&Subject::host().driver, 2 * MIB, None, 1)).repeated(count).put("hostile");
    let mut record = Vec::new();
    Message::Put(Box::new(put)).encode_into(&mut record).unwrap();
    record
}

#[test]
fn blocking_closes_delay_nobody() {
    with_own_descriptors(|| {
        let served = Served::alone(&[]);
        let client = served.client();
        let [first, put, ended, late] = [(); 4].map(|()| served.greeted().0);
        let mut files = [1, 2, 2, 2].map(Lingering::new);
        let record = put_of(2);
        served.while_stopped(|| files[0].send_behind_end(&first));
        assert_eq!(first.ending().unwrap().code, ErrorCode::Protocol);
        client.list("").unwrap();
        // The connection is a descriptor until it is closed.
        let used = || client.metrics().unwrap().descriptors.used;
        let blocked = used();
        files[0] = Lingering::new(0);
        until(|| used() == blocked - 1);
        // The server stops while closes block.
        served.while_stopped(|| {
            files[1].send(&put, &record);
            files[2].send_behind_end(&ended);
        });
        put.receive().unwrap();
        ended.ending();
        // Records that arrive with the stop, behind more records than the server reads in one turn.
        served.while_stopped(|| {
            (0..20).for_each(|_| late.send(&Message::List(List::default()), &[]).unwrap());
            files[3].send(&late, b"");
        });
        served.stop();
    });
}

mod root {
    use std::os::unix::net::UnixDatagram;

    use nix::libc::sock_filter;
    use sendfd::{RecvWithFd, SendWithFd};

    use super::*;
    use crate::{
        seccomp::{self, ALLOW, require, rule},
        support::served::{connect, count_files},
    };

    const SERVER: u32 = 24560;
    const HOSTILE: u32 = 24561;
    const OTHER: u32 = 24562;

    /// A connection made by another user.
    #[allow(unsafe_code, reason = "sendfd returns a number")]
    fn dial_as(uid: u32, served: &Served) -> Raw {
        use std::os::fd::FromRawFd;
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        in_fork(|| {
            become_user(uid, uid, &[]);
            let raw = Raw::dial(&served.path).unwrap();
            theirs.send_with_fd(b"c", &[raw.0.as_raw_fd()]).unwrap() == 1
        });
        let mut fds = [-1];
        assert_eq!(ours.recv_with_fd(&mut [0], &mut fds).unwrap(), (1, 1));
        // SAFETY: the kernel has just created this descriptor, and nothing else owns it.
        Raw::over(unsafe { OwnedFd::from_raw_fd(fds[0]) }).unwrap()
    }

    fn is_admitted(raw: &Raw) -> bool {
        raw.ask(&Raw::hello(), &[]).is_ok_and(|answer| matches!(answer, Some((Message::Hello(_), _))))
    }

    #[track_caller]
    fn assert_served(uid: u32, served: &Served) {
        in_fork(|| {
            become_user(uid, uid, &[]);
            connect(&served.path).unwrap().list("").is_ok()
        });
    }

    fn start(allow: &[u32]) -> Served {
        let allow: Vec<_> = allow.iter().flat_map(|uid| ["--allow-uid".to_owned(), uid.to_string()]).collect();
        Served::as_user(SERVER, "", &allow.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Since Linux 6.16 the kernel refuses the descriptors.
    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn refused_user_can_not_send_descriptors() {
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|of| of.parse::<u32>().unwrap_or(0));
        let version = (numbers.next().unwrap(), numbers.next().unwrap());
        let served = start(&[OTHER]);
        // The listening socket refuses descriptors only once the server runs.
        let _client = served.client();
        let file = File::open("/dev/null").unwrap();
        let (raw, sent) = served.while_stopped(|| {
            let raw = dial_as(HOSTILE, &served);
            let sent = raw.send_bytes(b"a", &[file.as_fd()]);
            (raw, sent)
        });
        if version >= (6, 16) {
            assert_eq!(sent.unwrap_err().raw_os_error(), Some(libc::EPERM));
        }
        assert_eq!(raw.ending().unwrap().code, ErrorCode::Refused);
    }

    /// As on kernels before Linux 6.16, where every socket accepts descriptors.
    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn refused_descriptors_delay_no_other_user() {
        let option = rule(libc::SYS_setsockopt, &[(2, require, libc::BPF_JEQ, 83)], libc::ENOPROTOOPT);
        let program: Vec<sock_filter> = option.into_iter().chain([ALLOW]).collect();
        let test = || {
            let served = start(&[OTHER]);
            let mut files: Vec<Lingering> = (0..300).map(|_| Lingering::new(1)).collect();
            let refused: Vec<Raw> = served.while_stopped(|| {
                let send = |files: &mut Lingering| {
                    let raw = dial_as(HOSTILE, &served);
                    files.send(&raw, b"");
                    raw
                };
                files.iter_mut().map(send).collect()
            });
            refused.iter().for_each(|raw| assert_eq!(raw.ending().unwrap().code, ErrorCode::Refused));
            assert_served(OTHER, &served);
            assert_eq!(dial_as(HOSTILE, &served).ending().unwrap().code, ErrorCode::Refused);
            let held = || count_files(served.pid(), &["socket:"]);
            assert!(held() >= 300);
            drop(files);
            until(|| held() < 10);
        };
        seccomp::under(program, move || with_own_descriptors(test));
    }

    #[test]
    #[ignore = "needs root: make test-all runs it as root"]
    fn blocked_closes_refuse_their_sender_alone() {
        with_own_descriptors(|| {
            let served = start(&[HOSTILE, OTHER, 0]);
            let raws = [(); 3].map(|()| dial_as(HOSTILE, &served));
            assert!(raws.iter().all(is_admitted));
            let mut files = [150, 150].map(Lingering::new);
            let record = put_of(150);
            for (raw, files) in raws.iter().zip(&mut files) {
                served.while_stopped(|| files.send(raw, &record));
                assert!(matches!(raw.receive().unwrap(), Some((Message::Refused(_), _))));
            }
            let why = "uid 24561 has 300 unclosed descriptors and asks for 1 more, but its quota is 256: connect again";
            let failure = dial_as(HOSTILE, &served).ending().unwrap();
            assert!(failure.code == ErrorCode::Full && failure.message.starts_with(why), "{failure:?}");
            // An existing connection is closed at its next record.
            raws[2].send(&Message::List(List::default()), &[]).unwrap();
            assert!(raws[2].ending().unwrap().message.starts_with(why));
            [OTHER, 0].iter().for_each(|uid| assert_served(*uid, &served));
            drop(files);
            until(|| is_admitted(&dial_as(HOSTILE, &served)));
        });
    }
}
