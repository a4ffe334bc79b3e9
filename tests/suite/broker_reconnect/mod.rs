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
    accept,
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
    conversation::{PATIENCE, listening},
    running::Meeting,
    support::{Kind, Subject, in_fork},
};

mod leases;
mod requests;
mod servers;

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
        let listener = listening(&folder.path().join("broker.sock"), 8);
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

    /// Answers a client that comes back: what it has lost of its leases, and whether of its puts. Returns its leases and puts.
    fn take_up(&self, instance: &str, lost: &[Token], puts_lost: bool) -> (Vec<Token>, Vec<Token>) {
        let leases = sorted(self.resume().leases);
        self.resumed(instance, lost);
        let puts = self.resume().puts;
        self.resumed(instance, if puts_lost { &puts } else { &[] });
        (leases, puts)
    }

    fn published(&self, id: &str) {
        self.say(&Message::Published(Published { version: 1, id: id.to_owned() }));
    }

    fn refuse(&self, code: RefusalCode) {
        self.say(&Message::Refused(Refusal { code, message: "no".to_owned() }));
    }
}

/// Makes a request on a thread.
fn ask<T: std::marker::Send + 'static>(
    client: &Client,
    request: impl FnOnce(Client) -> T + std::marker::Send + 'static,
) -> JoinHandle<T> {
    let client = client.clone();
    thread::spawn(move || request(client))
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

/// What a client hears of its leases.
fn notices(client: &Client) -> Receiver<Result<Restored, Lost>> {
    let (lost, notices) = mpsc::channel();
    let restored = lost.clone();
    client.on_lost(move |_, notice| drop(lost.send(Err(notice.clone()))));
    client.on_restored(move |_, notice| drop(restored.send(Ok(notice.clone()))));
    notices
}

/// A lease of all of what was put.
fn lease(put: &broker::Put, number: u8, whole: bool) -> LeaseHeader {
    let part = &put.parts[0];
    let run = Part { first: 0, segments: put.sizes.len() as u64, offset: 0, size: part.memory.mapped_size };
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
        parts: vec![LeasePart {
            name: part.name.clone(),
            memory: part.memory.clone(),
            runs: vec![run],
            arrays: part.arrays.clone(),
            digest: part.digest.clone(),
        }],
        sizes: put.sizes.clone(),
    }
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

    /// Ends the connection at the broker's end.
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
