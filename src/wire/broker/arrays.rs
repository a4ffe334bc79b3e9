//! Parses the table of a part's arrays. A model can have ten thousand arrays, and every reader parses all of them.
//!
//! This library writes tables in one form: no spaces, fields in a fixed order. A special parser reads this form. serde parses every other
//! form of the JSON, and reports faults.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{self, SeqAccess, Visitor},
};

use super::{ArrayEntry, Attached, MAX_ARRAYS};
use crate::array::{ArrayDescriptor, ElementType, MAX_DIMENSIONS};

/// Parses a table of arrays.
///
/// # Errors
/// The parser's errors.
pub(crate) fn read_arrays(text: &str) -> serde_json::Result<Vec<ArrayEntry>> {
    match TableText(text).table() {
        Some(arrays) => Ok(arrays),
        None => serde_json::from_str::<Bounded>(text).map(|arrays| arrays.0),
    }
}

/// A table. Parsing stops at the first entry beyond the limit.
struct Bounded(Vec<ArrayEntry>);

impl<'de> Deserialize<'de> for Bounded {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = Bounded;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a list of at most {MAX_ARRAYS} arrays")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Bounded, A::Error> {
                let mut arrays = Vec::new();
                while let Some(entry) = list.next_element()? {
                    if arrays.len() == MAX_ARRAYS {
                        return Err(de::Error::invalid_length(MAX_ARRAYS + 1, &self));
                    }
                    arrays.push(entry);
                }
                Ok(Bounded(arrays))
            }
        }

        from.deserialize_seq(Entries)
    }
}

/// The rest of a text. Each method returns `None` if the text has another form.
struct TableText<'a>(&'a str);

impl<'a> TableText<'a> {
    fn table(mut self) -> Option<Vec<ArrayEntry>> {
        // The shortest entry, in bytes.
        const SHORTEST: usize = 60;
        let mut arrays = Vec::with_capacity((self.0.len() / SHORTEST).min(MAX_ARRAYS));
        let mut last = None;
        self.skip("[")?;
        while self.skip("]").is_none() {
            if !arrays.is_empty() {
                self.skip(",")?;
            }
            if arrays.len() == MAX_ARRAYS {
                return None;
            }
            arrays.push(self.entry(&mut last)?);
        }
        self.0.is_empty().then_some(arrays)
    }

    /// `last` is the element type of the previous entry, usually equal to this one's.
    fn entry(&mut self, last: &mut Option<(&'a str, ElementType)>) -> Option<ArrayEntry> {
        self.skip(r#"{"name":"#)?;
        let name = self.string()?.to_owned();
        self.skip(r#","array":{"dtype":"#)?;
        let dtype = self.string()?;
        let dtype = match last {
            Some((name, known)) if *name == dtype => *known,
            _ => last.insert((dtype, ElementType::of_name(dtype)?)).1,
        };
        self.skip(r#","shape":["#)?;
        let mut shape = Vec::with_capacity(2);
        while self.skip("]").is_none() {
            if !shape.is_empty() {
                self.skip(",")?;
            }
            shape.push(self.number()?);
            if shape.len() > MAX_DIMENSIONS {
                return None;
            }
        }
        self.skip(r#","strides":null"#);
        self.skip(r#","offset":"#)?;
        let offset = self.number()?;
        self.skip("}")?;
        let attributes = match self.skip(r#","attributes":"#) {
            Some(()) => Some(Attached::from_text(self.object()?.to_owned()).ok()?),
            None => None,
        };
        self.skip("}")?;
        Some(ArrayEntry { name, array: ArrayDescriptor { dtype, shape, strides: None, offset }, attributes })
    }

    fn skip(&mut self, text: &str) -> Option<()> {
        self.0 = self.0.strip_prefix(text)?;
        Some(())
    }

    /// A string without escapes.
    fn string(&mut self) -> Option<&'a str> {
        let (string, rest) = self.0.strip_prefix('"')?.split_once('"')?;
        // No early exit: the compiler can vectorize the loop.
        let escaped = string.bytes().fold(false, |found, byte| found | (byte == b'\\') | (byte < 0x20));
        self.0 = rest;
        (!escaped).then_some(string)
    }

    /// A decimal integer without a sign.
    fn number(&mut self) -> Option<u64> {
        let digits = self.0.bytes().take_while(u8::is_ascii_digit).count();
        let (number, rest) = self.0.split_at(digits);
        if digits == 0 || digits > 1 && number.starts_with('0') {
            return None;
        }
        self.0 = rest;
        number.parse().ok()
    }

    /// The text of an object. Its syntax is checked when it is parsed.
    fn object(&mut self) -> Option<&'a str> {
        let mut depth = 0usize;
        let mut quoted = false;
        let mut escaped = false;
        for (at, byte) in self.0.bytes().enumerate() {
            match byte {
                _ if escaped => escaped = false,
                b'\\' if quoted => escaped = true,
                b'"' => quoted = !quoted,
                b'{' if !quoted => depth += 1,
                b'}' if !quoted => {
                    depth = depth.checked_sub(1)?;
                    if depth == 0 {
                        let (object, rest) = self.0.split_at(at + 1);
                        self.0 = rest;
                        return Some(object);
                    }
                }
                _ if depth == 0 => return None,
                _ => {}
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::array::Order;

    fn fast(text: &str) -> Option<Vec<ArrayEntry>> {
        TableText(text).table()
    }

    fn entries() -> impl Strategy<Value = Vec<ArrayEntry>> {
        let names = prop::sample::select(vec!["float32", "bfloat16", "void128", "int8", "complex128"]);
        let attributes = prop::option::of("[a-z\"\\\\{}é]{0,8}");
        let entry = (".{0,12}", names, prop::collection::vec(0..99u64, 0..4), any::<u64>(), attributes);
        let entry = entry.prop_map(|(name, dtype, shape, offset, note)| {
            let mut array = ArrayDescriptor::new(ElementType::of_name(dtype).unwrap(), shape, Order::C).unwrap();
            array.offset = offset;
            let attributes = note.map(|note| Attached::of(&serde_json::json!({"note": {"text": note}})).unwrap());
            ArrayEntry { name, array, attributes }
        });
        prop::collection::vec(entry, 0..5)
    }

    proptest! {
        #[test]
        fn written_tables_match_serde(entries in entries()) {
            let text = serde_json::to_string(&entries).unwrap();
            prop_assert_eq!(&read_arrays(&text).unwrap(), &entries);
            let plain = entries.iter().all(|entry| !entry.name.contains(['"', '\\']) && !entry.name.bytes().any(|byte| byte < 0x20));
            prop_assert_eq!(fast(&text).is_some(), plain);
        }

        #[test]
        fn corrupted_tables_match_serde(entries in entries(), at in any::<prop::sample::Index>(), byte in " -~") {
            let mut text = serde_json::to_string(&entries).unwrap();
            let at = at.index(text.len());
            if text.is_char_boundary(at) && text.is_char_boundary(at + 1) {
                text.replace_range(at..=at, &byte);
            }
            let ours = fast(&text);
            let theirs = serde_json::from_str::<Vec<ArrayEntry>>(&text);
            if let Some(ours) = ours {
                prop_assert_eq!(ours, theirs.unwrap());
            }
        }
    }

    #[test]
    fn other_forms_use_serde() {
        let spaced = r#"[ {"array": {"shape": [2], "dtype": "int8"}, "name": "a"} ]"#;
        assert!(fast(spaced).is_none());
        assert_eq!(read_arrays(spaced).unwrap()[0].name, "a");
        let entry = r#"{"name":"a","array":{"dtype":"int8","shape":[SHAPE],"offset":OFFSET}}"#;
        let of = |shape: &str, offset: &str| format!("[{}]", entry.replace("SHAPE", shape).replace("OFFSET", offset));
        assert!(fast(&of("2,3", "0")).is_some());
        let many = vec!["1"; MAX_DIMENSIONS + 1].join(",");
        for (shape, offset) in
            [("02", "0"), ("2", "-1"), ("2", "1e3"), ("2,", "0"), (",2", "0"), ("2", ""), (&many, "0")]
        {
            assert!(fast(&of(shape, offset)).is_none(), "{shape} {offset}");
            assert!(shape.len() < 99 && read_arrays(&of(shape, offset)).is_err() || shape == many, "{shape} {offset}");
        }
        assert!(fast(&of("2", "99999999999999999999")).is_none());
        assert!(fast(&(of("2", "0") + " ")).is_none());
    }
}
