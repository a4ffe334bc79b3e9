//! A probe as data: its function, its requirements, and the meaning of its errors.

use std::time::Instant;

use vmmfd::{
    driver::{Backend, code},
    memory::Device,
};

use super::{
    ErrorDetails, Finding, Reason, Status,
    context::ProbeContext,
    outcome::{ProbeFailure, ProbeOutcome, ProbeResult, micros},
    sharing::MemoryKind,
};

/// Probes of optional features: for them `CUDA_ERROR_NOT_SUPPORTED` means that the feature is missing. For any other probe it is a failure.
const FEATURES: &[&str] = &["memory", "export", "host-numa", "dma-buf", "fabric", "pool", "legacy", "event", "peer"];

#[derive(Debug)]
pub struct Probe {
    pub name: &'static str,
    /// A description in one line.
    pub about: &'static str,
    /// Whether the verdict requires it.
    pub required: bool,
    /// Whether it provokes a GPU fault, which the kernel logs (Xid). Such a probe runs only on request.
    pub faults: bool,
    /// The meaning of a failure.
    pub(super) broken: &'static str,
    /// Completes "It could not be tested whether ..." for an error outside of `calls`. If absent, every error means `broken`.
    whether: Option<&'static str>,
    /// The driver calls under test. If one fails, the meaning is `broken`.
    calls: &'static [&'static str],
    /// Whether it needs a separate process because it corrupts the context or kills the process.
    pub(super) alone: bool,
    /// Whether other processes that use the driver affect its measurements.
    pub(super) machine_wide: bool,
    run: ProbeFn,
}

/// The function of a probe, with its inputs.
#[derive(Debug, Clone, Copy)]
pub(super) enum ProbeFn {
    Machine(fn(Backend) -> ProbeResult),
    Device(fn(&mut ProbeContext) -> ProbeResult),
    /// Shares memory with a peer process, like a producer with a consumer.
    Share(MemoryKind),
    Pair(fn(&mut ProbeContext, &Device) -> ProbeResult),
}

/// The subject of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    Machine,
    Device,
    /// Each ordered pair of devices.
    Pair,
}

/// An optional probe for which every error means `broken`.
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

    /// Only errors of these calls mean `broken`. With any other error the test could not run.
    pub(super) const fn whether(self, whether: &'static str, calls: &'static [&'static str]) -> Self {
        Self { whether: Some(whether), calls, ..self }
    }

    pub fn scope(&self) -> Scope {
        match self.run {
            ProbeFn::Machine(_) => Scope::Machine,
            ProbeFn::Device(_) | ProbeFn::Share(_) => Scope::Device,
            ProbeFn::Pair(_) => Scope::Pair,
        }
    }

    /// The finding of a probe that an external error interrupted.
    pub(super) fn cut_short(&self, us: Option<u64>, error: ErrorDetails) -> Finding {
        let outcome = ProbeOutcome::failed(self.meaning_of(&error)).with_error(error);
        self.finding(us, outcome)
    }

    pub(super) fn skipped(&self, why: &str) -> Finding {
        self.finding(None, ProbeOutcome::new(Status::Skipped, why))
    }

    fn finding(&self, us: Option<u64>, outcome: ProbeOutcome) -> Finding {
        let ProbeOutcome { status, figures, meaning, error } = outcome;
        Finding { us, figures, error, ..Finding::new(self.name, status, meaning) }
    }

    /// Runs a test and converts its result to a finding.
    pub(super) fn examine(&self, attempt: impl FnOnce() -> ProbeResult) -> Finding {
        let started = Instant::now();
        let outcome = attempt().unwrap_or_else(|failure| self.outcome_of(failure));
        self.finding(Some(micros(started.elapsed())), outcome)
    }

    /// The outcome for an error on either side.
    pub(super) fn outcome_of(&self, failure: ProbeFailure) -> ProbeOutcome {
        let ProbeFailure { error, figures } = failure;
        let outcome = match (self.is_unsupported(&error), self.required) {
            (true, true) => ProbeOutcome::new(Status::Unsupported, self.broken),
            (true, false) => ProbeOutcome::new(Status::Unsupported, "Not supported on this system."),
            (false, _) => ProbeOutcome::failed(self.meaning_of(&error)),
        };
        ProbeOutcome { figures, ..outcome.with_error(*error) }
    }

    /// Whether an error means that the system does not support the feature.
    fn is_unsupported(&self, error: &ErrorDetails) -> bool {
        // Every feature needs a context, so errors about contexts are not about the feature.
        let is_context = |call: &str| ["cuCtx", "cuDevicePrimaryCtx"].iter().any(|start| call.starts_with(start));
        let context = error.call.as_deref().is_some_and(is_context);
        match error.code {
            Some(code::NOT_PERMITTED) => self.name == "fabric" && !context,
            Some(code::NOT_SUPPORTED) => FEATURES.contains(&self.name) && !context,
            // A library that exists but does not load is broken.
            _ => error.is_unsupported() && error.reason != Some(Reason::LibraryBroken),
        }
    }

    /// The meaning of an error, in one sentence.
    fn meaning_of(&self, error: &ErrorDetails) -> String {
        let under_test = error.call.as_deref().is_some_and(|call| self.calls.contains(&call));
        match self.whether {
            // Any probe can run out of memory.
            Some(whether) if !under_test || error.code == Some(code::OUT_OF_MEMORY) => {
                format!("It could not be tested whether {whether}.")
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
            (ProbeFn::Share(kind), None) => Some(self.examine(|| kind.share(context))),
            (ProbeFn::Pair(run), Some(owner)) => Some(self.examine(|| run(context, owner))),
            _ => None,
        }
    }
}
