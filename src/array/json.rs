//! Descriptors as JSON.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{SeqAccess, Visitor},
};

use super::MAX_DIMENSIONS;

/// Reads a list that is no longer than there may be dimensions, and stops at the first number too many.
pub(super) fn dimensions<'de, D: Deserializer<'de>, T: Deserialize<'de>>(input: D) -> Result<Vec<T>, D::Error> {
    struct Bounded<T>(PhantomData<T>);

    impl<'de, T: Deserialize<'de>> Visitor<'de> for Bounded<T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a list of at most {MAX_DIMENSIONS} numbers, one for each dimension")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
            let mut numbers = Vec::new();
            while let Some(number) = list.next_element()? {
                if numbers.len() == MAX_DIMENSIONS {
                    return Err(serde::de::Error::invalid_length(MAX_DIMENSIONS + 1, &self));
                }
                numbers.push(number);
            }
            Ok(numbers)
        }
    }

    input.deserialize_seq(Bounded(PhantomData))
}

pub(super) fn optional_dimensions<'de, D: Deserializer<'de>>(input: D) -> Result<Option<Vec<i64>>, D::Error> {
    #[derive(Deserialize)]
    struct Strides(#[serde(deserialize_with = "dimensions")] Vec<i64>);

    Ok(Option::<Strides>::deserialize(input)?.map(|Strides(strides)| strides))
}
