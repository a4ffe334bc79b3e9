//! The errors of driver calls.

use std::{borrow::Cow, io};

use super::code;
use crate::error::Error;

/// The error of a call that returned `code`.
pub(crate) fn failure(call: &'static str, code: u32) -> Error {
    failure_with(call, code, None)
}

/// The error of a call that returned `code`, caused by an error of the operating system. If CUDA has no closer code, the error is the
/// operating system's: `CUDA_ERROR_OPERATING_SYSTEM` would hide that, say, this process has too many open files.
pub(crate) fn failure_with(call: &'static str, code: u32, source: Option<io::Error>) -> Error {
    let source = match source {
        Some(source) if code == code::OPERATING_SYSTEM => return Error::system(format!("complete `{call}`"), source),
        source => source,
    };
    let name = code::name(code).map_or(Cow::Borrowed("an error that this build does not know"), Cow::Borrowed);
    Error::Driver { call, code, name, source }
}
