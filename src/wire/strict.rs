//! Readers that are stricter than serde's own: the protocol's objects are JSON objects, and its UUIDs have one form.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{Error, MapAccess, Visitor, value::MapAccessDeserializer},
};

use crate::driver::DeviceUuid;

/// Reads a struct from an object alone. What serde derives takes an array of the fields' values too.
///
/// # Errors
/// The deserializer's.
pub(crate) fn object<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<T, D::Error> {
    struct Fields<T>(PhantomData<T>);

    impl<'de, T: Deserialize<'de>> Visitor<'de> for Fields<T> {
        type Value = T;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a JSON object")
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
            T::deserialize(MapAccessDeserializer::new(map))
        }
    }

    from.deserialize_map(Fields(PhantomData))
}

/// Anything that is read by [`object`].
struct Object<T>(T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        object(from).map(Self)
    }
}

/// As [`object`], of a field that may be null.
///
/// # Errors
/// The deserializer's.
pub(crate) fn optional_object<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Option<T>, D::Error> {
    Ok(Option::<Object<T>>::deserialize(from)?.map(|Object(value)| value))
}

/// Reads a UUID without a prefix, with its hyphens. (A command line's may have more forms.)
///
/// # Errors
/// The deserializer's.
pub(super) fn uuid<'de, D: Deserializer<'de>>(from: D) -> Result<DeviceUuid, D::Error> {
    let text = String::deserialize(from)?;
    let hyphens = text.bytes().enumerate().all(|(at, byte)| (byte == b'-') == [8, 13, 18, 23].contains(&at));
    match text.parse() {
        Ok(uuid) if text.len() == 36 && hyphens => Ok(uuid),
        _ => Err(Error::custom("a device's UUID is not 32 hexadecimal digits in groups of 8, 4, 4, 4 and 12")),
    }
}

/// As [`object`], of an array of them.
///
/// # Errors
/// The deserializer's.
#[cfg(feature = "broker")]
pub(crate) fn objects<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Vec<T>, D::Error> {
    Ok(Vec::<Object<T>>::deserialize(from)?.into_iter().map(|Object(value)| value).collect())
}
