//! Blocks cut from shared memory: the same cases on every backend.

use vmmfd::memory::ArenaFigures;

use crate::support::{prelude::*, sealing};

cases! {
    on crate::support::Subject; every backend: [
    blocks_are_adjacent_and_reused,
    empty_arena_is_released,
    arenas_grow_with_their_total,
    expected_bytes_fill_arenas_exactly,
    blocks_of_one_size_waste_nothing,
    read_only_arena_is_never_reused,
    unknown_block_is_not_freed,
    freed_block_is_reused_after_the_device,
    failed_release_of_an_arena_is_retried,
    block_without_a_whole_arena_is_allocated,
    threads_allocate_and_free_at_once,
    failed_call_leaves_nothing,
    read_only_memory_stays_writable_elsewhere,
    ]
    gpus alone: [
    ]
}

/// The expected figures: arenas, closed arenas, units of memory, blocks, and units in blocks.
#[track_caller]
fn assert_figures(arenas: &Arenas, unit: u64, expected: [u64; 5]) {
    let ArenaFigures { arenas, closed, bytes, blocks, used, .. } = arenas.figures();
    assert_eq!([arenas, closed, bytes / unit, blocks, used / unit], expected);
}

fn open(subject: &Subject, shared: &Shared, access: Access) -> Array {
    let array = ArrayDescriptor::new(ElementType::U8, [shared.size()], Order::C).unwrap();
    let (handle, fds) = ArrayHandle::of(shared, array).unwrap();
    handle.open(&subject.driver, None, fds, access).unwrap()
}

fn blocks_are_adjacent_and_reused(subject: Subject) {
    let unit = subject.unit();
    let arenas = Arenas::new(&subject.device(), 8 * unit - 1).unwrap();
    assert_eq!(arenas.arena_size(), 8 * unit);
    assert_figures(&arenas, unit, [0; 5]);
    let first = arenas.allocate(2 * unit - 1).unwrap();
    let second = arenas.allocate(1).unwrap();
    let third = arenas.allocate(5 * unit).unwrap();
    assert_eq!([second - first, third - first], [2 * unit, 3 * unit]);
    assert_figures(&arenas, unit, [1, 0, 8, 3, 8]);
    // This block fills the arena.
    let other = arenas.allocate(unit).unwrap();
    assert_figures(&arenas, unit, [2, 0, 16, 4, 9]);
    // A gap between two blocks is used before a new arena.
    assert!(arenas.free(second));
    arenas.allocate(7 * unit).unwrap();
    assert_eq!(arenas.allocate(unit).unwrap(), second);
    // An address inside a block is found too; blocks do not overlap.
    let (memory, offset) = arenas.find(third + 5).unwrap();
    assert_eq!((memory.address() + offset, memory.size()), (third + 5, 8 * unit));
    memory.copy_in(offset, b"third").unwrap();
    memory.copy_in(second - first, &vec![7; unit as usize]).unwrap();
    let mut bytes = [0; 5];
    memory.copy_out(offset, &mut bytes).unwrap();
    assert_eq!(&bytes, b"third");
    assert!(arenas.find(other).is_some() && arenas.find(first - 1).is_none());
}

fn arenas_grow_with_their_total(subject: Subject) {
    let unit = subject.unit();
    let arenas = Arenas::new(&subject.device(), 4 * unit).unwrap();
    (0..64).for_each(|_| assert!(arenas.allocate(unit).unwrap() > 0));
    // The arenas have 4, 4, 4, 4, 4, 5, 6, 7, 9, 11 and 14 units.
    assert_figures(&arenas, unit, [11, 0, 72, 64, 64]);
}

fn expected_bytes_fill_arenas_exactly(subject: Subject) {
    let unit = subject.unit();
    let arenas = Arenas::new(&subject.device(), 2 * unit).unwrap();
    arenas.expect(Some(10 * unit)).unwrap();
    for (block, figures) in
        [(3, [1, 0, 10, 1, 3]), (6, [1, 0, 10, 2, 9]), (2, [2, 0, 12, 3, 11]), (5, [3, 0, 17, 4, 16])]
    {
        arenas.allocate(block * unit).unwrap();
        assert_figures(&arenas, unit, figures);
    }
    // One block is larger than the expected remainder.
    arenas.expect(Some(unit)).unwrap();
    arenas.allocate(3 * unit).unwrap();
    assert_figures(&arenas, unit, [4, 0, 20, 5, 19]);
}

fn empty_arena_is_released(subject: Subject) {
    let unit = subject.unit();
    let before = subject.live();
    let arenas = Arenas::new(&subject.device(), 4 * unit).unwrap();
    let blocks: Vec<u64> = (0..8).map(|_| arenas.allocate(unit).unwrap()).collect();
    assert_figures(&arenas, unit, [2, 0, 8, 8, 8]);
    assert!(blocks[..4].iter().all(|&block| arenas.free(block)));
    assert_figures(&arenas, unit, [1, 0, 4, 4, 4]);
    // A block larger than the arena size gets its own arena.
    let large = arenas.allocate(9 * unit).unwrap();
    assert_figures(&arenas, unit, [2, 0, 13, 5, 13]);
    assert!(arenas.free(large));
    assert!(blocks[4..].iter().all(|&block| arenas.free(block)));
    assert_figures(&arenas, unit, [0; 5]);
    assert_eq!(subject.live(), before);
}

fn blocks_of_one_size_waste_nothing(subject: Subject) {
    let unit = subject.unit();
    let arenas = Arenas::new(&subject.device(), 16 * unit).unwrap();
    // Three blocks of five units fit into sixteen units, so the arena has fifteen.
    (0..6).for_each(|_| assert!(arenas.allocate(5 * unit).unwrap() > 0));
    assert_figures(&arenas, unit, [2, 0, 30, 6, 30]);
    // A changed arena size applies to later arenas.
    arenas.set_arena_size(7 * unit + 1).unwrap();
    assert_eq!(arenas.arena_size(), 8 * unit);
    arenas.allocate(unit).unwrap();
    assert_figures(&arenas, unit, [3, 0, 38, 7, 31]);
    arenas.set_arena_size(0).unwrap_err();
}

fn read_only_arena_is_never_reused(subject: Subject) {
    let unit = subject.unit();
    let arenas = Arenas::new(&subject.device(), 4 * unit).unwrap();
    let [first, second] = [(); 2].map(|()| arenas.allocate(unit).unwrap());
    assert!(arenas.free(second));
    let (memory, _) = arenas.find(first).unwrap();
    memory.make_read_only().unwrap();
    let range = memory.address()..memory.address() + memory.size();
    // Blocks come from other arenas: the read-only arena's unused space and its freed block are skipped.
    for _ in 0..4 {
        let block = arenas.allocate(unit).unwrap();
        assert!(!range.contains(&block));
        let (memory, offset) = arenas.find(block).unwrap();
        memory.copy_in(offset, b"written").unwrap();
    }
    assert_figures(&arenas, unit, [2, 0, 8, 5, 5]);
}

fn unknown_block_is_not_freed(subject: Subject) {
    let unit = subject.unit();
    let arenas = Arenas::new(&subject.device(), 4 * unit).unwrap();
    let block = arenas.allocate(2 * unit).unwrap();
    for address in [0, block + 1, block + unit, block + 3 * unit, block - 1, u64::MAX] {
        assert!(!arenas.free(address), "{address:#x}");
    }
    assert_figures(&arenas, unit, [1, 0, 4, 1, 2]);
    assert!(arenas.free(block) && !arenas.free(block));
    for empty in [Arenas::new(&subject.device(), 0).map(drop), arenas.allocate(0).map(drop)] {
        assert!(matches!(empty, Err(Error::Memory(MemoryError::InvalidSize { size: 0, .. }))), "{empty:?}");
    }
}

fn freed_block_is_reused_after_the_device(subject: Subject) {
    let unit = subject.unit();
    let arenas = Arenas::new(&subject.device(), 4 * unit).unwrap();
    let waits = || subject.faulty.take_verbs().iter().filter(|verb| **verb == "wait_for_work").count();
    let [first, second, third] = [(); 3].map(|()| arenas.allocate(unit).unwrap());
    assert_eq!(waits(), 0);
    // Work queued before the free may still use the block. `cudaFree` would wait here.
    assert!(arenas.free(first));
    assert_eq!(waits(), 0);
    assert_eq!(arenas.allocate(unit).unwrap(), first);
    assert_eq!(waits(), 1);
    // One wait covers all blocks freed before it.
    assert!(arenas.free(second) && arenas.free(third));
    assert_eq!([(); 3].map(|()| arenas.allocate(unit).unwrap()), [second, third, third + unit]);
    assert_eq!(waits(), 1);
    // The allocator does not wait if it takes space where nothing was freed.
    let full = arenas.allocate(2 * unit).unwrap();
    assert!(arenas.free(first));
    assert_eq!(arenas.allocate(unit).unwrap(), full + 2 * unit);
    assert_eq!(waits(), 0);
    // If the wait fails, the freed block is not reused.
    subject.faulty.fail(Fault::Verb("wait_for_work"), 900);
    let fresh = [(); 2].map(|()| arenas.allocate(unit).unwrap());
    subject.faulty.mend();
    assert!(!fresh.contains(&first));
    assert_eq!(arenas.allocate(unit).unwrap(), fresh[1] + unit);
    assert_figures(&arenas, unit, [3, 0, 12, 8, 9]);
}

fn failed_release_of_an_arena_is_retried(subject: Subject) {
    let unit = subject.unit();
    let before = subject.live();
    let arenas = Arenas::new(&subject.device(), unit).unwrap();
    let blocks = [(); 3].map(|()| arenas.allocate(unit).unwrap());
    arenas.close(blocks[0]);
    subject.faulty.fail(Fault::Verb("wait_for_work"), 900);
    assert!(arenas.free(blocks[0]));
    assert!(arenas.free(blocks[1]));
    subject.faulty.mend();
    assert_figures(&arenas, unit, [3, 1, 3, 1, 1]);
    // Open arenas remain usable.
    assert_eq!(arenas.allocate(unit).unwrap(), blocks[1]);
    assert!(arenas.free(blocks[2]));
    assert_figures(&arenas, unit, [1, 0, 1, 1, 1]);
    assert!(arenas.free(blocks[1]));
    assert_eq!(subject.live(), before);
}

fn block_without_a_whole_arena_is_allocated(subject: Subject) {
    let unit = subject.unit();
    let arenas = Arenas::new(&subject.device(), 4 * unit).unwrap();
    // The first attempt fails, as if memory had run out.
    subject.faulty.fail(Fault::Nth(2), 2);
    let block = arenas.allocate(unit);
    subject.faulty.mend();
    block.unwrap();
    assert_figures(&arenas, unit, [1, 0, 1, 1, 1]);
    // If an earlier release of empty arenas failed, they are released first.
    subject.faulty.fail(Fault::Verb("wait_for_work"), 900);
    let whole = arenas.allocate(4 * unit).unwrap();
    assert!(arenas.free(whole));
    subject.faulty.mend();
    assert_figures(&arenas, unit, [2, 0, 5, 1, 1]);
    subject.faulty.fail(Fault::Nth(2), 2);
    arenas.allocate(6 * unit).unwrap();
    assert_figures(&arenas, unit, [2, 0, 7, 2, 7]);
    subject.faulty.mend();
}

fn threads_allocate_and_free_at_once(subject: Subject) {
    let unit = subject.unit();
    let before = subject.live();
    let arenas = Arc::new(Arenas::new(&subject.device(), 4 * unit).unwrap());
    let work = |byte: u8| {
        for round in 0..20 {
            let sizes = [1, 1 + round % 3, 5];
            let blocks = sizes.map(|units| (arenas.allocate(units * unit).unwrap(), units * unit));
            for &(block, size) in &blocks {
                let (memory, offset) = arenas.find(block).unwrap();
                memory.copy_in(offset, &[byte; 100]).unwrap();
                memory.copy_in(offset + size - 100, &[byte; 100]).unwrap();
            }
            for (block, size) in blocks {
                let (memory, offset) = arenas.find(block).unwrap();
                let mut bytes = [0; 200];
                memory.copy_out(offset, &mut bytes[..100]).unwrap();
                memory.copy_out(offset + size - 100, &mut bytes[100..]).unwrap();
                assert_eq!(bytes, [byte; 200]);
                drop(memory);
                assert!(arenas.free(block));
            }
        }
    };
    thread::scope(|scope| (1..=4).for_each(|byte| drop(scope.spawn(move || work(byte)))));
    assert_figures(&arenas, unit, [0; 5]);
    assert_eq!(subject.live(), before);
}

fn failed_call_leaves_nothing(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    let everything = || -> vmmfd::Result<()> {
        let arenas = Arenas::new(&device, 2 * unit)?;
        let first = arenas.allocate(unit)?;
        let second = arenas.allocate(3 * unit)?;
        let (memory, _) = arenas.find(first).unwrap();
        memory.make_read_only()?;
        assert!(arenas.free(second));
        Ok(())
    };
    everything().unwrap();
    let before = subject.live();
    let mut failed = Vec::new();
    for nth in 1.. {
        subject.faulty.fail(Fault::Nth(nth), 999);
        // A failed creation is retried with a smaller arena, and a failed release is retried later: the caller does not see every failure.
        let _ = everything();
        assert_eq!(subject.live(), before, "after failure {nth}");
        match subject.faulty.mend() {
            Some(verb) => failed.push(verb),
            None => break,
        }
    }
    assert!(["create", "map", "export", "wait_for_work"].iter().all(|verb| failed.contains(verb)), "{failed:?}");
}

fn read_only_memory_stays_writable_elsewhere(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    let shared = Shared::create(&device, Spec::vmm(3 * unit).chunk(unit)).unwrap();
    shared.copy_in(unit - 3, b"before").unwrap();
    let (address, other) = (shared.address(), open(&subject, &shared, ReadWrite));
    subject.faulty.fail(Fault::Verb("set_access"), 2);
    shared.make_read_only().unwrap_err();
    subject.faulty.mend();
    shared.copy_in(unit - 3, b"before").unwrap();
    for _ in 0..2 {
        shared.make_read_only().unwrap();
    }
    assert!(matches!(shared.copy_in(0, b"x"), Err(Error::Memory(MemoryError::ReadOnly))));
    // The driver enforces read-only access even without our own check.
    if subject.kind != Kind::Host {
        subject.verbs.copy_in(0, address, b"x").unwrap_err();
    }
    assert!(Mirror::of(&shared, 0, 1).unwrap().write(0, b"x").is_err());
    assert_eq!((shared.address(), shared.access()), (address, ReadOnly));
    // Read-only access is local: other processes are not informed, may write, and this process sees their writes.
    assert!(!shared.describe().unwrap().immutable);
    other.memory().copy_in(unit - 3, b"others").unwrap();
    let late = open(&subject, &shared, ReadWrite);
    late.memory().copy_in(0, b"late").unwrap();
    let mut bytes = [0; 6];
    shared.copy_out(unit - 3, &mut bytes).unwrap();
    assert_eq!(&bytes, b"others");
    // Memory created for sealing reports that it needs `seal` first.
    let sealed = Shared::create(&device, Spec::vmm(unit).sealed()).unwrap();
    assert!(matches!(sealed.make_read_only(), Err(Error::Misuse { .. })));
    sealing(|| sealed.seal()).unwrap();
    sealed.make_read_only().unwrap();
    assert!(sealed.describe().unwrap().immutable);
}
