//! Probes between two processes that the user places: in a container, in a namespace, or as another user.

use std::{
    collections::BTreeSet,
    fs, io,
    os::{fd::AsFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use nix::{
    poll::PollFlags,
    unistd::{getegid, geteuid, getgroups},
};
use serde::Serialize;
use vmmfd::{
    channel::{Cancel, Listener, Trust, socket_path},
    driver::{Backend, Choice, open},
    error::{Error, PeerError, ProtocolError, Result, SocketError},
    internals::{RecordSocket, accept, connect_socket, deadline_after, peer_of, wait},
    memory::{Device, Selector},
    session::Config,
};

use super::{
    DeviceReport, DoctorReport, Environment, ErrorDetails, Finding, Flag, Observer, Probe, Progress, Status,
    context::Endpoint,
    control::{ControlRecord, PURPOSE, check_connected, greet},
    report::{ProbeResult, failed},
    rules::explain,
    sharing::{MemoryKind, answer, open_shared, share, share_event},
    verdict::verdict,
};
use crate::{error::ToolError, line::Line};

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
    /// Listens, and runs the probes.
    Serve,
    Join,
}

/// The probes that run on each device.
const TRIED: [&str; 5] = ["round-trip", "host-numa", "pool", "legacy", "event"];

/// How many timeouts a step of the conversation may take, which may hang in the driver: a probe in both directions has four.
const STEPS: u32 = 4;

/// The most devices that the peer may report.
const MAX_DEVICES: usize = 64;

/// The longest report of the peer on a device, in bytes of JSON.
const MAX_REPORTED: usize = 64 << 10;

/// The timeout for the hello of a new connection: a doctor sends it at once, and other connections may be waiting.
const GREETING: Duration = Duration::from_secs(2);

/// The state of the conversation.
struct State {
    report: DoctorReport,
    /// The step that started last, and when.
    step: String,
    since: Instant,
    /// The probe that started last.
    probe: Option<&'static Probe>,
    /// The number of probes that started.
    done: usize,
}

/// The state, of two threads: the conversation's may hang in the driver, and is then abandoned.
#[derive(Clone)]
struct Shared(Arc<Mutex<State>>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the report, and restarts the time of the step.
    fn report(&self, change: impl FnOnce(&mut DoctorReport)) {
        let mut state = self.lock();
        change(&mut state.report);
        state.since = Instant::now();
    }

    /// Names the probe that starts, and its device if that is known.
    fn start(&self, probe: &str, device: Option<i32>) {
        let mut state = self.lock();
        // The name comes from the peer.
        state.probe = Probe::named(probe);
        let name = state.probe.map_or("a probe", |probe| probe.name);
        state.step = device.map(|ordinal| format!("device {ordinal}: ")).unwrap_or_default() + name;
        state.since = Instant::now();
        state.done += 1;
    }
}

/// Meets the peer and returns the combined report. Blocks up to `meeting.wait` for the peer, and then while the probes run.
///
/// # Errors
/// [`SocketError::Path`], [`SocketError::AlreadyServed`]; [`ToolError::Absent`] if the peer does not appear;
/// [`PeerError::NotAllowed`], [`PeerError::Reported`]; [`Error::Interrupted`]. The errors of the probes are in the report.
pub fn meet(meeting: &Meeting, cancel: &Cancel, observer: Observer<'_>) -> Result<DoctorReport> {
    let step = "waiting for the peer".to_owned();
    observer(Progress { what: &step, done: 0, all: 1 });
    let socket = socket_path(Some(&meeting.socket))?;
    if meeting.role == MeetingRole::Serve {
        Listener::check_free(&socket)?;
    }
    let required = vec!["driver".to_owned(), "round-trip".to_owned()];
    let report = DoctorReport::new(meeting.backend, Environment::read(None), required);
    let state = State { report, step, since: Instant::now(), probe: None, done: 0 };
    let shared = Shared(Arc::new(Mutex::new(state)));
    let own = meeting.clone();
    let cancelled = cancel.clone();
    let state = shared.clone();
    let conversing = thread::Builder::new()
        .name("meeting".to_owned())
        .spawn(move || converse(&own, &socket, &cancelled, &state))
        .map_err(|error| Error::system("start a thread", error))?;
    let mut hung = None;
    while !conversing.is_finished() && hung.is_none() {
        cancel.check()?;
        thread::sleep(Duration::from_millis(10));
        let state = shared.lock();
        // Every wait in the conversation has its own deadline: this one is for driver calls that hang.
        let limit = match state.report.peer {
            None => meeting.wait.saturating_add(meeting.timeout),
            Some(_) => meeting.timeout.saturating_mul(STEPS),
        };
        hung = (state.since.elapsed() > limit).then_some(limit);
        let all = state.report.devices.len().max(1) * TRIED.len();
        observer(Progress { what: &state.step, done: state.done.saturating_sub(1), all });
    }
    let result = match hung {
        Some(waited) => Ok(Some(ErrorDetails::new("timeout", format!("no result within {waited:?}")))),
        None => {
            conversing.join().map_err(|_| Error::system("meet the peer", io::Error::other("its thread panicked")))?
        }
    };
    let state = shared.lock();
    let last = state.probe.filter(|probe| TRIED.contains(&probe.name));
    let mut report = state.report.clone();
    drop(state);
    let permitted = matches!(&result, Err(Error::Socket(SocketError::Denied { .. })))
        && report.environment.label.is_some()
        && modes_permit(&meeting.socket);
    let cut = result.or_else(|error| failure(error, meeting, &report, permitted).map(Some))?;
    complete(&mut report, cut, permitted, last);
    (report.verdict, report.exit_code) = verdict(&report);
    Ok(report)
}

/// The error to report for a conversation that failed.
///
/// # Errors
/// The error itself, if there is nothing to report.
fn failure(error: Error, meeting: &Meeting, report: &DoctorReport, permitted: bool) -> Result<ErrorDetails> {
    let missing = |missing: &'static str, waited: Duration| {
        Error::from(ToolError::Absent { path: meeting.socket.clone(), waited, missing })
    };
    let error = match error {
        Error::Peer(PeerError::NoConsumer { waited }) => missing("join", waited),
        Error::Socket(SocketError::Absent { waited, .. } | SocketError::NotAccepted { waited, .. }) => {
            missing("serve", waited)
        }
        other => other,
    };
    // A security module that denies what the mode permits is reported with its label, a failure of this side's driver as well.
    let without_driver = report.machine.iter().any(|finding| finding.status != Status::Ok);
    let nothing = report.peer.is_none() && !without_driver && !permitted;
    match error {
        Error::Interrupted { .. } => Err(error),
        _ if nothing => Err(error),
        Error::Peer(PeerError::Gone { .. }) => {
            let why = "the peer disconnected before it reported all results: it exited, or was killed";
            Ok(ErrorDetails { message: format!("{why} ({})", error.in_full()), ..ErrorDetails::of(&error) })
        }
        _ => Ok(ErrorDetails::of(&error)),
    }
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

/// Adds a failure for each probe without a finding, with the conversation's error: a missing result never counts as `ok`. `last` is the
/// probe that started last.
fn complete(report: &mut DoctorReport, cut: Option<ErrorDetails>, permitted: bool, last: Option<&Probe>) {
    let why = cut.clone().unwrap_or_else(|| {
        ErrorDetails::new("peer", "the peer closed the meeting without reporting this result".to_owned())
    });
    let DoctorReport { environment, peer, machine, devices, .. } = report;
    let missing = |probe: &Probe| {
        let mut finding = probe.cut_short(None, why.clone());
        if permitted {
            finding = finding.figure("permitted", true);
        }
        explain(&mut finding, environment, peer.as_ref());
        finding
    };
    machine.iter_mut().for_each(|finding| explain(finding, environment, peer.as_ref()));
    for device in devices.iter_mut() {
        for probe in TRIED.iter().filter_map(|name| Probe::named(name)) {
            if !device.findings.iter().any(|finding| finding.probe == probe.name) {
                device.findings.push(missing(probe));
            }
        }
    }
    // Without a device, or if no required probe failed, report that the meeting itself was cut short.
    let required = |finding: &Finding| Probe::named(&finding.probe).is_some_and(|probe| probe.is(Flag::Required));
    let mut findings = devices.iter().flat_map(|device| &device.findings);
    let failed = findings.any(|finding| finding.status != Status::Ok && required(finding));
    if devices.is_empty() || (cut.is_some() && !failed) {
        machine.extend(last.or(Probe::named("round-trip")).map(missing));
    }
}

/// Runs the conversation. Returns the reason if nothing was tested.
fn converse(meeting: &Meeting, socket: &Path, cancel: &Cancel, shared: &Shared) -> Result<Option<ErrorDetails>> {
    let own = Probe::named("driver").and_then(|probe| probe.run_machine(meeting.backend));
    let library = own.as_ref().and_then(|finding| finding.figures.get("library")?.as_str()).map(Path::new);
    let environment = Environment::read(library);
    shared.report(|report| {
        report.environment = environment.clone();
        report.machine.extend(own.clone());
    });
    // The sides meet even without a driver, so that the peer reports the failure too.
    let works = own.as_ref().is_none_or(|finding| finding.status == Status::Ok);
    let driver = works.then(|| open(Choice::Only(meeting.backend))).transpose()?.map(|opened| opened.driver);
    let greet = |control: &Line| greet(control, meeting.backend, &environment, own.as_ref());
    let (mut control, (peer, theirs)) = match meeting.role {
        MeetingRole::Serve => accept_peer(meeting, socket, cancel, &greet)?,
        MeetingRole::Join => connect(meeting, socket, cancel, &greet)?,
    };
    control.set_timeout(meeting.timeout);
    shared.report(|report| report.peer = Some(peer));
    theirs.as_ref().map_or(Ok(()), check_length)?;
    let broken = theirs.filter(|finding| finding.status != Status::Ok);
    let Some(driver) = driver else {
        let message = "this side's driver can't be used, so nothing was tested".to_owned();
        return Ok(Some(ErrorDetails::new("peer", message)));
    };
    if let Some(broken) = broken {
        let devices = Device::all(&driver)?.iter().map(describe).collect();
        shared.report(|report| report.devices = devices);
        let why = broken.error.unwrap_or_else(|| ErrorDetails::new("peer", broken.meaning));
        let message = format!("its driver can't be used: {}", why.message);
        return Ok(Some(ErrorDetails { message, ..why }.of_other_end()));
    }
    let socket = socket.to_owned();
    let trust = meeting.trust.clone();
    let end = Endpoint { driver, socket, trust, timeout: meeting.timeout };
    match meeting.role {
        MeetingRole::Serve => serve(&end, &control, shared),
        MeetingRole::Join => join(&end, &control, shared),
    }
    .map(|()| None)
}

/// The peer's environment, and its finding of the `driver` probe.
type Greeting = (Environment, Option<Finding>);

/// Waits for a doctor to connect. Rejects other processes.
fn accept_peer(
    meeting: &Meeting,
    socket: &Path,
    cancel: &Cancel,
    greet: &dyn Fn(&Line) -> Result<Greeting>,
) -> Result<(Line, Greeting)> {
    let Meeting { trust, timeout, .. } = meeting;
    let deadline = deadline_after(meeting.wait);
    let config = Config::default().timeout(*timeout).trust(trust.clone()).cancel(cancel);
    let listener = Listener::bind(socket, &config)?;
    loop {
        if !wait(cancel, listener.as_fd(), PollFlags::POLLIN, deadline)? {
            return Err(Error::Peer(PeerError::NoConsumer { waited: meeting.wait }));
        }
        let Some(socket) = accept(&listener)? else { continue };
        let allowed = trust.check(peer_of(&socket)?);
        let control = Line::new(RecordSocket::new(socket, GREETING.min(*timeout), cancel)?, PURPOSE);
        let greeted = match allowed {
            Ok(()) => greet(&control),
            Err(error) => control.send(&ControlRecord::Failed { error: ErrorDetails::of(&error) }).and(Err(error)),
        };
        match greeted {
            Ok(greeted) => return Ok((control, greeted)),
            // A doctor that is incompatible with this one.
            Err(
                error @ (Error::Peer(PeerError::Mismatch { .. } | PeerError::Reported { .. })
                | Error::Interrupted { .. }),
            ) => {
                return Err(error);
            }
            // Reject the peer and keep listening.
            Err(error) => tracing::debug!(%error, "rejected a process that is not a doctor"),
        }
    }
}

fn connect(
    meeting: &Meeting,
    path: &Path,
    cancel: &Cancel,
    greet: &dyn Fn(&Line) -> Result<Greeting>,
) -> Result<(Line, Greeting)> {
    let (socket, _) = connect_socket(path, meeting.wait, &meeting.trust, cancel)?;
    let control = Line::new(RecordSocket::new(socket, meeting.timeout, cancel)?, PURPOSE);
    let greeted = greet(&control).map_err(|error| match error {
        Error::Peer(PeerError::Protocol(_)) => Error::Socket(SocketError::Path {
            path: path.to_owned(),
            reason: "no doctor listens there: two others are meeting, or a producer serves it".to_owned(),
        }),
        other => other,
    })?;
    Ok((control, greeted))
}

fn describe(device: &Device) -> DeviceReport {
    let ordinal = device.ordinal();
    let name = device.name().to_owned();
    let uuid = device.prefixed_uuid();
    DeviceReport { ordinal, name, uuid, findings: Vec::new() }
}

/// Rejects a report of the peer that is too long to print.
fn check_length(report: &impl Serialize) -> Result<()> {
    let length = serde_json::to_vec(report).map_or(usize::MAX, |text| text.len());
    match length {
        0..=MAX_REPORTED => Ok(()),
        _ => Err(ProtocolError::LongRecord { most: MAX_REPORTED }.into()),
    }
}

/// Answers the peer's requests and validates its reports: other devices, and known probes, each once.
fn join(end: &Endpoint, control: &Line, shared: &Shared) -> Result<()> {
    let limit = end.timeout.saturating_mul(STEPS * u32::try_from(TRIED.len()).unwrap_or(u32::MAX));
    let mut devices = BTreeSet::new();
    loop {
        match answer(end, control, limit, &|probe| shared.start(probe, None))? {
            ControlRecord::Device(device) => {
                check_length(&device)?;
                let names: BTreeSet<&str> = device.findings.iter().map(|finding| finding.probe.as_str()).collect();
                let known = names.len() == device.findings.len() && names.iter().all(|name| TRIED.contains(name));
                if !known || devices.len() >= MAX_DEVICES || !devices.insert(device.ordinal) {
                    return Err(ProtocolError::Unexpected { got: "another report", want: "device" }.into());
                }
                shared.report(|report| report.devices.push(device));
            }
            ControlRecord::Bye {} => return Ok(()),
            _ => return Err(ProtocolError::Unexpected { got: "another record", want: "device" }.into()),
        }
    }
}

/// Runs every probe on every device, and sends the explained findings to the peer.
fn serve(end: &Endpoint, control: &Line, shared: &Shared) -> Result<()> {
    let mut devices = Device::all(&end.driver)?;
    devices.truncate(MAX_DEVICES);
    shared.report(|report| report.devices = devices.iter().map(describe).collect());
    for (at, device) in devices.iter().enumerate() {
        for probe in TRIED.iter().filter_map(|name| Probe::named(name)) {
            shared.start(probe.name, Some(device.ordinal()));
            let mut finding = probe.examine(|| match probe.name {
                "round-trip" => both_directions(end, control, device),
                "event" => share_event(control, device),
                name => {
                    let kind = MemoryKind::named(name);
                    kind.require(device)?;
                    share(end, control, device, kind)
                }
            });
            shared.report(|report| {
                explain(&mut finding, &report.environment, report.peer.as_ref());
                report.devices[at].findings.push(finding);
            });
            // Otherwise each further probe would fail, and the last of them would be named as the cause.
            check_connected(control)?;
        }
        let device = shared.lock().report.devices[at].clone();
        control.send(&ControlRecord::Device(device))?;
    }
    control.send(&ControlRecord::Bye {})
}

/// Shares memory with the peer, then opens the peer's memory.
fn both_directions(end: &Endpoint, control: &Line, device: &Device) -> ProbeResult {
    let finding = share(end, control, device, MemoryKind::ROUND_TRIP)?;
    if finding.status != Status::Ok {
        return Ok(finding);
    }
    control.send(&ControlRecord::Share { probe: "round-trip".to_owned(), device: device.uuid() })?;
    let mut opened = None;
    let error = loop {
        match control.receive()? {
            ControlRecord::Begin { .. } => {
                let result = open_shared(end, control.cancel(), Some(Selector::Uuid(device.uuid())));
                let answered = result.as_ref().copied().map_err(ErrorDetails::of);
                control.send(&ControlRecord::answer(answered, ControlRecord::Done))?;
                opened = Some(result);
            }
            ControlRecord::Shared {} => break None,
            ControlRecord::Failed { error } => break Some(error),
            other => return Err(other.unexpected("shared")),
        }
    };
    Ok(match (error, opened) {
        (None, Some(Ok(opened))) => finding.figure("back", "verified").figure("back_open_us", opened.open_us),
        (_, Some(Err(error))) => failed("The peer's memory can't be used here.").with_error(ErrorDetails::of(&error)),
        // Neither error is about the memory, so the probe does not fail: the peer's user can't create a socket in the folder, or the peer
        // does not see the device and reads the memory through another device.
        (Some(error), None)
            if error.call.as_deref() == Some(MemoryKind::BIND)
                || error.is_unsupported() && finding.figures.contains_key("through") =>
        {
            let meaning = format!("one direction only: the peer can't share memory here: {}", error.message);
            Finding { meaning, ..finding.figure("back", format!("not tested: {}", error.message)) }
        }
        (Some(error), _) => failed("The peer can't share its memory with this side.").with_error(error),
        (None, None) => failed("The peer shared nothing."),
    })
}
