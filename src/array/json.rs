//! Serialisation of array descriptors.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{self, SeqAccess, Visitor},
};

use super::{ArrayDescriptor, ElementType, MAX_DIMENSIONS};
use crate::{
    base::strict::{no_texts, objects},
    error::ParseError,
};

objects! {
    /// The fields of an [`ArrayDescriptor`] on the wire.
    pub(super) struct PlainArray {
        /// The name of the elements' type in NumPy or ml_dtypes.
        #[cfg_attr(feature = "schema", schemars(with = "String"))]
        dtype: Dtype,
        #[cfg_attr(feature = "schema", schemars(with = "Option<String>", extend("enum" = ["little", "big", null])))]
        byte_order: Option<ByteOrder>,
        #[serde(deserialize_with = "dimensions")]
        #[cfg_attr(feature = "schema", schemars(length(max = 64)))]
        shape: Vec<u64>,
        #[serde(default, deserialize_with = "optional_dimensions")]
        strides: Option<Vec<i64>> => null,
        offset: Option<u64>,
    }
}

/// A type that is serialised as its name in NumPy or ml_dtypes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Dtype(ElementType);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ByteOrder {
    Little,
    Big,
}

no_texts!(Dtype, ByteOrder);

impl From<ArrayDescriptor> for PlainArray {
    fn from(array: ArrayDescriptor) -> Self {
        let ArrayDescriptor { dtype, shape, strides, offset } = array;
        let byte_order = dtype.is_big_endian().then_some(ByteOrder::Big);
        Self { dtype: Dtype(dtype), byte_order, shape, strides, offset: Some(offset) }
    }
}

impl TryFrom<PlainArray> for ArrayDescriptor {
    type Error = String;

    fn try_from(plain: PlainArray) -> Result<Self, String> {
        let PlainArray { dtype: Dtype(dtype), byte_order, shape, strides, offset } = plain;
        let big_endian = byte_order == Some(ByteOrder::Big);
        if big_endian && !dtype.has_order() {
            return Err(format!("a byte_order of `big` is invalid for {dtype}, which has no byte order"));
        }
        let dtype = ElementType { big_endian, ..dtype };
        Ok(Self { dtype, shape, strides, offset: offset.unwrap_or(0) })
    }
}

impl Serialize for Dtype {
    fn serialize<S: Serializer>(&self, output: S) -> Result<S::Ok, S::Error> {
        output.serialize_str(&self.0.name())
    }
}

impl<'de> Deserialize<'de> for Dtype {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        word(input, "the name of a dtype", |name| {
            let expected = "its name in NumPy or ml_dtypes, such as float32, bfloat16 or void128";
            ElementType::of_name(name).map(Self).ok_or_else(|| ParseError::new(name, "a dtype", expected))
        })
    }
}

impl Serialize for ByteOrder {
    fn serialize<S: Serializer>(&self, output: S) -> Result<S::Ok, S::Error> {
        output.serialize_str(match self {
            Self::Little => "little",
            Self::Big => "big",
        })
    }
}

impl<'de> Deserialize<'de> for ByteOrder {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        word(input, "a byte order", |order| match order {
            "little" => Ok(Self::Little),
            "big" => Ok(Self::Big),
            _ => Err(ParseError::new(order, "a byte order", "little or big")),
        })
    }
}

/// Parses a string. (The error of serde's derived code would contain the whole string, however long it is.)
fn word<'de, D: Deserializer<'de>, T>(
    input: D,
    expected: &'static str,
    read: impl Fn(&str) -> Result<T, ParseError>,
) -> Result<T, D::Error> {
    struct Word<F>(&'static str, F);

    impl<T, F: Fn(&str) -> Result<T, ParseError>> Visitor<'_> for Word<F> {
        type Value = T;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
            (self.1)(text).map_err(E::custom)
        }
    }

    input.deserialize_str(Word(expected, read))
}

/// Parses a list of at most [`MAX_DIMENSIONS`] numbers. Stops at the first number that exceeds the limit.
fn dimensions<'de, D: Deserializer<'de>, T: Deserialize<'de>>(input: D) -> Result<Vec<T>, D::Error> {
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
                    return Err(de::Error::invalid_length(MAX_DIMENSIONS + 1, &self));
                }
                numbers.push(number);
            }
            Ok(numbers)
        }
    }

    input.deserialize_seq(Bounded(PhantomData))
}

fn optional_dimensions<'de, D: Deserializer<'de>>(input: D) -> Result<Option<Vec<i64>>, D::Error> {
    #[derive(Deserialize)]
    struct Strides(#[serde(deserialize_with = "dimensions")] Vec<i64>);

    Ok(Option::<Strides>::deserialize(input)?.map(|Strides(strides)| strides))
}
