//! Shared and imported memory, by each mechanism: the same cases on every backend.

#![allow(unsafe_code, reason = "mappings made by hand")]

use std::{num::NonZeroUsize, os::unix::fs::FileExt};

use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use vmmfd::{
    Result,
    memory::{Imported, Mechanism, Pointer, Pool, PoolBuffer, VmmSpec},
};
use vmmfd_cli::check::files::{self, Source};

use crate::support::{Inode, prelude::*, sealing};

mod addresses;
mod contents;
mod gpus;
mod handles;

const MECHANISMS: [Mechanism; 2] = [Mechanism::Vmm, Mechanism::Pool];

/// The mechanisms that support import into the exporting process.
fn mechanisms(subject: &Subject) -> &'static [Mechanism] {
    if subject.kind == Kind::Host { &MECHANISMS[..1] } else { &MECHANISMS }
}

fn spec(size: u64) -> VmmSpec {
    Spec::vmm(size)
}

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

fn open(subject: &Subject, shared: &Shared, access: Access) -> Array {
    let (handle, fds) = ArrayHandle::of(shared, bytes(shared.size())).unwrap();
    handle.open(&subject.driver, None, fds, access).unwrap()
}

fn read(region: &dyn Region, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0xEE; length];
    region.copy_out(offset, &mut bytes).unwrap();
    bytes
}
