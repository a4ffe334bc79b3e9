//! `recall`: asks the holders of an object to give it up.

use vmmfd::{
    broker::{HeldLease, Recall, RecallHolder, RecallOf},
    error::RefusalCode,
    internals::refusal,
};

use super::{
    MeetBroker, count,
    fields::{field, or_dash},
    who::UserNames,
};
use crate::{
    cli::{Column, Table, prelude::*, stdout_width},
    units::about,
};

/// Asks the holders of an object to release it, and shows which did
///
/// Only the object's owner, the broker's user and root may do this. No process can be forced: if it ignores the request, it keeps the memory
/// until it exits. A process has acknowledged when its lease is gone, also if it exited, but never because the time is over. If the name was
/// deleted, all of its versions are recalled that processes still hold.
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("no process holds it any more", "no such object or version"; 2 4 5 130))]
pub(in super::super) struct RecallOptions {
    /// Name of the object
    #[arg(value_name = "NAME")]
    name: String,

    /// Version to recall [default: the current one, or all of a deleted name]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Object")]
    version: Option<u64>,

    /// Recall all versions except the current one
    #[arg(long, conflicts_with = "version", help_heading = "Object")]
    earlier: bool,

    /// Longest wait for the processes: 500ms, 30s, 2m
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = parse_timeout, help_heading = "Object")]
    within: Duration,

    #[command(flatten)]
    meet: MeetBroker,
}

#[derive(Debug, Serialize, JsonSchema)]
struct RecallReport {
    name: String,
    #[serde(flatten)]
    recall: Recall,
    /// The error that the command exits with.
    error: Option<ErrorSummary>,
}

impl Tool for RecallOptions {
    const NAME: &'static str = "recall";

    const REPORTS: &'static [Named] = &[("recall", document::<Stamped<RecallReport>>)];

    fn run(&self, Running { output, cancel, .. }: Running<'_>) -> anyhow::Result<ToolOutput> {
        let of = match (self.version, self.earlier) {
            (Some(version), _) => RecallOf::Version(version),
            (None, true) => RecallOf::Earlier,
            (None, false) => RecallOf::Current,
        };
        let recall = self.meet.connect(cancel)?.recall(&self.name, of, self.within)?;
        let error = incomplete(&recall, self.within);
        let exit = error.as_ref().map_or(Exit::Verified, Exit::of);
        let error = error.as_ref().map(ErrorSummary::complained);
        let report = RecallReport { name: self.name.clone(), recall, error };
        Ok(ToolOutput::of(output, exit, report, |report, _| render(&report.recall)))
    }
}

/// The result of a recall that follows another step, and the error to exit with.
pub(super) fn outcome(result: Result<Recall>, within: Duration) -> (Option<Recall>, Option<Error>) {
    let error = result.as_ref().ok().and_then(|recall| incomplete(recall, within));
    match result {
        Ok(recall) => (Some(recall), error),
        Err(error) => (None, Some(error)),
    }
}

/// The error of a recall that some holders have not acknowledged.
fn incomplete(recall: &Recall, within: Duration) -> Option<Error> {
    let left = recall.holders.iter().filter(|holder| !holder.acknowledged).count();
    let leases = count(recall.holders.len() as u64, "lease");
    let within = humantime::format_duration(within);
    let message = format!("{left} of {leases} did not end within {within}, and can't be forced to: end the processes");
    (left > 0).then(|| refusal(RefusalCode::Timeout, message).into())
}

/// The table of holders, and whether the memory is free.
pub(super) fn render(recall: &Recall) -> String {
    let Recall { holders, free, kept, .. } = recall;
    let mut users = UserNames::default();
    let columns = [
        Column::left("ACKNOWLEDGED"),
        Column::right("PID"),
        Column::left("USER").optional(),
        Column::left("COMMAND").optional(),
        Column::right("SIZE"),
        Column::right("VERSION"),
        Column::left("NAME"),
    ];
    let row = |RecallHolder { lease, acknowledged, .. }: &RecallHolder| {
        let acknowledged = if *acknowledged { "yes" } else { "no" }.to_owned();
        let HeldLease { name, version, pid, uid, command, size, .. } = lease;
        let (command, size) = (or_dash(command), about(*size));
        [acknowledged, pid.to_string(), users.of(*uid), command, size, version.to_string(), name.clone()]
    };
    let table = Table::new(columns, holders.iter().map(row));
    let rows = if holders.is_empty() { String::new() } else { table.render(stdout_width()) };
    let state = match (free, kept) {
        (true, _) => "yes",
        (false, true) => "no: the broker keeps it under its name",
        (false, false) => "no: processes hold it",
    };
    rows + &field("free", state)
}
