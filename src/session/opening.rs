//! Opens what a producer offers: the one way, for a buffer and for a stream.

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
    link::{Link, unexpected},
};
use crate::{
    array::ArrayDescriptor,
    channel::{Cancel, Channel},
    driver::{Access, Backend, DeviceUuid, Driver},
    error::{Error, ErrorCode, PeerError, ProtocolError, Result},
    memory::{Description, Device, DeviceIdentity, Imported, Importing, Part, Pool, Remains, Selector, Sharing, timed},
    wire::{self, Check, Message, Received},
};

/// What a producer offers, in this library's own types.
#[derive(Debug, Clone)]
pub(super) struct Offer {
    pub(super) object: String,
    pub(super) memory: Description,
    pub(super) array: Option<ArrayDescriptor>,
    pub(super) access: Access,
    pub(super) part: Option<Part>,
    pub(super) check: Option<Check>,
    /// In a stream, the buffer's number.
    pub(super) buffer: Option<u64>,
}

impl From<&Offer> for wire::Offer {
    fn from(offer: &Offer) -> Self {
        let Offer { object, memory, array, access, part, check, buffer } = offer.clone();
        Self { object, memory: (&memory).into(), array, access, part: part.map(Into::into), check, buffer }
    }
}

impl Offer {
    /// Reads an offer of the object `asked`, and checks what can be checked before anything is done with it.
    pub(super) fn read(offer: wire::Offer, asked: &str) -> Result<Self> {
        let wrong = |message: String| Err(ProtocolError::Content(message).into());
        let wire::Offer { object, memory, array, access, part, check, buffer } = offer;
        if object != asked {
            return wrong(format!("object `{asked}` was asked for and `{object}` is offered"));
        }
        let (size, mapped_size) = (memory.size, memory.mapped_size);
        if size == 0 || size > mapped_size {
            return wrong(format!("{size} bytes of data are offered in {mapped_size} bytes of memory"));
        }
        if let Some(Err(error)) = array.as_ref().map(|array| array.check(size)) {
            return wrong(format!("the array that is offered is not inside the memory: {error}"));
        }
        let memory: Description = memory.try_into()?;
        if memory.immutable && access == Access::ReadWrite {
            return wrong("memory that is never written any more is offered to be written".to_owned());
        }
        Ok(Self { object, memory, array, access, part: part.map(Into::into), check, buffer })
    }

    /// Which segments follow: `None` if the mechanism has none. They must cover a range.
    pub(super) fn part(&self, range: &Range<u64>) -> Result<Option<Part>> {
        let wrong = |message: String| Err(ProtocolError::Content(message).into());
        match (&self.memory.sharing, self.part) {
            (Sharing::Vmm { .. }, None) => {
                wrong("memory is offered without a word on the segments that follow".to_owned())
            }
            (Sharing::Vmm { .. }, Some(part)) => {
                let end = part.offset.checked_add(part.size);
                match part.offset <= range.start && end.is_some_and(|end| end >= range.end) {
                    true => Ok(Some(part)),
                    false => {
                        let Range { start, end } = range;
                        wrong(format!("bytes {start} to {end} were asked for, and there follow {part}"))
                    }
                }
            }
            (_, Some(part)) => wrong(format!("memory that has no segments is followed by {part}")),
            (_, None) => Ok(None),
        }
    }
}

/// Whether a producer that offers memory has said that it is of this side's kind.
pub(super) fn check_backend(theirs: &str, own: Backend) -> Result<()> {
    if theirs == own.as_str() {
        return Ok(());
    }
    let message = format!("the producer's memory is on backend {theirs}, and the consumer uses {own}");
    Err(Error::Peer(PeerError::Mismatch { code: ErrorCode::Backend, message }))
}

/// Held by all memory that the producer frees when the connection ends. The last one that drops it ends the connection.
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
        // The producer may be gone, or know already.
        let _ = self.socket.shutdown(Shutdown::Write);
    }
}

/// This process's device that is to use what is offered.
#[derive(Debug)]
pub(super) struct Chosen {
    driver: Driver,
    /// The device that is ready for copies.
    ready: Option<Device>,
    /// Whether it was named, and no other may be used.
    named: bool,
    /// Whose memory was opened last, and by which device: looking for it asks the driver for every device.
    last: Option<(DeviceUuid, Device)>,
}

impl Chosen {
    /// A device that is named, or the only one, is made ready at once.
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

    /// The device for memory of `owner`, ready for copies.
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

/// Memory that was offered, open.
#[derive(Debug)]
pub(super) struct OpenedOffer {
    pub(super) memory: Imported,
    /// The pool that it is of, with the producer's number.
    pub(super) pool: Option<(u64, Arc<Pool>)>,
    /// What is not urgent to release.
    pub(super) remains: Remains,
    /// What the numbers of the descriptors were, which it had for a moment.
    pub(super) fds: Vec<i32>,
    /// How much of the time went into opening, and not into waiting for the producer.
    pub(super) opening: Duration,
    /// How many segments are to be acknowledged, where the producer waits for that in any case.
    pub(super) unacknowledged: Option<usize>,
}

/// Opens what is offered. `brought` are the sizes and descriptors of the first segments, if any came already; `known` is the pool
/// of the offer's number, if this side has it. The caller acknowledges.
///
/// # Errors
/// Those of [`Imported::open`] and of the conversation.
pub(super) fn open(
    link: &mut Link,
    device: &Device,
    offer: &Offer,
    range: &Range<u64>,
    known: Option<Arc<Pool>>,
    brought: (&[u64], Vec<OwnedFd>),
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
        let fds = take_segments(link, &mut importing, part.first, brought, &mut opening)?;
        let (memory, remains) = timed(&mut opening, || importing.finish())?;
        let unacknowledged = Some(fds.len());
        return Ok(OpenedOffer { remains, fds, opening, unacknowledged, ..plain(memory) });
    }
    let Some(number) = description.pool() else {
        let memory = timed(&mut opening, || Imported::of_legacy(device, description, *access))?;
        return Ok(OpenedOffer { opening, ..plain(memory) });
    };
    // What this side lacks comes first.
    device.require_pools()?;
    let (fds, unacknowledged, pool) = match known {
        Some(pool) => (Vec::new(), None, pool),
        None => {
            let fd = take_pool(link, number)?;
            let raw = fd.as_raw_fd();
            (vec![raw], Some(0), timed(&mut opening, || Imported::pool(device, description, fd))?)
        }
    };
    let memory = timed(&mut opening, || Imported::of_pool(&pool, description, *access))?;
    Ok(OpenedOffer { pool: Some((number, pool)), fds, opening, unacknowledged, ..plain(memory) })
}

/// Takes the segments that came already, and one record of segments after another. Acknowledges each but the last, which is to be
/// acknowledged when the memory is open. Returns what the descriptors' numbers were.
fn take_segments(
    link: &mut Link,
    importing: &mut Importing,
    first: u64,
    (sizes, fds): (&[u64], Vec<OwnedFd>),
    opening: &mut Duration,
) -> Result<Vec<i32>> {
    let mut numbers: Vec<i32> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    if !numbers.is_empty() {
        timed(opening, || importing.take(sizes, fds))?;
    }
    while importing.missing() > 0 {
        if !numbers.is_empty() {
            acknowledge(link, numbers.len())?;
        }
        let (segments, fds) = match link.receive("for the memory")? {
            (Message::Segments(segments), fds) => (segments, fds),
            (other, _) => return Err(unexpected(&other, "segments")),
        };
        if segments.first != first + numbers.len() as u64 {
            let message = format!("segment {} came where {} belongs", segments.first, first + numbers.len() as u64);
            return Err(ProtocolError::Content(message).into());
        }
        numbers.extend(fds.iter().map(AsRawFd::as_raw_fd));
        link.busy()?;
        timed(opening, || importing.take(&segments.sizes, fds))?;
    }
    link.busy()?;
    Ok(numbers)
}

/// Says how many segments of an offer have come.
pub(super) fn acknowledge(link: &mut Link, segments: usize) -> Result<()> {
    link.send(&Message::Received(Received { segments: segments as u64 }), &[])
}

/// Takes the descriptor of the pool that an offer names.
fn take_pool(link: &mut Link, number: u64) -> Result<OwnedFd> {
    match link.receive("for the pool")? {
        (Message::Pool(pool), mut fds) if pool.pool == number && fds.len() == 1 => Ok(fds.remove(0)),
        (Message::Pool(pool), _) => {
            let message = format!("pool {} came where {number} belongs", pool.pool);
            Err(ProtocolError::Content(message).into())
        }
        (other, _) => Err(unexpected(&other, "pool")),
    }
}
