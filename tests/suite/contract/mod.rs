//! The contract of every backend: the same cases run on the host backend, on the CUDA backend with the emulated driver, and on a GPU. The
//! expected results were measured on an H200.

#![allow(unsafe_code, reason = "descriptors as numbers")]

use std::any::Any;

use nix::{
    fcntl::OFlag,
    unistd::{ftruncate, pipe2},
};
use vmmfd::internals::{Diagnosis, Handle, Kernels, LegacyIpc, MadeFor, PatternSpan, Pools};
use vmmfd_cli::check::pattern::Verification;

use crate::support::{Inode, closes_on_exec, prelude::*};

mod calls;
mod failures;
mod owners;
const INVALID: u32 = code::INVALID_VALUE;
const UNSUPPORTED: u32 = code::NOT_SUPPORTED;
const OK: u32 = 0;

fn read(mapping: &Mapping, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0xEE; length];
    mapping.copy_out(offset, &mut bytes).unwrap();
    bytes
}

/// Allocates memory and maps it writable.
fn mapped(subject: &Subject, size: u64) -> (Arc<Allocation>, Mapping) {
    let allocation = Allocation::create(&subject.device(), size).unwrap();
    let mapping = Mapping::new(&allocation, ReadWrite).unwrap();
    (allocation, mapping)
}

fn fill(mapping: &Mapping, size: u64, salt: u32) {
    pattern::fill(mapping, 0..size, Pattern::new(salt), &mut |_| Ok(())).unwrap();
}

fn verify(mapping: &Mapping, size: u64, salt: u32) -> Verification {
    pattern::verify(mapping, 0, 0..size, Pattern::new(salt), &mut |_| Ok(())).unwrap()
}

fn exported(allocation: &Allocation) -> OwnedFd {
    allocation.export().unwrap().try_clone_to_owned().unwrap()
}

/// Descriptors that are not memory of any driver, each for a separate file.
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
