//! `ls`: lists objects.

use clap::Args;
use schemars::JsonSchema;
use serde::Serialize;
use vmmfd::{
    broker::{Owner, Summary},
    channel::Cancel,
};

use super::{
    DeviceSize, MeetBroker, devices_in_short,
    fields::{age, time},
    total,
};
use crate::{
    cli::{
        Column, Exit, Output, Table, Tool, ToolOutput,
        exit::exit_codes,
        output::{Progress, json_line},
        stdout_width,
    },
    schema::{self, Named, VERSION, document},
    stamp,
    units::about,
};

/// Lists the objects of a broker that this user may read
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("listed, even if nothing matches"; 2 4 5 130))]
pub(in super::super) struct LsOptions {
    /// Only objects whose names begin with PREFIX
    #[arg(value_name = "PREFIX", default_value = "", hide_default_value = true)]
    prefix: String,

    #[command(flatten)]
    meet: MeetBroker,

    /// Show a table: SIZE is the data, MEMORY the memory of all devices, both as claimed by the makers
    #[arg(short, long, help_heading = "Output")]
    long: bool,

    #[command(flatten)]
    output: Output,
}

#[derive(Debug, Serialize, JsonSchema)]
struct LsReport {
    schema: u32,
    tool: String,
    objects: Vec<ObjectLine>,
}

/// An object in the JSON of `ls` and `stat`. Sizes are in bytes, as claimed.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct ObjectLine {
    pub(super) name: String,
    #[schemars(range(min = 1))]
    pub(super) version: u64,
    #[schemars(with = "schema::Id")]
    pub(super) id: String,
    pub(super) size: u64,
    /// The UUID of the device, unless there are several.
    pub(super) device: Option<String>,
    /// The memory on each device.
    pub(super) devices: Vec<DeviceSize>,
    pub(super) backend: String,
    pub(super) parts: u64,
    pub(super) segments: u64,
    pub(super) arrays: u64,
    pub(super) leases: u64,
    #[schemars(with = "schema::Owner")]
    pub(super) owner: Owner,
    /// In octal digits.
    #[schemars(regex(pattern = "^[0-7]{4}$"))]
    pub(super) mode: String,
    #[schemars(with = "schema::Time")]
    pub(super) created: String,
    #[serde(skip)]
    pub(super) created_ms: u64,
}

impl From<&Summary> for ObjectLine {
    fn from(of: &Summary) -> Self {
        let devices: Vec<DeviceSize> = of.devices.iter().map(DeviceSize::from).collect();
        let device = match devices.as_slice() {
            [one] => Some(one.uuid.clone()),
            _ => None,
        };
        Self {
            name: of.name.clone(),
            version: of.version,
            id: of.id.clone(),
            size: of.size,
            device,
            devices,
            backend: of.backend.clone(),
            parts: of.parts,
            segments: of.segments,
            arrays: of.arrays,
            leases: of.leases,
            owner: of.owner,
            mode: format!("{:04o}", of.mode),
            created: time(of.created_ms),
            created_ms: of.created_ms,
        }
    }
}

impl Tool for LsOptions {
    const NAME: &'static str = "ls";

    const REPORTS: &'static [Named] = &[("ls", document::<LsReport>)];

    fn output(&self) -> &Output {
        &self.output
    }

    fn run(&self, cancel: &Cancel, _progress: &Progress) -> anyhow::Result<ToolOutput> {
        let objects = self.meet.connect(cancel)?.list(&self.prefix)?;
        let objects: Vec<ObjectLine> = objects.iter().map(ObjectLine::from).collect();
        let text = match (self.output.json, self.long) {
            (true, _) => json_line(&LsReport { schema: VERSION, tool: stamp::tool(), objects }),
            (false, _) if objects.is_empty() => {
                self.output.notice(&no_match(&self.prefix));
                String::new()
            }
            (false, true) => table(&objects).render(stdout_width()),
            (false, false) => objects.iter().map(|object| format!("{}\n", object.name)).collect(),
        };
        Ok(ToolOutput { text, exit: Exit::Verified })
    }
}

/// The notice that no object matches a prefix.
pub(super) fn no_match(prefix: &str) -> String {
    match prefix {
        "" => "the broker has no objects for this user".to_owned(),
        _ => format!("no match: no object name begins with `{prefix}`"),
    }
}

fn table(objects: &[ObjectLine]) -> Table<'static, 9> {
    let mut table = Table::new([
        Column::left("MODE").optional(),
        Column::right("UID").optional(),
        Column::right("VERSION"),
        Column::right("SIZE"),
        Column::right("MEMORY").optional(),
        Column::right("LEASES").optional(),
        Column::left("DEVICE").optional(),
        Column::right("AGE").optional(),
        Column::left("NAME"),
    ]);
    for object in objects {
        table.row([
            object.mode.clone(),
            object.owner.uid.to_string(),
            object.version.to_string(),
            about(object.size),
            about(total(&object.devices)),
            object.leases.to_string(),
            devices_in_short(&object.devices),
            age(object.created_ms),
            object.name.clone(),
        ]);
    }
    table
}
