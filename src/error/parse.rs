//! A text that names nothing of its kind.

/// The text is not what [`std::str::FromStr`] of a type of this crate reads: the message quotes it and says what to write instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not {what}: write {expected}")]
pub struct ParseError {
    what: &'static str,
    text: String,
    expected: &'static str,
}

impl ParseError {
    /// `what` and `expected` complete "... is not {what}: write {expected}". The text is shortened, and shown without control
    /// characters.
    pub(crate) fn new(text: &str, what: &'static str, expected: &'static str) -> Self {
        const LONGEST: usize = 32;
        let mut shown: String = text.chars().take(LONGEST).flat_map(char::escape_debug).collect();
        if text.chars().nth(LONGEST).is_some() {
            shown.push_str("...");
        }
        Self { what, text: shown, expected }
    }
}
