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
    document["properties"]["schema"] = json!({"description": "The version of this form.", "const": VERSION});
    document
}

// The types below are never constructed: they describe the JSON form of library types.

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

/// The location of the memory: the device or the host.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Location {
    Device,
    Host,
}

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

/// A process that put or leased an object.
#[derive(Serialize, JsonSchema)]
pub struct Process {
    /// The pid in the server's PID namespace, or 0.
    pid: i32,
    uid: u32,
    /// The command, if the server could read it.
    #[serde(skip_serializing_if = "Option::is_none")]
    command: Option<String>,
}

/// The lifetime of a name.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "lowercase", tag = "kind")]
pub enum Lifetime {
    /// Until it is deleted.
    Deleted,
    /// While the connection that put it lives.
    Maker,
    /// For this many milliseconds after its last lease was released, or after it was put.
    Idle { ms: u64 },
    /// While the connection that put it lives, or a lease is held.
    Leased,
}

/// The number of used descriptors, and the limit.
#[derive(Serialize, JsonSchema)]
pub struct Room {
    used: u64,
    allowed: u64,
}

/// An array in memory.
#[derive(Serialize, JsonSchema)]
pub struct Array {
    /// The element type's name in NumPy or ml_dtypes.
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
