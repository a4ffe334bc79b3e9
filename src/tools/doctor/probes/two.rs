//! What takes two processes: one lends, over the real socket path, and the other takes.

use std::{
    cell::Cell,
    path::PathBuf,
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use super::{Bench, Found, Probe, micros, timed};
use crate::{
    channel::{Cancel, Listener, Trust},
    driver::{DeviceUuid, Diagnosis, Driver, EventHandle},
    error::{Error, ProtocolError, Result},
    memory::{Device, Placement, Selector, Spec},
    session::{
        self, Config,
        handoff::{self, Buffer, Consumer, Request, ServeOptions},
    },
    tools::check::{DataVerifier, Exercise},
    tools::doctor::{
        Status,
        control::{Control, Say, Taken, unexpected},
        peer::PeerProcess,
        report::Seen,
    },
};

/// How memory travels in a probe.
#[derive(Debug, Clone, Copy)]
pub(in crate::tools::doctor) struct Way {
    pub(in crate::tools::doctor) probe: &'static str,
    spec: fn(u64) -> Spec,
}

impl Way {
    pub(in crate::tools::doctor) const ROUND_TRIP: Self =
        Self { probe: "round-trip", spec: |size| Spec::vmm(size).into() };
    pub(in crate::tools::doctor) const POOL: Self = Self { probe: "pool", spec: Spec::pool };
    pub(in crate::tools::doctor) const LEGACY: Self = Self { probe: "legacy", spec: Spec::legacy };
    pub(in crate::tools::doctor) const HOST: Self =
        Self { probe: "host-numa", spec: |size| Spec::vmm(size).placement(Placement::Host).into() };

    /// What was called if there can be no socket in the folder.
    pub(in crate::tools::doctor) const BIND: &str = "bind";

    /// The way of a probe, as the other end names it. Where only the memory counts it is the plain one.
    pub(in crate::tools::doctor) fn named(probe: &str) -> Self {
        let ways = [Self::POOL, Self::LEGACY, Self::HOST];
        ways.into_iter().find(|way| way.probe == probe).unwrap_or(Self::ROUND_TRIP)
    }
}

/// One end of a meeting: what it needs besides the connection.
#[derive(Debug, Clone)]
pub(in crate::tools::doctor) struct End {
    pub(in crate::tools::doctor) driver: Driver,
    /// Where memory is handed over.
    pub(in crate::tools::doctor) socket: PathBuf,
    pub(in crate::tools::doctor) trust: Trust,
    /// The longest wait for the other end.
    pub(in crate::tools::doctor) timeout: Duration,
}

/// More than one unit, and no whole number of words: so that the end of the data is no end of anything else.
const SIZE: u64 = (4 << 20) + 13;

impl End {
    pub(in crate::tools::doctor) fn config(&self, cancel: &Cancel) -> Config {
        Config::default().with_timeout(self.timeout).with_trust(self.trust.clone()).with_cancel(cancel)
    }

    /// As [`follow`], with a limit for all of it together that may grow meanwhile. `each` may end it.
    pub(in crate::tools::doctor) fn follow_within(
        &self,
        control: &mut Control,
        limit: &Cell<Duration>,
        each: &mut dyn FnMut(Say) -> Result<()>,
    ) -> Result<()> {
        let begun = Instant::now();
        follow_for(self, control, &mut || limit.get().saturating_sub(begun.elapsed()), each)
    }
}

/// Lends memory to the other end, which reads it and writes a reply.
pub(in crate::tools::doctor) fn lend(end: &End, control: &mut Control, device: &Device, way: Way) -> Result<Found> {
    let cancel = Cancel::new()?;
    let config = end.config(&cancel);
    let content = Exercise::pattern(rand::random(), &|_| {});
    let buffer = Buffer::create(device, (way.spec)(SIZE), content, None, &config, &|_| {})?;
    let listener = match Listener::bind(&end.socket, !end.trust.uids.is_empty(), end.timeout, &cancel) {
        Ok(listener) => listener,
        Err(error @ Error::Interrupted { .. }) => return Err(error),
        // It says nothing about the memory: whoever asked for this may tell it apart.
        Err(error) => return Ok(of_seen(way.probe, Seen { call: Some(Way::BIND.to_owned()), ..Seen::of(&error) })),
    };
    control.send(&Say::Begin { probe: way.probe.to_owned() })?;
    let options = ServeOptions::default().with_round_trip(true);
    let (done, result) = thread::scope(|scope| {
        let serving = scope.spawn(|| handoff::serve(listener, &buffer, &options, &config, &|_| {}));
        let done = control.receive();
        // An end that fails before it has asked for anything would be waited for in vain.
        if !matches!(done, Ok(Say::Done { error: None, .. })) {
            cancel.cancel(0);
        }
        (done, serving.join())
    });
    let (open_us, bytes, through) = match done? {
        Say::Done { error: None, open_us, bytes, through, .. } => (open_us, bytes, through),
        Say::Done { error: Some(mut seen), .. } => {
            seen.message = format!("the other end: {}", seen.message);
            return Ok(of_seen(way.probe, seen));
        }
        other => return unexpected(&other, "done"),
    };
    let report = result.map_err(|_| Error::system("serve the memory", std::io::Error::other("its thread panicked")))?;
    let served = report.into_result()?.pop().ok_or(Error::NoConsumer { waited: end.timeout })?;
    if served.mismatched() {
        return Ok(Found::failed("One process does not see what the other wrote."));
    }
    if let Some(error) = served.error {
        return Err(error);
    }
    let found = Found::ok(match way.probe {
        "pool" => "Two processes share memory of a pool, and see each other's bytes.",
        "legacy" => "Two processes share memory by a legacy handle, and see each other's bytes.",
        "host-numa" => "Two processes share the host's memory, for the device and the CPU, and see each other's bytes.",
        _ => "Two processes share memory over a socket, and each sees what the other writes.",
    });
    let found = found.figure("bytes", bytes);
    let found = match through {
        Some(through) if through != device.uuid() => found.figure("through", through.to_string()),
        _ => found,
    };
    Ok(found.figure("open_us", open_us))
}

fn of_seen(probe: &str, seen: Seen) -> Found {
    match Probe::named(probe) {
        Some(probe) => probe.of_seen(seen),
        None => Found::failed("The other end failed.").with(seen),
    }
}

/// Takes what the other end lends, checks it and replies.
pub(in crate::tools::doctor) fn take(end: &End, cancel: &Cancel, device: Option<Selector>) -> Result<Taken> {
    let opened = Mutex::new(Duration::ZERO);
    let observer = |event: session::Event<'_>| {
        if let session::Event::Mapped { elapsed, .. } = event {
            *opened.lock().unwrap_or_else(PoisonError::into_inner) += elapsed;
        }
    };
    let (config, mut verifier) = (end.config(cancel), DataVerifier::new(&|_| {}));
    let mut consumer = Consumer::connect(&end.driver, device, &end.socket, &config, &observer)?;
    let object = consumer.request(&Request::default())?;
    let found = consumer.verify(&object, &mut verifier)?;
    if found.verified {
        consumer.reply(&object, &mut verifier)?;
    }
    consumer.report(&object, &found)?;
    let memory = object.description();
    let bytes = memory.size;
    // The one that was chosen, unless one was named.
    let through = Device::for_memory_of(&end.driver, &memory.device, None).ok().map(|device| device.uuid());
    drop(object);
    consumer.close();
    let open_us = micros(*opened.lock().unwrap_or_else(PoisonError::into_inner));
    Ok(Taken { open_us, bytes, through })
}

/// An event of this side's. Dropping it gives it back.
struct Event<'a> {
    diagnosis: &'a dyn Diagnosis,
    ordinal: i32,
    handle: EventHandle,
}

impl Drop for Event<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.diagnosis.event_destroy(self.ordinal, self.handle) {
            tracing::error!(%error, "an event can't be given back");
        }
    }
}

/// Makes an event, records it, and has the other end wait for it.
pub(in crate::tools::doctor) fn share_event(control: &mut Control, device: &Device) -> Result<Found> {
    let (diagnosis, ordinal) = (device.verbs().diagnosis()?, device.ordinal());
    let event = Event { diagnosis, ordinal, handle: diagnosis.event_create(ordinal)? };
    let handle = diagnosis.event_export(ordinal, event.handle)?;
    let ((), record_us) = timed(|| diagnosis.event_record(ordinal, event.handle))?;
    control.send(&Say::Event { device: device.uuid(), handle: hex::encode(handle) })?;
    match control.receive()? {
        Say::Done { error: None, open_us, wait_us, .. } => {
            let found = Found::ok("One process can wait on the device for work of another.");
            Ok(found.figure("record_us", record_us).figure("open_us", open_us).figure("wait_us", wait_us))
        }
        Say::Done { error: Some(mut seen), .. } => {
            seen.message = format!("the other end: {}", seen.message);
            Ok(of_seen("event", seen))
        }
        other => unexpected(&other, "done"),
    }
}

/// Opens the other end's event and waits for it. Returns how long both took, in microseconds.
fn wait_for_event(end: &End, device: DeviceUuid, handle: &str) -> Result<(u64, u64)> {
    let device = Device::find(&end.driver, Selector::Uuid(device))?;
    let mut bytes = [0; 64];
    hex::decode_to_slice(handle, &mut bytes).map_err(|error| ProtocolError::Content(format!("an event: {error}")))?;
    let (diagnosis, ordinal) = (end.driver.verbs().diagnosis()?, device.ordinal());
    let (handle, open_us) = timed(|| diagnosis.event_open(ordinal, &bytes))?;
    let event = Event { diagnosis, ordinal, handle };
    let ((), wait_us) = timed(|| diagnosis.event_wait(ordinal, event.handle))?;
    Ok((open_us, wait_us))
}

/// Does what the other end asks for, until it says good-bye or goes. `each` is told what is not to be answered.
pub(in crate::tools::doctor) fn follow(end: &End, control: &mut Control, each: &mut dyn FnMut(Say)) -> Result<()> {
    // The other end may have much to do by itself before it calls.
    let patience = Duration::from_secs(3600).max(end.timeout);
    follow_for(end, control, &mut || patience, &mut |say| {
        each(say);
        Ok(())
    })
}

fn follow_for(
    end: &End,
    control: &mut Control,
    patience: &mut dyn FnMut() -> Duration,
    each: &mut dyn FnMut(Say) -> Result<()>,
) -> Result<()> {
    loop {
        let left = patience();
        if left.is_zero() {
            return Err(Error::Timeout { purpose: "for the other end of the probes", waited: end.timeout });
        }
        match control.receive_within(left)? {
            Say::Begin { .. } => {
                let taken = take(end, &control.cancel().clone(), None);
                control.send(&Say::done(&taken))?;
            }
            Say::Lend { probe, device } => {
                let found = Device::find(&end.driver, Selector::Uuid(device))
                    .and_then(|device| lend(end, control, &device, Way::named(&probe)));
                let error = match found {
                    Ok(found) => found.into_seen(),
                    Err(error) => Some(Seen::of(&error)),
                };
                control.send(&Say::Lent { error })?;
            }
            Say::Event { device, handle } => {
                let done = match wait_for_event(end, device, &handle) {
                    Ok((open_us, wait_us)) => Say::Done {
                        open_us: Some(open_us),
                        wait_us: Some(wait_us),
                        bytes: None,
                        through: None,
                        error: None,
                    },
                    Err(error) => Say::Done {
                        open_us: None,
                        wait_us: None,
                        bytes: None,
                        through: None,
                        error: Some(Seen::of(&error)),
                    },
                };
                control.send(&done)?;
            }
            bye @ Say::Bye {} => {
                return each(bye);
            }
            other => each(other)?,
        }
    }
}

impl Bench {
    /// Does something with the other process, which is started if there is none. Whatever goes wrong, the next probe gets a
    /// new one.
    fn together(&mut self, work: impl FnOnce(&End, &mut Control, &Device) -> Result<Found>) -> Result<Found> {
        let mut peer = match self.peer.take() {
            Some(peer) => peer,
            None => self.start_peer()?,
        };
        let end = self.end(&peer);
        let found = work(&end, peer.control(), &self.device)?;
        if found.status == Status::Ok {
            self.peer = Some(peer);
        }
        Ok(found)
    }

    pub(super) fn start_peer(&self) -> Result<PeerProcess> {
        PeerProcess::start(&self.folder, self.device.backend(), self.patience())
    }

    pub(super) fn end(&self, peer: &PeerProcess) -> End {
        let (driver, socket) = (self.device.driver().clone(), peer.socket().to_owned());
        End { driver, socket, trust: Trust::default(), timeout: self.patience() }
    }

    /// How long this side waits for the other: less than the probe may take, so that the reason is told.
    pub(in crate::tools::doctor) fn patience(&self) -> Duration {
        self.timeout.mul_f64(0.75)
    }
}

pub(super) fn round_trip(bench: &mut Bench) -> Result<Found> {
    bench.together(|end, control, device| lend(end, control, device, Way::ROUND_TRIP))
}

pub(super) fn host_numa(bench: &mut Bench) -> Result<Found> {
    bench.together(|end, control, device| lend(end, control, device, Way::HOST))
}

pub(super) fn pool(bench: &mut Bench) -> Result<Found> {
    // What there is none of needs no other process to find out.
    bench.device.verbs().pools()?;
    bench.together(|end, control, device| lend(end, control, device, Way::POOL))
}

pub(super) fn legacy(bench: &mut Bench) -> Result<Found> {
    bench.device.verbs().legacy()?;
    bench.together(|end, control, device| lend(end, control, device, Way::LEGACY))
}

pub(super) fn event(bench: &mut Bench) -> Result<Found> {
    bench.device.verbs().diagnosis()?;
    bench.together(|_, control, device| share_event(control, device))
}
