//! `put`: hands a file's bytes over to a broker, in the memory of a GPU.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::{
    DeviceSize, MeetBroker, SCHEMA, Steps, no_gpu,
    table::field,
    values::{parse_mode, parse_object, parse_ttl},
};
use crate::{
    array::ArrayDescriptor,
    broker::{ArrayEntry, Client, Condition, Lifetime, Put, PutPart},
    channel::Cancel,
    driver::{Backend, Choice},
    error::{BrokerError, Error, RefusalCode, Result},
    memory::{Device, Region, Selector, Shared, Spec},
    session::start,
    tools::{
        check::files::Source,
        cli::{
            ArrayOptions, Exit, Output, Tool, ToolOutput,
            exit::exit_codes,
            leave_open,
            options::parse_source,
            output::{Progress, json_line},
            parse_size, raise_file_limit,
            report::Step,
        },
        stamp,
        units::bytes,
    },
    wire::Check,
};

/// The name of the one part, and of the array in it.
const PART: &str = "all";
const ARRAY: &str = "array";

/// Loads a file into the memory of a GPU and hands that over to a broker, under a name
///
/// The broker keeps it, and this command ends. Readers see the object whole or not at all.
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("the broker has it", "the name exists, or its version is another than --if-version"))]
pub(in super::super) struct PutOptions {
    /// Name of the object: components of A-Z, a-z, 0-9, `.`, `_` and `-`, separated by `/`
    #[arg(value_name = "NAME")]
    name: String,

    /// Replace what has the name: this is its next version
    #[arg(long, help_heading = "Object")]
    replace: bool,

    /// Replace what has the name if its current version is this one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Object")]
    if_version: Option<u64>,

    /// What to say of this version: a JSON object, for readers that check it with --expect
    #[arg(long, value_name = "JSON", value_parser = parse_object, help_heading = "Object")]
    meta: Option<Check>,

    /// Compute the digest of the file (BLAKE3) for readers to verify
    #[arg(long, help_heading = "Object")]
    digest: bool,

    /// Delete the name this long after its last lease ended, or never [default: what the name has, or never]
    #[arg(long, value_name = "DURATION", value_parser = parse_ttl, help_heading = "Object")]
    ttl: Option<Lifetime>,

    /// Who may read (get, list) and write (replace), as of a file; what has the name keeps its mode [default: 600]
    #[arg(long, value_name = "OCTAL", value_parser = parse_mode, help_heading = "Object")]
    mode: Option<u16>,

    /// Keep this many versions before the current one [default: what the name has, or 0]
    #[arg(long, value_name = "N", help_heading = "Object")]
    keep: Option<u32>,

    /// File whose bytes to put
    #[arg(long, value_name = "FILE", value_parser = parse_source, help_heading = "Buffer")]
    from: PathBuf,

    #[command(flatten)]
    array: ArrayOptions,

    /// Where to keep the memory
    #[arg(long, value_name = "BACKEND", env = "VMMFD_BACKEND", default_value = "auto", help_heading = "Sharing")]
    backend: Choice,

    /// Device to allocate on; a UUID may be cut short
    #[arg(long, value_name = "ORDINAL|UUID", default_value = "0", help_heading = "Sharing")]
    device: Selector,

    /// Allocate it in chunks of this size, mapped side by side; rounded up like sizes [default: one allocation]
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "Sharing")]
    chunk: Option<u64>,

    /// Make it reachable by RDMA (gpuDirectRDMACapable). A GPU's own memory alone can be, where the device supports it, and never
    /// on WSL2
    #[arg(long, help_heading = "Sharing")]
    rdma: bool,

    #[command(flatten)]
    meet: MeetBroker,

    #[command(flatten)]
    output: Output,
}

#[derive(Debug, Serialize)]
struct PutReport {
    schema: u32,
    tool: String,
    name: String,
    version: u64,
    id: String,
    backend: Backend,
    /// Why it is the host backend, where that was not asked for.
    fallback: Option<String>,
    /// With the bytes of memory on it.
    device: DeviceSize,
    /// Bytes of data.
    size: u64,
    segments: u64,
    array: Option<ArrayDescriptor>,
    digest: Option<String>,
    steps: Vec<Step>,
}

impl PutOptions {
    fn condition(&self) -> Condition {
        match (self.if_version, self.replace) {
            (Some(version), _) => Condition::Version(version),
            (None, true) => Condition::Any,
            (None, false) => Condition::New,
        }
    }

    /// Fails where the put would be refused, before the file is loaded. The broker decides when it is put.
    fn check_ahead(&self, client: &Client) -> Result<()> {
        let found = match client.stat(&self.name, None) {
            Ok(info) => Some(info.version.summary.version),
            // It may exist, and not be this user's to know.
            Err(Error::Broker(BrokerError { code: RefusalCode::Absent | RefusalCode::Denied, .. })) => None,
            Err(error) => return Err(error),
        };
        let name = &self.name;
        let refused = |code, message| Err(BrokerError::new(code, message).into());
        match (found, self.condition()) {
            (Some(found), Condition::New) => {
                refused(RefusalCode::Exists, format!("`{name}` exists: its version is {found}"))
            }
            (Some(found), Condition::Version(wanted)) if found != wanted => {
                refused(RefusalCode::Version, format!("the version of `{name}` is {found}, and not {wanted}"))
            }
            _ => Ok(()),
        }
    }

    /// Loads the file into new memory. Returns its digest too.
    fn load(
        &self,
        source: &Source,
        device: &Device,
        steps: &mut Steps,
        cancel: &Cancel,
        progress: &Progress,
    ) -> Result<(Shared, String)> {
        let size = source.size();
        let spec = self.chunk.map_or(Spec::vmm(size), |chunk| Spec::vmm(size).chunk(chunk));
        let spec = if self.rdma { spec.gpu_direct_rdma() } else { spec };
        // What is published is never written again: the kernel enforces it on the host backend.
        let memory = steps.time("create", || Shared::create(device, spec.sealed()))?;
        let digest = steps.time("load", || {
            let digest = source.load(&memory, &mut |done| {
                progress.bytes(done, size);
                cancel.check()
            })?;
            memory.clear_padding()?;
            memory.synchronize()?;
            memory.seal()?;
            Ok(digest)
        })?;
        Ok((memory, digest))
    }
}

impl Tool for PutOptions {
    const NAME: &'static str = "put";

    fn output(&self) -> &Output {
        &self.output
    }

    fn run(&self, cancel: &Cancel, progress: &Progress) -> anyhow::Result<ToolOutput> {
        raise_file_limit();
        let source = Source::open(&self.from)?;
        let array = self.array.resolve(Some(source.size()))?;
        let client = self.meet.connect(cancel)?;
        self.check_ahead(&client)?;
        let mut steps = Steps::default();
        let opened = steps.time("driver", || start(self.backend, cancel, &|_| {}))?;
        leave_open(&opened.driver);
        let fallback = no_gpu(&opened, &self.output);
        let device = Device::find(&opened.driver, self.device)?;
        let (memory, digest) = self.load(&source, &device, &mut steps, cancel, progress)?;
        let digest = self.digest.then_some(digest);
        let mut part = PutPart::of(PART, &memory)?;
        if let Some(array) = &array {
            part = part.arrays([ArrayEntry { name: ARRAY.to_owned(), array: array.clone(), attributes: None }]);
        }
        if let Some(digest) = &digest {
            part = part.digest(digest);
        }
        let mut put = Put::new(&self.name).condition(self.condition()).part(part);
        put = self.meta.iter().fold(put, |put, fields| put.metadata(fields.clone()));
        put = self.mode.iter().fold(put, |put, mode| put.mode(*mode));
        put = self.ttl.iter().fold(put, |put, lifetime| put.lifetime(*lifetime));
        put = self.keep.iter().fold(put, |put, versions| put.keep(*versions));
        let published = steps.time("put", || client.put(&put))?;
        let description = memory.describe()?;
        let report = PutReport {
            schema: SCHEMA,
            tool: stamp::tool(),
            name: self.name.clone(),
            version: published.version,
            id: published.id,
            backend: opened.driver.backend(),
            fallback,
            device: DeviceSize {
                uuid: device.prefixed_uuid(),
                name: device.name().to_owned(),
                size: description.mapped_size,
            },
            size: description.size,
            segments: description.segments(),
            array,
            digest,
            steps: steps.0,
        };
        let text = if self.output.json { json_line(&report) } else { render(&report) };
        Ok(ToolOutput { text, exit: Exit::Verified })
    }
}

fn render(report: &PutReport) -> String {
    let PutReport { name, version, size, backend, device: DeviceSize { name: device, uuid, .. }, digest, .. } = report;
    let digest = digest.as_ref().map_or_else(String::new, |digest| format!(", {digest}"));
    field("put", format!("{name} version {version}: {}, {backend}: {device} {uuid}{digest}", bytes(*size)))
}
