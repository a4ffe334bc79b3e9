//! A probe, as data: what it tries, what it needs, and what its errors mean.

use std::time::Instant;

use vmmfd::{
    driver::{Backend, code},
    memory::Device,
};

use super::{
    ErrorDetails, Finding, Reason, Status,
    context::ProbeContext,
    outcome::{ProbeFailure, ProbeOutcome, ProbeResult, micros},
};

/// The probes of a feature that a driver or device may lack: there `CUDA_ERROR_NOT_SUPPORTED` means that it does. From any other
/// probe the same code is a failure.
const FEATURES: &[&str] = &["memory", "export", "host-numa", "dma-buf", "fabric", "pool", "legacy", "event", "peer"];

/// One thing that is tried.
#[derive(Debug)]
pub struct Probe {
    /// Its name.
    pub name: &'static str,
    /// What it tries, in one line.
    pub about: &'static str,
    /// Whether it must be `ok` for the verdict.
    pub required: bool,
    /// Whether it provokes a fault of the GPU, which the kernel's log records (Xid): it runs only when it is asked for.
    pub faults: bool,
    /// What it means if the thing that is tried does not work.
    pub(super) broken: &'static str,
    /// What remains unknown if another error prevents the try. Without it every error means `broken`.
    whether: Option<&'static str>,
    /// The driver calls under test: if one of them fails, the thing that is tried does not work.
    calls: &'static [&'static str],
    /// Whether it needs a process of its own, because it corrupts the context or kills the process.
    pub(super) alone: bool,
    /// Whether what it measures depends on what any process of the machine does with the driver.
    pub(super) machine_wide: bool,
    run: ProbeFn,
}

/// The function of a probe, with what it needs.
#[derive(Debug, Clone, Copy)]
pub(super) enum ProbeFn {
    Machine(fn(Backend) -> ProbeResult),
    Device(fn(&mut ProbeContext) -> ProbeResult),
    Pair(fn(&mut ProbeContext, &Device) -> ProbeResult),
}

/// What a probe is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// The machine as a whole.
    Machine,
    /// Each device.
    Device,
    /// Each ordered pair of devices.
    Pair,
}

/// A probe that is not required, and whose every error means that the thing that is tried does not work.
pub(super) const fn probe(name: &'static str, run: ProbeFn, about: &'static str, broken: &'static str) -> Probe {
    Probe {
        name,
        about,
        required: false,
        faults: false,
        broken,
        whether: None,
        calls: &[],
        alone: false,
        machine_wide: false,
        run,
    }
}

impl Probe {
    pub(super) const fn required(self) -> Self {
        Self { required: true, ..self }
    }

    pub(super) const fn alone(self) -> Self {
        Self { alone: true, ..self }
    }

    pub(super) const fn faults(self) -> Self {
        Self { faults: true, ..self }
    }

    pub(super) const fn machine_wide(self) -> Self {
        Self { machine_wide: true, ..self }
    }

    /// Distinguishes two cases: the thing that is tried does not work, if one of these calls fails; and it could not be tried.
    pub(super) const fn whether(self, whether: &'static str, calls: &'static [&'static str]) -> Self {
        Self { whether: Some(whether), calls, ..self }
    }

    /// What it is about.
    pub fn scope(&self) -> Scope {
        match self.run {
            ProbeFn::Machine(_) => Scope::Machine,
            ProbeFn::Device(_) => Scope::Device,
            ProbeFn::Pair(_) => Scope::Pair,
        }
    }

    /// The finding of a probe that was cut short by an error outside of it.
    pub(super) fn cut_short(&self, us: Option<u64>, error: ErrorDetails) -> Finding {
        let outcome = ProbeOutcome::failed(self.meaning_of(&error)).with_error(error);
        self.finding(us, outcome)
    }

    /// The finding of a probe that was not tried.
    pub(super) fn skipped(&self, why: &str) -> Finding {
        self.finding(None, ProbeOutcome::new(Status::Skipped, why))
    }

    fn finding(&self, us: Option<u64>, outcome: ProbeOutcome) -> Finding {
        let ProbeOutcome { status, figures, meaning, error } = outcome;
        let probe = self.name.to_owned();
        Finding { probe, status, us, figures, error, meaning, cause: None, remedy: None, rule: None }
    }

    /// Runs an attempt in its name.
    pub(super) fn examine(&self, attempt: impl FnOnce() -> ProbeResult) -> Finding {
        let begun = Instant::now();
        let outcome = attempt().unwrap_or_else(|failure| self.outcome_of(failure));
        self.finding(Some(micros(begun.elapsed())), outcome)
    }

    /// What an error, of this end or of the other, says about the thing that is tried.
    pub(super) fn outcome_of(&self, failure: ProbeFailure) -> ProbeOutcome {
        let ProbeFailure { error, figures } = failure;
        let outcome = match (self.is_unsupported(&error), self.required) {
            (true, true) => ProbeOutcome::new(Status::Unsupported, self.broken),
            (true, false) => ProbeOutcome::new(Status::Unsupported, "Not supported on this system."),
            (false, _) => ProbeOutcome::failed(self.meaning_of(&error)),
        };
        ProbeOutcome { figures, ..outcome.with_error(*error) }
    }

    /// Whether an error says that this system does not support the thing that is tried.
    fn is_unsupported(&self, error: &ErrorDetails) -> bool {
        // Every feature needs a context, which belongs to none of them.
        let is_context = |call: &str| ["cuCtx", "cuDevicePrimaryCtx"].iter().any(|start| call.starts_with(start));
        let context = error.call.as_deref().is_some_and(is_context);
        match error.code {
            Some(code::NOT_PERMITTED) => self.name == "fabric" && !context,
            Some(code::NOT_SUPPORTED) => FEATURES.contains(&self.name) && !context,
            // A library that exists and does not load is broken.
            _ => error.is_unsupported() && error.reason != Some(Reason::LibraryBroken),
        }
    }

    /// What an error says about the thing that is tried, in one sentence.
    fn meaning_of(&self, error: &ErrorDetails) -> String {
        let under_test = error.call.as_deref().is_some_and(|call| self.calls.contains(&call));
        match self.whether {
            // Every probe of memory can run out of it.
            Some(whether) if !under_test || error.code == Some(code::OUT_OF_MEMORY) => {
                format!("It could not be tried whether {whether}.")
            }
            _ => self.broken.to_owned(),
        }
    }

    pub(super) fn run_machine(&self, backend: Backend) -> Option<Finding> {
        let ProbeFn::Machine(run) = self.run else { return None };
        Some(self.examine(|| run(backend)))
    }

    pub(super) fn run_device(&self, context: &mut ProbeContext, owner: Option<&Device>) -> Option<Finding> {
        match (self.run, owner) {
            (ProbeFn::Device(run), None) => Some(self.examine(|| run(context))),
            (ProbeFn::Pair(run), Some(owner)) => Some(self.examine(|| run(context, owner))),
            _ => None,
        }
    }
}
