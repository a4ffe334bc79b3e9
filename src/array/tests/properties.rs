use std::ops::Range;

use crate::error::MemoryError;
use proptest::{collection::vec, prelude::*, sample::select};

use super::*;

/// Many cases in little time. Writes no file of failures to the source tree: a failing case becomes a named test.
fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

fn any_element() -> impl Strategy<Value = ElementType> {
    select(vec!["|b1", "|u1", ">i2", "<f4", ">f8", "<c16", "bf16", "f8e5m2", "|V3", "|V2147483647"]).prop_map(element)
}

/// Small numbers, and numbers near an overflow.
fn edges() -> impl Strategy<Value = u64> {
    let near = (select(vec![1 << 31, 1 << 32, 1 << 62, 1 << 63, u64::MAX]), 0..3u64);
    prop_oneof![4 => 0..6u64, 3 => near.prop_map(|(edge, off)| edge - off), 1 => any::<u64>()]
}

fn signed_edges() -> impl Strategy<Value = i64> {
    let near = (select(vec![i64::MIN + 1, -(1 << 32), 1 << 32, 1 << 62, i64::MAX - 1]), -1..2i64);
    prop_oneof![4 => -9..9i64, 3 => near.prop_map(|(edge, off)| edge + off), 1 => any::<i64>()]
}

/// Any descriptor, also malformed.
fn anything() -> impl Strategy<Value = ArrayDescriptor> {
    let strides = prop_oneof![Just(None), vec(signed_edges(), 0..5).prop_map(Some)];
    (any_element(), vec(edges(), 0..5), strides, edges()).prop_map(|(dtype, shape, strides, offset)| ArrayDescriptor {
        dtype,
        shape,
        strides,
        offset,
    })
}

/// A well-formed descriptor with numbers of any size.
fn large() -> impl Strategy<Value = ArrayDescriptor> {
    let dimensions = vec((edges(), signed_edges()), 0..5);
    (any_element(), dimensions, any::<bool>(), edges()).prop_map(|(dtype, dimensions, explicit, offset)| {
        let (shape, strides): (Vec<_>, Vec<_>) = dimensions.into_iter().unzip();
        ArrayDescriptor { dtype, shape, strides: explicit.then_some(strides), offset }
    })
}

/// A well-formed descriptor with few elements. It may start before its memory.
fn small() -> impl Strategy<Value = ArrayDescriptor> {
    let element = select(vec!["|u1", ">i2", "<f4", "|V3"]).prop_map(element);
    let dimensions = vec((prop_oneof![9 => 1..5u64, 1 => Just(0)], -20..20i64), 0..4);
    (element, dimensions, any::<bool>(), 0..150u64).prop_map(|(dtype, dimensions, explicit, offset)| {
        let (shape, strides): (Vec<_>, Vec<_>) = dimensions.into_iter().unzip();
        ArrayDescriptor { dtype, shape, strides: explicit.then_some(strides), offset }
    })
}

/// A descriptor whose span is constructed to fit 64 bits and to use most of them.
fn large_and_valid() -> impl Strategy<Value = ArrayDescriptor> {
    let dimensions = vec((signed_edges(), edges()), 1..5);
    (any_element(), dimensions, edges()).prop_map(|(dtype, dimensions, place)| {
        let mut room = u64::MAX - dtype.size();
        let mut below = 0;
        let mut shape = vec![];
        let mut strides = vec![];
        for (stride, wish) in dimensions {
            let most = room.checked_div(stride.unsigned_abs()).unwrap_or(u64::MAX - 1);
            let last = if wish <= most { wish.min(u64::MAX - 1) } else { wish % (most + 1) };
            let reach = last * stride.unsigned_abs();
            room -= reach;
            below += if stride < 0 { reach } else { 0 };
            shape.push(last + 1);
            strides.push(stride);
        }
        let offset = below + if place <= room { place } else { room };
        ArrayDescriptor { dtype, shape, strides: Some(strides), offset }
    })
}

/// An operation that selects a part of an array, with a reference implementation by index.
#[derive(Debug, Clone, Copy)]
enum Cut {
    Slice { axis: usize, ends: (u64, u64), step: i64 },
    Index { axis: usize, at: u64 },
    Swap { one: usize, other: usize },
}

fn cut() -> impl Strategy<Value = Cut> {
    let axis = 0..5usize;
    let step = prop_oneof![4 => -4..5i64, 1 => signed_edges()];
    prop_oneof![
        3 => (axis.clone(), (edges(), edges()), step).prop_map(|(axis, ends, step)| Cut::Slice { axis, ends, step }),
        1 => (axis.clone(), edges()).prop_map(|(axis, at)| Cut::Index { axis, at }),
        1 => (axis.clone(), axis).prop_map(|(one, other)| Cut::Swap { one, other }),
    ]
}

impl Cut {
    /// Adjusts the arguments to a shape; `None` if no part can be selected.
    fn fit(self, shape: &[u64]) -> Option<Self> {
        let axes = shape.len();
        let into = |number: u64, limit: u64| if number <= limit { number } else { number % limit.max(1) };
        if axes == 0 {
            return None;
        }
        Some(match self {
            Self::Slice { axis, ends: (one, other), step } => {
                let axis = axis % axes;
                let one = into(one, shape[axis]);
                let other = into(other, shape[axis]);
                let step = if step == 0 { 1 } else { step };
                Self::Slice { axis, ends: (one.min(other), one.max(other)), step }
            }
            Self::Index { axis, .. } if shape[axis % axes] == 0 => return None,
            Self::Index { axis, at } => {
                let axis = axis % axes;
                Self::Index { axis, at: into(at, shape[axis] - 1) }
            }
            Self::Swap { one, other } => Self::Swap { one: one % axes, other: other % axes },
        })
    }

    fn apply(self, array: &ArrayDescriptor) -> Result<ArrayDescriptor> {
        match self {
            Self::Slice { axis, ends: (start, end), step } => array.slice(axis, start..end, step),
            Self::Index { axis, at } => array.index(axis, at),
            Self::Swap { one, other } => {
                let mut axes: Vec<_> = (0..array.shape.len()).collect();
                axes.swap(one, other);
                array.permute(&axes)
            }
        }
    }

    /// Converts an index in the part to the index in the whole array.
    fn index_in_whole(self, index: &[u64]) -> Vec<u64> {
        let mut index = index.to_vec();
        match self {
            Self::Slice { axis, ends: (start, end), step } => {
                let walked = u64::try_from(i128::from(index[axis]) * i128::from(step.unsigned_abs())).unwrap();
                index[axis] = if step > 0 { start + walked } else { end - 1 - walked };
            }
            Self::Index { axis, at } => index.insert(axis, at),
            Self::Swap { one, other } => index.swap(one, other),
        }
        index
    }

    /// The shape of the part.
    fn shape(self, whole: &[u64]) -> Vec<u64> {
        let mut shape = whole.to_vec();
        match self {
            Self::Slice { axis, ends: (start, end), step } => {
                let step = usize::try_from(step.unsigned_abs()).unwrap();
                shape[axis] = (start..end).step_by(step).count() as u64;
            }
            Self::Index { axis, .. } => drop(shape.remove(axis)),
            Self::Swap { one, other } => shape.swap(one, other),
        }
        shape
    }
}

/// Whether an error is short, contains advice, and has no control characters.
fn one_sentence(error: &str) -> bool {
    error.contains("write ") && error.len() < 600 && !error.contains(char::is_control)
}

/// All indices of a small shape, in C order.
fn indices(shape: &[u64]) -> Vec<Vec<u64>> {
    shape.iter().fold(vec![vec![]], |all, length| {
        let longer = |index: &Vec<u64>| (0..*length).map(|at| [index.as_slice(), &[at]].concat()).collect::<Vec<_>>();
        all.iter().flat_map(longer).collect()
    })
}

/// The offsets of all elements of a small array, computed from each index.
fn all_offsets(array: &ArrayDescriptor) -> Vec<i128> {
    let place = |index: &Vec<u64>| {
        let step = |axis: usize| match &array.strides {
            Some(strides) => i128::from(strides[axis]),
            None => {
                array.shape[axis + 1..].iter().map(|n| i128::from(*n)).product::<i128>()
                    * i128::from(array.dtype.size())
            }
        };
        (0..index.len()).fold(i128::from(array.offset), |at, axis| at + i128::from(index[axis]) * step(axis))
    };
    indices(&array.shape).iter().map(place).collect()
}

/// The span of an array of any size. Subtracts from the free space on either side instead of adding, so that nothing overflows.
fn expected_span(array: &ArrayDescriptor) -> Option<Range<u64>> {
    if array.shape.contains(&0) {
        return Some(array.offset..array.offset);
    }
    let mut below = u128::from(array.offset);
    let mut above = u128::from(u64::MAX - array.offset).checked_sub(array.dtype.size().into())?;
    match &array.strides {
        Some(strides) => {
            for (length, stride) in array.shape.iter().zip(strides) {
                let reach = u128::from(length - 1) * u128::from(stride.unsigned_abs());
                let side = if *stride < 0 { &mut below } else { &mut above };
                *side = side.checked_sub(reach)?;
            }
        }
        None => {
            let mut bytes = u128::from(array.dtype.size());
            for length in &array.shape {
                bytes = u64::try_from(bytes * u128::from(*length)).ok()?.into();
            }
            above = (above + u128::from(array.dtype.size())).checked_sub(bytes)?;
        }
    }
    Some(u64::try_from(below).unwrap()..u64::MAX - u64::try_from(above).unwrap())
}

proptest! {
    #![proptest_config(cases(512))]

    #[test]
    fn span_covers_all_elements(made in small()) {
        let places = all_offsets(&made);
        let size = i128::from(made.dtype.size());
        let low = places.iter().min();
        let high = places.iter().max().map(|last| last + size);
        match (low, high) {
            (Some(low), Some(_)) if *low < 0 => {
                refused(made.span(), "before its memory");
                prop_assert!(made.offsets().is_err() && made.check(u64::MAX).is_err());
            }
            (Some(low), Some(high)) => {
                let low = u64::try_from(*low).unwrap();
                let high = u64::try_from(high).unwrap();
                prop_assert_eq!(made.span().unwrap(), low..high);
                prop_assert!(made.check(high).is_ok() && made.check(high - 1).is_err());
            }
            _ => prop_assert_eq!(made.span().unwrap(), made.offset..made.offset),
        }
        prop_assert_eq!(made.elements().unwrap(), places.len() as u64);
        if let Ok(offsets) = made.offsets() {
            prop_assert_eq!(offsets.map(i128::from).collect::<Vec<_>>(), &*places);
            for (index, place) in indices(&made.shape).iter().zip(places) {
                prop_assert_eq!(i128::from(made.offset_of(index).unwrap()), place);
            }
        }
        let explicit = ArrayDescriptor { strides: Some(made.strides_in_bytes().unwrap()), ..made.clone() };
        prop_assert_eq!(explicit.span().ok(), made.span().ok());
    }

    #[test]
    fn contiguous_arrays_match_new_arrays(made in small(), order in select(vec![Order::C, Order::F])) {
        let fresh = ArrayDescriptor::new(made.dtype, &*made.shape, order).unwrap();
        prop_assert!(is_contiguous(&fresh, order));
        prop_assert_eq!(fresh.span().unwrap(), 0..fresh.bytes().unwrap());
        let relative = |array: &ArrayDescriptor| {
            all_offsets(array).iter().map(|place| place - i128::from(array.offset)).collect::<Vec<_>>()
        };
        prop_assert_eq!(is_contiguous(&made, order), relative(&made) == relative(&fresh));
    }

    #[test]
    fn parts_contain_the_same_elements(made in small(), cuts in vec(cut(), 1..4)) {
        prop_assume!(made.span().is_ok());
        let mut whole = made;
        for cut in cuts {
            let Some(cut) = cut.fit(&whole.shape) else { continue };
            let part = cut.apply(&whole).unwrap();
            prop_assert_eq!(&part.shape, &cut.shape(&whole.shape));
            let in_whole = |index: Vec<u64>| whole.offset_of(&cut.index_in_whole(&index)).unwrap();
            let want: Vec<u64> = indices(&part.shape).into_iter().map(in_whole).collect();
            prop_assert_eq!(part.offsets().unwrap().collect::<Vec<_>>(), want);
            part.check(whole.span().unwrap().end).unwrap();
            prop_assert!(part.span().unwrap().start >= whole.span().unwrap().start);
            whole = part;
        }
    }
}

proptest! {
    #![proptest_config(cases(4096))]

    #[test]
    fn large_spans_do_not_overflow(made in large(), extent in edges()) {
        let span = expected_span(&made);
        prop_assert_eq!(made.span().ok(), span.clone());
        prop_assert_eq!(made.check(extent).is_ok(), span.as_ref().is_some_and(|span| span.end <= extent));
        if let Some(span) = span {
            prop_assert!(made.check(span.end).is_ok());
            prop_assert!(span.end == 0 || made.check(span.end - 1).is_err());
        }
    }

    #[test]
    fn parts_of_large_arrays_stay_inside(made in large_and_valid(), cut in cut()) {
        let span = made.span().unwrap();
        prop_assert_eq!(Some(span.clone()), expected_span(&made));
        let Some(cut) = cut.fit(&made.shape) else { return Ok(()) };
        let part = match cut.apply(&made) {
            Ok(part) => part,
            Err(Error::Memory(MemoryError::Array { problem })) if problem.contains("stride of 2⁶³ bytes") => return Ok(()),
            Err(error) => return Err(TestCaseError::fail(error.to_string())),
        };
        part.check(span.end).unwrap();
        prop_assert!(part.span().unwrap().start >= span.start);
        if !part.shape.contains(&0) {
            let first = vec![0; part.shape.len()];
            let last: Vec<_> = part.shape.iter().map(|length| length - 1).collect();
            for corner in [first, last] {
                prop_assert_eq!(part.offset_of(&corner).unwrap(), made.offset_of(&cut.index_in_whole(&corner)).unwrap());
            }
        }
    }

    #[test]
    fn methods_never_panic(
        made in anything(), cut in cut(), extent in edges(), index in vec(edges(), 0..5)
    ) {
        let _ = (made.elements(), made.bytes(), made.strides_in_bytes(), made.span(), made.check(extent));
        let _ = made.offset_of(&index);
        let _ = (made.interface(extent, Access::ReadOnly), made.offsets().map(|all| all.take(3).count()), made.transpose());
        let _ = [Order::C, Order::F].map(|order| ArrayDescriptor::new(made.dtype, &*made.shape, order));
        if let Cut::Slice { axis, ends: (start, end), step } = cut {
            let _ = (made.slice(axis, start..end, step), made.index(axis, start), made.permute(&[axis, 0]));
        }
    }

    #[test]
    fn json_round_trips(made in anything()) {
        let text = serde_json::to_string(&made).unwrap();
        prop_assert_eq!(serde_json::from_str::<ArrayDescriptor>(&text).unwrap(), made);
    }

    #[test]
    fn any_text_parses_or_gives_advice(
        text in "[<>|=]?[biufcVO]?[0-9]{0,3}|[<>]?(void|float|int)[0-9]{0,3}|[0-9xX,]{0,8}|.{0,40}", bytes in vec(any::<u8>(), 0..20)
    ) {
        match text.parse::<ElementType>() {
            Ok(read) => {
                prop_assert_eq!(read, element(&read.to_string()));
                prop_assert!(!read.format(&bytes).is_empty());
            }
            Err(error) => prop_assert!(one_sentence(&error.to_string())),
        }
        if let Err(error) = parse_shape(&text) {
            prop_assert!(one_sentence(&error.to_string()));
        }
    }
}
