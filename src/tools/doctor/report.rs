//! What was found, as data: read back from JSON it prints the same.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Environment;
use crate::driver::{Backend, DeviceUuid};

/// The version of the JSON object.
pub const SCHEMA: u32 = 1;

/// All that was found on a machine, or on both ends of a meeting.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: u32,
    /// What made it, such as `vmmfd 0.1.0`.
    pub tool: String,
    /// When: RFC 3339, in UTC, to the second.
    pub made: String,
    /// What the probes ran on.
    pub backend: Backend,
    /// Where, from this end.
    pub environment: Environment,
    /// The other end, if there were two.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<Environment>,
    /// The names of the probes that must be `ok` for the verdict.
    pub required: Vec<String>,
    /// What was found of the machine as a whole.
    pub machine: Vec<Finding>,
    /// What was found of each device.
    pub devices: Vec<DeviceReport>,
    /// What was found of each ordered pair of devices.
    pub pairs: Vec<PairReport>,
    /// The last line, in plain words.
    pub verdict: String,
    /// 0, 1 or 3, as the command exits.
    pub exit_code: u8,
}

/// One device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceReport {
    /// Its number in the process that made the report.
    pub ordinal: i32,
    /// Its name.
    pub name: String,
    /// Its identity.
    pub uuid: DeviceUuid,
    /// What was found, in the order of the probes.
    pub findings: Vec<Finding>,
}

/// One device using another's memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PairReport {
    /// The ordinal of the device that uses the memory.
    pub device: i32,
    /// The ordinal of the device that owns it.
    pub owner: i32,
    /// What was found, in the order of the probes.
    pub findings: Vec<Finding>,
}

/// What one probe found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// The probe's name, as `--only` takes it.
    pub probe: String,
    /// What came of it.
    pub status: Status,
    /// How long it took, in microseconds, if it ran.
    #[serde(default)]
    pub us: Option<u64>,
    /// What was seen: numbers and texts by name.
    #[serde(default)]
    pub figures: BTreeMap<String, Value>,
    /// What the driver or the system said, if it failed.
    #[serde(default)]
    pub error: Option<Seen>,
    /// What the result means, in one sentence.
    pub meaning: String,
    /// Why it is so, where a rule knows.
    #[serde(default)]
    pub cause: Option<String>,
    /// What to do, where a rule knows.
    #[serde(default)]
    pub remedy: Option<String>,
    /// The name of that rule.
    #[serde(default)]
    pub rule: Option<String>,
}

/// What came of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// It works.
    Ok,
    /// It should work and does not.
    Failed,
    /// The driver, the device or the backend has no such thing.
    Unsupported,
    /// It was not tried: the meaning says why.
    Skipped,
}

/// An error as it was seen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// The driver's call, or what the system was asked for, if it is known.
    #[serde(default)]
    pub call: Option<String>,
    /// The driver's number, if it was the driver.
    #[serde(default)]
    pub code: Option<u32>,
    /// The number's name.
    #[serde(default)]
    pub name: Option<String>,
    /// `timeout`, `signal`, `driver`, `system`, or the class of another error.
    pub kind: String,
    /// One line for a person.
    pub message: String,
}
