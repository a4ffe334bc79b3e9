//! Holds JSON against a JSON Schema.

use serde_json::Value;

/// The first thing in `value` that is not as the schema says, with its place.
pub(crate) fn mismatch(schema: &Value, value: &Value) -> Option<String> {
    let validator = jsonschema::validator_for(schema).unwrap_or_else(|error| panic!("{error}: {schema}"));
    validator.iter_errors(value).next().map(|error| format!("{}: {error}", error.instance_path()))
}
