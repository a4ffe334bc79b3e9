//! Clients of a broker that is restarted: what they asked for and what they hold. In most of these tests the broker is played by the
//! test, record by record.

use std::{
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::mpsc::{self, Receiver},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rustix::net::{
    SocketAddrUnix, accept, bind, listen,
    sockopt::{self, Timeout},
};
use serde_json::json;
use tempfile::TempDir;
use vmmfd::{
    Error,
    array::{ArrayDescriptor, Order},
    broker::{
        ArrayEntry, ClaimOf, Client, Condition, Get, Lease, Lifetime, LossReason, Lost, Object, Owner, Put, PutPart,
        Restored, Server, ServerConfig,
    },
    channel::{Cancel, CancelReason},
    driver::Backend,
    error::{ErrorCode, PeerError, RefusalCode, SocketError},
    internals,
    memory::{Region, Shared},
    session::Config,
    wire::{
        Failure, Part, Segments,
        broker::{
            self, Done, LeaseHeader, LeasePart, Message, Objects, Published, Refusal, Release, Resume, Resumed, Send,
            Token,
        },
    },
};

use crate::{
    broker::{filled, refused, until},
    broker_process::Raw,
    conversation::{PATIENCE, seqpacket},
    running::Meeting,
    support::{Kind, Subject, in_fork},
};

const MIB: u64 = 1 << 20;

/// What the first broker of each test holds, and what another one does.
const FIRST: &str = "0c2b6d3a-7f0e-4f3c-9d4b-000000000001";
const OTHER: &str = "0c2b6d3a-7f0e-4f3c-9d4b-000000000002";

/// A timeout that a test waits for, and all else must be faster than: long enough for a machine that is busy with other things.
const A_WHILE: Duration = Duration::from_secs(5);

/// A broker whose answers the test gives.
struct Scripted {
    folder: TempDir,
    listener: OwnedFd,
}

impl Scripted {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = Self::listen(&folder);
        Self { folder, listener }
    }

    fn listen(folder: &TempDir) -> OwnedFd {
        let listener = seqpacket();
        bind(&listener, &SocketAddrUnix::new(folder.path().join("broker.sock")).unwrap()).unwrap();
        listen(&listener, 8).unwrap();
        // A client that does not come is an error, and no test without end.
        sockopt::set_socket_timeout(&listener, Timeout::Recv, Some(PATIENCE)).unwrap();
        listener
    }

    /// Nothing listens any more.
    fn end(self) -> TempDir {
        std::fs::remove_file(self.path()).unwrap();
        self.folder
    }

    /// Something listens again.
    fn again(folder: TempDir) -> Self {
        let listener = Self::listen(&folder);
        Self { folder, listener }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("broker.sock")
    }

    /// The next connection, which has said nothing.
    fn accept(&self) -> Peer {
        let socket = std::os::unix::net::UnixStream::from(accept(&self.listener).unwrap());
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        Peer(Raw(socket))
    }

    /// The next connection, after the hellos and the question of what the broker holds.
    fn greet(&self, instance: &str) -> Peer {
        let peer = self.accept();
        assert!(matches!(peer.next(), (Message::Hello(_), _)));
        peer.say(&Raw::hello());
        assert_eq!(peer.next().0, Message::Resume(Resume::default()));
        peer.say(&Message::Resumed(Resumed { instance: instance.to_owned(), lost: Vec::new() }));
        peer
    }

    /// A client that is connected, and the broker's end of it.
    fn client(&self) -> (Client, Peer) {
        self.client_with(PATIENCE)
    }

    fn client_with(&self, timeout: Duration) -> (Client, Peer) {
        let path = self.path();
        let connecting = thread::spawn(move || Client::connect(&path, &Config::default().timeout(timeout)).unwrap());
        let peer = self.greet(FIRST);
        (connecting.join().unwrap(), peer)
    }
}

/// The broker's end of a connection. Dropping it is what the client sees of a broker that was killed.
struct Peer(Raw);

impl Drop for Peer {
    /// Ends the connection, also where a fork of another test has its socket too.
    fn drop(&mut self) {
        let _ = self.0.0.shutdown(std::net::Shutdown::Both);
    }
}

impl Peer {
    #[track_caller]
    fn next(&self) -> (Message, Vec<OwnedFd>) {
        self.0.receive().unwrap().expect("a record, and not the end of the connection")
    }

    #[track_caller]
    fn say(&self, message: &Message) {
        self.0.send(message, &[]).unwrap();
    }

    #[track_caller]
    fn put(&self) -> (Box<broker::Put>, Vec<OwnedFd>) {
        match self.next() {
            (Message::Put(put), fds) => (put, fds),
            (other, _) => panic!("{other:?}"),
        }
    }

    #[track_caller]
    fn resume(&self) -> Resume {
        match self.next().0 {
            Message::Resume(resume) => resume,
            other => panic!("{other:?}"),
        }
    }

    fn resumed(&self, instance: &str, lost: &[Token]) {
        self.say(&Message::Resumed(Resumed { instance: instance.to_owned(), lost: lost.to_vec() }));
    }

    fn published(&self, id: &str) {
        self.say(&Message::Published(Published { version: 1, id: id.to_owned() }));
    }

    fn refuse(&self, code: RefusalCode) {
        self.say(&Message::Refused(Refusal { code, message: "no".to_owned() }));
    }
}

/// Does something on a thread.
fn meanwhile<T: std::marker::Send + 'static>(what: impl FnOnce() -> T + std::marker::Send + 'static) -> JoinHandle<T> {
    thread::spawn(what)
}

fn weights(memory: &Shared) -> Put<'_> {
    let array = ArrayDescriptor::new("u8".parse().unwrap(), vec![8, 8], Order::C).unwrap();
    let part = PutPart::of("all", memory).unwrap().digest("blake3:aa");
    let part = part.arrays([ArrayEntry::new("w", array)]);
    let Some(metadata) = json!({"engine": "x", "a": 1}).as_object().cloned() else { panic!() };
    Put::new("a").part(part).metadata(metadata).condition(Condition::Any).mode(0o640).keep(3)
}

const OWNER: Owner = Owner { uid: 1234, gid: 99 };

/// A token of which each byte has this value.
fn token(value: u8) -> Token {
    Token([value; 16])
}

/// A client with leases of all of one version, its connection at the broker's end, and what was put.
struct Reader {
    client: Client,
    leases: Vec<Lease>,
    peer: Peer,
    put: Box<broker::Put>,
    notices: Receiver<Result<Restored, Lost>>,
}

impl Reader {
    fn new(broker: &Scripted, subject: &Subject, leases: u8, whole: bool) -> Self {
        Self::with(broker, subject, leases, whole, PATIENCE)
    }

    fn with(broker: &Scripted, subject: &Subject, leases: u8, whole: bool, timeout: Duration) -> Self {
        let (client, peer) = broker.client_with(timeout);
        let (say, notices) = mpsc::channel();
        let (lost, restored) = (say.clone(), say);
        client.on_lost(move |_, notice| drop(lost.send(Err(notice.clone()))));
        client.on_restored(move |_, notice| drop(restored.send(Ok(notice.clone()))));
        let memory = filled(&subject.driver, 2 * MIB, Some(MIB), 7);
        let putting = meanwhile({
            let client = client.clone();
            move || client.put(&weights(&memory)).unwrap()
        });
        let (put, mut fds) = peer.put();
        peer.published(FIRST);
        putting.join().unwrap();
        let tables = fds.len() - put.sizes.len();
        let segments = fds.split_off(tables);
        let mut held = Vec::new();
        for number in 1..=leases {
            let getting = meanwhile({
                let client = client.clone();
                move || client.get(&Get::new("a")).unwrap()
            });
            assert!(matches!(peer.next(), (Message::Get(_), _)));
            let part = &put.parts[0];
            let run = Part { first: 0, segments: put.sizes.len() as u64, offset: 0, size: part.memory.mapped_size };
            let header = LeaseHeader {
                token: token(number),
                name: "a".to_owned(),
                version: 5,
                id: FIRST.to_owned(),
                created_ms: 1_700_000_000_123,
                owner: OWNER,
                backend: put.backend.clone(),
                metadata: put.metadata.clone(),
                mode: Some(0o640),
                lifetime: Some(Lifetime::Leased),
                keep: Some(3),
                whole,
                parts: vec![LeasePart {
                    name: part.name.clone(),
                    memory: part.memory.clone(),
                    runs: vec![run],
                    arrays: part.arrays.clone(),
                    digest: part.digest.clone(),
                }],
                sizes: put.sizes.clone(),
            };
            let fds: Vec<BorrowedFd<'_>> = segments.iter().map(AsFd::as_fd).collect();
            peer.0.send(&Message::Lease(Box::new(header)), &fds).unwrap();
            held.push(getting.join().unwrap());
        }
        Self { client, leases: held, peer, put, notices }
    }

    fn notice(&self) -> Result<Restored, Lost> {
        self.notices.recv_timeout(PATIENCE).unwrap()
    }

    fn restored(&self) -> Restored {
        self.notice().unwrap()
    }

    fn lost(&self) -> LossReason {
        self.notice().unwrap_err().reason
    }
}

fn sorted(mut tokens: Vec<Token>) -> Vec<Token> {
    tokens.sort();
    tokens
}

#[test]
fn a_get_that_waits_when_the_broker_dies_is_sent_again_with_the_wait_that_is_left() {
    let broker = Scripted::new();
    let (client, peer) = broker.client();
    let asking = client.clone();
    let getting = meanwhile(move || asking.get(&Get::new("a").version(3).wait(Duration::from_secs(1000))));
    let (Message::Get(before), _) = peer.next() else { panic!() };
    assert_eq!(before.wait_ms, Some(1_000_000));
    thread::sleep(Duration::from_millis(30));
    drop(peer);
    let peer = broker.greet(FIRST);
    let (Message::Get(after), _) = peer.next() else { panic!() };
    assert_eq!(after.objects, before.objects);
    assert!(after.wait_ms.unwrap() <= 1_000_000 - 30, "{:?}", after.wait_ms);
    peer.refuse(RefusalCode::Timeout);
    assert_eq!(refused(getting.join().unwrap()).0, RefusalCode::Timeout);
    assert_eq!(client.peer().pid as u32, std::process::id());
}

#[test]
fn a_request_is_sent_again_when_the_broker_says_that_it_stops() {
    let broker = Scripted::new();
    let (client, peer) = broker.client();
    let asking = client.clone();
    let listing = meanwhile(move || asking.list("x"));
    let (list, _) = peer.next();
    let message = "the broker stops".to_owned();
    peer.say(&Message::Error(Failure { code: ErrorCode::Interrupted, message }));
    let peer = broker.greet(FIRST);
    assert_eq!(peer.next().0, list);
    peer.say(&Message::Objects(Objects { objects: Vec::new(), more: false }));
    assert!(listing.join().unwrap().unwrap().is_empty());
    // Any other error ends the request.
    let asking = client.clone();
    let getting = meanwhile(move || asking.get_or_claim(&Get::new("a"), &ClaimOf::whole()));
    peer.next();
    peer.say(&Message::Error(Failure { code: ErrorCode::Protocol, message: "no".to_owned() }));
    let error = getting.join().unwrap().unwrap_err();
    assert!(matches!(error, Error::Peer(PeerError::Reported { code: ErrorCode::Protocol, .. })), "{error:?}");
}

#[test]
fn a_put_and_a_delete_are_sent_again_under_the_name_of_the_first_time() {
    let broker = Scripted::new();
    let (client, peer) = broker.client();
    let subject = Subject::host();
    let memory = filled(&subject.driver, 2 * MIB, Some(MIB), 7);
    let asking = client.clone();
    let putting = meanwhile(move || asking.put(&weights(&memory)));
    let (before, fds) = peer.put();
    assert!(before.request.is_some() && before.restore.is_none());
    let count = fds.len();
    // It has published it, and dies before it says so.
    drop((peer, fds));
    let peer = broker.greet(FIRST);
    let (after, fds) = peer.put();
    assert_eq!((&after, fds.len()), (&before, count));
    peer.published(OTHER);
    assert_eq!(putting.join().unwrap().unwrap().id, OTHER);

    let asking = client.clone();
    let deleting = meanwhile(move || asking.delete("a"));
    let (Message::Delete(before), _) = peer.next() else { panic!() };
    assert!(before.request.is_some());
    drop(peer);
    let peer = broker.greet(FIRST);
    // Whether the name goes with its maker, only the broker knows.
    assert_eq!(peer.resume().puts, [after.request.unwrap()]);
    peer.resumed(FIRST, &[]);
    assert_eq!(peer.next().0, Message::Delete(before.clone()));
    peer.say(&Message::Done(Done {}));
    deleting.join().unwrap().unwrap();

    let asking = client.clone();
    let deleting = meanwhile(move || asking.delete("a"));
    let (Message::Delete(next), _) = peer.next() else { panic!() };
    assert_ne!(next.request, before.request, "another request has another name");
    peer.refuse(RefusalCode::Absent);
    assert_eq!(refused(deleting.join().unwrap()).0, RefusalCode::Absent);
}

#[test]
fn a_put_of_several_records_starts_again() {
    let broker = Scripted::new();
    let (client, peer) = broker.client();
    let subject = Subject::host();
    let memory = filled(&subject.driver, MIB, None, 7);
    let asking = client.clone();
    let putting = meanwhile(move || {
        // A broker would refuse what this one is not asked to look at.
        let (_, chunks) = memory.chunks(0..MIB).unwrap().unwrap();
        let segments = std::iter::repeat_n((chunks[0].size(), chunks[0].as_fd()), 600);
        let part = PutPart::of_segments("all", Backend::Host, memory.describe().unwrap(), segments).unwrap();
        asking.put(&Put::new("a").part(part))
    });
    let (before, _) = peer.put();
    peer.say(&Message::Send(Send {}));
    let (Message::Segments(segments), _) = peer.next() else { panic!() };
    assert_eq!(segments.first, before.sizes.len() as u64);
    drop(peer);
    let peer = broker.greet(FIRST);
    let (after, _) = peer.put();
    assert_eq!(after, before);
    peer.say(&Message::Send(Send {}));
    let mut came = after.sizes.len();
    while came < 600 {
        let (Message::Segments(Segments { first, sizes }), fds) = peer.next() else { panic!() };
        assert_eq!((first, fds.len()), (came as u64, sizes.len()));
        came += sizes.len();
    }
    drop(peer);
    // The third broker finds that it was published.
    let peer = broker.greet(FIRST);
    assert_eq!(peer.put().0, before);
    peer.published(OTHER);
    assert_eq!(putting.join().unwrap().unwrap().id, OTHER);
}

#[test]
fn a_request_that_breaks_each_connection_ends() {
    let broker = Scripted::new();
    let (client, peer) = broker.client_with(A_WHILE);
    let asking = client.clone();
    let listing = meanwhile(move || asking.list(""));
    let mut peer = Some(peer);
    let serving = meanwhile(move || {
        let mut times = 0;
        while let Some(at) = peer.take() {
            let (message, _) = at.next();
            if matches!(message, Message::Delete(_)) {
                at.say(&Message::Done(Done {}));
                return times;
            }
            times += 1;
            drop(at);
            peer = Some(broker.greet(FIRST));
        }
        times
    });
    let error = listing.join().unwrap().unwrap_err();
    assert!(matches!(error, Error::Peer(PeerError::Gone { .. })), "{error:?}");
    // The client goes on.
    client.delete("a").unwrap();
    assert!(serving.join().unwrap() > 1);
}

#[test]
fn leases_are_taken_up_while_the_client_does_nothing() {
    let (broker, subject) = (Scripted::new(), Subject::host());
    let mut reader = Reader::new(&broker, &subject, 2, true);
    assert!(reader.leases.iter().all(Lease::is_held));
    let object = reader.leases.pop().unwrap().open(&subject.driver, None).unwrap();
    for _ in 0..3 {
        let peer = broker_dies(&mut reader, &broker, FIRST);
        let resume = peer.resume();
        assert_eq!(sorted(resume.leases), [token(1), token(2)]);
        // Until the broker has answered.
        assert!(!object.is_held() && !reader.leases[0].is_held());
        peer.resumed(FIRST, &[]);
        // What the name's lifetime is, which the put left as it was, only the broker knows.
        let puts = peer.resume();
        assert_eq!(puts.puts, [reader.put.request.unwrap()]);
        peer.resumed(FIRST, &[]);
        reader.peer = peer;
        for _ in 0..2 {
            let Restored { name, version, id, rebuilt, .. } = reader.restored();
            assert_eq!((name.as_str(), version, id.as_str(), rebuilt), ("a", 5, FIRST, false));
        }
        assert!(object.is_held() && reader.leases[0].is_held());
    }
    // They end as ever.
    drop(object);
    assert_eq!(reader.peer.next().0, Message::Release(Release { token: token(2) }));
    // And with the connection, which the thread that watched it does not keep.
    drop((reader.leases, reader.client));
    assert_eq!(reader.peer.next().0, Message::Release(Release { token: token(1) }));
    assert!(reader.peer.0.receive().unwrap().is_none());
}

/// Another broker takes the place of the one that a reader is connected to.
fn broker_dies(reader: &mut Reader, broker: &Scripted, instance: &str) -> Peer {
    // Its last reference is here.
    let (_, nowhere) = std::os::unix::net::UnixStream::pair().unwrap();
    drop(std::mem::replace(&mut reader.peer, Peer(Raw(nowhere))));
    broker.greet(instance)
}

#[test]
fn a_lease_that_is_released_meanwhile_is_not_held() {
    let (broker, subject) = (Scripted::new(), Subject::host());
    let mut reader = Reader::new(&broker, &subject, 3, true);
    let (_, nowhere) = std::os::unix::net::UnixStream::pair().unwrap();
    drop(std::mem::replace(&mut reader.peer, Peer(Raw(nowhere))));
    // While there is no connection: it is forgotten.
    reader.leases.remove(0);
    let peer = broker.greet(FIRST);
    assert_eq!(sorted(peer.resume().leases), [token(2), token(3)]);
    // While it is being taken up: the broker is told, at the latest when that is done.
    reader.leases.remove(0);
    peer.resumed(FIRST, &[]);
    let release = Message::Release(Release { token: token(2) });
    let mut released = 0;
    loop {
        match peer.next().0 {
            message if message == release => released += 1,
            Message::Resume(_) => {
                peer.resumed(FIRST, &[]);
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    // Once by the thread that dropped it, and behind what was taken up, which that may have come before.
    assert_eq!(peer.next().0, release);
    assert!(released <= 1);
    reader.restored();
    assert!(reader.leases[0].is_held());
}

#[test]
fn to_release_leases_waits_for_no_broker_that_does_not_read() {
    const LEASES: u8 = 120;
    let (broker, subject) = (Scripted::new(), Subject::host());
    let mut reader = Reader::new(&broker, &subject, LEASES, true);
    // The kernel's least: room for a few records.
    sockopt::set_socket_send_buffer_size(&reader.client, 1).unwrap();
    let release = |peer: &Peer| match peer.next().0 {
        Message::Release(release) => release.token,
        other => panic!("{other:?}"),
    };
    let all: Vec<Token> = (1..=LEASES).map(token).collect();
    let begun = Instant::now();
    drop(reader.leases.split_off(usize::from(LEASES / 2)));
    assert!(begun.elapsed() < PATIENCE / 2, "{:?}", begun.elapsed());
    // They are told once it reads, with no request that would push them.
    let told: Vec<Token> = (LEASES / 2..LEASES).map(|_| release(&reader.peer)).collect();
    assert_eq!(sorted(told), all[usize::from(LEASES / 2)..]);
    // And no request comes before them.
    reader.leases.clear();
    let listing = meanwhile({
        let client = reader.client.clone();
        move || client.list("")
    });
    let told: Vec<Token> = (0..LEASES / 2).map(|_| release(&reader.peer)).collect();
    assert_eq!(sorted(told), all[..usize::from(LEASES / 2)]);
    assert!(matches!(reader.peer.next().0, Message::List(_)));
    reader.peer.say(&Message::Objects(Objects { objects: Vec::new(), more: false }));
    assert_eq!(listing.join().unwrap().unwrap(), []);
}

#[test]
fn a_lease_that_the_broker_has_ended_is_lost_and_never_offered() {
    let (broker, subject) = (Scripted::new(), Subject::host());
    let mut reader = Reader::new(&broker, &subject, 2, true);
    let object = reader.leases.remove(1).open(&subject.driver, None).unwrap();
    let peer = broker_dies(&mut reader, &broker, FIRST);
    peer.resume();
    peer.resumed(FIRST, &[token(2)]);
    let put = peer.resume().puts;
    peer.resumed(FIRST, &put);
    let mut notices = [reader.notice(), reader.notice()];
    notices.sort_by_key(|notice| notice.is_err());
    let [Ok(_), Err(lost)] = notices else { panic!("{notices:?}") };
    assert_eq!((lost.reason, lost.name.as_str(), lost.version), (LossReason::Ended, "a", 5));
    assert!(!object.is_held() && reader.leases[0].is_held());
    // What is mapped stays.
    let mut byte = [0];
    object.part("all").unwrap().memory().unwrap().copy_out(MIB, &mut byte).unwrap();
    assert_eq!(byte, [7]);
    // Neither is asked for again.
    reader.peer = peer;
    let peer = broker_dies(&mut reader, &broker, OTHER);
    assert_eq!(peer.resume(), Resume { leases: vec![token(1)], puts: Vec::new() });
}

#[test]
fn handlers_make_requests_with_the_client_they_get() {
    let (broker, subject) = (Scripted::new(), Subject::host());
    let mut reader = Reader::new(&broker, &subject, 1, true);
    let (say, answers) = mpsc::channel();
    reader.client.on_lost(move |client, lost| drop(say.send((client.list(&lost.name), client.peer().pid))));
    let peer = broker_dies(&mut reader, &broker, FIRST);
    peer.resume();
    peer.resumed(FIRST, &[token(1)]);
    let puts = peer.resume().puts;
    peer.resumed(FIRST, &puts);
    // Of the lease that was lost.
    assert!(matches!(peer.next().0, Message::Release(_)));
    let asked = peer.next().0;
    assert!(matches!(&asked, Message::List(list) if list.prefix == "a"), "{asked:?}");
    peer.say(&Message::Objects(Objects { objects: Vec::new(), more: false }));
    let (listed, pid) = answers.recv_timeout(PATIENCE).unwrap();
    assert_eq!((listed.unwrap(), pid), (Vec::new(), std::process::id() as i32));
    // The handler does not keep the connection: it ends, after the lease.
    drop(reader);
    while let Some((message, _)) = peer.0.receive().unwrap() {
        assert!(matches!(message, Message::Release(_)), "{message:?}");
    }
}

#[test]
fn what_a_broker_has_lost_is_offered_back_once_with_all_leases_of_it() {
    let (broker, subject) = (Scripted::new(), Subject::host());
    let mut reader = Reader::new(&broker, &subject, 3, true);
    let _object = reader.leases.pop().unwrap().open(&subject.driver, None).unwrap();
    let peer = broker_dies(&mut reader, &broker, OTHER);
    let resume = peer.resume();
    peer.resumed(OTHER, &resume.leases);
    let puts = peer.resume().puts;
    peer.resumed(OTHER, &puts);
    let (offer, fds) = peer.put();
    let restore = offer.restore.clone().unwrap();
    assert_eq!((restore.version, restore.id.as_str(), restore.created_ms), (5, FIRST, 1_700_000_000_123));
    assert_eq!((restore.owner, sorted(restore.leases)), (OWNER, vec![token(1), token(2), token(3)]));
    // It is what was put, in each word.
    let (was, is) = (&reader.put, &offer);
    assert_eq!((&was.parts, &was.metadata, &was.sizes), (&is.parts, &is.metadata, &is.sizes));
    assert_eq!((&was.name, &was.backend, fds.len()), (&is.name, &is.backend, was.sizes.len()));
    assert_eq!((is.mode, is.lifetime, is.keep), (Some(0o640), Some(Lifetime::Leased), Some(3)));
    assert!(is.request.is_some() && is.request != was.request);
    assert!(!reader.leases[0].is_held());
    peer.published(FIRST);
    // It need not have given all that were offered: over a quota, for one.
    assert_eq!(sorted(peer.resume().leases), [token(1), token(2), token(3)]);
    peer.resumed(OTHER, &[token(3)]);
    let notices: Vec<_> = (0..3).map(|_| reader.notice()).collect();
    assert_eq!(notices.iter().filter(|notice| notice.as_ref().is_ok_and(|restored| restored.rebuilt)).count(), 2);
    let not_given = |lost: &Lost| matches!(lost.reason, LossReason::NotRestored(_));
    assert_eq!(notices.iter().filter(|notice| notice.as_ref().is_err_and(not_given)).count(), 1);
    assert!(reader.leases[0].is_held());
    // Now this one's word counts: what it ends is lost, and not offered.
    reader.peer = peer;
    let peer = broker_dies(&mut reader, &broker, OTHER);
    let resume = peer.resume();
    assert_eq!(resume.leases.len(), 2);
    peer.resumed(OTHER, &resume.leases);
    for _ in 0..2 {
        assert_eq!(reader.lost(), LossReason::Ended);
    }
}

#[test]
fn an_offer_is_repeated_if_the_broker_dies_before_it_answers() {
    let (broker, subject) = (Scripted::new(), Subject::host());
    let mut reader = Reader::new(&broker, &subject, 1, true);
    for _ in 0..2 {
        let peer = broker_dies(&mut reader, &broker, OTHER);
        let resume = peer.resume();
        peer.resumed(OTHER, &resume.leases);
        peer.resume();
        peer.resumed(OTHER, &[]);
        assert_eq!(peer.put().0.restore.unwrap().leases, [token(1)]);
        reader.peer = peer;
    }
    reader.peer.published(FIRST);
    reader.peer.resume();
    reader.peer.resumed(OTHER, &[]);
    assert!(reader.restored().rebuilt);
}

#[test]
fn a_version_that_is_refused_is_lost_unless_another_reader_was_faster() {
    let subject = Subject::host();
    for (faster, whole) in [(true, true), (false, true), (false, false)] {
        let broker = Scripted::new();
        let mut reader = Reader::new(&broker, &subject, 1, whole);
        let peer = broker_dies(&mut reader, &broker, OTHER);
        let resume = peer.resume();
        peer.resumed(OTHER, &resume.leases);
        peer.resume();
        peer.resumed(OTHER, &[]);
        if whole {
            peer.put();
            peer.refuse(RefusalCode::Exists);
        }
        assert_eq!(peer.resume().leases, [token(1)]);
        let lost = if faster { vec![] } else { vec![token(1)] };
        peer.resumed(OTHER, &lost);
        match faster {
            true => assert!(reader.restored().rebuilt),
            false => assert!(matches!(reader.lost(), LossReason::NotRestored(_))),
        }
        assert_eq!(reader.leases[0].is_held(), faster);
    }
}

#[test]
fn a_broker_that_stays_away_is_reported_and_taken_up_when_it_comes_back() {
    let (broker, subject) = (Scripted::new(), Subject::host());
    let mut reader = Reader::with(&broker, &subject, 1, true, A_WHILE);
    let folder = broker.end();
    let (_, nowhere) = std::os::unix::net::UnixStream::pair().unwrap();
    drop(std::mem::replace(&mut reader.peer, Peer(Raw(nowhere))));
    let error = reader.client.stat("a", None).unwrap_err();
    assert!(matches!(error, Error::Socket(SocketError::NoBroker { .. })), "{error:?}");
    assert_eq!(reader.lost(), LossReason::Unreachable);
    assert!(!reader.leases[0].is_held());
    let broker = Scripted::again(folder);
    let peer = broker.greet(FIRST);
    assert_eq!(peer.resume().leases, [token(1)]);
    peer.resumed(FIRST, &[]);
    peer.resume();
    peer.resumed(FIRST, &[]);
    assert!(!reader.restored().rebuilt);
    assert!(reader.leases[0].is_held());
}

#[test]
fn a_wait_that_is_stopped_while_there_is_no_broker_ends() {
    let broker = Scripted::new();
    let (client, peer) = broker.client();
    let asking = client.clone();
    let getting = meanwhile(move || asking.get(&Get::new("a").wait(Duration::from_secs(1000))));
    peer.next();
    drop(peer);
    // It has connected again, and waits for a hello.
    let peer = broker.accept();
    client.stop().unwrap();
    assert!(matches!(peer.next(), (Message::Hello(_), _)));
    peer.say(&Raw::hello());
    peer.next();
    peer.resumed(FIRST, &[]);
    assert!(matches!(peer.next(), (Message::Get(_), _)));
    assert!(matches!(peer.next(), (Message::Stop(_), _)));
    peer.refuse(RefusalCode::Stopped);
    assert_eq!(refused(getting.join().unwrap()).0, RefusalCode::Stopped);
}

#[test]
fn a_client_over_a_socket_of_the_callers_does_not_connect_again() {
    let (ours, theirs) = vmmfd::channel::Channel::socket_pair().unwrap();
    let peer = Peer(Raw(theirs.into()));
    let greeting = meanwhile(move || {
        peer.next();
        peer.say(&Raw::hello());
        peer.next();
        peer.resumed(FIRST, &[]);
        drop(peer);
    });
    let client = Client::over(ours, &Config::default()).unwrap();
    greeting.join().unwrap();
    let error = client.list("").unwrap_err();
    assert!(matches!(error, Error::Peer(PeerError::Gone { .. })), "{error:?}");
}

#[test]
fn a_fork_holds_nothing_and_leaves_the_connection_to_its_parent() {
    let (broker, subject) = (Scripted::new(), Subject::host());
    let Reader { client, mut leases, peer, notices: _notices, .. } = Reader::new(&broker, &subject, 1, true);
    let mut all = Some((client.clone(), leases.remove(0)));
    in_fork(|| {
        let (client, lease) = all.take().unwrap();
        let refused = matches!(client.list("").unwrap_err(), Error::Misuse { .. }) && !lease.is_held();
        let number = client.as_fd().as_raw_fd();
        let open = || std::fs::read_link(format!("/proc/self/fd/{number}")).ok();
        let before = open();
        drop((lease, client));
        // One reference is the parent's variable, which the fork has too.
        refused && open() == before
    });
    let mut only = Some(client);
    all = None;
    assert!(all.is_none());
    assert!(matches!(peer.next(), (Message::Release(_), _)));
    in_fork(|| {
        let client = only.take().unwrap();
        let number = client.as_fd().as_raw_fd();
        let open = || std::fs::read_link(format!("/proc/self/fd/{number}")).ok();
        let before = open();
        drop(client);
        before.is_some() && open() != before
    });
    // The parent's goes on.
    let listing = meanwhile(move || only.take().unwrap().list("").unwrap());
    assert!(matches!(peer.next(), (Message::List(_), _)));
    peer.say(&Message::Objects(Objects { objects: Vec::new(), more: false }));
    assert!(listing.join().unwrap().is_empty());
}

/// A reader of the name `a`, and what it hears of its leases.
fn reader(path: &Path) -> (Client, Receiver<Result<Restored, Lost>>) {
    let client = Client::connect(path, &Config::default()).unwrap();
    let (say, notices) = mpsc::channel();
    let (lost, restored) = (say.clone(), say);
    client.on_lost(move |_, notice| drop(lost.send(Err(notice.clone()))));
    client.on_restored(move |_, notice| drop(restored.send(Ok(notice.clone()))));
    (client, notices)
}

fn assert_bytes(object: &Object, byte: u8) {
    let memory = object.part("all").unwrap().memory().unwrap();
    let mut bytes = vec![0; memory.size() as usize];
    memory.copy_out(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|is| *is == byte));
}

#[test]
fn versions_come_back_from_their_readers_when_the_broker_has_lost_all() {
    for subject in [Subject::host(), Subject::fake()] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("broker.sock");
        let start = || {
            let (cancel, mut config) = (Cancel::new().unwrap(), ServerConfig::default());
            if subject.kind == Kind::Fake {
                config = internals::emulated(config);
            }
            let server = Server::bind(&path, config, &cancel).unwrap();
            (cancel, meanwhile(move || server.run().unwrap()))
        };
        let (cancel, serving) = start();
        {
            let maker = Client::connect(&path, &Config::default()).unwrap();
            for value in [1, 7] {
                let memory = filled(&subject.driver, 4 * MIB, Some(2 * MIB), value);
                maker.put(&weights(&memory)).unwrap();
            }
        }
        let ((one, of_one), (two, of_two)) = (reader(&path), reader(&path));
        let object = one.get(&Get::new("a")).unwrap().open(&subject.driver, None).unwrap();
        let lease = two.get(&Get::new("a")).unwrap();
        let before = one.stat("a", None).unwrap();
        assert_eq!((before.version.summary.version, before.version.summary.leases), (2, 2));
        cancel.cancel(CancelReason::Program);
        serving.join().unwrap();
        let (cancel, serving) = start();
        for notices in [&of_one, &of_two] {
            assert!(notices.recv_timeout(PATIENCE).unwrap().unwrap().rebuilt);
        }
        assert!(object.is_held() && lease.is_held());
        let mut after = one.stat("a", None).unwrap();
        // The maker of each part is who offered it; here both are this process. Versions before it are gone.
        assert_eq!(after.version.versions, [2]);
        after.version.versions.clone_from(&before.version.versions);
        assert_eq!(after, before);
        let again = two.get(&Get::new("a")).unwrap();
        assert_eq!(again.part("all").unwrap().arrays(), lease.part("all").unwrap().arrays());
        assert_bytes(&again.open(&subject.driver, None).unwrap(), 7);
        assert_bytes(&object, 7);
        drop((object, lease));
        until(|| one.who("").unwrap().leases.is_empty());
        cancel.cancel(CancelReason::Program);
        serving.join().unwrap();
    }
}

#[test]
fn requests_and_leases_go_on_when_the_server_is_killed() {
    let subject = Subject::host();
    let place = Meeting::host();
    let mut server = crate::broker_commands::serve(&place, &[]).start();
    server.until("listening");
    let (client, notices) = reader(&place.socket());
    let memory = filled(&subject.driver, 4 * MIB, Some(2 * MIB), 7);
    client.put(&weights(&memory)).unwrap();
    client.put(&Put::new("mine").lifetime(Lifetime::Maker).part(PutPart::of("all", &memory).unwrap())).unwrap();
    let object = client.get(&Get::new("a")).unwrap().open(&subject.driver, None).unwrap();
    let waiting = meanwhile({
        let path = place.socket();
        move || {
            let client = Client::connect(&path, &Config::default()).unwrap();
            client.get(&Get::new("later").wait(Duration::from_secs(100))).unwrap().version()
        }
    });
    let other = Client::connect(&place.socket(), &Config::default()).unwrap();
    for _ in 0..3 {
        let killed = held(&other);
        assert_eq!(killed.len(), 1);
        kill(server_of(&place.socket()), Signal::SIGKILL).unwrap();
        let restored = notices.recv_timeout(PATIENCE).unwrap().unwrap();
        assert!(!restored.rebuilt && object.is_held());
        let now = held(&other);
        assert_eq!(now, killed, "the same lease, and no other");
    }
    assert_bytes(&object, 7);
    other.stat("mine", None).unwrap();
    other.put(&Put::new("later").part(PutPart::of("all", &memory).unwrap())).unwrap();
    assert_eq!(waiting.join().unwrap(), 1);
    // It ends as ever, and what goes with its maker does.
    drop((object, client));
    until(|| other.who("a").unwrap().leases.is_empty() && other.stat("mine", None).is_err());
    server.signal(Signal::SIGTERM);
    server.end();
}

/// The process that serves: who listened first, which `SO_PEERCRED` names, may be another one.
fn server_of(path: &Path) -> Pid {
    let answer = Raw::dial(path).unwrap().ask(&Raw::hello(), &[]).unwrap().unwrap().0;
    let Message::Hello(hello) = answer else { panic!("{answer:?}") };
    assert_ne!(hello.pid, std::process::id());
    Pid::from_raw(hello.pid as i32)
}

/// The leases that there are: of which version, since when, and of which user.
fn held(client: &Client) -> Vec<(String, u64, u64, u32)> {
    let leases = client.who("a").unwrap().leases;
    leases.into_iter().map(|lease| (lease.id, lease.version, lease.since_ms, lease.uid)).collect()
}
