//! The probes that take two, with each end where a person puts it: in a container, a namespace, or as a user of its own.

use std::{
    cell::Cell,
    collections::BTreeSet,
    io,
    path::{Path, PathBuf},
    sync::mpsc::{self, RecvTimeoutError, Sender},
    thread,
    time::{Duration, Instant},
};

use serde::Serialize;

use super::{
    DeviceReport, Environment, Finding, Report, Status,
    control::{Control, Say, unexpected},
    probes::{End, Found, Probe, Way, lend, share_event, take},
    report::{SCHEMA, Seen},
    rules,
    runner::conclude,
    verdict,
};
use crate::{
    channel::{Cancel, Listener, Trust, deadline_after, socket_path},
    driver::{Backend, Choice, open},
    error::{Error, ProtocolError, Result},
    memory::{Device, Selector},
};

/// Where two ends meet, and how.
#[derive(Debug, Clone)]
pub struct Meeting {
    /// Which of the two this is.
    pub part: Part,
    /// On what.
    pub backend: Backend,
    /// The socket. Its folder must be seen by both ends: other sockets come and go under that name.
    pub socket: PathBuf,
    /// Which users the other end may belong to, besides one's own and root.
    pub trust: Trust,
    /// How long to wait for the other end to appear.
    pub wait: Duration,
    /// How long each step may take.
    pub timeout: Duration,
}

/// The two ends of a meeting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The one that listens, and says what is tried.
    Serve,
    /// The one that comes.
    Join,
}

/// What is tried on each device.
const TRIED: [&str; 5] = ["round-trip", "host-numa", "pool", "legacy", "event"];

/// The most devices that another end may have.
const MAX_DEVICES: usize = 64;

/// The longest that another end may say of a device, or of a probe, in bytes of JSON.
const MAX_TOLD: usize = 16 << 10;

/// How long the first word of whoever connects may take: it is ready when it is sent, and others may be waiting.
const GREETING: Duration = Duration::from_secs(2);

/// What is known so far, for the one who waits: the work itself may hang in the driver.
enum Told {
    Machine(Finding),
    Peer(Box<Environment>),
    Device(DeviceReport),
    Found {
        device: i32,
        finding: Finding,
        /// Whether the other end found it: then what it calls the other end is this one.
        theirs: bool,
    },
    /// All was told, or nothing more will be for this reason.
    Ended(Option<Seen>),
}

/// Meets the other end, and reports what both found together.
///
/// # Errors
/// [`Error::SocketPath`], [`Error::AlreadyServed`]; [`Error::System`] if the other end does not come;
/// [`Error::PeerNotAllowed`], [`Error::Peer`]; [`Error::Interrupted`]. What the probes fail with is in the report.
pub fn meet(meeting: &Meeting, cancel: &Cancel) -> Result<Report> {
    let socket = socket_path(Some(&meeting.socket))?;
    if meeting.part == Part::Serve {
        Listener::check_free(&socket)?;
    }
    let mut report = Report {
        schema: SCHEMA,
        tool: super::tool(),
        made: super::now(),
        backend: meeting.backend,
        environment: Environment::look(None),
        peer: None,
        required: vec!["driver".to_owned(), "round-trip".to_owned()],
        machine: Vec::new(),
        devices: Vec::new(),
        pairs: Vec::new(),
        verdict: String::new(),
        exit_code: 0,
    };
    let (sender, receiver) = mpsc::channel();
    // In a thread that is left behind if it hangs: all that waits in it is cancelled by this one's end.
    let (own, over) = (meeting.clone(), cancel.clone());
    let work = move || work(&own, &socket, &over, &sender);
    let working = thread::Builder::new().name("meeting".to_owned()).spawn(work);
    let working = working.map_err(|error| Error::system("start a thread", error))?;
    // Each wait in it has a deadline of its own: this one is for what hangs in the driver.
    let patience = |report: &Report| match report.peer {
        None => meeting.wait.saturating_add(meeting.timeout),
        Some(_) => meeting.timeout.saturating_mul(4),
    };
    let mut since = Instant::now();
    let (mut theirs, mut ended) = (BTreeSet::new(), None);
    let path = &meeting.socket;
    let hung = loop {
        cancel.check()?;
        match receiver.recv_timeout(Duration::from_millis(20)) {
            Ok(told) => {
                since = Instant::now();
                match told {
                    Told::Machine(finding) => {
                        let library = finding.figures.get("library").and_then(|library| library.as_str());
                        report.environment = Environment::look(library.map(Path::new));
                        report.machine.push(finding);
                    }
                    Told::Peer(environment) => report.peer = Some(*environment),
                    Told::Device(device) => report.devices.push(device),
                    Told::Found { device, finding, theirs: told } => {
                        if told {
                            theirs.insert((device, finding.probe.clone()));
                        }
                        if let Some(report) = report.devices.iter_mut().find(|report| report.ordinal == device) {
                            report.findings.push(finding);
                        }
                    }
                    Told::Ended(why) => ended = Some(why),
                }
            }
            Err(RecvTimeoutError::Timeout) if since.elapsed() < patience(&report) => {}
            Err(RecvTimeoutError::Timeout) => break true,
            Err(RecvTimeoutError::Disconnected) => break false,
        }
    };
    let without_driver = report.machine.iter().any(|finding| finding.status != Status::Ok);
    let seen = match hung {
        true => Some(seen("timeout", format!("nothing came of it within {:?}", patience(&report)))),
        false => match working.join() {
            Ok(Ok(())) => ended.unwrap_or_else(|| Some(seen("peer", "it ended before all was told".to_owned()))),
            Ok(Err(error @ Error::Interrupted { .. })) => return Err(error),
            // Without the other end there is nothing to report, but for what is wrong with this one.
            Ok(Err(error)) if report.peer.is_none() && !without_driver => return Err(alone(error, path)),
            Ok(Err(error @ Error::PeerGone { .. })) => {
                let why = "the other end vanished before all was told: it ended, was killed, or left";
                Some(Seen { message: format!("{why} ({})", error.in_full()), ..Seen::of(&error) })
            }
            Ok(Err(error)) => Some(Seen::of(&alone(error, path))),
            Err(_) => return Err(Error::system("meet the other end", io::Error::other("its thread panicked"))),
        },
    };
    complete(&mut report, seen);
    conclude(&mut report);
    explain_theirs(&mut report, &theirs);
    Ok(report)
}

fn seen(kind: &str, message: String) -> Seen {
    Seen { call: None, code: None, name: None, kind: kind.to_owned(), message }
}

/// Nobody came: in the words of this command, and not in those of the other two.
fn alone(error: Error, path: &Path) -> Error {
    let nobody = |which: &str, waited: Duration| {
        let what = format!(
            "nobody is there within {waited:?}: run `vmmfd doctor {which}` on the same --socket, or wait longer with --wait"
        );
        Error::system(format!("meet another doctor at {}", path.display()), io::Error::other(what))
    };
    match error {
        Error::NoConsumer { waited } => nobody("join", waited),
        Error::Absent { waited, .. } | Error::NotAccepted { waited, .. } => nobody("serve", waited),
        other => other,
    }
}

/// What was not told fails, of every device, with what ended it all: nothing that is absent counts as good.
fn complete(report: &mut Report, cut: Option<Seen>) {
    let mut lacking = false;
    let why = cut
        .clone()
        .unwrap_or_else(|| seen("peer", "the other end said good-bye and had not told what came of it".to_owned()));
    for device in &mut report.devices {
        for probe in TRIED.iter().filter_map(|name| Probe::named(name)) {
            if !device.findings.iter().any(|finding| finding.probe == probe.name) {
                lacking |= probe.required;
                device.findings.push(probe.cut_short(None, why.clone()));
            }
        }
    }
    // Of no device, or after all that is required: then it is of the meeting as a whole.
    if report.devices.is_empty() || (cut.is_some() && !lacking) {
        report.machine.extend(Probe::named("round-trip").map(|probe| probe.cut_short(None, why)));
    }
}

/// What failed at the other end is explained by how it is there.
fn explain_theirs(report: &mut Report, theirs: &BTreeSet<(i32, String)>) {
    let Some(peer) = report.peer.clone() else { return };
    let explain = |finding: &mut Finding, theirs: bool| {
        let other = finding.error.as_ref().is_some_and(|seen| seen.message.starts_with("the other end: "));
        if finding.status != Status::Ok && finding.error.is_some() && other != theirs {
            (finding.cause, finding.remedy, finding.rule) = (None, None, None);
            rules::explain(finding, &peer);
        }
    };
    report.machine.iter_mut().for_each(|finding| explain(finding, false));
    for device in &mut report.devices {
        for finding in &mut device.findings {
            let told = theirs.contains(&(device.ordinal, finding.probe.clone()));
            explain(finding, told);
        }
    }
    (report.verdict, report.exit_code) = verdict::of(report);
}

fn work(meeting: &Meeting, socket: &Path, cancel: &Cancel, telling: &Sender<Told>) -> Result<()> {
    // Nobody may be listening any more: then this is left behind, and ends by itself.
    let tell = |told: Told| drop(telling.send(told));
    let mut environment = Environment::look(None);
    let own = Probe::named("driver").and_then(|probe| probe.run_machine(meeting.backend));
    if let Some(finding) = &own {
        let library = finding.figures.get("library").and_then(|library| library.as_str());
        environment = Environment::look(library.map(Path::new));
        tell(Told::Machine(finding.clone()));
    }
    // The other end is told also that there is none.
    let works = own.as_ref().is_none_or(|finding| finding.status == Status::Ok);
    let driver = works.then(|| open(Choice::Only(meeting.backend))).transpose()?.map(|opened| opened.driver);
    let Meeting { backend, trust, wait, timeout, .. } = meeting;
    let greet = |control: &mut Control| control.greet_with(*backend, &environment, own.as_ref());
    let (mut control, (peer, theirs)) = match meeting.part {
        Part::Serve => {
            let deadline = deadline_after(*wait);
            let listener = Listener::bind(socket, !trust.uids.is_empty(), *timeout, cancel)?;
            loop {
                let left = deadline.saturating_duration_since(Instant::now());
                let waited = |error| match error {
                    Error::NoConsumer { .. } => Error::NoConsumer { waited: *wait },
                    other => other,
                };
                let mut control = Control::accept(&listener, left, trust, cancel).map_err(waited)?;
                control.set_timeout(GREETING.min(*timeout));
                match greet(&mut control) {
                    Ok(greeted) => break (control, greeted),
                    // It is a doctor, and the wrong one.
                    Err(error @ (Error::Mismatch { .. } | Error::Peer { .. } | Error::Interrupted { .. })) => {
                        return Err(error);
                    }
                    // Whoever it is does not keep out the one who is waited for.
                    Err(error) => tracing::debug!(%error, "somebody came who is no doctor"),
                }
            }
        }
        Part::Join => {
            let mut control = Control::connect(socket, *wait, trust, cancel)?;
            control.set_timeout(*timeout);
            let greeted = greet(&mut control).map_err(|error| match error {
                Error::Protocol(_) => Error::SocketPath {
                    path: socket.to_owned(),
                    reason: "no doctor waits there: a meeting of two others is under way, or a producer serves"
                        .to_owned(),
                },
                other => other,
            })?;
            (control, greeted)
        }
    };
    control.set_timeout(*timeout);
    tell(Told::Peer(Box::new(peer)));
    theirs.as_ref().map_or(Ok(()), within)?;
    let broken = theirs.filter(|finding| finding.status != Status::Ok);
    let Some(driver) = driver else {
        tell(Told::Ended(Some(seen("peer", "this end's driver can't be used, so nothing was tried".to_owned()))));
        return Ok(());
    };
    if let Some(broken) = broken {
        for device in Device::all(&driver)? {
            tell(Told::Device(describe(&device)));
        }
        let why = broken.error.unwrap_or_else(|| seen("peer", broken.meaning));
        let message = format!("the other end: its driver can't be used: {}", why.message);
        tell(Told::Ended(Some(Seen { message, ..why })));
        return Ok(());
    }
    let end = End { driver, socket: socket.to_owned(), trust: trust.clone(), timeout: *timeout };
    match meeting.part {
        Part::Serve => serve(&end, &mut control, &tell),
        Part::Join => join(&end, &mut control, &tell),
    }
}

fn describe(device: &Device) -> DeviceReport {
    let (ordinal, name, uuid) = (device.ordinal(), device.name().to_owned(), device.uuid());
    DeviceReport { ordinal, name, uuid, findings: Vec::new() }
}

/// Does what the other end asks for, and believes no more of it than there can be.
fn join(end: &End, control: &mut Control, tell: &dyn Fn(Told)) -> Result<()> {
    // The other end may take as long as its own watch lets it.
    let each_device = end.timeout.saturating_mul(4 * u32::try_from(TRIED.len()).unwrap_or(u32::MAX));
    let limit = Cell::new(each_device);
    let mut devices = BTreeSet::new();
    let mut found = BTreeSet::new();
    end.follow_within(control, &limit, &mut |say| {
        match say {
            Say::Device(device) => {
                within(&device)?;
                let fresh = found.is_empty() && devices.len() < MAX_DEVICES && devices.insert(device.ordinal);
                if !fresh {
                    return unexpected(&Say::Device(device), "found");
                }
                if devices.len() > 1 {
                    limit.set(limit.get().saturating_add(each_device));
                }
                tell(Told::Device(DeviceReport { findings: Vec::new(), ..device }));
            }
            Say::Found { device, finding } => {
                within(&finding)?;
                let known = devices.contains(&device) && TRIED.contains(&finding.probe.as_str());
                if !known || !found.insert((device, finding.probe.clone())) {
                    return unexpected(&Say::Found { device, finding }, "bye");
                }
                // What explains it is known here too.
                let finding = Finding { cause: None, remedy: None, rule: None, ..finding };
                tell(Told::Found { device, finding, theirs: true });
            }
            Say::Bye {} => tell(Told::Ended(None)),
            other => return unexpected(&other, "found"),
        }
        Ok(())
    })
}

/// Checks that what the other end says is not too long to be printed.
fn within(said: &impl Serialize) -> Result<()> {
    let length = serde_json::to_vec(said).map_or(usize::MAX, |text| text.len());
    match length {
        0..=MAX_TOLD => Ok(()),
        _ => Err(ProtocolError::LongRecord { most: MAX_TOLD }.into()),
    }
}

fn serve(end: &End, control: &mut Control, tell: &dyn Fn(Told)) -> Result<()> {
    // All of them first, and here before there: whatever ends this, what was not tried is known at both ends.
    let mut devices = Device::all(&end.driver)?;
    devices.truncate(MAX_DEVICES);
    for device in &devices {
        tell(Told::Device(describe(device)));
    }
    for device in &devices {
        control.send(&Say::Device(describe(device)))?;
    }
    for device in &devices {
        for probe in TRIED.iter().filter_map(|name| Probe::named(name)) {
            let finding = probe.examine(|| match probe.name {
                "round-trip" => both_ways(end, control, device),
                "host-numa" => lend(end, control, device, Way::HOST),
                "pool" => {
                    device.verbs().pools()?;
                    lend(end, control, device, Way::POOL)
                }
                "legacy" => {
                    device.verbs().legacy()?;
                    lend(end, control, device, Way::LEGACY)
                }
                _ => share_event(control, device),
            });
            let device = device.ordinal();
            tell(Told::Found { device, finding: finding.clone(), theirs: false });
            control.send(&Say::Found { device, finding })?;
        }
    }
    control.send(&Say::Bye {})?;
    tell(Told::Ended(None));
    Ok(())
}

/// Works, as far as it could be tried.
fn one_way(found: Found, seen: &Seen) -> Found {
    let meaning = format!("one direction only: the other end can't lend here: {}", seen.message);
    let found = found.figure("back", format!("not tried: {}", seen.message));
    Found { meaning, ..found }
}

/// Lends to the other end, then has the other end lend to this one.
fn both_ways(end: &End, control: &mut Control, device: &Device) -> Result<Found> {
    let found = lend(end, control, device, Way::ROUND_TRIP)?;
    if found.status != Status::Ok {
        return Ok(found);
    }
    control.send(&Say::Lend { probe: "round-trip".to_owned(), device: device.uuid() })?;
    let mut taken = None;
    let seen = loop {
        match control.receive()? {
            Say::Begin { .. } => {
                let cancel = control.cancel().clone();
                let result = take(end, &cancel, Some(Selector::Uuid(device.uuid())));
                control.send(&Say::done(&result))?;
                taken = Some(result);
            }
            Say::Lent { error } => break error,
            other => return unexpected(&other, "lent"),
        }
    };
    Ok(match (seen, taken) {
        (None, Some(Ok(taken))) => found.figure("back", "verified").figure("back_open_us", taken.open_us),
        (_, Some(Err(error))) => Found::failed("The other end's memory can't be used here.").with(Seen::of(&error)),
        // What says nothing of the memory is no failure, but it is told: the other end's user may not make a socket in the
        // folder, or it does not see the device and reads it through another.
        (Some(seen), None) if seen.call.as_deref() == Some(Way::BIND) => one_way(found, &seen),
        (Some(seen), None) if seen.is_lacking() && found.figures.contains_key("through") => one_way(found, &seen),
        (Some(seen), _) => Found::failed("The other end can't lend its memory to this one.").with(seen),
        (None, None) => Found::failed("The other end lent nothing."),
    })
}
