//! A run: its sizes, its turns, and its report.

use vmmfd::session::Config;
use vmmfd_cli::{
    cli::{Progress, print_now},
    schema::VERSION,
    stamp,
};

use crate::{
    options::BenchOptions,
    prelude::*,
    process::{Family, Task},
    report::{Group, Report, Row, table},
};

pub(crate) use crate::report::About;

/// The fraction of the free memory that is used.
const USED: f64 = 0.95;

/// The sizes of a group without `--size`.
const GPU_SIZES: [u64; 4] = [2 << 20, 64 << 20, 1 << 30, 8 << 30];
const BROKER_SIZES: [u64; 4] = [2 << 20, 1 << 30, 8 << 30, 64 << 30];
const HOST_SIZES: [u64; 2] = [2 << 20, 64 << 20];

/// The subscribers of a stream without `--consumers`.
const STREAM_CONSUMERS: [u16; 4] = [1, 4, 16, 64];

/// A run of the groups.
pub(crate) struct Run<'a> {
    pub(crate) options: &'a BenchOptions,
    pub(crate) cancel: &'a Cancel,
    pub(crate) family: Family,
    pub(crate) task: Task,
    progress: &'a Progress,
    prints: bool,
    pub(crate) group: Group,
    pub(crate) report: Report,
}

/// The name and the samples of a row.
pub(crate) type Named = (String, Vec<f64>);

impl<'a> Run<'a> {
    /// Another process reports the machine, so that this process starts the driver only for the rows that need it.
    pub(crate) fn start(
        options: &'a BenchOptions,
        cancel: &'a Cancel,
        progress: &'a Progress,
        prints: bool,
    ) -> Result<Self> {
        progress.step("starting", 0, 1);
        let backend = options.backend;
        let task = Task { backend, device: options.device.to_string(), timeout: options.timeout, driver: true };
        let family = Family::start(&Task { driver: false, ..task.clone() }, cancel)?;
        let peer = family.peer("a process", &task, cancel, &[])?;
        // The first answer says that the process is ready.
        let machine = peer.call(&Request::Machine, &[]).and_then(|()| peer.receive()).map_err(|error| match error {
            // This process's own error has the class and the hint.
            Error::Caller(_) => open_device(backend, &task.device).err().unwrap_or(error),
            error => error,
        })?;
        let made = stamp::now();
        let report = Report {
            schema: VERSION,
            tool: stamp::tool(),
            made,
            backend,
            machine,
            rows: Vec::new(),
            left_out: Vec::new(),
        };
        Ok(Self { options, cancel, family, task, progress, prints, group: Group::All, report })
    }

    /// Starts a process with the driver of the options.
    pub(crate) fn peer(&self, name: &'static str) -> Result<Peer> {
        self.family.peer(name, &self.task, self.cancel, &[])
    }

    pub(crate) fn is_cuda(&self) -> bool {
        self.options.backend == Backend::Cuda
    }

    pub(crate) fn count(&self) -> usize {
        self.options.count as usize
    }

    /// The numbers of consumers to measure, without duplicates.
    pub(crate) fn consumers(&self) -> Vec<u16> {
        let default = if self.group == Group::Stream { &STREAM_CONSUMERS[..] } else { &[1] };
        let chosen = &self.options.consumers;
        let mut numbers = if chosen.is_empty() { default.to_vec() } else { chosen.clone() };
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }

    pub(crate) fn config(&self) -> Config {
        Config::default().timeout(self.options.timeout)
    }

    pub(crate) fn device(&self) -> Result<Device> {
        open_device(self.options.backend, &self.task.device)
    }

    /// The bytes of a device that may be used.
    pub(crate) fn usable(&self, device: &Device) -> Result<u64> {
        Ok((device.memory_info()?.free as f64 * USED) as u64)
    }

    /// The sizes to measure that fit `copies` times into the free memory, rounded up, without duplicates.
    pub(crate) fn sizes(&mut self, device: &Device, copies: u64) -> Result<Vec<u64>> {
        let granularity = device.granularity()?;
        let usable = self.usable(device)?;
        let default = match (self.options.backend, self.group) {
            (Backend::Host, _) | (_, Group::Stream) => &HOST_SIZES[..],
            (Backend::Cuda, Group::Broker) => &BROKER_SIZES,
            (Backend::Cuda, _) => &GPU_SIZES,
        };
        let mut sizes = Vec::new();
        for &size in if self.options.size.is_empty() { default } else { &self.options.size } {
            let rounded =
                size.checked_next_multiple_of(granularity).filter(|size| size.saturating_mul(copies) <= usable);
            match rounded {
                Some(size) if !sizes.contains(&size) => sizes.push(size),
                Some(_) => {}
                None => self.leave_out(format!("{}: {} are free", about(size), about(usable))),
            }
        }
        Ok(sizes)
    }

    pub(crate) fn leave_out(&mut self, what: String) {
        self.report.left_out.push(format!("{}, {what}", self.group.name()));
    }

    /// Reports the progress. Fails if the run is cancelled.
    pub(crate) fn tick(&self, what: &str, done: usize, all: usize) -> Result<()> {
        self.progress.step(what, done, all);
        self.cancel.check()
    }

    /// Measures rows in turns, at most `most` samples of each after a warm-up. `measure` gets the number of the row and returns a sample.
    pub(crate) fn turns(
        &self,
        what: &str,
        names: &[&str],
        most: usize,
        mut measure: impl FnMut(usize) -> Result<f64>,
    ) -> Result<Vec<Named>> {
        self.rounds(what, names, most, |round| {
            let mut samples = vec![0.0; names.len()];
            for turn in 0..names.len() {
                // Rotate the order: no row is always first, or always after the same row.
                let row = (turn + round) % names.len();
                samples[row] = measure(row)?;
            }
            Ok(samples)
        })
    }

    /// As [`Run::turns`], but `measure` gets the number of the round and returns a sample of each row.
    pub(crate) fn rounds(
        &self,
        what: &str,
        names: &[&str],
        most: usize,
        mut measure: impl FnMut(usize) -> Result<Vec<f64>>,
    ) -> Result<Vec<Named>> {
        let count = self.count().min(most);
        let warm_up = (count / 10).clamp(1, 20);
        let mut measured: Vec<Named> =
            names.iter().map(|name| ((*name).to_owned(), Vec::with_capacity(count))).collect();
        for round in 0..warm_up + count {
            self.tick(what, round, warm_up + count)?;
            let samples = measure(round)?;
            if round >= warm_up {
                measured.iter_mut().zip(samples).for_each(|((_, all), sample)| all.push(sample));
            }
        }
        Ok(measured)
    }

    /// Adds measured rows, and prints them. The ratios are to the row `floor`. Returns the medians.
    pub(crate) fn add(&mut self, about: About, measured: Vec<Named>, floor: Option<&str>) -> Result<Vec<f64>> {
        let mut rows: Vec<Row> = measured
            .into_iter()
            .map(|(name, samples)| Row::derived(self.group, name, 0.0, about).with_samples(&samples))
            .collect();
        let base = rows.iter().find(|row| Some(&*row.name) == floor).map(|row| row.median);
        rows.iter_mut().for_each(|row| row.ratio = base.map(|base| row.median / base));
        self.print(&table(&rows))?;
        let medians = rows.iter().map(|row| row.median).collect();
        self.report.rows.append(&mut rows);
        Ok(medians)
    }

    /// Adds numbers that are derived from rows, with their units, and prints them.
    pub(crate) fn derive(&mut self, about: About, numbers: Vec<(String, f64, &'static str)>) -> Result<()> {
        for (name, number, unit) in numbers {
            let row = Row::derived(self.group, name, number, About { unit, ..about });
            self.print(&row.line())?;
            self.report.rows.push(row);
        }
        Ok(())
    }

    /// Prints text, below the machine.
    fn print(&self, text: &str) -> Result<()> {
        if !self.prints {
            return Ok(());
        }
        let head = if self.report.rows.is_empty() { self.report.head() } else { String::new() };
        let printed = self.progress.suspend(|| print_now(&(head + text)));
        printed.map_err(|error| Error::system("write to standard output", error))
    }
}
