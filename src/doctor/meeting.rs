//! The probes that take two, with each end where a person puts it: in a container, a namespace, or as a user of its own.

use std::{
    path::{Path, PathBuf},
    sync::mpsc::{self, RecvTimeoutError, Sender},
    thread,
    time::{Duration, Instant},
};

use super::{
    DeviceReport, Environment, Finding, Report, Status,
    control::{Control, Say, unexpected},
    probes::{End, Found, Probe, Way, follow, lend, share_event, take},
    report::{SCHEMA, Seen},
    runner::conclude,
};
use crate::{
    channel::{Cancel, Listener, Trust, socket_path},
    driver::{Backend, Choice, open},
    error::{Error, Result},
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
const TRIED: [&str; 4] = ["round-trip", "pool", "legacy", "event"];

/// What is known so far, for the one who waits: the work itself may hang in the driver.
enum Told {
    Machine(Finding),
    Peer(Box<Environment>),
    Device(DeviceReport),
    Found(Finding),
}

/// Meets the other end, and reports what both found together.
///
/// # Errors
/// [`Error::SocketPath`], [`Error::AlreadyServed`]; [`Error::NoConsumer`] and [`Error::Absent`] if the other end does not
/// come; [`Error::PeerNotAllowed`], [`Error::Peer`]; [`Error::Interrupted`]. What the probes fail with is in the report.
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
                    Told::Found(finding) => {
                        if let Some(device) = report.devices.last_mut() {
                            device.findings.push(finding);
                        }
                    }
                }
            }
            Err(RecvTimeoutError::Timeout) if since.elapsed() < patience(&report) => {}
            Err(RecvTimeoutError::Timeout) => break true,
            Err(RecvTimeoutError::Disconnected) => break false,
        }
    };
    let seen = match hung {
        true => Some(Seen {
            call: None,
            code: None,
            name: None,
            kind: "timeout".to_owned(),
            message: format!("nothing came of it within {:?}", patience(&report)),
        }),
        false => match working.join() {
            Ok(Ok(())) => None,
            // Without the other end there is nothing to report.
            Ok(Err(error)) if report.peer.is_none() || matches!(error, Error::Interrupted { .. }) => return Err(error),
            Ok(Err(error)) => Some(Seen::of(&error)),
            Err(_) => return Err(Error::system("meet the other end", std::io::Error::other("its thread panicked"))),
        },
    };
    if let Some(seen) = seen {
        complete(&mut report, &seen);
    }
    conclude(&mut report);
    Ok(report)
}

/// What was not tried any more, of the last device, fails with what ended it all: the report is whole.
fn complete(report: &mut Report, seen: &Seen) {
    let Some(device) = report.devices.last_mut() else {
        report.machine.extend(Probe::named("round-trip").map(|probe| probe.cut_short(None, seen.clone())));
        return;
    };
    for probe in TRIED.iter().filter_map(|name| Probe::named(name)) {
        if !device.findings.iter().any(|finding| finding.probe == probe.name) {
            device.findings.push(probe.cut_short(None, seen.clone()));
        }
    }
}

fn work(meeting: &Meeting, socket: &Path, cancel: &Cancel, telling: &Sender<Told>) -> Result<()> {
    // Nobody may be listening any more: then this is left behind, and ends by itself.
    let tell = |told: Told| drop(telling.send(told));
    let mut environment = Environment::look(None);
    if let Some(finding) = Probe::named("driver").and_then(|probe| probe.run_machine(meeting.backend)) {
        let good = finding.status == Status::Ok;
        let library = finding.figures.get("library").and_then(|library| library.as_str());
        environment = Environment::look(library.map(Path::new));
        tell(Told::Machine(finding));
        if !good {
            return Ok(());
        }
    }
    let driver = open(Choice::Only(meeting.backend))?.driver;
    let Meeting { backend, trust, wait, timeout, .. } = meeting;
    let mut control = match meeting.part {
        Part::Serve => {
            let listener = Listener::bind(socket, !trust.uids.is_empty(), *timeout, cancel)?;
            Control::accept(&listener, *wait, trust, cancel, &mut || Ok(()))?
        }
        Part::Join => Control::connect(socket, *wait, trust, cancel)?,
    };
    control.set_timeout(*timeout);
    let peer = control.greet(*backend, &environment)?;
    tell(Told::Peer(Box::new(peer)));
    let end = End { driver, socket: socket.to_owned(), trust: trust.clone(), timeout: *timeout };
    match meeting.part {
        Part::Serve => serve(&end, &mut control, &tell),
        Part::Join => {
            let mut ended = false;
            let result = follow(&end, &mut control, &mut |say| match say {
                Say::Device(device) => tell(Told::Device(device)),
                Say::Found(finding) => tell(Told::Found(finding)),
                Say::Bye {} => ended = true,
                _ => {}
            });
            if ended { Ok(()) } else { result }
        }
    }
}

fn serve(end: &End, control: &mut Control, tell: &dyn Fn(Told)) -> Result<()> {
    for device in Device::all(&end.driver)? {
        let (ordinal, name, uuid) = (device.ordinal(), device.name().to_owned(), device.uuid());
        let report = DeviceReport { ordinal, name, uuid, findings: Vec::new() };
        control.send(&Say::Device(report.clone()))?;
        tell(Told::Device(report));
        for probe in TRIED.iter().filter_map(|name| Probe::named(name)) {
            let finding = probe.examine(|| match probe.name {
                "round-trip" => both_ways(end, control, &device),
                "pool" => {
                    device.driver().pools()?;
                    lend(end, control, &device, Way::POOL)
                }
                "legacy" => {
                    device.driver().legacy()?;
                    lend(end, control, &device, Way::LEGACY)
                }
                _ => share_event(control, &device),
            });
            let said = control.send(&Say::Found(finding.clone()));
            tell(Told::Found(finding));
            said?;
        }
    }
    control.send(&Say::Bye {})
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
        (None, Some(Ok((open_us, _)))) => found.figure("back", "verified").figure("back_open_us", open_us),
        (_, Some(Err(error))) => Found::failed("The other end's memory can't be used here.").with(Seen::of(&error)),
        // It could not even begin: most often its user may not make a socket in the folder, or it does not see the device.
        (Some(seen), None) => found.figure("back", format!("not tried: {}", seen.message)),
        (Some(seen), _) => Found::failed("The other end can't lend its memory to this one.").with(seen),
        (None, None) => Found::failed("The other end lent nothing."),
    })
}
