//! The commands of the broker and of its clients.

mod exporter;
mod fields;
mod get;
mod keeper;
mod ls;
mod options_file;
mod put;
mod recall;
mod rm;
mod serve;
mod stat;
mod status;
mod values;
mod watch;
mod who;

use std::path::Path;

use vmmfd::{
    broker::{Client, DeviceBytes},
    channel::{BrokerPath, Trust},
    internals::prefixed_uuid,
    memory::DeviceIdentity,
    session::Config,
};

use super::{options::parse_uid, report::Step};
use crate::{
    cli::prelude::*,
    units::{self, count},
};

pub(super) use self::options_file::read as read_options_file;
pub(super) use self::{
    exporter::ExporterOptions, get::GetOptions, keeper::KeeperOptions, ls::LsOptions, put::PutOptions,
    recall::RecallOptions, rm::RmOptions, serve::ServeOptions, stat::StatOptions, status::StatusOptions,
    watch::WatchOptions, who::WhoOptions,
};

/// Options of the connection to the broker.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Meeting")]
struct MeetBroker {
    /// Unix socket of the broker [default: $XDG_RUNTIME_DIR/vmmfd/broker.sock, else /tmp/vmmfd-UID/broker.sock; if no broker listens
    /// there, /run/vmmfd/broker.sock if it exists]
    #[arg(long, value_name = "PATH", env = "VMMFD_BROKER_SOCKET")]
    socket: Option<PathBuf>,

    /// Other user that the broker may run as, besides this user and root; repeatable
    #[arg(long = "allow-uid", value_name = "UID", value_parser = parse_uid)]
    allow_uids: Vec<u32>,

    /// Longest wait for each answer of the broker: 500ms, 30s, 2m
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = parse_timeout)]
    timeout: Duration,
}

impl MeetBroker {
    /// Connects to the broker.
    ///
    /// # Errors
    /// As [`Client::connect`].
    fn connect(&self, cancel: &Cancel) -> Result<Client> {
        self.connect_at(cancel).map(|(client, _)| client)
    }

    /// As [`MeetBroker::connect`]; also returns the socket's path.
    fn connect_at(&self, cancel: &Cancel) -> Result<(Client, PathBuf)> {
        let trust = Trust { uids: self.allow_uids.clone() };
        broker_at(self.socket.as_deref(), &Config::default().timeout(self.timeout).trust(trust).cancel(cancel))
    }
}

/// Connects to the broker at a socket, or at the default one. Returns the socket's path too.
///
/// # Errors
/// As [`Client::connect`].
pub(super) fn broker_at(socket: Option<&Path>, config: &Config) -> Result<(Client, PathBuf)> {
    let found = BrokerPath::find(socket)?;
    let path = found.path();
    let client = Client::connect(path, config).map_err(|error| found.complete(error))?;
    Ok((client, path.to_owned()))
}

/// The steps of a command with their times.
#[derive(Debug, Default)]
struct Steps(Vec<Step>);

impl Steps {
    /// Runs a step and records its time.
    fn time<T>(&mut self, name: &'static str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let begun = std::time::Instant::now();
        let result = work()?;
        self.0.push(Step { name, us: u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX), by: None });
        Ok(result)
    }
}

/// Its text: see [`units::device`].
fn shown(device: &DeviceIdentity, verbose: bool) -> String {
    units::device(&device.name, &prefixed_uuid(device), verbose)
}

/// The memory on all devices.
fn total(devices: &[DeviceBytes]) -> u64 {
    devices.iter().fold(0, |sum, of| sum.saturating_add(of.bytes))
}

/// The device, or the number of devices.
fn devices_in_short(devices: &[DeviceBytes]) -> String {
    match devices {
        [] => "-".to_owned(),
        [one] => units::short(&prefixed_uuid(&one.device)).to_owned(),
        several => format!("{} devices", several.len()),
    }
}
