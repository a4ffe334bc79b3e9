//! The JSON Schemas of the messages. The pages are the contract: they have rules that no schema expresses.

use schemars::{Schema, SchemaGenerator, generate::SchemaSettings};
use serde_json::{Map, Value, json};

/// Makes a document of the bodies: the kind, the name and the schema of each.
pub(crate) fn document(bodies: impl Fn(&mut SchemaGenerator) -> Vec<(u16, &'static str, Schema)>) -> Value {
    let mut generator = SchemaSettings::draft2020_12().for_deserialize().into_generator();
    let messages = bodies(&mut generator);
    // A type's name begins with a capital letter, so a message's name is never that of a type.
    let mut definitions: Map<String, Value> = generator.take_definitions(true);
    for (kind, name, schema) in messages {
        definitions
            .insert(name.to_owned(), json!({"title": format!("{name}, kind {kind}"), "$ref": schema.get("$ref")}));
    }
    let mut document = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "description": "The body of each message is in $defs under the message's name.",
        "$defs": definitions,
    });
    plain(&mut document);
    document
}

/// Removes the marks of links to Rust types from the descriptions.
fn plain(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            if let Some(Value::String(text)) = fields.get_mut("description") {
                *text = text
                    .replace("[`super::", "`")
                    .replace("[`crate::wire::", "`")
                    .replace("[`", "`")
                    .replace("`]", "`");
            }
            fields.values_mut().for_each(plain);
        }
        Value::Array(items) => items.iter_mut().for_each(plain),
        _ => {}
    }
}
