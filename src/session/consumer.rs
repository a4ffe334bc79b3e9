//! The side that is given memory.

use std::{os::fd::AsRawFd, path::Path, sync::Arc, time::Instant};

use super::{Event, Link, Observer, Terms, activate, greeting, outcome_of, unexpected};
use crate::{
    channel::{Peer, connect},
    driver::{Access, Driver, Location, code},
    error::{Error, Result},
    memory::{Allocation, Device, Mapping, Selector},
    pattern::{self, Pattern, Verification},
    wire::{
        DEFAULT_OBJECT, ELEMENT_U32, ErrorCode, MECHANISM_VMM, Message, Offer, Outcome, ProtocolError, Received,
        Request,
    },
};

/// A connection to a producer.
///
/// ```no_run
/// use std::time::Duration;
/// use vmmfd::{
///     channel::{Cancel, Trust, socket_path},
///     driver::Choice,
///     session::{Terms, consumer::Consumer, start},
/// };
///
/// # fn main() -> vmmfd::Result<()> {
/// let terms = Terms { timeout: Duration::from_secs(30), trust: Trust::default(), cancel: Cancel::new()? };
/// let opened = start(Choice::Auto, &terms.cancel, &|_| {})?;
/// let mut consumer = Consumer::connect(&opened.driver, None, &socket_path(None)?, &terms, &|_| {})?;
/// let lent = consumer.request(vmmfd::wire::DEFAULT_OBJECT, None)?;
/// println!("{} bytes at {:#x}", lent.offer.size, lent.mapping.address());
/// let verification = consumer.verify(&lent)?;
/// consumer.reply(&lent)?;
/// let both = consumer.report(&verification)?;
/// assert!(both.verified);
/// # consumer.close();
/// # Ok(())
/// # }
/// ```
pub struct Consumer<'a> {
    link: Link,
    driver: Arc<dyn Driver>,
    /// The device that is ready for copies.
    ready: Option<Device>,
    /// Whether it was named, and no other may be used.
    named: bool,
    /// Whether the last offer asks for a reply, which the producer will check.
    reply_due: bool,
    observer: Observer<'a>,
}

/// A buffer that a producer shares, mapped in this process.
///
/// It stays valid for as long as it lives, also when the producer is gone.
#[derive(Debug)]
pub struct Lent {
    /// What the producer said of it, checked.
    pub offer: Offer,
    /// The memory.
    pub mapping: Mapping,
}

/// What a consumer found, and what the producer made of it.
#[derive(Debug)]
pub struct Findings {
    /// What this side found.
    pub verification: Verification,
    /// What the producer answered; an error only where this side had found a mismatch before: that outweighs how the
    /// conversation ended.
    pub producer: Result<Outcome>,
}

impl Findings {
    /// What both sides found together, with the figures of the side that found a mismatch, if one did.
    pub fn outcome(&self) -> Outcome {
        match &self.producer {
            Ok(producer) if self.verification.passed() => producer.clone(),
            _ => outcome_of(&self.verification),
        }
    }
}

/// Fetches the default object once: requests, verifies, replies if asked to, reports.
///
/// # Errors
/// Those of [`Consumer`]'s methods. Wrong data is no error: see [`Findings`].
pub fn fetch(
    driver: &Arc<dyn Driver>,
    device: Option<Selector>,
    path: &Path,
    access: Option<Access>,
    terms: &Terms,
    observer: Observer<'_>,
) -> Result<Findings> {
    let mut consumer = Consumer::connect(driver, device, path, terms, observer)?;
    let result = consumer.converse(access);
    consumer.link.end(&result);
    result
}

impl<'a> Consumer<'a> {
    /// Waits for the producer at a path and says hello.
    ///
    /// A device that is named must be the one that is offered; it is made ready before the wait, as is the only one.
    ///
    /// # Errors
    /// Those of [`connect`], [`Device::find`] and of the conversation: [`Error::Peer`], [`Error::PeerGone`],
    /// [`Error::Timeout`], [`Error::Protocol`].
    pub fn connect(
        driver: &Arc<dyn Driver>,
        device: Option<Selector>,
        path: &Path,
        terms: &Terms,
        observer: Observer<'a>,
    ) -> Result<Self> {
        let early = match device {
            None if driver.device_count()? != 1 => None,
            selector => Some(Device::find(driver, selector.unwrap_or_default())?),
        };
        if let Some(device) = &early {
            device.require_sharing()?;
            activate(device, &mut || terms.cancel.check(), observer)?;
        }
        let begun = Instant::now();
        let channel = connect(path, terms.timeout, &terms.trust, &terms.cancel)?;
        let mut consumer = Self {
            link: Link::new(channel),
            driver: Arc::clone(driver),
            ready: early,
            named: device.is_some(),
            reply_due: false,
            observer,
        };
        match consumer.greet() {
            Ok(()) => {
                let peer = consumer.peer();
                observer(Event::Connected { peer, took: begun.elapsed() });
                Ok(consumer)
            }
            Err(error) => {
                let result = Err(error);
                consumer.link.end(&result);
                result
            }
        }
    }

    fn greet(&mut self) -> Result<()> {
        self.link.hello(self.driver.as_ref())?;
        let (hello, _) = self.link.receive("for the producer's hello")?;
        // Whether the backends fit is the producer's to say, when it knows what is asked for.
        greeting(hello).map(drop)
    }

    /// Who the producer is.
    pub fn peer(&self) -> Peer {
        self.link.peer()
    }

    /// Asks for an object and maps it; `None` takes the access that the producer offers.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if this side can't take what is offered; [`Error::Protocol`] if the offer contradicts itself;
    /// [`Error::Driver`] from importing; those of the conversation.
    ///
    /// Driver calls: those of [`Allocation::import`] and [`Mapping::new`].
    pub fn request(&mut self, object: &str, access: Option<Access>) -> Result<Lent> {
        let begun = Instant::now();
        self.link.send(Message::Request(Request { object: object.to_owned(), access }), &[])?;
        let offer = match self.link.receive("for the offer")? {
            (Message::Offer(offer), _) => offer,
            (other, _) => return Err(unexpected(&other, "offer")),
        };
        check(&offer, object, access)?;
        self.reply_due = offer.reply_salt.is_some();
        let (segments, mut fds) = match self.link.receive("for the memory")? {
            (Message::Segments(segments), fds) => (segments, fds),
            (other, _) => return Err(unexpected(&other, "segments")),
        };
        if segments.first != 0 || segments.sizes != [offer.mapped_size] {
            let claim = format!("an offer of one segment of {} bytes came with {segments:?}", offer.mapped_size);
            return Err(ProtocolError::Content(claim).into());
        }
        let Some(fd) = fds.pop() else {
            return Err(ProtocolError::Content("segments came without a descriptor".to_owned()).into());
        };
        self.link.send(Message::Received(Received { segments: 1 }), &[])?;
        let (size, mapped_size) = (offer.size, offer.mapped_size);
        (self.observer)(Event::Received { size, mapped_size, fd: fd.as_raw_fd(), took: begun.elapsed() });

        let device = self.device_of(&offer)?;
        let begun = Instant::now();
        let allocation = Allocation::import(&device, fd, mapped_size).map_err(not_as_offered)?;
        self.check_owner(&allocation)?;
        let mapping = Mapping::new(&allocation, offer.access).map_err(not_as_offered)?;
        let address = mapping.address();
        (self.observer)(Event::Mapped { address, access: offer.access, took: begun.elapsed() });
        Ok(Lent { offer, mapping })
    }

    /// This process's device of the UUID offered, ready for copies.
    fn device_of(&mut self, offer: &Offer) -> Result<Device> {
        let mismatch = |how: String| {
            let message = format!("the buffer is on {} {}, {how}", offer.device.name, offer.device.uuid);
            Err(Error::Mismatch { code: ErrorCode::Device, message })
        };
        match &self.ready {
            Some(device) if device.uuid() == offer.device.uuid => return Ok(device.clone()),
            Some(device) if self.named => return mismatch(format!("and this side was told to use {device}")),
            _ => {}
        }
        let device = match Device::find(&self.driver, Selector::Uuid(offer.device.uuid)) {
            Ok(device) => device,
            Err(Error::NoSuchDevice { available, .. }) => {
                return mismatch(format!("which this process does not see: {available}"));
            }
            Err(error) => return Err(error),
        };
        device.require_sharing()?;
        activate(&device, &mut || self.link.busy(), self.observer)?;
        self.ready = Some(device.clone());
        Ok(device)
    }

    /// The driver must say the same of the memory as the peer: what it says decides.
    fn check_owner(&self, allocation: &Allocation) -> Result<()> {
        let (location, device) = (allocation.properties()?.location, allocation.device());
        let owner = match location {
            Location::Device(ordinal) if ordinal == device.ordinal() => return Ok(()),
            Location::Device(ordinal) => format!("on device {ordinal} of this process"),
            Location::HostNuma(node) => format!("on NUMA node {node}"),
        };
        let message = format!("the memory is {owner}, and the offer says {device}");
        Err(Error::Mismatch { code: ErrorCode::Device, message })
    }

    /// Checks what was lent against the pattern of its salt. The producer is told that this side is at work.
    ///
    /// # Errors
    /// Those of [`pattern::verify`], and of the conversation.
    pub fn verify(&mut self, lent: &Lent) -> Result<Verification> {
        let begun = Instant::now();
        let link = &mut self.link;
        let salt = Pattern::new(lent.offer.salt);
        let verification = pattern::verify(&lent.mapping, lent.offer.size, salt, &mut |_| link.busy())?;
        (self.observer)(Event::Verified { verification: &verification, took: begun.elapsed() });
        Ok(verification)
    }

    /// Writes the pattern that the offer asks for back into the buffer, if it asks for one.
    ///
    /// # Errors
    /// Those of [`pattern::fill`], and of the conversation.
    pub fn reply(&mut self, lent: &Lent) -> Result<()> {
        let Some(salt) = lent.offer.reply_salt else { return Ok(()) };
        let begun = Instant::now();
        let (link, size) = (&mut self.link, lent.offer.size);
        pattern::fill(&lent.mapping, size, Pattern::new(salt), &mut |_| link.busy())?;
        (self.observer)(Event::Filled { words: pattern::words(size), salt, took: begun.elapsed() });
        Ok(())
    }

    /// Acknowledges: tells the producer what was found, and waits for its own result. All work of this side on the buffer
    /// must be finished.
    ///
    /// # Errors
    /// Those of the conversation. What the producer found is no error.
    pub fn report(&mut self, verification: &Verification) -> Result<Outcome> {
        let begun = Instant::now();
        self.link.send(Message::Result(outcome_of(verification)), &[])?;
        let outcome = match self.link.receive("for the producer's result")? {
            (Message::Result(outcome), _) => outcome,
            (other, _) => return Err(unexpected(&other, "result")),
        };
        // The producer checks a reply, if there is one. It may also say no without a reason that it could count.
        let to_check = if self.reply_due && verification.passed() { verification.words } else { 0 };
        outcome.check(if outcome.verified { to_check } else { outcome.words.min(to_check) })?;
        (self.observer)(Event::Told { peer: self.peer(), outcome: &outcome, took: begun.elapsed() });
        Ok(outcome)
    }

    /// Ends the conversation in good order.
    pub fn close(self) {
        self.link.end(&Ok(()));
    }

    fn converse(&mut self, access: Option<Access>) -> Result<Findings> {
        let lent = self.request(DEFAULT_OBJECT, access)?;
        let verification = self.verify(&lent)?;
        if verification.passed() {
            self.reply(&lent)?;
        }
        let producer = self.report(&verification);
        match producer {
            Err(error @ Error::Interrupted { .. }) => Err(error),
            Err(error) if verification.passed() => Err(error),
            producer => Ok(Findings { verification, producer }),
        }
    }
}

/// What the driver says of memory that is not what the peer claims is the peer's failure, not the driver's.
fn not_as_offered(error: Error) -> Error {
    let of_the_peer = match &error {
        Error::Unaligned { size, granularity } => {
            let claim = format!("{size} bytes are offered as mapped, where memory comes in units of {granularity}");
            return ProtocolError::Content(claim).into();
        }
        // No such memory.
        Error::Driver { call: "cuMemImportFromShareableHandle" | "host import", code, .. } => {
            matches!(*code, code::INVALID_VALUE | code::UNKNOWN)
        }
        // Of another size.
        Error::Driver { call: "cuMemMap" | "host map", code, .. } => {
            matches!(*code, code::INVALID_VALUE | code::NOT_SUPPORTED)
        }
        _ => false,
    };
    if !of_the_peer {
        return error;
    }
    let message = format!("what the producer sent is not the memory that it offered: {}", error.in_full());
    Error::Mismatch { code: ErrorCode::Failed, message }
}

/// What an offer must be, before anything is done with it.
fn check(offer: &Offer, object: &str, access: Option<Access>) -> Result<()> {
    let wrong = |message: String| Err(ProtocolError::Content(message).into());
    let unfit = |message: String| Err(Error::Mismatch { code: ErrorCode::Failed, message });
    if offer.object != object {
        return wrong(format!("object `{object}` was asked for and `{}` is offered", offer.object));
    }
    if offer.size == 0 || offer.size > offer.mapped_size {
        return wrong(format!("{} bytes of data are offered in {} bytes of memory", offer.size, offer.mapped_size));
    }
    if access.is_some_and(|access| access != offer.access) {
        return wrong(format!("another access was asked for than the {} that is offered", offer.access));
    }
    if offer.reply_salt == Some(offer.salt) {
        return wrong("the reply's salt is the offer's own".to_owned());
    }
    if offer.reply_salt.is_some() && offer.access == Access::ReadOnly {
        return wrong("a reply is asked for in memory that is offered read-only".to_owned());
    }
    if offer.mechanism != MECHANISM_VMM {
        return unfit(format!("the producer shares by `{}`, which this version does not know", offer.mechanism));
    }
    if offer.element_type != ELEMENT_U32 {
        return unfit(format!("the buffer holds `{}`, which this version can't check", offer.element_type));
    }
    if offer.segments != 1 {
        return unfit(format!("the buffer has {} segments, and this version maps buffers of one", offer.segments));
    }
    Ok(())
}
