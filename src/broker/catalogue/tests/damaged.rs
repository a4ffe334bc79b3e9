//! Truncated and damaged logs.

use super::*;

/// A log's bytes, and the end offset of each record.
fn log_and_ends(records: &[Record]) -> (Vec<u8>, Vec<usize>) {
    let mut catalogue = new();
    let mut ends = Vec::new();
    for record in records {
        catalogue.append(record).unwrap();
        ends.push(catalogue.length as usize);
    }
    (bytes_of(catalogue.as_fd()), ends)
}

/// How many records are complete within `bytes`.
fn whole(ends: &[usize], bytes: usize) -> usize {
    ends.iter().filter(|&&end| end <= bytes).count()
}

#[test]
fn complete_records_of_truncated_log_are_read() {
    let records = each_kind();
    let (bytes, ends) = log_and_ends(&records);
    for length in HEADER..=bytes.len() {
        let (mut catalogue, found) = Catalogue::open(memfd_of(&bytes[..length])).unwrap();
        let count = whole(&ends, length);
        assert!(found == records[..count], "of the first {length} bytes: {found:?}");
        // Opening changes nothing: another server may still be writing the log.
        assert_eq!(bytes_of(catalogue.as_fd()), bytes[..length]);
        catalogue.append(&lease(9)).unwrap();
        assert_eq!(bytes_of(catalogue.as_fd()).len() as u64, catalogue.length, "the incomplete record is cut off");
        assert_eq!(read(catalogue.as_fd()), [&records[..count], &[lease(9)]].concat());
    }
    for length in 0..HEADER {
        let error = refusal(&bytes[..length]);
        assert!(matches!(error, Unreadable::Foreign { .. } | Unreadable::Short { .. }), "{error:?}");
    }
}

#[test]
fn changed_bits_never_yield_a_record() {
    let records = each_kind();
    let (bytes, ends) = log_and_ends(&records);
    for bit in 0..bytes.len() * 8 {
        let mut changed = bytes.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        if bit / 8 < HEADER {
            refusal(&changed);
        } else {
            let found = Catalogue::open(memfd_of(&changed)).unwrap().1;
            assert!(found == records[..whole(&ends, bit / 8)], "bit {bit}: {found:?}");
        }
    }
}

#[test]
fn trailing_bytes_never_yield_a_record() {
    let (bytes, _) = log_and_ends(&[lease(1)]);
    for tail in [vec![0; 5000], vec![0xFF; 5000], b"VMMFDCAT".repeat(9), [&[8, 0, 0, 0][..], &[0; 12]].concat()] {
        let (mut catalogue, found) = Catalogue::open(memfd_of(&[&bytes[..], &tail].concat())).unwrap();
        assert_eq!(found, [lease(1)]);
        catalogue.append(&lease(2)).unwrap();
        assert_eq!(bytes_of(catalogue.as_fd()), log_and_ends(&[lease(1), lease(2)]).0);
    }
}

#[test]
fn failed_cut_is_repeated_before_next_record() {
    let mut catalogue = log(&[lease(1)]);
    let torn = [&framed(br#"{"dropped":{"key":3}}"#)[..], &[b'x'; 500]].concat();
    catalogue.file.write_all_at(&torn, catalogue.length).unwrap();
    catalogue.torn = true;
    catalogue.append(&deleted("a")).unwrap();
    assert_eq!(bytes_of(catalogue.as_fd()).len() as u64, catalogue.length);
    assert_eq!(read(catalogue.as_fd()), [lease(1), deleted("a")]);
}
