//! `rm`: deletes objects.

use clap::{ArgGroup, Args, builder::NonEmptyStringValueParser};
use schemars::JsonSchema;
use serde::Serialize;
use vmmfd::{
    broker::Client,
    channel::Cancel,
    error::{Error, RefusalCode, Result},
    internals::refusal,
};

use super::{
    MeetBroker, count,
    ls::{ObjectLine, no_match},
    table::field,
    who::LeaseLine,
};
use crate::{
    cli::{
        Exit, Output, Tool, ToolOutput,
        exit::exit_codes,
        output::{Progress, json_line},
        report::ErrorSummary,
    },
    schema::{Named, VERSION, document},
    stamp,
    units::about,
};

/// Deletes objects
///
/// Readers keep their leases, and the broker frees the memory after the last lease: the output lists the remaining leases. With several
/// names, each deletion is tried, and the exit code names the first failure.
///
/// A prefix is deleted in two steps: --dry-run lists the objects and prints a code, and --confirm with this code deletes them. If an object
/// was replaced, deleted or added in between, nothing is deleted.
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

    // clap ignores a `requires` on a conflict, so each option declares the conflict.
    /// List the objects with the prefix and print the code for --confirm; delete nothing
    #[arg(long, requires = "prefix", conflicts_with = "names", help_heading = "Prefix")]
    dry_run: bool,

    /// Delete the objects that --dry-run listed with this code
    #[arg(long, value_name = "CODE", requires = "prefix", conflicts_with = "names", help_heading = "Prefix")]
    confirm: Option<String>,

    #[command(flatten)]
    meet: MeetBroker,

    #[command(flatten)]
    output: Output,
}

#[derive(Debug, Serialize, JsonSchema)]
struct RmReport {
    schema: u32,
    tool: String,
    deleted: Vec<String>,
    /// The leases that still hold memory of the deleted names.
    held: Vec<LeaseLine>,
    failed: Vec<Failed>,
    dry_run: Option<Listed>,
    /// The error that the command exits with.
    error: Option<ErrorSummary>,
}

/// The objects with a prefix.
#[derive(Debug, Serialize, JsonSchema)]
struct Listed {
    objects: Vec<ObjectLine>,
    /// The code for --confirm, of exactly these versions.
    #[schemars(regex(pattern = "^[0-9a-f]{12}$"))]
    confirm: String,
}

impl Listed {
    fn of(client: &Client, prefix: &str) -> Result<Self> {
        let objects: Vec<ObjectLine> = client.list(prefix)?.iter().map(ObjectLine::from).collect();
        if objects.is_empty() {
            return Err(refusal(RefusalCode::Absent, no_match(prefix)).into());
        }
        let mut digest = blake3::Hasher::new();
        for object in &objects {
            // Names and UUIDs contain no zero byte.
            digest.update(format!("{}\0{}\0", object.name, object.id).as_bytes());
        }
        let confirm = digest.finalize().to_hex()[..12].to_owned();
        Ok(Self { objects, confirm })
    }

    fn render(&self) -> String {
        let line = |object: &ObjectLine| {
            let ObjectLine { name, version, size, leases, owner, .. } = object;
            let leases = count(*leases, "lease");
            field("listed", format!("{name} version {version}: {}, {leases}, uid {}", about(*size), owner.uid))
        };
        self.objects.iter().map(line).chain([field("confirm", &self.confirm)]).collect()
    }
}

#[derive(Debug, Serialize, JsonSchema)]
struct Failed {
    name: String,
    error: ErrorSummary,
}

impl Tool for RmOptions {
    const NAME: &'static str = "rm";

    const REPORTS: &'static [Named] = &[("rm", document::<RmReport>)];

    fn output(&self) -> &Output {
        &self.output
    }

    fn run(&self, cancel: &Cancel, _progress: &Progress) -> anyhow::Result<ToolOutput> {
        let client = self.meet.connect(cancel)?;
        let names = match &self.prefix {
            None => self.names.clone(),
            Some(prefix) => {
                let listed = Listed::of(&client, prefix)?;
                if self.dry_run {
                    return Ok(self.dry_run(listed));
                }
                self.check_confirmed(prefix, &listed)?;
                listed.objects.into_iter().map(|object| object.name).collect()
            }
        };
        Ok(self.delete(&client, names))
    }
}

impl RmOptions {
    fn dry_run(&self, listed: Listed) -> ToolOutput {
        let text = match self.output.json {
            false => listed.render(),
            true => json_line(&RmReport {
                schema: VERSION,
                tool: stamp::tool(),
                deleted: Vec::new(),
                held: Vec::new(),
                failed: Vec::new(),
                dry_run: Some(listed),
                error: None,
            }),
        };
        ToolOutput { text, exit: Exit::Verified }
    }

    fn check_confirmed(&self, prefix: &str, listed: &Listed) -> Result<()> {
        let Some(code) = self.confirm.as_ref().filter(|code| **code != listed.confirm) else { return Ok(()) };
        let objects = count(listed.objects.len() as u64, "object");
        let problem = format!(
            "`{prefix}` has {objects} now, not those of --confirm {code}: nothing is deleted; list them again with --dry-run"
        );
        Err(Error::Misuse { problem })
    }

    fn delete(&self, client: &Client, names: Vec<String>) -> ToolOutput {
        let (mut deleted, mut failed, mut first) = (Vec::new(), Vec::new(), None::<Error>);
        for name in names {
            match client.delete(&name) {
                Ok(()) => deleted.push(name),
                Err(error) => {
                    let summary = ErrorSummary::of(&error);
                    summary.complain();
                    failed.push(Failed { name, error: summary });
                    // Any other error breaks the connection.
                    let connected = matches!(error, Error::Broker(_));
                    first.get_or_insert(error);
                    if !connected {
                        break;
                    }
                }
            }
        }
        let exit = first.as_ref().map_or(Exit::Verified, Exit::of);
        let error = first.as_ref().map(ErrorSummary::of);
        let text = match (self.output.json, self.output.quiet) {
            (true, _) => {
                let (tool, dry_run, held) = (stamp::tool(), None, self.held(client, &deleted));
                json_line(&RmReport { schema: VERSION, tool, deleted, held, failed, dry_run, error })
            }
            (false, true) => String::new(),
            (false, false) => {
                let held = self.held(client, &deleted);
                let deleted = deleted.iter().map(|name| format!("deleted  {name}\n"));
                deleted.chain(held.iter().map(LeaseLine::held)).collect()
            }
        };
        ToolOutput { text, exit }
    }

    /// The leases that hold memory of deleted names. Empty if the broker does not answer, because the deletion has succeeded anyway.
    fn held(&self, client: &Client, deleted: &[String]) -> Vec<LeaseLine> {
        let prefix = match (deleted, &self.prefix) {
            ([], _) => return Vec::new(),
            (_, Some(prefix)) => prefix,
            ([name], None) => name,
            (_, None) => "",
        };
        let leases = client.who(prefix).map(|holders| holders.leases).unwrap_or_else(|error| {
            tracing::warn!(error = error.in_full(), "cannot list the leases of the deleted objects");
            Vec::new()
        });
        leases.iter().filter(|lease| !lease.named && deleted.contains(&lease.name)).map(LeaseLine::from).collect()
    }
}
