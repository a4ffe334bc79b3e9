//! The test pattern in the memory of each backend.

use super::*;

cases! {
    on crate::support::Subject; every backend: [
    work_goes_by_slices_until_stopped,
    ]
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
