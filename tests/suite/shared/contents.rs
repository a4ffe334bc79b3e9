//! The bytes and elements of shared memory.

use super::*;

cases! {
    on crate::support::Subject; every backend: [
    typed_elements_are_copied,
    mirror_is_changed_and_written_back,
    cpu_and_device_share_host_memory,
    ]
    gpus alone: [
    failed_write_back_is_reported,
    device_copy_needs_an_own_end,
    ]
}

fn seen<const LENGTH: usize>(mirror: &Mirror<'_>, offset: u64) -> [u8; LENGTH] {
    let mut bytes = [0; LENGTH];
    mirror.read(offset, &mut bytes).unwrap();
    bytes
}

fn typed_elements_are_copied(subject: Subject) {
    let shared = Shared::create(&subject.device(), spec(4096)).unwrap();
    shared.copy_in_slice(8, &[1.5f32, -2.0]).unwrap();
    assert_eq!(read(&shared, 8, 8), [1.5f32.to_ne_bytes(), (-2f32).to_ne_bytes()].concat());
    // An unaligned offset, and pairs without padding.
    shared.copy_in_slice(13, &[[1u64, 2], [3, 4]]).unwrap();
    let mut pairs = [[0u64; 2]; 2];
    shared.copy_out_slice(13, &mut pairs).unwrap();
    assert_eq!(pairs, [[1, 2], [3, 4]]);
    let refused = [shared.copy_in_slice(4092, &[0u64]), shared.copy_out_slice(4092, &mut [0u64])];
    for refused in refused {
        let expected = matches!(refused, Err(Error::Memory(MemoryError::OutOfRange { offset: 4092, length: 8, .. })));
        assert!(expected, "{refused:?}");
    }
}

fn mirror_is_changed_and_written_back(subject: Subject) {
    let unit = subject.unit();
    for &mechanism in mechanisms(&subject) {
        let shared = Shared::create(&subject.device(), by(mechanism, 2 * unit)).unwrap();
        shared.copy_in(unit, b"as it was").unwrap();
        let mut mirror = Mirror::of(&shared, unit, 9).unwrap();
        let direct = mirror.is_direct();
        assert_eq!((mirror.size(), direct), (9, subject.kind == Kind::Host));
        assert_eq!(&seen(&mirror, 3), b"it wa");
        // Another process may write, so only a copy can be a slice.
        assert_eq!(mirror.bytes().is_some(), !direct);
        assert_eq!(mirror.bytes_mut().is_some(), !direct);
        mirror.write(0, b"AS").unwrap();
        assert_eq!(read(&shared, unit, 2), if direct { b"AS" } else { b"as" }, "before it is committed");
        mirror.commit().unwrap();
        assert_eq!(read(&shared, unit, 9), b"AS it was");
        // A refresh shows writes of others.
        shared.copy_in(unit + 6, b"is").unwrap();
        mirror.refresh().unwrap();
        assert_eq!(&seen(&mirror, 0), b"AS it");
        assert_eq!(&seen(&mirror, 6), b"iss");
        for (offset, length) in [(9, 1), (0, 10), (u64::MAX, 1)] {
            let mut bytes = vec![0; length];
            for refused in [mirror.write(offset, &bytes), mirror.read(offset, &mut bytes)] {
                assert!(matches!(refused, Err(Error::Memory(MemoryError::OutOfRange { .. }))), "{offset} {refused:?}");
            }
        }
        drop(mirror);
        assert!(matches!(Mirror::of(&shared, 2 * unit, 1), Err(Error::Memory(MemoryError::OutOfRange { .. }))));
        assert_eq!(Mirror::of(&shared, 5, 0).unwrap().bytes(), Some(&[][..]));
        // `to_fill` does not read the memory, and writes the whole mirror back.
        let mut fresh = Mirror::to_fill(&shared, unit, 9).unwrap();
        fresh.write(0, b"new").unwrap();
        drop(fresh);
        let rest = if direct { &b"it iss"[..] } else { &[0; 6] };
        assert_eq!(read(&shared, unit, 9), [b"new", rest].concat(), "{mechanism}");

        let view = open(&subject, &shared, ReadOnly);
        let mut mirror = Mirror::to_fill(&**view.memory(), unit, 3).unwrap();
        assert_eq!(&seen(&mirror, 0), b"new", "what can't be written is read");
        assert!(matches!(mirror.write(0, b"x"), Err(Error::Memory(MemoryError::ReadOnly))));
        assert!(mirror.bytes_mut().is_none());
    }
}

fn cpu_and_device_share_host_memory(subject: Subject) {
    let unit = subject.unit();
    for chunk in [None, Some(unit)] {
        let spec = spec(2 * unit).placement(Placement::Host);
        let shared = Shared::create(&subject.device(), chunk.map_or(spec, |chunk| spec.chunk(chunk))).unwrap();
        let array = open(&subject, &shared, ReadWrite);
        let mut here = Mirror::of(&shared, unit - 4, 8).unwrap();
        let mut there = Mirror::of(&**array.memory(), unit - 4, 8).unwrap();
        assert!(here.is_direct() && there.is_direct());
        here.write(0, b"by CPU A").unwrap();
        assert_eq!(&seen(&there, 0), b"by CPU A");
        assert_eq!(read(&**array.memory(), unit - 4, 8), b"by CPU A", "the device sees it");
        there.write(7, b"B").unwrap();
        shared.copy_in(unit - 4, b"on").unwrap();
        assert_eq!(&seen(&here, 0), b"on CPU B", "the CPU sees what the device wrote");
        drop((here, there));
        let read_only = open(&subject, &shared, ReadOnly);
        assert!(matches!(
            Mirror::of(&**read_only.memory(), 0, 4).unwrap().write(0, b"x"),
            Err(Error::Memory(MemoryError::ReadOnly))
        ));
    }
}

fn failed_write_back_is_reported(subject: Subject) {
    let shared = Shared::create(&subject.device(), spec(100)).unwrap();
    let mut mirror = Mirror::of(&shared, 0, 6).unwrap();
    mirror.write(0, b"failed").unwrap();
    subject.faulty.fail(Fault::Verb("copy_in"), 4242);
    assert_eq!(code(mirror.commit()), 4242);
    subject.faulty.mend();
    // No data is lost: the commit can be retried.
    mirror.commit().unwrap();
    assert_eq!(read(&shared, 0, 6), b"failed");
    mirror.write(0, b"logged").unwrap();
    subject.faulty.fail(Fault::Verb("copy_in"), 4242);
    let logged = crate::support::errors_logged(|| drop(mirror));
    subject.faulty.mend();
    assert!(logged.contains("a mirror can't be written back") && logged.contains("4242"), "{logged}");
}

fn device_copy_needs_an_own_end(subject: Subject) {
    let device = subject.device();
    let size = 4096;
    let [one, other] = [1, 2].map(|byte| {
        let shared = Shared::create(&device, Spec::vmm(size)).unwrap();
        shared.copy_in(0, &vec![byte; size as usize]).unwrap();
        shared
    });
    let driver = device.driver();
    let ranges = [(other.address(), one.address() + 8, 8), (other.address() + 100, one.address(), 1)];
    // SAFETY: the ranges are within both buffers, and both are writable.
    unsafe { driver.copy_device(device.ordinal(), &ranges) }.unwrap();
    let found = read(&other, 0, size as usize);
    assert_eq!(
        found.iter().enumerate().filter(|(_, byte)| **byte == 1).map(|(at, _)| at).collect::<Vec<_>>(),
        [0, 1, 2, 3, 4, 5, 6, 7, 100]
    );
    assert_eq!(driver.device_of(one.address() + 1).unwrap(), device.ordinal());
    assert_eq!(code(driver.device_of(4096).map(drop)), code::INVALID_VALUE);
    // SAFETY: no copy is made: the memory is unknown, or the range exceeds it.
    let refused = |ranges: &[(u64, u64, u64)]| code(unsafe { driver.copy_device(device.ordinal(), ranges) });
    assert_eq!(refused(&[(4096, 8192, 1)]), code::INVALID_VALUE);
    let end = one.address() + one.mapped_size();
    assert_eq!(refused(&[(end - 1, 4096, 2)]), code::INVALID_VALUE);
}
