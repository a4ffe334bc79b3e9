//! The test pattern in the memory of each backend.

use super::*;

cases! {
    on crate::support::Subject; every backend: [
    filled_buffer_verifies_at_every_size,
    check_counts_wrong_words,
    work_goes_by_slices_until_stopped,
    ]
}

/// A second implementation of the documented formula.
fn by_the_formula(salt: u32, index: u64) -> u32 {
    assert!(index < 1 << 31);
    (index as u32 * 2 + 1337) ^ 0xDEAD_BEEF ^ salt
}

fn filled_buffer_verifies_at_every_size(subject: Subject) {
    let unit = subject.unit();
    for size in [1, 2, 3, 4, 5, 4097, (1 << 20) + 1, unit - 1, unit, unit + 1] {
        let (_allocation, mapping) = mapped(&subject, size);
        let whole = mapping.size() as usize;
        mapping.copy_in(0, &vec![0xFF; whole]).unwrap();
        let salt = size as u32 ^ 0x5A17;
        fill(&mapping, size, salt);
        let bytes = read(&mapping, 0, whole);
        let (data, slack) = bytes.split_at(size as usize);
        for (word, index) in data.chunks(4).zip(0..) {
            assert_eq!(word, &by_the_formula(salt, index).to_le_bytes()[..word.len()], "word {index} of {size} bytes");
        }
        assert!(slack.iter().all(|byte| *byte == 0), "what was there before is still behind {size} bytes");
        let found = verify(&mapping, size, salt);
        assert_eq!((found.words, found.mismatches, found.first), (size.div_ceil(4), 0, None));
        let other = verify(&mapping, size, salt ^ 1);
        assert_eq!(other.mismatches, other.words, "another salt differs in every word");
    }
}

fn check_counts_wrong_words(subject: Subject) {
    let (size, salt) = (4097, 11);
    let (allocation, mapping) = mapped(&subject, size);
    fill(&mapping, size, salt);
    let other = Mapping::new(&allocation, ReadWrite).unwrap();
    let flip = |at: u64| other.copy_in(at, &[!read(&other, at, 1)[0]]).unwrap();
    // Two bytes of word 3, one byte of word 700, the only byte of word 1024, and one byte of padding.
    for at in [4 * 3 + 2, 4 * 3 + 1, 4 * 700, 4096, 4097] {
        flip(at);
    }
    let check = || verify(&mapping, size, salt);
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

fn work_goes_by_slices_until_stopped(subject: Subject) {
    // Small enough for a single thread, which processes the slices in order.
    let slice = pattern::SLICE as u64;
    let (_allocation, mapping) = mapped(&subject, 2 * slice + 1);
    let (whole, size) = (mapping.size(), 2 * slice + 1);
    let mut done = Vec::new();
    let mut record = |reached| {
        done.push(reached);
        Ok(())
    };
    pattern::fill(&mapping, 0..size, Pattern::new(1), &mut record).unwrap();
    assert!(pattern::verify(&mapping, 0, 0..size, Pattern::new(1), &mut record).unwrap().passed());
    assert_eq!(done, [slice, 2 * slice, size].repeat(2));
    // The last slice is mostly padding, and the slice before it is all data.
    assert!(read(&mapping, size, (whole - size) as usize).iter().all(|byte| *byte == 0), "slack that is not zero");
    mapping.copy_in(2 * slice, &[!read(&mapping, 2 * slice, 1)[0]]).unwrap();
    let found = verify(&mapping, size, 1);
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
