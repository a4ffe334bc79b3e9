//! Readers that are stricter than serde's own: the protocol's objects are JSON objects, and its UUIDs have one form.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{Error, MapAccess, SeqAccess, Visitor, value::MapAccessDeserializer},
};
use serde_json::{Map, Value};

use crate::base::DeviceUuid;

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
pub fn optional_object<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Option<T>, D::Error> {
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
pub(crate) fn objects<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Vec<T>, D::Error> {
    Ok(Vec::<Object<T>>::deserialize(from)?.into_iter().map(|Object(value)| value).collect())
}

/// As [`objects`], of a field that may be null.
///
/// # Errors
/// The deserializer's.
pub(crate) fn optional_objects<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    from: D,
) -> Result<Option<Vec<T>>, D::Error> {
    let objects = Option::<Vec<Object<T>>>::deserialize(from)?;
    Ok(objects.map(|objects| objects.into_iter().map(|Object(value)| value).collect()))
}

/// Reads a JSON object, or null, in which no name comes twice at any depth. serde_json itself keeps the last value of a name.
///
/// # Errors
/// The deserializer's.
pub(super) fn optional_check<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Map<String, Value>>, D::Error> {
    match Option::<Unique>::deserialize(from)? {
        None => Ok(None),
        Some(Unique(Value::Object(check))) => Ok(Some(check)),
        Some(_) => Err(Error::custom("a check is not a JSON object")),
    }
}

/// A JSON value without duplicate names.
struct Unique(Value);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Any;

        impl<'de> Visitor<'de> for Any {
            type Value = Unique;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON value")
            }

            fn visit_unit<E>(self) -> Result<Unique, E> {
                Ok(Unique(Value::Null))
            }

            fn visit_bool<E>(self, value: bool) -> Result<Unique, E> {
                Ok(Unique(value.into()))
            }

            fn visit_u64<E>(self, value: u64) -> Result<Unique, E> {
                Ok(Unique(value.into()))
            }

            fn visit_i64<E>(self, value: i64) -> Result<Unique, E> {
                Ok(Unique(value.into()))
            }

            fn visit_f64<E>(self, value: f64) -> Result<Unique, E> {
                Ok(Unique(value.into()))
            }

            fn visit_str<E>(self, value: &str) -> Result<Unique, E> {
                Ok(Unique(value.into()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Unique, A::Error> {
                let mut values = Vec::new();
                while let Some(Unique(value)) = list.next_element()? {
                    values.push(value);
                }
                Ok(Unique(Value::Array(values)))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Unique, A::Error> {
                let mut fields = Map::new();
                while let Some((name, Unique(value))) = map.next_entry::<String, Unique>()? {
                    if fields.contains_key(&name) {
                        return Err(Error::custom(format_args!("duplicate field `{name}`")));
                    }
                    fields.insert(name, value);
                }
                Ok(Unique(Value::Object(fields)))
            }
        }

        from.deserialize_any(Any)
    }
}
