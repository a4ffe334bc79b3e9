//! The errors of driver calls.

use std::{borrow::Cow, io};

use super::code;
use crate::error::Error;

/// The error of a call that returned `code`.
pub(crate) fn failure(call: &'static str, code: u32) -> Error {
    failure_with(call, code, None)
}

/// The error of a call that returned `code`, caused by an error of the operating system.
pub(crate) fn failure_with(call: &'static str, code: u32, source: Option<io::Error>) -> Error {
    let name = code::name(code).map_or(Cow::Borrowed("an error that this build does not know"), Cow::Borrowed);
    Error::Driver { call, code, name, source }
}
