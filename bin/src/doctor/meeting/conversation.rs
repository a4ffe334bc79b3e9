//! The conversation between the two sides of a meeting.

use std::{
    cell::Cell,
    collections::BTreeSet,
    path::Path,
    sync::mpsc::Sender,
    time::{Duration, Instant},
};

use serde::Serialize;
use vmmfd::{
    channel::{Cancel, Listener},
    driver::{Choice, open},
    error::{Error, PeerError, ProtocolError, Result, SocketError},
    internals::deadline_after,
    memory::{Device, Selector},
};

use super::{Meeting, MeetingEvent, MeetingRole, TRIED};
use crate::doctor::{
    DeviceReport, Environment, ErrorDetails, Finding, Probe, Status,
    control::{Control, ControlRecord, unexpected},
    endpoint::Endpoint,
    outcome::{ProbeOutcome, ProbeResult},
    sharing::{MemoryKind, open_shared, serve_requests_within, share, share_event},
};

/// The most devices that the peer may report.
const MAX_DEVICES: usize = 64;

/// The longest report of the peer on a device or probe, in bytes of JSON.
const MAX_REPORTED: usize = 16 << 10;

/// The timeout for the hello of a new connection: a doctor sends it at once, and other connections may be waiting.
const GREETING: Duration = Duration::from_secs(2);

/// Runs the conversation. Sends each result to the thread that builds the report.
pub(super) fn converse(
    meeting: &Meeting,
    socket: &Path,
    cancel: &Cancel,
    results: &Sender<MeetingEvent>,
) -> Result<()> {
    // Fails if the receiving thread has stopped waiting.
    let report = |event: MeetingEvent| drop(results.send(event));
    let mut environment = Environment::read(None);
    let own = Probe::named("driver").and_then(|probe| probe.run_machine(meeting.backend));
    if let Some(finding) = &own {
        let library = finding.figures.get("library").and_then(|library| library.as_str());
        environment = Environment::read(library.map(Path::new));
        report(MeetingEvent::Machine(finding.clone()));
    }
    // The sides meet even without a driver, so that the peer reports the failure too.
    let works = own.as_ref().is_none_or(|finding| finding.status == Status::Ok);
    let driver = works.then(|| open(Choice::Only(meeting.backend))).transpose()?.map(|opened| opened.driver);
    let greet = |control: &Control| control.greet(meeting.backend, &environment, own.as_ref());
    let (mut control, (peer, theirs)) = match meeting.role {
        MeetingRole::Serve => accept(meeting, socket, cancel, &greet)?,
        MeetingRole::Join => connect(meeting, socket, cancel, &greet)?,
    };
    control.set_timeout(meeting.timeout);
    report(MeetingEvent::Peer(Box::new(peer)));
    theirs.as_ref().map_or(Ok(()), check_length)?;
    let broken = theirs.filter(|finding| finding.status != Status::Ok);
    let Some(driver) = driver else {
        let message = "this side's driver can't be used, so nothing was tested".to_owned();
        report(MeetingEvent::Ended(Some(ErrorDetails::new("peer", message))));
        return Ok(());
    };
    if let Some(broken) = broken {
        for device in Device::all(&driver)? {
            report(MeetingEvent::Device(describe(&device)));
        }
        let why = broken.error.unwrap_or_else(|| ErrorDetails::new("peer", broken.meaning));
        let message = format!("its driver can't be used: {}", why.message);
        report(MeetingEvent::Ended(Some(ErrorDetails { message, ..why }.of_other_end())));
        return Ok(());
    }
    let (socket, trust) = (socket.to_owned(), meeting.trust.clone());
    let end = Endpoint { driver, socket, trust, timeout: meeting.timeout };
    match meeting.role {
        MeetingRole::Serve => serve(&end, &control, &report),
        MeetingRole::Join => join(&end, &control, &report),
    }
}

/// The peer's environment, and its finding of the `driver` probe.
type Greeting = (Environment, Option<Finding>);

/// Waits for a doctor to connect. Rejects other processes.
fn accept(
    meeting: &Meeting,
    socket: &Path,
    cancel: &Cancel,
    greet: &dyn Fn(&Control) -> Result<Greeting>,
) -> Result<(Control, Greeting)> {
    let Meeting { trust, wait, timeout, .. } = meeting;
    let deadline = deadline_after(*wait);
    let listener = Listener::bind(socket, !trust.uids.is_empty(), *timeout, cancel)?;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = |error| match error {
            Error::Peer(PeerError::NoConsumer { .. }) => Error::Peer(PeerError::NoConsumer { waited: *wait }),
            other => other,
        };
        let mut control = Control::accept(&listener, left, trust, cancel).map_err(waited)?;
        control.set_timeout(GREETING.min(*timeout));
        match greet(&control) {
            Ok(greeted) => return Ok((control, greeted)),
            // A doctor that is incompatible with this one.
            Err(
                error @ (Error::Peer(PeerError::Mismatch { .. })
                | Error::Peer(PeerError::Reported { .. })
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
    socket: &Path,
    cancel: &Cancel,
    greet: &dyn Fn(&Control) -> Result<Greeting>,
) -> Result<(Control, Greeting)> {
    let mut control = Control::connect(socket, meeting.wait, &meeting.trust, cancel)?;
    control.set_timeout(meeting.timeout);
    let greeted = greet(&control).map_err(|error| match error {
        Error::Peer(PeerError::Protocol(_)) => Error::Socket(SocketError::Path {
            path: socket.to_owned(),
            reason: "no doctor listens there: two others are meeting, or a producer serves it".to_owned(),
        }),
        other => other,
    })?;
    Ok((control, greeted))
}

fn describe(device: &Device) -> DeviceReport {
    let (ordinal, name, uuid) = (device.ordinal(), device.name().to_owned(), device.uuid());
    DeviceReport { ordinal, name, uuid, findings: Vec::new() }
}

/// Answers the peer's requests and validates its reports: known devices and probes, each once.
fn join(end: &Endpoint, control: &Control, report: &dyn Fn(MeetingEvent)) -> Result<()> {
    // The peer's own limit for its conversation thread.
    let each_device = end.timeout.saturating_mul(super::STEPS * u32::try_from(TRIED.len()).unwrap_or(u32::MAX));
    let limit = Cell::new(each_device);
    let mut devices = BTreeSet::new();
    let mut found = BTreeSet::new();
    serve_requests_within(end, control, &limit, &mut |record| {
        match record {
            ControlRecord::Device(device) => {
                check_length(&device)?;
                let fresh = found.is_empty() && devices.len() < MAX_DEVICES && devices.insert(device.ordinal);
                if !fresh {
                    return Err(unexpected(&ControlRecord::Device(device), "found"));
                }
                if devices.len() > 1 {
                    limit.set(limit.get().saturating_add(each_device));
                }
                report(MeetingEvent::Device(DeviceReport { findings: Vec::new(), ..device }));
            }
            ControlRecord::Found { device, finding } => {
                check_length(&finding)?;
                let known = devices.contains(&device) && TRIED.contains(&finding.probe.as_str());
                if !known || !found.insert((device, finding.probe.clone())) {
                    return Err(unexpected(&ControlRecord::Found { device, finding }, "bye"));
                }
                // Ignore the peer's explanation: this side has the rules too.
                let finding = Finding { cause: None, remedy: None, rule: None, ..finding };
                report(MeetingEvent::Found { device, finding, theirs: true });
            }
            ControlRecord::Bye {} => report(MeetingEvent::Ended(None)),
            other => return Err(unexpected(&other, "found")),
        }
        Ok(())
    })
}

/// Rejects a report of the peer that is too long to print.
fn check_length(report: &impl Serialize) -> Result<()> {
    let length = serde_json::to_vec(report).map_or(usize::MAX, |text| text.len());
    match length {
        0..=MAX_REPORTED => Ok(()),
        _ => Err(ProtocolError::LongRecord { most: MAX_REPORTED }.into()),
    }
}

/// Runs every probe on every device, and sends the findings to the peer.
fn serve(end: &Endpoint, control: &Control, report: &dyn Fn(MeetingEvent)) -> Result<()> {
    // Send all devices first: if the meeting fails, both sides know which results are missing.
    let mut devices = Device::all(&end.driver)?;
    devices.truncate(MAX_DEVICES);
    for device in &devices {
        report(MeetingEvent::Device(describe(device)));
    }
    for device in &devices {
        control.send(&ControlRecord::Device(describe(device)))?;
    }
    for device in &devices {
        for probe in TRIED.iter().filter_map(|name| Probe::named(name)) {
            let finding = probe.examine(|| match probe.name {
                "round-trip" => both_directions(end, control, device),
                "event" => share_event(control, device),
                name => {
                    let kind = MemoryKind::named(name);
                    kind.require(device)?;
                    share(end, control, device, kind)
                }
            });
            let device = device.ordinal();
            report(MeetingEvent::Found { device, finding: finding.clone(), theirs: false });
            control.send(&ControlRecord::Found { device, finding })?;
        }
    }
    control.send(&ControlRecord::Bye {})?;
    report(MeetingEvent::Ended(None));
    Ok(())
}

/// An `ok` outcome for the only direction that could be tested.
fn one_direction(outcome: ProbeOutcome, error: &ErrorDetails) -> ProbeOutcome {
    let meaning = format!("one direction only: the peer can't share memory here: {}", error.message);
    let outcome = outcome.figure("back", format!("not tested: {}", error.message));
    ProbeOutcome { meaning, ..outcome }
}

/// Shares memory with the peer, then opens the peer's memory.
fn both_directions(end: &Endpoint, control: &Control, device: &Device) -> ProbeResult {
    let outcome = share(end, control, device, MemoryKind::ROUND_TRIP)?;
    if outcome.status != Status::Ok {
        return Ok(outcome);
    }
    control.send(&ControlRecord::Share { probe: "round-trip".to_owned(), device: device.uuid() })?;
    let mut opened = None;
    let error = loop {
        match control.receive()? {
            ControlRecord::Begin { .. } => {
                let result = open_shared(end, control.cancel(), Some(Selector::Uuid(device.uuid())));
                control.send(&ControlRecord::done(&result))?;
                opened = Some(result);
            }
            ControlRecord::Shared { error } => break error,
            other => return Err(unexpected(&other, "lent").into()),
        }
    };
    Ok(match (error, opened) {
        (None, Some(Ok(opened))) => outcome.figure("back", "verified").figure("back_open_us", opened.open_us),
        (_, Some(Err(error))) => {
            ProbeOutcome::failed("The peer's memory can't be used here.").with_error(ErrorDetails::of(&error))
        }
        // Neither error is about the memory, so the probe does not fail: the peer's user can't create a socket in the folder, or the peer
        // does not see the device and reads the memory through another device.
        (Some(error), None) if error.call.as_deref() == Some(MemoryKind::BIND) => one_direction(outcome, &error),
        (Some(error), None) if error.is_unsupported() && outcome.figures.contains_key("through") => {
            one_direction(outcome, &error)
        }
        (Some(error), _) => ProbeOutcome::failed("The peer can't share its memory with this side.").with_error(error),
        (None, None) => ProbeOutcome::failed("The peer shared nothing."),
    })
}
