//! `put`: loads a file, or the tensors of safetensors files, into GPU memory and hands it over to a broker.

use std::collections::BTreeMap;

use vmmfd::{
    array::ArrayDescriptor,
    broker::{
        ArrayEntry, Attached, ClaimOf, Client, Condition, DeviceBytes, Get, Lifetime, Put, PutPart, Quota, Recall,
        RecallOf, Summary, UserTotal,
    },
    error::{BrokerError, RefusalCode},
    internals::{NEEDS_BOTH, clear_padding, refusal},
    memory::{Device, Mechanism, Placement, Region, Shared},
    session::start,
    weights::{Checkpoint, LoadOptions, Loaded},
    wire::broker::{MAX_ARRAYS, MAX_KEPT, MAX_METADATA},
};

use super::{
    MeetBroker, Steps,
    fields::field,
    recall::{self, complained, outcome},
    shown,
    values::{parse_mode, parse_texts, parse_ttl},
};
use crate::{
    check::files::Source,
    cli::{
        Allocate, ArrayOptions, leave_open, options::source_parser, output::Progress, prelude::*, raise_file_limit,
        report::Step,
    },
    error::ToolError,
    schema,
    units::{self, bytes, count},
};

/// The names of the part and of its array.
const PART: &str = "all";
const ARRAY: &str = "array";

/// The key of the files' metadata in the object's metadata.
const SAFETENSORS: &str = "safetensors";

const CHUNK: &str = "Size of the chunks, mapped side by side; rounded up to the granularity, as sizes are [default: one allocation; \
    1GiB with --safetensors]";

/// Puts a file or a model's weights into a broker, under a name
///
/// Loads it into GPU memory, which stays with the broker after the command exits. Readers see the object whole or not at all.
#[derive(Debug, Args)]
// The name precedes `--safetensors`, which takes all following words as files.
#[command(override_usage = "vmmfd put [OPTIONS] <NAME> <--from <FILE>|--safetensors <FILE|DIR>...>")]
#[command(after_help = exit_codes!("the broker has it", "the name exists, or its version differs from --if-version"; 2 3 4 5 130))]
#[command(mut_arg("chunk", |chunk| chunk.help(CHUNK)))]
pub(in super::super) struct PutOptions {
    /// Name of the object: components of A-Z, a-z, 0-9, `.`, `_` and `-`, separated by `/`
    #[arg(value_name = "NAME")]
    name: String,

    /// Replace an object of this name: the put creates its next version
    #[arg(long, help_heading = "Object")]
    replace: bool,

    /// Replace the object only if N is its current version
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Object")]
    if_version: Option<u64>,

    /// Metadata of this version: a JSON object, which readers check with --expect
    #[arg(long, value_name = "JSON", value_parser = parse_texts, help_heading = "Object")]
    meta: Option<BTreeMap<String, Attached>>,

    /// Compute the digest of the bytes (BLAKE3) for readers to verify
    #[arg(long, help_heading = "Object")]
    digest: bool,

    /// Delete the name after this time without leases, or never [default: as before, or never]
    #[arg(long, value_name = "DURATION", value_parser = parse_ttl, help_heading = "Object")]
    ttl: Option<Lifetime>,

    /// Permissions to read (get, list) and write (replace), as a file's mode; an existing object keeps its mode [default: 600]
    #[arg(long, value_name = "OCTAL", value_parser = parse_mode, help_heading = "Object")]
    mode: Option<u16>,

    /// Number of earlier versions to keep [default: as before, or 0]
    #[arg(long, value_name = "N", help_heading = "Object")]
    keep: Option<u32>,

    /// Ask the processes with leases of earlier versions to end them, and wait: see recall
    #[arg(long, help_heading = "Object")]
    recall_old: bool,

    /// Longest wait of --recall-old: 500ms, 30s, 2m
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = parse_timeout, requires = "recall_old",
        help_heading = "Object")]
    within: Duration,

    /// File to put
    #[arg(
        long,
        value_name = "FILE",
        value_parser = source_parser(),
        required_unless_present = "safetensors",
        conflicts_with = "safetensors",
        help_heading = "Buffer"
    )]
    from: Option<PathBuf>,

    /// Safetensors files: each tensor becomes an array with the same name. Give files, a folder with a model's files (those of its
    /// *.safetensors.index.json, if present), or an index. The files' own metadata is stored under `safetensors`
    #[arg(
        long,
        value_name = "FILE|DIR",
        num_args = 1..,
        value_parser = source_parser(),
        conflicts_with_all = ["dtype", "shape", "order"],
        help_heading = "Buffer"
    )]
    safetensors: Vec<PathBuf>,

    #[command(flatten)]
    array: ArrayOptions,

    #[command(flatten)]
    memory: Allocate,

    #[command(flatten)]
    meet: MeetBroker,
}

#[derive(Debug, Serialize, JsonSchema)]
struct PutReport {
    name: String,
    #[schemars(range(min = 1))]
    version: u64,
    #[schemars(with = "schema::Id")]
    id: String,
    backend: Backend,
    /// The reason why it is the host backend, if the user did not choose it.
    fallback: Option<String>,
    /// The device, with the bytes of memory on it.
    device: DeviceBytes,
    /// Bytes of data.
    size: u64,
    segments: u64,
    array: Option<ArrayDescriptor>,
    /// The number of arrays.
    arrays: usize,
    digest: Option<String>,
    steps: Vec<Step>,
    /// The result of --recall-old.
    recall: Option<Recall>,
    /// The error that the command exits with, after a put that succeeded.
    error: Option<ErrorSummary>,
}

enum Input {
    File { source: Source, array: Option<ArrayDescriptor> },
    Weights(Box<Checkpoint>),
}

impl Input {
    /// Bytes of data.
    fn size(&self) -> u64 {
        match self {
            Self::File { source, .. } => source.size(),
            Self::Weights(checkpoint) => checkpoint.size(),
        }
    }

    fn arrays(&self) -> Vec<ArrayEntry> {
        let entry = |name: &str, array: &ArrayDescriptor| ArrayEntry::new(name, array.clone());
        match self {
            Self::File { array, .. } => array.iter().map(|array| entry(ARRAY, array)).collect(),
            Self::Weights(checkpoint) => {
                checkpoint.tensors().iter().map(|tensor| entry(&tensor.name, &tensor.array)).collect()
            }
        }
    }
}

/// The usage and quota of this user, and the size of the put.
struct Allowance {
    /// Absent if the broker does not report it.
    user: Option<(UserTotal, Quota)>,
    bytes: u64,
    replaces: bool,
}

impl Allowance {
    /// Queries the broker. Fails if the put would exceed the user's quota.
    fn ask(client: &Client, size: u64, replaces: bool) -> Result<Self> {
        let metrics = client.metrics()?;
        // This connection counts, so this user has a total. The uids are from the broker's user namespace.
        let own = match metrics.totals.as_slice() {
            [own] => Some(own),
            several => several.iter().find(|total| total.uid == nix::unistd::geteuid().as_raw()),
        };
        let allowance = Self { user: own.cloned().zip(metrics.quota), bytes: size, replaces };
        let Some((own, quota)) = &allowance.user else { return Ok(allowance) };
        let objects = count(own.objects, "object");
        let more = u64::from(!replaces);
        allowance.check((own.uid, objects), u64::to_string, (own.objects, more, quota.objects))?;
        let has = own.devices.iter().fold(0, |sum: u64, of| sum.saturating_add(of.bytes));
        let text = format!("{} (claimed)", bytes(has));
        allowance.check((own.uid, text), |size| bytes(*size), (has, size, quota.bytes))?;
        Ok(allowance)
    }

    /// Fails if the put would exceed the quota of the device.
    fn check_device(&self, device: &Device) -> Result<()> {
        let Some((own, quota)) = &self.user else { return Ok(()) };
        let of_device = own.devices.iter().filter(|of| of.device.uuid == device.uuid());
        let has = of_device.fold(0, |sum: u64, of| sum.saturating_add(of.bytes));
        let text = format!("{} (claimed) of the device {}", bytes(has), device.prefixed_uuid());
        self.check((own.uid, text), |size| bytes(*size), (has, self.bytes, quota.device_bytes))
    }

    /// `text` describes the amount that the user has.
    fn check(
        &self,
        (uid, text): (u32, String),
        amount: fn(&u64) -> String,
        (has, more, most): (u64, u64, Option<u64>),
    ) -> Result<()> {
        let Some(most) = most.filter(|most| more > 0 && has.saturating_add(more) > *most) else { return Ok(()) };
        let both = if self.replaces { format!("; {NEEDS_BOTH}") } else { String::new() };
        let more = amount(&more);
        let most = amount(&most);
        let message = format!("uid {uid} has {text} and asks for {more} more, but its quota is {most}{both}");
        Err(refusal(RefusalCode::Quota, message).into())
    }
}

impl PutOptions {
    fn condition(&self) -> Condition {
        match (self.if_version, self.replace) {
            (Some(version), _) => Condition::Version(version),
            (None, true) => Condition::Any,
            (None, false) => Condition::New,
        }
    }

    /// Fails before the load if the broker would refuse a put of this size. The broker checks the put itself again.
    fn check_ahead(&self, client: &Client, bytes: u64) -> Result<Allowance> {
        let existing = match client.stat(&self.name, None) {
            Ok(info) => Some(info.version.summary),
            Err(Error::Broker(BrokerError { code: RefusalCode::Absent, .. })) => None,
            Err(Error::Broker(BrokerError { code: RefusalCode::Denied, .. })) => {
                // A replacement does not require read permission.
                return match self.condition() {
                    Condition::New => Err(self.not_writable("read")),
                    _ => Allowance::ask(client, bytes, true),
                };
            }
            Err(error) => return Err(error),
        };
        let permission = self.check_permission(client, existing.as_ref());
        if existing.is_some() && self.condition() == Condition::New && matches!(permission, Err(Error::Broker(_))) {
            return Err(self.not_writable("replace"));
        }
        self.check_existing(existing.as_ref())?;
        permission?;
        Allowance::ask(client, bytes, existing.is_some())
    }

    fn not_writable(&self, verb: &'static str) -> Error {
        ToolError::NotWritable { name: self.name.clone(), verb }.into()
    }

    fn check_existing(&self, existing: Option<&Summary>) -> Result<()> {
        let name = &self.name;
        let refused = |code, message| Err(refusal(code, message).into());
        if let Some(keep) = self.keep.filter(|&keep| keep > MAX_KEPT) {
            let message = format!("`keep` is {keep}, but at most {MAX_KEPT} earlier versions can be kept");
            return refused(RefusalCode::Invalid, message);
        }
        let Some(Summary { version: found, mode: was, .. }) = existing else {
            return match self.condition() {
                Condition::Version(wanted) => {
                    refused(RefusalCode::Absent, format!("`{name}` does not exist, so it has no version {wanted}"))
                }
                _ => Ok(()),
            };
        };
        match self.condition() {
            Condition::New => refused(RefusalCode::Exists, format!("`{name}` exists: its version is {found}")),
            Condition::Version(wanted) if *found != wanted => {
                refused(RefusalCode::Version, format!("the version of `{name}` is {found}, not {wanted}"))
            }
            _ => match self.mode.filter(|mode| mode != was) {
                Some(mode) => refused(
                    RefusalCode::Invalid,
                    format!("`{name}` has mode {was:04o}, which a replacement can't change to {mode:04o}"),
                ),
                None => Ok(()),
            },
        }
    }

    /// Requests a claim of the next version, which requires permission to put it, and drops the claim.
    fn check_permission(&self, client: &Client, existing: Option<&Summary>) -> Result<()> {
        let next = existing.iter().fold(Get::new(&self.name), |get, found| get.newer_than(found.version));
        match client.get_or_claim(&next, &ClaimOf::whole()) {
            Err(Error::Broker(refusal)) if refusal.code == RefusalCode::Denied => Err(refusal.into()),
            // Another process holds the claim, or this user has too many.
            Err(Error::Broker(_)) => Ok(()),
            granted => granted.map(drop),
        }
    }

    /// Opens and checks the input, before any memory is allocated.
    fn input(&self) -> Result<Input> {
        let Some(from) = &self.from else {
            let checkpoint = Checkpoint::open(&self.safetensors)?;
            let tensors = checkpoint.tensors().len();
            if tensors > MAX_ARRAYS {
                let message = format!("{tensors} tensors are too many: an object has at most {MAX_ARRAYS} arrays");
                return Err(refusal(RefusalCode::Invalid, message).into());
            }
            return Ok(Input::Weights(Box::new(checkpoint)));
        };
        if from.is_dir() {
            let problem =
                format!("{0} is a folder: put a model's files in it with `--safetensors {0}`", from.display());
            return Err(Error::Misuse { problem });
        }
        let source = Source::open(from)?;
        let array = self.array.resolve(Some(source.size()))?;
        Ok(Input::File { source, array })
    }

    /// Merges the metadata of the options and of the files, as the text of a JSON object.
    fn metadata(&self, input: &Input) -> anyhow::Result<Option<String>> {
        let mut metadata = self.meta.clone();
        if let Input::Weights(checkpoint) = input
            && !checkpoint.metadata().is_empty()
        {
            let own = Attached::of(checkpoint.metadata())?;
            metadata.get_or_insert_default().entry(SAFETENSORS.to_owned()).or_insert(own);
        }
        let text = metadata.map(|fields| serde_json::to_string(&fields)).transpose()?;
        let length = text.as_ref().map_or(0, String::len);
        if length as u64 > MAX_METADATA {
            let length = bytes(length as u64);
            let most = bytes(MAX_METADATA);
            let message = format!("the metadata has {length}, and at most {most} are allowed");
            return Err(Error::from(refusal(RefusalCode::Invalid, message)).into());
        }
        Ok(text)
    }

    /// Loads the input into new memory. Also returns its digest, if requested.
    fn load(
        &self,
        input: &Input,
        device: &Device,
        steps: &mut Steps,
        cancel: &Cancel,
        progress: &Progress,
    ) -> Result<(Shared, Option<String>)> {
        progress.bytes(0, input.size());
        match input {
            Input::File { source, .. } => {
                let (memory, digest) = self.load_file(source, device, steps, cancel, progress)?;
                Ok((memory, self.digest.then_some(digest)))
            }
            Input::Weights(checkpoint) => {
                let options = LoadOptions::new().sealed();
                let options = self.memory.chunk.map_or(options, |chunk| options.chunk(chunk));
                let options = if self.memory.rdma { options.gpu_direct_rdma() } else { options };
                let options = if self.digest { options.digest() } else { options };
                let loaded = steps.time("load", || {
                    checkpoint.load(device, &options, &mut |done| {
                        progress.bytes(done, checkpoint.size());
                        cancel.check()
                    })
                });
                let Loaded { memory, digest, .. } = loaded?;
                Ok((memory, digest))
            }
        }
    }

    /// Loads a file into new memory. Also returns its digest.
    fn load_file(
        &self,
        source: &Source,
        device: &Device,
        steps: &mut Steps,
        cancel: &Cancel,
        progress: &Progress,
    ) -> Result<(Shared, String)> {
        let size = source.size();
        let spec = self.memory.spec(device, size, Mechanism::Vmm, Placement::Device)?;
        // Published memory is read-only; on the host backend the kernel enforces this.
        let memory = steps.time("create", || Shared::create(device, spec.sealed()))?;
        let digest = steps.time("load", || {
            let digest = source.load(&memory, &mut |done| {
                progress.bytes(done, size);
                cancel.check()
            })?;
            clear_padding(&memory)?;
            memory.synchronize()?;
            memory.seal()?;
            Ok(digest)
        })?;
        Ok((memory, digest))
    }

    fn put<'a>(
        &self,
        memory: &'a Shared,
        arrays: Vec<ArrayEntry>,
        digest: Option<&str>,
        metadata: Option<&str>,
    ) -> Result<Put<'a>> {
        let part = PutPart::of(PART, memory)?.arrays(arrays);
        let part = digest.into_iter().fold(part, PutPart::digest);
        let mut put = Put::new(&self.name).condition(self.condition()).part(part);
        put = metadata.into_iter().try_fold(put, Put::metadata_text)?;
        put = self.mode.iter().fold(put, |put, mode| put.mode(*mode));
        put = self.ttl.iter().fold(put, |put, lifetime| put.lifetime(*lifetime));
        Ok(self.keep.iter().fold(put, |put, versions| put.keep(*versions)))
    }
}

impl Tool for PutOptions {
    const NAME: &'static str = "put";

    const REPORTS: &'static [Named] = &[("put", document::<Stamped<PutReport>>)];

    fn run(&self, Running { output, cancel, progress }: Running<'_>) -> anyhow::Result<ToolOutput> {
        raise_file_limit();
        let input = self.input()?;
        let metadata = self.metadata(&input)?;
        let client = self.meet.connect(cancel)?;
        let allowance = self.check_ahead(&client, input.size())?;
        let mut steps = Steps::default();
        let opened = steps.time("driver", || start(self.memory.backend, cancel, &|_| {}))?;
        leave_open(&opened.driver);
        let fallback = output.notice_fallback(opened.fallback.as_ref());
        let device = Device::find(&opened.driver, self.memory.device)?;
        allowance.check_device(&device)?;
        let (memory, digest) = self.load(&input, &device, &mut steps, cancel, progress)?;
        let entries = input.arrays();
        let arrays = entries.len();
        let put = self.put(&memory, entries, digest.as_deref(), metadata.as_deref())?;
        let published = steps.time("put", || client.put(&put))?;
        let description = memory.describe()?;
        let recall = || outcome(client.recall(&self.name, RecallOf::Earlier, self.within), self.within);
        let (recall, error) = self.recall_old.then(recall).unwrap_or_default();
        let exit = error.as_ref().map_or(Exit::Verified, Exit::of);
        let report = PutReport {
            name: self.name.clone(),
            version: published.version,
            id: published.id,
            backend: opened.driver.backend(),
            fallback,
            device: DeviceBytes { device: description.device.clone(), bytes: description.mapped_size },
            size: description.size,
            segments: description.segments(),
            array: match input {
                Input::File { array, .. } => array,
                Input::Weights(_) => None,
            },
            arrays,
            digest,
            steps: steps.0,
            recall,
            error: error.as_ref().map(complained),
        };
        Ok(ToolOutput::of(output, exit, report, render))
    }
}

fn render(report: &PutReport, verbose: bool) -> String {
    let PutReport { name, version, size, arrays, device, digest, recall, .. } = report;
    let digest = digest.as_ref().map_or_else(String::new, |digest| format!(", {}", units::digest(digest, verbose)));
    let arrays = match arrays {
        0 | 1 => String::new(),
        several => format!(" of {several} arrays"),
    };
    let size = bytes(*size);
    let device = shown(&device.device, verbose);
    let put = field("put", format!("{name} version {version}: {size}{arrays}, {device}{digest}"));
    put + &recall.as_ref().map(recall::render).unwrap_or_default()
}
