//! JSON Schemas of reports, derived from the printed types, and of library types in them.

use schemars::{JsonSchema, Schema, generate::SchemaSettings, transform::RecursiveTransform};
use serde::Serialize;
use serde_json::{Value, json};

/// The version of all reports.
pub const VERSION: u32 = 1;

/// The name of a report, and its JSON Schema.
pub type Named = (&'static str, fn() -> Value);

/// The JSON Schema of a report. Additional fields are not allowed.
pub fn document<T: JsonSchema>() -> Value {
    let close = |schema: &mut Schema| {
        if schema.get("properties").is_some() {
            schema.insert("additionalProperties".to_owned(), json!(false));
        }
    };
    let settings = SchemaSettings::draft2020_12().for_serialize().with_transform(RecursiveTransform(close));
    let mut document = settings.into_generator().into_root_schema_for::<T>().to_value();
    if let Some(device) = document.pointer_mut("/$defs/DeviceIdentity/properties/uuid/pattern") {
        // Messages have no prefix.
        *device = json!("^(GPU|HOST)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$");
    }
    document["properties"]["schema"] = json!({"description": "The version of this form.", "const": VERSION});
    document
}

// The types below are never constructed: they describe the JSON form of library types.

/// The class of an error. `object`: the broker has no such object, or a different one than expected.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    Mismatch,
    Usage,
    Unsupported,
    Object,
    Peer,
    System,
    Interrupted,
}

/// A UUID.
#[derive(Serialize, JsonSchema)]
pub struct Id(#[schemars(regex(pattern = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"))] String);
