//! Deserializers of fields that may be null, and of checks.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{Error, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Map, Value};

/// A field that may be null, like an absent field.
///
/// # Errors
/// The deserializer's errors.
pub(crate) fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(from: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

/// Deserializes a JSON object or null, without duplicate names at any depth. serde_json itself keeps the last duplicate.
///
/// # Errors
/// The deserializer's errors.
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
