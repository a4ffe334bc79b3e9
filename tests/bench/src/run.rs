//! A run: its sizes, its turns, and its report.

use vmmfd::{
    channel::Cancel,
    driver::{Backend, Driver},
    error::{Error, Result},
    memory::Device,
    session::Config,
};
use vmmfd_cli::{
    cli::{Progress, print_lines},
    schema::VERSION,
    stamp,
    units::about,
};

pub(crate) use crate::report::About;
use crate::{
    base::{not_prepared, open_device, usable},
    options::BenchOptions,
    process::{Family, Peer, Role},
    report::{Group, Report, Row, table},
};

/// The sizes of a group without `--size`.
const GPU_SIZES: [u64; 4] = [2 << 20, 64 << 20, 1 << 30, 8 << 30];
const BROKER_SIZES: [u64; 4] = [2 << 20, 1 << 30, 8 << 30, 64 << 30];
const HOST_SIZES: [u64; 2] = [2 << 20, 64 << 20];

/// A run of the groups.
pub(crate) struct Run<'a> {
    pub(crate) options: &'a BenchOptions,
    pub(crate) cancel: &'a Cancel,
    pub(crate) family: Family,
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
        let family = Family::start(options.timeout, cancel)?;
        let peer = Peer::start(&family, "a process", &Role::of(options), options.timeout, cancel, &[])?;
        let machine = peer.receive().map_err(|error| match error {
            // This process's own error has the class and the hint.
            Error::Caller(_) => open_device(options.backend, &options.device.to_string()).err().unwrap_or(error),
            error => error,
        })?;
        let machine = machine.machine.ok_or_else(not_prepared)?;
        let tool = stamp::tool();
        let made = stamp::now();
        let backend = options.backend;
        let report = Report { schema: VERSION, tool, made, backend, machine, rows: Vec::new(), left_out: Vec::new() };
        Ok(Self { options, cancel, family, progress, prints, group: Group::All, report })
    }

    pub(crate) fn peer(&self, name: &'static str, role: &Role) -> Result<Peer> {
        self.peer_with(name, role, &[])
    }

    pub(crate) fn peer_with(&self, name: &'static str, role: &Role, variables: &[(&str, &str)]) -> Result<Peer> {
        Peer::start(&self.family, name, role, self.options.timeout, self.cancel, variables)
    }

    pub(crate) fn is_cuda(&self) -> bool {
        self.options.backend == Backend::Cuda
    }

    pub(crate) fn count(&self) -> usize {
        self.options.count as usize
    }

    pub(crate) fn config(&self) -> Config {
        Config::default().timeout(self.options.timeout)
    }

    pub(crate) fn device(&self) -> Result<(Driver, Device)> {
        open_device(self.options.backend, &self.options.device.to_string())
    }

    /// The sizes to measure that fit `copies` times into the free memory, rounded up, without duplicates.
    pub(crate) fn sizes(&mut self, device: &Device, copies: u64) -> Result<Vec<u64>> {
        let granularity = device.granularity()?;
        let usable = usable(device)?;
        let default = match (self.options.backend, self.group) {
            (Backend::Host, _) => &HOST_SIZES[..],
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

    /// Adds rows and derived numbers (with their units), and prints them. The ratios are to the row `floor`. `derive` gets the medians.
    pub(crate) fn add(
        &mut self,
        about: About,
        measured: Vec<Named>,
        floor: Option<&str>,
        derive: impl FnOnce(&[f64]) -> Vec<(String, f64, &'static str)>,
    ) -> Result<()> {
        let row = |name, median, unit| Row::derived(self.group, name, median, About { unit, ..about });
        let measured = measured.into_iter().filter(|(_, samples)| !samples.is_empty());
        let mut rows: Vec<Row> =
            measured.map(|(name, samples)| row(name, 0.0, about.unit).with_samples(&samples)).collect();
        let base = rows.iter().find(|row| Some(&*row.name) == floor).map(|row| row.median);
        rows.iter_mut().for_each(|row| row.ratio = base.map(|base| row.median / base));
        let medians: Vec<f64> = rows.iter().map(|row| row.median).collect();
        rows.extend(derive(&medians).into_iter().map(|(name, median, unit)| row(name, median, unit)));
        let head = if self.report.rows.is_empty() { self.report.head() } else { String::new() };
        let text = head + &table(&rows);
        self.report.rows.append(&mut rows);
        if !self.prints {
            return Ok(());
        }
        let printed = self.progress.suspend(|| print_lines(&text));
        printed.map_err(|error| Error::system("write to standard output", error))
    }
}

/// Derives nothing.
pub(crate) fn nothing(_: &[f64]) -> Vec<(String, f64, &'static str)> {
    Vec::new()
}
