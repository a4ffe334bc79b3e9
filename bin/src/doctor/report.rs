//! The doctor's report, as data: read back from JSON it prints the same.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use vmmfd::driver::{Backend, DeviceUuid};

use super::{Environment, ErrorDetails};
use crate::{
    schema::{self, VERSION},
    stamp,
};

/// Everything that was found on a machine, or on both ends of a meeting.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DoctorReport {
    pub schema: u32,
    /// The program that made it, such as `vmmfd 0.1.0`.
    pub tool: String,
    /// When it was made: RFC 3339, in UTC, to the second.
    pub made: String,
    /// The backend that the probes ran on.
    #[schemars(with = "schema::Backend")]
    pub backend: Backend,
    /// The environment of this end.
    pub environment: Environment,
    /// The environment of the other end, in a meeting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<Environment>,
    /// The names of the probes that must be `ok` for the verdict.
    pub required: Vec<String>,
    /// The findings about the machine as a whole.
    pub machine: Vec<Finding>,
    /// The findings about each device.
    pub devices: Vec<DeviceReport>,
    /// The findings about each ordered pair of devices.
    pub pairs: Vec<PairReport>,
    /// The conclusion, in one sentence.
    pub verdict: String,
    /// The exit code of the command: 0, 1 or 3.
    #[schemars(extend("enum" = [0, 1, 3]))]
    pub exit_code: u8,
}

impl DoctorReport {
    /// A report without findings, made now.
    pub(super) fn new(backend: Backend, environment: Environment, required: Vec<String>) -> Self {
        Self {
            schema: VERSION,
            tool: stamp::tool(),
            made: stamp::now(),
            backend,
            environment,
            peer: None,
            required,
            machine: Vec::new(),
            devices: Vec::new(),
            pairs: Vec::new(),
            verdict: String::new(),
            exit_code: 0,
        }
    }
}

/// The findings about one device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceReport {
    /// Its ordinal in the process that made the report.
    pub ordinal: i32,
    /// Its name.
    pub name: String,
    /// Its identity.
    #[schemars(with = "schema::Id")]
    pub uuid: DeviceUuid,
    /// The findings, in the order of the probes.
    pub findings: Vec<Finding>,
}

/// The findings about one device that uses another's memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PairReport {
    /// The ordinal of the device that uses the memory.
    pub device: i32,
    /// The ordinal of the device that owns it.
    pub owner: i32,
    /// The findings, in the order of the probes.
    pub findings: Vec<Finding>,
}

/// The result of one probe.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Finding {
    /// The probe's name, as in `--only`.
    pub probe: String,
    /// Whether the probe succeeded.
    pub status: Status,
    /// How long the probe ran, in microseconds; absent if it did not run.
    #[serde(default)]
    pub us: Option<u64>,
    /// What was measured: numbers and texts by name.
    #[serde(default)]
    pub figures: BTreeMap<String, Value>,
    /// The error of the driver or the system, if the probe failed with one.
    #[serde(default)]
    pub error: Option<ErrorDetails>,
    /// What the result means, in one sentence.
    pub meaning: String,
    /// Why it failed, if a rule matches.
    #[serde(default)]
    pub cause: Option<String>,
    /// What to do, if a rule matches.
    #[serde(default)]
    pub remedy: Option<String>,
    /// The name of that rule.
    #[serde(default)]
    pub rule: Option<String>,
}

/// The status of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// It works.
    Ok,
    /// It should work and does not.
    Failed,
    /// The driver, the device or the backend does not support it.
    Unsupported,
    /// It was not tried: the meaning says why.
    Skipped,
}
