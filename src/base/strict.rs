//! Structs that are JSON objects on the wire.

/// Declares structs that are JSON objects. An array of the fields' values, which serde's derived code accepts too, is an error.
///
/// A field without a value is not written: an `Option` that is `None`, or after `=>` the function that decides.
macro_rules! objects {
    ($(
        $(#[$meta:meta])*
        $vis:vis struct $name:ident {
            $($(#[$field_meta:meta])* $field_vis:vis $field:ident: $type:ty $(=> $is_absent:expr)?,)*
        }
    )*) => {$(
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq, Eq, serde::Deserialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        #[serde(remote = "Self")]
        $vis struct $name {
            $($(#[$field_meta])* $field_vis $field: $type,)*
        }

        $crate::base::strict::objects!(@deserialize $name);

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, output: S) -> Result<S::Ok, S::Error> {
                #[allow(unused_imports, reason = "structs without fields")]
                use $crate::base::strict::{Field, IsAbsent as _};
                #[allow(unused_mut, reason = "structs without fields")]
                let mut fields = output.serialize_map(None)?;
                $(if !$crate::base::strict::objects!(@absent &self.$field $(, $is_absent)?) {
                    serde::ser::SerializeMap::serialize_entry(&mut fields, stringify!($field), &self.$field)?;
                })*
                serde::ser::SerializeMap::end(fields)
            }
        }

        impl $crate::base::strict::Clean for $name {
            fn clean(&mut self) {
                $($crate::base::strict::Clean::clean(&mut self.$field);)*
            }
        }
    )*};
    (@absent $field:expr) => { Field($field).is_absent() };
    (@absent $field:expr, $is_absent:expr) => { $is_absent($field) };
    // For a type whose derived code is inherent, by `#[serde(remote = "Self")]`.
    (@deserialize $name:ident) => {
        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
                struct Object;

                impl<'de> serde::de::Visitor<'de> for Object {
                    type Value = $name;

                    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                        f.write_str("a JSON object")
                    }

                    fn visit_map<A: serde::de::MapAccess<'de>>(self, map: A) -> Result<$name, A::Error> {
                        $name::deserialize(serde::de::value::MapAccessDeserializer::new(map))
                    }
                }

                input.deserialize_map(Object)
            }
        }
    };
}

pub(crate) use objects;

/// A field, for the choice between the two methods: the inherent one wins.
pub(crate) struct Field<'a, T>(pub(crate) &'a T);

impl<T> Field<'_, Option<T>> {
    pub(crate) fn is_absent(&self) -> bool {
        self.0.is_none()
    }
}

pub(crate) trait IsAbsent {
    fn is_absent(&self) -> bool {
        false
    }
}

impl<T> IsAbsent for Field<'_, T> {}

/// Texts of a peer that may reach a terminal.
pub(crate) trait Clean {
    /// Replaces characters that must not reach a terminal with spaces. By default, there is no such text.
    fn clean(&mut self) {}
}

impl Clean for String {
    fn clean(&mut self) {
        if self.contains(is_unsafe_on_terminals) {
            *self = self.replace(is_unsafe_on_terminals, " ");
        }
    }
}

impl<T: Clean> Clean for Option<T> {
    fn clean(&mut self) {
        self.iter_mut().for_each(Clean::clean);
    }
}

impl<T: Clean> Clean for Vec<T> {
    fn clean(&mut self) {
        self.iter_mut().for_each(Clean::clean);
    }
}

impl<T: Clean> Clean for Box<T> {
    fn clean(&mut self) {
        (**self).clean();
    }
}

/// Implements [`Clean`] for types without texts.
macro_rules! no_texts {
    ($($type:ty),*) => {
        $(impl $crate::base::strict::Clean for $type {})*
    };
}

pub(crate) use no_texts;

no_texts!(bool, i32, i64, u16, u32, u64);

/// Whether a character must not reach a terminal: a control character, or a format character (Unicode category Cf) that reorders or hides
/// text.
pub fn is_unsafe_on_terminals(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{00AD}' | '\u{061C}' | '\u{180E}' | '\u{200B}'..='\u{200F}' | '\u{2028}'..='\u{202E}' | '\u{2060}'..='\u{206F}' | '\u{FEFF}')
}

/// For a field that is written as null.
pub(crate) fn never<T>(_: &T) -> bool {
    false
}
