//! Memory that is shared and memory that was given, whichever way it travels: the same cases on every backend.

#![allow(unsafe_code, reason = "mappings made by hand")]

use std::{
    fs::File,
    io::{self, Read, Write},
    num::NonZeroUsize,
    os::{fd::OwnedFd, unix::fs::FileExt},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use vmmfd::{
    Error, Result,
    array::{ArrayDescriptor, ElementType, Order},
    channel::Channel,
    driver::{
        Access::{ReadOnly, ReadWrite},
        code,
    },
    error::{DeviceError, ErrorCode, MemoryError, PeerError},
    memory::{
        Allocation, Array, ArrayHandle, Device, Imported, LegacyMemory, Mapping, Mechanism, Mirror, Placement, Pointer,
        Pool, Region, Selector, Shared, Sharing, Spec, VmmSpec,
    },
    session::{
        Config, Verdict,
        handoff::{Buffer, Consumer, Request, ServeOptions, Unchecked, serve_connection},
    },
};
use vmmfd_cli::check::files::{self, Source, Target};

use crate::support::{Fault, Inode, Kind, Subject, code, in_child};

cases! {
    on crate::support::Subject; every backend: [
    chunks_are_one_buffer_in_every_process,
    a_part_is_the_chunks_that_cover_it,
    the_padding_is_cleared_and_out_of_reach,
    several_openings_of_one_handle_are_the_same_bytes,
    a_handle_passed_on_outlives_all_others,
    threads_may_open_one_handle_at_once,
    a_description_that_lies_is_refused_and_leaves_nothing,
    a_pointer_that_is_cut_is_refused_before_the_driver,
    what_is_not_there_is_named,
    sealed_memory_is_read_only_and_enforced_where_the_kernel_can,
    memory_that_is_out_already_is_not_sealed,
    typed_elements_are_copied,
    debug_output_is_short,
    a_mirror_is_read_changed_and_written_back,
    a_mirror_that_is_dropped_writes_back,
    a_mirror_turns_to_another_range,
    host_memory_is_seen_by_the_cpu_and_the_device_alike,
    views_keep_the_memory,
    elements_are_those_of_the_descriptor,
    a_file_goes_through_memory_of_every_kind_with_its_digest,
    a_failure_at_any_call_leaves_nothing,
    memory_that_no_machine_has_reserves_no_addresses,
    ]
    gpus alone: [
    sealing_a_gpus_memory_is_an_agreement,
    a_copy_that_can_not_be_written_back_is_told_or_logged,
    a_pools_buffer_that_the_driver_could_not_import_is_refused,
    a_pool_may_hold_many_buffers,
    a_copy_on_the_device_has_an_end_of_ours,
    a_device_is_waited_for,
    two_imports_of_a_pools_buffer_live_apart,
    a_legacy_handle_opens_in_another_process_and_not_in_its_own,
    ]
}

const MECHANISMS: [Mechanism; 2] = [Mechanism::Vmm, Mechanism::Pool];

/// Those ways of sharing that the same process can be at both ends of.
fn mechanisms(subject: &Subject) -> &'static [Mechanism] {
    if subject.kind == Kind::Host { &MECHANISMS[..1] } else { &MECHANISMS }
}

fn spec(size: u64) -> VmmSpec {
    Spec::vmm(size)
}

/// Memory that is shared by a mechanism.
fn by(mechanism: Mechanism, size: u64) -> Spec {
    match mechanism {
        Mechanism::Pool => Spec::pool(size),
        Mechanism::Legacy => Spec::legacy(size),
        _ => Spec::vmm(size).into(),
    }
}

fn bytes(size: u64) -> ArrayDescriptor {
    ArrayDescriptor::new(ElementType::U8, [size], Order::C).unwrap()
}

fn open(subject: &Subject, shared: &Shared, access: vmmfd::driver::Access) -> Array {
    let (handle, fds) = ArrayHandle::of(shared, bytes(shared.size())).unwrap();
    handle.open(&subject.driver, None, fds, access).unwrap()
}

fn read(region: &dyn Region, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0xEE; length];
    region.copy_out(offset, &mut bytes).unwrap();
    bytes
}

fn chunks_are_one_buffer_in_every_process(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    // The last one is smaller, and the last bytes of it are no data.
    let size = 7 * unit - 5;
    let shared = Shared::create(&device, spec(size).chunk(2 * unit - 1)).unwrap();
    assert_eq!((shared.size(), shared.mapped_size()), (size, 7 * unit));
    let description = shared.describe().unwrap();
    assert_eq!((description.segments(), description.mapped_size), (4, 7 * unit));
    // Across all boundaries at once.
    let data: Vec<u8> = (0..size).map(|at| (at / 7) as u8).collect();
    shared.copy_in(0, &data).unwrap();
    let (handle, fds) = ArrayHandle::of(&shared, bytes(size)).unwrap();
    assert_eq!(handle.segments, [2 * unit, 2 * unit, 2 * unit, unit]);
    let files: Vec<Inode> = fds.iter().map(Inode::of).collect();
    let array = handle.open(&subject.driver, None, fds, ReadWrite).unwrap();
    assert!(read(&**array.memory(), 0, size as usize) == data);
    array.memory().copy_in(2 * unit - 2, b"over").unwrap();
    assert_eq!(read(&shared, 2 * unit - 2, 4), b"over");
    if subject.kind != Kind::Cuda {
        // Each chunk is another file; the memory needs no handles, and the importer no descriptors.
        assert!(files.iter().all(|file| file.open_here() == 1), "{files:?}");
    }
    assert_eq!(subject.live().handles, 0);
}

fn a_part_is_the_chunks_that_cover_it(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    let shared = Shared::create(&device, spec(5 * unit).chunk(unit)).unwrap();
    for (range, want) in [
        (0..1, (0, 1, 0)),
        (unit - 1..unit + 1, (0, 2, 0)),
        (unit..2 * unit, (1, 1, unit)),
        (0..5 * unit, (0, 5, 0)),
        (3 * unit..5 * unit, (3, 2, 3 * unit)),
        (unit + 1..unit + 1, (0, 0, 0)),
        (5 * unit..5 * unit, (0, 0, 0)),
    ] {
        let (part, chunks) = shared.chunks(range.clone()).unwrap().unwrap();
        assert_eq!((part.first, part.segments, part.offset), want, "{range:?}");
        assert_eq!(part.size, chunks.iter().map(|chunk| chunk.size()).sum::<u64>());
        assert_eq!(part.segments, chunks.len() as u64);
    }
    let reversed = std::ops::Range { start: 5, end: 2 };
    for range in [0..5 * unit + 1, u64::MAX - 1..u64::MAX, reversed] {
        assert!(matches!(shared.chunks(range), Err(Error::Memory(MemoryError::OutOfRange { .. }))));
    }
}

fn the_padding_is_cleared_and_out_of_reach(subject: Subject) {
    let unit = subject.unit();
    let memory = Shared::create(&subject.device(), spec(unit + 1)).unwrap();
    assert_eq!((memory.size(), memory.mapped_size()), (unit + 1, 2 * unit));
    assert!(matches!(memory.copy_in(unit, b"xy"), Err(Error::Memory(MemoryError::OutOfRange { .. }))));
    // What was there before.
    let (handle, fds) = ArrayHandle::of(&memory, bytes(unit + 1)).unwrap();
    let allocations: Vec<_> = fds
        .iter()
        .map(|fd| Allocation::import(&subject.device(), fd.try_clone().unwrap(), handle.segments[0]).unwrap())
        .collect();
    let whole = Mapping::new(&allocations[0], ReadWrite).unwrap();
    whole.copy_in(0, &vec![7; 2 * unit as usize]).unwrap();
    let buffer = Buffer::new(memory, Unchecked, None).unwrap();
    let (ours, theirs) = Channel::socket_pair().unwrap();
    let config = Config::default();
    thread::scope(|scope| {
        let producer = scope.spawn(|| serve_connection(ours, &buffer, &ServeOptions::default(), &config, &|_| {}));
        let mut consumer = Consumer::over(theirs, &subject.driver, None, &config, &|_| {}).unwrap();
        let object = consumer.request(&Request::default()).unwrap();
        assert_eq!((object.size(), object.mapped_size()), (unit + 1, 2 * unit));
        assert!(object.copy_out(unit, &mut [0; 2]).is_err());
        consumer.report(&object, &Verdict::unchecked(true)).unwrap();
        consumer.close();
        assert!(producer.join().unwrap().unwrap().error.is_none());
    });
    assert_eq!(read(&whole, unit, 3), [7, 0, 0], "the data stays, and zeros are behind it");
    assert_eq!(read(&whole, 2 * unit - 1, 1), [0]);
}

fn several_openings_of_one_handle_are_the_same_bytes(subject: Subject) {
    for &mechanism in mechanisms(&subject) {
        let shared = Shared::create(&subject.device(), by(mechanism, 1000)).unwrap();
        shared.copy_in(0, b"there").unwrap();
        let openings = [ReadWrite, ReadOnly, ReadWrite].map(|access| open(&subject, &shared, access));
        for (turn, writer) in openings.iter().enumerate() {
            let written = writer.memory().copy_in(900, &[turn as u8; 100]);
            assert_eq!(written.is_ok(), turn != 1, "{mechanism} {written:?}");
            let expected = if turn == 1 { 0 } else { turn as u8 };
            for reader in &openings {
                assert_eq!(read(&**reader.memory(), 900, 100), [expected; 100], "{mechanism}");
            }
            assert_eq!(read(&shared, 900, 100), [expected; 100], "{mechanism}");
        }
        assert_eq!(read(&shared, 0, 5), b"there");
        // The importers let go first, in any order.
        drop(openings);
    }
}

fn a_handle_passed_on_outlives_all_others(subject: Subject) {
    let unit = subject.unit();
    let shared = Shared::create(&subject.device(), spec(2 * unit).chunk(unit)).unwrap();
    shared.copy_in(unit - 2, b"from A").unwrap();
    let (handle, fds) = ArrayHandle::of(&shared, bytes(2 * unit)).unwrap();
    // What B passes on to C are the descriptors that it got: what it imported it can't export.
    let passed_on: Vec<OwnedFd> = fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
    let b = handle.open(&subject.driver, None, fds, ReadWrite).unwrap();
    drop(shared);
    b.memory().copy_in(unit + 4, b"B").unwrap();
    drop(b);
    let c = handle.open(&subject.driver, None, passed_on, ReadOnly).unwrap();
    assert_eq!(read(&**c.memory(), unit - 2, 7), b"from AB");
}

fn threads_may_open_one_handle_at_once(subject: Subject) {
    for &mechanism in mechanisms(&subject) {
        let shared = Shared::create(&subject.device(), by(mechanism, 4096)).unwrap();
        shared.copy_in(0, &[7; 4096]).unwrap();
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..8 {
                        assert_eq!(read(&**open(&subject, &shared, ReadOnly).memory(), 0, 4096), [7; 4096]);
                    }
                });
            }
        });
    }
}

fn a_description_that_lies_is_refused_and_leaves_nothing(subject: Subject) {
    let unit = subject.unit();
    for &mechanism in mechanisms(&subject) {
        let shared = Shared::create(&subject.device(), by(mechanism, unit)).unwrap();
        let (sound, _) = ArrayHandle::of(&shared, bytes(1)).unwrap();
        let mut lies = Vec::new();
        let mut lie = |change: &dyn Fn(&mut ArrayHandle)| {
            let mut handle = sound.clone();
            change(&mut handle);
            lies.push(handle);
        };
        // A hundred times as much as there is.
        lie(&|handle| {
            handle.memory.mapped_size *= 100;
            handle.segments.iter_mut().for_each(|size| *size *= 100);
        });
        lie(&|handle| handle.memory.size = handle.memory.mapped_size + 1);
        lie(&|handle| handle.array.shape = vec![unit + 1]);
        match mechanism {
            Mechanism::Vmm => {
                lie(&|handle| handle.segments.clear());
                lie(&|handle| handle.segments.push(unit));
                lie(&|handle| handle.segments[0] += 4096);
                lie(&|handle| {
                    handle.memory.sharing = Sharing::Vmm { placement: handle.memory.placement(), segments: 0 };
                });
                lie(&|handle| handle.memory.mapped_size = u64::MAX);
            }
            _ => {
                let pointer = sound.memory.pointer().unwrap();
                let pool = |pointer, offset| Sharing::Pool { pool: 1, pointer, offset };
                lie(&|handle| handle.memory.sharing = pool(Pointer([0; 64]), 0));
                lie(&|handle| handle.memory.sharing = pool(pointer, 1));
                lie(&|handle| handle.memory.sharing = pool(pointer, u64::MAX));
            }
        }
        for handle in lies {
            let (_, fds) = ArrayHandle::of(&shared, bytes(1)).unwrap();
            let files: Vec<(Inode, usize)> = fds.iter().map(|fd| (Inode::of(fd), Inode::of(fd).open_here())).collect();
            let (before, refused) = (subject.live(), handle.open(&subject.driver, None, fds, ReadOnly));
            assert!(refused.is_err(), "{handle:?}");
            assert_eq!(subject.live(), before, "{handle:?}");
            if subject.kind != Kind::Cuda {
                let closed = files.iter().all(|(file, open)| file.open_here() < *open);
                assert!(closed, "{handle:?} leaves descriptors open");
            }
        }
        let (_, mut fds) = ArrayHandle::of(&shared, bytes(1)).unwrap();
        fds.push(fds[0].try_clone().unwrap());
        assert!(sound.open(&subject.driver, None, fds, ReadOnly).is_err(), "one descriptor too many");
        assert!(sound.open(&subject.driver, None, Vec::new(), ReadOnly).is_err(), "none");
        let wrong = File::open("/dev/null").unwrap().into();
        assert!(sound.open(&subject.driver, None, vec![wrong], ReadOnly).is_err(), "of something else");
    }
}

fn a_pointer_that_is_cut_is_refused_before_the_driver(subject: Subject) {
    let shared = Shared::create(&subject.device(), spec(1)).unwrap();
    let (handle, _) = ArrayHandle::of(&shared, bytes(1)).unwrap();
    let mut json = serde_json::to_value(&handle).unwrap();
    subject.faulty.take_verbs();
    // Nor is anything accepted that this version does not know, or that misses what its mechanism needs.
    for (field, value) in [("mechanism", "of the future"), ("location", "of the future"), ("mechanism", "legacy")] {
        let mut json = json.clone();
        json["memory"][field] = value.into();
        assert!(serde_json::from_value::<ArrayHandle>(json).is_err(), "{field} {value}");
    }
    // A pointer belongs to memory that has no segments.
    (json["memory"]["mechanism"], json["memory"]["segments"]) = ("legacy".into(), 0.into());
    for (pointer, sound) in
        [("00".repeat(64), true), ("00".repeat(8), false), ("0".repeat(127), false), ("zz".repeat(64), false)]
    {
        json["memory"]["pointer"] = pointer.into();
        assert_eq!(serde_json::from_value::<ArrayHandle>(json.clone()).is_ok(), sound);
    }
    assert_eq!(subject.faulty.take_verbs(), [""; 0]);
}

fn what_is_not_there_is_named(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    for spec in [Spec::pool(1), Spec::legacy(1)] {
        match Shared::create(&device, spec) {
            Ok(_) => assert_ne!(subject.kind, Kind::Host),
            Err(error) => {
                assert!(
                    matches!(error, Error::Device(DeviceError::Unsupported { .. })) && subject.kind == Kind::Host,
                    "{error:?}"
                )
            }
        }
    }
    for mechanism in mechanisms(&subject) {
        let nothing = Shared::create(&device, by(*mechanism, 0));
        assert!(matches!(nothing, Err(Error::Memory(MemoryError::InvalidSize { .. }))), "{nothing:?}");
    }
    let huge = Shared::create(&device, spec(1 << 62).chunk(unit));
    assert!(matches!(huge, Err(Error::Memory(MemoryError::TooManyDescriptors { .. }))), "{huge:?}");
}

/// Tries to map a file for writing, as whoever has the descriptor could.
fn writable(fd: &OwnedFd, length: u64) -> bool {
    let length = NonZeroUsize::new(length as usize).unwrap();
    let (protection, flags) = (ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED);
    // SAFETY: new addresses that replace nothing, unmapped at once.
    match unsafe { mmap(None, length, protection, flags, fd, 0) } {
        Ok(address) => {
            // SAFETY: it was mapped just now.
            unsafe { munmap(address, length.get()) }.unwrap();
            true
        }
        Err(_) => false,
    }
}

fn sealed_memory_is_read_only_and_enforced_where_the_kernel_can(subject: Subject) {
    let unit = subject.unit();
    for chunk in [None, Some(unit)] {
        let spec = chunk.map_or(spec(2 * unit), |chunk| spec(2 * unit).chunk(chunk)).sealed();
        let shared = Shared::create(&subject.device(), spec).unwrap();
        shared.copy_in(unit - 2, b"final").unwrap();
        let address = shared.address();
        // There are no descriptors yet.
        let early = ArrayHandle::of(&shared, bytes(1));
        assert!(matches!(early, Err(Error::Misuse { .. })), "{early:?}");
        // While a mirror is open on the memory itself, nothing is changed.
        if subject.kind == Kind::Host {
            let mirror = Mirror::of(&shared, 0, 1).unwrap();
            assert_eq!(code(shared.seal()), code::INVALID_VALUE);
            drop(mirror);
            assert_eq!((shared.access(), read(&shared, unit - 2, 5)), (ReadWrite, b"final".into()));
        }
        let enforced = shared.seal().unwrap();
        assert_eq!(shared.seal().unwrap(), enforced, "a second time there is nothing to do");
        assert_eq!(enforced, subject.kind == Kind::Host);
        assert_eq!((shared.access(), shared.address()), (ReadOnly, address));
        assert_eq!(read(&shared, unit - 2, 5), b"final");
        assert!(matches!(shared.copy_in(0, b"more"), Err(Error::Memory(MemoryError::ReadOnly))));
        assert!(shared.describe().unwrap().immutable);

        let (handle, fds) = ArrayHandle::of(&shared, bytes(2 * unit)).unwrap();
        if enforced {
            for fd in &fds {
                assert!(!writable(fd, unit), "a sealed file is mapped for writing");
                let file = File::from(fd.try_clone().unwrap());
                assert!(file.write_at(b"x", 0).is_err() && file.set_len(0).is_err());
            }
            let again = fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
            assert!(handle.open(&subject.driver, None, again, ReadWrite).is_err());
        }
        let array = handle.open(&subject.driver, None, fds, ReadOnly).unwrap();
        assert_eq!(read(&**array.memory(), unit - 2, 5), b"final");
        // Only what nobody can change is a slice without a copy.
        let mirror = Mirror::of(&**array.memory(), unit, 3).unwrap();
        assert_eq!((mirror.bytes(), mirror.is_direct()), (Some(&b"nal"[..]), enforced));
    }
}

fn memory_that_is_out_already_is_not_sealed(subject: Subject) {
    let shared = Shared::create(&subject.device(), spec(100)).unwrap();
    shared.copy_in(0, b"there").unwrap();
    assert!(matches!(shared.seal(), Err(Error::Misuse { .. })));
    assert_eq!((shared.access(), read(&shared, 0, 5)), (ReadWrite, b"there".into()));
}

fn sealing_a_gpus_memory_is_an_agreement(subject: Subject) {
    for mechanism in MECHANISMS {
        let shared = Shared::create(&subject.device(), by(mechanism, 100).sealed()).unwrap();
        shared.copy_in(0, b"final").unwrap();
        assert!(!shared.seal().unwrap());
        assert!(shared.copy_in(0, b"mine?").is_err(), "this side keeps to it");
        // But the descriptor conveys full rights: nothing but the conversation stops a peer.
        open(&subject, &shared, ReadWrite).memory().copy_in(0, b"yours").unwrap();
        assert_eq!(read(&shared, 0, 5), b"yours");
    }
}

fn typed_elements_are_copied(subject: Subject) {
    let shared = Shared::create(&subject.device(), spec(4096)).unwrap();
    shared.copy_in_slice(8, &[1.5f32, -2.0]).unwrap();
    assert_eq!(read(&shared, 8, 8), [1.5f32.to_ne_bytes(), (-2f32).to_ne_bytes()].concat());
    // An offset that is not aligned for the elements, and pairs without padding.
    shared.copy_in_slice(13, &[[1u64, 2], [3, 4]]).unwrap();
    let mut pairs = [[0u64; 2]; 2];
    shared.copy_out_slice(13, &mut pairs).unwrap();
    assert_eq!(pairs, [[1, 2], [3, 4]]);
    let refused = [shared.copy_in_slice(4092, &[0u64]), shared.copy_out_slice(4092, &mut [0u64])];
    for refused in refused {
        let expected = matches!(refused, Err(Error::Memory(MemoryError::OutOfRange { offset: 4092, length: 8, .. })));
        assert!(expected, "{refused:?}");
    }
}

fn debug_output_is_short(subject: Subject) {
    for &mechanism in mechanisms(&subject) {
        let shared = Shared::create(&subject.device(), by(mechanism, 4096)).unwrap();
        let (handle, fds) = ArrayHandle::of(&shared, bytes(4096)).unwrap();
        let array = handle.open(&subject.driver, None, fds, ReadOnly).unwrap();
        let mirror = Mirror::of(&shared, 0, 1).unwrap();
        for shown in [format!("{shared:?}"), format!("{array:?}"), format!("{mirror:?}")] {
            assert!(shown.len() < 2500, "{} bytes: {shown}", shown.len());
            assert!(shown.contains(&format!("backend: {:?}", subject.driver.backend())), "{shown}");
        }
    }
}

fn a_mirror_is_read_changed_and_written_back(subject: Subject) {
    let unit = subject.unit();
    for &mechanism in mechanisms(&subject) {
        let shared = Shared::create(&subject.device(), by(mechanism, 2 * unit)).unwrap();
        shared.copy_in(unit, b"as it was").unwrap();
        let mut mirror = Mirror::of(&shared, unit, 9).unwrap();
        let direct = mirror.is_direct();
        assert_eq!((mirror.size(), direct), (9, subject.kind == Kind::Host));
        let mut seen = [0; 5];
        mirror.read(3, &mut seen).unwrap();
        assert_eq!(&seen, b"it wa");
        // Another process may write: only a copy is a slice.
        assert_eq!(mirror.bytes().is_some(), !direct);
        assert_eq!(mirror.bytes_mut().is_some(), !direct);
        mirror.write(0, b"AS").unwrap();
        assert_eq!(read(&shared, unit, 2), if direct { b"AS" } else { b"as" }, "before it is committed");
        mirror.commit().unwrap();
        assert_eq!(read(&shared, unit, 9), b"AS it was");
        // What others write is seen when it is read again.
        shared.copy_in(unit + 6, b"is").unwrap();
        mirror.refresh().unwrap();
        mirror.read(0, &mut seen).unwrap();
        assert_eq!(&seen, b"AS it");
        let mut last = [0; 3];
        mirror.read(6, &mut last).unwrap();
        assert_eq!(&last, b"iss");
        for (offset, length) in [(9, 1), (0, 10), (u64::MAX, 1)] {
            assert!(matches!(
                mirror.write(offset, &vec![0; length]),
                Err(Error::Memory(MemoryError::OutOfRange { .. }))
            ));
            assert!(matches!(
                mirror.read(offset, &mut vec![0; length]),
                Err(Error::Memory(MemoryError::OutOfRange { .. }))
            ));
        }
        drop(mirror);
        assert!(matches!(Mirror::of(&shared, 2 * unit, 1), Err(Error::Memory(MemoryError::OutOfRange { .. }))));
        assert_eq!(Mirror::of(&shared, 5, 0).unwrap().bytes(), Some(&[][..]));
        // One that is to be filled does not read, and is written as a whole.
        let mut fresh = Mirror::to_fill(&shared, unit, 9).unwrap();
        fresh.write(0, b"new").unwrap();
        drop(fresh);
        let rest = if direct { &b"it iss"[..] } else { &[0; 6] };
        assert_eq!(read(&shared, unit, 9), [b"new", rest].concat(), "{mechanism}");

        let view = open(&subject, &shared, ReadOnly);
        let mut mirror = Mirror::to_fill(&**view.memory(), unit, 3).unwrap();
        let mut seen = [0; 3];
        mirror.read(0, &mut seen).unwrap();
        assert_eq!(&seen, b"new", "what can't be written is read");
        assert!(matches!(mirror.write(0, b"x"), Err(Error::Memory(MemoryError::ReadOnly))));
        assert!(mirror.bytes_mut().is_none());
    }
}

fn a_mirror_that_is_dropped_writes_back(subject: Subject) {
    let shared = Shared::create(&subject.device(), spec(100)).unwrap();
    shared.copy_in(0, b"before").unwrap();
    let mut mirror = Mirror::of(&shared, 0, 6).unwrap();
    mirror.write(0, b"AFTER!").unwrap();
    drop(mirror);
    assert_eq!(read(&shared, 0, 6), b"AFTER!");
}

fn a_copy_that_can_not_be_written_back_is_told_or_logged(subject: Subject) {
    let shared = Shared::create(&subject.device(), spec(100)).unwrap();
    let mut mirror = Mirror::of(&shared, 0, 6).unwrap();
    mirror.write(0, b"failed").unwrap();
    subject.faulty.fail(Fault::Verb("copy_in"), 4242);
    assert_eq!(code(mirror.commit()), 4242);
    subject.faulty.mend();
    // Nothing is lost: it can be tried again.
    mirror.commit().unwrap();
    assert_eq!(read(&shared, 0, 6), b"failed");
    mirror.write(0, b"logged").unwrap();
    subject.faulty.fail(Fault::Verb("copy_in"), 4242);
    let logged = crate::support::errors_logged(|| drop(mirror));
    subject.faulty.mend();
    assert!(logged.contains("a mirror can't be written back") && logged.contains("4242"), "{logged}");
}

fn a_mirror_turns_to_another_range(subject: Subject) {
    let shared = Shared::create(&subject.device(), spec(3000)).unwrap();
    shared.copy_in(0, &[1; 1000]).unwrap();
    shared.copy_in(1000, &[2; 2000]).unwrap();
    let mut mirror = Mirror::of(&shared, 0, 1000).unwrap();
    mirror.write(0, &[9; 10]).unwrap();
    mirror.turn_to(1000, 500, true).unwrap();
    let mut seen = [0; 500];
    mirror.read(0, &mut seen).unwrap();
    assert_eq!((seen, mirror.size()), ([2; 500], 500));
    assert_eq!(read(&shared, 0, 10), [9; 10], "what was changed is written before");
    // More than the copy has room for.
    mirror.turn_to(500, 2000, true).unwrap();
    let mut seen = vec![0; 2000];
    mirror.read(0, &mut seen).unwrap();
    assert!(seen == [vec![1; 500], vec![2; 1500]].concat());
    assert!(matches!(mirror.turn_to(shared.size() - 1, 2, true), Err(Error::Memory(MemoryError::OutOfRange { .. }))));
}

fn host_memory_is_seen_by_the_cpu_and_the_device_alike(subject: Subject) {
    let unit = subject.unit();
    for chunk in [None, Some(unit)] {
        let spec = spec(2 * unit).placement(Placement::Host);
        let shared = Shared::create(&subject.device(), chunk.map_or(spec, |chunk| spec.chunk(chunk))).unwrap();
        let array = open(&subject, &shared, ReadWrite);
        let (mut here, mut there) =
            (Mirror::of(&shared, unit - 4, 8).unwrap(), Mirror::of(&**array.memory(), unit - 4, 8).unwrap());
        assert!(here.is_direct() && there.is_direct());
        here.write(0, b"by CPU A").unwrap();
        let mut seen = [0; 8];
        there.read(0, &mut seen).unwrap();
        assert_eq!(&seen, b"by CPU A");
        assert_eq!(read(&**array.memory(), unit - 4, 8), b"by CPU A", "the device sees it");
        there.write(7, b"B").unwrap();
        shared.copy_in(unit - 4, b"on").unwrap();
        here.read(0, &mut seen).unwrap();
        assert_eq!(&seen, b"on CPU B", "the CPU sees what the device wrote");
        drop((here, there));
        let read_only = open(&subject, &shared, ReadOnly);
        assert!(matches!(
            Mirror::of(&**read_only.memory(), 0, 4).unwrap().write(0, b"x"),
            Err(Error::Memory(MemoryError::ReadOnly))
        ));
    }
}

fn views_keep_the_memory(subject: Subject) {
    for &mechanism in mechanisms(&subject) {
        let array = ArrayDescriptor::new(ElementType::U32, [4, 6], Order::C).unwrap();
        let shared = Shared::create(&subject.device(), by(mechanism, array.bytes().unwrap())).unwrap();
        let words: Vec<u8> = (0..24u32).flat_map(u32::to_le_bytes).collect();
        shared.copy_in(0, &words).unwrap();
        let (handle, fds) = ArrayHandle::of(&shared, array).unwrap();
        let array = handle.open(&subject.driver, None, fds, ReadOnly).unwrap();
        let column = array.index(1, 2).unwrap();
        let block = array.slice(0, 1..3, 1).unwrap().slice(1, 0..6, -2).unwrap();
        let live = subject.live();
        drop(array);
        assert_eq!(subject.live(), live, "the views keep it");
        assert_eq!(column.first(9).unwrap(), ["2", "8", "14", "20"]);
        assert_eq!(block.first(9).unwrap(), ["11", "9", "7", "17", "15", "13"]);
        assert_eq!(block.permute(&[1, 0]).unwrap().first(2).unwrap(), ["11", "17"]);
        let interface = serde_json::to_value(column.interface().unwrap()).unwrap();
        assert_eq!(interface["data"], serde_json::json!([column.memory().address() + 8, true]));
        assert_eq!((&interface["strides"], &interface["version"]), (&serde_json::json!([24]), &3.into()));
        drop(column);
        assert_eq!(block.element(&[1, 1]).unwrap(), 15u32.to_le_bytes());
        assert!(matches!(block.element(&[2, 0]), Err(Error::Memory(MemoryError::Array { .. }))));
        assert!(matches!(block.index(2, 0), Err(Error::Memory(MemoryError::Array { .. }))));
    }
}

fn elements_are_those_of_the_descriptor(subject: Subject) {
    let shared = Shared::create(&subject.device(), spec(64)).unwrap();
    let values: Vec<u8> = [1.5f32, -2.0, 0.25, 8.0].iter().flat_map(|value| value.to_le_bytes()).collect();
    shared.copy_in(8, &values).unwrap();
    let array = |shape: &[u64], strides: Option<Vec<i64>>, offset| {
        let descriptor = ArrayDescriptor { dtype: ElementType::F32, shape: shape.to_vec(), strides, offset };
        let (handle, fds) = ArrayHandle::of(&shared, descriptor)?;
        handle.open(&subject.driver, None, fds, ReadOnly)
    };
    assert_eq!(array(&[2, 2], None, 8).unwrap().first(9).unwrap(), ["1.5", "-2.0", "0.25", "8.0"]);
    assert_eq!(array(&[2, 2], Some(vec![4, 8]), 8).unwrap().first(9).unwrap(), ["1.5", "0.25", "-2.0", "8.0"]);
    assert_eq!(array(&[3], Some(vec![-4]), 16).unwrap().first(9).unwrap(), ["0.25", "-2.0", "1.5"]);
    assert_eq!(array(&[u64::MAX >> 1], Some(vec![0]), 8).unwrap().first(2).unwrap(), ["1.5", "1.5"], "a broadcast");
    let nothing = array(&[0, 7], None, 64).unwrap();
    assert_eq!((nothing.first(3).unwrap().len(), nothing.interface().unwrap().data.0), (0, 0), "null where nothing is");
    for (shape, strides, offset) in [
        (vec![17], None, 0),
        (vec![16], None, 1),
        (vec![2], Some(vec![-4]), 3),
        (vec![2], Some(vec![61]), 0),
        (vec![1 << 62], None, 0),
        (vec![2], Some(vec![i64::MIN]), u64::MAX),
        (vec![2, 2], Some(vec![4]), 0),
    ] {
        let refused = array(&shape, strides, offset);
        assert!(
            matches!(
                refused,
                Err(Error::Memory(MemoryError::Array { .. }) | Error::Memory(MemoryError::OutOfRange { .. }))
            ),
            "{shape:?} {offset}"
        );
    }
}

fn a_file_goes_through_memory_of_every_kind_with_its_digest(subject: Subject) {
    let (unit, folder) = (subject.unit(), tempfile::tempdir().unwrap());
    let path = folder.path().join("data");
    // More than one slice, and cut.
    let data: Vec<u8> = (0..9_000_001u32).map(|at| (at ^ at >> 9) as u8).collect();
    File::create(&path).unwrap().write_all(&data).unwrap();
    let source = Source::open(&path).unwrap();
    let plain = spec(source.size());
    let mut kinds: Vec<Spec> =
        vec![plain.into(), plain.chunk(unit).into(), plain.placement(Placement::Host).into(), plain.sealed().into()];
    if subject.kind != Kind::Host {
        kinds.push(Spec::pool(source.size()));
    }
    let mut digests = Vec::new();
    for kind in kinds {
        let shared = Shared::create(&subject.device(), kind).unwrap();
        let digest = source.load(&shared, &mut |_| Ok(())).unwrap();
        if kind.is_sealed() {
            shared.seal().unwrap();
        }
        let array = open(&subject, &shared, ReadOnly);
        let target = folder.path().join("copy");
        let mut copy = Target::create(&target, true).unwrap();
        let found = files::read(&**array.memory(), 0, 0..source.size(), &mut |bytes| copy.write(bytes)).unwrap();
        copy.finish().unwrap();
        let mut back = Vec::new();
        File::open(&target).unwrap().read_to_end(&mut back).unwrap();
        assert!(back == data, "{kind:?}");
        let some = files::read(&shared, 0, 5..4_000_000, &mut |_| Ok(())).unwrap();
        assert_eq!(some, format!("blake3:{}", blake3::hash(&data[5..4_000_000]).to_hex()));
        digests.extend([digest, found]);
    }
    let expected = format!("blake3:{}", blake3::hash(&data).to_hex());
    assert!(digests.iter().all(|digest| *digest == expected), "{digests:?}");
}

fn a_pools_buffer_that_the_driver_could_not_import_is_refused(subject: Subject) {
    let device = subject.device();
    let refused = Shared::create(&device, Spec::pool((5 << 30) + 1)).unwrap_err();
    assert!(
        matches!(refused, Error::Device(DeviceError::Unsupported { .. })) && refused.to_string().contains("5 GiB"),
        "{refused}"
    );
    // Nor is it imported, whoever offers it.
    let shared = Shared::create(&device, Spec::pool(1)).unwrap();
    let mut offered = shared.describe().unwrap();
    offered.mapped_size = (5 << 30) + 1;
    let refused = Imported::of_pool(shared.pool().unwrap(), &offered, ReadWrite).unwrap_err();
    assert!(matches!(refused, Error::Device(DeviceError::Unsupported { .. })), "{refused}");
}

fn a_copy_on_the_device_has_an_end_of_ours(subject: Subject) {
    let device = subject.device();
    let size = 4096;
    let [one, other] = [1, 2].map(|byte| {
        let shared = Shared::create(&device, Spec::vmm(size)).unwrap();
        shared.copy_in(0, &vec![byte; size as usize]).unwrap();
        shared
    });
    let driver = device.driver();
    let ranges = [(other.address(), one.address() + 8, 8), (other.address() + 100, one.address(), 1)];
    // SAFETY: both are as long, and may be written.
    unsafe { driver.copy_device(device.ordinal(), &ranges) }.unwrap();
    let found = read(&other, 0, size as usize);
    assert_eq!(
        found.iter().enumerate().filter(|(_, byte)| **byte == 1).map(|(at, _)| at).collect::<Vec<_>>(),
        [0, 1, 2, 3, 4, 5, 6, 7, 100]
    );
    assert_eq!(driver.device_of(one.address() + 1).unwrap(), device.ordinal());
    assert_eq!(code(driver.device_of(4096).map(drop)), code::INVALID_VALUE);
    // SAFETY: none of it is done: no end is known, or it reaches further than the memory.
    let refused = |ranges: &[(u64, u64, u64)]| code(unsafe { driver.copy_device(device.ordinal(), ranges) });
    assert_eq!(refused(&[(4096, 8192, 1)]), code::INVALID_VALUE);
    let end = one.address() + one.mapped_size();
    assert_eq!(refused(&[(end - 1, 4096, 2)]), code::INVALID_VALUE);
}

fn a_device_is_waited_for(subject: Subject) {
    let device = subject.device();
    device.synchronize().unwrap();
    let before = subject.live();
    device.wait_for_work().unwrap();
    assert_eq!(subject.live(), before);
    thread::spawn(move || {
        device.wait_for_work().unwrap();
        device.synchronize().unwrap();
    })
    .join()
    .unwrap();
}

fn a_pool_may_hold_many_buffers(subject: Subject) {
    let device = subject.device();
    let pool = Pool::create(&device).unwrap();
    let buffers = [100, 5000, 3 << 20].map(|size| Shared::in_pool(&pool, size).unwrap());
    for (number, buffer) in buffers.iter().enumerate() {
        buffer.copy_in(0, &vec![number as u8 + 1; buffer.size() as usize]).unwrap();
    }
    let descriptions = buffers.each_ref().map(|buffer| buffer.describe().unwrap());
    // The pool goes once.
    let imported =
        Imported::pool(&device, &descriptions[0], pool.export().unwrap().try_clone_to_owned().unwrap()).unwrap();
    let given = descriptions.each_ref().map(|description| Imported::of_pool(&imported, description, ReadOnly).unwrap());
    for (number, memory) in given.iter().enumerate() {
        let size = memory.size() as usize;
        assert!(read(memory, 0, size) == vec![number as u8 + 1; size]);
        assert!(matches!(memory.copy_in(0, b"x"), Err(Error::Memory(MemoryError::ReadOnly))), "by agreement");
    }
    // More than the pointer's real extent.
    for (size, offset) in [(5001, 0), (5000, 1), (5000, u64::MAX)] {
        let mut lie = descriptions[1].clone();
        let (pool, pointer) = (lie.pool().unwrap(), lie.pointer().unwrap());
        (lie.mapped_size, lie.sharing) = (size, Sharing::Pool { pool, pointer, offset });
        assert!(matches!(Imported::of_pool(&imported, &lie, ReadOnly), Err(Error::Peer(PeerError::Mismatch { .. }))));
    }
    // Neither it nor what is of it can be passed on.
    assert_eq!(code(imported.export()), code::INVALID_VALUE);
    drop((given, imported));
    assert_eq!(read(&buffers[1], 0, 4), [2; 4]);
}

fn two_imports_of_a_pools_buffer_live_apart(subject: Subject) {
    let pool = Pool::create(&subject.device()).unwrap();
    let shared = Shared::in_pool(&pool, 4096).unwrap();
    shared.copy_in(0, b"still here").unwrap();
    let description = shared.describe().unwrap();
    let fd = || pool.export().unwrap().try_clone_to_owned().unwrap();
    let imported = Imported::pool(&subject.device(), &description, fd()).unwrap();
    let [one, two] = [ReadOnly, ReadWrite].map(|access| Imported::of_pool(&imported, &description, access).unwrap());
    drop(one);
    assert_eq!(read(&two, 0, 10), b"still here");
    drop(two);
    let again = Imported::of_pool(&imported, &description, ReadOnly).unwrap();
    assert_eq!(read(&again, 0, 10), b"still here");
}

fn a_legacy_handle_opens_in_another_process_and_not_in_its_own(subject: Subject) {
    let device = subject.device();
    let memory = LegacyMemory::allocate(&device, 5000).unwrap();
    assert_eq!(memory.size(), 2 << 20, "a block of its own");
    memory.copy_in(4096, b"interior").unwrap();
    let handle = memory.handle().unwrap();
    assert!(matches!(LegacyMemory::open(&device, &handle), Err(Error::Memory(MemoryError::OwnHandle))));
    let shared = Shared::in_legacy(&memory, 4096, 8).unwrap();
    let (travels, fds) = ArrayHandle::of(&shared, bytes(8)).unwrap();
    let pointer = memory.handle().unwrap();
    assert!(fds.is_empty() && travels.memory.sharing == Sharing::Legacy { pointer, offset: 4096 });
    let name = if subject.kind == Kind::Fake { "fake" } else { "cuda" };
    let told = in_child(
        &format!("shared::{name}::a_legacy_handle_opens_in_another_process_and_not_in_its_own"),
        |command| {
            command.env("HANDLE", serde_json::to_string(&travels).unwrap());
        },
        || {
            let text = std::env::var("HANDLE").unwrap();
            let travels: ArrayHandle = serde_json::from_str(&text).unwrap();
            let array = travels.open(&subject.driver, None, Vec::new(), ReadWrite).unwrap();
            assert_eq!(read(&**array.memory(), 0, 8), b"interior");
            // As Numba and CuPy do: the bare 64 bytes, and what is known of the array besides.
            let words = ArrayDescriptor::new(ElementType::U16, [4], Order::C).unwrap();
            let pointer = travels.memory.pointer().unwrap();
            let raw = Array::open_legacy(&device, &pointer, 4096, words.clone()).unwrap();
            assert_eq!(raw.element(&[1]).unwrap(), b"te");
            assert!(Array::open_legacy(&device, &pointer, 2 << 20, words.clone()).is_err());
            assert!(Array::open_legacy(&device, &pointer, u64::MAX, words).is_err());
            assert!(LegacyMemory::open(&device, &Pointer([0; 64])).is_err());
            drop(array);
            raw.memory().copy_in(4096, b"I").unwrap();
            drop(raw);
            "closed".to_owned()
        },
    );
    assert_eq!(told, "closed");
    assert_eq!(read(&shared, 0, 8), b"Interior");
}

/// All that a failure could interrupt.
/// Seals memory. A fork of another test may have it mapped for a while, which the kernel refuses.
fn seal(shared: &Shared) -> Result<()> {
    let begun = Instant::now();
    loop {
        match shared.seal() {
            Err(Error::Driver { source: Some(source), .. })
                if source.kind() == io::ErrorKind::ResourceBusy && begun.elapsed() < Duration::from_secs(60) => {}
            sealed => return sealed.map(drop),
        }
    }
}

fn everything(subject: &Subject, device: &Device, unit: u64, folder: &Path) -> Result<()> {
    for &mechanism in mechanisms(subject) {
        let shared = match mechanism {
            Mechanism::Vmm => Shared::create(device, spec(2 * unit).chunk(unit).sealed())?,
            _ => Shared::create(device, by(mechanism, 2 * unit))?,
        };
        let source = Source::open(&folder.join("data"))?;
        source.load(&shared, &mut |_| Ok(()))?;
        seal(&shared)?;
        let (handle, fds) = ArrayHandle::of(&shared, bytes(2 * unit))?;
        let array = handle.open(&subject.driver, Some(Selector::Ordinal(0)), fds, ReadOnly)?;
        files::read(&**array.memory(), 0, 0..unit, &mut |_| Ok(()))?;
        array.first(2)?;
    }
    Ok(())
}

fn memory_that_no_machine_has_reserves_no_addresses(subject: Subject) {
    let shared = Shared::create(&subject.device(), Spec::vmm(1)).unwrap();
    let (mut handle, fds) = ArrayHandle::of(&shared, bytes(1)).unwrap();
    handle.memory.mapped_size = 1 << 46;
    subject.faulty.take_verbs();
    let refused = handle.open(&subject.driver, None, fds, ReadOnly);
    let failed = matches!(refused, Err(Error::Peer(PeerError::Mismatch { code: ErrorCode::Failed, .. })));
    assert!(failed, "{refused:?}");
    let verbs = subject.faulty.take_verbs();
    assert!(!verbs.contains(&"import") && !verbs.contains(&"reserve"), "{verbs:?}");
}

fn a_failure_at_any_call_leaves_nothing(subject: Subject) {
    let (device, unit, folder) = (subject.device(), subject.unit(), tempfile::tempdir().unwrap());
    File::create(folder.path().join("data")).unwrap().write_all(b"data").unwrap();
    everything(&subject, &device, unit, folder.path()).unwrap();
    let failed = subject.fail_each_call(|| everything(&subject, &device, unit, folder.path()));
    assert!(failed.len() > 20, "{failed:?}");
}
