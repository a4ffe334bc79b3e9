//! Objects of a few pages of host memory. Each page contains the number of its put.

use std::os::unix::fs::FileExt;

use nix::fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl};
use vmmfd::wire::broker;

use crate::support::{material::put_of_all, prelude::*};

/// The granularity of host memory, and the smallest segment of the broker.
pub(crate) const PAGE: u64 = vmmfd::driver::GRANULARITY;

/// A page of sealed host memory that contains the number of its put.
pub(crate) fn page(nonce: u64) -> OwnedFd {
    let file = File::from(memfd_create(c"page", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap());
    file.set_len(PAGE).unwrap();
    fallocate(file.as_fd(), FallocateFlags::empty(), 0, PAGE as i64).unwrap();
    file.write_all_at(&nonce.to_le_bytes(), 0).unwrap();
    file.write_all_at(&nonce.to_le_bytes(), PAGE - 8).unwrap();
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).unwrap();
    file.into()
}

pub(crate) fn nonce_of(fd: &OwnedFd) -> u64 {
    let file = File::from(fd.try_clone().unwrap());
    let (mut first, mut last) = ([0; 8], [0; 8]);
    file.read_exact_at(&mut first, 0).unwrap();
    file.read_exact_at(&mut last, PAGE - 8).unwrap();
    assert_eq!(first, last);
    u64::from_le_bytes(first)
}

/// Describes memory with a given number of pages.
#[derive(Clone)]
pub(crate) struct Template(Description);

impl Template {
    pub(crate) fn new() -> Self {
        let subject = Subject::host();
        let shared = Shared::create(&subject.device(), Spec::vmm(1)).unwrap();
        Self(shared.describe().unwrap())
    }

    pub(crate) fn of(&self, pages: u64) -> Description {
        let mut description = self.0.clone();
        (description.size, description.mapped_size) = (pages * PAGE, pages * PAGE);
        if let Sharing::Vmm { segments, .. } = &mut description.sharing {
            *segments = pages;
        }
        description
    }

    pub(crate) fn put(&self, client: &Client, name: &str, nonce: u64, condition: Condition) -> vmmfd::Result<u64> {
        let page = page(nonce);
        let part = PutPart::of_segments("all", Backend::Host, self.of(1), [(PAGE, page.as_fd())])?;
        client.put(&Put::new(name).condition(condition).part(part)).map(|published| published.version)
    }

    /// A put of so many pages, all in its first record.
    pub(crate) fn put_of_pages(&self, name: &str, pages: usize) -> broker::PutHeader {
        put_of_all(name, Backend::Host, (&self.of(pages as u64)).into(), vec![PAGE; pages])
    }
}
