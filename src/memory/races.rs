//! Threads that access the same shared bytes at once. Only a run under ThreadSanitizer (`make test-threads`) shows a data race: the
//! assertions can't.

use std::{sync::Arc, thread};

use super::{Allocation, Device, Mapping, Mirror, Region, Selector};
use crate::driver::{Access, Backend, Choice, open};

/// Lengths that the copy functions treat differently.
const LENGTHS: [usize; 6] = [1, 15, 40, 64, 1000, 70_000];

const ROUNDS: usize = 50;

fn memory() -> Arc<Allocation> {
    let driver = open(Choice::Only(Backend::Host)).unwrap().driver;
    let device = Device::find(&driver, Selector::default()).unwrap();
    Allocation::create(&device, 1).unwrap()
}

/// Checks that every byte is the initial zero or came from a writer.
#[track_caller]
fn assert_written(bytes: &[u8]) {
    let other = bytes.iter().find(|byte| !(0..=3).contains(*byte));
    assert_eq!(other, None, "no thread wrote this byte");
}

#[test]
fn concurrent_copies_do_not_race() {
    let allocation = memory();
    let mapping = Mapping::new(&allocation, Access::ReadWrite).unwrap();
    let write = |byte: u8| {
        for length in LENGTHS {
            (0..ROUNDS).for_each(|_| mapping.copy_in(5, &vec![byte; length]).unwrap());
        }
    };
    let read = || {
        for length in LENGTHS {
            let mut bytes = vec![0; length];
            for _ in 0..ROUNDS {
                mapping.copy_out(5, &mut bytes).unwrap();
                assert_written(&bytes);
            }
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| write(1));
        scope.spawn(|| write(2));
        scope.spawn(read);
        read();
    });
    let mut last = [0; 1];
    mapping.copy_out(5, &mut last).unwrap();
    assert!([1, 2].contains(&last[0]), "{last:?}");
}

#[test]
fn concurrent_mirrors_do_not_race() {
    let allocation = memory();
    let mapping = Mapping::new(&allocation, Access::ReadWrite).unwrap();
    let write = |byte: u8| {
        let mut mirror = Mirror::of(&mapping, 3, 1 << 20).unwrap();
        assert!(mirror.is_direct());
        for length in LENGTHS {
            (0..ROUNDS).for_each(|_| mirror.write(2, &vec![byte; length]).unwrap());
        }
    };
    let read = || {
        let mirror = Mirror::of(&mapping, 3, 1 << 20).unwrap();
        for length in LENGTHS {
            let mut bytes = vec![0; length];
            for _ in 0..ROUNDS {
                mirror.read(2, &mut bytes).unwrap();
                assert_written(&bytes);
            }
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| write(1));
        scope.spawn(|| write(2));
        // Writes the same bytes without a mirror.
        scope.spawn(|| (0..ROUNDS).for_each(|_| mapping.copy_in(5, &[3; 1000]).unwrap()));
        scope.spawn(read);
        read();
    });
    let mut last = [0; 1];
    mapping.copy_out(5, &mut last).unwrap();
    assert!((1..=3).contains(&last[0]), "{last:?}");
}
