//! Probes between two processes that the user places: in a container, in a namespace, or as another user.

use std::{
    collections::BTreeSet,
    fs,
    os::{fd::AsFd, unix::fs::MetadataExt},
    sync::Mutex,
};

use nix::{
    poll::PollFlags,
    unistd::{getegid, geteuid, getgroups},
};
use vmmfd::{
    channel::{Cancel, Listener, Trust, socket_path},
    error::{ProtocolError, SocketError},
    internals::{RecordSocket, accept, connect_socket, deadline_after, peer_of, wait},
    session::Config,
};

use super::{
    DeviceReport, DoctorReport, Flag, Meeting, Observer, Probe,
    control::{ControlRecord, PURPOSE, greet},
    process::{Role, Setting},
    rules::explain,
    runner::Runner,
    verdict::verdict,
};
use crate::{doctor::prelude::*, error::ToolError};

/// The sides of a meeting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MeetingRole {
    /// Listens, and runs the probes.
    Serve,
    Join,
}

/// The probes that run on each device.
const TRIED: [&str; 5] = ["round-trip", "host-numa", "pool", "legacy", "event"];

/// How many timeouts a probe may take: in both directions it has four steps.
const STEPS: u32 = 4;

/// The most devices that the peer may report.
const MAX_DEVICES: usize = 64;

/// The longest report of the peer on a device, in bytes of JSON.
const MAX_REPORTED: usize = 64 << 10;

/// The timeout for the hello of a new connection: a doctor sends it at once, and other connections may be waiting.
const GREETING: Duration = Duration::from_secs(2);

/// The peer's environment, and its finding of the `driver` probe.
type Greeting = (Environment, Option<Finding>);

/// Meets the peer and returns the combined report. Blocks up to `meeting.wait` for the peer, and then while the probes run.
///
/// # Errors
/// [`SocketError::Path`], [`SocketError::AlreadyServed`]; [`ToolError::Absent`] if the peer does not appear;
/// [`PeerError::NotAllowed`], [`PeerError::Reported`]; [`Error::Interrupted`]. The errors of the probes are in the report.
pub fn meet(role: MeetingRole, meeting: &Meeting, cancel: &Cancel, observer: Observer<'_>) -> Result<DoctorReport> {
    let socket = socket_path(Some(&meeting.socket))?;
    if role == MeetingRole::Serve {
        Listener::check_free(&socket)?;
    }
    let Meeting { backend, timeout, .. } = *meeting;
    let setting = Setting { backend, socket: socket.clone(), uids: meeting.allow_uids.clone(), timeout };
    let limit = timeout.saturating_mul(STEPS);
    let counts = Mutex::new((0, 1));
    let runner = Runner { setting, folder: None, limit, cancel, observer, control: None, counts };
    let required = vec!["driver".to_owned(), "round-trip".to_owned()];
    let driver: Vec<&Probe> = Probe::named("driver").into_iter().collect();
    let machine = runner.run(&driver, None, None)?;
    let environment = Environment::read(machine.first().and_then(Finding::library));
    let report = DoctorReport { machine, ..DoctorReport::new(meeting.backend, environment, required) };
    observer("waiting for the peer", 0, 1);
    let mut conversation = Conversation { report, last: None };
    let result = conversation.meet_peer(role, meeting, &socket, cancel, runner);
    let Conversation { mut report, last } = conversation;
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

/// The conversation with the peer.
struct Conversation {
    report: DoctorReport,
    /// The probe that started last.
    last: Option<&'static Probe>,
}

impl Conversation {
    /// Meets the peer and runs the probes. Returns the reason if it was cut short.
    fn meet_peer(
        &mut self,
        role: MeetingRole,
        meeting: &Meeting,
        socket: &Path,
        cancel: &Cancel,
        runner: Runner<'_>,
    ) -> Result<Option<ErrorDetails>> {
        let DoctorReport { environment, machine, .. } = &self.report;
        // The sides meet even without a driver, so that the peer reports the failure too.
        let own = machine.first();
        let greet = |control: &Line| greet(control, meeting.backend, environment, own);
        let (mut control, (peer, theirs)) = match role {
            MeetingRole::Serve => accept_peer(meeting, socket, cancel, &greet)?,
            MeetingRole::Join => connect(meeting, socket, cancel, &greet)?,
        };
        let works = own.is_none_or(|finding| finding.status == Status::Ok);
        let mut devices = own.map(Finding::devices).unwrap_or_default();
        devices.truncate(MAX_DEVICES);
        control.set_timeout(meeting.timeout);
        self.report.peer = Some(peer);
        theirs.as_ref().map_or(Ok(()), check_length)?;
        if !works {
            let message = "this side's driver can't be used, so nothing was tested".to_owned();
            return Ok(Some(ErrorDetails::new("peer", message)));
        }
        let broken = theirs.filter(|finding| finding.status != Status::Ok);
        if broken.is_some() || role == MeetingRole::Serve {
            self.report.devices = devices;
        }
        if let Some(broken) = broken {
            let why = broken.error.unwrap_or_else(|| ErrorDetails::new("peer", broken.meaning));
            let message = format!("its driver can't be used: {}", why.message);
            return Ok(Some(ErrorDetails { message, ..why }.of_other_end()));
        }
        let runner = Runner { control: Some(&control), ..runner };
        match role {
            MeetingRole::Serve => self.serve(&control, &runner),
            MeetingRole::Join => self.join(&control, &runner),
        }
    }

    /// Runs every probe on every device, and sends the explained findings to the peer.
    fn serve(&mut self, control: &Line, runner: &Runner<'_>) -> Result<Option<ErrorDetails>> {
        let probes: Vec<&Probe> = TRIED.iter().filter_map(|name| Probe::named(name)).collect();
        let DoctorReport { environment, peer, devices, .. } = &mut self.report;
        runner.count(0, devices.len() * probes.len());
        for device in devices {
            let result = runner.run_more(&probes, Some(device.ordinal), None, &mut device.findings);
            device.findings.iter_mut().for_each(|finding| explain(finding, environment, peer.as_ref()));
            let last = device.findings.last();
            self.last = last.and_then(|finding| Probe::named(&finding.probe)).or(self.last);
            result?;
            if device.findings.len() < probes.len() {
                return Ok(last.and_then(|finding| finding.error.clone()));
            }
            control.send(&ControlRecord::Device(device.clone()))?;
        }
        control.send(&ControlRecord::Bye {})?;
        Ok(None)
    }

    /// Passes the peer's requests to a child, and validates the peer's reports: other devices, and known probes, each once.
    fn join(&mut self, control: &Line, runner: &Runner<'_>) -> Result<Option<ErrorDetails>> {
        let mut child = runner.start(Role::Peer, None, None)?;
        // An interruption is no error of the child.
        let cut = |error| runner.cancel.check().map(|()| Some(error));
        if let Err(error) = child.ready() {
            return cut(error);
        }
        let limit = child.line.timeout().saturating_mul(u32::try_from(TRIED.len()).unwrap_or(u32::MAX));
        loop {
            let mut record = control.receive_within(limit)?;
            match record {
                ControlRecord::Device(device) => {
                    check_report(&device, &self.report.devices)?;
                    self.report.devices.push(device);
                    continue;
                }
                ControlRecord::Bye {} => return Ok(None),
                _ => {}
            }
            let Some(probe) = record.requested() else {
                return Err(ProtocolError::Unexpected { got: "another record", want: "device" }.into());
            };
            // The name comes from the peer.
            if let Some(probe) = Probe::named(probe) {
                self.last = Some(probe);
                runner.report_start(probe, None, None);
            }
            loop {
                child.line.send(&record)?;
                record = match child.receive() {
                    Ok(answer) => answer,
                    Err(error) => return cut(error),
                };
                control.send(&record)?;
                // The child offers memory, and waits for the peer to open it.
                if !matches!(record, ControlRecord::Begin { .. }) {
                    break;
                }
                record = control.receive()?;
            }
        }
    }
}

/// Waits for a doctor to connect. Rejects other processes.
fn accept_peer(
    meeting: &Meeting,
    socket: &Path,
    cancel: &Cancel,
    greet: &dyn Fn(&Line) -> Result<Greeting>,
) -> Result<(Line, Greeting)> {
    let Meeting { timeout, .. } = meeting;
    let trust = Trust { uids: meeting.allow_uids.clone() };
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
    let (socket, _) = connect_socket(path, meeting.wait, &Trust { uids: meeting.allow_uids.clone() }, cancel)?;
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

/// Rejects a report of the peer that is too long to print.
fn check_length(report: &impl Serialize) -> Result<()> {
    let length = serde_json::to_vec(report).map_or(usize::MAX, |text| text.len());
    match length {
        0..=MAX_REPORTED => Ok(()),
        _ => Err(ProtocolError::LongRecord { most: MAX_REPORTED }.into()),
    }
}

/// Rejects a report of the peer on a known device, on too many devices, or on other probes.
fn check_report(device: &DeviceReport, known: &[DeviceReport]) -> Result<()> {
    check_length(device)?;
    let names: BTreeSet<&str> = device.findings.iter().map(|finding| finding.probe.as_str()).collect();
    let new = known.len() < MAX_DEVICES && known.iter().all(|other| other.ordinal != device.ordinal);
    if new && names.len() == device.findings.len() && names.iter().all(|name| TRIED.contains(name)) {
        return Ok(());
    }
    Err(ProtocolError::Unexpected { got: "another report", want: "device" }.into())
}

#[cfg(test)]
mod tests {
    use vmmfd::driver::Backend;

    use super::*;

    fn device(ordinal: i32, probes: &[&str]) -> DeviceReport {
        let findings = probes.iter().map(|probe| Finding::new(probe, Status::Ok, "It works.")).collect();
        DeviceReport { ordinal, name: "a liar's".to_owned(), uuid: String::new(), findings }
    }

    #[test]
    fn false_reports_are_rejected() {
        let known = [device(0, &TRIED)];
        check_report(&device(1, &TRIED), &known).unwrap();
        let mut long = device(1, &["pool"]);
        long.findings[0].meaning = "x".repeat(MAX_REPORTED);
        for wrong in [device(0, &TRIED), device(1, &["pool", "pool"]), device(1, &["pool", "driver"]), long] {
            assert!(check_report(&wrong, &known).is_err(), "{wrong:?}");
        }
        let many: Vec<DeviceReport> = (0..64).map(|ordinal| device(ordinal, &[])).collect();
        assert!(check_report(&device(64, &[]), &many).is_err());
    }

    #[test]
    fn missing_results_are_failures() {
        let lost = || Some(ErrorDetails::new("peer", "the peer disconnected".to_owned()));
        for (devices, cut, last, failures, words) in [
            (vec![device(0, &TRIED)], None, None, vec![], "works on 1 of 1"),
            (vec![], None, None, vec!["round-trip"], "round-trip was cut short"),
            (vec![device(0, &[])], None, None, TRIED.to_vec(), "device 0 fails at round-trip"),
            (
                vec![device(0, &TRIED), device(1, &["pool"])],
                None,
                None,
                vec!["round-trip", "host-numa", "legacy", "event"],
                "1 of 2",
            ),
            (vec![device(0, &TRIED)], lost(), None, vec!["round-trip"], "round-trip was cut short"),
            (vec![device(0, &TRIED)], lost(), Some("legacy"), vec!["legacy"], "legacy was cut short: the peer disc"),
            (vec![device(0, &TRIED[..3])], lost(), Some("legacy"), vec!["legacy", "legacy", "event"], "legacy was cut"),
        ] {
            let required = vec!["driver".to_owned(), "round-trip".to_owned()];
            let mut report = DoctorReport::new(Backend::Host, Environment::default(), required);
            report.machine.push(Finding::new("driver", Status::Ok, ""));
            report.devices = devices;
            complete(&mut report, cut, false, last.and_then(Probe::named));
            let (verdict, code) = verdict(&report);
            let findings = report.machine.iter().chain(report.devices.iter().flat_map(|device| &device.findings));
            let failed = findings.filter(|finding| finding.status == Status::Failed);
            assert_eq!(failed.map(|finding| &finding.probe).collect::<Vec<_>>(), failures, "{report:?}");
            assert!(verdict.contains(words) && (code == 0) == failures.is_empty(), "{verdict}");
        }
    }
}
