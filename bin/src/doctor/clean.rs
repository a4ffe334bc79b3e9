//! Texts that come from outside, made fit for a terminal.

use serde_json::Value;

use vmmfd::internals::clean;

/// Replaces the control characters in every text of a JSON value: the texts are printed to a terminal.
pub(super) fn clean_all(value: &mut Value) {
    match value {
        Value::String(text) => clean(text),
        Value::Array(values) => values.iter_mut().for_each(clean_all),
        Value::Object(fields) => fields.values_mut().for_each(clean_all),
        _ => {}
    }
}
