//! Sockets that a fork must not keep: the peer would take the fork for this process.

use std::{
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    ptr,
    sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering},
};

use nix::sys::stat::{FileStat, SFlag, fstat};

use super::{
    descriptor::{eventfd, replace},
    fork::ProcessIdentity,
};

/// The registered sockets. A list that only grows and has no lock, which another thread could hold during a fork.
static FIRST: Block = Block::new();

struct Block {
    slots: [Slot; 32],
    next: AtomicPtr<Block>,
}

struct Slot {
    /// The descriptor's number, [`FREE`] or [`TAKEN`].
    number: AtomicI32,
    /// Identifies the socket: a fork may have closed the descriptor and reused the number.
    inode: AtomicU64,
    /// The process that registered the socket, as [`ProcessIdentity::to_bits`].
    owner: AtomicU64,
}

impl Slot {
    const fn new() -> Self {
        Self { number: AtomicI32::new(FREE), inode: AtomicU64::new(0), owner: AtomicU64::new(0) }
    }
}

const FREE: i32 = -1;
const TAKEN: i32 = -2;

impl Block {
    const fn new() -> Self {
        let slots = [const { Slot::new() }; 32];
        Self { slots, next: AtomicPtr::new(ptr::null_mut()) }
    }

    fn next(&self) -> Option<&'static Self> {
        // SAFETY: the pointer is null or of a leaked box.
        unsafe { self.next.load(Ordering::Acquire).as_ref() }
    }

    /// The next block, which is created if there is none.
    fn extend(&self) -> &'static Self {
        let new = Box::into_raw(Box::new(Self::new()));
        match self.next.compare_exchange(ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: the box was just leaked.
            Ok(_) => unsafe { &*new },
            Err(other) => {
                // SAFETY: no other code has seen the box; another thread's block is leaked.
                unsafe {
                    drop(Box::from_raw(new));
                    &*other
                }
            }
        }
    }
}

/// A socket that forks close at their first use of this library, until it is dropped.
#[derive(Debug)]
pub(crate) struct ClosedInForks(&'static Slot);

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.number.fmt(f)
    }
}

impl ClosedInForks {
    /// Registers a socket.
    pub(crate) fn new(socket: BorrowedFd<'_>) -> Self {
        let mut block: &'static Block = &FIRST;
        let take =
            |slot: &&Slot| slot.number.compare_exchange(FREE, TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        let slot = loop {
            match block.slots.iter().find(take) {
                Some(slot) => break slot,
                None => block = block.next().unwrap_or_else(|| block.extend()),
            }
        };
        let registered = Self(slot);
        registered.update(socket);
        registered
    }

    /// Registers another socket, usually of the same number.
    pub(crate) fn update(&self, socket: BorrowedFd<'_>) {
        let inode = fstat(socket).map_or(0, |status| status.st_ino);
        // Before the inode, which `close_inherited` reads first.
        self.0.owner.store(ProcessIdentity::current().to_bits(), Ordering::Release);
        self.0.inode.store(inode, Ordering::Release);
        self.0.number.store(socket.as_raw_fd(), Ordering::Release);
    }
}

impl Drop for ClosedInForks {
    fn drop(&mut self) {
        self.0.inode.store(0, Ordering::Release);
        self.0.number.store(FREE, Ordering::Release);
    }
}

/// Closes the sockets of the parent process, in the fork `current`, and not the sockets that another thread of the fork registers meanwhile.
/// Their numbers remain in use, because their owners may still close them.
pub(super) fn close_inherited(current: ProcessIdentity) {
    let Ok(other) = eventfd() else { return };
    let mut block = Some(&FIRST);
    while let Some(Block { slots, .. }) = block {
        for Slot { number, inode, owner } in slots {
            let number = number.load(Ordering::Acquire);
            if number < 0 {
                continue;
            }
            // SAFETY: it is not negative, and only inspected. If it is not open, the call fails.
            let socket = unsafe { BorrowedFd::borrow_raw(number) };
            let is_socket = |status: &FileStat| status.st_mode & SFlag::S_IFMT.bits() == SFlag::S_IFSOCK.bits();
            let is_registered = |status: FileStat| is_socket(&status) && status.st_ino == inode.load(Ordering::Acquire);
            if fstat(socket).is_ok_and(is_registered) && owner.load(Ordering::Acquire) != current.to_bits() {
                let _ = replace(socket, other.as_fd());
            }
        }
        block = block.and_then(Block::next);
    }
}
