//! `ls`: lists objects.

use vmmfd::broker::Summary;

use super::{MeetBroker, devices_in_short, fields::age, total};
use crate::{
    cli::{Column, Table, prelude::*, stdout_width},
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
}

#[derive(Debug, Serialize, JsonSchema)]
struct LsReport {
    objects: Vec<Summary>,
}

impl Tool for LsOptions {
    const NAME: &'static str = "ls";

    const REPORTS: &'static [Named] = &[("ls", document::<Stamped<LsReport>>)];

    fn run(&self, Running { output, cancel, .. }: Running<'_>) -> anyhow::Result<ToolOutput> {
        let objects = self.meet.connect(cancel)?.list(&self.prefix)?;
        if objects.is_empty() {
            output.notice(&no_match(&self.prefix));
        }
        let text = |report: &LsReport, _| match self.long && !report.objects.is_empty() {
            true => table(&report.objects).render(stdout_width()),
            false => report.objects.iter().map(|object| format!("{}\n", object.name)).collect(),
        };
        Ok(ToolOutput::of(output, Exit::Verified, LsReport { objects }, text))
    }
}

/// The permissions in octal digits, as of a file.
pub(super) fn mode(object: &Summary) -> String {
    format!("{:04o}", object.mode)
}

/// The notice that no object matches a prefix.
pub(super) fn no_match(prefix: &str) -> String {
    match prefix {
        "" => "the broker has no objects for this user".to_owned(),
        _ => format!("no match: no object name begins with `{prefix}`"),
    }
}

fn table(objects: &[Summary]) -> Table<'static, 9> {
    let columns = [
        Column::left("MODE").optional(),
        Column::right("UID").optional(),
        Column::right("VERSION"),
        Column::right("SIZE"),
        Column::right("MEMORY").optional(),
        Column::right("LEASES").optional(),
        Column::left("DEVICE").optional(),
        Column::right("AGE").optional(),
        Column::left("NAME"),
    ];
    let row = |object: &Summary| {
        let Summary { version, size, leases, devices, created_ms, owner, name, .. } = object;
        let [uid, version, leases] = [u64::from(owner.uid), *version, *leases].map(|number| number.to_string());
        let (size, memory, devices) = (about(*size), about(total(devices)), devices_in_short(devices));
        [mode(object), uid, version, size, memory, leases, devices, age(*created_ms), name.clone()]
    };
    Table::new(columns, objects.iter().map(row))
}
