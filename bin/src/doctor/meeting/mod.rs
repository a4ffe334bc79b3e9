//! The probes of two processes, with each end where a person puts it: in a container, a namespace, or as another user.

mod conversation;

use std::{
    collections::BTreeSet,
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use nix::unistd::{getegid, geteuid, getgroups};
use vmmfd::{
    channel::{Cancel, Listener, Trust, socket_path},
    driver::Backend,
    error::{Error, PeerError, Result, SocketError},
};

use super::{
    DeviceReport, DoctorReport, Environment, ErrorDetails, Finding, Observer, Probe, Progress, Status,
    conclude::conclude, rules, verdict,
};
use crate::error::ToolError;

/// Where two ends meet, and how.
#[derive(Debug, Clone)]
pub struct Meeting {
    /// Which of the two ends this is.
    pub role: MeetingRole,
    /// The backend.
    pub backend: Backend,
    /// The socket, in a folder that both ends see: other sockets are created and removed under the same name.
    pub socket: PathBuf,
    /// The users that the other end may belong to, besides this process's own and root.
    pub trust: Trust,
    /// How long to wait for the other end to appear.
    pub wait: Duration,
    /// How long each step may take.
    pub timeout: Duration,
}

/// The two ends of a meeting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MeetingRole {
    /// Listens, and decides what is tried.
    Serve,
    /// Connects.
    Join,
}

/// The probes that are tried on each device.
const TRIED: [&str; 5] = ["round-trip", "host-numa", "pool", "legacy", "event"];

/// How many timeouts this process waits for its own thread, which may hang in the driver: a probe in both directions has four steps.
const STEPS: u32 = 4;

/// What the conversation has found so far. It runs in a thread of its own, since it may hang in the driver.
enum MeetingEvent {
    Machine(Finding),
    Peer(Box<Environment>),
    Device(DeviceReport),
    Found {
        device: i32,
        finding: Finding,
        /// Whether the other end reported it: then its "other end" is this one.
        theirs: bool,
    },
    /// The conversation has ended: with all findings, or early with an error.
    Ended(Option<ErrorDetails>),
}

/// Meets the other end, and reports what both found together. Blocks up to `meeting.wait` for it to appear, and then while the
/// probes run.
///
/// # Errors
/// [`SocketError::Path`], [`SocketError::AlreadyServed`]; [`ToolError::Absent`] if the other end does not appear;
/// [`PeerError::NotAllowed`], [`PeerError::Reported`]; [`Error::Interrupted`]. The errors of the probes are in the report.
pub fn meet(meeting: &Meeting, cancel: &Cancel, observer: Observer<'_>) -> Result<DoctorReport> {
    observer(Progress { what: "waiting for the other end", done: 0, all: 1 });
    let socket = socket_path(Some(&meeting.socket))?;
    if meeting.role == MeetingRole::Serve {
        Listener::check_free(&socket)?;
    }
    let required = vec!["driver".to_owned(), "round-trip".to_owned()];
    let mut report = DoctorReport::new(meeting.backend, Environment::read(None), required);
    let (sender, receiver) = mpsc::channel();
    // The thread is left behind if it hangs; its waits are cancelled with this one's.
    let (own, cancelled) = (meeting.clone(), cancel.clone());
    let converse = move || conversation::converse(&own, &socket, &cancelled, &sender);
    let conversing = thread::Builder::new().name("meeting".to_owned()).spawn(converse);
    let conversing = conversing.map_err(|error| Error::system("start a thread", error))?;

    let collected = collect(meeting, cancel, observer, &receiver, &mut report)?;
    let without_driver = report.machine.iter().any(|finding| finding.status != Status::Ok);
    let path = &meeting.socket;
    let mut permitted = false;
    let cut = match collected.hung {
        Some(waited) => Some(ErrorDetails::new("timeout", format!("no result within {waited:?}"))),
        None => match conversing.join() {
            Ok(Ok(())) => collected.ended.unwrap_or_else(|| {
                Some(ErrorDetails::new("peer", "it ended before all results were reported".to_owned()))
            }),
            Ok(Err(error @ Error::Interrupted { .. })) => return Err(error),
            // A security module refused what the modes permit: its label is in the report.
            Ok(Err(error @ Error::Socket(SocketError::Denied { .. })))
                if report.environment.label.is_some() && modes_permit(path) =>
            {
                permitted = true;
                Some(ErrorDetails::of(&error))
            }
            // Without the other end there is nothing to report, but an error of this end's driver.
            Ok(Err(error)) if report.peer.is_none() && !without_driver => return Err(absent(error, path)),
            Ok(Err(error @ Error::Peer(PeerError::Gone { .. }))) => {
                let why = "the other end disconnected before all results were reported: it ended, or was killed";
                Some(ErrorDetails { message: format!("{why} ({})", error.in_full()), ..ErrorDetails::of(&error) })
            }
            Ok(Err(error)) => Some(ErrorDetails::of(&absent(error, path))),
            Err(_) => return Err(Error::system("meet the other end", io::Error::other("its thread panicked"))),
        },
    };
    complete(&mut report, cut);
    if let Some(finding) = report.machine.last_mut().filter(|_| permitted) {
        finding.figures.insert("permitted".to_owned(), true.into());
    }
    conclude(&mut report);
    explain_theirs(&mut report, &collected.theirs);
    Ok(report)
}

/// Whether the mode of a socket lets this process connect to it, by its effective user and its groups, whatever rights root has.
fn modes_permit(socket: &Path) -> bool {
    let Ok(metadata) = fs::metadata(socket) else { return false };
    let groups = getgroups().unwrap_or_default();
    let group = |gid: u32| gid == getegid().as_raw() || groups.iter().any(|own| own.as_raw() == gid);
    let shift = match () {
        () if metadata.uid() == geteuid().as_raw() => 6,
        () if group(metadata.gid()) => 3,
        () => 0,
    };
    metadata.mode() >> shift & 0o2 != 0
}

/// How the conversation ended.
struct Collected {
    /// The findings of the other end, by device and probe.
    theirs: BTreeSet<(i32, String)>,
    ended: Option<Option<ErrorDetails>>,
    /// How long it was waited for, if it hangs.
    hung: Option<Duration>,
}

/// Enters what the conversation finds into the report, until it ends or hangs.
fn collect(
    meeting: &Meeting,
    cancel: &Cancel,
    observer: Observer<'_>,
    receiver: &Receiver<MeetingEvent>,
    report: &mut DoctorReport,
) -> Result<Collected> {
    // Every wait in the conversation has its own deadline: this one is for calls that hang in the driver.
    let limit = |report: &DoctorReport| match report.peer {
        None => meeting.wait.saturating_add(meeting.timeout),
        Some(_) => meeting.timeout.saturating_mul(STEPS),
    };
    let mut collected = Collected { theirs: BTreeSet::new(), ended: None, hung: None };
    let mut since = Instant::now();
    let mut done = 0;
    loop {
        cancel.check()?;
        match receiver.recv_timeout(Duration::from_millis(20)) {
            Ok(event) => {
                since = Instant::now();
                match event {
                    MeetingEvent::Machine(finding) => {
                        let library = finding.figures.get("library").and_then(|library| library.as_str());
                        report.environment = Environment::read(library.map(Path::new));
                        report.machine.push(finding);
                    }
                    MeetingEvent::Peer(environment) => report.peer = Some(*environment),
                    MeetingEvent::Device(device) => report.devices.push(device),
                    MeetingEvent::Found { device, finding, theirs } => {
                        done += 1;
                        let what = format!("device {device}: {} done", finding.probe);
                        observer(Progress { what: &what, done, all: report.devices.len() * TRIED.len() });
                        if theirs {
                            collected.theirs.insert((device, finding.probe.clone()));
                        }
                        if let Some(report) = report.devices.iter_mut().find(|report| report.ordinal == device) {
                            report.findings.push(finding);
                        }
                    }
                    MeetingEvent::Ended(error) => collected.ended = Some(error),
                }
            }
            Err(RecvTimeoutError::Timeout) if since.elapsed() < limit(report) => {}
            Err(RecvTimeoutError::Timeout) => {
                collected.hung = Some(limit(report));
                return Ok(collected);
            }
            Err(RecvTimeoutError::Disconnected) => return Ok(collected),
        }
    }
}

/// The error of an end that did not appear, with this command's options instead of those of the other commands.
fn absent(error: Error, path: &Path) -> Error {
    let missing = |which: &'static str, waited: Duration| {
        Error::from(ToolError::Absent { path: path.to_owned(), waited, missing: which })
    };
    match error {
        Error::Peer(PeerError::NoConsumer { waited }) => missing("join", waited),
        Error::Socket(SocketError::Absent { waited, .. }) | Error::Socket(SocketError::NotAccepted { waited, .. }) => {
            missing("serve", waited)
        }
        other => other,
    }
}

/// Adds a failure for each probe without a finding, with the error that ended the conversation: what is absent never counts as
/// `ok`.
fn complete(report: &mut DoctorReport, cut: Option<ErrorDetails>) {
    let mut lacking = false;
    let why = cut.clone().unwrap_or_else(|| {
        ErrorDetails::new("peer", "the other end ended the meeting without reporting this result".to_owned())
    });
    for device in &mut report.devices {
        for probe in TRIED.iter().filter_map(|name| Probe::named(name)) {
            if !device.findings.iter().any(|finding| finding.probe == probe.name) {
                lacking |= probe.required;
                device.findings.push(probe.cut_short(None, why.clone()));
            }
        }
    }
    // With no device, or after every required finding, it is a failure of the meeting as a whole.
    if report.devices.is_empty() || (cut.is_some() && !lacking) {
        report.machine.extend(Probe::named("round-trip").map(|probe| probe.cut_short(None, why)));
    }
}

/// Explains the failures of the other end by its environment.
fn explain_theirs(report: &mut DoctorReport, theirs: &BTreeSet<(i32, String)>) {
    let Some(peer) = report.peer.clone() else { return };
    let own = report.environment.clone();
    let explain = |finding: &mut Finding, theirs: bool| {
        let other = finding.error.as_ref().is_some_and(|error| error.other_end);
        if finding.status != Status::Ok && finding.error.is_some() && other != theirs {
            (finding.cause, finding.remedy, finding.rule) = (None, None, None);
            rules::explain(finding, &peer, Some(&own));
        }
    };
    report.machine.iter_mut().for_each(|finding| explain(finding, false));
    for device in &mut report.devices {
        for finding in &mut device.findings {
            let reported = theirs.contains(&(device.ordinal, finding.probe.clone()));
            explain(finding, reported);
        }
    }
    (report.verdict, report.exit_code) = verdict::of(report);
}
