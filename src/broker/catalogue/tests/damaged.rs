//! Logs of which a part is missing, or was changed.

use super::*;

/// The bytes of a log, and after how many of them each record ends.
fn log_and_ends(records: &[Record]) -> (Vec<u8>, Vec<usize>) {
    let mut catalogue = new();
    let mut ends = Vec::new();
    for record in records {
        catalogue.append(record).unwrap();
        ends.push(catalogue.length as usize);
    }
    (bytes_of(catalogue.as_fd()), ends)
}

/// How many records end within so many bytes.
fn whole(ends: &[usize], bytes: usize) -> usize {
    ends.iter().filter(|&&end| end <= bytes).count()
}

#[test]
fn of_each_beginning_of_a_log_the_whole_records_are_read_and_appending_goes_on() {
    let records = each_kind();
    let (bytes, ends) = log_and_ends(&records);
    for length in HEADER..=bytes.len() {
        let (mut catalogue, found) = Catalogue::open(memfd_of(&bytes[..length])).unwrap();
        let count = whole(&ends, length);
        assert!(found == records[..count], "of the first {length} bytes: {found:?}");
        // To open it changes nothing: a server may still be writing it.
        assert_eq!(bytes_of(catalogue.as_fd()), bytes[..length]);
        catalogue.append(&lease(9)).unwrap();
        assert_eq!(bytes_of(catalogue.as_fd()).len() as u64, catalogue.length, "what was torn is cut off");
        assert_eq!(read(catalogue.as_fd()), [&records[..count], &[lease(9)]].concat());
    }
    for length in 0..HEADER {
        let error = refusal(&bytes[..length]);
        assert!(matches!(error, Unreadable::Foreign { .. } | Unreadable::Short { .. }), "{error:?}");
    }
}

#[test]
fn what_was_changed_is_never_read_as_a_record() {
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
fn what_follows_a_log_is_never_read_as_a_record() {
    let (bytes, _) = log_and_ends(&[lease(1)]);
    for tail in [vec![0; 5000], vec![0xFF; 5000], b"VMMFDCAT".repeat(9), [&[8, 0, 0, 0][..], &[0; 12]].concat()] {
        let (mut catalogue, found) = Catalogue::open(memfd_of(&[&bytes[..], &tail].concat())).unwrap();
        assert_eq!(found, [lease(1)]);
        catalogue.append(&lease(2)).unwrap();
        assert_eq!(bytes_of(catalogue.as_fd()), log_and_ends(&[lease(1), lease(2)]).0);
    }
}

#[test]
fn what_could_not_be_cut_off_at_once_is_cut_off_before_the_next_record() {
    let mut catalogue = log(&[lease(1)]);
    let torn = [&framed(br#"{"dropped":{"key":3}}"#)[..], &[b'x'; 500]].concat();
    catalogue.file.write_all_at(&torn, catalogue.length).unwrap();
    catalogue.torn = true;
    catalogue.append(&deleted("a")).unwrap();
    assert_eq!(bytes_of(catalogue.as_fd()).len() as u64, catalogue.length);
    assert_eq!(read(catalogue.as_fd()), [lease(1), deleted("a")]);
}
