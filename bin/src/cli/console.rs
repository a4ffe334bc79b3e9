//! The output of `produce` and `consume`: one line per step, or one JSON object.

use std::{
    fmt::Display,
    io, mem,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use vmmfd::{
    array::ArrayDescriptor,
    driver::Backend,
    error::Error,
    memory::{Description, Device},
    session::{
        Event, Verdict,
        handoff::{Findings, Served},
    },
};

use super::{
    Exit,
    describe::{described, findings, first_words, kind, numbers, spelled},
    output::{Output, Progress, complain, print_now},
    report::{CommandReport, ConsumerReport, ErrorSummary, Step, UsedDevice},
};
use crate::{
    check::{
        self, Figures,
        pattern::{Engine, Work},
    },
    units::{bytes, time},
};

/// The longest list of steps in the report: a service may run for months.
const MAX_STEPS: usize = 1000;

/// Prints the steps of a session and its report.
#[derive(Debug)]
pub struct Console {
    output: Output,
    progress: Progress,
    state: Mutex<Collected>,
    /// Whether the result is printed. Locked while it is printed, so that a second caller waits.
    finished: Mutex<bool>,
}

#[derive(Debug)]
struct Collected {
    report: CommandReport,
    /// An error of standard output, such as a full disk. A broken pipe is not an error.
    stdout: Option<io::Error>,
}

impl Console {
    pub(super) fn new(role: &'static str, output: &Output) -> Self {
        let report = CommandReport::new(role);
        Self {
            output: output.clone(),
            progress: output.progress(),
            state: Mutex::new(Collected { report, stdout: None }),
            finished: Mutex::new(false),
        }
    }

    /// Prints the result of the command and returns its exit. Only the first call prints.
    pub(super) fn finish(&self, result: Result<Exit, Error>) -> Exit {
        self.progress.close();
        let mut finished = self.finished.lock().unwrap_or_else(PoisonError::into_inner);
        if mem::replace(&mut *finished, true) {
            return result.unwrap_or_else(|error| Exit::of(&error));
        }
        let exit = match result {
            Ok(Exit::Mismatch) => {
                self.mismatch();
                Exit::Mismatch
            }
            Ok(exit) => exit,
            Err(error) => {
                self.complain(ErrorSummary::of(&error));
                Exit::of(&error)
            }
        };
        if self.output.json {
            self.print_json();
        }
        self.written(exit)
    }

    /// The exit after the output: a success that could not be printed is a failure.
    fn written(&self, exit: Exit) -> Exit {
        match self.state().stdout.take() {
            Some(error) => exit.unwritten(&error),
            None => exit,
        }
    }

    fn complain(&self, report: ErrorSummary) {
        report.complain();
        self.state().report.error = Some(report);
    }

    /// Adds a verdict to the report.
    pub fn found(&self, verdict: &Verdict) {
        let figures = Figures::of(verdict);
        let report = &mut self.state().report;
        // A later success does not replace the first mismatch of several consumers.
        if report.verified != Some(false) {
            report.verified = Some(verdict.verified);
            report.mismatches = figures.mismatches;
            report.first_mismatch = figures.first_mismatch;
            if figures.digest.is_some() {
                report.digest = figures.digest;
            }
        }
    }

    /// Adds the findings of a consumer and its producer to the report.
    pub fn findings(&self, findings: &Findings) {
        match &findings.producer {
            Ok(producer) if findings.found.verified => {
                self.found(producer);
                // The producer verifies the reply, not the data.
                if let Some(digest) = Figures::of(&findings.found).digest {
                    self.state().report.digest = Some(digest);
                }
            }
            _ => self.found(&findings.found),
        }
    }

    /// Adds the results of a producer's consumers to the report, in the order in which they finished.
    pub fn served(&self, served: &[Served]) {
        for verdict in served.iter().filter_map(|served| served.found.as_ref()) {
            self.found(verdict);
        }
        self.state().report.consumers = Some(served.iter().map(ConsumerReport::from).collect());
    }

    fn mismatch(&self) {
        let state = self.state();
        let first = state.report.first_mismatch;
        let message = match state.report.mismatches {
            // The peer found the mismatch and reported no counts.
            0 => "the data did not verify".to_owned(),
            words => format!("the data did not verify: {words} wrong{}", first_words(first)),
        };
        drop(state);
        let hint = "expected with --corrupt; otherwise look for another process that writes to the buffer".to_owned();
        self.complain(ErrorSummary { kind: "mismatch", message, hint: Some(hint) });
    }

    /// Prints a step of the session and adds it to the report.
    pub fn event(&self, event: Event<'_>) {
        match event {
            Event::Started { backend, fallback, elapsed } => {
                let fallback = self.output.notice_fallback(fallback);
                {
                    let report = &mut self.state().report;
                    (report.backend, report.fallback) = (Some(backend), fallback);
                }
                let what = match backend {
                    Backend::Cuda => "cuda: the NVIDIA driver of this machine",
                    Backend::Host => "host: ordinary memory, without a GPU",
                };
                self.step("driver", Some(elapsed), what);
            }
            Event::Device { device, granularity, elapsed } => {
                self.device(device, granularity);
                let line = format!("{}: {device}, granularity {}", device.ordinal(), bytes(granularity));
                self.step("device", Some(elapsed), line);
            }
            Event::Created { description, elapsed } => {
                self.memory(description);
                let Description { size, mapped_size, .. } = description;
                self.step(
                    "create",
                    Some(elapsed),
                    format!("{} for {} asked for{}", bytes(*mapped_size), bytes(*size), kind(description)),
                );
            }
            Event::Mapped { address, access, elapsed } => {
                self.step("map", Some(elapsed), format!("at {address:#x}, {}", spelled(access)));
            }
            Event::Exported { fds, elapsed } => self.step("export", Some(elapsed), numbers(fds)),
            Event::Sealed { enforced, elapsed } => {
                let how = match enforced {
                    true => "enforced: the kernel refuses every write",
                    false => "by agreement: a process that holds the descriptor or handle can still write",
                };
                self.step("seal", Some(elapsed), how);
            }
            Event::Listening { path, consumers } => {
                let expected = match consumers {
                    0 => "any number of consumers".to_owned(),
                    1 => "1 consumer".to_owned(),
                    number => format!("{number} consumers"),
                };
                self.step("listen", None, format!("{} for {expected}", path.display()));
            }
            Event::Connected { peer, elapsed } => {
                self.step("connect", Some(elapsed), format!("to pid {}, uid {}", peer.pid, peer.uid));
            }
            Event::Requested { peer } => self.step("request", None, format!("from pid {}, uid {}", peer.pid, peer.uid)),
            Event::Offered { peer, access, elapsed } => {
                self.step("offer", Some(elapsed), format!("to pid {}, {}, received", peer.pid, spelled(access)));
            }
            Event::Received { description, fds, elapsed } => {
                self.memory(description);
                self.step("offer", Some(elapsed), received(description, fds));
            }
            Event::Reported { peer, verdict, elapsed } => {
                let figures = Figures::of(verdict);
                let result = if verdict.verified { "verified" } else { "NOT VERIFIED" };
                let checked = match (figures.words, &figures.digest) {
                    (0, None) => String::new(),
                    _ => format!(": {}", findings(verdict.verified, &figures)),
                };
                self.step("result", Some(elapsed), format!("pid {} reports {result}{checked}", peer.pid));
            }
            Event::Ended { served } => {
                let report = ConsumerReport::from(served);
                let why = report.error.map(|error| format!(": {error}")).unwrap_or_default();
                self.step("done", None, format!("pid {}: {}{why}", report.pid, report.outcome));
            }
            _ => {}
        }
    }

    /// Prints a step on the data and adds it to the report.
    pub fn check(&self, event: check::Event<'_>) {
        match event {
            check::Event::Filled { words, salt, work, elapsed } => {
                let what = format!("{words} words, salt {salt:#010x}");
                self.work("fill", elapsed, what, words, Some(work));
            }
            check::Event::Loaded { size, digest, elapsed } => {
                self.state().report.digest = Some(digest.to_owned());
                self.step("load", Some(elapsed), format!("{}, {digest}", bytes(size)));
            }
            check::Event::Progress { done, all } => self.progress.bytes(done, all),
            check::Event::Array { array, first } => {
                self.state().report.array = Some(array.clone());
                self.step("array", None, format!("{}: {}", described(array), first.join(" ")));
            }
            check::Event::Verified { verified, figures, work, elapsed } => {
                self.work("verify", elapsed, findings(verified, figures), figures.words, work);
            }
            check::Event::Saved { path, size, elapsed } => {
                self.step("save", Some(elapsed), format!("{} in {}", bytes(size), path.display()));
            }
        }
    }

    /// Adds the array to the report.
    pub fn array(&self, array: Option<&ArrayDescriptor>) {
        self.state().report.array = array.cloned();
    }

    fn device(&self, device: &Device, granularity: u64) {
        let report = &mut self.state().report;
        let (name, uuid) = (device.name().to_owned(), device.prefixed_uuid());
        report.device = Some(UsedDevice { name, uuid, ordinal: device.ordinal() });
        report.granularity = Some(granularity);
    }

    fn memory(&self, description: &Description) {
        let report = &mut self.state().report;
        report.mechanism = Some(description.mechanism().to_string());
        report.location = Some(description.placement().to_string());
        report.size = Some(description.size);
        report.mapped_size = Some(description.mapped_size);
        report.segments = Some(description.segments());
    }

    /// Prints a step on the pattern with its engine.
    fn work(&self, name: &'static str, elapsed: Duration, what: String, words: u64, work: Option<&Work>) {
        let Some(work) = work else { return self.step(name, Some(elapsed), what) };
        if let Some(reason) = &work.fallback {
            complain(&format!("warning: cannot load the GPU kernels, using the CPU: {reason}"));
        }
        let by = match work.engine {
            // The speed of the kernels, without their launch.
            Engine::Gpu => match words as f64 * 4.0 / work.elapsed.as_secs_f64().max(1e-7) {
                rate if rate >= 1e12 => format!("on the GPU at {:.2} TB/s", rate / 1e12),
                rate if rate >= 1e9 => format!("on the GPU at {:.1} GB/s", rate / 1e9),
                rate => format!("on the GPU at {:.3} GB/s", rate / 1e9),
            },
            Engine::Host => "on the CPU".to_owned(),
        };
        self.step_by(name, Some(elapsed), format!("{what}, {by}"), Some(work.engine));
    }

    fn step(&self, name: &'static str, elapsed: Option<Duration>, what: impl Display) {
        self.step_by(name, elapsed, what, None);
    }

    fn step_by(&self, name: &'static str, elapsed: Option<Duration>, what: impl Display, by: Option<Engine>) {
        let mut state = self.state();
        let time = match elapsed {
            Some(elapsed) => {
                let us = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX);
                if self.output.json && state.report.steps.len() < MAX_STEPS {
                    state.report.steps.push(Step { name, us, by });
                }
                format!(" ({})", time(elapsed))
            }
            None => String::new(),
        };
        if !self.output.quiet && !self.output.json {
            let line = format!("{:<8}  {name:<7}  {what}{time}", state.report.role);
            self.progress.suspend(|| state.print(&line));
        }
    }

    fn print_json(&self) {
        let mut state = self.state();
        match serde_json::to_string(&state.report) {
            Ok(json) => state.print(&json),
            Err(error) => state.stdout = Some(error.into()),
        }
    }

    fn state(&self) -> MutexGuard<'_, Collected> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn received(description: &Description, fds: &[i32]) -> String {
    let Description { size, mapped_size, .. } = description;
    format!("{} in {} mapped{}, {}", bytes(*size), bytes(*mapped_size), kind(description), numbers(fds))
}

impl Collected {
    fn print(&mut self, line: &str) {
        if let Err(error) = print_now(&format!("{line}\n")) {
            self.stdout = Some(error);
        }
    }
}
