//! The options of `bench`.

use std::time::Duration;

use clap::Args;
use vmmfd::{driver::Backend, memory::Selector};
use vmmfd_cli::{
    cli::{BACKEND, parse_size, parse_timeout},
    exit_codes,
};

use crate::report::Group;

/// Measures handoffs between processes, and the driver's own calls
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("measured", "nothing could be measured: the report says why"; 2 3 5 130))]
pub(crate) struct BenchOptions {
    /// What to measure
    #[arg(value_name = "GROUP", default_value = "all")]
    pub(crate) group: Group,

    /// Sizes, separated by commas [default: 2MiB,64MiB,1GiB,8GiB, and for broker 2MiB,1GiB,8GiB,64GiB; for stream and on the host backend 2MiB,64MiB]
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', value_parser = parse_size, help_heading = "Buffer")]
    pub(crate) size: Vec<u64>,

    /// Samples of each row; fewer of slow ones
    #[arg(long, value_name = "N", default_value = "200", value_parser = clap::value_parser!(u32).range(1..=1_000_000),
        help_heading = "Buffer")]
    pub(crate) count: u32,

    /// Where the memory is: host measures no GPU. VMMFD_BACKEND is ignored, and there is no fallback
    #[arg(long, value_name = "BACKEND", value_parser = BACKEND, default_value = "cuda", help_heading = "Sharing")]
    pub(crate) backend: Backend,

    /// Device to measure; a UUID may be abbreviated
    #[arg(long, value_name = "ORDINAL|UUID", default_value = "0", help_heading = "Sharing")]
    pub(crate) device: Selector,

    /// Numbers of concurrent consumers, separated by commas [default: 1, and for stream 1,4,16,64]
    #[arg(long, value_name = "N,...", value_delimiter = ',',
        value_parser = clap::value_parser!(u16).range(1..=256), help_heading = "Meeting")]
    pub(crate) consumers: Vec<u16>,

    /// Clients that get an object of the broker at once
    #[arg(long, value_name = "N", default_value = "64", value_parser = clap::value_parser!(u16).range(1..=1024),
        help_heading = "Meeting")]
    pub(crate) clients: u16,

    /// How long another process may take for one step
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = parse_timeout, help_heading = "Meeting")]
    pub(crate) timeout: Duration,

    /// Let the broker accept host memory as GPU memory: for tests with the emulated driver
    #[arg(long, hide = true, help_heading = "Meeting")]
    pub(crate) emulated: bool,
}
