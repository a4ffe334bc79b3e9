//! Probes between two processes that the user places: in a container, in a namespace, or as another user.

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
    DeviceReport, DoctorReport, Environment, ErrorDetails, Finding, Observer, Probe, Progress, Status, rules,
    verdict::{conclude, verdict},
};
use crate::error::ToolError;

/// The options of a meeting.
#[derive(Debug, Clone)]
pub struct Meeting {
    pub role: MeetingRole,
    pub backend: Backend,
    /// The socket, in a folder visible to both sides. Other sockets are created and removed next to it.
    pub socket: PathBuf,
    /// The users that the peer may run as, besides this process's user and root.
    pub trust: Trust,
    /// How long to wait for the peer.
    pub wait: Duration,
    /// The timeout of each step.
    pub timeout: Duration,
}

/// The sides of a meeting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MeetingRole {
    /// Listens, and selects the probes.
    Serve,
    Join,
}

/// The probes that run on each device.
const TRIED: [&str; 5] = ["round-trip", "host-numa", "pool", "legacy", "event"];

/// How many timeouts this thread waits for the conversation, which may hang in the driver: a probe in both directions has four steps.
const STEPS: u32 = 4;

/// A message from the conversation's thread, which may hang in the driver.
enum MeetingEvent {
    Machine(Finding),
    Peer(Box<Environment>),
    Device(DeviceReport),
    Found {
        device: i32,
        finding: Finding,
        /// Whether the peer reported it. "The peer" in its text then means this side.
        theirs: bool,
    },
    /// The last event. With an error, findings are missing.
    Ended(Option<ErrorDetails>),
}

/// Meets the peer and returns the combined report. Blocks up to `meeting.wait` for the peer, and then while the probes run.
///
/// # Errors
/// [`SocketError::Path`], [`SocketError::AlreadyServed`]; [`ToolError::Absent`] if the peer does not appear;
/// [`PeerError::NotAllowed`], [`PeerError::Reported`]; [`Error::Interrupted`]. The errors of the probes are in the report.
pub fn meet(meeting: &Meeting, cancel: &Cancel, observer: Observer<'_>) -> Result<DoctorReport> {
    observer(Progress { what: "waiting for the peer", done: 0, all: 1 });
    let socket = socket_path(Some(&meeting.socket))?;
    if meeting.role == MeetingRole::Serve {
        Listener::check_free(&socket)?;
    }
    let required = vec!["driver".to_owned(), "round-trip".to_owned()];
    let mut report = DoctorReport::new(meeting.backend, Environment::read(None), required);
    let (sender, receiver) = mpsc::channel();
    // A thread that hangs is abandoned. Its waits are cancelled together with this thread's.
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
                Some(ErrorDetails::new("peer", "it stopped before it reported all results".to_owned()))
            }),
            Ok(Err(error @ Error::Interrupted { .. })) => return Err(error),
            // A security module denied access that the mode permits. The report includes its label.
            Ok(Err(error @ Error::Socket(SocketError::Denied { .. })))
                if report.environment.label.is_some() && modes_permit(path) =>
            {
                permitted = true;
                Some(ErrorDetails::of(&error))
            }
            // Without the peer there is nothing to report except a failure of this side's driver.
            Ok(Err(error)) if report.peer.is_none() && !without_driver => return Err(absent(error, path)),
            Ok(Err(error @ Error::Peer(PeerError::Gone { .. }))) => {
                let why = "the peer disconnected before it reported all results: it exited, or was killed";
                Some(ErrorDetails { message: format!("{why} ({})", error.in_full()), ..ErrorDetails::of(&error) })
            }
            Ok(Err(error)) => Some(ErrorDetails::of(&absent(error, path))),
            Err(_) => return Err(Error::system("meet the peer", io::Error::other("its thread panicked"))),
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

/// Whether the socket's mode allows this process's effective user and groups to connect, ignoring root's privileges.
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

/// The result of [`collect`].
struct Collected {
    /// The findings of the peer, by device and probe.
    theirs: BTreeSet<(i32, String)>,
    ended: Option<Option<ErrorDetails>>,
    /// The time waited, if the conversation hangs.
    hung: Option<Duration>,
}

/// Adds the results of the conversation to the report, until the last event or a timeout.
fn collect(
    meeting: &Meeting,
    cancel: &Cancel,
    observer: Observer<'_>,
    receiver: &Receiver<MeetingEvent>,
    report: &mut DoctorReport,
) -> Result<Collected> {
    // Every wait in the conversation has its own deadline: this one is for driver calls that hang.
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

/// Converts the error for a missing peer to one that names the missing command.
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

/// Adds a failure for each probe without a finding, with the conversation's error: a missing result never counts as `ok`.
fn complete(report: &mut DoctorReport, cut: Option<ErrorDetails>) {
    let mut lacking = false;
    let why = cut.clone().unwrap_or_else(|| {
        ErrorDetails::new("peer", "the peer closed the meeting without reporting this result".to_owned())
    });
    for device in &mut report.devices {
        for probe in TRIED.iter().filter_map(|name| Probe::named(name)) {
            if !device.findings.iter().any(|finding| finding.probe == probe.name) {
                lacking |= probe.required;
                device.findings.push(probe.cut_short(None, why.clone()));
            }
        }
    }
    // Without a device, or after every required finding, report a failure of the whole meeting.
    if report.devices.is_empty() || (cut.is_some() && !lacking) {
        report.machine.extend(Probe::named("round-trip").map(|probe| probe.cut_short(None, why)));
    }
}

/// Explains the peer's failures by the peer's environment.
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
    (report.verdict, report.exit_code) = verdict(report);
}
