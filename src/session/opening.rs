//! What whoever is offered memory does with it, be it asked for once or streamed.

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

use super::{Link, Observer, activate, unexpected};
use crate::{
    channel::{Cancel, Channel},
    driver::{Access, DeviceUuid, Driver},
    error::{Error, Result},
    memory::{Device, Imported, Importing, Pool, Selector, timed},
    tools::check::files,
    wire::{ErrorCode, Mechanism, Message, Offer, OfferedDevice, Part, ProtocolError, Received},
};

/// Held by all memory that the producer frees when the connection ends. The last one that lets go of it tells the producer.
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

    pub(super) fn driver(&self) -> &Driver {
        &self.driver
    }

    /// The device for memory of `owner`, ready for copies.
    pub(super) fn for_memory_of(
        &mut self,
        owner: &OfferedDevice,
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

/// What an offer must be, whoever asked for what, before anything is done with it.
pub(super) fn check(offer: &Offer) -> Result<()> {
    let wrong = |message: String| Err(ProtocolError::Content(message).into());
    let unfit = |message: String| Err(Error::Mismatch { code: ErrorCode::Failed, message });
    let memory = &offer.memory;
    if memory.size == 0 || memory.size > memory.mapped_size {
        return wrong(format!("{} bytes of data are offered in {} bytes of memory", memory.size, memory.mapped_size));
    }
    if offer.reply_salt.is_some() && offer.reply_salt == offer.salt {
        return wrong("the reply's salt is the offer's own".to_owned());
    }
    if offer.reply_salt.is_some() && offer.access == Access::ReadOnly {
        return wrong("a reply is asked for in memory that is offered read-only".to_owned());
    }
    if let Some(Err(error)) = offer.array.as_ref().map(|array| array.check(memory.size)) {
        return wrong(format!("the array that is offered is not inside the memory: {error}"));
    }
    if memory.mechanism == Mechanism::Unknown {
        return unfit("the producer shares by a mechanism that this version does not know".to_owned());
    }
    if let Some(digest) = offer.digest.as_ref().filter(|digest| !files::is_known(digest)) {
        return unfit(format!("the data comes with the digest `{digest}`, which this version can't check"));
    }
    Ok(())
}

/// Checks the name of what is offered.
pub(super) fn check_object(offer: &Offer, asked: &str) -> Result<()> {
    if offer.object == asked {
        return Ok(());
    }
    let message = format!("object `{asked}` was asked for and `{}` is offered", offer.object);
    Err(ProtocolError::Content(message).into())
}

/// Which segments follow an offer: they must be those that were asked for.
pub(super) fn part_of(offer: &Offer, have: u64, range: &Range<u64>) -> Result<Part> {
    let wrong = |message: String| Err(ProtocolError::Content(message).into());
    let Some(part) = offer.part else {
        return wrong("memory is offered without a word on the segments that follow".to_owned());
    };
    let end = part.offset.checked_add(part.size);
    let covers = match have {
        0 => part.offset <= range.start && end.is_some_and(|end| end >= range.end),
        _ => part.first == have && end.is_some_and(|end| end >= range.end),
    };
    if covers { Ok(part) } else { wrong(format!("bytes {range:?} were asked for, and {part:?} follows")) }
}

/// Takes the segments that came with what announced them, if any did, and one record of segments after another; acknowledges each but the
/// last, which is to be acknowledged when the memory is open. Returns what the descriptors' numbers were, and how much of the
/// time went into opening.
pub(super) fn take_segments(
    link: &mut Link,
    importing: &mut Importing,
    first: u64,
    (sizes, fds): (&[u64], Vec<OwnedFd>),
) -> Result<(Vec<i32>, Duration)> {
    let mut opening = Duration::ZERO;
    let mut numbers: Vec<i32> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    if !numbers.is_empty() {
        timed(&mut opening, || importing.take(sizes, fds))?;
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
        timed(&mut opening, || importing.take(&segments.sizes, fds))?;
    }
    link.busy()?;
    Ok((numbers, opening))
}

/// Says how many segments of an offer have come.
pub(super) fn acknowledge(link: &mut Link, segments: usize) -> Result<()> {
    link.send(&Message::Received(Received { segments: segments as u64 }), &[])
}

/// The pool that an offer names.
pub(super) fn pool_of(device: &Device, offer: &Offer) -> Result<u64> {
    // What this side lacks comes first.
    device.require_pools()?;
    let unnamed = || ProtocolError::Content("memory of a pool is offered, and no pool is named".to_owned());
    Ok(offer.memory.pool.ok_or_else(unnamed)?)
}

/// Takes the pool that an offer names, when it comes itself. Returns what its descriptor's number was, and how much of the time
/// went into opening.
pub(super) fn take_pool(
    link: &mut Link,
    device: &Device,
    offer: &Offer,
    number: u64,
) -> Result<(Arc<Pool>, i32, Duration)> {
    let fd: OwnedFd = match link.receive("for the pool")? {
        (Message::Pool(pool), mut fds) if pool.pool == number && fds.len() == 1 => fds.remove(0),
        (Message::Pool(pool), _) => {
            let message = format!("pool {} came where {number} belongs", pool.pool);
            return Err(ProtocolError::Content(message).into());
        }
        (other, _) => return Err(unexpected(&other, "pool")),
    };
    let (raw, mut opening) = (fd.as_raw_fd(), Duration::ZERO);
    let pool = timed(&mut opening, || Imported::pool(device, &offer.memory, fd))?;
    Ok((pool, raw, opening))
}
