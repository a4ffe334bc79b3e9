//! Structs that are JSON objects on the wire.

/// Declares structs that are JSON objects. An array of the fields' values, which serde's derived code accepts too, is an error.
///
/// An `Option` that is `None` is not written, or after `=> null` as null.
macro_rules! objects {
    ($($(#[$meta:meta])* $vis:vis struct $name:ident { $($fields:tt)* })*) => {$(
        $crate::base::strict::objects!(@fields $name {
            $(#[$meta])*
            #[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
            #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
            #[serde(remote = "Self")]
            $vis struct $name
        } [] [] $($fields)*);
    )*};
    (@fields $name:ident $head:tt [$($done:tt)*] [$($names:ident)*] $(#[$meta:meta])* $vis:vis $field:ident: Option<$type:ty> => null, $($rest:tt)*) => {
        $crate::base::strict::objects!(@fields $name $head [$($done)* $(#[$meta])* $vis $field: Option<$type>,] [$($names)* $field] $($rest)*);
    };
    (@fields $name:ident $head:tt [$($done:tt)*] [$($names:ident)*] $(#[$meta:meta])* $vis:vis $field:ident: Option<$type:ty>, $($rest:tt)*) => {
        $crate::base::strict::objects!(@fields $name $head [
            $($done)* $(#[$meta])* #[serde(skip_serializing_if = "Option::is_none")] $vis $field: Option<$type>,
        ] [$($names)* $field] $($rest)*);
    };
    (@fields $name:ident $head:tt [$($done:tt)*] [$($names:ident)*] $(#[$meta:meta])* $vis:vis $field:ident: $type:ty, $($rest:tt)*) => {
        $crate::base::strict::objects!(@fields $name $head [$($done)* $(#[$meta])* $vis $field: $type,] [$($names)* $field] $($rest)*);
    };
    (@fields $name:ident {$($head:tt)*} [$($done:tt)*] [$($names:ident)*]) => {
        $($head)* { $($done)* }

        $crate::base::strict::objects!(@object $name);

        impl $crate::base::strict::Clean for $name {
            fn clean(&mut self) {
                $($crate::base::strict::Clean::clean(&mut self.$names);)*
            }
        }
    };
    // For a type whose derived code is inherent, by `#[serde(remote = "Self")]`.
    (@object $name:ident) => {
        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, output: S) -> Result<S::Ok, S::Error> {
                Self::serialize(self, output)
            }
        }

        $crate::base::strict::objects!(@deserialize $name);
    };
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
