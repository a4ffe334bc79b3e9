//! Sharing of memory or an event between two processes: one shares, the other opens.

use std::{
    io,
    sync::{Mutex, PoisonError},
    thread,
};

use serde::Deserialize;
use vmmfd::{
    channel::{Cancel, CancelReason, Listener},
    driver::DeviceUuid,
    error::ProtocolError,
    internals::{Diagnosis, EventHandle},
    memory::{Placement, Selector, Spec},
    session::{
        self,
        handoff::{self, Buffer, Consumer, Request, ServeOptions},
    },
};

use super::{
    process::Endpoint,
    report::{micros, timed},
};
use crate::{
    check::{DataVerifier, Exercise, pattern::random_salt},
    doctor::prelude::*,
};

/// The size of the shared memory: more than one granule, and not a whole number of words, to test unaligned sizes.
const SIZE: u64 = (4 << 20) + 13;

/// A record between the two processes of a probe.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ControlRecord {
    /// The first record of a child: its driver has started.
    Ready {},
    /// Memory is offered at the socket. The answer is `Done`.
    Begin {},
    /// A CUDA event for the peer to wait for. The answer is `Done`.
    Event {
        device: DeviceUuid,
        handle: String,
    },
    /// Memory or an event was opened.
    Done(Opened),
    Failed {
        error: ErrorDetails,
    },
}

/// Opened memory, or an event. Times are in microseconds.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(super) struct Opened {
    open_us: u64,
    /// The size of the memory.
    bytes: u64,
    /// How long the wait for the event took.
    wait_us: u64,
}

impl ControlRecord {
    fn answer(result: Result<Opened>) -> Self {
        result.map_or_else(|error| Self::Failed { error: error.into() }, Self::Done)
    }

    /// The error for a record of another kind than `want`; the peer's, if it reports one.
    pub(super) fn unexpected(self, want: &'static str) -> ErrorDetails {
        match self {
            Self::Failed { error } => error.of_other_end(),
            _ => ErrorDetails::of(&ProtocolError::Unexpected { got: "another record", want }.into()),
        }
    }
}

/// The kind of memory that a probe shares.
#[derive(Debug, Clone, Copy)]
pub(super) struct MemoryKind {
    probe: &'static str,
    spec: fn(u64) -> Spec,
    meaning: &'static str,
}

impl MemoryKind {
    pub(super) const ROUND_TRIP: Self = Self {
        probe: "round-trip",
        spec: |size| Spec::vmm(size).into(),
        meaning: "Two processes share memory over a socket, and each sees what the other writes.",
    };
    pub(super) const POOL: Self = Self {
        probe: "pool",
        spec: Spec::pool,
        meaning: "Two processes share memory of a pool, and see each other's bytes.",
    };
    pub(super) const LEGACY: Self = Self {
        probe: "legacy",
        spec: Spec::legacy,
        meaning: "Two processes share memory by a legacy handle, and see each other's bytes.",
    };
    pub(super) const HOST: Self = Self {
        probe: "host-numa",
        spec: |size| Spec::vmm(size).placement(Placement::Host).into(),
        meaning: "Two processes share the host's memory, for the device and the CPU, and see each other's bytes.",
    };

    /// Fails if the driver does not support the kind.
    fn require(self, device: &Device) -> Result<()> {
        match self.probe {
            "pool" => device.verbs().pools().map(drop),
            "legacy" => device.verbs().legacy().map(drop),
            _ => Ok(()),
        }
    }

    /// Shares memory with another process. If the kind is not supported, none is started.
    pub(super) fn share(self, context: &mut ProbeContext) -> ProbeResult {
        self.require(&context.device)?;
        context.with_peer(|end, control, device| share(end, control, device, self))
    }
}

/// Shares memory with the peer, which reads it and writes a reply.
fn share(end: &Endpoint, control: &Line, device: &Device, kind: MemoryKind) -> ProbeResult {
    let cancel = Cancel::new()?;
    let config = end.config(&cancel);
    let content = Exercise::pattern(random_salt()?, &|_| {});
    let buffer = Buffer::create(device, (kind.spec)(SIZE), content, None, &config, &|_| {})?;
    let listener = Listener::bind(&end.setting.socket, &config)?;
    control.send(&ControlRecord::Begin {})?;
    let options = ServeOptions::default().round_trip(true);
    let (done, served) = thread::scope(|scope| {
        let serving = scope.spawn(|| handoff::serve(listener, &buffer, &options, &config, &|_| {}));
        let done = control.receive::<ControlRecord>();
        // Otherwise the server would wait until its timeout for a peer that failed before it connected.
        if !matches!(done, Ok(ControlRecord::Done(_))) {
            cancel.cancel(CancelReason::Program);
        }
        (done, serving.join())
    });
    let opened = match done? {
        ControlRecord::Done(opened) => opened,
        other => return Err(other.unexpected("done")),
    };
    let report = served.map_err(|_| Error::system("serve the memory", io::Error::other("its thread panicked")))?;
    if let Some(error) = report.error {
        return Err(error.into());
    }
    let served = report.served.into_iter().next_back();
    let served = served.ok_or(Error::Peer(PeerError::NoConsumer { waited: end.setting.timeout }))?;
    if served.mismatched() {
        return Ok(failed("One process does not see what the other wrote."));
    }
    if let Some(error) = served.error {
        return Err(error.into());
    }
    Ok(ok(kind.meaning).figure("bytes", opened.bytes).figure("open_us", opened.open_us))
}

/// Opens the memory that the peer shares, checks it and replies.
fn open_shared(end: &Endpoint, cancel: &Cancel) -> Result<Opened> {
    let opened = Mutex::new(Duration::ZERO);
    let observer = |event: session::Event<'_>| {
        if let session::Event::Mapped { elapsed, .. } = event {
            *opened.lock().unwrap_or_else(PoisonError::into_inner) += elapsed;
        }
    };
    let config = end.config(cancel);
    let mut verifier = DataVerifier::new(&|_| {});
    let mut consumer = Consumer::connect(&end.driver, None, &end.setting.socket, &config, &observer)?;
    let object = consumer.request(&Request::default())?;
    let found = consumer.verify(&object, &mut verifier)?;
    if found.verified {
        consumer.reply(&object, &mut verifier)?;
    }
    consumer.report(&object, &found)?;
    let bytes = object.description().size;
    drop(object);
    consumer.close();
    let open_us = micros(*opened.lock().unwrap_or_else(PoisonError::into_inner));
    Ok(Opened { open_us, bytes, wait_us: 0 })
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
fn share_event(control: &Line, device: &Device) -> ProbeResult {
    let diagnosis = device.verbs().diagnosis()?;
    let ordinal = device.ordinal();
    let event = Event { diagnosis, ordinal, handle: diagnosis.event_create(ordinal)? };
    let handle = diagnosis.event_export(ordinal, event.handle)?;
    let ((), record_us) = timed(|| diagnosis.event_record(ordinal, event.handle))?;
    control.send(&ControlRecord::Event { device: device.uuid(), handle: hex::encode(handle) })?;
    match control.receive()? {
        ControlRecord::Done(Opened { open_us, wait_us, .. }) => {
            let finding = ok("One process can wait on the device for work of another.");
            Ok(finding.figure("record_us", record_us).figure("open_us", open_us).figure("wait_us", wait_us))
        }
        other => Err(other.unexpected("done")),
    }
}

/// Opens the peer's event and waits for it.
fn wait_for_event(end: &Endpoint, device: DeviceUuid, handle: &str) -> Result<Opened> {
    let device = Device::find(&end.driver, Selector::Uuid(device))?;
    let mut bytes = [0; 64];
    hex::decode_to_slice(handle, &mut bytes).map_err(|error| ProtocolError::Content(format!("an event: {error}")))?;
    let diagnosis = end.driver.verbs().diagnosis()?;
    let ordinal = device.ordinal();
    let (handle, open_us) = timed(|| diagnosis.event_open(ordinal, &bytes))?;
    let event = Event { diagnosis, ordinal, handle };
    let ((), wait_us) = timed(|| diagnosis.event_wait(ordinal, event.handle))?;
    Ok(Opened { open_us, wait_us, ..Opened::default() })
}

/// Answers the requests of the other process until its end.
///
/// # Errors
/// Errors of the connection.
pub(super) fn answer(end: &Endpoint, control: &Line) -> Result<()> {
    loop {
        let answer = match control.receive()? {
            ControlRecord::Begin {} => ControlRecord::answer(open_shared(end, control.cancel())),
            ControlRecord::Event { device, handle } => ControlRecord::answer(wait_for_event(end, device, &handle)),
            other => ControlRecord::Failed { error: other.unexpected("a request") },
        };
        control.send(&answer)?;
    }
}
