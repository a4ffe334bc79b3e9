//! `rm`: deletes objects.

use std::{collections::BTreeSet, env, ffi::OsString};

use clap::{ArgGroup, builder::NonEmptyStringValueParser};
use vmmfd::{
    broker::{Client, HeldLease, Recall, Summary},
    error::RefusalCode,
    internals::refusal,
};

use super::{
    MeetBroker, count,
    fields::field,
    ls::no_match,
    recall::{outcome, render},
    who::held,
};
use crate::{
    cli::{Output, layout, prelude::*},
    units::about,
};

/// Deletes objects
///
/// Readers keep their leases, and the broker frees the memory after the last lease: the output lists the remaining leases. --recall asks
/// the readers to end them. With several names, each deletion is tried, and the exit code names the first failure.
///
/// A prefix is deleted in two steps: --dry-run lists the objects and prints the command that deletes them, with a code in --confirm. If an
/// object was replaced, deleted or added in between, nothing is deleted.
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("deleted, or listed by --dry-run", "no object has the name or the prefix"; 2 4 5 130))]
#[command(group = ArgGroup::new("step").args(["dry_run", "confirm"]))]
pub(in super::super) struct RmOptions {
    /// Names of the objects
    #[arg(value_name = "NAME", required_unless_present = "prefix")]
    names: Vec<String>,

    /// All readable objects whose names begin with PREFIX; needs --dry-run or --confirm
    #[arg(long, value_name = "PREFIX", value_parser = NonEmptyStringValueParser::new(), conflicts_with = "names",
        requires = "step", help_heading = "Prefix")]
    prefix: Option<String>,

    /// List the objects and delete nothing; with --prefix, print the command that deletes them
    #[arg(long, help_heading = "Object")]
    dry_run: bool,

    // clap ignores a `requires` on a conflict.
    /// Delete the objects that --dry-run listed with this code
    #[arg(long, value_name = "CODE", requires = "prefix", conflicts_with = "names", help_heading = "Prefix")]
    confirm: Option<String>,

    /// Ask the processes with leases of the deleted objects to end them, and wait: see recall
    #[arg(long, conflicts_with = "dry_run", help_heading = "Object")]
    recall: bool,

    /// Longest wait of --recall: 500ms, 30s, 2m
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = parse_timeout, requires = "recall",
        help_heading = "Object")]
    within: Duration,

    #[command(flatten)]
    meet: MeetBroker,
}

#[derive(Debug, Default, Serialize, JsonSchema)]
struct RmReport {
    deleted: Vec<String>,
    /// The leases that still hold memory of the deleted names.
    held: Vec<HeldLease>,
    /// The result of --recall, if leases held memory of the deleted names.
    recall: Option<Recall>,
    failed: Vec<Failed>,
    dry_run: Option<Listed>,
    /// The error that the command exits with.
    error: Option<ErrorSummary>,
}

/// The objects that would be deleted.
#[derive(Debug, Serialize, JsonSchema)]
struct Listed {
    objects: Vec<Summary>,
    /// The code for --confirm, of exactly these versions; null without a prefix.
    #[schemars(regex(pattern = "^[0-9a-f]{12}$"))]
    confirm: Option<String>,
}

impl Listed {
    fn of(client: &Client, prefix: &str) -> Result<Self> {
        let objects = client.list(prefix)?;
        if objects.is_empty() {
            return Err(refusal(RefusalCode::Absent, no_match(prefix)).into());
        }
        let mut digest = blake3::Hasher::new();
        for object in &objects {
            // Names and UUIDs contain no zero byte.
            digest.update(format!("{}\0{}\0", object.name, object.id).as_bytes());
        }
        let confirm = digest.finalize().to_hex()[..12].to_owned();
        Ok(Self { objects, confirm: Some(confirm) })
    }

    fn render(&self) -> String {
        let line = |object: &Summary| {
            let Summary { name, version, size, leases, owner, .. } = object;
            let leases = count(*leases, "lease");
            field("listed", format!("{name} version {version}: {}, {leases}, uid {}", about(*size), owner.uid))
        };
        let confirm = self.confirm.iter().map(|code| field("confirm", "with this command:") + &confirming(code));
        self.objects.iter().map(line).chain(confirm).collect()
    }
}

/// This command with `--confirm` in the place of `--dry-run`, to paste into a shell.
fn confirming(code: &str) -> String {
    let word = |word: OsString| match word.to_string_lossy().as_ref() {
        "--dry-run" => format!("--confirm {code}"),
        word => layout::quoted(word),
    };
    env::args_os().map(word).collect::<Vec<_>>().join(" ") + "\n"
}

#[derive(Debug, Serialize, JsonSchema)]
struct Failed {
    name: String,
    error: ErrorSummary,
}

impl Tool for RmOptions {
    const NAME: &'static str = "rm";

    const REPORTS: &'static [Named] = &[("rm", document::<Stamped<RmReport>>)];

    fn run(&self, Running { output, cancel, .. }: Running<'_>) -> anyhow::Result<ToolOutput> {
        let client = self.meet.connect(cancel)?;
        let Some(prefix) = &self.prefix else { return Ok(self.each(&client, output, self.names.clone())) };
        let listed = Listed::of(&client, prefix)?;
        if self.dry_run {
            return Ok(self.printed(output, RmReport { dry_run: Some(listed), ..RmReport::default() }, Exit::Verified));
        }
        self.check_confirmed(prefix, &listed)?;
        Ok(self.each(&client, output, listed.objects.into_iter().map(|object| object.name).collect()))
    }
}

impl RmOptions {
    fn printed(&self, output: &Output, report: RmReport, exit: Exit) -> ToolOutput {
        ToolOutput::of(output, exit, report, |RmReport { deleted, held, recall, dry_run, .. }, _| {
            let deleted = deleted.iter().map(|name| format!("deleted  {name}\n"));
            // The recall shows them too.
            let held = held.iter().filter(|_| recall.is_none()).map(self::held);
            let lines = deleted.chain(held).chain(recall.iter().map(render)).filter(|_| !output.quiet);
            lines.chain(dry_run.iter().map(Listed::render)).collect()
        })
    }

    fn check_confirmed(&self, prefix: &str, listed: &Listed) -> Result<()> {
        let Some(code) = self.confirm.as_ref().filter(|code| listed.confirm.as_ref() != Some(*code)) else {
            return Ok(());
        };
        let objects = count(listed.objects.len() as u64, "object");
        let problem = format!(
            "`{prefix}` has {objects} now, not those of --confirm {code}: nothing is deleted; list them again with --dry-run"
        );
        Err(Error::Misuse { problem })
    }

    /// Deletes the objects, or lists them with `--dry-run`.
    fn each(&self, client: &Client, output: &Output, names: Vec<String>) -> ToolOutput {
        let mut report = RmReport::default();
        let mut objects = Vec::new();
        let mut first = None::<Error>;
        for name in names {
            let done = match self.dry_run {
                true => client.stat(&name, None).map(|info| objects.push(info.version.summary)),
                false => client.delete(&name).map(|()| report.deleted.push(name.clone())),
            };
            if let Err(error) = done {
                report.failed.push(Failed { name, error: ErrorSummary::complained(&error) });
                // Any other error breaks the connection.
                let connected = matches!(error, Error::Broker(_));
                first.get_or_insert(error);
                if !connected {
                    break;
                }
            }
        }
        report.dry_run = self.dry_run.then_some(Listed { objects, confirm: None });
        report.held = self.held(client, &report.deleted);
        if self.recall && !report.held.is_empty() {
            let failed = self.recall(client, &mut report);
            failed.iter().for_each(|error| drop(ErrorSummary::complained(error)));
            first = first.or(failed);
        }
        report.error = first.as_ref().map(ErrorSummary::of);
        self.printed(output, report, first.as_ref().map_or(Exit::Verified, Exit::of))
    }

    /// Recalls the versions of the deleted names. The leases that remain are held.
    fn recall(&self, client: &Client, report: &mut RmReport) -> Option<Error> {
        let ids: BTreeSet<String> = report.held.iter().map(|lease| lease.id.clone()).collect();
        let recalled = client.recall_ids(self.shared_prefix(&report.deleted), &Vec::from_iter(ids), self.within);
        let (recall, error) = outcome(recalled, self.within);
        if let Some(Recall { holders, .. }) = &recall {
            let left = holders.iter().filter(|holder| !holder.acknowledged);
            report.held = left.map(|holder| holder.lease.clone()).collect();
        }
        report.recall = recall;
        error
    }

    /// A prefix of all deleted names.
    fn shared_prefix<'a>(&'a self, deleted: &'a [String]) -> &'a str {
        match (deleted, &self.prefix) {
            (_, Some(prefix)) => prefix,
            ([name], None) => name,
            (_, None) => "",
        }
    }

    /// The leases that hold memory of deleted names. Empty if the broker does not answer, because the deletion has succeeded anyway.
    fn held(&self, client: &Client, deleted: &[String]) -> Vec<HeldLease> {
        if deleted.is_empty() {
            return Vec::new();
        }
        let leases = client.who(self.shared_prefix(deleted)).map(|holders| holders.leases).unwrap_or_else(|error| {
            tracing::warn!(error = error.in_full(), "cannot list the leases of the deleted objects");
            Vec::new()
        });
        leases.into_iter().filter(|lease| !lease.named && deleted.contains(&lease.name)).collect()
    }
}
