use std::{
    fs::{File, OpenOptions},
    os::fd::AsRawFd,
    sync::{Arc, Mutex},
};

use nix::libc;

use super::*;
use crate::sys::{memfd, without_kcmp};

impl SegmentTable {
    /// All segments with their numbers of references.
    pub(crate) fn references(&self) -> impl Iterator<Item = (SegmentId, u64)> {
        self.ids().map(|id| (id, self.segment(id).references))
    }
}

/// Open files of a single inode, as for GPU memory.
fn devices(count: usize) -> Vec<OwnedFd> {
    (0..count).map(|_| File::open("/dev/null").unwrap().into()).collect()
}

fn memory() -> OwnedFd {
    memfd::empty(c"test").unwrap()
}

fn duplicate(fd: &OwnedFd) -> OwnedFd {
    fd.try_clone().unwrap()
}

fn same(a: BorrowedFd<'_>, b: &OwnedFd) -> bool {
    sys::kcmp(a, b.as_fd()).unwrap().is_eq()
}

#[test]
fn duplicate_descriptor_shares_segment() {
    for fd in [memory(), devices(1).remove(0)] {
        let mut segments = SegmentTable::default();
        let (id, back) = segments.add(duplicate(&fd), 100).unwrap();
        assert!(back.is_none());
        let first = segments.get(id).as_raw_fd();
        for _ in 0..3 {
            let added = duplicate(&fd);
            let number = added.as_raw_fd();
            let (again, back) = segments.add(added, 100).unwrap();
            assert_eq!((again, back.unwrap().as_raw_fd()), (id, number));
        }
        assert_eq!((segments.len(), segments.size(id), segments.get(id).as_raw_fd()), (1, 100, first));
        assert!(same(segments.get(id), &fd));
        for _ in 0..3 {
            assert!(segments.release(id).is_none());
        }
        assert_eq!(segments.release(id).unwrap().as_raw_fd(), first);
        assert_eq!(segments.len(), 0);
    }
}

#[test]
fn open_files_of_one_inode_are_distinct() {
    let files = devices(300);
    let mut segments = SegmentTable::default();
    let mut ids = Vec::new();
    for (index, file) in files.iter().enumerate() {
        let (id, back) = segments.add(duplicate(file), index as u64).unwrap();
        assert!(back.is_none(), "{index}");
        ids.push(id);
    }
    assert_eq!(segments.len(), 300);
    for &id in ids.iter().step_by(3) {
        assert!(segments.release(id).is_some());
    }
    assert_eq!(segments.len(), 200);
    for (index, file) in files.iter().enumerate() {
        let (id, back) = segments.add(duplicate(file), index as u64).unwrap();
        assert_eq!(back.is_some(), index % 3 != 0, "{index}");
        assert!(index % 3 == 0 || id == ids[index]);
        assert!(same(segments.get(id), file));
        assert_eq!(segments.size(id), index as u64);
    }
    assert_eq!(segments.len(), 300);
    let listed: Vec<SegmentId> = segments.iter().map(|(id, _, _)| id).collect();
    assert!(listed.is_sorted() && listed.len() == 300);
    assert!(segments.iter().all(|(id, fd, size)| same(fd, &files[size as usize]) && segments.size(id) == size));
}

#[test]
fn reopened_memory_is_another_segment() {
    // A client with the read-only descriptor must not get the writable one.
    let written = memory();
    let path = format!("/proc/self/fd/{}", written.as_raw_fd());
    let read_only: OwnedFd = OpenOptions::new().read(true).open(path).unwrap().into();
    assert_eq!(inode(written.as_fd()).unwrap(), inode(read_only.as_fd()).unwrap());
    let mut segments = SegmentTable::default();
    let (first, _) = segments.add(duplicate(&written), 5).unwrap();
    let (second, back) = segments.add(duplicate(&read_only), 5).unwrap();
    assert!(back.is_none() && first != second);
    assert_eq!(segments.add(duplicate(&written), 5).unwrap().0, first);
    assert_eq!(segments.add(duplicate(&read_only), 5).unwrap().0, second);
}

#[test]
fn size_mismatch_is_refused() {
    let device = devices(1).remove(0);
    let mut segments = SegmentTable::default();
    let (id, _) = segments.add(duplicate(&device), 2 << 20).unwrap();
    let added = duplicate(&device);
    let number = added.as_raw_fd();
    let NotHeld { fd, reason } = segments.add(added, 4 << 20).unwrap_err();
    assert_eq!(fd.as_raw_fd(), number);
    assert_eq!(reason.to_string(), "4194304 bytes are claimed, but this memory is already held as 2097152 bytes");
    assert_eq!((segments.len(), segments.size(id)), (1, 2 << 20));
    // The failed add took no reference.
    assert!(segments.release(id).is_some());
    // After the release, the other size is accepted.
    assert_eq!(segments.add(duplicate(&device), 4 << 20).unwrap().0, id);
}

#[test]
fn number_is_reused_after_release() {
    let mut segments = SegmentTable::default();
    let ids: Vec<SegmentId> = (0..4).map(|_| segments.add(memory(), 1).unwrap().0).collect();
    assert_eq!(ids.iter().map(|id| id.index()).collect::<Vec<_>>(), [0, 1, 2, 3]);
    segments.release(ids[1]);
    segments.release(ids[2]);
    let mut next: Vec<usize> = (0..3).map(|_| segments.add(memory(), 1).unwrap().0.index()).collect();
    next.sort_unstable();
    assert_eq!(next, [1, 2, 4]);
}

#[test]
fn without_kcmp_duplicates_are_separate() {
    for errno in [libc::EPERM, libc::ENOSYS] {
        without_kcmp(errno, || {
            let mut segments = SegmentTable::default();
            let file = memory();
            let ids: Vec<SegmentId> = (0..3)
                .map(|size| {
                    let (id, back) = segments.add(duplicate(&file), size).unwrap();
                    assert!(back.is_none());
                    id
                })
                .collect();
            assert_eq!(segments.len(), 3);
            for id in ids {
                assert!(segments.release(id).is_some());
            }
            assert_eq!(segments.len(), 0);
            assert!(segments.files.is_empty());
        });
    }
}

#[test]
fn failed_comparison_leaves_others_findable() {
    let files = devices(40);
    let segments = Arc::new(Mutex::new(SegmentTable::default()));
    let add = |fd: &OwnedFd| segments.lock().unwrap().add(duplicate(fd), 1).unwrap();
    let ids: Vec<SegmentId> = files.iter().map(|fd| add(fd).0).collect();
    let others = Arc::clone(&segments);
    without_kcmp(libc::EPERM, move || {
        for fd in devices(200) {
            others.lock().unwrap().add(fd, 1).unwrap();
        }
    });
    assert_eq!(segments.lock().unwrap().len(), 240);
    for (fd, id) in files.iter().zip(ids) {
        let (again, back) = add(fd);
        assert!(again == id && back.is_some());
    }
}

#[test]
fn release_frees_everything() {
    let mut segments = SegmentTable::default();
    for fd in devices(10).into_iter().chain((0..10).map(|_| memory())) {
        segments.add(fd, 1).unwrap();
    }
    let ids: Vec<SegmentId> = segments.iter().map(|(id, _, _)| id).collect();
    for id in ids {
        segments.release(id).unwrap();
    }
    assert!(segments.files.is_empty());
    assert_eq!((segments.len(), segments.slots.len()), (0, 20));
}
