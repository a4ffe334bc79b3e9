//! Options of several commands, and the parsers of their values. The error of a parser is one sentence with the correct form.

use std::{env, ops::Range, path::Path};

use clap::builder::{OsStringValueParser, TypedValueParser};
use vmmfd::{
    array::{self, ArrayDescriptor, ElementType, Order},
    channel::Trust,
    driver::Choice,
    error::{DeviceError, MemoryError, ParseError},
    internals::clean,
    memory::{Device, Mechanism, Placement, Selector, Spec},
    session::Config,
};

use super::{
    layout,
    values::{CHOICE, ElementTypeParser, ORDER},
};
use crate::{
    check::files::{Source, Target},
    cli::prelude::*,
    units,
    verbs::HasVerbs,
};

/// Options of the connection between two processes.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Meeting")]
pub(super) struct Meet {
    /// Unix socket [default: $XDG_RUNTIME_DIR/vmmfd/vmmfd.sock, else /tmp/vmmfd-UID/vmmfd.sock]
    #[arg(long, value_name = "PATH", env = "VMMFD_SOCKET")]
    pub(super) socket: Option<PathBuf>,

    /// Other user that the peer may run as, besides this user and root; repeatable
    #[arg(long = "allow-uid", value_name = "UID", value_parser = parse_uid)]
    pub(super) allow_uids: Vec<u32>,

    /// Longest wait for the peer, and for each step: 500ms, 30s, 2m
    #[arg(long, value_name = "DURATION", default_value = "2m", value_parser = parse_timeout)]
    pub(super) timeout: Duration,
}

impl Meet {
    pub(super) fn config(&self, cancel: &Cancel) -> Config {
        let trust = Trust { uids: self.allow_uids.clone() };
        Config::default().timeout(self.timeout).trust(trust).cancel(cancel)
    }

    /// The command that starts the peer of this program, `producer` or `consumer`, as its user would type it.
    pub(super) fn peer_command(&self, peer: &str, backend: Choice) -> String {
        let own = PathBuf::from(env::args_os().next().unwrap_or_default());
        let verb = match peer {
            "consumer" => "consume",
            _ => "produce",
        };
        let mut command = match own.file_name() {
            Some(name) if name == "vmmfd" => format!("{} {verb}", quoted(&own)),
            _ => quoted(&own.with_file_name(peer)),
        };
        if let Some(socket) = &self.socket {
            command += &format!(" --socket {}", quoted(socket));
        }
        if let Choice::Only(backend) = backend {
            command += &format!(" --backend {backend}");
        }
        command
    }
}

fn quoted(path: &Path) -> String {
    let mut path = path.to_string_lossy().into_owned();
    clean(&mut path);
    layout::quoted(&path)
}

/// Options of memory to allocate.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Sharing")]
pub(super) struct Allocate {
    /// Backend of the memory
    #[arg(long, value_name = "BACKEND", value_parser = CHOICE, env = "VMMFD_BACKEND", default_value = "auto")]
    pub(super) backend: Choice,

    /// Device to allocate on; a UUID may be abbreviated
    #[arg(long, value_name = "ORDINAL|UUID", default_value = "0")]
    pub(super) device: Selector,

    /// Size of the chunks, mapped side by side; rounded up to the granularity, as sizes are [default: one allocation]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(super) chunk: Option<u64>,

    /// Allow RDMA to the memory (gpuDirectRDMACapable): only device memory, if the device supports it; never on WSL2
    #[arg(long)]
    pub(super) rdma: bool,
}

/// Options of memory to read.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Buffer")]
pub(super) struct Fetch {
    /// Range of bytes, with or without units, such as 4MiB:1MiB; of memory in chunks, only the chunks of the range are sent and mapped
    /// [default: all]
    #[arg(long, value_name = "OFFSET:LENGTH", value_parser = parse_range)]
    pub(super) range: Option<Range<u64>>,

    /// File for the bytes, created only after they are verified
    #[arg(long, value_name = "FILE", value_parser = target_parser())]
    pub(super) to: Option<PathBuf>,

    /// Replace the file if it exists
    #[arg(long, requires = "to")]
    force: bool,

    /// Device to map the memory on, if it can access it; a UUID may be abbreviated [default: the device of the memory]
    #[arg(long, value_name = "ORDINAL|UUID", help_heading = "Sharing")]
    pub(super) device: Option<Selector>,
}

impl Fetch {
    /// Creates the file. Do it before connecting: if it can't be written, nothing is sent.
    pub(super) fn target(&self) -> Result<Option<Target>, Error> {
        self.to.as_deref().map(|file| Target::create(file, self.force)).transpose()
    }
}

/// Options of a buffer.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Buffer")]
pub(super) struct Extent {
    /// Size of the buffer: bytes, or with a binary unit, such as 64MiB, 64M or 1.5GiB [default: 1MiB]
    #[arg(long, value_name = "SIZE", value_parser = parse_size, conflicts_with = "shape")]
    size: Option<u64>,

    /// Size of the buffer in 32-bit words
    #[arg(long, value_name = "N", value_parser = parse_elements, conflicts_with_all = ["size", "dtype", "shape"])]
    elements: Option<u64>,

    /// File to share instead of a pattern
    #[arg(long, value_name = "FILE", value_parser = source_parser(), conflicts_with_all = ["size", "elements", "seed", "round_trip"])]
    from: Option<PathBuf>,
}

/// Options of the array in a buffer.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Array")]
pub(super) struct ArrayOptions {
    /// Element type, by its name in NumPy, ml_dtypes, PyTorch or Rust, as float32, f32, bfloat16, bf16, half or u8, or by a
    /// typestr, such as >i2 [default with --shape: uint32]
    #[arg(long, value_name = "TYPE", value_parser = ElementTypeParser, hide_possible_values = true)]
    dtype: Option<ElementType>,

    /// Dimensions of the array, as 1024x768 or 1024,768 [default with --dtype: one dimension that fills the buffer]
    #[arg(long, value_name = "N[xM...]", value_parser = parse_shape)]
    shape: Option<Shape>,

    /// Order of the array's elements [default: C]
    #[arg(long, value_name = "ORDER", value_parser = ORDER, requires = "shape", ignore_case = true)]
    order: Option<Order>,
}

impl Allocate {
    /// The memory that the options specify.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] for options that the mechanism does not support.
    pub(super) fn spec(
        &self,
        device: &Device,
        size: u64,
        mechanism: Mechanism,
        location: Placement,
    ) -> Result<Spec, Error> {
        let spec = match mechanism {
            Mechanism::Pool => {
                // A driver error is reported before an unsupported option.
                device.verbs().pools()?;
                Spec::pool(size)
            }
            Mechanism::Legacy => {
                device.verbs().legacy()?;
                Spec::legacy(size)
            }
            _ => {
                let spec = Spec::vmm(size).placement(location);
                let spec = if self.rdma { spec.gpu_direct_rdma() } else { spec };
                return Ok(self.chunk.map_or(spec, |chunk| spec.chunk(chunk)).into());
            }
        };
        let feature = match (self.chunk, location) {
            _ if self.rdma => "RDMA without the mechanism vmm",
            (Some(_), _) => "chunks without the mechanism vmm",
            (None, Placement::Device) => return Ok(spec),
            (None, _) => "host memory without the mechanism vmm",
        };
        Err(Error::Device(DeviceError::Unsupported { device: device.to_string(), feature }))
    }
}

/// One value for clap, which treats a `Vec` as a repeatable option.
type Shape = std::sync::Arc<[u64]>;

fn parse_shape(text: &str) -> Result<Shape, ParseError> {
    array::parse_shape(text).map(Shape::from)
}

const DEFAULT_SIZE: u64 = 1 << 20;

impl Extent {
    /// The file, the size and the array.
    ///
    /// # Errors
    /// As [`Source::open`] and [`ArrayDescriptor::new`]; [`MemoryError::Array`] if the array's size differs from the file's or from the
    /// size.
    pub(super) fn resolve(
        &self,
        array: &ArrayOptions,
    ) -> Result<(Option<Source>, u64, Option<ArrayDescriptor>), Error> {
        let source = self.from.as_deref().map(Source::open).transpose()?;
        let size = source.as_ref().map(Source::size).or(self.size).or(self.elements);
        let array = array.resolve(size)?;
        let bytes = array.as_ref().map(ArrayDescriptor::bytes).transpose()?;
        Ok((source, size.or(bytes).unwrap_or(DEFAULT_SIZE), array))
    }
}

impl ArrayOptions {
    /// The array. `size` is the size of the data in bytes, if it is known.
    ///
    /// # Errors
    /// As [`ArrayDescriptor::new`]; [`MemoryError::Array`] if the array's size differs from `size`.
    pub(super) fn resolve(&self, size: Option<u64>) -> Result<Option<ArrayDescriptor>, Error> {
        let array = match (&self.shape, self.dtype) {
            (None, None) => return Ok(None),
            (Some(shape), dtype) => {
                let dtype = dtype.unwrap_or(ElementType::U32);
                ArrayDescriptor::new(dtype, &shape[..], self.order.unwrap_or(Order::C))?
            }
            (None, Some(dtype)) => {
                let size = size.unwrap_or(DEFAULT_SIZE);
                ArrayDescriptor::new(dtype, [size / dtype.size()], Order::C)?
            }
        };
        let bytes = array.bytes()?;
        match size {
            Some(size) if bytes != size => {
                let bytes = units::bytes(bytes);
                let size = units::bytes(size);
                let problem = format!("an array {array} has {bytes}, but the data has {size}");
                Err(Error::Memory(MemoryError::Array { problem }))
            }
            _ => Ok(Some(array)),
        }
    }
}

/// The path of a file to read.
pub(super) fn source_parser() -> impl TypedValueParser<Value = PathBuf> {
    path_parser("the size of a buffer must be known before it is filled: save standard input to a file")
}

/// The path of a file to write.
pub(super) fn target_parser() -> impl TypedValueParser<Value = PathBuf> {
    path_parser("the file appears only after it is complete and verified, unlike standard output: name a file")
}

fn path_parser(why_no_stream: &'static str) -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().try_map(move |text| match text.as_encoded_bytes() {
        b"" => Err("an empty name: name a file".to_owned()),
        b"-" => Err(format!("`-` is not supported: {why_no_stream} (for a file named -, write ./-)")),
        _ => Ok(PathBuf::from(text)),
    })
}

/// Parses a number of 32-bit words and returns bytes.
pub(super) fn parse_elements(text: &str) -> Result<u64, String> {
    let words: u64 =
        text.parse().map_err(|_| format!("`{text}` is not a number of words: write a whole number from 1"))?;
    match words.checked_mul(4) {
        Some(0) => Err(format!("`{text}` words are no memory: write at least 1")),
        Some(size) => Ok(size),
        None => Err(format!("`{text}` words are more bytes than 64 bits can hold: write fewer")),
    }
}

pub fn parse_uid(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| format!("`{text}` is not a user's number: write it as `id -u` prints it, 0 to 4294967295"))
}

/// Parses a range of bytes, `OFFSET:LENGTH`, with or without units.
pub(super) fn parse_range(text: &str) -> Result<Range<u64>, String> {
    let parts = text.split_once(':').filter(|(offset, length)| !offset.is_empty() && !length.is_empty());
    let (offset, length) = parts.ok_or_else(|| {
        format!("`{text}` is not a range of bytes: write its offset and length, such as 4MiB:1MiB or 0:100")
    })?;
    // 0 is a valid offset but not a valid size.
    let offset = if offset == "0" { 0 } else { parse_size(offset)? };
    let length = parse_size(length)?;
    match offset.checked_add(length) {
        Some(end) => Ok(offset..end),
        None => Err(format!("`{text}` ends beyond 64 bits: write less")),
    }
}

/// The longest duration: the sum of this and a point in time does not overflow.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Parses a duration with its unit.
///
/// # Errors
/// One sentence with the correct form.
pub fn parse_timeout(text: &str) -> Result<Duration, String> {
    if text.parse::<f64>().is_ok() && humantime::parse_duration(&format!("{text}s")).is_ok() {
        return Err(format!("`{text}` has no unit: write {text}s for seconds, or {text}ms"));
    }
    match humantime::parse_duration(text) {
        Ok(time) if time.is_zero() => Err(format!("`{text}` is no time: write more than zero")),
        Ok(time) if time > LONGEST => Err(format!("`{text}` is too long: write at most 36500 days")),
        Ok(time) => Ok(time),
        Err(_) => Err(format!("`{text}` is not a duration: write it as 500ms, 30s or 2m")),
    }
}

/// Parses a salt: 32 bits, decimal or hexadecimal.
pub(super) fn parse_salt(text: &str) -> Result<u32, String> {
    let hexadecimal = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"));
    let (digits, radix) = hexadecimal.map_or((text, 10), |digits| (digits, 16));
    let plain = !digits.is_empty() && digits.chars().all(|digit| digit.is_digit(radix));
    let salt = plain.then(|| u32::from_str_radix(digits, radix).ok()).flatten();
    salt.ok_or_else(|| format!("`{text}` is not a 32-bit number: write 0 to 4294967295, or 0x0 to 0xffffffff"))
}

const UNITS: [(char, u32); 6] = [('k', 10), ('m', 20), ('g', 30), ('t', 40), ('p', 50), ('e', 60)];

/// Parses a size in bytes: an integer, or a number with a binary unit in any case, as `64MiB`, `64M` or `1.5GiB`.
///
/// # Errors
/// One sentence with the correct form, also for `64MB`, which could mean 64000000 or 67108864.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let nonsense = || {
        format!(
            "`{text}` is not a size: write bytes such as 1048576, or a number with a unit such as 64MiB, 64M or 1.5GiB"
        )
    };
    let lower = text.to_ascii_lowercase();
    let end = lower.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(lower.len());
    let (number, unit) = lower.split_at(end);
    let shift = match unit.chars().next() {
        None => 0,
        Some(letter) => {
            let (_, shift) = *UNITS.iter().find(|(known, _)| *known == letter).ok_or_else(nonsense)?;
            match &unit[1..] {
                "" | "ib" => shift,
                "b" => {
                    let letter = letter.to_ascii_uppercase();
                    return Err(format!(
                        "`{text}` could mean powers of 1000 or of 1024: write {number}{letter}iB, which is of 1024"
                    ));
                }
                _ => return Err(nonsense()),
            }
        }
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() || (number.contains('.') && (fraction.is_empty() || shift == 0)) {
        return Err(nonsense());
    }
    let too_large = || format!("`{text}` is more than 64 bits can hold: write less than 16EiB");
    let fraction = fraction.trim_end_matches('0');
    if fraction.len() > 18 {
        return Err(format!("`{text}` is not a whole number of bytes: write fewer decimals"));
    }
    let scale = 10u128.pow(fraction.len() as u32);
    let digits: u128 = format!("{whole}{fraction}").parse().map_err(|_| too_large())?;
    let scaled = digits.checked_mul(1 << shift).ok_or_else(too_large)?;
    if scaled % scale != 0 {
        return Err(format!("`{text}` is not a whole number of bytes: write fewer decimals"));
    }
    match u64::try_from(scaled / scale) {
        Ok(0) => Err(format!("`{text}` is no memory: write at least 1 byte")),
        Ok(size) => Ok(size),
        Err(_) => Err(too_large()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_binary_units() {
        for (text, size) in [
            ("1", 1),
            ("1048576", 1 << 20),
            ("64MiB", 64 << 20),
            ("64M", 64 << 20),
            ("64mib", 64 << 20),
            ("64m", 64 << 20),
            ("1.5GiB", 3 << 29),
            ("1.50g", 3 << 29),
            ("0.5k", 512),
            ("2K", 2048),
            ("1TiB", 1 << 40),
            ("15EiB", 15 << 60),
            ("18446744073709551615", u64::MAX),
            ("007", 7),
        ] {
            assert_eq!(parse_size(text), Ok(size), "{text}");
        }
    }

    #[test]
    fn invalid_sizes_have_one_sentence() {
        let words = "0 0M 0.0G -1 +1 1.5 1. .5G 1..5G 1.2.3G MiB 64MB 64kb 64Mi 64MiBs 16EiB 18446744073709551616 \
            99999999999999999999999999999999999999999999 1e9 0x10 0.3K 1.0000000000000000000000001G 64µ ٣ NaN inf";
        for text in words.split(' ').chain(["", " ", "64 MiB", "64M\n"]) {
            let error = parse_size(text).unwrap_err();
            assert!(error.starts_with(&format!("`{text}` ")) && error.contains("write "), "{text:?}: {error}");
        }
        assert!(parse_size("64MB").unwrap_err().contains("write 64MiB"));
    }

    #[test]
    fn elements_are_words_of_4_bytes() {
        assert_eq!(parse_elements("3"), Ok(12));
        for text in ["", "0", "-1", "1.5", "1M", "4611686018427387904"] {
            assert!(parse_elements(text).is_err(), "{text}");
        }
    }

    #[test]
    fn salts_are_32_bits() {
        for (text, salt) in [("0", 0), ("4294967295", u32::MAX), ("0xdeadBEEF", 0xdead_beef), ("0X10", 16)] {
            assert_eq!(parse_salt(text), Ok(salt));
        }
        for text in ["", "-1", "+1", "4294967296", "0x", "0x100000000", "0x-1", "1.0", "ten"] {
            assert!(parse_salt(text).is_err(), "{text}");
        }
    }

    #[test]
    fn timeouts_need_a_unit() {
        assert_eq!(parse_timeout("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_timeout("1m 30s"), Ok(Duration::from_secs(90)));
        assert!(parse_timeout("30").unwrap_err().contains("30s"));
        assert_eq!(parse_timeout("36500days"), Ok(LONGEST));
        assert!(parse_timeout("18446744073709551615s").unwrap_err().contains("too long"));
        for text in ["", "0s", "-5s", "soon", "inf", "NaN", "1e99", "99999999999999999999s", "1.5"] {
            assert!(parse_timeout(text).is_err(), "{text}");
        }
    }
}
