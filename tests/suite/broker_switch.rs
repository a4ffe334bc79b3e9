//! Switching an object to another version at the same addresses, and parking it.
//!
//! One file of more than 500 lines: each test switches or parks the same kind of object.

#![allow(unsafe_code, reason = "mapping over addresses that are reserved")]

use std::{any::Any, num::NonZeroUsize};

use nix::{
    errno::Errno,
    sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap},
};

use crate::support::prelude::*;

cases! {
    on crate::support::Subject; every backend: [
    parts_and_pieces_are_switched_together,
    new_version_may_change_segments_and_arrays,
    mismatch_lists_every_difference,
    memory_in_use_is_not_switched,
    failed_calls_leave_nothing,
    failed_switch_keeps_the_old_version,
    unmappable_versions_leave_the_object_parked,
    failed_unmap_changes_nothing,
    unpark_restores_the_same_addresses,
    parked_object_can_not_be_read,
    ]
}

const MIB: u64 = 1 << 20;

/// The size of each version: three segments.
const SIZE: u64 = 6 * MIB;

fn entry(name: &str, length: u64, offset: u64) -> ArrayEntry {
    let mut array = ArrayDescriptor::new(ElementType::U8, [length], Order::C).unwrap();
    array.offset = offset;
    ArrayEntry::new(name, array)
}

/// Puts a version of `a` in segments of 2 MiB. All bytes have the same value.
fn put(client: &Client, subject: &Subject, value: u8) {
    put_of(client, subject, SIZE, Some(2 * MIB), value, vec![entry("w", 16, 3 * MIB)]);
}

fn put_of(client: &Client, subject: &Subject, size: u64, chunk: Option<u64>, value: u8, arrays: Vec<ArrayEntry>) {
    let memory = filled(&subject.driver, size, chunk, value);
    let part = PutPart::of("all", &memory).unwrap().arrays(arrays).digest(format!("sum:{value}"));
    let metadata = json!({"value": value}).as_object().unwrap().clone();
    client.put(&Put::new("a").condition(Condition::Any).metadata(metadata).part(part)).unwrap();
}

fn open(client: &Client, subject: &Subject, get: &Get) -> Object {
    client.get(get).unwrap().open(&subject.driver, None).unwrap()
}

/// Maps version 1 of an object, and puts version 2.
fn one_and_two(subject: &Subject) -> (Broker, Client, Object) {
    let broker = Broker::start(subject);
    let client = broker.client();
    put(&client, subject, 1);
    let object = open(&client, subject, &Get::new("a"));
    put(&client, subject, 2);
    (broker, client, object)
}

fn newest() -> Get {
    Get::new("a")
}

fn addresses(object: &Object) -> Vec<u64> {
    object.parts().iter().flat_map(|part| part.pieces()).map(|piece| piece.address()).collect()
}

/// The common value of an object's bytes, read in the first and last byte of each segment and through the array.
#[track_caller]
fn value(object: &Object) -> u8 {
    let mut values = object.array("w").unwrap().element(&[15]).unwrap();
    for piece in object.parts().iter().flat_map(|part| part.pieces()) {
        let mut at = 0;
        while at < piece.size() {
            for offset in [at, (at + 2 * MIB).min(piece.size()) - 1] {
                let mut byte = [0];
                piece.copy_out(offset, &mut byte).unwrap();
                values.push(byte[0]);
            }
            at += 2 * MIB;
        }
    }
    values.dedup();
    assert_eq!(values.len(), 1, "bytes of several versions: {values:?}");
    values[0]
}

fn misuse<T: std::fmt::Debug>(result: vmmfd::Result<T>) -> String {
    match result {
        Err(Error::Misuse { problem }) => problem,
        other => panic!("{other:?}"),
    }
}

fn parts_and_pieces_are_switched_together(subject: Subject) {
    let broker = Broker::start(&subject);
    let client = broker.client();
    let put = |value: u8| {
        let left = filled(&subject.driver, 4 * MIB, None, value);
        let right = filled(&subject.driver, 8 * MIB, Some(2 * MIB), value);
        let right = PutPart::of("right", &right).unwrap().arrays([
            entry("w", 16, 0),
            entry("middle", 8, 3 * MIB),
            entry("end", 8, 7 * MIB),
        ]);
        let parts = Put::new("a").condition(Condition::Any).part(PutPart::of("left", &left).unwrap());
        client.put(&parts.part(right)).unwrap();
    };
    put(1);
    let mut whole = open(&client, &subject, &newest());
    let mut pieces = open(&client, &subject, &Get::new("a").arrays(["w", "end"]));
    assert_eq!(pieces.parts()[0].pieces().len(), 2);
    put(2);
    for (object, get) in [(&mut whole, Get::new("a")), (&mut pieces, Get::new("a").arrays(["w", "end"]))] {
        let before = addresses(object);
        let next = object.prepare(client.get(&get).unwrap()).unwrap();
        drop(object.switch(next).unwrap());
        assert_eq!((value(object), addresses(object)), (2, before));
        assert_eq!(object.array("end").unwrap().element(&[7]).unwrap(), [2]);
    }
    // If the switch fails in the last part, the first part is restored too.
    put(3);
    for nth in 1.. {
        let next = whole.prepare(client.get(&newest()).unwrap()).unwrap();
        subject.faulty.fail(Fault::Nth(nth), 4242);
        let result = whole.switch(next);
        if subject.faulty.mend().is_none() {
            result.unwrap();
            break;
        }
        assert!(result.is_err());
        assert_eq!((value(&whole), whole.version()), (2, 2));
    }
    assert_eq!(value(&whole), 3);
}

fn new_version_may_change_segments_and_arrays(subject: Subject) {
    let broker = Broker::start(&subject);
    let client = broker.client();
    put_of(&client, &subject, SIZE - 100, Some(2 * MIB), 1, vec![entry("w", 16, 0)]);
    let mut object = open(&client, &subject, &newest());
    let before = addresses(&object);
    // The first array lookup caches positions in the table.
    assert_eq!(value(&object), 1);
    put_of(&client, &subject, SIZE, None, 2, vec![entry("new", 4, SIZE - 4), entry("w", 16, 0)]);
    let next = object.prepare(client.get(&newest()).unwrap()).unwrap();
    let old = object.switch(next).unwrap();
    assert_eq!((value(&object), addresses(&object)), (2, before));
    assert_eq!(object.array("new").unwrap().element(&[3]).unwrap(), [2]);
    // The old version has fewer arrays than the current layout, and another object has other addresses.
    let problem = misuse(object.switch(old));
    assert!(problem.contains("version 1 of `a` was prepared for a layout other than that"), "{problem}");
    let mut other = open(&client, &subject, &newest());
    let next = object.prepare(client.get(&newest()).unwrap()).unwrap();
    assert!(misuse(other.switch(next)).contains("prepared for a layout other than that"));
    assert!(misuse(object.unpark(client.get(&newest()).unwrap())).contains("not parked"));
    assert_eq!((value(&object), value(&other)), (2, 2));
}

fn mismatch_lists_every_difference(subject: Subject) {
    let broker = Broker::start(&subject);
    let client = broker.client();
    let all = || vec![entry("w", 16, 0), entry("moved", 4, 100), entry("gone", 4, 200)];
    put_of(&client, &subject, SIZE, Some(2 * MIB), 1, all());
    let object = open(&client, &subject, &newest());
    let live = subject.live();
    let differences = |get: &Get| {
        let (code, message) = refused(object.prepare(client.get(get).unwrap()));
        assert_eq!((code, subject.live()), (RefusalCode::Differs, live));
        let (start, list) = message.split_once(": ").unwrap();
        assert!(start.ends_with("does not fit at the addresses of version 1 of `a`"), "{message}");
        list.to_owned()
    };
    put_of(&client, &subject, SIZE, None, 2, vec![entry("moved", 4, 104), entry("w", 8, 0)]);
    let expected = "array `w` is uint8 8 at byte 0, not uint8 16 at byte 0; \
        array `moved` is uint8 4 at byte 104, not uint8 4 at byte 100; array `gone` is missing";
    assert_eq!(differences(&newest()), expected);
    put_of(&client, &subject, 4 * MIB, None, 3, all());
    assert_eq!(differences(&newest()), format!("part `all` has {} bytes from byte 0 on, not {SIZE}", 4 * MIB));
    put_of(&client, &subject, 8 * MIB, None, 4, all());
    let larger = format!("part `all` has {} bytes of memory where {SIZE} bytes of addresses are reserved", 8 * MIB);
    assert_eq!(differences(&newest()), larger);
    put_of(&client, &subject, SIZE, Some(2 * MIB), 5, all());
    let other = Get::new("a").range(3 * MIB..5 * MIB);
    assert!(differences(&other).starts_with("a piece of part `all` starts at byte 2097152, not 0"));
    let memory = filled(&subject.driver, SIZE, None, 6);
    client.put(&Put::new("a").condition(Condition::Any).part(PutPart::of("other", &memory).unwrap())).unwrap();
    drop(memory);
    assert_eq!(differences(&newest()), "part `all` is missing; part `other` is new");
    // The object is unchanged.
    assert_eq!(value(&object), 1);
}

fn memory_in_use_is_not_switched(subject: Subject) {
    let (_broker, client, mut object) = one_and_two(&subject);
    let live = subject.live();
    type User = fn(&Object) -> Box<dyn Any>;
    let users: [User; 3] = [
        |object| Box::new(object.array("w").unwrap()),
        |object| Box::new(Arc::clone(object.parts()[0].memory().unwrap())),
        |object| Box::new(Arc::downgrade(&object.parts()[0].pieces()[0])),
    ];
    for user in users {
        let user = user(&object);
        let next = object.prepare(client.get(&newest()).unwrap()).unwrap();
        let problem = misuse(object.switch(next));
        assert!(
            problem.contains("the memory of part `all` is still referenced by 1 arrays or other owners"),
            "{problem}"
        );
        assert_eq!(misuse(object.park()), problem);
        assert_eq!((value(&object), object.version(), object.is_parked()), (1, 1, false));
        drop(user);
        assert_eq!(subject.live(), live);
    }
    object.park_with_lease().unwrap();
    let piece = Arc::clone(&object.parts()[0].pieces()[0]);
    misuse(object.unpark(client.get(&newest()).unwrap()));
    drop(piece);
    object.unpark(client.get(&newest()).unwrap()).unwrap();
    assert_eq!(value(&object), 2);
}

/// Each driver call of a prepare and of an unpark fails in turn.
fn failed_calls_leave_nothing(subject: Subject) {
    let (_broker, client, mut object) = one_and_two(&subject);
    let before = addresses(&object);
    for parked in [false, true] {
        if parked {
            object.park_with_lease().unwrap();
        }
        let live = subject.live();
        for nth in 1.. {
            let lease = client.get(&newest()).unwrap();
            subject.faulty.fail(Fault::Nth(nth), 4242);
            let result = if parked { object.unpark(lease) } else { object.prepare(lease).map(drop) };
            let Some(verb) = subject.faulty.mend() else {
                result.unwrap();
                assert!(nth > 5, "{nth} calls");
                break;
            };
            assert!(result.is_err(), "{verb}, call {nth}, is of no consequence");
            let state = (object.is_parked(), object.version(), subject.live());
            assert_eq!(state, (parked, 1, live), "{verb}, call {nth}");
        }
    }
    assert_eq!((value(&object), addresses(&object)), (2, before));
}

fn failed_switch_keeps_the_old_version(subject: Subject) {
    let (_broker, client, mut object) = one_and_two(&subject);
    let (live, before) = (subject.live(), addresses(&object));
    // Each segment is mapped once. The old version is released after the switch.
    let verbs: &[&str] = match subject.kind {
        Kind::Host => &["synchronize", "replace", "replace", "replace"],
        _ => &["synchronize", "unmap", "map", "map", "map", "set_access"],
    };
    let mut failed = Vec::new();
    for nth in 1.. {
        let next = object.prepare(client.get(&newest()).unwrap()).unwrap();
        subject.faulty.take_verbs();
        subject.faulty.fail(Fault::Nth(nth), 4242);
        let result = object.switch(next);
        let Some(verb) = subject.faulty.mend() else {
            assert_eq!(subject.faulty.take_verbs(), verbs);
            drop(result.unwrap());
            assert_eq!(subject.faulty.take_verbs(), ["release"; 3]);
            break;
        };
        match result {
            Err(Error::Memory(MemoryError::NotExchanged { back: None, source })) if verb != "synchronize" => {
                assert!(matches!(*source, Error::Driver { code: 4242, .. }), "{source}");
            }
            Err(Error::Driver { call: "synchronize", code: 4242, .. }) => {}
            other => panic!("{verb}, call {nth}: {other:?}"),
        }
        let state = (value(&object), object.version(), addresses(&object), subject.live(), object.is_parked());
        assert_eq!(state, (1, 1, before.clone(), live, false), "{verb}, call {nth}");
        failed.push(verb);
    }
    // The unmap is repeated.
    assert!(failed.iter().eq(verbs.iter().filter(|verb| **verb != "unmap")), "{failed:?}");
    assert_eq!((value(&object), subject.live()), (2, live));
}

fn unmappable_versions_leave_the_object_parked(subject: Subject) {
    let (_broker, client, mut object) = one_and_two(&subject);
    let before = addresses(&object);
    // The first call waits for GPU work.
    for nth in 2.. {
        let version = object.version();
        let next = object.prepare(client.get(&newest()).unwrap()).unwrap();
        subject.faulty.fail(Fault::From(nth), 4242);
        let result = object.switch(next);
        if subject.faulty.mend().is_none() {
            drop(result.unwrap());
            break;
        }
        let error = result.unwrap_err();
        let text = error.in_full();
        let why = "the old memory could not be mapped again (map failed: an injected fault (4242)), nothing is mapped, \
            and the addresses stay reserved: ";
        assert!(error.kind() == ErrorKind::System && text.contains(why), "{text}");
        assert_eq!((object.is_parked(), object.version(), addresses(&object)), (true, version, before.clone()));
        let live = subject.live();
        assert_eq!((live.handles, live.reservations, live.mappings), (0, 1, 0), "call {nth}");
        // The object still holds its lease, so the version exists.
        object.unpark(client.get(&Get::new("a").version(version)).unwrap()).unwrap();
        assert_eq!((u64::from(value(&object)), addresses(&object)), (version, before.clone()));
    }
    assert_eq!(value(&object), 2);
}

/// An unmap that fails again when it is repeated. The host backend replaces mappings without one.
fn failed_unmap_changes_nothing(subject: Subject) {
    let (_broker, client, mut object) = one_and_two(&subject);
    let live = subject.live();
    let next = object.prepare(client.get(&newest()).unwrap()).unwrap();
    subject.faulty.fail(Fault::Verb("unmap"), 4242);
    let parked = object.park();
    let switched = object.switch(next).map(drop);
    subject.faulty.mend();
    assert_eq!(switched.is_ok(), subject.kind == Kind::Host, "{switched:?}");
    for failed in [switched, parked].into_iter().filter_map(Result::err) {
        assert!(matches!(failed, Error::Memory(MemoryError::NotExchanged { back: None, .. })), "{failed:?}");
    }
    let version = if subject.kind == Kind::Host { 2 } else { 1 };
    assert_eq!((value(&object), object.is_parked(), subject.live()), (version, false, live));
}

fn unpark_restores_the_same_addresses(mut subject: Subject) {
    subject.alone();
    let broker = Broker::start(&subject);
    let client = broker.client();
    put(&client, &subject, 1);
    let file = *subject.faulty.exported().last().unwrap();
    let counts = |subject: &Subject| {
        let live = subject.live();
        (live.handles, live.reservations, live.mappings)
    };
    // Only the broker holds the file.
    until(|| subject.kind == Kind::Cuda || file.open_here() == 1);
    let mut object = open(&client, &subject, &newest());
    let before = addresses(&object);
    assert_eq!(counts(&subject), (3, 1, 3));
    object.park().unwrap();
    assert_eq!((object.is_parked(), addresses(&object), counts(&subject)), (true, before.clone(), (0, 1, 0)));
    if subject.kind != Kind::Cuda {
        assert_eq!((file.open_here(), file.mapped_here()), (1, false), "a descriptor or a mapping of it is left");
    }
    assert!(client.who("").unwrap().leases.is_empty());
    // Unpark the same version, which is still current.
    object.unpark(client.get(&newest()).unwrap()).unwrap();
    assert_eq!((value(&object), object.version(), addresses(&object)), (1, 1, before.clone()));
    assert_eq!((object.is_parked(), counts(&subject)), (false, (3, 1, 3)));
    // A lease that is kept keeps its version, until the object is parked again without it.
    let versions = || client.stat("a", None).unwrap().version.versions;
    object.park_with_lease().unwrap();
    put(&client, &subject, 2);
    assert_eq!(versions(), [1, 2]);
    object.unpark(client.get(&Get::new("a").version(1)).unwrap()).unwrap();
    assert_eq!(value(&object), 1);
    object.park_with_lease().unwrap();
    object.park().unwrap();
    assert_eq!(versions(), [2]);
    // Unpark the newest version.
    until(|| subject.kind == Kind::Cuda || file.open_here() == 0);
    object.unpark(client.get(&newest()).unwrap()).unwrap();
    assert_eq!((value(&object), object.version(), addresses(&object)), (2, 2, before.clone()));
    // The object can be switched afterwards.
    put(&client, &subject, 3);
    let next = object.prepare(client.get(&newest()).unwrap()).unwrap();
    drop(object.switch(next).unwrap());
    assert_eq!((value(&object), object.version(), addresses(&object)), (3, 3, before));
    object.park().unwrap();
    drop(object);
    subject.assert_empty();
}

fn parked_object_can_not_be_read(subject: Subject) {
    let (_broker, client, mut object) = one_and_two(&subject);
    object.park_with_lease().unwrap();
    let problem = misuse(object.parts()[0].memory().map(drop));
    assert_eq!(problem, "part `all` is parked: nothing is mapped");
    assert_eq!(misuse(object.array("w")), problem);
    assert_eq!(misuse(object.parts()[0].array("w")), problem);
    let piece = Arc::clone(&object.parts()[0].pieces()[0]);
    assert_eq!((piece.size(), piece.mapped_size(), piece.is_parked()), (0, 0, true));
    let out_of_range = |error: Error| matches!(error, Error::Memory(MemoryError::OutOfRange { size: 0, .. }));
    assert!(out_of_range(piece.copy_out(0, &mut [0]).unwrap_err()));
    assert!(out_of_range(Mirror::of(&*piece, 0, 1).unwrap_err()));
    let array = entry("w", 16, 0).array;
    assert!(Array::new(piece, array).is_err());
    // A prepared version can't be switched in either: only `unpark` maps memory again.
    let next = object.prepare(client.get(&newest()).unwrap()).unwrap();
    assert!(misuse(object.switch(next)).contains("is parked"));
    assert!(object.is_parked());
}

/// Stops another thread, even if this thread panics.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Another thread tries to map any of the addresses as soon as they are free. They never are: not during a switch, and not while the object
/// is parked.
#[test]
fn the_addresses_are_never_free() {
    let subject = Subject::host();
    let (_broker, client, mut object) = one_and_two(&subject);
    let start = addresses(&object)[0];
    let done = AtomicBool::new(false);
    let tries = AtomicU64::new(0);
    thread::scope(|scope| {
        let thief = scope.spawn(|| {
            let length = NonZeroUsize::new(4096).unwrap();
            let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_FIXED_NOREPLACE;
            while !done.load(Ordering::Relaxed) {
                for at in [start, start + 2 * MIB, start + SIZE - 4096] {
                    let at = NonZeroUsize::new(at as usize);
                    // SAFETY: the call creates new anonymous memory and replaces no mapping.
                    match unsafe { mmap_anonymous(at, length, ProtFlags::PROT_NONE, flags) } {
                        Err(errno) => assert_eq!(errno, Errno::EEXIST),
                        Ok(found) => {
                            // SAFETY: the page was mapped just now, and nothing uses it.
                            unsafe { munmap(found, 4096) }.unwrap();
                            panic!("{at:x?} was free");
                        }
                    }
                }
                tries.fetch_add(1, Ordering::Relaxed);
            }
        });
        let end = End(&done);
        let mut other = object.prepare(client.get(&newest()).unwrap()).unwrap();
        let before = tries.load(Ordering::Relaxed);
        // Continue until the thread has tried often, in each state.
        while tries.load(Ordering::Relaxed) < before + 50_000 && !thief.is_finished() {
            for _ in 0..20 {
                other = object.switch(other).unwrap();
            }
            object.park().unwrap();
            object.unpark(client.get(&newest()).unwrap()).unwrap();
            other = object.prepare(client.get(&newest()).unwrap()).unwrap();
        }
        drop(end);
        thief.join().unwrap();
    });
    assert_eq!(value(&object), 2);
}

/// A thread that reads through the address sees the old or the new version: the host backend leaves no gap between them.
#[test]
fn host_reader_sees_old_or_new_version() {
    let subject = Subject::host();
    let (_broker, client, mut object) = one_and_two(&subject);
    let start = addresses(&object)[0];
    let done = AtomicBool::new(false);
    let seen = [const { AtomicU64::new(0) }; 3];
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let mut byte = [0];
                // SAFETY: the range is mapped for reading until the object is parked, and this thread exits before that.
                unsafe { internals::copy::read((start + 3 * MIB) as *const u8, &mut byte) };
                seen[usize::from(byte[0]) % 3].fetch_add(1, Ordering::Relaxed);
            }
        });
        let end = End(&done);
        let mut other = object.prepare(client.get(&newest()).unwrap()).unwrap();
        while seen[1..].iter().any(|count| count.load(Ordering::Relaxed) < 1000) && !reader.is_finished() {
            other = object.switch(other).unwrap();
        }
        drop(end);
        reader.join().unwrap();
    });
    assert_eq!(seen[0].load(Ordering::Relaxed), 0);
}

#[test]
fn a_forgotten_mirror_refuses_the_switch() {
    // Not a `Subject`: its leak check would fail, because the mirror is forgotten on purpose.
    let driver = internals::driver(Arc::new(HostDriver::new().unwrap()));
    let broker = Broker::start(&Subject::host());
    let client = broker.client();
    let put = |value| {
        let memory = filled(&driver, 2 * MIB, None, value);
        let parts = ["first", "last"].map(|name| PutPart::of(name, &memory).unwrap());
        let put = parts.into_iter().fold(Put::new("a").condition(Condition::Any), Put::part);
        client.put(&put).unwrap();
    };
    put(1);
    let mut object = client.get(&newest()).unwrap().open(&driver, None).unwrap();
    put(2);
    // Safe code may forget a mirror: its window then remains open forever.
    std::mem::forget(Mirror::of(&**object.part("last").unwrap().memory().unwrap(), 0, 1).unwrap());
    let unchanged = |object: &Object, error: Error| {
        assert!(matches!(&error, Error::Misuse { problem } if problem.contains("mirror")), "{error:?}");
        assert!(!object.is_parked());
        assert_eq!(object.version(), 1);
        for part in object.parts() {
            let mut byte = [0];
            part.memory().unwrap().copy_out(0, &mut byte).unwrap();
            assert_eq!(byte, [1]);
        }
    };
    let next = object.prepare(client.get(&newest()).unwrap()).unwrap();
    let refused = object.switch(next).unwrap_err();
    unchanged(&object, refused);
    let refused = object.park_with_lease().unwrap_err();
    unchanged(&object, refused);
}
