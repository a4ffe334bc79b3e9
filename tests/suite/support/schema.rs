//! Validates JSON against a JSON Schema.

use serde_json::{Value, json};

/// Returns the first violation of the schema in `value`, with its path.
pub(crate) fn mismatch(schema: &Value, value: &Value) -> Option<String> {
    let validator = jsonschema::validator_for(schema).unwrap_or_else(|error| panic!("{error}: {schema}"));
    validator.iter_errors(value).next().map(|error| format!("{}: {error}", error.instance_path()))
}

/// The schema of a message's body, from the document of its protocol.
pub(crate) fn of_message(document: &Value, kind: &str) -> Value {
    json!({"$ref": format!("#/$defs/{kind}"), "$defs": document["$defs"]})
}
