//! Memory to put by hand, and the requests of a raw client.

use std::{
    fs::File,
    io::Write,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use nix::{
    fcntl::{FcntlArg, SealFlag, fcntl},
    sys::memfd::{MFdFlags, memfd_create},
};
use vmmfd::{
    broker::{Client, Get, PutPart},
    driver::{Backend, Driver},
    memory::{Chunk, Description, Region, Shared, Sharing},
    wire::{
        MAX_FDS, Memory, Segments,
        broker::{self, GetObject, Message, Token},
    },
};

use crate::broker_process::Raw;

/// The segments of a large object: its put and its lease take three records each.
pub(crate) const MANY: usize = 600;

/// The distinct chunks that these segments repeat, and the size of a chunk.
pub(crate) const CHUNKS: usize = 3;
pub(crate) const CHUNK: u64 = 2 << 20;

/// A unique token.
pub(crate) fn token() -> Token {
    static LAST: AtomicU64 = AtomicU64::new(0);
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&std::process::id().to_le_bytes());
    bytes[8..].copy_from_slice(&LAST.fetch_add(1, Ordering::Relaxed).to_le_bytes());
    Token(bytes)
}

/// Sends a range of the segments of a put.
pub(crate) fn send_segments(raw: &Raw, material: &Material, from: usize, to: usize) {
    for at in (from..to).step_by(MAX_FDS) {
        let some = at..to.min(at + MAX_FDS);
        let sizes = material.segments[some.clone()].iter().map(|(size, _)| *size).collect();
        raw.send(&Message::Segments(Segments { first: at as u64, sizes }), &material.fds()[some]).unwrap();
    }
}

/// The first and the last byte of an object.
pub(crate) fn value(client: &Client, driver: &Driver, name: &str) -> [u8; 2] {
    let object = client.get(&Get::new(name)).unwrap().open(driver, None).unwrap();
    let memory = object.parts()[0].memory().unwrap();
    let (mut first, mut last) = ([0; 1], [0; 1]);
    memory.copy_out(0, &mut first).unwrap();
    memory.copy_out(memory.size() - 1, &mut last).unwrap();
    [first[0], last[0]]
}

/// A put of memory as the part `all`, with the sizes of its first record.
pub(crate) fn put_of_all(name: &str, backend: Backend, memory: Memory, sizes: Vec<u64>) -> broker::PutHeader {
    let part = broker::PutPartHeader { name: "all".to_owned(), memory, arrays: None, array_count: None, digest: None };
    broker::PutHeader {
        name: name.to_owned(),
        backend: backend.to_string(),
        parts: vec![part],
        sizes,
        ..broker::PutHeader::default()
    }
}

/// Memory and its description in a put.
pub(crate) struct Material {
    pub(crate) memory: Memory,
    pub(crate) segments: Vec<(u64, Arc<Chunk>)>,
    description: Description,
    backend: Backend,
}

impl Material {
    pub(crate) fn of(shared: &Shared) -> Self {
        let (_, chunks) = shared.chunks(0..shared.size()).unwrap().unwrap();
        let segments: Vec<_> = chunks.into_iter().map(|chunk| (chunk.size(), chunk)).collect();
        let description = shared.describe().unwrap();
        Self { memory: (&description).into(), segments, description, backend: shared.device().backend() }
    }

    /// Repeats the segments up to this count.
    pub(crate) fn repeated(mut self, count: usize) -> Self {
        self.segments = self.segments.into_iter().cycle().take(count).collect();
        let size = self.segments.iter().map(|(size, _)| size).sum();
        (self.description.size, self.description.mapped_size) = (size, size);
        if let Sharing::Vmm { segments, .. } = &mut self.description.sharing {
            *segments = count as u64;
        }
        self.memory = (&self.description).into();
        self
    }

    /// The whole memory as the part `all` of a client's put.
    pub(crate) fn part(&self) -> PutPart<'_> {
        let segments = self.segments.iter().map(|(size, chunk)| (*size, chunk.as_fd()));
        PutPart::of_segments("all", self.backend, self.description.clone(), segments).unwrap()
    }

    /// A put of the whole memory, with the sizes of its first record.
    pub(crate) fn put(&self, name: &str) -> broker::PutHeader {
        let sizes = self.segments.iter().take(MAX_FDS).map(|(size, _)| *size).collect();
        put_of_all(name, self.backend, self.memory.clone(), sizes)
    }

    pub(crate) fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.segments.iter().map(|(_, chunk)| chunk.as_fd()).collect()
    }
}

pub(crate) fn get(name: &str) -> broker::GetHeader {
    let object = GetObject { name: name.to_owned(), ..GetObject::default() };
    broker::GetHeader { objects: vec![object], wait_ms: None, claim: None }
}

pub(crate) fn get_message(name: &str) -> Message {
    Message::Get(Box::new(get(name)))
}

/// A sealed memfd with a text, the form of a table.
pub(crate) fn memfd(text: &str) -> OwnedFd {
    let file = memfd_create(c"table", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
    let mut file = File::from(file);
    file.write_all(text.as_bytes()).unwrap();
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_SEAL;
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).unwrap();
    file.into()
}

/// The offer of version 3 of an object, whose id ends with `id`, with one lease.
pub(crate) fn restore(id: u8, uid: u32, gid: u32, token: u8) -> broker::Restore {
    broker::Restore {
        version: 3,
        id: format!("0c2b6d3a-7f0e-4f3c-9d4b-0000000000{id:02x}"),
        created_ms: 1_700_000_000_123,
        owner: broker::Owner { uid, gid },
        leases: vec![Token([token; 16])],
    }
}
