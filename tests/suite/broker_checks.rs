//! Requests that a broker refuses: contradictions, exceeded limits, and memory that no reader could map.

use std::os::fd::{AsFd, BorrowedFd};

use nix::{
    fcntl::{FcntlArg, SealFlag, fcntl},
    sys::memfd::{MFdFlags, memfd_create},
};
use serde_json::json;
use vmmfd::{
    broker::Get,
    error::{ErrorCode, RefusalCode},
    wire::{
        MAX_FDS, Received, Segments,
        broker::{self, Attached, Delete, MAX_INLINE, MAX_INLINE_TOGETHER, Message, Published, Table, Token},
    },
};

use crate::{
    broker::{filled, refused},
    broker_process::{Process, Raw, Setup},
    support::Subject,
    support::material::{CHUNK, CHUNKS, MANY, Material, get_message, memfd, restore, send_segments},
};

const MIB: u64 = 1 << 20;

/// A broker, a connection to it and memory to put.
struct Scene {
    subject: Subject,
    server: Process,
    raw: Raw,
    memory: Material,
}

impl Scene {
    fn new() -> Self {
        let subject = Subject::host();
        let server = Process::start(Setup::of(&subject));
        let raw = Raw::greeted(&server.path).unwrap();
        let memory = Material::of(&filled(&subject.driver, 2 * MIB, None, 1));
        Self { subject, server, raw, memory }
    }

    fn put(&self, put: broker::PutHeader, fds: &[BorrowedFd<'_>]) -> Result<Published, (RefusalCode, String)> {
        match self.raw.ask(&Message::Put(Box::new(put)), fds).unwrap().unwrap().0 {
            Message::Published(published) => Ok(published),
            Message::Refused(refusal) => Err((refusal.code, refusal.message)),
            other => panic!("{other:?}"),
        }
    }

    /// Asserts that no refused object is visible.
    fn assert_empty(&self) {
        assert!(self.server.client().list("").unwrap().is_empty());
    }
}

/// Host memory with all required seals except `F_SEAL_WRITE`.
fn host_memory(size: u64) -> std::os::fd::OwnedFd {
    let file = memfd_create(c"memory", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
    nix::fcntl::fallocate(file.as_fd(), nix::fcntl::FallocateFlags::empty(), 0, size.cast_signed()).unwrap();
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).unwrap();
    file
}

#[test]
fn wrong_sizes_of_segments_are_refused() {
    let scene = Scene::new();
    let (invalid, odd) = (RefusalCode::Invalid, host_memory(5000));
    let mut put = scene.memory.put("a");
    (put.parts[0].memory.size, put.parts[0].memory.mapped_size, put.sizes[0]) = (5000, 5000, 5000);
    let (code, message) = scene.put(put, &[odd.as_fd()]).unwrap_err();
    assert_eq!((code, message.contains("5000 bytes of memory")), (invalid, true), "{message}");
    let put = broker::PutHeader { sizes: Vec::new(), ..scene.memory.put("a") };
    let (code, message) = scene.put(put, &[]).unwrap_err();
    assert_eq!((code, message.contains("1 to 1 are allowed")), (invalid, true), "{message}");
    // The sum is a multiple of the page size, but the segment sizes are not.
    let halves = [host_memory(MIB), host_memory(3 * MIB)];
    let mut put = scene.memory.put("a");
    (put.parts[0].memory.size, put.parts[0].memory.mapped_size) = (4 * MIB, 4 * MIB);
    (put.parts[0].memory.segments, put.sizes) = (2, vec![MIB, 3 * MIB]);
    let (code, message) = scene.put(put, &[halves[0].as_fd(), halves[1].as_fd()]).unwrap_err();
    assert_eq!((code, message.contains("segment 0 of part `all` has 1048576 bytes")), (invalid, true), "{message}");
    scene.assert_empty();
}

#[test]
fn long_inline_tables_are_refused() {
    let scene = Scene::new();
    let text = |length: usize| Attached::of(&json!({"x": "x".repeat(length - 8)})).unwrap();
    assert_eq!(text(MAX_INLINE).as_str().len(), MAX_INLINE);
    let long = broker::PutHeader { metadata: Some(Table::Inline(text(MAX_INLINE + 1))), ..scene.memory.put("a") };
    let (code, message) = scene.put(long, &scene.memory.fds()).unwrap_err();
    assert_eq!((code, message.contains("4097 bytes in the record")), (RefusalCode::Invalid, true), "{message}");
    // Each array is short enough, but together they are too long.
    let name = "n".repeat(900);
    let array = json!([{"name": name, "array": {"dtype": "uint8", "shape": [1]},
        "attributes": {"x": "x".repeat(1000)}}]);
    let arrays = Attached::of(&array).unwrap();
    let parts = 1 + MAX_INLINE_TOGETHER / arrays.as_str().len();
    let memory = Material::of(&filled(&scene.subject.driver, 2 * MIB, None, 1)).repeated(parts);
    let mut put = memory.put("a");
    let one = broker::PutPartHeader { memory: scene.memory.memory.clone(), ..put.parts[0].clone() };
    let part = |at| broker::PutPartHeader {
        name: format!("p{at}"),
        arrays: Some(Table::Inline(arrays.clone())),
        array_count: Some(1),
        ..one.clone()
    };
    put.parts = (0..parts).map(part).collect();
    let (code, message) = scene.put(put.clone(), &memory.fds()).unwrap_err();
    assert_eq!((code, message.contains("in total")), (RefusalCode::Invalid, true), "{message}");
    scene.assert_empty();
    (put.parts[0].arrays, put.parts[0].array_count) = (None, None);
    scene.put(put, &memory.fds()).unwrap();
}

#[test]
fn wrong_count_in_received_ends_connection() {
    let scene = Scene::new();
    let shared = filled(&scene.subject.driver, CHUNKS as u64 * CHUNK, Some(CHUNK), 7);
    let many = Material::of(&shared).repeated(MANY);
    let answer = scene.raw.ask(&Message::Put(Box::new(many.put("many"))), &many.fds()[..MAX_FDS]).unwrap();
    assert!(matches!(answer, Some((Message::Send(_), _))), "{answer:?}");
    send_segments(&scene.raw, &many, MAX_FDS, MANY);
    assert!(matches!(scene.raw.receive().unwrap(), Some((Message::Published(_), _))));
    let first = MAX_FDS as u64;
    for wrong in [0, first - 1, first + 1, MANY as u64] {
        let raw = Raw::greeted(&scene.server.path).unwrap();
        assert!(matches!(raw.ask(&get_message("many"), &[]).unwrap(), Some((Message::Lease(_), _))));
        raw.send(&Message::Received(Received { segments: wrong }), &[]).unwrap();
        let failure = raw.ending().unwrap_or_else(|| panic!("{wrong} was accepted"));
        assert_eq!(failure.code, ErrorCode::Protocol);
        assert!(failure.message.contains(&format!("{wrong} segments")), "{}", failure.message);
    }
    // A client may acknowledge each record with the number of segments received so far.
    let raw = Raw::greeted(&scene.server.path).unwrap();
    assert!(matches!(raw.ask(&get_message("many"), &[]).unwrap(), Some((Message::Lease(_), _))));
    for so_far in [first, 2 * first] {
        let answer = raw.ask(&Message::Received(Received { segments: so_far }), &[]).unwrap();
        assert!(matches!(&answer, Some((Message::Segments(Segments { first, .. }), _)) if *first == so_far));
    }
}

#[test]
fn request_token_of_another_name_is_refused() {
    let scene = Scene::new();
    let client = scene.server.client();
    let fds = scene.memory.fds();
    let request = |of: u8| Some(Token([of; 16]));
    let put = |name: &str, of: u8| broker::PutHeader { request: request(of), ..scene.memory.put(name) };
    let delete = |name: &str, of: u8| {
        let answer = scene.raw.ask(&Message::Delete(Delete { name: name.to_owned(), request: request(of) }), &[]);
        match answer.unwrap().unwrap().0 {
            Message::Done(_) => Ok(()),
            Message::Refused(refusal) => Err(refusal.code),
            other => panic!("{other:?}"),
        }
    };
    let first = scene.put(put("a", 1), &fds).unwrap();
    assert_eq!(scene.put(put("a", 1), &fds).unwrap(), first);
    assert_eq!(scene.put(put("b", 1), &fds).unwrap_err().0, RefusalCode::Invalid);
    assert_eq!(refused(client.get(&Get::new("b"))).0, RefusalCode::Absent);
    // A repeated request returns its first answer even after its version is deleted. The same holds for a delete.
    delete("a", 2).unwrap();
    assert_eq!(scene.put(put("a", 1), &fds).unwrap(), first);
    assert_eq!(scene.put(put("b", 1), &fds).unwrap_err().0, RefusalCode::Invalid);
    delete("a", 2).unwrap();
    assert_eq!(delete("b", 2), Err(RefusalCode::Invalid));
    assert_eq!(scene.put(put("b", 2), &fds).unwrap_err().0, RefusalCode::Invalid);
    assert_eq!(delete("b", 1), Err(RefusalCode::Invalid));
    scene.assert_empty();
}

/// Descriptors that are not sealed memory of the claimed size. `violations.rs` has the other wrong puts.
#[test]
fn foreign_descriptors_are_refused() {
    let scene = Scene::new();
    let unsealed = memfd_create(c"open", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
    nix::unistd::ftruncate(&unsealed, 2 << 20).unwrap();
    let (pipe, _writer) = std::io::pipe().unwrap();
    let files = ["/dev/null", "/proc/self/maps", "/"].map(|path| std::fs::File::open(path).unwrap());
    let smaller = host_memory(MIB);
    let others = [unsealed.as_fd(), pipe.as_fd(), scene.raw.as_fd(), smaller.as_fd()];
    for fd in files.iter().map(AsFd::as_fd).chain(others) {
        let (code, message) = scene.put(scene.memory.put("a"), &[fd]).unwrap_err();
        assert_eq!(code, RefusalCode::Memory, "{message}");
    }
    scene.assert_empty();
}

#[test]
fn tables_count_towards_the_quota() {
    let subject = Subject::host();
    let quota = [Some(2 * MIB + 100_000), None, None, None];
    let server = Process::start(Setup { quota, ..Setup::of(&subject) });
    let raw = Raw::greeted(&server.path).unwrap();
    let memory = Material::of(&filled(&subject.driver, MIB, None, 1));
    let put = |length: usize| {
        let text = json!({"x": "x".repeat(length)}).to_string();
        let table = memfd(&text);
        let put = broker::PutHeader { metadata: Some(Table::Length(text.len() as u64)), ..memory.put("a") };
        match raw.ask(&Message::Put(Box::new(put)), &[table.as_fd(), memory.fds()[0]]).unwrap().unwrap().0 {
            Message::Published(_) => Ok(()),
            Message::Refused(refusal) => Err(refusal.code),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(put(200_000), Err(RefusalCode::Quota));
    assert_eq!(put(90_000), Ok(()));
    // Deleting the version frees its quota.
    server.client().delete("a").unwrap();
    assert_eq!(put(90_000), Ok(()));
}

#[test]
fn reader_refuses_arrays_outside_their_part() {
    let scene = Scene::new();
    let memory = Material::of(&filled(&scene.subject.driver, 2 * MIB, None, 1)).repeated(3);
    let text = json!([{"name": "a", "array": {"dtype": "uint8", "shape": [3 * MIB]}}]).to_string();
    let table = memfd(&text);
    let mut put = memory.put("a");
    let one = put.parts[0].clone();
    put.parts = [2, 1]
        .into_iter()
        .zip(["large", "small"])
        .map(|(segments, name)| {
            let mut part = broker::PutPartHeader { name: name.to_owned(), ..one.clone() };
            let size = segments * 2 * MIB;
            (part.memory.size, part.memory.mapped_size, part.memory.segments) = (size, size, segments);
            (part.arrays, part.array_count) = (Some(Table::Length(text.len() as u64)), Some(1));
            part
        })
        .collect();
    let fds: Vec<_> = std::iter::repeat_n(table.as_fd(), 2).chain(memory.fds()).collect();
    // The server does not read the table.
    scene.put(put, &fds).unwrap();
    let client = scene.server.client();
    let (code, message) = refused(client.get(&Get::new("a")));
    assert_eq!((code, message.contains("part `small`")), (RefusalCode::Differs, true), "{message}");
    assert_eq!(client.stat("a", None).unwrap().version.reports.len(), 1);
}

#[test]
fn deleted_name_is_not_offered_back() {
    let scene = Scene::new();
    let (fds, uid) = (scene.memory.fds(), nix::unistd::geteuid().as_raw());
    let offer = |name: &str, id: u8| {
        let restore = restore(id, uid, uid, id);
        let put = broker::PutHeader { restore: Some(restore), mode: Some(0o644), ..scene.memory.put(name) };
        scene.put(put, &fds).map(|published| published.version).map_err(|(code, _)| code)
    };
    assert_eq!(offer("a", 1), Ok(3));
    scene.server.client().delete("a").unwrap();
    // An offer of the same version is denied, and so is an offer of an older version.
    assert_eq!(offer("a", 1), Err(RefusalCode::Denied));
    assert_eq!(offer("a", 2), Err(RefusalCode::Denied));
    assert_eq!(offer("b", 3), Ok(3));
    assert_eq!(scene.put(scene.memory.put("a"), &fds).unwrap().version, 1);
}

#[test]
fn get_expects_an_owner() {
    let scene = Scene::new();
    let (client, uid) = (scene.server.client(), nix::unistd::geteuid().as_raw());
    scene.put(scene.memory.put("a"), &scene.memory.fds()).unwrap();
    let lease = client.get(&Get::new("a").expect_owner(uid)).unwrap();
    assert_eq!(lease.owner().uid, uid);
    let other = Get::new("a").expect_owner(uid + 1);
    let all = client.get_all(&[Get::new("a"), other.clone()], None);
    let claimed = client.get_or_claim(&other, &vmmfd::broker::ClaimOf::whole());
    for refusal in [refused(client.get(&other)), refused(all), refused(claimed)] {
        assert_eq!(refusal.0, RefusalCode::Differs);
        assert!(refusal.1.contains(&format!("its owner is uid {uid}, not {}", uid + 1)), "{}", refusal.1);
    }
    // Only the lease that fits remains.
    let leases = || client.who("").unwrap().leases.len();
    crate::broker::until(|| leases() == 1);
}
