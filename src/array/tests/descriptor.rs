use super::{super::descriptor::problem, *};
use crate::error::MemoryError;

#[test]
fn number_of_strides_must_match_dimensions() {
    for strides in [&[][..], &[1], &[1, 1, 1]] {
        let made = array("|u1", &[1, 0], Some(strides), 0);
        refused(made.check(u64::MAX), &format!("{} strides do not fit 2 dimensions", strides.len()));
        refused(made.elements(), "strides");
        refused(made.strides_in_bytes(), "strides");
        refused(made.interface(0, Access::ReadWrite), "strides");
    }
}

#[test]
fn contiguous_strides_follow_the_order() {
    let c = ArrayDescriptor::new(F4, [2, 3, 4], Order::C).unwrap();
    assert_eq!((c.strides.clone(), c.strides_in_bytes().unwrap()), (None, vec![48, 16, 4]));
    let f = ArrayDescriptor::new(F4, [2, 3, 4], Order::F).unwrap();
    assert_eq!(f.strides, Some(vec![4, 8, 24]));
    for made in [&c, &f] {
        assert_eq!((made.elements().unwrap(), made.bytes().unwrap(), made.span().unwrap()), (24, 96, 0..96));
    }
    // Both orders are the same for one line of elements, and for none.
    for shape in [&[][..], &[5], &[1, 5, 1], &[5, 0, 7]] {
        assert_eq!(ArrayDescriptor::new(F4, shape, Order::F).unwrap().strides, None, "{shape:?}");
    }
    assert_eq!(floats(&[3, 0, 4]).strides_in_bytes().unwrap(), [16, 16, 4]);
}

#[test]
fn overflow_is_an_error_unless_empty() {
    let huge = u64::MAX;
    for order in [Order::C, Order::F] {
        refused(ArrayDescriptor::new(U1, [huge, 2], order), "number of elements");
        refused(ArrayDescriptor::new(F4, [1 << 62], order), "the bytes of shape");
        let made = ArrayDescriptor::new(U1, [huge, 1], order).unwrap();
        assert_eq!((made.bytes().unwrap(), made.span().unwrap()), (huge, 0..huge));
        let empty = ArrayDescriptor::new(F4, [huge, huge, 0, huge], order).unwrap();
        assert_eq!((empty.elements().unwrap(), empty.bytes().unwrap()), (0, 0));
        empty.check(0).unwrap();
    }
    refused(array("<f4", &[huge, huge, 0, huge], None, 0).strides_in_bytes(), "stride");
    refused(ArrayDescriptor::new(U1, [2, 1 << 62, 1], Order::F), "stride of 2⁶³ bytes");
    refused(array("|u1", &[1, 1 << 63], None, 0).strides_in_bytes(), "stride of 2⁶³ bytes");
    refused(array("|u1", &[2, huge, huge, huge], None, 0).span(), "overflows 64 bits");
}

#[test]
fn broadcast_may_exceed_64_bit_count() {
    let made = array("<f8", &[u64::MAX, 3, u64::MAX], Some(&[0, 8, 0]), 8);
    assert_eq!(made.span().unwrap(), 8..32);
    made.check(32).unwrap();
    refused(made.elements(), "number of elements");
    assert_eq!(made.offset_of(&[u64::MAX - 1, 2, 7]).unwrap(), 24);
    assert_eq!(made.offsets().unwrap().take(3).collect::<Vec<_>>(), [8, 8, 8]);
    assert_eq!(
        made.index(0, 1 << 63).unwrap().index(1, 0).unwrap().offsets().unwrap().collect::<Vec<_>>(),
        [8, 16, 24]
    );
}

#[test]
fn error_gives_range_outside_memory() {
    let made = array("<f4", &[3, 2], Some(&[-8, 4]), 16);
    assert_eq!(made.span().unwrap(), 0..24);
    made.check(24).unwrap();
    let error = made.check(23).unwrap_err();
    assert!(matches!(error, Error::Memory(MemoryError::OutOfRange { offset: 0, length: 24, size: 23 })), "{error}");
    assert_eq!((error.kind(), problem(String::new()).kind()), (crate::ErrorKind::Usage, crate::ErrorKind::Usage));
    let before = ArrayDescriptor { offset: 15, ..made.clone() };
    refused(before.check(u64::MAX), "starts 1 bytes before its memory");
    let end = ArrayDescriptor { offset: u64::MAX - 8, ..made };
    assert_eq!(end.span().unwrap(), u64::MAX - 24..u64::MAX);
    refused(ArrayDescriptor { offset: u64::MAX - 7, ..end }.span(), "overflows 64 bits");
    // Sums of 2¹²⁸ bytes, which are 0 in 128-bit arithmetic.
    for (last, strides) in [(5, [i64::MIN; 3]), (17, [i64::MAX, i64::MAX, 1 << 62])] {
        let around = array("|V8", &[u64::MAX, u64::MAX, last], Some(&strides), 0);
        refused(around.check(u64::MAX), "overflows 64 bits");
    }
}

#[test]
fn empty_array_needs_no_memory() {
    let wild = array("|V2147483647", &[u64::MAX, 0, 5], Some(&[i64::MAX, i64::MIN, -1]), 0);
    wild.check(0).unwrap();
    assert_eq!(wild.interface(4096, Access::ReadOnly).unwrap().data, (0, true));
    assert_eq!(wild.offsets().unwrap().next(), None);
    let wider = array("<f4", &[9, u64::MAX, u64::MAX, u64::MAX, 0], None, 0);
    refused(wider.offset_of(&[8, 8, 8, 8, 0]), "index 0 exceeds dimension 4 of length 0");
    assert_eq!(wider.slice(0, 0..9, 2).unwrap().shape[0], 5);
    let behind = ArrayDescriptor { offset: 9, ..wild };
    assert_eq!(behind.span().unwrap(), 9..9);
    behind.check(9).unwrap();
    assert!(matches!(behind.check(8), Err(Error::Memory(MemoryError::OutOfRange { offset: 9, length: 0, size: 8 }))));
    for part in [behind.slice(0, 3..9, -2), behind.index(0, 7), behind.index(2, 4), behind.transpose()] {
        assert_eq!(part.unwrap().span().unwrap(), 9..9);
    }
    // An empty slice can't be outside of the memory.
    for range in [0..0, 3..3] {
        assert_eq!(array("|u1", &[3], Some(&[-7]), 14).slice(0, range, -1).unwrap(), array("|u1", &[0], None, 14));
    }
}

#[test]
fn invalid_indices_are_refused() {
    let made = floats(&[4, 5]);
    refused(made.slice(2, 0..1, 1), "no axis 2 in an array of 2 dimensions");
    refused(made.slice(1, 0..5, 0), "step of 0");
    refused(made.slice(1, 0..6, 1), "0..6 is not a range in dimension 1 of length 5");
    #[expect(clippy::reversed_empty_ranges, reason = "the range must be refused")]
    refused(made.slice(1, 3..2, 1), "3..2 is not a range");
    refused(made.index(0, 4), "index 4 exceeds dimension 0 of length 4");
    refused(made.index(9, 0), "no axis 9");
    refused(made.offset_of(&[1]), "1 numbers");
    refused(made.offset_of(&[3, 5]), "index 5 exceeds dimension 1 of length 5");
    refused(floats(&[4, 0]).offset_of(&[0, 0]), "index 0 exceeds dimension 1 of length 0");
    for axes in [&[][..], &[0], &[0, 0], &[1, 2], &[0, 1, 2], &[0, 1, 1], &[usize::MAX, 0]] {
        refused(made.permute(axes), "does not name each of 2 axes once");
    }
    let outside = array("<f4", &[4, 5], Some(&[-20, 4]), 0);
    for part in [outside.slice(0, 0..1, 1), outside.index(0, 0), outside.transpose()] {
        refused(part, "before its memory");
    }
    refused(outside.offset_of(&[0, 0]), "before its memory");
    refused(outside.offsets(), "before its memory");
    refused(outside.interface(1 << 40, Access::ReadWrite), "before its memory");
    refused(array("|u1", &[3], Some(&[1 << 62]), 0).slice(0, 0..3, 2), "stride of 2⁶³ bytes");
}
