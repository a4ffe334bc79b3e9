//! Reads a saved report.

use std::{fs::File, io::Read, path::Path};

use serde_json::Value;
use vmmfd::{
    error::{Error, Result},
    internals::clean,
};

use super::DoctorReport;
use crate::error::ToolError;
use crate::schema::VERSION;

/// The maximum size of a report in bytes.
const LARGEST: u64 = 16 << 20;

/// Reads a report from a file, and removes control characters from its texts. Blocks on file I/O.
///
/// # Errors
/// [`ToolError::File`] if the file can't be read, is not a report, or has another schema version.
pub fn read(path: &Path) -> Result<DoctorReport> {
    let invalid = |problem: String| Error::from(ToolError::File { path: path.to_owned(), problem });
    let mut text = Vec::new();
    let read = File::open(path).and_then(|file| file.take(LARGEST + 1).read_to_end(&mut text));
    read.map_err(|error| invalid(format!("can't be read: {error}")))?;
    if text.len() as u64 > LARGEST {
        return Err(invalid(format!("is not a report: it has more than {LARGEST} bytes")));
    }
    let mut value: Value =
        serde_json::from_slice(&text).map_err(|error| invalid(format!("is not a report: {error}")))?;
    match value.get("schema").and_then(Value::as_u64) {
        Some(schema) if schema == u64::from(VERSION) => {}
        Some(schema) => {
            return Err(invalid(format!("is a report of schema {schema}, and this program reads {VERSION}")));
        }
        None => return Err(invalid("is not a report: it has no schema".to_owned())),
    }
    clean_all(&mut value);
    serde_json::from_value(value).map_err(|error| invalid(format!("is not a report: {error}")))
}

/// Replaces control characters in every string of a JSON value, for printing to a terminal.
pub(super) fn clean_all(value: &mut Value) {
    match value {
        Value::String(text) => clean(text),
        Value::Array(values) => values.iter_mut().for_each(clean_all),
        Value::Object(fields) => fields.values_mut().for_each(clean_all),
        _ => {}
    }
}
