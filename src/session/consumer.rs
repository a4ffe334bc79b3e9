//! The side that is given memory.

use std::{
    collections::BTreeMap,
    ops::Range,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    Event, Link, Observer, Terms, greeting, interruptibly,
    opening::{self, Chosen, Connection, acknowledge, part_of, pool_of, take_pool, take_segments},
    outcome_of, unexpected,
};
use crate::{
    channel::{Peer, connect},
    driver::{Access, Driver},
    error::{Error, Result},
    memory::{Array, Device, Imported, Importing, Pool, Region, Selector, first_elements, timed},
    tools::check::files::{self, Target},
    tools::check::pattern::{self, Checker, Choice, Pattern},
    wire::{ByteRange, DEFAULT_OBJECT, Mechanism, Message, Offer, Outcome, ProtocolError, Request},
};

/// What to ask a producer for.
#[derive(Debug, Clone)]
pub struct Ask {
    /// The object's name.
    pub object: String,
    /// The access wanted; `None` takes the one that the producer offers.
    pub access: Option<Access>,
    /// Which bytes; `None` is all of them. Only the allocations that cover them are sent and mapped.
    pub range: Option<ByteRange>,
}

impl Default for Ask {
    fn default() -> Self {
        Self { object: DEFAULT_OBJECT.to_owned(), access: None, range: None }
    }
}

/// A connection to a producer.
///
/// ```no_run
/// use std::time::Duration;
/// use vmmfd::{
///     channel::{Cancel, Trust, socket_path},
///     driver::Choice,
///     memory::Region,
///     session::{Terms, consumer::{Ask, Consumer}, start},
/// };
///
/// # fn main() -> vmmfd::Result<()> {
/// let terms = Terms { timeout: Duration::from_secs(30), trust: Trust::default(), cancel: Cancel::new()? };
/// let opened = start(Choice::Auto, &terms.cancel, &|_| {})?;
/// let mut consumer = Consumer::connect(&opened.driver, None, &socket_path(None)?, &terms, &|_| {})?;
/// let lent = consumer.request(&Ask::default())?;
/// println!("{} bytes at {:#x}", lent.offer().memory.size, lent.address());
/// let found = consumer.verify(&lent)?;
/// consumer.reply(&lent)?;
/// let both = consumer.report(&lent, &found)?;
/// assert!(both.verified);
/// # drop(lent);
/// # consumer.close();
/// # Ok(())
/// # }
/// ```
pub struct Consumer<'a> {
    link: Link,
    chosen: Chosen,
    /// The pools that this connection was given, by the producer's numbers.
    pools: BTreeMap<u64, Arc<Pool>>,
    /// Held by all memory that the producer frees when the connection ends.
    connection: Arc<Connection>,
    engine: Choice,
    observer: Observer<'a>,
}

/// A buffer that a producer shares, open in this process.
///
/// With [`Mechanism::Vmm`] it stays valid for as long as it lives, also when the producer is gone. Memory of a pool and legacy
/// memory are the producer's to free once the connection has ended: so the connection lasts until they are dropped, even if
/// the [`Consumer`] is dropped before.
#[derive(Debug)]
pub struct Lent {
    offer: Offer,
    memory: Imported,
    range: Range<u64>,
    // Let go of after the memory, which can't be taken out of here.
    _connection: Option<Arc<Connection>>,
}

impl Lent {
    /// What the producer said of it, checked.
    pub fn offer(&self) -> &Offer {
        &self.offer
    }

    /// The memory: of a part of the object, if a range was asked for.
    pub fn memory(&self) -> &Imported {
        &self.memory
    }

    /// The bytes that were asked for.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Whether all of the object is there.
    fn is_whole(&self) -> bool {
        self.memory.start() == 0 && self.range == (0..self.offer.memory.size)
    }

    /// The typed array that it holds, if the producer says so and all of it was asked for.
    ///
    /// # Errors
    /// [`Error::Array`] if it is not inside the memory, which was checked before.
    pub fn into_array(self) -> Result<Option<Array>> {
        match self.offer.array.clone().filter(|_| self.is_whole()) {
            Some(array) => Array::new(Arc::new(self), array).map(Some),
            None => Ok(None),
        }
    }
}

impl crate::memory::sealed::Sealed for Lent {}

impl Region for Lent {
    fn device(&self) -> &Device {
        self.memory.device()
    }

    fn address(&self) -> u64 {
        self.memory.address()
    }

    fn size(&self) -> u64 {
        self.memory.size()
    }

    fn access(&self) -> Access {
        self.memory.access()
    }

    fn is_protected(&self) -> bool {
        self.memory.is_protected()
    }
}

/// What a consumer found, and what the producer made of it.
#[derive(Debug)]
pub struct Findings {
    /// What this side found.
    pub found: Outcome,
    /// What the producer answered; an error only where this side had found a mismatch before: that outweighs how the
    /// conversation ended.
    pub producer: Result<Outcome>,
}

impl Findings {
    /// What both sides found together, with the figures of the side that found a mismatch, if one did.
    pub fn outcome(&self) -> Outcome {
        match &self.producer {
            Ok(producer) if self.found.verified => Outcome { digest: self.found.digest.clone(), ..producer.clone() },
            _ => self.found.clone(),
        }
    }
}

/// What [`fetch`] is to do.
#[derive(Debug)]
pub struct Errand<'a> {
    /// What to ask for.
    pub ask: &'a Ask,
    /// Where to save it, if it is to be saved.
    pub target: Option<Target>,
    /// Who checks and writes the pattern.
    pub engine: Choice,
}

/// Fetches the default object once: requests, verifies, saves if there is a target, replies if asked to, reports.
///
/// # Errors
/// Those of [`Consumer`]'s methods. Wrong data is no error: see [`Findings`].
pub fn fetch(
    driver: &Driver,
    device: Option<Selector>,
    path: &Path,
    errand: Errand<'_>,
    terms: &Terms,
    observer: Observer<'_>,
) -> Result<Findings> {
    let mut consumer = Consumer::connect(driver, device, path, terms, observer)?.engine(errand.engine);
    let result = consumer.converse(errand.ask, errand.target);
    consumer.link.end(&result);
    result
}

impl<'a> Consumer<'a> {
    /// Waits for the producer at a path and says hello.
    ///
    /// A device that is named is used, if it can reach the memory that is offered; else the memory's own. The one that is named,
    /// or the only one, is made ready before the wait.
    ///
    /// # Errors
    /// Those of [`connect`], [`Device::find`] and of the conversation: [`Error::Peer`], [`Error::PeerGone`],
    /// [`Error::Timeout`], [`Error::Protocol`].
    pub fn connect(
        driver: &Driver,
        device: Option<Selector>,
        path: &Path,
        terms: &Terms,
        observer: Observer<'a>,
    ) -> Result<Self> {
        let chosen = Chosen::new(driver, device, &terms.cancel, observer)?;
        let begun = Instant::now();
        let channel = connect(path, terms.timeout, &terms.trust, &terms.cancel)?;
        let connection = Connection::of(&channel);
        let (link, pools) = (Link::new(channel), BTreeMap::new());
        let mut consumer = Self { link, connection, chosen, pools, engine: Choice::Auto, observer };
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
        self.link.hello(self.chosen.driver(), &[])?;
        let (hello, _) = self.link.receive("for the producer's hello")?;
        // Whether the backends fit is the producer's to say, when it knows what is asked for.
        greeting(hello).map(drop)
    }

    /// Has the pattern checked and written by this engine: by default by the one that is through first.
    pub fn engine(self, engine: Choice) -> Self {
        Self { engine, ..self }
    }

    /// Who the producer is.
    pub fn peer(&self) -> Peer {
        self.link.peer()
    }

    /// Asks for an object and opens it.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if this side can't take what is offered; [`Error::NoPeerAccess`]; [`Error::Protocol`] if the offer
    /// contradicts itself; [`Error::Driver`] from opening the memory; those of the conversation.
    ///
    /// Driver calls: those of [`Imported::open`].
    pub fn request(&mut self, ask: &Ask) -> Result<Lent> {
        let begun = Instant::now();
        let offer = self.ask(ask, None)?;
        let range = check(&offer, ask)?;
        let link = &mut self.link;
        let device = self.chosen.for_memory_of(&offer.memory.device, &mut || link.busy(), self.observer)?;
        // Opening goes on while segments come in: its time is taken apart.
        let mut opening = Duration::ZERO;
        let (memory, fds) = match offer.memory.mechanism {
            Mechanism::Vmm => {
                let part = part_of(&offer, 0, &range)?;
                let begin = || Importing::begin(&device, &offer.memory, &part, offer.access);
                let mut importing = timed(&mut opening, begin)?;
                let (fds, took) = take_segments(&mut self.link, &mut importing, part.first, (&[], Vec::new()))?;
                opening += took;
                let memory = timed(&mut opening, || importing.finish())?;
                acknowledge(&mut self.link, fds.len())?;
                (memory, fds)
            }
            Mechanism::Pool => {
                let (pool, fds) = self.pool(&device, &offer, &mut opening)?;
                (timed(&mut opening, || Imported::of_pool(&pool, &offer.memory, offer.access))?, fds)
            }
            _ => {
                let open = || Imported::of_legacy(&device, &offer.memory, offer.access);
                (timed(&mut opening, open)?, Vec::new())
            }
        };
        (self.observer)(Event::Received { offer: &offer, fds: &fds, took: begun.elapsed() - opening });
        (self.observer)(Event::Mapped { address: memory.address(), access: offer.access, took: opening });
        let connection = memory.is_borrowed().then(|| Arc::clone(&self.connection));
        Ok(Lent { offer, memory, range, _connection: connection })
    }

    /// Asks again for a buffer that may have grown, and adds what is new: at the same address, behind what is there. All of it is
    /// asked for and verified anew.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if there is no room behind it; those of [`Consumer::request`].
    ///
    /// Driver calls: those of [`Imported::open`], for the new allocations alone.
    pub fn extend(&mut self, lent: &mut Lent) -> Result<()> {
        let begun = Instant::now();
        let Some(have) = lent.memory.segments().filter(|_| lent.range.end == lent.offer.memory.size) else {
            let feature = "growing memory of which only a part was asked for, or that is not shared by vmm";
            return Err(Error::Unsupported { device: lent.memory.device().to_string(), feature });
        };
        let ask = Ask { object: lent.offer.object.clone(), access: Some(lent.offer.access), range: None };
        let offer = self.ask(&ask, Some(have))?;
        let range = check(&offer, &ask)?;
        let part = part_of(&offer, have, &range)?;
        let mut importing = Importing::behind(&lent.memory, &offer.memory, &part)?;
        let (fds, mut opening) = take_segments(&mut self.link, &mut importing, part.first, (&[], Vec::new()))?;
        timed(&mut opening, || importing.finish_behind(&mut lent.memory))?;
        if !fds.is_empty() {
            acknowledge(&mut self.link, fds.len())?;
        }
        (self.observer)(Event::Received { offer: &offer, fds: &fds, took: begun.elapsed() - opening });
        lent.offer = offer;
        lent.range = range;
        Ok(())
    }

    fn ask(&mut self, ask: &Ask, have: Option<u64>) -> Result<Offer> {
        let Ask { object, access, range } = ask.clone();
        self.link.send(&Message::Request(Request { object, access, range, have }), &[])?;
        match self.link.receive("for the offer")? {
            (Message::Offer(offer), _) => Ok(*offer),
            (other, _) => Err(unexpected(&other, "offer")),
        }
    }

    /// The pool that an offer names: with its first offer of this connection it comes itself.
    fn pool(&mut self, device: &Device, offer: &Offer, opening: &mut Duration) -> Result<(Arc<Pool>, Vec<i32>)> {
        let number = pool_of(device, offer)?;
        if let Some(pool) = self.pools.get(&number) {
            return Ok((Arc::clone(pool), Vec::new()));
        }
        let (pool, fd, took) = take_pool(&mut self.link, device, offer, number)?;
        *opening += took;
        self.pools.insert(number, Arc::clone(&pool));
        acknowledge(&mut self.link, 0)?;
        Ok((pool, vec![fd]))
    }

    /// Checks what was lent: against the pattern of its salt, or its digest. The producer is told that this side is at work.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for a digest that this version does not know; those of [`Choice::verify`] and
    /// [`files::read`], and of the conversation. Wrong data is no error.
    pub fn verify(&mut self, lent: &Lent) -> Result<Outcome> {
        self.check(lent, None)
    }

    /// As [`Consumer::verify`], and writes the same bytes into a file, which appears under its name only if they were right.
    ///
    /// # Errors
    /// Those of [`Consumer::verify`] and of [`Target`].
    pub fn save(&mut self, lent: &Lent, mut target: Target) -> Result<Outcome> {
        let begun = Instant::now();
        let outcome = self.check(lent, Some(&mut target))?;
        if outcome.verified {
            let (file, link) = (target.file()?, &mut self.link);
            // The disk may be slow; whoever does not wait for it leaves nothing beside the target.
            interruptibly(&mut || link.busy(), move || {
                file.sync_all().map_err(|error| Error::system("sync a file", error))
            })?;
            let path = target.finish()?;
            let size = lent.range.end - lent.range.start;
            (self.observer)(Event::Saved { path: &path, size, took: begun.elapsed() });
        }
        Ok(outcome)
    }

    fn check(&mut self, lent: &Lent, mut target: Option<&mut Target>) -> Result<Outcome> {
        let begun = Instant::now();
        let Lent { offer, memory, range, .. } = lent;
        if let Some(array) = offer.array.as_ref().filter(|_| lent.is_whole()) {
            let first = first_elements(memory, array, FIRST_ELEMENTS)?;
            (self.observer)(Event::Array { array, first: &first });
        }
        let (link, observer) = (&mut self.link, self.observer);
        let all = range.end - range.start;
        let mut done = |done| {
            observer(Event::Progress { done, all });
            link.busy()
        };
        let mut work = None;
        let outcome = match (offer.salt.map(Pattern::new), &offer.digest) {
            (Some(pattern), _) if target.is_none() => {
                let verified = self.engine.verify(memory, memory.start(), range.clone(), pattern, &mut done)?;
                work = Some(verified.1);
                outcome_of(&verified.0)
            }
            (None, None) if target.is_none() => Outcome::of_verdict(true),
            (pattern, digest) => {
                let mut checker = pattern.map(Checker::new);
                let mut at = range.start;
                let found = files::read(memory, memory.start(), range.clone(), &mut |bytes| {
                    if let Some(checker) = &mut checker {
                        checker.check(at, bytes);
                    }
                    if let Some(target) = &mut target {
                        target.write(bytes)?;
                    }
                    at += bytes.len() as u64;
                    done(at - range.start)
                })?;
                match (checker, digest) {
                    (Some(checker), _) => outcome_of(&checker.verification),
                    (None, Some(digest)) => {
                        Outcome { digest: Some(found.clone()), ..Outcome::of_verdict(found == *digest) }
                    }
                    (None, None) => Outcome::of_verdict(true),
                }
            }
        };
        (self.observer)(Event::Verified { outcome: &outcome, work: work.as_ref(), took: begun.elapsed() });
        Ok(outcome)
    }

    /// Writes the pattern that the offer asks for back into the buffer, if it asks for one.
    ///
    /// # Errors
    /// Those of [`Choice::write`], and of the conversation.
    pub fn reply(&mut self, lent: &Lent) -> Result<()> {
        let Some(salt) = lent.offer.reply_salt else { return Ok(()) };
        let begun = Instant::now();
        let link = &mut self.link;
        let (memory, range, pattern) = (&lent.memory, lent.range.clone(), Pattern::new(salt));
        let work = self.engine.write(memory, memory.start(), range, pattern, &mut |_| link.busy())?;
        let words = pattern::words(&lent.range);
        (self.observer)(Event::Filled { words, salt, work: &work, took: begun.elapsed() });
        Ok(())
    }

    /// Acknowledges: tells the producer what was found, and waits for its own result. All work of this side on the buffer
    /// must be finished.
    ///
    /// # Errors
    /// Those of the conversation. What the producer found is no error.
    pub fn report(&mut self, lent: &Lent, found: &Outcome) -> Result<Outcome> {
        let begun = Instant::now();
        self.link.send(&Message::Result(found.clone()), &[])?;
        let outcome = match self.link.receive("for the producer's result")? {
            (Message::Result(outcome), _) => outcome,
            (other, _) => return Err(unexpected(&other, "result")),
        };
        // The producer checks a reply, if there is one. It may also say no without a reason that it could count.
        let reply_due = lent.offer.reply_salt.is_some() && found.verified;
        let to_check = if reply_due { pattern::touched(&lent.range) } else { 0..0 };
        outcome.check(if outcome.verified || outcome.words > 0 { to_check } else { 0..0 })?;
        (self.observer)(Event::Told { peer: self.peer(), outcome: &outcome, took: begun.elapsed() });
        Ok(outcome)
    }

    /// Ends the conversation in good order; if memory of a pool or legacy memory is still there, when that is dropped.
    pub fn close(mut self) {
        self.pools.clear();
        // What still holds it ends it.
        if Arc::strong_count(&self.connection) == 1 {
            self.link.end(&Ok(()));
        }
    }

    fn converse(&mut self, ask: &Ask, target: Option<Target>) -> Result<Findings> {
        let lent = self.request(ask)?;
        let found = match target {
            Some(target) => self.save(&lent, target)?,
            None => self.verify(&lent)?,
        };
        if found.verified {
            self.reply(&lent)?;
        }
        let producer = self.report(&lent, &found);
        drop(lent);
        // Before the connection ends, as what is of them.
        self.pools.clear();
        match producer {
            Err(error @ Error::Interrupted { .. }) => Err(error),
            Err(error) if found.verified => Err(error),
            producer => Ok(Findings { found, producer }),
        }
    }
}

/// How many elements of an array a person is shown.
const FIRST_ELEMENTS: usize = 8;

/// What an offer must be, before anything is done with it. Returns the bytes that were asked for.
fn check(offer: &Offer, ask: &Ask) -> Result<Range<u64>> {
    let wrong = |message: String| Err(ProtocolError::Content(message).into());
    opening::check_object(offer, &ask.object)?;
    opening::check(offer)?;
    if offer.buffer.is_some() {
        return wrong("a buffer of a stream is offered, and none was subscribed to".to_owned());
    }
    if ask.access.is_some_and(|access| access != offer.access) {
        return wrong(format!("another access was asked for than the {} that is offered", offer.access));
    }
    let memory = &offer.memory;
    match ask.range {
        None => Ok(0..memory.size),
        Some(range) => match range.within(memory.size) {
            Some(range) => Ok(range),
            None => wrong(format!("{range:?} is offered of {} bytes", memory.size)),
        },
    }
}
