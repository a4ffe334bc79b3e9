//! Clients of a broker that restarts: their requests and their leases. In most tests the test itself plays the broker, record by record.

use std::{
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::{self, Receiver},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use rustix::net::{
    accept,
    sockopt::{self, Timeout},
};
use serde_json::json;
use tempfile::TempDir;
use vmmfd::{
    Error,
    array::{ArrayDescriptor, Order},
    broker::{
        ArrayEntry, ClaimOf, Client, Condition, Get, Lease, Lifetime, LossReason, Lost, Owner, Put, PutPart, Restored,
    },
    channel::Cancel,
    driver::Backend,
    error::{ErrorClass, ErrorCode, PeerError, RefusalCode, SocketError},
    memory::{Region, Shared},
    session::Config,
    wire::{
        Failure, Run, Segments,
        broker::{
            self, Done, LeaseHeader, LeasePartHeader, Message, Objects, Published, Refusal, Release, Resume, Resumed,
            ResumedLease, Send, Stop, Token,
        },
    },
};

use crate::{
    broker::{filled, refused},
    broker_process::Raw,
    conversation::{PATIENCE, listening},
    support::{Subject, in_fork},
};

mod interrupted;
mod leases;
mod requests;

const MIB: u64 = 1 << 20;

/// The instance of the first broker in each test, and of a different broker.
pub(crate) const FIRST: &str = "0c2b6d3a-7f0e-4f3c-9d4b-000000000001";
pub(crate) const OTHER: &str = "0c2b6d3a-7f0e-4f3c-9d4b-000000000002";

/// A timeout that a test waits for. Everything else must be faster, even on a busy machine.
const A_WHILE: Duration = Duration::from_secs(1);

/// A broker whose answers the test scripts.
pub(crate) struct Scripted {
    folder: TempDir,
    listener: OwnedFd,
}

impl Scripted {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = Self::listen(&folder);
        Self { folder, listener }
    }

    fn listen(folder: &TempDir) -> OwnedFd {
        let listener = listening(&folder.path().join("broker.sock"), 8);
        // A missing client is an error, not a hang.
        sockopt::set_socket_timeout(&listener, Timeout::Recv, Some(PATIENCE)).unwrap();
        listener
    }

    /// Removes the socket: nothing listens any longer.
    fn end(self) -> TempDir {
        std::fs::remove_file(self.path()).unwrap();
        self.folder
    }

    /// Listens again.
    fn again(folder: TempDir) -> Self {
        let listener = Self::listen(&folder);
        Self { folder, listener }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("broker.sock")
    }

    /// The next connection, before the hellos.
    fn accept(&self) -> Peer {
        let socket = std::os::unix::net::UnixStream::from(accept(&self.listener).unwrap());
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        Peer(Raw(socket))
    }

    /// The next connection, after the hellos and the first resume.
    fn greet(&self, instance: &str) -> Peer {
        let peer = self.accept();
        assert!(matches!(peer.next(), (Message::Hello(_), _)));
        peer.say(&Raw::hello());
        assert_eq!(peer.next().0, Message::Resume(Resume::default()));
        peer.say(&Message::Resumed(Resumed { instance: instance.to_owned(), lost: Vec::new() }));
        peer
    }

    /// A connected client, and the broker's side of its connection.
    pub(crate) fn client(&self) -> (Client, Peer) {
        self.client_with(Config::default().timeout(PATIENCE))
    }

    pub(crate) fn client_with(&self, config: Config) -> (Client, Peer) {
        let path = self.path();
        let connecting = thread::spawn(move || Client::connect(&path, &config).unwrap());
        let peer = self.greet(FIRST);
        (connecting.join().unwrap(), peer)
    }
}

/// The broker's side of a connection. For the client, a drop looks like a killed broker.
pub(crate) struct Peer(Raw);

impl Drop for Peer {
    /// Shuts the connection down: a fork of another test may hold a copy of the socket.
    fn drop(&mut self) {
        let _ = self.0.0.shutdown(std::net::Shutdown::Both);
    }
}

impl Peer {
    #[track_caller]
    pub(crate) fn next(&self) -> (Message, Vec<OwnedFd>) {
        self.0.receive().unwrap().expect("a record, and not the end of the connection")
    }

    #[track_caller]
    pub(crate) fn say(&self, message: &Message) {
        self.0.send(message, &[]).unwrap();
    }

    #[track_caller]
    fn put(&self) -> (Box<broker::PutHeader>, Vec<OwnedFd>) {
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

    /// Answers a reconnecting client with its lost leases, and with all or none of its puts as lost. Returns its leases and puts.
    fn take_up(&self, instance: &str, lost: &[Token], puts_lost: bool) -> (Vec<Token>, Vec<Token>) {
        let leases = tokens(self.resume().leases);
        self.resumed(instance, lost);
        let puts = self.resume().puts;
        self.resumed(instance, if puts_lost { &puts } else { &[] });
        (leases, puts)
    }

    fn published(&self, id: &str) {
        self.say(&Message::Published(Published { version: 1, id: id.to_owned() }));
    }

    pub(crate) fn refuse(&self, code: RefusalCode) {
        self.say(&Message::Refused(Refusal { code, message: "no".to_owned() }));
    }
}

/// Sends a request on another thread.
fn ask<T: std::marker::Send + 'static>(
    client: &Client,
    request: impl FnOnce(Client) -> T + std::marker::Send + 'static,
) -> JoinHandle<T> {
    let client = client.clone();
    thread::spawn(move || request(client))
}

/// Runs a closure on another thread.
pub(crate) fn meanwhile<T: std::marker::Send + 'static>(
    what: impl FnOnce() -> T + std::marker::Send + 'static,
) -> JoinHandle<T> {
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

/// A token with this value in each byte.
fn token(value: u8) -> Token {
    Token([value; 16])
}

/// The notices that a client gets about its leases.
fn notices(client: &Client) -> Receiver<Result<Restored, Lost>> {
    let (lost, notices) = mpsc::channel();
    let restored = lost.clone();
    client.on_lost(move |_, notice| drop(lost.send(Err(notice.clone()))));
    client.on_restored(move |_, notice| drop(restored.send(Ok(notice.clone()))));
    notices
}

/// A lease of everything that was put.
fn lease(put: &broker::PutHeader, number: u8, whole: bool) -> LeaseHeader {
    let part = &put.parts[0];
    let run = Run { first: 0, segments: put.sizes.len() as u64, offset: 0, size: part.memory.mapped_size };
    LeaseHeader {
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
        parts: vec![LeasePartHeader {
            name: part.name.clone(),
            memory: part.memory.clone(),
            runs: vec![run],
            arrays: part.arrays.clone(),
            digest: part.digest.clone(),
        }],
        sizes: put.sizes.clone(),
    }
}

/// A client with leases of one version, the broker's side of its connection, and the put.
struct Reader {
    client: Client,
    leases: Vec<Lease>,
    peer: Peer,
    put: Box<broker::PutHeader>,
    notices: Receiver<Result<Restored, Lost>>,
}

impl Reader {
    fn new(broker: &Scripted, subject: &Subject, leases: u8, whole: bool) -> Self {
        Self::with(broker, subject, leases, whole, Config::default().timeout(PATIENCE))
    }

    fn with(broker: &Scripted, subject: &Subject, leases: u8, whole: bool, config: Config) -> Self {
        let (client, peer) = broker.client_with(config);
        let notices = notices(&client);
        let memory = filled(&subject.driver, 2 * MIB, Some(MIB), 7);
        let putting = ask(&client, move |client| client.put(&weights(&memory)).unwrap());
        let (put, mut fds) = peer.put();
        peer.published(FIRST);
        putting.join().unwrap();
        let tables = fds.len() - put.sizes.len();
        let segments = fds.split_off(tables);
        let mut held = Vec::new();
        for number in 1..=leases {
            let getting = ask(&client, move |client| client.get(&Get::new("a")).unwrap());
            assert!(matches!(peer.next(), (Message::Get(_), _)));
            let header = lease(&put, number, whole);
            let fds: Vec<BorrowedFd<'_>> = segments.iter().map(AsFd::as_fd).collect();
            peer.0.send(&Message::Lease(Box::new(header)), &fds).unwrap();
            held.push(getting.join().unwrap());
        }
        Self { client, leases: held, peer, put, notices }
    }

    fn hang_up(&mut self) {
        let (_, nowhere) = std::os::unix::net::UnixStream::pair().unwrap();
        drop(std::mem::replace(&mut self.peer, Peer(Raw(nowhere))));
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

/// The tokens of leases, sorted.
fn tokens(leases: Vec<ResumedLease>) -> Vec<Token> {
    sorted(leases.iter().map(|lease| lease.token).collect())
}
