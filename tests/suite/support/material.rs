//! Memory to put by hand, and the requests of a raw client.

use vmmfd::{
    memory::Chunk,
    wire::{
        MAX_FDS, Memory,
        broker::{self, GetObject, Message},
    },
};

use crate::support::prelude::*;

/// Puts an object of 4 MiB in two segments. All bytes have the same value.
pub(crate) fn put(client: &Client, driver: &Driver, name: &str, value: u8) {
    let memory = filled(driver, 4 << 20, Some(2 << 20), value);
    client.put(&Put::new(name).condition(Condition::Any).part(PutPart::of("all", &memory).unwrap())).unwrap();
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
