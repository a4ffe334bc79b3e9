//! `devices`: the visible devices and the mechanisms that each supports.

use std::fmt::Write;

use vmmfd::{
    driver::{Choice, open},
    error::ErrorKind,
    memory::{Allocation, Device, Shared, Spec},
};

use super::{leave_open, values::CHOICE};
use crate::{
    cli::prelude::*,
    units::{self, about},
    verbs::HasVerbs,
};

/// Lists the devices, and exports one granule with each mechanism
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("listed"; 2 3 5 130))]
pub(super) struct DevicesOptions {
    /// Backend of the memory
    #[arg(long, value_name = "BACKEND",
        value_parser = CHOICE, env = "VMMFD_BACKEND", default_value = "auto", help_heading = "Sharing")]
    backend: Choice,
}

#[derive(Debug, Serialize, JsonSchema)]
struct DevicesReport {
    backend: Backend,
    /// The reason why it is the host backend, if the user did not choose it.
    fallback: Option<String>,
    devices: Vec<DeviceLine>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct DeviceLine {
    ordinal: i32,
    uuid: String,
    name: String,
    /// Bytes, as the driver counts them.
    memory: Option<u64>,
    free: Option<u64>,
    granularity: Option<u64>,
    sharing: Sharing,
}

/// The result of an allocation and export with each mechanism.
#[derive(Debug, Serialize, JsonSchema)]
struct Sharing {
    legacy: Tried,
    pool: Tried,
    vmm: Tried,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Tried {
    works: bool,
    error: Option<String>,
}

impl Tried {
    fn of(result: Result<(), Error>) -> Result<Self, Error> {
        match result {
            Err(error) if error.kind() == ErrorKind::Interrupted => Err(error),
            result => Ok(Self { works: result.is_ok(), error: result.err().map(|error| error.in_full()) }),
        }
    }
}

/// Tests one device. Blocks for about 100 ms while the driver creates its context.
fn tried(device: &Device) -> Result<DeviceLine, Error> {
    let info = device.memory_info()?;
    let granularity = device.granularity();
    let size = granularity.as_ref().copied().unwrap_or(1);
    let vmm = Allocation::create(device, size).and_then(|memory| memory.export().map(drop));
    let pool = device.verbs().pools().and_then(|_| Shared::create(device, Spec::pool(size)));
    let legacy = device.verbs().legacy().and_then(|_| Shared::create(device, Spec::legacy(size)));
    let sharing =
        Sharing { vmm: Tried::of(vmm)?, pool: Tried::of(pool.map(drop))?, legacy: Tried::of(legacy.map(drop))? };
    Ok(DeviceLine {
        ordinal: device.ordinal(),
        uuid: device.prefixed_uuid(),
        name: device.name().to_owned(),
        memory: Some(info.total),
        free: Some(info.free),
        granularity: granularity.ok(),
        sharing,
    })
}

impl Tool for DevicesOptions {
    const NAME: &'static str = "devices";

    const REPORTS: &'static [Named] = &[("devices", document::<Stamped<DevicesReport>>)];

    fn run(&self, Running { output, cancel, progress }: Running<'_>) -> anyhow::Result<ToolOutput> {
        progress.step("starting the driver", 0, 1);
        let opened = open(self.backend)?;
        leave_open(&opened.driver);
        let all = Device::all(&opened.driver)?;
        let mut devices = Vec::new();
        for (number, device) in all.iter().enumerate() {
            cancel.check()?;
            progress.step(device.name(), number, all.len());
            devices.push(tried(device)?);
        }
        progress.close();
        let report = DevicesReport {
            backend: opened.driver.backend(),
            fallback: output.notice_fallback(opened.fallback.as_ref()),
            devices,
        };
        Ok(ToolOutput::of(output, Exit::Verified, report, render))
    }
}

fn render(report: &DevicesReport, verbose: bool) -> String {
    let mut text = String::new();
    for device in &report.devices {
        let DeviceLine { ordinal, uuid, name, memory, free, granularity, sharing } = device;
        let size = |bytes: Option<u64>| bytes.map_or_else(|| "unknown".to_owned(), about);
        // Writing to a string can't fail.
        let _ = writeln!(text, "{ordinal}  {}", units::device(name, uuid, verbose));
        let _ =
            writeln!(text, "   memory   {}, {} free, granularity {}", size(*memory), size(*free), size(*granularity));
        for (mechanism, tried) in [("vmm", &sharing.vmm), ("pool", &sharing.pool), ("legacy", &sharing.legacy)] {
            let result = tried.error.as_ref().map_or_else(|| "yes".to_owned(), |error| format!("no: {error}"));
            let _ = writeln!(text, "   {mechanism:<7}  {result}");
        }
    }
    text
}
