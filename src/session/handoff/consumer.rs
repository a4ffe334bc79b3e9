//! The side that asks for a buffer.

use std::{collections::BTreeMap, fmt, ops::Range, os::fd::OwnedFd, path::Path, sync::Arc, time::Instant};

use super::{content::Verifier, object::ImportedObject};
use crate::{
    channel::{Cancel, Peer, connect},
    driver::{Access, Driver},
    error::{Error, MemoryError, ProtocolError, Result},
    memory::{Pool, Region, Selector},
    session::{
        Config, Event, Observer, Verdict,
        link::{Link, unexpected},
        opening::{self, Chosen, Connection, Offer, acknowledge, check_backend},
    },
    wire::{self, ByteRange, DEFAULT_OBJECT, Message},
};

/// What to ask a producer for: by default all of its default object, with the access that the producer offers.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Request {
    /// The object's name.
    pub object: String,
    /// The access wanted; `None` takes the one that the producer offers.
    pub access: Option<Access>,
    /// Which bytes; `None` is all of them. Only the allocations that cover them are sent and mapped.
    pub range: Option<Range<u64>>,
}

impl Default for Request {
    fn default() -> Self {
        Self { object: DEFAULT_OBJECT.to_owned(), access: None, range: None }
    }
}

impl Request {
    /// Sets the object's name.
    pub fn object(self, object: impl Into<String>) -> Self {
        Self { object: object.into(), ..self }
    }

    /// Sets the access wanted.
    pub fn access(self, access: Access) -> Self {
        Self { access: Some(access), ..self }
    }

    /// Sets which bytes.
    pub fn range(self, range: Range<u64>) -> Self {
        Self { range: Some(range), ..self }
    }

    fn to_wire(&self) -> Result<wire::Request> {
        let range = self.range.clone().map(|range| match range.end.checked_sub(range.start) {
            Some(length @ 1..) => Ok(ByteRange { offset: range.start, length }),
            _ => Err(Error::Memory(MemoryError::OutOfRange { offset: range.start, length: 0, size: u64::MAX })),
        });
        Ok(wire::Request { object: self.object.clone(), access: self.access, range: range.transpose()? })
    }
}

/// A connection to a producer.
///
/// ```no_run
/// use vmmfd::{
///     channel::socket_path,
///     driver::{Choice, open},
///     memory::Region,
///     session::{Config, Verdict, handoff::{Consumer, Request}},
/// };
///
/// # fn main() -> vmmfd::Result<()> {
/// let (driver, config) = (open(Choice::Auto)?.driver, Config::default());
/// let mut consumer = Consumer::connect(&driver, None, &socket_path(None)?, &config, &|_| {})?;
/// let object = consumer.request(&Request::default())?;
/// println!("{} bytes at {:#x}", object.size(), object.address());
/// consumer.report(&object, &Verdict::unchecked(true))?;
/// drop(object);
/// consumer.close();
/// # Ok(())
/// # }
/// ```
pub struct Consumer<'a> {
    link: Link,
    /// The name of the producer's backend.
    backend: String,
    chosen: Chosen,
    /// The pools that this connection has, by the producer's numbers.
    pools: BTreeMap<u64, Arc<Pool>>,
    /// Held by all memory that the producer frees when the connection ends.
    connection: Arc<Connection>,
    observer: Observer<'a>,
}

impl fmt::Debug for Consumer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer").field("peer", &self.link.peer()).finish_non_exhaustive()
    }
}

/// What a consumer found, and what the producer answered.
#[derive(Debug)]
#[non_exhaustive]
pub struct Findings {
    /// What this side found.
    pub found: Verdict,
    /// What the producer answered; an error only where this side had found a mismatch before: that outweighs how the
    /// conversation ended.
    pub producer: Result<Verdict>,
}

impl Findings {
    /// Whether both sides found the data right.
    pub fn verified(&self) -> bool {
        self.found.verified && self.producer.as_ref().is_ok_and(|producer| producer.verified)
    }
}

/// Fetches an object once: requests it, has it verified and replied to, and reports. Blocks until the conversation has ended.
///
/// # Errors
/// Those of [`Consumer`]'s methods. Wrong data is no error: see [`Findings`].
pub fn fetch(
    driver: &Driver,
    device: Option<Selector>,
    path: &Path,
    request: &Request,
    verifier: &mut dyn Verifier,
    config: &Config,
    observer: Observer<'_>,
) -> Result<Findings> {
    let mut consumer = Consumer::connect(driver, device, path, config, observer)?;
    let result = consumer.converse(request, verifier);
    consumer.link.end(&result, false);
    result
}

impl<'a> Consumer<'a> {
    /// Waits for the producer at a path and says hello.
    ///
    /// A device that is named is used, if it can reach the memory that is offered; else the memory's own. The one that is named,
    /// or the only one, is made ready before the wait.
    ///
    /// # Errors
    /// Those of [`connect`], [`Device::find`](crate::memory::Device::find) and of the conversation:
    /// [`PeerError::Reported`](crate::error::PeerError::Reported), [`PeerError::Gone`](crate::error::PeerError::Gone),
    /// [`PeerError::Timeout`](crate::error::PeerError::Timeout), [`PeerError::Protocol`](crate::error::PeerError::Protocol).
    pub fn connect(
        driver: &Driver,
        device: Option<Selector>,
        path: &Path,
        config: &Config,
        observer: Observer<'a>,
    ) -> Result<Self> {
        Self::meet(driver, device, config, observer, |cancel| {
            connect(path, config.timeout, &config.trust, cancel).map(Link::new)
        })
    }

    /// As [`Consumer::connect`], over a connected socket of type `SOCK_SEQPACKET`: of a socket pair, say.
    ///
    /// # Errors
    /// [`Error::Socket`] for any other descriptor; [`PeerError::NotAllowed`](crate::error::PeerError::NotAllowed); those of
    /// [`Consumer::connect`].
    pub fn over(
        socket: OwnedFd,
        driver: &Driver,
        device: Option<Selector>,
        config: &Config,
        observer: Observer<'a>,
    ) -> Result<Self> {
        Self::meet(driver, device, config, observer, |cancel| {
            let link = Link::over(socket, config, cancel)?;
            config.trust.check(link.peer()).map(|()| link)
        })
    }

    fn meet(
        driver: &Driver,
        device: Option<Selector>,
        config: &Config,
        observer: Observer<'a>,
        connect: impl FnOnce(&Cancel) -> Result<Link>,
    ) -> Result<Self> {
        let cancel = config.cancellation()?;
        let chosen = Chosen::new(driver, device, &cancel, observer)?;
        let begun = Instant::now();
        let link = connect(&cancel)?;
        let connection = Connection::of(&link.channel);
        let mut consumer = Self { link, backend: String::new(), connection, chosen, pools: BTreeMap::new(), observer };
        match consumer.greet() {
            Ok(()) => {
                let peer = consumer.peer();
                observer(Event::Connected { peer, elapsed: begun.elapsed() });
                Ok(consumer)
            }
            Err(error) => {
                let result = Err(error);
                consumer.link.end(&result, false);
                result
            }
        }
    }

    fn greet(&mut self) -> Result<()> {
        self.link.hello(self.chosen.backend(), &[])?;
        let (hello, _) = self.link.receive("for the producer's hello")?;
        self.link.at_rest = true;
        // Whether the backends fit is the producer's to say, when it knows what is asked for. It may not have looked.
        self.backend = self.link.greeted(hello)?.backend;
        Ok(())
    }

    /// Who the producer is.
    pub fn peer(&self) -> Peer {
        self.link.peer()
    }

    /// Asks for an object and opens it. Blocks until it is this side's turn, no longer than the timeout after the producer last said
    /// that it is busy.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`] for an empty range; [`PeerError::Mismatch`](crate::error::PeerError::Mismatch) if this side
    /// can't take what is offered;
    /// [`DeviceError::NoPeerAccess`](crate::error::DeviceError::NoPeerAccess);
    /// [`PeerError::Protocol`](crate::error::PeerError::Protocol) if the offer contradicts itself; [`Error::Driver`] from opening
    /// the memory;
    /// those of the conversation.
    ///
    /// Driver calls: those of [`Imported::open`](crate::memory::Imported::open).
    pub fn request(&mut self, request: &Request) -> Result<ImportedObject> {
        self.open(request, &mut |_| Ok(()))
    }

    fn open(&mut self, request: &Request, inspect: &mut dyn FnMut(&Offer) -> Result<()>) -> Result<ImportedObject> {
        let begun = Instant::now();
        self.link.send(&Message::Request(request.to_wire()?), &[])?;
        self.link.at_rest = false;
        let offer = match self.link.receive("for the offer")? {
            (Message::Offer(offer), _) => {
                check_backend(&self.backend, self.chosen.backend())?;
                Offer::read(*offer, &request.object)?
            }
            (other, _) => return Err(unexpected(&other, "offer")),
        };
        let range = check(&offer, request)?;
        inspect(&offer)?;
        let link = &mut self.link;
        let device = self.chosen.for_memory_of(&offer.memory.device, &mut || link.busy(), self.observer)?;
        let known = offer.memory.pool().and_then(|number| self.pools.get(&number).cloned());
        let opened = opening::open(&mut self.link, &device, &offer, &range, known, (&[], Vec::new()))?;
        if let Some(segments) = opened.unacknowledged {
            acknowledge(&mut self.link, segments)?;
        }
        self.pools.extend(opened.pool);
        let (memory, elapsed) = (opened.memory, begun.elapsed().saturating_sub(opened.opening));
        let description = &offer.memory;
        (self.observer)(Event::Received { description, fds: &opened.fds, elapsed });
        (self.observer)(Event::Mapped { address: memory.address(), access: offer.access, elapsed: opened.opening });
        let connection = memory.is_borrowed().then(|| Arc::clone(&self.connection));
        Ok(ImportedObject { offer, memory, range, _connection: connection })
    }

    /// Says that this side is at work, if it was silent for a while. A program that works on an object for long calls it often,
    /// between [`Consumer::request`] and [`Consumer::report`]; [`Consumer::verify`] and [`Consumer::reply`] do it themselves. At any
    /// other time it sends nothing.
    ///
    /// # Errors
    /// Those of the conversation.
    pub fn busy(&mut self) -> Result<()> {
        self.link.busy()
    }

    /// Has an object checked. The producer gets to know that this side is at work.
    ///
    /// # Errors
    /// Those of [`Verifier::inspect`] and [`Verifier::verify`], and of the conversation. Wrong data is no error.
    pub fn verify(&mut self, object: &ImportedObject, verifier: &mut dyn Verifier) -> Result<Verdict> {
        verifier.inspect(object.check(), object.access())?;
        verifier.verify(object, &mut || self.link.busy())
    }

    /// Has the reply written that the object's check asks for, if it asks for one: only if all was right.
    ///
    /// # Errors
    /// Those of [`Verifier::reply`], and of the conversation.
    pub fn reply(&mut self, object: &ImportedObject, verifier: &mut dyn Verifier) -> Result<()> {
        verifier.reply(object, &mut || self.link.busy())
    }

    /// Ends this side's turn: sends what was found, and waits for the producer's own result. All work of this side on the object
    /// must be finished. A program that checked nothing reports [`Verdict::unchecked`].
    ///
    /// # Errors
    /// Those of the conversation. What the producer found is no error.
    pub fn report(&mut self, object: &ImportedObject, found: &Verdict) -> Result<Verdict> {
        self.conclude(object, found, &mut super::Unchecked)
    }

    fn conclude(&mut self, object: &ImportedObject, found: &Verdict, verifier: &mut dyn Verifier) -> Result<Verdict> {
        let begun = Instant::now();
        self.link.send(&Message::Result(found.clone()), &[])?;
        self.link.at_rest = true;
        let answer = match self.link.receive("for the producer's result")? {
            (Message::Result(verdict), _) => verdict,
            (other, _) => return Err(unexpected(&other, "result")),
        };
        verifier.accept(object, found, &answer)?;
        (self.observer)(Event::Reported { peer: self.peer(), verdict: &answer, elapsed: begun.elapsed() });
        Ok(answer)
    }

    /// Ends the conversation in good order; if memory of a pool or legacy memory is still there, when that is dropped.
    pub fn close(mut self) {
        self.pools.clear();
        // What still holds it ends it.
        if Arc::strong_count(&self.connection) == 1 {
            self.link.end(&Ok(()), false);
        }
    }

    fn converse(&mut self, request: &Request, verifier: &mut dyn Verifier) -> Result<Findings> {
        let object = self.open(request, &mut |offer| verifier.inspect(offer.check.as_ref(), offer.access))?;
        let found = verifier.verify(&object, &mut || self.link.busy())?;
        if found.verified {
            self.reply(&object, verifier)?;
        }
        let producer = self.conclude(&object, &found, verifier);
        drop(object);
        // Before the connection ends, as what is of them.
        self.pools.clear();
        match producer {
            Err(error @ Error::Interrupted { .. }) => Err(error),
            Err(error) if found.verified => Err(error),
            producer => Ok(Findings { found, producer }),
        }
    }
}

/// Whether an offer is what was asked for. Returns the bytes that were asked for.
fn check(offer: &Offer, request: &Request) -> Result<Range<u64>> {
    let wrong = |message: String| Err(ProtocolError::Content(message).into());
    if offer.buffer.is_some() {
        return wrong("a buffer of a stream is offered, and none was subscribed to".to_owned());
    }
    if request.access.is_some_and(|access| access != offer.access) {
        return wrong(format!("another access was asked for than the {} that is offered", offer.access));
    }
    let size = offer.memory.size;
    match &request.range {
        None => Ok(0..size),
        Some(range) if range.end <= size => Ok(range.clone()),
        Some(Range { start, end }) => {
            wrong(format!("bytes {start} to {end} were asked for, and {size} bytes are offered"))
        }
    }
}
