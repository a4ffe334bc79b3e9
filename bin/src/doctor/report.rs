//! The report as data. Parsed from JSON, it prints the same text.

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

/// The report on a machine, or on both sides of a meeting.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DoctorReport {
    pub schema: u32,
    /// The program that created it, such as `vmmfd 0.1.0`.
    pub tool: String,
    /// The time of creation in UTC (RFC 3339, seconds).
    pub made: String,
    /// The backend under test.
    pub backend: Backend,
    /// The environment of this side.
    pub environment: Environment,
    /// The environment of the peer, in a meeting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<Environment>,
    /// The probes that must be `ok` for a positive verdict.
    pub required: Vec<String>,
    /// The findings about the whole machine.
    pub machine: Vec<Finding>,
    /// The findings about each device.
    pub devices: Vec<DeviceReport>,
    /// The findings about each ordered pair of devices.
    pub pairs: Vec<PairReport>,
    /// The verdict in one sentence.
    pub verdict: String,
    /// The exit code of the command: 0, 1 or 3.
    #[schemars(extend("enum" = [0, 1, 3]))]
    pub exit_code: u8,
}

impl DoctorReport {
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

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceReport {
    /// The ordinal in the process that created the report.
    pub ordinal: i32,
    pub name: String,
    #[schemars(with = "schema::Id")]
    pub uuid: DeviceUuid,
    /// The findings in the order of the probes.
    pub findings: Vec<Finding>,
}

/// The findings about a device that uses another device's memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PairReport {
    /// The ordinal of the device that uses the memory.
    pub device: i32,
    /// The ordinal of the device that owns the memory.
    pub owner: i32,
    /// The findings in the order of the probes.
    pub findings: Vec<Finding>,
}

/// The result of one probe.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Finding {
    /// The name as in `--only`.
    pub probe: String,
    pub status: Status,
    /// The duration in microseconds; absent if the probe did not run.
    #[serde(default)]
    pub us: Option<u64>,
    /// The measured values by name.
    #[serde(default)]
    pub figures: BTreeMap<String, Value>,
    /// The error of the driver or the system.
    #[serde(default)]
    pub error: Option<ErrorDetails>,
    /// The meaning of the result in one sentence.
    pub meaning: String,
    /// The cause, if a rule matches.
    #[serde(default)]
    pub cause: Option<String>,
    /// The remedy, if a rule matches.
    #[serde(default)]
    pub remedy: Option<String>,
    /// The name of the matching rule.
    #[serde(default)]
    pub rule: Option<String>,
}

impl Finding {
    pub(super) fn new(probe: &str, status: Status, meaning: impl Into<String>) -> Self {
        Self {
            probe: probe.to_owned(),
            status,
            us: None,
            figures: BTreeMap::new(),
            error: None,
            meaning: meaning.into(),
            cause: None,
            remedy: None,
            rule: None,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Ok,
    /// It should work but does not.
    Failed,
    /// The driver, the device or the backend does not support it.
    Unsupported,
    /// Not tested; `meaning` has the reason.
    Skipped,
}
