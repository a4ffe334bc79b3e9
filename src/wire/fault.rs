//! Classifies the fault of an invalid body. serde_json reports only a sentence.
//!
//! Parses the body again, with an error type that keeps the cause. Valid bodies are parsed only once.

use std::{fmt, iter, vec};

use serde::{
    Deserialize, Deserializer,
    de::{
        self, DeserializeOwned, DeserializeSeed, IntoDeserializer, MapAccess, Unexpected, Visitor,
        value::{MapAccessDeserializer, MapDeserializer, SeqDeserializer},
    },
    forward_to_deserialize_any,
};
use serde_json::value::RawValue;

use super::{MAX_REASON, shorten};
use crate::{
    base::strict::Clean,
    error::{BodyCause, BodyFault},
};

/// serde_json's limit.
const MAX_DEPTH: usize = 128;

/// Returns the fault that makes `body` an invalid `T`.
pub(super) fn of<T: DeserializeOwned>(body: &str) -> BodyFault {
    let read = serde_json::from_str(body)
        .map_err(syntax)
        .and_then(|text: &RawValue| T::deserialize(Json { text: text.get(), depth: 0 }));
    let mut fault = match read {
        Err(Fault(fault)) => fault,
        Ok(_) => BodyFault { field: None, cause: BodyCause::Syntax },
    };
    if let Some(field) = &mut fault.field {
        shorten(field, MAX_REASON);
        field.clean();
    }
    fault
}

#[derive(Debug)]
struct Fault(BodyFault);

impl Fault {
    fn new(cause: BodyCause) -> Self {
        Self(BodyFault { field: None, cause })
    }

    fn of_field(field: &str, cause: BodyCause) -> Self {
        Self(BodyFault { field: Some(field.to_owned()), cause })
    }
}

fn syntax(_: serde_json::Error) -> Fault {
    Fault::new(BodyCause::Syntax)
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

impl std::error::Error for Fault {}

impl de::Error for Fault {
    fn custom<T: fmt::Display>(_: T) -> Self {
        Self::new(BodyCause::Value)
    }

    fn invalid_type(found: Unexpected<'_>, _: &dyn de::Expected) -> Self {
        Self::new(match found {
            Unexpected::Unit => BodyCause::Missing,
            Unexpected::Float(_) => BodyCause::Number,
            _ => BodyCause::Type,
        })
    }

    fn invalid_value(found: Unexpected<'_>, _: &dyn de::Expected) -> Self {
        Self::new(match found {
            Unexpected::Unsigned(_) | Unexpected::Signed(_) | Unexpected::Float(_) => BodyCause::Number,
            _ => BodyCause::Value,
        })
    }

    fn unknown_variant(_: &str, _: &'static [&'static str]) -> Self {
        Self::new(BodyCause::Variant)
    }

    fn missing_field(field: &'static str) -> Self {
        Self::of_field(field, BodyCause::Missing)
    }

    fn duplicate_field(field: &'static str) -> Self {
        Self::of_field(field, BodyCause::Duplicate)
    }
}

/// The text of one JSON value.
#[derive(Clone, Copy)]
struct Json<'a> {
    text: &'a str,
    depth: usize,
}

impl<'a> Json<'a> {
    fn within(self, text: &'a RawValue) -> Self {
        Self { text: text.get(), depth: self.depth + 1 }
    }

    fn fields(self) -> Result<Vec<(String, Self)>, Fault> {
        let Fields(fields) = serde_json::from_str(self.text).map_err(syntax)?;
        Ok(fields.into_iter().map(|(name, text)| (name, self.within(text))).collect())
    }

    fn read<V: Visitor<'a>>(self, visitor: V) -> Result<V::Value, Fault> {
        if self.depth > MAX_DEPTH {
            return Err(Fault::new(BodyCause::Syntax));
        }
        match self.text.as_bytes() {
            [b'{', ..] => {
                let fields = self.fields()?;
                let mut names: Vec<&str> = fields.iter().map(|(name, _)| name.as_str()).collect();
                names.sort_unstable();
                let duplicate = names.windows(2).any(|pair| pair[0] == pair[1]);
                visitor.visit_map(Entries::of(fields)).map_err(|fault| match fault.0 {
                    // A `check` has no known field names, so its visitor can't call `duplicate_field`.
                    BodyFault { field: None, cause: BodyCause::Value } if duplicate => Fault::new(BodyCause::Duplicate),
                    _ => fault,
                })
            }
            [b'[', ..] => {
                let list: Vec<&RawValue> = serde_json::from_str(self.text).map_err(syntax)?;
                visitor.visit_seq(SeqDeserializer::new(list.into_iter().map(|text| self.within(text))))
            }
            [b'"', ..] => visitor.visit_string(serde_json::from_str(self.text).map_err(syntax)?),
            b"null" => visitor.visit_unit(),
            b"true" => visitor.visit_bool(true),
            b"false" => visitor.visit_bool(false),
            _ => match (self.text.parse::<u64>(), self.text.parse::<i64>(), self.text.parse::<f64>()) {
                (Ok(number), _, _) => visitor.visit_u64(number),
                // `-0` is a float.
                (_, Ok(number), _) if number != 0 => visitor.visit_i64(number),
                (_, _, Ok(number)) if number.is_finite() => visitor.visit_f64(number),
                _ => Err(Fault::new(BodyCause::Number)),
            },
        }
    }
}

impl<'de> IntoDeserializer<'de, Fault> for Json<'de> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for Json<'de> {
    type Error = Fault;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        self.read(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        match self.text {
            "null" => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, name: &'static str, visitor: V) -> Result<V::Value, Fault> {
        // serde_json's `RawValue` requests its text with a private struct name.
        if name.starts_with("$serde_json::") {
            return visitor.visit_map(MapDeserializer::new(iter::once((name, self.text))));
        }
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        match self.text.as_bytes() {
            [b'"', ..] => {
                let name = serde_json::from_str::<String>(self.text).map_err(syntax);
                name.and_then(|name| visitor.visit_enum(name.into_deserializer()))
            }
            [b'{', ..] => {
                self.fields().and_then(|fields| visitor.visit_enum(MapAccessDeserializer::new(Entries::of(fields))))
            }
            _ => self.read(visitor),
        }
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        visitor.visit_unit()
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct map struct identifier
    }
}

/// The entries of an object. Adds the field's name to a fault.
struct Entries<'a> {
    fields: vec::IntoIter<(String, Json<'a>)>,
    next: Option<(String, Json<'a>)>,
}

impl<'a> Entries<'a> {
    fn of(fields: Vec<(String, Json<'a>)>) -> Self {
        Self { fields: fields.into_iter(), next: None }
    }
}

impl<'de> MapAccess<'de> for Entries<'de> {
    type Error = Fault;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Fault> {
        self.next = self.fields.next();
        self.next.as_ref().map(|(name, _)| seed.deserialize(name.clone().into_deserializer())).transpose()
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Fault> {
        let (name, value) = self.next.take().ok_or_else(|| Fault::new(BodyCause::Syntax))?;
        seed.deserialize(value).map_err(|Fault(BodyFault { field, cause })| {
            // Keeps the innermost field.
            Fault(BodyFault { field: field.or(Some(name)), cause })
        })
    }
}

/// The fields of an object in order, including duplicates.
struct Fields<'a>(Vec<(String, &'a RawValue)>);

impl<'de> Deserialize<'de> for Fields<'de> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Object;

        impl<'de> Visitor<'de> for Object {
            type Value = Fields<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields<'de>, A::Error> {
                let mut fields = Vec::new();
                while let Some(field) = map.next_entry()? {
                    fields.push(field);
                }
                Ok(Fields(fields))
            }
        }

        from.deserialize_map(Object)
    }
}
