//! Opens offered memory, for handoffs and streams.

use std::{
    net::Shutdown,
    ops::Range,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::Arc,
    time::Duration,
};

use super::{
    Observer, activate,
    link::{Link, unexpected, violation},
};
use crate::{
    array::ArrayDescriptor,
    channel::{Cancel, Channel},
    driver::{Access, Backend, DeviceUuid, Driver},
    error::Result,
    memory::{Description, Device, DeviceIdentity, Imported, Importing, Pool, Remains, Run, Selector, Sharing, timed},
    wire::{self, Check, Message, Received},
};

/// A producer's offer, in this library's types.
#[derive(Debug, Clone)]
pub(super) struct Offer {
    pub(super) object: String,
    pub(super) memory: Description,
    pub(super) array: Option<ArrayDescriptor>,
    pub(super) access: Access,
    pub(super) part: Option<Run>,
    pub(super) check: Option<Check>,
}

impl From<&Offer> for wire::Offer {
    fn from(offer: &Offer) -> Self {
        let Offer { object, memory, array, access, part, check } = offer.clone();
        Self { object, memory: (&memory).into(), array, access, part, check }
    }
}

impl Offer {
    /// Converts an offer of the object `requested`, and checks it as far as possible without the driver.
    pub(super) fn read(offer: wire::Offer, requested: &str) -> Result<Self> {
        let wire::Offer { object, memory, array, access, part, check } = offer;
        if object != requested {
            return Err(violation(format!("object `{object}` is offered, but `{requested}` was requested")));
        }
        let size = memory.size;
        let mapped_size = memory.mapped_size;
        if size == 0 || size > mapped_size {
            return Err(violation(format!("{size} bytes of data are offered in {mapped_size} bytes of memory")));
        }
        if let Some(Err(error)) = array.as_ref().map(|array| array.check(size)) {
            return Err(violation(format!("the offered array is not inside the memory: {error}")));
        }
        let memory: Description = memory.try_into()?;
        if memory.immutable && access == Access::ReadWrite {
            return Err(violation("immutable memory is offered with access rw"));
        }
        Ok(Self { object, memory, array, access, part, check })
    }

    /// Returns the part of the memory whose segments follow the offer. It must cover `range`. `None` if the mechanism has no segments.
    pub(super) fn part(&self, range: &Range<u64>) -> Result<Option<Run>> {
        match (&self.memory.sharing, self.part) {
            (Sharing::Vmm { .. }, None) => Err(violation("the offer does not name the segments that follow")),
            (Sharing::Vmm { .. }, Some(part)) => {
                let end = part.offset.checked_add(part.size);
                if part.offset <= range.start && end.is_some_and(|end| end >= range.end) {
                    return Ok(Some(part));
                }
                let Range { start, end } = range;
                Err(violation(format!("bytes {start} to {end} were requested, but the offer covers {part}")))
            }
            (_, Some(part)) => {
                Err(violation(format!("the offered memory has no segments, but the offer names {part}")))
            }
            (_, None) => Ok(None),
        }
    }
}

/// Held by all memory that the producer frees when the connection closes. Dropping the last reference closes it.
#[derive(Debug)]
pub(super) struct Connection {
    socket: Arc<UnixStream>,
}

impl Connection {
    pub(super) fn of(channel: &Channel) -> Arc<Self> {
        Arc::new(Self { socket: channel.socket() })
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The producer may have closed already.
        let _ = self.socket.shutdown(Shutdown::Write);
    }
}

/// Chooses this process's device for each offer.
#[derive(Debug)]
pub(super) struct DeviceChoice {
    driver: Driver,
    /// The active device: its context is ready for copies.
    ready: Option<Device>,
    /// Whether the caller selected `ready`, and no other device may be used.
    named: bool,
    /// The owner of the memory opened last, and the device used for it. Saves a search through all devices.
    last: Option<(DeviceUuid, Device)>,
}

impl DeviceChoice {
    /// Activates the selected device at once, or the machine's only device.
    pub(super) fn new(
        driver: &Driver,
        device: Option<Selector>,
        cancel: &Cancel,
        observer: Observer<'_>,
    ) -> Result<Self> {
        let ready = match device {
            None if driver.verbs().device_count()? != 1 => None,
            selector => Some(Device::find(driver, selector.unwrap_or_default())?),
        };
        if let Some(device) = &ready {
            activate(device, &mut || cancel.check(), observer)?;
        }
        Ok(Self { driver: driver.clone(), ready, named: device.is_some(), last: None })
    }

    pub(super) fn backend(&self) -> Backend {
        self.driver.backend()
    }

    /// Returns an active device that can use the memory of `owner`.
    pub(super) fn for_memory_of(
        &mut self,
        owner: &DeviceIdentity,
        tick: &mut dyn FnMut() -> Result<()>,
        observer: Observer<'_>,
    ) -> Result<Device> {
        if let Some(device) = self.ready.as_ref().filter(|device| device.uuid() == owner.uuid) {
            return Ok(device.clone());
        }
        if let Some((_, device)) = self.last.as_ref().filter(|(uuid, _)| *uuid == owner.uuid) {
            return Ok(device.clone());
        }
        let named = self.ready.as_ref().filter(|_| self.named);
        let device = Device::for_memory_of(&self.driver, owner, named)?;
        if self.ready.as_ref().is_none_or(|ready| ready.uuid() != device.uuid()) {
            activate(&device, tick, observer)?;
            self.ready = Some(device.clone());
        }
        self.last = Some((owner.uuid, device.clone()));
        Ok(device)
    }
}

/// Opened memory of an offer.
#[derive(Debug)]
pub(super) struct OpenedOffer {
    pub(super) memory: Imported,
    /// The memory's pool, with the producer's number for it.
    pub(super) pool: Option<(u64, Arc<Pool>)>,
    /// Resources to release once the buffer is in use.
    pub(super) remains: Remains,
    /// The numbers of the received descriptors, which are closed by now.
    pub(super) fds: Vec<i32>,
    /// Time spent opening, without the waits for the producer.
    pub(super) opening: Duration,
    /// The number of segments to acknowledge. `None` if the producer waits for no acknowledgement.
    pub(super) unacknowledged: Option<usize>,
}

/// Opens offered memory. `known` is the pool of the offer's number, if this side has opened it before. The caller acknowledges the last
/// record.
///
/// # Errors
/// The errors of [`Imported::open`]; session errors.
pub(super) fn open(
    link: &mut Link,
    device: &Device,
    offer: &Offer,
    range: &Range<u64>,
    known: Option<Arc<Pool>>,
) -> Result<OpenedOffer> {
    let Offer { memory: description, access, .. } = offer;
    let mut opening = Duration::ZERO;
    let plain = |memory| OpenedOffer {
        memory,
        pool: None,
        remains: Remains::default(),
        fds: Vec::new(),
        opening: Duration::ZERO,
        unacknowledged: None,
    };
    if let Some(part) = offer.part(range)? {
        let begin = || Importing::begin(device, description, &part, *access);
        let mut importing = timed(&mut opening, begin)?;
        let fds = receive_segments(link, &mut importing, part.first, &mut opening)?;
        let (memory, remains) = timed(&mut opening, || importing.finish())?;
        let unacknowledged = Some(fds.len());
        return Ok(OpenedOffer { remains, fds, opening, unacknowledged, ..plain(memory) });
    }
    let Some(number) = description.pool() else {
        let memory = timed(&mut opening, || Imported::of_legacy(device, description, *access))?;
        return Ok(OpenedOffer { opening, ..plain(memory) });
    };
    // Reports missing support before anything is received.
    device.require_pools()?;
    let (fds, unacknowledged, pool) = match known {
        Some(pool) => (Vec::new(), None, pool),
        None => {
            let fd = receive_pool(link, number)?;
            let raw = fd.as_raw_fd();
            (vec![raw], Some(0), timed(&mut opening, || Imported::pool(device, description, fd))?)
        }
    };
    let memory = timed(&mut opening, || Imported::of_pool(&pool, description, *access))?;
    Ok(OpenedOffer { pool: Some((number, pool)), fds, opening, unacknowledged, ..plain(memory) })
}

/// Receives records of segments until the part is complete. Acknowledges every record but the last, which the caller acknowledges when
/// the memory is open. Returns the descriptors' numbers.
fn receive_segments(
    link: &mut Link,
    importing: &mut Importing,
    first: u64,
    opening: &mut Duration,
) -> Result<Vec<i32>> {
    // `busy` does not extend it, nor does the time of this side's own work shorten it.
    let mut left = link.channel.timeout();
    let mut numbers = Vec::new();
    while importing.missing() > 0 {
        if !numbers.is_empty() {
            acknowledge(link, numbers.len())?;
        }
        let (segments, fds) = match link.receive_within(&mut left, "for the memory")? {
            (Message::Segments(segments), fds) => (segments, fds),
            (other, _) => return Err(unexpected(&other, "segments")),
        };
        if segments.first != first + numbers.len() as u64 {
            let expected = first + numbers.len() as u64;
            return Err(violation(format!("expected segment {expected}, got {}", segments.first)));
        }
        numbers.extend(fds.iter().map(AsRawFd::as_raw_fd));
        link.busy()?;
        timed(opening, || importing.take(&segments.sizes, fds))?;
    }
    link.busy()?;
    Ok(numbers)
}

/// Acknowledges the offer's first `segments` segments.
pub(super) fn acknowledge(link: &mut Link, segments: usize) -> Result<()> {
    link.send(&Message::Received(Received { segments: segments as u64 }), &[])
}

/// Receives the descriptor of the offer's pool.
fn receive_pool(link: &mut Link, number: u64) -> Result<OwnedFd> {
    let mut left = link.channel.timeout();
    match link.receive_within(&mut left, "for the pool")? {
        (Message::Pool(pool), mut fds) if pool.pool == number && fds.len() == 1 => Ok(fds.remove(0)),
        (Message::Pool(pool), _) => Err(violation(format!("expected pool {number}, got {}", pool.pool))),
        (other, _) => Err(unexpected(&other, "pool")),
    }
}
