//! JSON Schemas of reports, derived from the types that are printed; and the shapes of the library's types in them.

use schemars::{JsonSchema, Schema, generate::SchemaSettings, transform::RecursiveTransform};
use serde::Serialize;
use serde_json::{Value, json};

/// The version of every report.
pub const VERSION: u32 = 1;

/// A report's name, and its JSON Schema.
pub type Named = (&'static str, fn() -> Value);

/// The JSON Schema of a report. It allows only the fields that the type has.
pub fn document<T: JsonSchema>() -> Value {
    let close = |schema: &mut Schema| {
        if schema.get("properties").is_some() {
            schema.insert("additionalProperties".to_owned(), json!(false));
        }
    };
    let settings = SchemaSettings::draft2020_12().for_serialize().with_transform(RecursiveTransform(close));
    let mut document = settings.into_generator().into_root_schema_for::<T>().to_value();
    document["properties"]["schema"] = json!({"description": "The version of this form.", "const": VERSION});
    document
}

// The types below are never made: they describe how types of the library are written.

/// Where the memory is.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    Cuda,
    Host,
}

/// How memory is shared.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Mechanism {
    Vmm,
    Pool,
    Legacy,
}

/// Which memory it is: the device's own, or the host's.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Location {
    Device,
    Host,
}

/// The class of an error. `object`: a broker has no such object, or another than was expected.
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

/// A time in UTC (RFC 3339), to the millisecond.
#[derive(Serialize, JsonSchema)]
pub struct Time(
    #[schemars(regex(pattern = "^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}[.][0-9]{3}Z$"))] String,
);

/// A user and a group.
#[derive(Serialize, JsonSchema)]
pub struct Owner {
    uid: u32,
    gid: u32,
}

/// A process that put or read an object.
#[derive(Serialize, JsonSchema)]
pub struct Process {
    /// Its number in the server's PID namespace, or 0.
    pid: i32,
    uid: u32,
    /// Its command, where the server could read it.
    #[serde(skip_serializing_if = "Option::is_none")]
    command: Option<String>,
}

/// How long a name stays.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "lowercase", tag = "kind")]
pub enum Lifetime {
    /// Until it is deleted.
    Deleted,
    /// While the connection lives that put it.
    Maker,
    /// For this many milliseconds after the last lease of it ended, or after it was put.
    Idle { ms: u64 },
    /// While the connection lives that put it, or a lease of it is held.
    Leased,
}

/// How many descriptors are used, and how many may be.
#[derive(Serialize, JsonSchema)]
pub struct Room {
    used: u64,
    allowed: u64,
}

/// An array in some memory.
#[derive(Serialize, JsonSchema)]
pub struct Array {
    /// The name of the element type in NumPy or ml_dtypes.
    dtype: String,
    /// Absent for little-endian elements.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String", extend("enum" = ["big"]))]
    byte_order: Option<String>,
    shape: Vec<u64>,
    /// In bytes; null for C order.
    strides: Option<Vec<i64>>,
    /// In bytes.
    offset: u64,
}
