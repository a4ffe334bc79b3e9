//! The process of a broker, and objects in it.

use std::{
    fs, io,
    path::PathBuf,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::sys::signal::{Signal, kill};
use vmmfd::{
    array::{ArrayDescriptor, ElementType, Order},
    broker::{ArrayEntry, Client, Put, PutPart},
    channel::Cancel,
    error::{Error, Result},
    memory::Shared,
};
use vmmfd_cli::child::Process;

use crate::{
    base::not_prepared,
    process::{beside, wait_for_line},
    run::Run,
};

/// The size for rows of a single size.
pub(crate) const SMALL: u64 = 2 << 20;

/// The size of an array in bytes.
const ARRAY: u64 = 200;

/// A running `vmmfd serve`. Dropping it stops the processes.
pub(crate) struct Broker {
    process: Process,
    pub(crate) socket: PathBuf,
}

impl Drop for Broker {
    fn drop(&mut self) {
        // Stops the keeper too. Fails if the process has ended.
        let _ = kill(self.process.pid(), Signal::SIGTERM);
        let never = Cancel::new().map(|never| self.process.wait(Instant::now() + Duration::from_secs(1), &never));
        drop(never);
    }
}

impl Broker {
    /// Starts a broker, with a keeper or without, and waits until it listens.
    pub(crate) fn start(run: &Run<'_>, keeper: bool) -> Result<Self> {
        let missing = io::Error::from(io::ErrorKind::NotFound);
        let program = beside("vmmfd").ok_or_else(|| Error::system("find vmmfd beside vmmfd-bench", missing))?;
        let socket = run.family.folder().join(if keeper { "kept.sock" } else { "broker.sock" });
        let mut command = Command::new(program);
        command.args(["serve", "--quiet", "--socket"]).arg(&socket).stdin(Stdio::null()).stdout(Stdio::piped());
        command.args((!keeper).then_some("--no-keeper")).args(run.options.emulated.then_some("--emulated"));
        let mut broker = Self { process: run.family.spawn("the broker", &mut command)?, socket };
        wait_for_line(&mut broker.process, "listening", run.options.timeout, run.cancel)?;
        Ok(broker)
    }

    pub(crate) fn connect(&self, run: &Run<'_>) -> Result<Client> {
        Client::connect(&self.socket, &run.config())
    }

    /// A file of the process in `/proc`.
    fn read(&self, file: &str) -> Result<String> {
        let path = format!("/proc/{}/{file}", self.process.pid());
        fs::read_to_string(&path).map_err(|error| Error::system(format!("read {path}"), error))
    }

    /// The user and system time in microseconds, in steps of 10 ms: fields 14 and 15 of proc_pid_stat(5).
    pub(crate) fn cpu(&self) -> Result<[f64; 2]> {
        let stat = self.read("stat")?;
        let fields = stat.rsplit_once(')').ok_or_else(not_prepared)?.1.split_ascii_whitespace();
        let mut ticks = fields.skip(11).map(|field| field.parse::<f64>().unwrap_or(0.0) * 1e4);
        Ok([ticks.next().unwrap_or(0.0), ticks.next().unwrap_or(0.0)])
    }

    /// The resident memory in megabytes.
    pub(crate) fn resident(&self) -> Result<f64> {
        let status = self.read("status")?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB"));
        Ok(line.and_then(|kib| kib.trim().parse::<f64>().ok()).ok_or_else(not_prepared)? * 1024.0 / 1e6)
    }

    pub(crate) fn descriptors(&self) -> Result<usize> {
        let path = format!("/proc/{}/fd", self.process.pid());
        Ok(fs::read_dir(&path).map_err(|error| Error::system(format!("read {path}"), error))?.count())
    }

    /// Waits until at most `most` descriptors are open: the broker closes those of deleted objects in another thread.
    pub(crate) fn wait_for_descriptors(&self, run: &Run<'_>, most: usize) -> Result<()> {
        let begun = Instant::now();
        while self.descriptors()? > most {
            if begun.elapsed() > run.options.timeout {
                return Err(self.process.failure("does not close the descriptors of deleted objects".to_owned(), None));
            }
            run.cancel.check()?;
            thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }
}

pub(crate) fn put(client: &Client, name: &str, memory: &Shared, arrays: u64) -> Result<()> {
    let arrays = (0..arrays).map(array).collect::<Result<Vec<_>>>()?;
    client.put(&Put::new(name).part(PutPart::of("all", memory)?.arrays(arrays))).map(drop)
}

/// Array `number` of an object of many adjacent arrays.
pub(crate) fn array(number: u64) -> Result<ArrayEntry> {
    let mut array = ArrayDescriptor::new(ElementType::F32, [ARRAY / 4], Order::C)?;
    array.offset = number * ARRAY;
    Ok(ArrayEntry::new(format!("model.layers.{}.weight.{}", number / 100, number % 100), array))
}
