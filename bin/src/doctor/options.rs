//! The options of the doctor.

use std::time::Duration;

use clap::{
    Args,
    builder::{PossibleValue, PossibleValuesParser},
};
use vmmfd::{driver::Backend, error::ParseError, memory::Selector};

use super::{Flag, PROBES, Probe, Scope};
use crate::cli::{BACKEND, parse_timeout};

/// Selects the probes of a run.
#[derive(Debug, Args)]
pub struct DoctorPlan {
    /// Probes to run, separated by commas [default: all but read-only-store]
    #[arg(long, value_name = "PROBE,...", value_delimiter = ',', value_parser = probe_names(), hide_possible_values = true,
        help_heading = "Probes")]
    pub only: Vec<String>,

    /// Run read-only-store too. It provokes a GPU fault, which the kernel logs as Xid 31: the monitoring of a fleet may then take the node
    /// out of service
    #[arg(long, help_heading = "Probes")]
    pub faults: bool,

    /// Time limit of each probe
    #[arg(long, value_name = "DURATION", default_value = "20s", value_parser = parse_timeout, help_heading = "Probes")]
    pub timeout: Duration,

    /// Backend of the memory: host tests this command, not a GPU. VMMFD_BACKEND is ignored, and there is no fallback
    #[arg(long, value_name = "BACKEND", value_parser = BACKEND, default_value = "cuda", help_heading = "Sharing")]
    pub backend: Backend,

    /// Device to test; a UUID may be abbreviated
    #[arg(long, value_name = "all|ORDINAL|UUID", default_value = "all", value_parser = parse_device, help_heading = "Sharing")]
    pub device: DeviceArg,
}

/// One device, or all. clap treats a plain `Option` as an option that may be omitted.
#[derive(Debug, Clone, Copy)]
pub struct DeviceArg(pub Option<Selector>);

fn parse_device(text: &str) -> Result<DeviceArg, ParseError> {
    match text {
        "all" => Ok(DeviceArg(None)),
        _ => text.parse().map(|selector| DeviceArg(Some(selector))),
    }
}

fn probe_names() -> PossibleValuesParser {
    PossibleValuesParser::new(PROBES.iter().map(|probe| PossibleValue::new(probe.name).help(probe.about)))
}

impl DoctorPlan {
    pub(super) fn wants(&self, probe: &Probe) -> bool {
        match probe.is(Flag::Faults) {
            true => self.faults,
            false => self.only.is_empty() || self.only.iter().any(|name| name == probe.name),
        }
    }

    /// The required probes: `driver`, and the named probes, or by default the probes of sharing by descriptor.
    pub(super) fn required(&self) -> Vec<String> {
        let required = |probe: &&Probe| match self.only.is_empty() {
            true => probe.is(Flag::Required),
            false => probe.name == "driver" || self.only.iter().any(|name| name == probe.name),
        };
        PROBES.iter().filter(required).map(|probe| probe.name.to_owned()).collect()
    }

    pub(super) fn probes(&self, scope: Scope) -> Vec<&'static Probe> {
        PROBES.iter().filter(|probe| probe.scope() == scope && self.wants(probe)).collect()
    }
}
