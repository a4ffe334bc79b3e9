//! `put`: loads a file, or the tensors of safetensors files, into GPU memory and hands it over to a broker.

use std::collections::BTreeMap;

use vmmfd::{
    array::ArrayDescriptor,
    broker::{ArrayEntry, Attached, Condition, DeviceBytes, Lifetime, Put, PutPart, Recall, RecallOf},
    internals::clear_padding,
    memory::{Device, Mechanism, Placement, Region, Shared},
    session::start,
    weights::{Checkpoint, LoadOptions, Loaded},
};

use super::{
    MeetBroker, Steps,
    fields::field,
    recall::{self, outcome},
    shown,
    values::{parse_mode, parse_texts, parse_ttl},
};
use crate::{
    check::files::Source,
    cli::{
        Allocate, ArrayOptions, leave_open, options::source_parser, output::Progress, prelude::*, raise_file_limit,
        report::Step,
    },
    schema,
    units::{self, bytes},
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

impl PutOptions {
    fn condition(&self) -> Condition {
        match (self.if_version, self.replace) {
            (Some(version), _) => Condition::Version(version),
            (None, true) => Condition::Any,
            (None, false) => Condition::New,
        }
    }

    /// Opens and checks the input, before any memory is allocated.
    fn input(&self) -> Result<Input> {
        let Some(from) = &self.from else {
            return Ok(Input::Weights(Box::new(Checkpoint::open(&self.safetensors)?)));
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
        Ok(metadata.map(|fields| serde_json::to_string(&fields)).transpose()?)
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
        let mut steps = Steps::default();
        let opened = steps.time("driver", || start(self.memory.backend, cancel, &|_| {}))?;
        leave_open(&opened.driver);
        let fallback = output.notice_fallback(opened.fallback.as_ref());
        let device = Device::find(&opened.driver, self.memory.device)?;
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
            error: error.as_ref().map(ErrorSummary::complained),
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
