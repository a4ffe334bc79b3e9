//! Micro-benchmarks for `cargo bench`: encoding and decoding a record, copies of shared memory compared with memcpy, and filling and
//! verifying on the host.
//!
//! Divan prints bytes per second and needs no custom reports. In `cargo test` it runs each benchmark once, so all of them keep working. No
//! test checks the speed.

#![allow(unsafe_code, reason = "copies of shared memory, beside memcpy")]

use std::{hint::black_box, ptr};

use divan::{Bencher, counter::BytesCount};
use vmmfd::{
    driver::{Access, Backend, Choice, open},
    internals::copy,
    memory::{Allocation, Device, Mapping, Region, Selector},
    wire::{Device as WireDevice, Location, Mechanism, Memory, Message, Offer, Part, Ready, Segments, Verdict},
};
use vmmfd_cli::check::pattern::{self, Pattern};

fn main() {
    divan::main();
}

/// The records of a handoff.
fn records() -> Vec<(&'static str, Message)> {
    let size = 64 << 20;
    let device = WireDevice {
        uuid: "679ee1d3-1095-d5a4-3f1b-b0cc79e99f21".parse().expect("a UUID"),
        name: "NVIDIA H200".to_owned(),
    };
    let memory = Memory {
        mechanism: Mechanism::Vmm,
        device,
        location: Location::Device,
        size,
        mapped_size: size,
        segments: 1,
        pool: None,
        pointer: None,
        offset: 0,
        immutable: false,
    };
    let offer = Offer {
        object: "default".to_owned(),
        memory,
        array: None,
        access: Access::ReadWrite,
        part: Some(Part { first: 0, segments: 1, offset: 0, size }),
        check: None,
        buffer: Some(7),
    };
    let ready = |sizes| Message::Ready(Ready { buffer: 7, generation: 123_456, sizes });
    vec![
        ("offer", Message::Offer(Box::new(offer))),
        ("segments", Message::Segments(Segments { first: 0, sizes: vec![size] })),
        ("253 segments", Message::Segments(Segments { first: 0, sizes: vec![2 << 20; 253] })),
        ("ready, new", ready(vec![size])),
        ("ready", ready(Vec::new())),
        ("result", Message::Result(Verdict::unchecked(true))),
    ]
}

const RECORDS: [&str; 6] = ["offer", "segments", "253 segments", "ready, new", "ready", "result"];

fn record(name: &str) -> Message {
    let known = records().into_iter().find(|(known, _)| *known == name);
    known.expect("one of the names").1
}

#[divan::bench(args = RECORDS)]
fn encode(bencher: Bencher<'_, '_>, name: &str) {
    let message = record(name);
    bencher.bench_local(|| black_box(&message).encode());
}

#[divan::bench(args = RECORDS)]
fn decode(bencher: Bencher<'_, '_>, name: &str) {
    let message = record(name);
    let bytes = message.encode().expect("a record");
    bencher.bench_local(|| Message::decode(black_box(&bytes), message.fd_count()));
}

/// Sizes of host memory: one thread processes the first, and all CPUs the second.
const SIZES: [u64; 2] = [2 << 20, 64 << 20];

fn filled(size: u64) -> Mapping {
    let driver = open(Choice::Only(Backend::Host)).expect("host memory").driver;
    let device = Device::find(&driver, Selector::default()).expect("a device");
    let allocation = Allocation::create(&device, size).expect("memory");
    let mapping = Mapping::new(&allocation, Access::ReadWrite).expect("addresses");
    pattern::fill(&mapping, 0..size, Pattern::new(1), &mut |_| Ok(())).expect("the pattern");
    mapping
}

/// From the size of a header to more than any cache holds.
const COPIES: [usize; 4] = [64, 4 << 10, 1 << 20, 64 << 20];

/// Measures `copy` between shared memory, at the given address, and private memory.
fn copied(bencher: Bencher<'_, '_>, size: usize, copy: impl Fn(&Mapping, *mut u8, &mut [u8])) {
    let mapping = filled(size as u64);
    let shared = ptr::with_exposed_provenance_mut(mapping.address() as usize);
    let mut private = vec![1; size];
    bencher.counter(BytesCount::new(size)).bench_local(|| copy(&mapping, black_box(shared), black_box(&mut private)));
}

/// Copies private memory into shared memory.
mod copy_in {
    use super::*;

    #[divan::bench(args = COPIES)]
    fn memcpy(bencher: Bencher<'_, '_>, size: usize) {
        copied(bencher, size, |_, shared, private| {
            // SAFETY: the memory is mapped, has the same length, and nothing else accesses it here.
            unsafe { ptr::copy_nonoverlapping(private.as_ptr(), shared, private.len()) }
        });
    }

    #[divan::bench(args = COPIES)]
    fn primitive(bencher: Bencher<'_, '_>, size: usize) {
        // SAFETY: the memory is mapped and has the same length.
        copied(bencher, size, |_, shared, private| unsafe { copy::write(private, shared) });
    }

    #[divan::bench(args = COPIES)]
    fn region(bencher: Bencher<'_, '_>, size: usize) {
        copied(bencher, size, |mapping, _, private| mapping.copy_in(0, private).expect("a copy"));
    }
}

/// Copies shared memory into private memory.
mod copy_out {
    use super::*;

    #[divan::bench(args = COPIES)]
    fn memcpy(bencher: Bencher<'_, '_>, size: usize) {
        copied(bencher, size, |_, shared, private| {
            // SAFETY: the memory is mapped, has the same length, and nothing else accesses it here.
            unsafe { ptr::copy_nonoverlapping(shared, private.as_mut_ptr(), private.len()) }
        });
    }

    #[divan::bench(args = COPIES)]
    fn primitive(bencher: Bencher<'_, '_>, size: usize) {
        // SAFETY: the memory is mapped and has the same length.
        copied(bencher, size, |_, shared, private| unsafe { copy::read(shared, private) });
    }

    #[divan::bench(args = COPIES)]
    fn region(bencher: Bencher<'_, '_>, size: usize) {
        copied(bencher, size, |mapping, _, private| mapping.copy_out(0, private).expect("a copy"));
    }
}

#[divan::bench(args = SIZES)]
fn host_fill(bencher: Bencher<'_, '_>, size: u64) {
    let mapping = filled(size);
    let fill = || pattern::fill(&mapping, 0..size, Pattern::new(2), &mut |_| Ok(()));
    bencher.counter(BytesCount::new(size)).bench_local(fill);
}

#[divan::bench(args = SIZES)]
fn host_verify(bencher: Bencher<'_, '_>, size: u64) {
    let mapping = filled(size);
    let verify = || pattern::verify(&mapping, 0, 0..size, Pattern::new(1), &mut |_| Ok(()));
    bencher.counter(BytesCount::new(size)).bench_local(verify);
}
