//! The output of `produce` and `consume`: a few lines, with `-v` one more per step, or one JSON object.

use std::{
    collections::HashMap,
    fmt::Display,
    io, mem,
    path::Path,
    process,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::{self, ThreadId},
    time::Instant,
};

use clap::builder::styling::AnsiColor;
use vmmfd::{
    array::ArrayDescriptor,
    internals::clean,
    memory::{Description, Device},
    session::{
        Event,
        handoff::{Findings, Served},
    },
};

use super::{
    describe::{checked, described, engine, findings, first_words, kind, numbers, process_named, received, spelled},
    layout,
    output::{Output, Progress, Wait, complain, fallback_reason, is_coloured, json_line, print_now},
    report::{CommandReport, ConsumerReport, Step, UsedDevice},
};
use crate::{
    check::{
        self, Figures,
        pattern::{Engine, Work},
    },
    cli::prelude::*,
    units::{self, about, bytes, limit, time},
};

/// The longest list of steps in the report: a service may run for months.
const MAX_STEPS: usize = 1000;

/// Prints the steps of a session and its report.
#[derive(Debug)]
pub struct Console {
    output: Output,
    progress: Progress,
    coloured: bool,
    state: Mutex<Collected>,
    /// Whether the result is printed. Locked while it is printed, so that a second caller waits.
    finished: Arc<Mutex<bool>>,
}

#[derive(Debug, Default)]
struct Collected {
    report: CommandReport,
    /// An error of standard output, such as a full disk. A broken pipe is not an error.
    stdout: Option<io::Error>,
    /// The content of the producer's buffer, as a phrase after its size.
    content: String,
    /// The wait for the next peer, and its notice.
    wait: Option<Wait>,
    /// The time limit of that wait, and the command that starts the peer.
    invitation: (Duration, String),
    /// The number of consumers to serve, 0 without a limit, and the number of sessions that have ended.
    consumers: (u64, u64),
    /// The connected peers. The events of a session come from its thread.
    visits: HashMap<ThreadId, Visit>,
}

/// A session with a peer.
#[derive(Debug)]
struct Visit {
    pid: i32,
    begun: Instant,
    /// The time until the peer's result.
    took: Option<Duration>,
    /// The number of bytes offered to the peer, or requested from it.
    bytes: u64,
    /// Whether a reply was verified or written.
    both_ways: bool,
}

impl Console {
    pub(super) fn new(role: &'static str, output: &Output) -> Self {
        let state = Collected { report: CommandReport::new(role), ..Collected::default() };
        Self {
            output: output.clone(),
            progress: output.progress(),
            coloured: is_coloured(&io::stdout()),
            state: Mutex::new(state),
            finished: Arc::default(),
        }
    }

    /// Sets the time limit of the wait for a peer, and the command that starts it.
    pub(super) fn invite(&self, limit: Duration, command: String) {
        self.state().invitation = (limit, command);
    }

    /// Sets the content of the buffer, as a phrase after its size.
    pub(super) fn content(&self, content: String) {
        self.state().content = content;
    }

    /// Shows that the buffer is being allocated.
    pub(super) fn allocating(&self, size: u64) {
        self.progress.allocating(size);
    }

    /// Prints `whom` this side waits for if it waits long, and how to start the peer.
    pub(super) fn wait_for(&self, whom: &str) {
        if self.output.quiet || self.output.json {
            return;
        }
        let mut state = self.state();
        let (time, command) = &state.invitation;
        let limit = match state.report.role {
            "producer" if state.consumers.0 == 0 => "until Ctrl-C".to_owned(),
            _ => format!("up to {}", limit(*time)),
        };
        let mut line = format!("{:<8}  {limit} for {whom}; in another terminal type:", "waiting");
        clean(&mut line);
        // A broken command can't be pasted.
        if line.len() + command.len() < layout::stdout_width().unwrap_or(80) {
            line = format!("{line} {command}");
        } else {
            line = format!("{}\n          {command}", line);
        }
        let progress = self.progress.clone();
        let finished = Arc::clone(&self.finished);
        state.wait = Some(Wait::before(move || {
            let finished = finished.lock().unwrap_or_else(PoisonError::into_inner);
            if !*finished {
                // A later line reports the failure.
                let _ = progress.suspend(|| print_now(&(line + "\n")));
            }
        }));
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
        // A success that could not be printed is a failure.
        let stdout = self.state().stdout.take();
        stdout.map_or(exit, |error| exit.unwritten(&error))
    }

    fn complain(&self, report: ErrorSummary) {
        report.complain();
        self.state().report.error = Some(report);
    }

    /// Adds the findings of a consumer and its producer to the report, and prints the result.
    pub(super) fn findings(&self, findings: &Findings) {
        let decisive = match &findings.producer {
            Ok(producer) if findings.found.verified => {
                let report = &mut self.state().report;
                report.found(producer);
                // The producer verifies the reply, not the data.
                report.digest = Figures::of(&findings.found).digest.or(report.digest.take());
                if producer.verified { &findings.found } else { producer }
            }
            _ => {
                self.state().report.found(&findings.found);
                &findings.found
            }
        };
        let visit = self.state().visits.remove(&thread::current().id());
        if let Some(visit) = visit {
            self.result(&visit, findings.verified(), &Figures::of(decisive));
        }
    }

    /// Adds the results of a producer's consumers to the report, in the order in which they finished.
    pub fn served(&self, served: &[Served]) {
        let report = &mut self.state().report;
        served.iter().filter_map(|served| served.found.as_ref()).for_each(|verdict| report.found(verdict));
        report.consumers = Some(served.iter().map(ConsumerReport::from).collect());
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

    /// Prints the result of a session.
    fn result(&self, visit: &Visit, verified: bool, figures: &Figures) {
        let state = self.state();
        let size = state.report.size.unwrap_or(visit.bytes);
        let part = if visit.bytes < size { format!(" of {}", about(size)) } else { String::new() };
        let own = process_named(process::id() as i32);
        let peer = process_named(visit.pid);
        let (from, to) = if state.report.role == "producer" { (own, peer) } else { (peer, own) };
        let way = if visit.both_ways { "<->" } else { "to" };
        drop(state);
        let name = match figures.words {
            _ if !verified => "mismatch",
            0 if figures.digest.is_none() => "received",
            _ => "verified",
        };
        let took = time(visit.took.unwrap_or_else(|| visit.begun.elapsed()));
        let bytes = about(visit.bytes);
        let checked = checked(verified, figures);
        self.line(name, format!("{bytes}{part}, {checked}, {from} {way} {to}, {took}"));
    }

    /// Prints a step of the session and adds it to the report.
    pub fn event(&self, event: Event<'_>) {
        match event {
            Event::Started { backend, fallback, elapsed } => {
                {
                    let report = &mut self.state().report;
                    (report.backend, report.fallback) = (Some(backend), fallback.map(fallback_reason));
                }
                let what = match backend {
                    Backend::Cuda => "cuda: the NVIDIA driver of this machine",
                    Backend::Host => "host: ordinary memory, without a GPU",
                };
                self.step("driver", Some(elapsed), what);
            }
            Event::Device { device, granularity, elapsed } => {
                self.device(device, granularity);
                self.step("device", Some(elapsed), format!("{}: {}", device.ordinal(), device.prefixed_uuid()));
            }
            Event::Created { description, elapsed } => {
                self.progress.allocated();
                self.state().report.memory(description);
                let Description { size, mapped_size, .. } = description;
                let granularity = self.state().report.granularity.unwrap_or_default();
                let what = format!(
                    "{} for {} asked for{}, granularity {}",
                    bytes(*mapped_size),
                    bytes(*size),
                    kind(description),
                    bytes(granularity)
                );
                self.step("create", Some(elapsed), what);
            }
            Event::Mapped { address, access, elapsed } => {
                self.step("map", Some(elapsed), format!("at {address:#x}, {}", spelled(access)));
                if let Some((pid, bytes)) = self.visit(|visit| (visit.pid, visit.bytes)) {
                    let bytes = about(bytes);
                    let owner = process_named(pid);
                    self.line("mapped", format!("{bytes} of {owner}, {}, without a copy", spelled(access)));
                }
            }
            Event::Exported { fds, elapsed } => self.step("export", Some(elapsed), numbers(fds)),
            Event::Sealed { enforced, elapsed } => {
                let how = match enforced {
                    true => "enforced: the kernel refuses every write",
                    false => "by agreement: a process that holds the descriptor or handle can still write",
                };
                self.step("seal", Some(elapsed), how);
            }
            Event::Listening { path, consumers } => self.listening(path, consumers),
            Event::Connected { peer, elapsed } => {
                self.arrived(peer.pid);
                self.step("connect", Some(elapsed), format!("to pid {}, uid {}", peer.pid, peer.uid));
            }
            Event::Requested { peer } => {
                self.arrived(peer.pid);
                self.step("request", None, format!("from pid {}, uid {}", peer.pid, peer.uid));
            }
            Event::Offered { peer, access, bytes, elapsed } => {
                self.visit(|visit| visit.bytes = bytes);
                self.step("offer", Some(elapsed), format!("to pid {}, {}, received", peer.pid, spelled(access)));
            }
            Event::Received { description, bytes, fds, elapsed } => {
                self.state().report.memory(description);
                self.visit(|visit| visit.bytes = bytes);
                self.step("offer", Some(elapsed), received(description, fds));
            }
            Event::Reported { peer, verdict, elapsed } => {
                self.visit(|visit| visit.took = Some(visit.begun.elapsed()));
                let figures = Figures::of(verdict);
                let result = if verdict.verified { "verified" } else { "NOT VERIFIED" };
                let checked = match (figures.words, &figures.digest) {
                    (0, None) => String::new(),
                    _ => format!(": {}", findings(verdict.verified, &figures)),
                };
                self.step("result", Some(elapsed), format!("pid {} reports {result}{checked}", peer.pid));
            }
            Event::Ended { served } => self.ended(served),
            _ => {}
        }
    }

    fn listening(&self, path: &Path, consumers: u64) {
        let mut state = self.state();
        state.consumers.0 = consumers;
        let what = format!("{}{}", about(state.report.size.unwrap_or_default()), state.content);
        drop(state);
        self.line("shared", format!("{what} at {}", path.display()));
        self.wait_for_consumers(consumers);
    }

    fn wait_for_consumers(&self, number: u64) {
        match number {
            0 => self.wait_for("consumers"),
            1 => self.wait_for("a consumer"),
            _ => self.wait_for(&format!("{number} consumers")),
        }
    }

    /// Records that a peer is connected.
    fn arrived(&self, pid: i32) {
        let mut state = self.state();
        state.wait = None;
        let visit = Visit { pid, begun: Instant::now(), took: None, bytes: 0, both_ways: false };
        state.visits.insert(thread::current().id(), visit);
    }

    /// Reads or changes the session of this thread, if it has one.
    fn visit<T>(&self, change: impl FnOnce(&mut Visit) -> T) -> Option<T> {
        self.state().visits.get_mut(&thread::current().id()).map(change)
    }

    /// Prints the result of a consumer.
    fn ended(&self, served: &Served) {
        let mut state = self.state();
        let visit = state.visits.remove(&thread::current().id());
        state.consumers.1 += 1;
        let (all, ended) = state.consumers;
        let idle = state.visits.is_empty();
        drop(state);
        match (&served.found, &served.error, visit) {
            (Some(found), error, Some(visit)) if error.is_none() || !found.verified => {
                self.result(&visit, found.verified, &Figures::of(found));
            }
            // The error of a single consumer is the error of the command.
            (_, Some(error), _) if all != 1 => {
                self.line("failed", format!("{}: {}", process_named(served.peer.pid), error.in_full()));
            }
            _ => {}
        }
        if idle && ended < all {
            self.wait_for_consumers(all - ended);
        }
    }

    /// Prints a step on the data and adds it to the report.
    pub fn check(&self, event: check::Event<'_>) {
        match event {
            check::Event::Filled { words, salt, work, elapsed } => {
                self.replied("consumer");
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
                self.line("array", format!("{}: {}", described(array), first.join(" ")));
            }
            check::Event::Verified { verified, figures, work, elapsed } => {
                self.replied("producer");
                self.work("verify", elapsed, findings(verified, figures), figures.words, work);
            }
            check::Event::Saved { path, size, elapsed } => {
                self.step("save", Some(elapsed), format!("{} in {}", bytes(size), path.display()));
                self.line("saved", format!("{} in {}", about(size), path.display()));
            }
        }
    }

    /// Records a reply: a consumer fills the memory only for a reply, and a producer verifies only replies.
    fn replied(&self, role: &str) {
        if self.state().report.role == role {
            self.visit(|visit| visit.both_ways = true);
        }
    }

    /// Adds the array to the report.
    pub fn array(&self, array: Option<&ArrayDescriptor>) {
        self.state().report.array = array.cloned();
    }

    fn device(&self, used: &Device, granularity: u64) {
        let mut state = self.state();
        let report = &mut state.report;
        let name = used.name().to_owned();
        let uuid = used.prefixed_uuid();
        report.device = Some(UsedDevice { name, uuid, ordinal: used.ordinal() });
        report.granularity = Some(granularity);
        let role = report.role;
        let fallback = report.fallback.is_some();
        drop(state);
        let fallback = if fallback { " (no GPU: see vmmfd doctor)" } else { "" };
        self.line(
            role,
            format!("pid {}, {}{fallback}", process::id(), units::device(used.name(), &used.prefixed_uuid(), false)),
        );
    }

    /// Prints a step on the pattern with its engine.
    fn work(&self, name: &'static str, elapsed: Duration, what: String, words: u64, work: Option<&Work>) {
        let Some(work) = work else { return self.step(name, Some(elapsed), what) };
        if let Some(reason) = &work.fallback {
            complain(&format!("warning: cannot load the GPU kernels, using the CPU: {reason}"));
        }
        self.step_by(name, Some(elapsed), format!("{what}, {}", engine(work, words)), Some(work.engine));
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
        if self.output.verbose > 0 && !self.output.json {
            self.print(&mut state, name, format!("{what}{time}"));
        }
    }

    /// Prints a line of the default output.
    fn line(&self, name: &str, what: impl Display) {
        if !self.output.quiet && !self.output.json {
            self.print(&mut self.state(), name, what);
        }
    }

    fn print(&self, state: &mut Collected, name: &str, what: impl Display) {
        let mut line = format!("{name:<8}  {what}");
        // Paths may contain escape sequences.
        clean(&mut line);
        let colour = match name {
            "verified" => Some(AnsiColor::Green),
            "mismatch" | "failed" => Some(AnsiColor::Red),
            _ => None,
        };
        if let Some(colour) = colour.filter(|_| self.coloured) {
            let style = colour.on_default();
            line.replace_range(..name.len(), &format!("{style}{name}{style:#}"));
        }
        self.progress.suspend(|| state.print(&line));
    }

    fn print_json(&self) {
        let mut state = self.state();
        let line = json_line(&state.report);
        state.print(line.trim_end());
    }

    fn state(&self) -> MutexGuard<'_, Collected> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Collected {
    fn print(&mut self, line: &str) {
        if let Err(error) = print_now(&format!("{line}\n")) {
            self.stdout = Some(error);
        }
    }
}
