//! Scripted clients: their memory, and the messages that they send.

use std::{collections::BTreeMap, os::fd::OwnedFd, sync::LazyLock};

use super::step::{Kind, Request};
use crate::{
    broker::server::state::caller::ConnectionId,
    driver::GRANULARITY,
    sys::{memfd, table},
    wire::{
        Hello, Segments, VERSION,
        broker::{
            BROKER, ClaimHeader, Delete, GetHeader, GetObject, Lifetime, List, Message, PutHeader, Resume,
            ResumedLease, Table, Token, WatchHeader,
        },
    },
};

pub(super) const NAMES: [&str; 3] = ["a", "b", "c"];

/// The memory that clients put. Twice as many as a step can name: the second half are the second segments of long puts.
static MEMORY: LazyLock<Vec<OwnedFd>> = LazyLock::new(|| {
    let memory = |_| {
        let memfd = memfd::create(c"vmmfd", GRANULARITY).unwrap();
        memfd::add_seals(&memfd, nix::fcntl::SealFlag::F_SEAL_SEAL).unwrap();
        memfd
    };
    (0..8).map(memory).collect()
});

static TABLE: LazyLock<OwnedFd> = LazyLock::new(|| table::sealed("{}").unwrap());

/// The position in [`MEMORY`] of each inode.
static INODES: LazyLock<BTreeMap<u64, usize>> = LazyLock::new(|| {
    let inode = |(at, fd)| (nix::sys::stat::fstat(fd).unwrap().st_ino, at);
    MEMORY.iter().enumerate().map(|(at, fd): (usize, &OwnedFd)| inode((at, fd))).collect()
});

static PUT: LazyLock<PutHeader> = LazyLock::new(|| {
    let put = format!(
        r#"{{"name": "", "backend": "host", "mode": 438, "sizes": [{GRANULARITY}], "parts": [{{"name": "all", "memory": {{
            "mechanism": "vmm", "device": {{"uuid": "{}", "name": "host"}}, "location": "device", "size": {GRANULARITY},
            "mapped_size": {GRANULARITY}, "segments": 1}}}}]}}"#,
        uuid::Uuid::nil()
    );
    serde_json::from_str(&put).unwrap()
});

/// The memory that a descriptor belongs to.
pub(super) fn memory_of(fd: impl std::os::fd::AsFd) -> Option<usize> {
    INODES.get(&nix::sys::stat::fstat(fd.as_fd()).unwrap().st_ino).copied()
}

fn duplicate(fd: &OwnedFd) -> OwnedFd {
    fd.try_clone().unwrap()
}

/// An unanswered request.
#[derive(Debug, Clone)]
pub(super) struct Pending {
    pub(super) request: Request,
    pub(super) token: Token,
    /// Whether it was sent before.
    pub(super) is_sent: bool,
    /// The earliest time of a timeout.
    pub(super) due: std::time::Instant,
}

/// A client's process.
#[derive(Debug, Default)]
pub(super) struct Client {
    pub(super) number: usize,
    pub(super) uid: u32,
    pub(super) pid: i32,
    pub(super) connection: Option<ConnectionId>,
    /// Whether the connection has resumed the client's leases.
    pub(super) is_ready: bool,
    pub(super) instance: String,
    pub(super) pending: Option<Pending>,
    /// The last answered request.
    pub(super) last: Option<Pending>,
    pub(super) leases: Vec<ResumedLease>,
    pub(super) claim: Option<Token>,
    /// The last put of each name that may end with its maker.
    pub(super) puts: BTreeMap<usize, Token>,
    /// The last event that the watch has examined.
    pub(super) seen: Option<u64>,
}

pub(super) fn hello() -> Message {
    let capabilities = vec![BROKER.to_owned()];
    Message::Hello(Hello { version: VERSION, capabilities, backend: "none".to_owned(), pid: 1, timeout_ms: 1000 })
}

/// The part that a client's put has.
pub(super) fn part_of(client: usize, kind: Kind) -> &'static str {
    match (kind, client % 2) {
        (Kind::Part, 0) => "x",
        (Kind::Part, _) => "y",
        _ => "all",
    }
}

impl Client {
    pub(super) fn has_lease(&self, token: Token) -> bool {
        self.leases.iter().any(|lease| lease.token == token)
    }

    pub(super) fn resume(&self) -> Resume {
        Resume { leases: self.leases.clone(), puts: self.puts.values().copied().collect() }
    }

    /// The message of the pending request, with its descriptors.
    pub(super) fn message(&self, pending: &Pending) -> (Message, Vec<OwnedFd>) {
        let get = |name: usize, wait: u64, newer_than: Option<u64>, claim: Option<ClaimHeader>| {
            let object = GetObject { name: NAMES[name].to_owned(), newer_than, ..GetObject::default() };
            let wait_ms = Some(wait).filter(|wait| *wait > 0);
            Message::Get(Box::new(GetHeader { objects: vec![object], wait_ms, claim }))
        };
        let object = |object| Message::Get(Box::new(GetHeader { objects: vec![object], wait_ms: None, claim: None }));
        let message = match pending.request {
            Request::Put { name, memory, kind } => return self.put(pending.token, name, memory, kind),
            Request::Select { name, lease } => {
                object(GetObject { name: NAMES[name].to_owned(), lease: Some(lease), ..GetObject::default() })
            }
            Request::Get { name, wait, newer } => get(name, wait, newer.then_some(1), None),
            Request::Describe { name } => {
                let parts = Some(BTreeMap::new());
                object(GetObject { name: NAMES[name].to_owned(), parts, ..GetObject::default() })
            }
            Request::Claim { name, wait } => get(name, wait, None, Some(ClaimHeader::default())),
            Request::Delete { name } => {
                Message::Delete(Delete { name: NAMES[name].to_owned(), request: Some(pending.token) })
            }
            Request::Watch => {
                let (after, instance) = (self.seen, self.seen.map(|_| self.instance.clone()));
                Message::Watch(WatchHeader { prefix: String::new(), after, instance, recalls: false })
            }
            Request::Steal(token) => {
                // The thief does not know the version.
                let leases = vec![ResumedLease { token, id: String::new(), size: 0 }];
                Message::Resume(Resume { leases, puts: Vec::new() })
            }
            Request::List => Message::List(List { prefix: String::new(), after: None }),
        };
        (message, Vec::new())
    }

    fn put(&self, token: Token, name: usize, memory: usize, kind: Kind) -> (Message, Vec<OwnedFd>) {
        let mut put = PUT.clone();
        let mut fds = vec![duplicate(&MEMORY[memory])];
        (put.name, put.request) = (NAMES[name].to_owned(), Some(token));
        put.replace = kind != Kind::New;
        put.keep = (kind == Kind::Keep).then_some(1);
        put.parts[0].name = part_of(self.number, kind).to_owned();
        put.lifetime = match kind {
            Kind::Maker => Some(Lifetime::Maker),
            Kind::Leased => Some(Lifetime::Leased),
            Kind::Idle => Some(Lifetime::Idle { ms: 1000 }),
            _ => None,
        };
        match kind {
            Kind::Part => {
                put.announced = vec!["x".to_owned(), "y".to_owned()];
                (put.group, put.wait_ms) = (Some("g".to_owned()), Some(2000));
            }
            Kind::Table => {
                put.metadata = Some(Table::Length(2));
                fds.insert(0, duplicate(&TABLE));
            }
            Kind::Long => {
                let memory = &mut put.parts[0].memory;
                (memory.size, memory.mapped_size, memory.segments) = (2 * GRANULARITY, 2 * GRANULARITY, 2);
            }
            _ => {}
        }
        (Message::Put(Box::new(put)), fds)
    }

    /// The second segment of a long put.
    pub(super) fn rest_of_put(&self) -> Option<(Message, Vec<OwnedFd>)> {
        match self.pending.as_ref()?.request {
            Request::Put { memory, kind: Kind::Long, .. } => {
                let segments = Segments { first: 1, sizes: vec![GRANULARITY] };
                Some((Message::Segments(segments), vec![duplicate(&MEMORY[memory + 4])]))
            }
            _ => None,
        }
    }
}
