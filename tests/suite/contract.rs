//! What every backend promises: the same cases on the host backend, on the CUDA backend over the emulated driver, and
//! on a GPU. What they expect is what an H200 was seen to do.

#![allow(unsafe_code, reason = "descriptors as numbers")]

use std::{
    any::Any,
    fs::File,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    process,
    sync::Arc,
    thread,
};

use nix::{
    fcntl::{FcntlArg, FdFlag, OFlag, fcntl},
    sys::memfd::{MFdFlags, memfd_create},
    unistd::{ftruncate, pipe2},
};
use vmmfd::{
    Error,
    channel::CancelReason,
    driver::{
        Access::{ReadOnly, ReadWrite},
        Attribute, code,
    },
    error::{DeviceError, ErrorKind, MemoryError},
    internals::{Granularity, Handle, Location, MadeFor, Properties, Stretch, Verbs},
    memory::{Allocation, Device, Mapping, Region, Reservation, Selector},
};
use vmmfd_cli::check::pattern::{self, Mismatch, Pattern};

use crate::support::{EXPORTABLE, Fault, Inode, Kind, Subject, code, in_fork};

const INVALID: u32 = code::INVALID_VALUE;
const UNSUPPORTED: u32 = code::NOT_SUPPORTED;
const OK: u32 = 0;

cases! {
    on crate::support::Subject; every backend: [
    a_device_says_what_it_is,
    devices_that_do_not_exist_are_refused,
    a_device_is_found_by_ordinal_and_by_uuid,
    attributes_allow_sharing,
    memory_that_is_free_is_part_of_all_memory,
    create_refuses_sizes_and_devices_that_make_no_sense,
    reserve_refuses_sizes_and_alignments_that_make_no_sense,
    an_alignment_is_kept,
    free_takes_a_whole_reservation_once_with_nothing_mapped,
    map_takes_whole_allocations_into_empty_reserved_addresses,
    set_access_takes_whole_mappings,
    unmap_takes_whole_mappings_and_empty_ranges,
    copies_need_access_to_every_byte,
    copies_of_nothing_succeed_anywhere,
    access_can_be_taken_and_given_again,
    only_exportable_memory_is_exported,
    imported_memory_is_the_same_memory_under_another_handle,
    released_handles_are_refused,
    memory_outlives_its_handle_while_mapped,
    every_export_is_a_new_descriptor_closed_on_exec,
    a_descriptor_keeps_memory_alive,
    descriptors_of_other_things_are_refused,
    sizes_are_rounded_up_to_the_granularity,
    sizes_that_no_memory_has_are_refused,
    too_much_memory_is_refused_with_both_figures,
    an_allocation_mapped_twice_is_the_same_bytes,
    a_read_only_mapping_refuses_to_be_written,
    an_export_is_one_descriptor_for_life,
    an_import_closes_its_descriptor_and_may_be_in_the_same_process,
    a_wrong_descriptor_is_closed_and_nothing_is_left,
    a_size_other_than_the_exporters_never_maps,
    an_unaligned_size_makes_no_call,
    offsets_outside_a_mapping_are_refused,
    offsets_outside_a_reservation_are_refused,
    allocations_side_by_side_are_one_buffer,
    occupied_addresses_are_not_mapped_again,
    owners_may_be_dropped_in_any_order,
    a_filled_buffer_verifies_at_every_size,
    a_check_counts_wrong_words_and_names_the_first,
    filling_and_checking_go_slice_by_slice_and_can_be_ended,
    threads_may_import_the_same_descriptor_at_once,
    threads_may_use_one_mapping_at_once,
    a_failure_at_any_call_leaves_nothing,
    memory_that_ran_out_for_another_reason_or_untold_is_the_drivers_own_error,
    a_failure_to_give_back_is_no_panic_and_frees_the_rest,
    a_fork_is_told_so_and_does_no_harm,
    ]
}

/// Addresses and handles to play with, given back at the end: for the cases about single calls.
struct Ground<'a> {
    driver: &'a dyn Verbs,
    unit: u64,
    handles: Vec<Handle>,
    reservations: Vec<(u64, u64)>,
}

impl<'a> Ground<'a> {
    fn new(subject: &'a Subject) -> Self {
        Self { driver: &*subject.verbs, unit: subject.unit(), handles: Vec::new(), reservations: Vec::new() }
    }

    fn create(&mut self, units: u64) -> Handle {
        let handle = self.driver.create(units * self.unit, &EXPORTABLE).unwrap();
        self.handles.push(handle);
        handle
    }

    fn reserve(&mut self, units: u64) -> u64 {
        let size = units * self.unit;
        let address = self.driver.reserve(size, 0).unwrap();
        self.reservations.push((address, size));
        address
    }

    /// Maps new memory at an address, not accessible yet.
    fn map(&mut self, address: u64, units: u64) -> Handle {
        let handle = self.create(units);
        self.driver.map(address, units * self.unit, 0, handle).unwrap();
        handle
    }

    fn allow(&self, address: u64, units: u64) {
        self.driver.set_access(address, units * self.unit, Location::Device(0), Some(ReadWrite)).unwrap();
    }

    fn copy_in(&self, address: u64, bytes: &[u8]) -> u32 {
        code(self.driver.copy_in(0, address, bytes))
    }

    fn copy_out(&self, address: u64, length: usize) -> u32 {
        code(self.driver.copy_out(0, address, &mut vec![0; length]))
    }

    fn read<const LENGTH: usize>(&self, address: u64) -> [u8; LENGTH] {
        let mut bytes = [0; LENGTH];
        self.driver.copy_out(0, address, &mut bytes).unwrap();
        bytes
    }
}

impl Drop for Ground<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            return;
        }
        for &(address, size) in &self.reservations {
            self.driver.unmap(address, size).unwrap();
            self.driver.free(address, size).unwrap();
        }
        for &handle in &self.handles {
            self.driver.release(handle).unwrap();
        }
    }
}

fn read(mapping: &Mapping, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0xEE; length];
    mapping.copy_out(offset, &mut bytes).unwrap();
    bytes
}

fn exported(allocation: &Allocation) -> OwnedFd {
    allocation.export().unwrap().try_clone_to_owned().unwrap()
}

fn closes_on_exec(fd: BorrowedFd<'_>) -> bool {
    FdFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFD).unwrap()).contains(FdFlag::FD_CLOEXEC)
}

// The device

fn a_device_says_what_it_is(subject: Subject) {
    let devices = Device::all(&subject.driver).unwrap();
    assert_eq!(devices.len(), subject.verbs.device_count().unwrap() as usize);
    assert!(!devices.is_empty());
    for (ordinal, device) in devices.iter().enumerate() {
        assert_eq!(device.ordinal(), ordinal as i32);
        assert_eq!(device.backend(), subject.driver.backend());
        assert_eq!(device.name(), subject.verbs.device_name(device.ordinal()).unwrap());
        assert_eq!(device.uuid(), subject.verbs.device_uuid(device.ordinal()).unwrap());
        assert!(device.to_string().contains(&device.uuid().to_string()));
        assert_eq!(device.name().contains("no GPU"), subject.kind != Kind::Cuda, "{device}");
        device.activate().unwrap();
        subject.verbs.synchronize(device.ordinal()).unwrap();
    }
    let unshared = Properties { exportable: false, ..EXPORTABLE };
    let minimum = subject.unit();
    assert_eq!(subject.verbs.granularity(&unshared, Granularity::Minimum).unwrap(), minimum);
    let recommended = subject.verbs.granularity(&EXPORTABLE, Granularity::Recommended).unwrap();
    assert!(minimum.is_power_of_two() && recommended.is_multiple_of(minimum), "{minimum} {recommended}");
    let version = subject.driver.version().unwrap();
    match subject.kind {
        Kind::Host => assert_eq!((version, minimum), (0, 2 << 20)),
        Kind::Fake => assert_eq!((version, minimum), (13000, 2 << 20)),
        Kind::Cuda => assert!(version >= 11040, "{version}"),
    }
}

fn devices_that_do_not_exist_are_refused(subject: Subject) {
    let driver = &subject.verbs;
    for ordinal in [-1, 99, i32::MAX] {
        let nowhere = Properties { location: Location::Device(ordinal), ..EXPORTABLE };
        for answer in [
            code(driver.device_name(ordinal)),
            code(driver.device_uuid(ordinal)),
            code(driver.device_attribute(ordinal, Attribute::VirtualMemoryManagement)),
            code(driver.memory_info(ordinal)),
            code(driver.activate(ordinal)),
            code(driver.synchronize(ordinal)),
            code(driver.granularity(&nowhere, Granularity::Minimum)),
            code(driver.create(subject.unit(), &nowhere)),
        ] {
            assert_eq!(answer, code::INVALID_DEVICE, "device {ordinal}");
        }
    }
}

fn a_device_is_found_by_ordinal_and_by_uuid(subject: Subject) {
    let device = subject.device();
    let by_uuid = Device::find(&subject.driver, Selector::Uuid(device.uuid())).unwrap();
    assert_eq!((by_uuid.ordinal(), by_uuid.uuid()), (device.ordinal(), device.uuid()));
    let pasted: Selector = device.prefixed_uuid().parse().unwrap();
    assert_eq!(pasted, Selector::Uuid(device.uuid()));
    for wanted in [Selector::Ordinal(u32::MAX), "53e9a7d2-1f0c-5b7e-9c55-0123456789ab".parse().unwrap()] {
        match Device::find(&subject.driver, wanted) {
            Err(Error::Device(DeviceError::NotFound { wanted: told, available, .. })) => {
                assert_eq!(told, wanted.to_string());
                assert!(available.contains(device.name()), "{available}");
            }
            other => panic!("{other:?}"),
        }
    }
}

fn attributes_allow_sharing(subject: Subject) {
    let device = subject.device();
    device.require_sharing().unwrap();
    for attribute in [Attribute::FabricHandle, Attribute::GpuDirectRdma, Attribute::ComputeMode] {
        assert!((0..=3).contains(&device.attribute(attribute).unwrap()), "{attribute:?}");
    }
}

fn memory_that_is_free_is_part_of_all_memory(subject: Subject) {
    let info = subject.device().memory_info().unwrap();
    assert!(0 < info.free && info.free <= info.total, "{info:?}");
}

// Single calls

fn create_refuses_sizes_and_devices_that_make_no_sense(subject: Subject) {
    let (driver, unit) = (&subject.verbs, subject.unit());
    for size in [0, 1, 4096, unit / 2, unit + 1, unit + 4096] {
        assert_eq!(code(driver.create(size, &EXPORTABLE)), INVALID, "{size} bytes");
    }
    assert_eq!(code(driver.create(4 << 40, &EXPORTABLE)), code::OUT_OF_MEMORY);
}

fn reserve_refuses_sizes_and_alignments_that_make_no_sense(subject: Subject) {
    let (driver, unit) = (&subject.verbs, subject.unit());
    for size in [0, 1, 4096, unit + 4096] {
        assert_eq!(code(driver.reserve(size, 0)), INVALID, "{size} bytes");
    }
    assert_eq!(code(driver.reserve(unit, 3)), INVALID);
}

fn an_alignment_is_kept(subject: Subject) {
    let (driver, unit) = (&subject.verbs, subject.unit());
    for alignment in [0, 4096, unit, 64 << 20] {
        let address = driver.reserve(unit, alignment).unwrap();
        assert_eq!(address % alignment.max(unit), 0, "alignment {alignment}");
        driver.free(address, unit).unwrap();
    }
}

fn free_takes_a_whole_reservation_once_with_nothing_mapped(mut subject: Subject) {
    // Another test might be given the addresses that this one freed.
    subject.alone();
    let mut ground = Ground::new(&subject);
    let (driver, unit) = (&subject.verbs, ground.unit);
    let address = driver.reserve(2 * unit, 0).unwrap();
    for (start, size) in [(address, unit), (address, 3 * unit), (address, 0), (address + unit, unit), (4096, 2 * unit)]
    {
        assert_eq!(code(driver.free(start, size)), INVALID, "{start:#x} {size}");
    }
    ground.map(address + unit, 1);
    assert_eq!(code(driver.free(address, 2 * unit)), INVALID, "while mapped");
    driver.unmap(address + unit, unit).unwrap();
    driver.free(address, 2 * unit).unwrap();
    assert_eq!(code(driver.free(address, 2 * unit)), INVALID, "twice");
}

fn map_takes_whole_allocations_into_empty_reserved_addresses(mut subject: Subject) {
    // Another test might be given the addresses that this one freed.
    subject.alone();
    let mut ground = Ground::new(&subject);
    let (driver, unit) = (&subject.verbs, ground.unit);
    let (one, two) = (ground.create(1), ground.create(2));
    let address = ground.reserve(6);
    let elsewhere = driver.reserve(unit, 0).unwrap();
    driver.free(elsewhere, unit).unwrap();
    for (what, start, size, offset, handle, want) in [
        ("nothing", address, 0, 0, one, INVALID),
        ("unreserved addresses", elsewhere, unit, 0, one, INVALID),
        ("the null address", 0, unit, 0, one, INVALID),
        ("an unaligned address", address + 4096, unit, 0, one, INVALID),
        ("half a unit on", address + unit / 2, unit, 0, one, INVALID),
        ("over the end", address + 5 * unit, 2 * unit, 0, two, INVALID),
        ("an offset", address, unit, unit, two, UNSUPPORTED),
        ("half of an allocation", address, unit, 0, two, UNSUPPORTED),
        ("twice an allocation", address, 4 * unit, 0, two, UNSUPPORTED),
    ] {
        assert_eq!(code(driver.map(start, size, offset, handle)), want, "{what}");
    }
    driver.map(address + unit, 2 * unit, 0, two).unwrap();
    for at in [1, 2] {
        assert_eq!(code(driver.map(address + at * unit, unit, 0, one)), INVALID, "over a mapping");
    }
    assert_eq!(code(driver.map(address + 2 * unit, 2 * unit, 0, two)), INVALID, "over the end of a mapping");
    assert_eq!(code(driver.map(address, 2 * unit, 0, two)), INVALID, "over the start of a mapping");
    // Right before and right behind there is room.
    driver.map(address, unit, 0, one).unwrap();
    driver.map(address + 3 * unit, unit, 0, one).unwrap();
}

fn set_access_takes_whole_mappings(subject: Subject) {
    let mut ground = Ground::new(&subject);
    let (driver, unit) = (&subject.verbs, ground.unit);
    let address = ground.reserve(6);
    ground.map(address, 2);
    ground.map(address + 2 * unit, 1);
    for (what, start, size) in [
        ("half a unit", address, unit / 2),
        ("the first half of a mapping", address, unit),
        ("the second half of a mapping", address + unit, unit),
        ("one mapping and a half", address + unit, 2 * unit),
        ("more than is mapped", address, 4 * unit),
        ("what is not mapped", address + 3 * unit, unit),
        ("an unaligned address", address + 4096, 2 * unit),
        ("nothing", address, 0),
    ] {
        assert_eq!(code(driver.set_access(start, size, Location::Device(0), Some(ReadWrite))), INVALID, "{what}");
    }
    assert_ne!(code(driver.set_access(address, 2 * unit, Location::Device(99), Some(ReadWrite))), OK, "for no device");
    assert_eq!(ground.copy_in(address, b"early"), INVALID, "what failed gave access");
    driver.set_access(address, 3 * unit, Location::Device(0), Some(ReadWrite)).unwrap();
    for at in 0..3 {
        assert_eq!(ground.copy_in(address + at * unit, b"now"), OK);
    }
}

fn unmap_takes_whole_mappings_and_empty_ranges(subject: Subject) {
    let mut ground = Ground::new(&subject);
    let (driver, unit) = (&subject.verbs, ground.unit);
    let address = ground.reserve(6);
    ground.map(address, 2);
    ground.map(address + 2 * unit, 2);
    ground.allow(address, 4);
    for (what, start, size) in [
        ("the first half", address, unit),
        ("the second half", address + unit, unit),
        ("one and a half", address, 3 * unit),
        ("nothing", address, 0),
    ] {
        assert_eq!(code(driver.unmap(start, size)), INVALID, "{what}");
    }
    assert_eq!(ground.copy_in(address, b"still there"), OK);
    driver.unmap(address, 4 * unit).unwrap();
    assert_eq!(subject.live().mappings, 0);
    assert_eq!(ground.copy_in(address, b"gone"), INVALID);
    assert_eq!(code(driver.unmap(address, 4 * unit)), OK, "again");
    assert_eq!(code(driver.unmap(address + 4 * unit, unit)), OK, "never mapped");
    ground.map(address + unit, 1);
    assert_eq!(code(driver.unmap(address, 6 * unit)), OK, "wider than what is mapped");
    assert_eq!(subject.live().mappings, 0);
}

fn copies_need_access_to_every_byte(subject: Subject) {
    let mut ground = Ground::new(&subject);
    let (driver, unit) = (&subject.verbs, ground.unit);
    // unit: 0 nothing, 1 and 2 mapped and accessible, 3 mapped only, 4 nothing
    let reserved = ground.reserve(5);
    let address = reserved + unit;
    for at in 0..3 {
        ground.map(address + at * unit, 1);
    }
    assert_eq!((ground.copy_in(address, &[1]), ground.copy_out(address, 1)), (INVALID, INVALID), "before set_access");
    ground.allow(address, 2);
    let local = 0u64;
    for (what, start, length) in [
        ("reserved only", reserved, 8),
        ("over the start", address - 4, 8),
        ("over the end of access", address + 2 * unit - 4, 8),
        ("without access", address + 2 * unit, 8),
        ("over the end of all", address + 3 * unit - 4, 8),
        ("behind the end", address + 3 * unit, 8),
        ("across everything", reserved, 5 * unit as usize),
        ("unreserved addresses", 4096, 8),
        ("this process's own memory", &raw const local as u64, 8),
        ("around the end of addresses", u64::MAX - 3, 8),
    ] {
        assert_eq!(ground.copy_in(start, &vec![0xAB; length]), INVALID, "into: {what}");
        assert_eq!(ground.copy_out(start, length), INVALID, "out of: {what}");
    }
    assert_eq!(local, 0);
    let seam = address + unit - 3;
    assert_eq!(ground.copy_in(seam, b"across"), OK);
    assert_eq!(&ground.read(seam), b"across");
    assert_eq!(&ground.read(address + unit), b"oss");
    for (access, want) in [(Some(ReadOnly), (INVALID, OK)), (None, (INVALID, INVALID)), (Some(ReadWrite), (OK, OK))] {
        driver.set_access(address, 2 * unit, Location::Device(0), access).unwrap();
        assert_eq!((ground.copy_in(address, b"some"), ground.copy_out(address, 4)), want, "{access:?}");
    }
    // One byte of a read-only mapping is enough to refuse.
    driver.set_access(address + unit, unit, Location::Device(0), Some(ReadOnly)).unwrap();
    assert_eq!(ground.copy_in(seam, b"ACROSS"), INVALID);
    assert_eq!(&ground.read(seam), b"across");
}

fn copies_of_nothing_succeed_anywhere(subject: Subject) {
    let mut ground = Ground::new(&subject);
    let address = ground.reserve(1);
    ground.map(address, 1);
    for start in [address, address + ground.unit, 0, 4096, u64::MAX] {
        assert_eq!((ground.copy_in(start, &[]), ground.copy_out(start, 0)), (OK, OK), "{start:#x}");
    }
}

fn access_can_be_taken_and_given_again(subject: Subject) {
    let mut ground = Ground::new(&subject);
    let address = ground.reserve(1);
    ground.map(address, 1);
    ground.allow(address, 1);
    assert_eq!(ground.copy_in(address, b"kept"), OK);
    subject.verbs.set_access(address, ground.unit, Location::Device(0), None).unwrap();
    assert_eq!(ground.copy_out(address, 4), INVALID);
    subject.verbs.set_access(address, ground.unit, Location::Device(0), Some(ReadOnly)).unwrap();
    assert_eq!(&ground.read(address), b"kept");
}

fn only_exportable_memory_is_exported(subject: Subject) {
    let (driver, unit) = (&subject.verbs, subject.unit());
    for exportable in [false, true] {
        let properties = Properties { exportable, ..EXPORTABLE };
        let handle = driver.create(unit, &properties).unwrap();
        assert_eq!(driver.properties(handle).unwrap(), properties);
        assert_eq!(code(driver.export(handle)), if exportable { OK } else { INVALID });
        driver.release(handle).unwrap();
    }
}

fn imported_memory_is_the_same_memory_under_another_handle(subject: Subject) {
    let mut ground = Ground::new(&subject);
    let (driver, unit) = (&subject.verbs, ground.unit);
    let address = ground.reserve(2);
    let handle = ground.map(address, 1);
    let fd = driver.export(handle).unwrap();
    let imported = driver.import(fd.as_fd(), unit).unwrap();
    ground.handles.push(imported);
    assert_ne!(imported, handle);
    assert_eq!(driver.properties(imported).unwrap(), Properties { exportable: false, ..EXPORTABLE });
    assert_eq!(code(driver.export(imported)), INVALID, "exported again");
    driver.map(address + unit, unit, 0, imported).unwrap();
    ground.allow(address, 2);
    assert_eq!(ground.copy_in(address, b"one memory"), OK);
    assert_eq!(&ground.read(address + unit), b"one memory");
}

fn released_handles_are_refused(subject: Subject) {
    let mut ground = Ground::new(&subject);
    let (driver, unit) = (&subject.verbs, ground.unit);
    let address = ground.reserve(1);
    let created = driver.create(unit, &EXPORTABLE).unwrap();
    let fd = driver.export(created).unwrap();
    let imported = driver.import(fd.as_fd(), unit).unwrap();
    for handle in [created, imported] {
        driver.release(handle).unwrap();
        // NVIDIA's driver crashes on some of these: they must not reach it.
        assert_eq!(code(driver.map(address, unit, 0, handle)), INVALID, "map");
        assert_eq!(code(driver.export(handle)), INVALID, "export");
        assert_eq!(code(driver.properties(handle)), INVALID, "properties");
        assert_eq!(code(driver.release(handle)), INVALID, "release");
    }
}

fn memory_outlives_its_handle_while_mapped(subject: Subject) {
    let mut ground = Ground::new(&subject);
    let (driver, unit) = (&subject.verbs, ground.unit);
    let address = ground.reserve(1);
    let handle = driver.create(unit, &EXPORTABLE).unwrap();
    driver.map(address, unit, 0, handle).unwrap();
    ground.allow(address, 1);
    assert_eq!(ground.copy_in(address, b"before"), OK);
    driver.release(handle).unwrap();
    assert_eq!(&ground.read(address), b"before");
    assert_eq!(ground.copy_in(address, b"behind"), OK);
    assert_eq!(&ground.read(address), b"behind");
}

fn every_export_is_a_new_descriptor_closed_on_exec(subject: Subject) {
    let mut ground = Ground::new(&subject);
    let handle = ground.create(1);
    let fds = [(); 2].map(|()| subject.verbs.export(handle).unwrap());
    assert_ne!(fds[0].as_raw_fd(), fds[1].as_raw_fd());
    assert!(fds.iter().all(|fd| closes_on_exec(fd.as_fd())));
}

fn a_descriptor_keeps_memory_alive(subject: Subject) {
    let mut ground = Ground::new(&subject);
    let (driver, unit) = (&subject.verbs, ground.unit);
    let address = ground.reserve(1);
    let handle = driver.create(unit, &EXPORTABLE).unwrap();
    driver.map(address, unit, 0, handle).unwrap();
    ground.allow(address, 1);
    assert_eq!(ground.copy_in(address, b"in the descriptor"), OK);
    let fd = driver.export(handle).unwrap();
    driver.unmap(address, unit).unwrap();
    driver.release(handle).unwrap();
    let imported = driver.import(fd.as_fd(), unit).unwrap();
    drop(fd);
    ground.handles.push(imported);
    driver.map(address, unit, 0, imported).unwrap();
    ground.allow(address, 1);
    assert_eq!(&ground.read(address), b"in the descriptor");
}

/// Descriptors that are no memory of any driver, each of a file of its own.
fn wrong_descriptors(size: u64) -> Vec<(&'static str, OwnedFd)> {
    let memfd = memfd_create(c"unsealed", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
    ftruncate(&memfd, size as i64).unwrap();
    let file = tempfile::tempfile().unwrap();
    file.set_len(size).unwrap();
    let (pipe_reader, pipe_writer) = pipe2(OFlag::O_CLOEXEC).unwrap();
    let (lone_reader, _) = pipe2(OFlag::O_CLOEXEC).unwrap();
    vec![
        ("an unsealed memfd", memfd),
        ("an ordinary file", file.into()),
        ("a pipe to read", pipe_reader),
        ("a pipe to write", pipe_writer),
        ("a pipe with the other end closed", lone_reader),
        ("a device", File::open("/dev/null").unwrap().into()),
    ]
}

fn descriptors_of_other_things_are_refused(subject: Subject) {
    let unit = subject.unit();
    for (what, fd) in wrong_descriptors(unit) {
        assert_eq!(code(subject.verbs.import(fd.as_fd(), unit)), code::UNKNOWN, "{what}");
        // It stays the caller's.
        fcntl(&fd, FcntlArg::F_GETFD).unwrap();
    }
}

// Owners

fn sizes_are_rounded_up_to_the_granularity(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    assert_eq!(device.granularity().unwrap(), unit);
    for (size, want) in [(1, unit), (unit - 1, unit), (unit, unit), (unit + 1, 2 * unit)] {
        let allocation = Allocation::create(&device, size).unwrap();
        assert_eq!(allocation.size(), want, "{size} bytes");
        let mapping = Mapping::new(&allocation, ReadWrite).unwrap();
        assert_eq!((mapping.size(), mapping.access(), mapping.address() % unit), (want, ReadWrite, 0));
        mapping.copy_in(want - 1, &[7]).unwrap();
        assert_eq!(read(&mapping, want - 1, 1), [7]);
        assert_eq!(allocation.properties(), EXPORTABLE);
    }
}

fn sizes_that_no_memory_has_are_refused(subject: Subject) {
    let device = subject.device();
    let largest = u64::MAX - (subject.unit() - 1);
    for size in [0, largest + 1, u64::MAX] {
        match Allocation::create(&device, size) {
            Err(error @ Error::Memory(MemoryError::InvalidSize { .. })) => {
                assert_eq!(error.kind(), ErrorKind::Usage);
                assert!(error.to_string().contains(&largest.to_string()), "{error}");
            }
            other => panic!("{size}: {other:?}"),
        }
    }
}

fn too_much_memory_is_refused_with_both_figures(subject: Subject) {
    let device = subject.device();
    let total = device.memory_info().unwrap().total;
    match Allocation::create(&device, (4 << 40) - 5) {
        Err(Error::Memory(MemoryError::OutOfMemory { device: named, size, free })) => {
            assert_eq!((named, size), (device.to_string(), 4 << 40));
            assert!(0 < free && free <= total, "{free} of {total}");
        }
        other => panic!("{other:?}"),
    }
}

fn an_allocation_mapped_twice_is_the_same_bytes(subject: Subject) {
    let allocation = Allocation::create(&subject.device(), 1).unwrap();
    let [one, two] = [(); 2].map(|()| Mapping::new(&allocation, ReadWrite).unwrap());
    assert_ne!(one.address(), two.address());
    one.copy_in(100, b"from one").unwrap();
    assert_eq!(read(&two, 100, 8), b"from one");
    two.copy_in(105, b"two").unwrap();
    assert_eq!(read(&one, 100, 8), b"from two");
    drop(one);
    assert_eq!(read(&two, 100, 8), b"from two");
}

fn a_read_only_mapping_refuses_to_be_written(subject: Subject) {
    let allocation = Allocation::create(&subject.device(), 1).unwrap();
    let writable = Mapping::new(&allocation, ReadWrite).unwrap();
    let mapping = Mapping::new(&allocation, ReadOnly).unwrap();
    writable.copy_in(0, b"read me").unwrap();
    assert_eq!(mapping.access(), ReadOnly);
    assert!(matches!(mapping.copy_in(0, b"overwritten"), Err(Error::Memory(MemoryError::ReadOnly))));
    // Nor does the driver.
    assert_eq!(code(subject.verbs.copy_in(0, mapping.address(), b"overwritten")), INVALID);
    assert_eq!(read(&mapping, 0, 7), b"read me");
}

fn an_export_is_one_descriptor_for_life(mut subject: Subject) {
    subject.alone();
    let device = subject.device();
    // The first export may open files that stay.
    Allocation::create(&device, 1).unwrap().export().unwrap();
    let allocation = Allocation::create(&device, 1).unwrap();
    subject.faulty.take_verbs();
    let fd = allocation.export().unwrap();
    let number = fd.as_raw_fd();
    assert!(closes_on_exec(fd));
    assert_eq!(allocation.export().unwrap().as_raw_fd(), number);
    let inode = Inode::of(fd);
    // What the driver itself holds of it: the host backend its memfd, NVIDIA's driver many.
    let open = inode.open_here();
    assert_eq!(allocation.export().unwrap().as_raw_fd(), number);
    assert_eq!(inode.open_here(), open);
    let exports = subject.faulty.take_verbs().into_iter().filter(|verb| *verb == "export").count();
    assert_eq!(exports, 1, "exporting again costs twenty times as much as sending the same again");
    let copy = exported(&allocation);
    drop(allocation);
    match subject.kind {
        Kind::Host | Kind::Fake => assert_eq!(inode.open_here(), 1, "only the copy is left"),
        Kind::Cuda => assert_eq!(inode.open_here(), open, "one closed, and one copy made"),
    }
    drop(copy);
    subject.assert_empty();
}

fn an_import_closes_its_descriptor_and_may_be_in_the_same_process(mut subject: Subject) {
    subject.alone();
    let device = subject.device();
    let allocation = Allocation::create(&device, 1).unwrap();
    let original = Mapping::new(&allocation, ReadWrite).unwrap();
    original.copy_in(0, b"hello").unwrap();
    let fd = exported(&allocation);
    let inode = Inode::of(&fd);
    let open = inode.open_here();
    let imported = Allocation::import(&device, fd, allocation.size()).unwrap();
    let imported_size = imported.size();
    assert_eq!(imported_size, allocation.size());
    match subject.kind {
        // This one keeps the memfd itself, by a descriptor of its own.
        Kind::Host | Kind::Fake => assert_eq!(inode.open_here(), open),
        Kind::Cuda => assert_eq!(inode.open_here(), open - 1),
    }
    assert_eq!(code(imported.export()), INVALID);
    let mapping = Mapping::new(&imported, ReadWrite).unwrap();
    assert_eq!(read(&mapping, 0, 5), b"hello");
    // The exporter may go first.
    drop((original, allocation));
    assert_eq!(read(&mapping, 0, 5), b"hello");
    drop((mapping, imported));
    if subject.kind != Kind::Cuda {
        assert_eq!(inode.open_here(), 0);
    }
}

fn a_wrong_descriptor_is_closed_and_nothing_is_left(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    for (what, fd) in wrong_descriptors(unit) {
        let inode = Inode::of(&fd);
        match Allocation::import(&device, fd, unit) {
            Err(error @ Error::Memory(MemoryError::NotImported { .. })) => {
                let reason = error.to_string();
                assert!(reason.starts_with("the descriptor can't be imported as memory: the "), "{what}: {reason}");
                assert!(!reason.contains("CUDA_ERROR"), "{what}: {reason}");
                let source = std::error::Error::source(&error).map(ToString::to_string);
                assert!(source.is_some_and(|source| source.ends_with("CUDA_ERROR_UNKNOWN (999)")), "{what}: {error:?}");
            }
            other => panic!("{what}: {other:?}"),
        }
        // The other end of the pipe is the same file, and other tests hold /dev/null.
        if !what.contains("device") {
            assert_eq!(inode.open_here(), usize::from(what == "a pipe to read"), "{what}");
        }
        subject.assert_empty();
    }
}

fn a_size_other_than_the_exporters_never_maps(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    let allocation = Allocation::create(&device, 2 * unit).unwrap();
    for claimed in [unit, 3 * unit, 4 * unit, 1 << 30] {
        let before = subject.live();
        match (subject.kind, Allocation::import(&device, exported(&allocation), claimed)) {
            (Kind::Host, Err(Error::Driver { code: INVALID, source: Some(reason), .. })) => {
                let reason = reason.to_string();
                assert!(reason.contains(&claimed.to_string()) && reason.contains(&(2 * unit).to_string()), "{reason}");
            }
            // A GPU's descriptor does not say its size: mapping it does.
            (Kind::Fake | Kind::Cuda, Ok(imported)) => {
                assert_eq!(code(Mapping::new(&imported, ReadOnly)), UNSUPPORTED, "{claimed}");
            }
            (_, other) => panic!("{claimed}: {other:?}"),
        }
        assert_eq!(subject.live(), before);
    }
    let imported = Allocation::import(&device, exported(&allocation), 2 * unit).unwrap();
    Mapping::new(&imported, ReadOnly).unwrap();
}

fn an_unaligned_size_makes_no_call(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    let allocation = Allocation::create(&device, 1).unwrap();
    for claimed in [0, 1, unit - 1, unit + 4096, u64::MAX] {
        let fd = exported(&allocation);
        subject.faulty.take_verbs();
        match Allocation::import(&device, fd, claimed) {
            Err(Error::Memory(MemoryError::Unaligned { size, granularity })) => {
                assert_eq!((size, granularity), (claimed, unit))
            }
            other => panic!("{claimed}: {other:?}"),
        }
        assert_eq!(subject.faulty.take_verbs(), [""; 0], "{claimed}");
    }
}

fn offsets_outside_a_mapping_are_refused(subject: Subject) {
    let unit = subject.unit();
    let allocation = Allocation::create(&subject.device(), 1).unwrap();
    let mapping = Mapping::new(&allocation, ReadWrite).unwrap();
    subject.faulty.take_verbs();
    for (offset, length) in [(unit, 1), (unit - 4, 5), (0, unit + 1), (u64::MAX, 1), (u64::MAX - 3, 8)] {
        let mut bytes = vec![0; length as usize];
        for answer in [mapping.copy_in(offset, &bytes), mapping.copy_out(offset, &mut bytes)] {
            match answer {
                Err(Error::Memory(MemoryError::OutOfRange { offset: told_offset, length: told_length, size })) => {
                    assert_eq!((told_offset, told_length, size), (offset, length, unit));
                }
                other => panic!("{offset} {length}: {other:?}"),
            }
        }
    }
    assert!(subject.faulty.take_verbs().is_empty());
    mapping.copy_in(unit - 4, b"last").unwrap();
    assert_eq!(read(&mapping, unit - 4, 4), b"last");
    mapping.copy_in(unit, &[]).unwrap();
}

fn offsets_outside_a_reservation_are_refused(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    let reservation = Reservation::new(&device, 2 * unit).unwrap();
    let allocation = Allocation::create(&device, unit).unwrap();
    for offset in [2 * unit, unit + 4096, u64::MAX, u64::MAX - unit + 1] {
        match Mapping::at(&reservation, offset, &allocation, ReadWrite) {
            Err(Error::Memory(MemoryError::OutOfRange { .. })) => {}
            other => panic!("{offset}: {other:?}"),
        }
    }
    assert_eq!(code(Mapping::at(&reservation, 4096, &allocation, ReadWrite)), INVALID, "an unaligned offset");
    assert_eq!(code(Reservation::new(&device, unit + 1)), INVALID);
}

fn allocations_side_by_side_are_one_buffer(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    let reservation = Reservation::new(&device, 6 * unit).unwrap();
    assert_eq!(reservation.size(), 6 * unit);
    let mut offset = 0;
    let mut mappings = Vec::new();
    for units in [1, 3, 2] {
        let allocation = Allocation::create(&device, units * unit).unwrap();
        mappings.push(Mapping::at(&reservation, offset, &allocation, ReadWrite).unwrap());
        assert_eq!(mappings.last().unwrap().address(), reservation.address() + offset);
        offset += units * unit;
    }
    let mut bytes = vec![0; 6 * unit as usize];
    Pattern::new(3).write(0, &mut bytes);
    subject.verbs.copy_in(0, reservation.address(), &bytes).unwrap();
    let mut back = vec![0; bytes.len()];
    subject.verbs.copy_out(0, reservation.address(), &mut back).unwrap();
    assert!(back == bytes);
    let starts = [0, unit, 4 * unit].map(|start| start as usize);
    for (mapping, start) in mappings.iter().zip(starts) {
        assert_eq!(read(mapping, 0, 64), bytes[start..start + 64]);
    }
    // A hole ends it.
    mappings.remove(1);
    assert_eq!(code(subject.verbs.copy_out(0, reservation.address(), &mut back)), INVALID);
    assert_eq!(read(&mappings[1], 0, 64), bytes[starts[2]..starts[2] + 64]);
    // The mappings hold the reservation.
    drop(reservation);
    mappings[0].copy_in(0, b"still mine").unwrap();
}

fn occupied_addresses_are_not_mapped_again(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    let reservation = Reservation::new(&device, 2 * unit).unwrap();
    let [one, two] = [1, 2].map(|units| Allocation::create(&device, units * unit).unwrap());
    let mapping = Mapping::at(&reservation, unit, &one, ReadWrite).unwrap();
    mapping.copy_in(0, b"mine").unwrap();
    for (offset, allocation) in [(unit, &one), (0, &two)] {
        assert_eq!(code(Mapping::at(&reservation, offset, allocation, ReadWrite)), INVALID);
    }
    assert_eq!(read(&mapping, 0, 4), b"mine");
    drop(mapping);
    Mapping::at(&reservation, 0, &two, ReadWrite).unwrap();
}

fn owners_may_be_dropped_in_any_order(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    for order in 0..24 {
        let allocation = Allocation::create(&device, 1).unwrap();
        let reservation = Reservation::new(&device, 2 * unit).unwrap();
        let mapping = Mapping::at(&reservation, unit, &allocation, ReadWrite).unwrap();
        let imported = Allocation::import(&device, exported(&allocation), unit).unwrap();
        let view = Mapping::at(&reservation, 0, &imported, ReadOnly).unwrap();
        mapping.copy_in(0, b"there").unwrap();
        assert_eq!(read(&view, 0, 5), b"there");
        let mut owners: Vec<Box<dyn Any>> =
            vec![Box::new(allocation), Box::new(reservation), Box::new((mapping, imported)), Box::new(view)];
        let mut number = order;
        while !owners.is_empty() {
            drop(owners.remove(number % owners.len()));
            number /= owners.len() + 1;
        }
        subject.assert_empty();
    }
}

// The pattern

/// The documented formula, written a second time.
fn by_the_formula(salt: u32, index: u64) -> u32 {
    assert!(index < 1 << 31);
    (index as u32 * 2 + 1337) ^ 0xDEAD_BEEF ^ salt
}

fn a_filled_buffer_verifies_at_every_size(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    for size in [1, 2, 3, 4, 5, 4097, (1 << 20) + 1, unit - 1, unit, unit + 1] {
        let allocation = Allocation::create(&device, size).unwrap();
        let mapping = Mapping::new(&allocation, ReadWrite).unwrap();
        let whole = mapping.size() as usize;
        mapping.copy_in(0, &vec![0xFF; whole]).unwrap();
        let salt = size as u32 ^ 0x5A17;
        pattern::fill(&mapping, 0..size, Pattern::new(salt), &mut |_| Ok(())).unwrap();
        let bytes = read(&mapping, 0, whole);
        let (data, slack) = bytes.split_at(size as usize);
        for (word, index) in data.chunks(4).zip(0..) {
            assert_eq!(word, &by_the_formula(salt, index).to_le_bytes()[..word.len()], "word {index} of {size} bytes");
        }
        assert!(slack.iter().all(|byte| *byte == 0), "what was there before is still behind {size} bytes");
        let found = pattern::verify(&mapping, 0, 0..size, Pattern::new(salt), &mut |_| Ok(())).unwrap();
        assert_eq!((found.words, found.mismatches, found.first), (size.div_ceil(4), 0, None));
        let other = pattern::verify(&mapping, 0, 0..size, Pattern::new(salt ^ 1), &mut |_| Ok(())).unwrap();
        assert_eq!(other.mismatches, other.words, "another salt differs in every word");
    }
}

fn a_check_counts_wrong_words_and_names_the_first(subject: Subject) {
    let device = subject.device();
    let (size, salt) = (4097, 11);
    let allocation = Allocation::create(&device, size).unwrap();
    let mapping = Mapping::new(&allocation, ReadWrite).unwrap();
    pattern::fill(&mapping, 0..size, Pattern::new(salt), &mut |_| Ok(())).unwrap();
    let other = Mapping::new(&allocation, ReadWrite).unwrap();
    let flip = |at: u64| other.copy_in(at, &[!read(&other, at, 1)[0]]).unwrap();
    // Two bytes of word 3, one of word 700, the one byte that there is of word 1024, and one that is slack.
    for at in [4 * 3 + 2, 4 * 3 + 1, 4 * 700, 4096, 4097] {
        flip(at);
    }
    let check = || pattern::verify(&mapping, 0, 0..size, Pattern::new(salt), &mut |_| Ok(())).unwrap();
    let found = check();
    let expected = by_the_formula(salt, 3);
    assert_eq!((found.words, found.mismatches, found.passed()), (1025, 3, false));
    assert_eq!(found.first, Some(Mismatch { index: 3, expected, found: expected ^ 0x00FF_FF00 }));
    [4 * 3 + 2, 4 * 3 + 1, 4 * 700].into_iter().for_each(flip);
    let found = check();
    let expected = by_the_formula(salt, 1024) & 0xFF;
    assert_eq!(found.mismatches, 1);
    assert_eq!(found.first, Some(Mismatch { index: 1024, expected, found: expected ^ 0xFF }));
    flip(4096);
    assert!(check().passed());
}

fn filling_and_checking_go_slice_by_slice_and_can_be_ended(subject: Subject) {
    // So few that one thread does them, in their order.
    let slice = pattern::SLICE as u64;
    let allocation = Allocation::create(&subject.device(), 2 * slice + 1).unwrap();
    let mapping = Mapping::new(&allocation, ReadWrite).unwrap();
    let (whole, size) = (mapping.size(), 2 * slice + 1);
    let mut done = Vec::new();
    let mut record = |reached| {
        done.push(reached);
        Ok(())
    };
    pattern::fill(&mapping, 0..size, Pattern::new(1), &mut record).unwrap();
    assert!(pattern::verify(&mapping, 0, 0..size, Pattern::new(1), &mut record).unwrap().passed());
    let filled = (1..=whole / slice).map(|slices| slices * slice);
    assert_eq!(done, filled.chain([slice, 2 * slice, size]).collect::<Vec<_>>());
    // The last slice is mostly slack, and the one before it was all data.
    assert!(read(&mapping, size, (whole - size) as usize).iter().all(|byte| *byte == 0), "slack that is not zero");
    mapping.copy_in(2 * slice, &[!read(&mapping, 2 * slice, 1)[0]]).unwrap();
    let found = pattern::verify(&mapping, 0, 0..size, Pattern::new(1), &mut |_| Ok(())).unwrap();
    assert_eq!((found.mismatches, found.first.unwrap().index), (1, 2 * slice / 4));
    let mut stop = |_| Err(Error::Interrupted { reason: CancelReason::Program });
    let ended = pattern::fill(&mapping, 0..size, Pattern::new(2), &mut stop);
    assert!(matches!(ended, Err(Error::Interrupted { .. })), "{ended:?}");
    let ended = pattern::verify(&mapping, 0, 0..size, Pattern::new(2), &mut stop);
    assert!(matches!(ended, Err(Error::Interrupted { .. })), "{ended:?}");
    for answer in [
        pattern::fill(&mapping, 0..whole + 1, Pattern::new(1), &mut |_| Ok(())),
        pattern::verify(&mapping, 0, 0..whole + 1, Pattern::new(1), &mut |_| Ok(())).map(drop),
    ] {
        assert!(matches!(answer, Err(Error::Memory(MemoryError::OutOfRange { .. }))), "{answer:?}");
    }
}

// Threads

fn threads_may_import_the_same_descriptor_at_once(subject: Subject) {
    let device = subject.device();
    let allocation = Allocation::create(&device, 1).unwrap();
    let mapping = Mapping::new(&allocation, ReadWrite).unwrap();
    pattern::fill(&mapping, 0..mapping.size(), Pattern::new(4), &mut |_| Ok(())).unwrap();
    let fd = allocation.export().unwrap();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..8 {
                    let fd = fd.try_clone_to_owned().unwrap();
                    let imported = Allocation::import(&device, fd, mapping.size()).unwrap();
                    let view = Mapping::new(&imported, ReadOnly).unwrap();
                    let found = pattern::verify(&view, 0, 0..view.size(), Pattern::new(4), &mut |_| Ok(())).unwrap();
                    assert!(found.passed(), "{found:?}");
                }
            });
        }
    });
}

fn threads_may_use_one_mapping_at_once(subject: Subject) {
    let allocation = Allocation::create(&subject.device(), 1).unwrap();
    let mapping = Mapping::new(&allocation, ReadWrite).unwrap();
    thread::scope(|scope| {
        for number in 0..4u8 {
            let (mapping, allocation) = (&mapping, &allocation);
            scope.spawn(move || {
                let offset = u64::from(number) * 4096;
                for round in 0..32 {
                    mapping.copy_in(offset, &[number ^ round; 4096]).unwrap();
                    assert_eq!(read(mapping, offset, 4096), [number ^ round; 4096]);
                    let view = Mapping::new(allocation, ReadOnly).unwrap();
                    assert_eq!(read(&view, offset, 16), [number ^ round; 16]);
                }
            });
        }
    });
}

// Failures

/// Everything that a handoff does, in one process.
fn handoff(device: &Device) -> Result<(), Error> {
    let allocation = Allocation::create(device, 1)?;
    let fd = allocation.export()?.try_clone_to_owned().unwrap();
    let mapping = Mapping::new(&allocation, ReadWrite)?;
    pattern::fill(&mapping, 0..mapping.size(), Pattern::new(9), &mut |_| Ok(()))?;
    let imported = Allocation::import(device, fd, allocation.size())?;
    let view = Mapping::new(&imported, ReadOnly)?;
    let found = pattern::verify(&view, 0, 0..view.size(), Pattern::new(9), &mut |_| Ok(()))?;
    assert!(found.passed());
    Ok(())
}

fn a_failure_at_any_call_leaves_nothing(mut subject: Subject) {
    const CODE: u32 = 4242;
    subject.alone();
    let device = subject.device();
    // What the driver opens once stays.
    handoff(&device).unwrap();
    let like = subject.faulty.exported()[0];
    let open = like.open_here();
    subject.faulty.take_verbs();
    handoff(&device).unwrap();
    let all = subject.faulty.take_verbs();
    let forward: Vec<_> = all.into_iter().filter(|verb| !["release", "free", "unmap"].contains(verb)).collect();
    assert!(
        ["create", "export", "reserve", "map", "set_access", "copy_in", "synchronize", "import", "copy_out"]
            .iter()
            .all(|verb| forward.contains(verb)),
        "{forward:?}"
    );
    for (n, verb) in (1..).zip(&forward) {
        subject.faulty.fail(Fault::Nth(n), CODE);
        match handoff(&device) {
            Err(Error::Driver { call, code: CODE, .. }) => assert_eq!(call, *verb, "call {n}"),
            other => panic!("call {n}, {verb}: {other:?}"),
        }
        assert_eq!(subject.faulty.mend(), Some(*verb));
        subject.assert_empty();
        match subject.kind {
            Kind::Host | Kind::Fake => {
                let left = subject.faulty.exported().iter().map(|inode| inode.open_here()).sum::<usize>();
                assert_eq!(left, 0, "descriptors after the failure of call {n}, {verb}");
            }
            Kind::Cuda => assert_eq!(like.open_here(), open, "descriptors after the failure of call {n}, {verb}"),
        }
    }
    handoff(&device).unwrap();
}

fn memory_that_ran_out_for_another_reason_or_untold_is_the_drivers_own_error(subject: Subject) {
    let device = subject.device();
    // There is enough of it: the figures would say nothing.
    subject.faulty.fail(Fault::Verb("create"), code::OUT_OF_MEMORY);
    assert_eq!(code(Allocation::create(&device, 1)), code::OUT_OF_MEMORY);
    subject.faulty.mend();
    subject.faulty.fail(Fault::Verb("memory_info"), 4242);
    assert_eq!(code(Allocation::create(&device, 4 << 40)), code::OUT_OF_MEMORY);
}

fn a_failure_to_give_back_is_no_panic_and_frees_the_rest(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    for verb in ["unmap", "free", "release"] {
        let allocation = Allocation::create(&device, 1).unwrap();
        let reservation = Reservation::new(&device, unit).unwrap();
        let address = reservation.address();
        let mapping = Mapping::at(&reservation, 0, &allocation, ReadWrite).unwrap();
        drop(reservation);
        let before = subject.faulty.take_verbs().len();
        assert!(before > 0);
        subject.faulty.fail(Fault::Verb(verb), 4242);
        drop((mapping, allocation));
        assert_eq!(subject.faulty.mend(), Some(verb));
        assert_eq!(subject.faulty.take_verbs(), ["unmap", "free", "release"], "each is tried once");
        let live = subject.live();
        match verb {
            "unmap" => {
                // What is still mapped keeps its addresses.
                assert_eq!((live.handles, live.reservations, live.mappings), (0, 1, 1));
                subject.verbs.unmap(address, unit).unwrap();
                subject.verbs.free(address, unit).unwrap();
            }
            "free" => {
                assert_eq!((live.handles, live.reservations, live.mappings), (0, 1, 0));
                subject.verbs.free(address, unit).unwrap();
            }
            _ => {
                assert_eq!((live.handles, live.reservations, live.mappings), (1, 0, 0));
                subject.faulty.release_all();
            }
        }
        subject.assert_empty();
    }
}

fn a_fork_is_told_so_and_does_no_harm(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    let allocation = Allocation::create(&device, 1).unwrap();
    let mapping = Mapping::new(&allocation, ReadWrite).unwrap();
    mapping.copy_in(0, b"the parent's").unwrap();
    let fd = exported(&allocation);
    let handle = subject.verbs.create(unit, &EXPORTABLE).unwrap();
    let parent = process::id();
    let calls = || subject.fake.as_ref().map(|fake| fake.calls(""));
    let driver = Arc::clone(&subject.verbs);
    let mut owners = Some((mapping, allocation));
    // What was had before the fork.
    let bare = driver.bare().unwrap();
    let (created, released) = (bare.create(0, unit).unwrap(), bare.create(0, unit).unwrap());
    let (opened, _) = bare.open(0, bare.export(&created).unwrap().as_fd(), unit).unwrap();
    let (mut released, mut opened) = (Some(released), Some(opened));
    let others = || (driver.legacy().ok(), driver.pools().ok(), driver.kernels().ok(), driver.diagnosis().ok());
    let (legacy, pools, kernels, diagnosis) = others();
    let before = calls();
    in_fork(|| {
        let (mapping, allocation) = owners.take().unwrap();
        let address = mapping.address();
        let mut bytes = [0; 4];
        let stretch = Stretch { address, start: 0, size: 4, salt: 0 };
        let mut answers = vec![
            driver.can_access_peer(0, 0).map(drop),
            driver.extent(0, address).map(drop),
            driver.seal(handle).map(drop),
            driver.page_lock(0, 1).map(drop),
            driver.window(address, unit).map(drop),
            driver.legacy().map(drop),
            driver.pools().map(drop),
            driver.bare().map(drop),
            driver.kernels().map(drop),
            driver.diagnosis().map(drop),
            bare.create(0, unit).map(drop),
            bare.export(&created).map(drop),
            bare.release(released.take().unwrap()),
            bare.open(0, fd.as_fd(), unit).map(drop),
            bare.close(opened.take().unwrap()).map(drop),
        ];
        answers.extend(legacy.into_iter().flat_map(|legacy| {
            let handle = [0; 64];
            [
                legacy.allocate(0, unit).map(drop),
                legacy.deallocate(0, address),
                legacy.handle(0, address).map(drop),
                legacy.open(0, &handle).map(drop),
                legacy.close(0, address),
            ]
        }));
        answers.extend(pools.into_iter().flat_map(|pools| {
            [
                pools.create(0).map(drop),
                pools.import(fd.as_fd()).map(drop),
                pools.free(0, address),
                pools.export_pointer(0, address).map(drop),
            ]
        }));
        answers.extend(kernels.into_iter().flat_map(|kernels| {
            [kernels.load(0), kernels.fill(0, &stretch).map(drop), kernels.verify(0, &stretch).map(drop)]
        }));
        answers.extend(diagnosis.into_iter().flat_map(|diagnosis| {
            [
                diagnosis.library().map(drop),
                diagnosis.create_with(0, unit, MadeFor::Rdma).map(drop),
                diagnosis.export_fabric(handle).map(drop),
                diagnosis.export_dma_buf(0, address, unit).map(drop),
                diagnosis.copy_within(0, address, address, 4).map(drop),
                diagnosis.store(0, address, 0),
                diagnosis.event_create(0).map(drop),
                diagnosis.event_open(0, &[0; 64]).map(drop),
            ]
        }));
        answers.extend([
            driver.version().map(drop),
            driver.device_count().map(drop),
            driver.device_name(0).map(drop),
            driver.device_uuid(0).map(drop),
            driver.device_attribute(0, Attribute::ComputeMode).map(drop),
            driver.memory_info(0).map(drop),
            driver.activate(0),
            driver.granularity(&EXPORTABLE, Granularity::Minimum).map(drop),
            driver.create(unit, &EXPORTABLE).map(drop),
            driver.release(handle),
            driver.reserve(unit, 0).map(drop),
            driver.free(address, unit),
            driver.map(address, unit, 0, handle),
            driver.unmap(address, unit),
            driver.set_access(address, unit, Location::Device(0), Some(ReadOnly)),
            driver.export(handle).map(drop),
            driver.import(fd.as_fd(), unit).map(drop),
            driver.properties(handle).map(drop),
            driver.copy_in(0, address, &bytes),
            driver.copy_out(0, address, &mut bytes),
            driver.synchronize(0),
            mapping.copy_in(0, b"the child's"),
            allocation.seal().map(drop),
            Allocation::create(&device, 1).map(drop),
            Mapping::new(&allocation, ReadOnly).map(drop),
        ]);
        let told = answers.into_iter().enumerate().all(|(number, answer)| match answer {
            Err(Error::Forked { initialised_by, pid }) => initialised_by == parent && pid == process::id(),
            other => {
                eprintln!("answer {number} in the fork: {other:?}");
                false
            }
        });
        drop((mapping, allocation));
        told && calls() == before
    });
    let (mapping, allocation) = owners.take().unwrap();
    assert_eq!(read(&mapping, 0, 12), b"the parent's");
    subject.verbs.release(handle).unwrap();
    bare.close(opened.take().unwrap()).unwrap();
    bare.release(released.take().unwrap()).unwrap();
    bare.release(created).unwrap();
    drop((mapping, allocation));
}
