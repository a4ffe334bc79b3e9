//! Sharing of memory or an event between two processes: one shares, the other opens.

use std::{
    cell::Cell,
    io,
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use vmmfd::{
    channel::{Cancel, CancelReason, Listener},
    driver::DeviceUuid,
    error::{Error, PeerError, ProtocolError, Result},
    internals::{Diagnosis, EventHandle},
    memory::{Device, Placement, Selector, Spec},
    session::{
        self,
        handoff::{self, Buffer, Consumer, Request, ServeOptions},
    },
};

use super::{
    ErrorDetails,
    context::ProbeContext,
    control::{Control, ControlRecord, OpenedMemory, unexpected},
    endpoint::Endpoint,
    outcome::{ProbeOutcome, ProbeResult, micros, timed},
};
use crate::check::{DataVerifier, Exercise, pattern::random_salt};
use crate::verbs::HasVerbs;

/// The size of the shared memory: more than one granule, and not a whole number of words, to test unaligned sizes.
const SIZE: u64 = (4 << 20) + 13;

/// The minimum timeout for the next record: the peer may have to run other probes first.
const MIN_PAUSE: Duration = Duration::from_secs(3600);

/// The kind of memory that a probe shares.
#[derive(Debug, Clone, Copy)]
pub(super) struct MemoryKind {
    pub(super) probe: &'static str,
    spec: fn(u64) -> Spec,
}

impl MemoryKind {
    pub(super) const ROUND_TRIP: Self = Self { probe: "round-trip", spec: |size| Spec::vmm(size).into() };
    pub(super) const POOL: Self = Self { probe: "pool", spec: Spec::pool };
    pub(super) const LEGACY: Self = Self { probe: "legacy", spec: Spec::legacy };
    pub(super) const HOST: Self =
        Self { probe: "host-numa", spec: |size| Spec::vmm(size).placement(Placement::Host).into() };

    /// The call in the error of a socket that can't be created.
    pub(super) const BIND: &str = "bind";

    /// Fails if the driver does not support the kind.
    pub(super) fn require(self, device: &Device) -> Result<()> {
        match self.probe {
            "pool" => device.verbs().pools().map(drop),
            "legacy" => device.verbs().legacy().map(drop),
            _ => Ok(()),
        }
    }

    /// Shares memory with a peer process. If the kind is not supported, none is started.
    pub(super) fn share(self, context: &mut ProbeContext) -> ProbeResult {
        self.require(&context.device)?;
        context.with_peer(|end, control, device| share(end, control, device, self))
    }

    /// The kind for a probe's name from the peer. Other probes use the plain kind.
    pub(super) fn named(probe: &str) -> Self {
        let kinds = [Self::POOL, Self::LEGACY, Self::HOST];
        kinds.into_iter().find(|kind| kind.probe == probe).unwrap_or(Self::ROUND_TRIP)
    }
}

/// Shares memory with the peer, which reads it and writes a reply.
pub(super) fn share(end: &Endpoint, control: &Control, device: &Device, kind: MemoryKind) -> ProbeResult {
    let cancel = Cancel::new()?;
    let config = end.config(&cancel);
    let content = Exercise::pattern(random_salt()?, &|_| {});
    let buffer = Buffer::create(device, (kind.spec)(SIZE), content, None, &config, &|_| {})?;
    let listener = match Listener::bind(&end.socket, !end.trust.uids.is_empty(), end.timeout, &cancel) {
        Ok(listener) => listener,
        Err(error @ Error::Interrupted { .. }) => return Err(error.into()),
        // Not an error of the memory. The caller recognises it by the call.
        Err(error) => {
            let call = Some(MemoryKind::BIND.to_owned());
            return Err(ErrorDetails { call, ..ErrorDetails::of(&error) }.into());
        }
    };
    control.send(&ControlRecord::Begin { probe: kind.probe.to_owned() })?;
    let options = ServeOptions::default().round_trip(true);
    let (done, served) = thread::scope(|scope| {
        let serving = scope.spawn(|| handoff::serve(listener, &buffer, &options, &config, &|_| {}));
        let done = control.receive();
        // Otherwise the server would wait until its timeout for a peer that failed before it connected.
        if !matches!(done, Ok(ControlRecord::Done { error: None, .. })) {
            cancel.cancel(CancelReason::Program);
        }
        (done, serving.join())
    });
    let (open_us, bytes, through) = match done? {
        ControlRecord::Done { error: None, open_us, bytes, through, .. } => (open_us, bytes, through),
        ControlRecord::Done { error: Some(error), .. } => return Err(error.of_other_end().into()),
        other => return Err(unexpected(&other, "done").into()),
    };
    let report = served.map_err(|_| Error::system("serve the memory", io::Error::other("its thread panicked")))?;
    let served = report.into_result()?.pop().ok_or(Error::Peer(PeerError::NoConsumer { waited: end.timeout }))?;
    if served.mismatched() {
        return Ok(ProbeOutcome::failed("One process does not see what the other wrote."));
    }
    if let Some(error) = served.error {
        return Err(error.into());
    }
    let outcome = ProbeOutcome::ok(match kind.probe {
        "pool" => "Two processes share memory of a pool, and see each other's bytes.",
        "legacy" => "Two processes share memory by a legacy handle, and see each other's bytes.",
        "host-numa" => "Two processes share the host's memory, for the device and the CPU, and see each other's bytes.",
        _ => "Two processes share memory over a socket, and each sees what the other writes.",
    });
    let outcome = outcome.figure("bytes", bytes);
    let outcome = match through {
        Some(through) if through != device.uuid() => outcome.figure("through", through.to_string()),
        _ => outcome,
    };
    Ok(outcome.figure("open_us", open_us))
}

/// Opens the memory that the peer shares, checks it and replies.
pub(super) fn open_shared(end: &Endpoint, cancel: &Cancel, device: Option<Selector>) -> Result<OpenedMemory> {
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
    // The device that the consumer selects by default.
    let through = Device::for_memory_of(&end.driver, &memory.device, None).ok().map(|device| device.uuid());
    drop(object);
    consumer.close();
    let open_us = micros(*opened.lock().unwrap_or_else(PoisonError::into_inner));
    Ok(OpenedMemory { open_us, bytes, through })
}

/// A CUDA event. Drop destroys it.
struct Event<'a> {
    diagnosis: &'a dyn Diagnosis,
    ordinal: i32,
    handle: EventHandle,
}

impl Drop for Event<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.diagnosis.event_destroy(self.ordinal, self.handle) {
            tracing::error!(%error, "cannot destroy an event");
        }
    }
}

/// Shares an event with a peer process. If events are not supported, none is started.
pub(super) fn event(context: &mut ProbeContext) -> ProbeResult {
    context.device.verbs().diagnosis()?;
    context.with_peer(|_, control, device| share_event(control, device))
}

/// Creates an event, records it, and lets the peer wait for it.
pub(super) fn share_event(control: &Control, device: &Device) -> ProbeResult {
    let (diagnosis, ordinal) = (device.verbs().diagnosis()?, device.ordinal());
    let event = Event { diagnosis, ordinal, handle: diagnosis.event_create(ordinal)? };
    let handle = diagnosis.event_export(ordinal, event.handle)?;
    let ((), record_us) = timed(|| diagnosis.event_record(ordinal, event.handle))?;
    control.send(&ControlRecord::Event { device: device.uuid(), handle: hex::encode(handle) })?;
    match control.receive()? {
        ControlRecord::Done { error: None, open_us, wait_us, .. } => {
            let outcome = ProbeOutcome::ok("One process can wait on the device for work of another.");
            Ok(outcome.figure("record_us", record_us).figure("open_us", open_us).figure("wait_us", wait_us))
        }
        ControlRecord::Done { error: Some(error), .. } => Err(error.of_other_end().into()),
        other => Err(unexpected(&other, "done").into()),
    }
}

/// Opens the peer's event and waits for it. Returns both durations in microseconds.
fn wait_for_event(end: &Endpoint, device: DeviceUuid, handle: &str) -> Result<(u64, u64)> {
    let device = Device::find(&end.driver, Selector::Uuid(device))?;
    let mut bytes = [0; 64];
    hex::decode_to_slice(handle, &mut bytes).map_err(|error| ProtocolError::Content(format!("an event: {error}")))?;
    let (diagnosis, ordinal) = (end.driver.verbs().diagnosis()?, device.ordinal());
    let (handle, open_us) = timed(|| diagnosis.event_open(ordinal, &bytes))?;
    let event = Event { diagnosis, ordinal, handle };
    let ((), wait_us) = timed(|| diagnosis.event_wait(ordinal, event.handle))?;
    Ok((open_us, wait_us))
}

/// Answers the peer's requests until it closes the meeting.
pub(super) fn serve_requests(end: &Endpoint, control: &Control) -> Result<()> {
    let pause = MIN_PAUSE.max(end.timeout);
    answer(end, control, &mut || pause, &mut |_| Ok(()))
}

/// As [`serve_requests`], with a limit on the total time, which `each` may raise. `each` receives all other records; its error aborts.
pub(super) fn serve_requests_within(
    end: &Endpoint,
    control: &Control,
    limit: &Cell<Duration>,
    each: &mut dyn FnMut(ControlRecord) -> Result<()>,
) -> Result<()> {
    let started = Instant::now();
    answer(end, control, &mut || limit.get().saturating_sub(started.elapsed()), each)
}

fn answer(
    end: &Endpoint,
    control: &Control,
    left: &mut dyn FnMut() -> Duration,
    each: &mut dyn FnMut(ControlRecord) -> Result<()>,
) -> Result<()> {
    loop {
        let left = left();
        if left.is_zero() {
            return Err(Error::Peer(PeerError::Timeout { purpose: "for the peer of the probes", waited: end.timeout }));
        }
        match control.receive_within(left)? {
            ControlRecord::Begin { .. } => {
                let opened = open_shared(end, control.cancel(), None);
                control.send(&ControlRecord::done(&opened))?;
            }
            ControlRecord::Share { probe, device } => {
                let shared = match Device::find(&end.driver, Selector::Uuid(device)) {
                    Ok(device) => share(end, control, &device, MemoryKind::named(&probe)),
                    Err(error) => Err(error.into()),
                };
                let error = match shared {
                    Ok(outcome) => outcome.into_error(),
                    Err(failure) => Some(*failure.error),
                };
                control.send(&ControlRecord::Shared { error })?;
            }
            ControlRecord::Event { device, handle } => {
                let waited = wait_for_event(end, device, &handle);
                control.send(&ControlRecord::Done {
                    open_us: waited.as_ref().ok().map(|(open_us, _)| *open_us),
                    wait_us: waited.as_ref().ok().map(|(_, wait_us)| *wait_us),
                    bytes: None,
                    through: None,
                    error: waited.as_ref().err().map(ErrorDetails::of),
                })?;
            }
            bye @ ControlRecord::Bye {} => return each(bye),
            other => each(other)?,
        }
    }
}
