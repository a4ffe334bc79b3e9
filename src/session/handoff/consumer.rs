//! Requests a buffer from a producer.

use std::{collections::BTreeMap, fmt, ops::Range, os::fd::OwnedFd, path::Path, sync::Arc, time::Instant};

use super::{content::Verifier, object::ImportedObject};
use crate::{
    channel::{Cancel, Peer, connect},
    driver::{Access, Driver},
    error::{Error, MemoryError, Result},
    memory::{Pool, Region, Selector},
    session::{
        Config, Event, Observer, Verdict,
        link::{Link, check_backend, unexpected, violation},
        opening::{self, Connection, DeviceChoice, Offer, acknowledge},
    },
    wire::{self, ByteRange, DEFAULT_OBJECT, Message},
};

/// A request to a producer: by default for all of its default object, with the access that the producer offers.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Request {
    /// The object's name.
    pub object: String,
    /// The requested access. `None` accepts the offered one.
    pub access: Option<Access>,
    /// The requested bytes. `None` requests all. Only the allocations that cover them are sent and mapped.
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

    /// Sets the requested access.
    pub fn access(self, access: Access) -> Self {
        Self { access: Some(access), ..self }
    }

    /// Sets the requested bytes.
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
    device: DeviceChoice,
    /// The pools opened on this connection, by the producer's numbers.
    pools: BTreeMap<u64, Arc<Pool>>,
    /// Shared with all memory that the producer frees when the connection closes.
    connection: Arc<Connection>,
    observer: Observer<'a>,
}

impl fmt::Debug for Consumer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer").field("peer", &self.link.peer()).finish_non_exhaustive()
    }
}

/// The verdicts of both sides.
#[derive(Debug)]
#[non_exhaustive]
pub struct Findings {
    /// The consumer's verdict.
    pub found: Verdict,
    /// The producer's verdict. An error only if the consumer had already found a mismatch, which outweighs any error after it.
    pub producer: Result<Verdict>,
}

impl Findings {
    /// Whether both sides found the data correct.
    pub fn verified(&self) -> bool {
        self.found.verified && self.producer.as_ref().is_ok_and(|producer| producer.verified)
    }
}

/// Fetches an object once: requests and opens it, runs the verifier's check and reply, and reports the verdict. Blocks until the
/// session is over.
///
/// # Errors
/// The errors of [`Consumer`]'s methods. Wrong data is not an error: see [`Findings`].
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
    let result = consumer.fetch(request, verifier);
    consumer.link.end(&result, false);
    result
}

impl<'a> Consumer<'a> {
    /// Connects to the producer at `path`, and exchanges hellos. Waits up to the timeout for the producer to listen, and again for its
    /// hello.
    ///
    /// A selected device is used if it can reach the offered memory; otherwise the device of the memory is used. The selected device, or
    /// the machine's only one, is activated before the wait.
    ///
    /// # Errors
    /// The errors of [`connect`] and [`Device::find`](crate::memory::Device::find), and session errors:
    /// [`PeerError::Reported`](crate::error::PeerError::Reported), [`PeerError::Gone`](crate::error::PeerError::Gone),
    /// [`PeerError::Timeout`](crate::error::PeerError::Timeout), [`PeerError::Protocol`](crate::error::PeerError::Protocol).
    pub fn connect(
        driver: &Driver,
        device: Option<Selector>,
        path: &Path,
        config: &Config,
        observer: Observer<'a>,
    ) -> Result<Self> {
        Self::handshake(driver, device, config, observer, |cancel| {
            connect(path, config.timeout, &config.trust, cancel).map(Link::new)
        })
    }

    /// Like [`Consumer::connect`], over a connected socket of type `SOCK_SEQPACKET`, such as a socket of a pair.
    ///
    /// # Errors
    /// [`Error::Socket`] for any other descriptor; [`PeerError::NotAllowed`](crate::error::PeerError::NotAllowed); the errors of
    /// [`Consumer::connect`].
    pub fn over(
        socket: OwnedFd,
        driver: &Driver,
        device: Option<Selector>,
        config: &Config,
        observer: Observer<'a>,
    ) -> Result<Self> {
        Self::handshake(driver, device, config, observer, |cancel| {
            let link = Link::over(socket, config, cancel)?;
            config.trust.check(link.peer()).map(|()| link)
        })
    }

    fn handshake(
        driver: &Driver,
        device: Option<Selector>,
        config: &Config,
        observer: Observer<'a>,
        connect: impl FnOnce(&Cancel) -> Result<Link>,
    ) -> Result<Self> {
        let cancel = config.cancellation()?;
        let device = DeviceChoice::new(driver, device, &cancel, observer)?;
        let begun = Instant::now();
        let link = connect(&cancel)?;
        let connection = Connection::of(&link.channel);
        let mut consumer = Self { link, backend: String::new(), connection, device, pools: BTreeMap::new(), observer };
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
        self.link.hello(self.device.backend(), &[])?;
        let (hello, _) = self.link.receive("for the producer's hello")?;
        self.link.no_reply_due = true;
        // The producer compares the backends when it knows the request. This side compares them again in the offer.
        self.backend = self.link.check_hello(hello)?.backend;
        Ok(())
    }

    /// The producer's process.
    pub fn peer(&self) -> Peer {
        self.link.peer()
    }

    /// Requests an object and opens it. Blocks until it is this consumer's turn; fails if the producer sends nothing, not even `busy`, for
    /// the timeout.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`] for an empty range; [`PeerError::Mismatch`](crate::error::PeerError::Mismatch) if this side
    /// can't use the offered memory; [`DeviceError::NoPeerAccess`](crate::error::DeviceError::NoPeerAccess);
    /// [`PeerError::Protocol`](crate::error::PeerError::Protocol) if the offer contradicts itself or the request; [`Error::Driver`] if the
    /// memory can't be opened; session errors.
    ///
    /// Driver calls: see [`Imported::open`](crate::memory::Imported::open).
    pub fn request(&mut self, request: &Request) -> Result<ImportedObject> {
        self.open(request, &mut |_| Ok(()))
    }

    fn open(&mut self, request: &Request, inspect: &mut dyn FnMut(&Offer) -> Result<()>) -> Result<ImportedObject> {
        let begun = Instant::now();
        self.link.send(&Message::Request(request.to_wire()?), &[])?;
        self.link.no_reply_due = false;
        let offer = match self.link.receive("for the offer")? {
            (Message::Offer(offer), _) => {
                check_backend(&self.backend, self.device.backend().as_str())?;
                Offer::read(*offer, &request.object)?
            }
            (other, _) => return Err(unexpected(&other, "offer")),
        };
        let range = check(&offer, request)?;
        inspect(&offer)?;
        let link = &mut self.link;
        let device = self.device.for_memory_of(&offer.memory.device, &mut || link.busy(), self.observer)?;
        let known = offer.memory.pool().and_then(|number| self.pools.get(&number).cloned());
        let opened = opening::open(&mut self.link, &device, &offer, &range, known)?;
        if let Some(segments) = opened.unacknowledged {
            acknowledge(&mut self.link, segments)?;
        }
        self.pools.extend(opened.pool);
        let memory = opened.memory;
        let elapsed = begun.elapsed().saturating_sub(opened.opening);
        let description = &offer.memory;
        (self.observer)(Event::Received { description, bytes: range.end - range.start, fds: &opened.fds, elapsed });
        (self.observer)(Event::Mapped { address: memory.address(), access: offer.access, elapsed: opened.opening });
        let connection = memory.is_borrowed().then(|| Arc::clone(&self.connection));
        Ok(ImportedObject { offer, memory, range, _connection: connection })
    }

    /// Sends `busy` if this side has been silent for a while. Call it often during long work between [`Consumer::request`] and
    /// [`Consumer::report`]. [`Consumer::verify`] and [`Consumer::reply`] call it themselves. At any other time it sends nothing.
    ///
    /// # Errors
    /// Session errors.
    pub fn busy(&mut self) -> Result<()> {
        self.link.busy()
    }

    /// Checks an object with `verifier`. Sends `busy` during the check.
    ///
    /// # Errors
    /// The errors of [`Verifier::inspect`] and [`Verifier::verify`]; session errors. Wrong data is not an error.
    pub fn verify(&mut self, object: &ImportedObject, verifier: &mut dyn Verifier) -> Result<Verdict> {
        verifier.inspect(object.check(), object.access())?;
        verifier.verify(object, &mut || self.link.busy())
    }

    /// Lets `verifier` write the reply, if the object's check asks for one. Call it only if the data was right.
    ///
    /// # Errors
    /// The errors of [`Verifier::reply`]; session errors.
    pub fn reply(&mut self, object: &ImportedObject, verifier: &mut dyn Verifier) -> Result<()> {
        verifier.reply(object, &mut || self.link.busy())
    }

    /// Ends this consumer's turn: sends its verdict, and waits for the producer's. All work of this process on the object must be finished.
    /// A program that checks nothing reports [`Verdict::unchecked`].
    ///
    /// # Errors
    /// Session errors. A producer that found wrong data is not an error.
    pub fn report(&mut self, object: &ImportedObject, found: &Verdict) -> Result<Verdict> {
        self.conclude(object, found, &mut super::Unchecked)
    }

    fn conclude(&mut self, object: &ImportedObject, found: &Verdict, verifier: &mut dyn Verifier) -> Result<Verdict> {
        let begun = Instant::now();
        self.link.send(&Message::Result(found.clone()), &[])?;
        self.link.no_reply_due = true;
        let answer = match self.link.receive("for the producer's result")? {
            (Message::Result(verdict), _) => verdict,
            (other, _) => return Err(unexpected(&other, "result")),
        };
        verifier.accept(object, found, &answer)?;
        (self.observer)(Event::Reported { peer: self.peer(), verdict: &answer, elapsed: begun.elapsed() });
        Ok(answer)
    }

    /// Closes the session. If memory of a pool or legacy memory is still open, dropping that memory closes it.
    pub fn close(mut self) {
        self.pools.clear();
        // Otherwise the last owner closes the connection.
        if Arc::strong_count(&self.connection) == 1 {
            self.link.end(&Ok(()), false);
        }
    }

    fn fetch(&mut self, request: &Request, verifier: &mut dyn Verifier) -> Result<Findings> {
        let object = self.open(request, &mut |offer| verifier.inspect(offer.check.as_ref(), offer.access))?;
        let found = verifier.verify(&object, &mut || self.link.busy())?;
        if found.verified {
            self.reply(&object, verifier)?;
        }
        let producer = self.conclude(&object, &found, verifier);
        drop(object);
        // Pools close before the connection, as their memory does.
        self.pools.clear();
        match producer {
            Err(error @ Error::Interrupted { .. }) => Err(error),
            Err(error) if found.verified => Err(error),
            producer => Ok(Findings { found, producer }),
        }
    }
}

/// Checks that an offer matches the request. Returns the requested bytes.
fn check(offer: &Offer, request: &Request) -> Result<Range<u64>> {
    if let Some(requested) = request.access.filter(|access| *access != offer.access) {
        return Err(violation(format!("access {} is offered, but {requested} was requested", offer.access)));
    }
    let size = offer.memory.size;
    match &request.range {
        None => Ok(0..size),
        Some(range) if range.end <= size => Ok(range.clone()),
        Some(Range { start, end }) => {
            Err(violation(format!("bytes {start} to {end} were requested, but {size} bytes are offered")))
        }
    }
}
