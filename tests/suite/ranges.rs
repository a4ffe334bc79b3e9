//! Ranges that are out of bounds: an error, never a panic, and never other bytes.

use std::ops::Range;

use vmmfd_cli::check::files::{self};

use crate::support::prelude::*;

const LAST: u64 = u64::MAX;

fn mapping(subject: &Subject) -> Mapping {
    Mapping::new(&Allocation::create(&subject.device(), 1).unwrap(), ReadWrite).unwrap()
}

#[track_caller]
fn assert_out_of_range<T: std::fmt::Debug>(answer: Result<T, Error>) {
    assert!(matches!(answer, Err(Error::Memory(MemoryError::OutOfRange { .. }))), "{answer:?}");
}

/// Pairs of the memory's offset in an object, and a range of the object outside that memory.
fn outside(size: u64) -> Vec<(u64, Range<u64>)> {
    #[allow(clippy::reversed_empty_ranges, reason = "what this is about")]
    let reversed = [(0, 5..2), (4, 5..4), (LAST, LAST..0)];
    let before = [(1, 0..1), (1, 0..0), (LAST, 0..1), (LAST, 0..0), (5, 0..7)];
    let behind = [(0, 0..size + 1), (0, size + 1..size + 1), (7, 7..size + 8), (0, LAST..LAST), (LAST - 1, 0..LAST)];
    reversed.into_iter().chain(before).chain(behind).collect()
}

#[test]
fn digest_is_bounded_by_the_memory() {
    let subject = Subject::host();
    let mapping = mapping(&subject);
    for (start, range) in outside(mapping.size()) {
        let mut bytes = 0;
        let answer = files::read(&mapping, start, range, &mut |read| {
            bytes += read.len();
            Ok(())
        });
        assert_out_of_range(answer);
        assert_eq!(bytes, 0, "of a range outside of the memory");
    }
    let nothing = files::read(&mapping, 0, 0..0, &mut |_| Ok(())).unwrap();
    for (start, range) in [(0, 7..7), (LAST, LAST..LAST)] {
        assert_eq!(files::read(&mapping, start, range, &mut |_| Ok(())).unwrap(), nothing);
    }
    let last = files::read(&mapping, LAST - 9, LAST - 9..LAST, &mut |_| Ok(())).unwrap();
    assert_eq!(last, files::read(&mapping, 0, 0..9, &mut |_| Ok(())).unwrap());
}
