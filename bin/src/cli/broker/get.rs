//! `get`: maps an object of a broker, verifies it and writes it to a file.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use vmmfd::{
    broker::{ArrayEntry, Attached, DeviceBytes, Get, Lease, Object, ObjectPart, Owner},
    driver::Choice,
    error::ProtocolError,
    memory::Imported,
    session::start,
    wire::Check,
};

use super::{MeetBroker, Steps, fields::field, shown, values::parse_object};
use crate::{
    check::files::{self, Target},
    cli::{
        Fetch, leave_open, options::parse_uid, output::Progress, prelude::*, raise_file_limit, report::Step,
        values::CHOICE,
    },
    schema,
    units::{self, bytes},
};

/// Maps an object read-only, verifies it and writes it to a file
///
/// Verifies each part that has a digest and is read whole. Reports a wrong digest to the broker, and `vmmfd stat` shows the report. The
/// lease ends with the command.
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("got, and verified if it has a digest",
    "no such object or version, not as expected, or it did not verify"; 2 3 4 5 130))]
pub(in super::super) struct GetOptions {
    /// Name of the object
    #[arg(value_name = "NAME")]
    name: String,

    /// Version to get [default: the current one]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Object")]
    version: Option<u64>,

    /// Longest wait for the object to exist: 500ms, 30s, 2m
    #[arg(long, value_name = "DURATION", value_parser = parse_timeout, help_heading = "Object")]
    wait: Option<Duration>,

    /// Required fields of the metadata and their values: a JSON object
    #[arg(long, value_name = "JSON", value_parser = parse_object, help_heading = "Object")]
    expect: Option<Check>,

    /// Required owner of the name [default: any]
    #[arg(long, value_name = "UID", value_parser = parse_uid, help_heading = "Object")]
    owner: Option<u32>,

    /// Part to get [default: all]
    #[arg(long, value_name = "PART", help_heading = "Object")]
    part: Option<String>,

    #[command(flatten)]
    fetch: Fetch,

    /// Array to get: only its bytes, in memory order; only its segments are sent and mapped [default: all]
    #[arg(long, value_name = "ARRAY", conflicts_with = "range", help_heading = "Buffer")]
    array: Option<String>,

    /// Backend of the memory; auto takes the object's
    #[arg(
        long,
        value_name = "BACKEND",
        value_parser = CHOICE,
        env = "VMMFD_BACKEND",
        default_value = "auto",
        hide_possible_values = true,
        help_heading = "Sharing"
    )]
    backend: Choice,

    #[command(flatten)]
    meet: MeetBroker,
}

#[derive(Debug, Serialize, JsonSchema)]
struct GetReport {
    name: String,
    #[schemars(range(min = 1))]
    version: u64,
    #[schemars(with = "schema::Id")]
    id: String,
    created_ms: u64,
    owner: Owner,
    #[schemars(with = "Check")]
    metadata: BTreeMap<String, Attached>,
    backend: Backend,
    parts: Vec<PartReport>,
    /// Whether all parts verified; null if a part could not be checked.
    verified: Option<bool>,
    /// The file that was written.
    to: Option<String>,
    steps: Vec<Step>,
    error: Option<ErrorSummary>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct PartReport {
    name: String,
    /// The device, with the bytes of memory on it.
    device: DeviceBytes,
    /// Bytes of data in the whole part.
    size: u64,
    segments: u64,
    /// The range that was read.
    offset: u64,
    length: u64,
    arrays: Vec<ArrayEntry>,
    /// The digest that the maker gave.
    expected: Option<String>,
    /// The digest of the bytes that were read.
    digest: String,
    verified: Option<bool>,
}

impl GetOptions {
    fn request(&self) -> Get {
        let mut get = Get::new(&self.name);
        get = self.version.iter().fold(get, |get, version| get.version(*version));
        get = self.wait.iter().fold(get, |get, wait| get.wait(*wait));
        get = self.expect.iter().fold(get, |get, fields| get.expect(fields.clone()));
        get = self.owner.iter().fold(get, |get, uid| get.expect_owner(*uid));
        get = self.part.iter().fold(get, |get, part| get.parts([part]));
        get = self.array.iter().fold(get, |get, array| get.arrays([array]));
        self.fetch.range.iter().fold(get, |get, range| get.range(range.clone()))
    }

    /// The range to read of a part, and its memory.
    fn selected<'a>(&self, part: &'a ObjectPart) -> Result<(&'a Arc<Imported>, Range<u64>)> {
        let Some(name) = &self.array else {
            let range = self.fetch.range.clone().unwrap_or(0..part.description().size);
            return Ok((part.memory()?, range));
        };
        let entry = part.arrays().iter().find(|entry| entry.name == *name);
        let array = entry.map(|entry| &entry.array).ok_or_else(|| {
            // The broker selected this part for the array.
            ProtocolError::Content(format!("part `{}` came for array `{name}`, which it does not have", part.name()))
        })?;
        let span = array.span()?;
        let length = span.end - span.start;
        let bytes = array.bytes()?;
        if length != bytes {
            let problem = format!(
                "array `{name}` has {bytes} bytes with gaps between them: write the {length} bytes that it lies in with --range {}:{length}",
                span.start
            );
            return Err(Error::Misuse { problem });
        }
        match part.pieces().first().filter(|_| bytes > 0) {
            Some(piece) => Ok((piece, span)),
            None => Err(Error::Misuse { problem: format!("array `{name}` is empty: it has no bytes to write") }),
        }
    }

    /// Fails if the options need one part and there are several.
    fn check_parts(&self, lease: &Lease) -> Result<()> {
        let several = |verb: &str| {
            let names: Vec<&str> = lease.parts().iter().take(8).map(|part| part.name()).collect();
            let name = &self.name;
            let all = lease.parts().len();
            let more = lease.parts().len() > names.len();
            let names = format!("{}{}", names.join(", "), if more { ", ..." } else { "" });
            let problem = format!("`{name}` has {all} parts ({names}), and {verb} one: name it with --part");
            Err(Error::Misuse { problem })
        };
        match (&self.fetch.to, &self.fetch.range) {
            _ if lease.parts().len() == 1 => Ok(()),
            _ if self.array.is_some() => several("an array is in"),
            (Some(_), _) => several("a file has the bytes of"),
            (None, Some(_)) => several("a range is of"),
            (None, None) => Ok(()),
        }
    }

    /// Reads a part into the file, if given, and compares a whole part with its digest.
    fn read(
        &self,
        part: &ObjectPart,
        mut target: Option<&mut Target>,
        cancel: &Cancel,
        progress: &Progress,
    ) -> Result<PartReport> {
        let ((memory, range), description) = (self.selected(part)?, part.description());
        let all = range.end - range.start;
        let mut done = 0;
        let digest = files::read(&**memory, memory.start(), range.clone(), &mut |bytes| {
            if let Some(target) = &mut target {
                target.write(bytes)?;
            }
            done += bytes.len() as u64;
            progress.bytes(done, all);
            cancel.check()
        })?;
        let expected = part.digest().map(str::to_owned);
        let comparable = expected.as_ref().filter(|it| files::is_known(it) && range == (0..description.size));
        let verified = comparable.map(|expected| *expected == digest);
        Ok(PartReport {
            name: part.name().to_owned(),
            device: DeviceBytes { device: description.device.clone(), bytes: description.mapped_size },
            size: description.size,
            segments: description.segments(),
            offset: range.start,
            length: all,
            arrays: part.arrays().to_vec(),
            expected,
            digest,
            verified,
        })
    }

    /// Reads all parts. The file gets its final name if no part is wrong.
    fn read_all(
        &self,
        object: &Object,
        mut target: Option<Target>,
        cancel: &Cancel,
        progress: &Progress,
    ) -> Result<(Vec<PartReport>, Option<PathBuf>)> {
        let parts = object.parts().iter().map(|part| self.read(part, target.as_mut(), cancel, progress));
        let parts = parts.collect::<Result<Vec<PartReport>>>()?;
        let target = target.filter(|_| parts.iter().all(|part| part.verified != Some(false)));
        let written = target.map(|target| target.finish(&mut || cancel.check())).transpose()?;
        Ok((parts, written))
    }
}

impl Tool for GetOptions {
    const NAME: &'static str = "get";

    const REPORTS: &'static [Named] = &[("get", document::<Stamped<GetReport>>)];

    fn run(&self, Running { output, cancel, progress }: Running<'_>) -> anyhow::Result<ToolOutput> {
        raise_file_limit();
        let target = self.fetch.target()?;
        let client = self.meet.connect(cancel)?;
        let mut steps = Steps::default();
        let wait = self
            .wait
            .map(|wait| output.notice_wait(format!("waiting for `{}` to be put, for at most {wait:?}", self.name)));
        let lease = steps.time("get", || client.get(&self.request()))?;
        drop(wait);
        self.check_parts(&lease)?;
        let backend = match self.backend {
            Choice::Auto => lease.backend().parse().unwrap_or(Choice::Auto),
            only => only,
        };
        let opened = steps.time("driver", || start(backend, cancel, &|_| {}))?;
        leave_open(&opened.driver);
        let object = steps.time("open", || lease.open(&opened.driver, self.fetch.device))?;
        let (parts, to) = steps.time("read", || self.read_all(&object, target, cancel, progress))?;
        let wrong = parts.iter().find(|part| part.verified == Some(false));
        let error = wrong.map(|part| mismatch(object.name(), part));
        let verified = match &error {
            Some(_) => Some(false),
            None => parts.iter().all(|part| part.verified == Some(true)).then_some(true),
        };
        if let Some(error) = &error {
            object.report(error.message.as_str());
            progress.close();
            error.complain();
        }
        let metadata = object.metadata().map(|_| serde_json::from_str(object.metadata_text()))??;
        let report = GetReport {
            name: object.name().to_owned(),
            version: object.version(),
            id: object.id().to_owned(),
            created_ms: milliseconds(object.created()),
            owner: object.owner(),
            metadata,
            backend: opened.driver.backend(),
            parts,
            verified,
            to: to.map(|path| path.display().to_string()),
            steps: steps.0,
            error,
        };
        let exit = if report.error.is_some() { Exit::Mismatch } else { Exit::Verified };
        Ok(ToolOutput::of(output, exit, report, render))
    }
}

fn milliseconds(time: std::time::SystemTime) -> u64 {
    let since = time.duration_since(std::time::SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

fn mismatch(object: &str, part: &PartReport) -> ErrorSummary {
    let expected = part.expected.as_deref().unwrap_or_default();
    let name = &part.name;
    let digest = &part.digest;
    ErrorSummary {
        kind: "mismatch",
        message: format!("part `{name}` of `{object}` did not verify: it has {digest}, and its maker gave {expected}"),
        hint: Some(
            "a process that has the memory wrote to it, or its maker gave a wrong digest: see `vmmfd stat`".to_owned(),
        ),
    }
}

fn render(report: &GetReport, verbose: bool) -> String {
    let GetReport { name, version, owner, parts, to, .. } = report;
    let mut text = String::new();
    if verbose {
        text += &field("owner", format!("uid {}, gid {}", owner.uid, owner.gid));
    }
    for part in parts {
        let found = match part.verified {
            Some(true) => "verified",
            Some(false) => "which is WRONG",
            None if part.expected.is_none() => "not verified: it was put without --digest",
            None => "not verified",
        };
        let size = bytes(part.length);
        let device = shown(&part.device.device, verbose);
        let of = &part.name;
        let digest = units::digest(&part.digest, verbose);
        text += &field("got", format!("{name} version {version} part {of}: {size}, {device}, {digest}, {found}"));
    }
    to.iter().fold(text, |text, path| text + &field("saved", path))
}
