//! Reading a report that was made elsewhere.

use std::{fs::File, io::Read, path::Path};

use serde_json::Value;
use vmmfd::error::{Error, Result};

use super::{DoctorReport, clean::clean_all};
use crate::error::ToolError;
use crate::schema::VERSION;

/// More bytes than any report has.
const LARGEST: u64 = 16 << 20;

/// Reads a report from a file, without control characters in its texts. Blocks as reading a file does.
///
/// # Errors
/// [`ToolError::File`] if the file can't be read, is not a report, or is one of another schema.
pub fn read(path: &Path) -> Result<DoctorReport> {
    let unfit = |problem: String| Error::from(ToolError::File { path: path.to_owned(), problem });
    let mut text = Vec::new();
    let read = File::open(path).and_then(|file| file.take(LARGEST + 1).read_to_end(&mut text));
    read.map_err(|error| unfit(format!("can't be read: {error}")))?;
    if text.len() as u64 > LARGEST {
        return Err(unfit(format!("is not a report: it has more than {LARGEST} bytes")));
    }
    let mut value: Value = serde_json::from_slice(&text).map_err(|error| unfit(format!("is not a report: {error}")))?;
    match value.get("schema").and_then(Value::as_u64) {
        Some(schema) if schema == u64::from(VERSION) => {}
        Some(schema) => return Err(unfit(format!("is a report of schema {schema}, and this program reads {VERSION}"))),
        None => return Err(unfit("is not a report: it has no schema".to_owned())),
    }
    clean_all(&mut value);
    serde_json::from_value(value).map_err(|error| unfit(format!("is not a report: {error}")))
}
