//! JSON that is carried as unparsed text.

use std::fmt;

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::value::RawValue;

/// The text of one JSON value, parsed only by its reader.
#[derive(Clone, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Attached(Box<RawValue>);

impl Attached {
    /// Serializes a value.
    ///
    /// # Errors
    /// The serializer's errors.
    pub fn of(value: &(impl Serialize + ?Sized)) -> serde_json::Result<Self> {
        serde_json::value::to_raw_value(value).map(Self)
    }

    /// Wraps a text that is one JSON value.
    ///
    /// # Errors
    /// The parser's errors.
    pub fn from_text(text: String) -> serde_json::Result<Self> {
        RawValue::from_string(text).map(Self)
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        self.0.get()
    }

    /// Parses the text.
    ///
    /// # Errors
    /// The parser's errors.
    pub fn read<T: DeserializeOwned>(&self) -> serde_json::Result<T> {
        serde_json::from_str(self.as_str())
    }
}

impl fmt::Debug for Attached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl PartialEq for Attached {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str()
    }
}

impl Eq for Attached {}
