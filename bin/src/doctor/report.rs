//! The report as data. Parsed from JSON, it prints the same text.

use std::{collections::BTreeMap, fs::File, io::Read};

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;

use crate::{doctor::prelude::*, error::ToolError, schema::VERSION, stamp};

/// The report on a machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DoctorReport {
    pub schema: u32,
    /// The program that created it, such as `vmmfd 0.1.0`.
    pub tool: String,
    /// The time of creation in UTC (RFC 3339, seconds).
    pub made: String,
    /// The backend under test.
    pub backend: Backend,
    pub environment: Environment,
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
            required,
            machine: Vec::new(),
            devices: Vec::new(),
            pairs: Vec::new(),
            verdict: String::new(),
            exit_code: 0,
        }
    }

    /// All findings in order.
    pub(super) fn findings(&self) -> impl Iterator<Item = &Finding> {
        let devices = self.devices.iter().flat_map(|device| &device.findings);
        self.machine.iter().chain(devices).chain(self.pairs.iter().flat_map(|pair| &pair.findings))
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceReport {
    /// The ordinal in the process that created the report.
    pub ordinal: i32,
    pub name: String,
    /// The UUID, with the backend's prefix.
    pub uuid: String,
    /// The findings in the order of the probes.
    #[serde(default)]
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

/// Measured values by name.
pub(super) type Figures = BTreeMap<String, Value>;

/// The result of one probe.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Finding {
    /// The name as in `--only`.
    pub probe: String,
    pub status: Status,
    /// The duration in microseconds; absent if the probe did not run.
    pub us: Option<u64>,
    /// The measured values by name.
    #[serde(default)]
    pub figures: Figures,
    /// The error of the driver or the system.
    pub error: Option<ErrorDetails>,
    /// The meaning of the result in one sentence.
    pub meaning: String,
    /// The cause, if a rule matches.
    pub cause: Option<String>,
    /// The remedy, if a rule matches.
    pub remedy: Option<String>,
    /// The name of the matching rule.
    pub rule: Option<String>,
}

impl Finding {
    pub(super) fn new(probe: &str, status: Status, meaning: impl Into<String>) -> Self {
        Self { probe: probe.to_owned(), status, meaning: meaning.into(), ..Self::default() }
    }

    /// Adds a measured value.
    pub(super) fn figure(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.figures.insert(name.to_owned(), value.into());
        self
    }

    pub(super) fn with_error(self, error: ErrorDetails) -> Self {
        Self { error: Some(error), ..self }
    }

    /// The driver library, in a finding of the `driver` probe.
    pub(super) fn library(&self) -> Option<&Path> {
        self.figures.get("library")?.as_str().map(Path::new)
    }

    /// The devices in a finding of the `driver` probe.
    pub(super) fn devices(&self) -> Vec<DeviceReport> {
        self.figures.get("devices").and_then(|devices| serde_json::from_value(devices.clone()).ok()).unwrap_or_default()
    }

    pub(super) fn timed_out(&self) -> bool {
        self.error.as_ref().is_some_and(|error| error.kind == "timeout")
    }
}

/// A finding of a probe that still lacks its name.
pub(super) fn ok(meaning: impl Into<String>) -> Finding {
    Finding::new("", Status::Ok, meaning)
}

pub(super) fn failed(meaning: impl Into<String>) -> Finding {
    Finding::new("", Status::Failed, meaning)
}

pub(super) fn unsupported(meaning: impl Into<String>) -> Finding {
    Finding::new("", Status::Unsupported, meaning)
}

pub(super) fn skipped(meaning: impl Into<String>) -> Finding {
    Finding::new("", Status::Skipped, meaning)
}

/// The finding, or an error whose meaning depends on the probe.
pub(super) type ProbeResult = std::result::Result<Finding, ErrorDetails>;

/// Runs a step and returns its duration in microseconds.
pub(super) fn timed<T>(step: impl FnOnce() -> Result<T>) -> Result<(T, u64)> {
    let started = Instant::now();
    let result = step()?;
    Ok((result, micros(started.elapsed())))
}

pub(super) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Ok,
    /// It should work but does not.
    Failed,
    /// The driver, the device or the backend does not support it.
    Unsupported,
    /// Not tested; `meaning` has the reason.
    #[default]
    Skipped,
}

/// Reads a report from a file. Its texts may have control characters. Blocks on file I/O.
///
/// # Errors
/// [`ToolError::File`] if the file can't be read, is not a report, or has another schema version.
pub fn read(path: &Path) -> Result<DoctorReport> {
    /// In bytes.
    const LARGEST: u64 = 16 << 20;
    let parse = || {
        let mut text = Vec::new();
        let read = File::open(path).and_then(|file| file.take(LARGEST + 1).read_to_end(&mut text));
        read.map_err(|error| format!("can't be read: {error}"))?;
        if text.len() as u64 > LARGEST {
            return Err(format!("is not a report: it has more than {LARGEST} bytes"));
        }
        let no_report = |error: serde_json::Error| format!("is not a report: {error}");
        let value: Value = serde_json::from_slice(&text).map_err(no_report)?;
        match value.get("schema").and_then(Value::as_u64) {
            Some(schema) if schema == u64::from(VERSION) => serde_json::from_value(value).map_err(no_report),
            Some(schema) => Err(format!("is a report of schema {schema}, and this program reads {VERSION}")),
            None => Err("is not a report: it has no schema".to_owned()),
        }
    };
    parse().map_err(|problem| ToolError::File { path: path.to_owned(), problem }.into())
}
