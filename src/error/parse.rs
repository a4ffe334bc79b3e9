//! Errors of parsing text.

/// A text that the [`std::str::FromStr`] of a crate type can't parse. The message quotes the text and gives the expected form.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not {what}: write {expected}")]
pub struct ParseError {
    what: &'static str,
    text: String,
    expected: &'static str,
}

impl ParseError {
    /// `what` and `expected` complete "... is not {what}: write {expected}". The message contains the start of the text, without
    /// control characters.
    pub(crate) fn new(text: &str, what: &'static str, expected: &'static str) -> Self {
        const LONGEST: usize = 32;
        let mut shown: String = text.chars().take(LONGEST).flat_map(char::escape_debug).collect();
        if text.chars().nth(LONGEST).is_some() {
            shown.push_str("...");
        }
        Self { what, text: shown, expected }
    }
}
