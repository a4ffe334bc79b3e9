//! The broker's client.

mod connection;
mod get;
mod holdings;
mod lease;
mod meetings;
mod object;
mod put;
mod ranges;
mod recall;
mod reconnect;
mod socket;
mod switch;
mod turns;
mod watch;
mod watcher;

use std::{
    collections::BTreeMap,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::{Arc, atomic::Ordering},
};

pub(crate) use self::meetings::{Meeting, Meetings};
use self::{
    connection::Connection,
    lease::{differs, read_metadata},
    socket::answer,
};
pub use self::{
    get::Get,
    holdings::{LossReason, Lost, Restored},
    lease::{Claim, ClaimOf, Found, Lease, LeasedPart},
    object::{Object, ObjectPart},
    put::{Condition, Put, PutPart},
    recall::{Recall, RecallHolder, RecallOf},
    switch::Prepared,
    watch::{Watch, WatchPlace, Watched},
};
use super::request::{check_name, check_prefix};
use crate::{
    channel::{Config, Peer},
    error::{Error, ProtocolError, Result},
    sys::lock,
    wire::{
        Check,
        broker::{
            Attached, Delete, HeldClaim, HeldLease, HeldTopic, List, Measure, Measured, Message, Stat, Summary, Token,
            UserTotal, VersionInfo, Who,
        },
    },
};

/// A connection to a broker.
///
/// Clones share the connection, which carries one request at a time: a request waits for the requests of other threads, at most for the
/// timeout. A watch, and a get or put that waits in the broker, have a connection of their own. The connection
/// closes, and its leases and claims end, when the last clone, lease and claim are dropped. After a fork, the child must connect again: its
/// first use of this crate closes its copies of the parent's connections. Until then the child keeps the parent's leases and names alive.
///
/// Each call blocks until the broker answers, for at most the config's timeout plus the wait of the request. After a refusal
/// ([`Error::Broker`]) the connection remains usable. Any other error closes it, and the next call reconnects.
///
/// If the broker dies or restarts, the client reconnects within the config's timeout and repeats the pending request: a get with the rest
/// of its wait, a put or delete without doing it twice. A broker that restarts with its state resumes the leases. If the broker has lost
/// its state, the client restores every version that this process holds completely. Claims end. [`Client::on_lost`] and
/// [`Client::on_restored`] report changes of leases, [`Lease::is_held`] the present state.
///
/// Between requests, a background thread reconnects. It starts with the first lease, or with the first put whose name may be deleted
/// together with its creator. The thread sleeps in poll(2), owns one descriptor, blocks all signals except faults and makes no driver call.
///
/// ```
/// # use vmmfd::broker::PutPart;
/// use vmmfd::{broker::{Client, Get, Put}, session::Config};
///
/// # let broker = vmmfd::internals::ExampleBroker::start()?;
/// # let (path, memory, driver) = (&broker.path, &broker.memory, &broker.driver);
/// let client = Client::connect(path, &Config::default())?;
/// client.put(&Put::new("models/tiny").part(PutPart::of("all", memory)?))?;
/// for object in client.list("models/")? {
///     println!("{} has version {}", object.name, object.version);
/// }
/// client.delete("models/tiny")?;
/// assert!(client.get(&Get::new("models/tiny")).is_err());
/// # Ok::<(), vmmfd::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Client(Arc<Connection>);

/// The result of [`Client::who`].
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Holders {
    /// The current leases.
    pub leases: Vec<HeldLease>,
    /// The topics that have a publisher: as many as fit into a message.
    pub topics: Vec<HeldTopic>,
    /// The memory and objects held for each user.
    pub totals: Vec<UserTotal>,
    /// The oldest claims on the names. Of other users only those that a [`Client::get`] of this user would meet: on names that it may
    /// read, that one of its processes waits for, or that equal the prefix.
    pub claims: Vec<HeldClaim>,
    /// Whether readers may still resume their leases after a restart of the server, so that more leases may appear. Ends 10 s after the
    /// server's start.
    pub resuming: bool,
}

/// The result of [`Client::stat`].
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct ObjectInfo {
    /// The version's details, without its metadata.
    #[serde(flatten)]
    pub version: VersionInfo,
    /// The creator's metadata; empty if it gave none. Numbers that no type of Rust holds are rounded to `f64`.
    #[serde(skip)]
    pub metadata: Check,
    /// Serialized in its place, so that numbers keep all their digits.
    #[serde(rename = "metadata")]
    #[cfg_attr(feature = "schema", schemars(with = "Check"))]
    texts: BTreeMap<String, Attached>,
}

impl ObjectInfo {
    /// The text of the creator's metadata, whose numbers have all their digits; `{}` if it gave none.
    pub fn metadata_text(&self) -> String {
        serde_json::to_string(&self.texts).unwrap_or_default()
    }

    /// Whether the name keeps the version without a lease: it is the current version, or one of the last before it.
    pub fn is_kept(&self) -> bool {
        let VersionInfo { summary, versions, keep, .. } = &self.version;
        versions.iter().rev().take(*keep as usize + 1).any(|number| *number == summary.version)
    }
}

impl Client {
    /// Connects to the broker at a path. Waits for a broker to listen there, up to [`Config::wait`], and for its answers, up to the timeout.
    ///
    /// # Errors
    /// [`Error::Socket`] if no broker listens in time or this user may not connect; [`Error::Peer`] if the broker refuses this user, or if
    /// the listener is not a broker; [`Error::System`], [`Error::Interrupted`].
    ///
    /// See connect(2), unix(7).
    pub fn connect(path: &Path, config: &Config) -> Result<Self> {
        Connection::connect(path, config).map(Arc::new).map(Self)
    }

    /// Creates a client on a socket that is already connected to a broker. Without a path it can't reconnect: once the connection breaks,
    /// every call fails. To drop a lease blocks while the broker does not read and the socket is full.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn over(socket: OwnedFd, config: &Config) -> Result<Self> {
        Connection::over(socket, config).map(Arc::new).map(Self)
    }

    /// Adds a handler for lost leases: leases that the broker no longer counts, although this process has not dropped them. Mapped memory
    /// remains mapped and valid. Does not block.
    ///
    /// Handlers run on the connection's background thread, so they should return soon. They may make
    /// requests with the client passed to them. A handler must not capture a clone of this client: the connection would never close, and
    /// would later restore old versions.
    pub fn on_lost(&self, call: impl Fn(&Client, &Lost) + Send + Sync + 'static) {
        self.0.handle(|handlers| handlers.lost.push(Arc::new(call)));
    }

    /// Adds a handler for leases that the broker counts again after a reconnect. The rules of [`Client::on_lost`] apply.
    pub fn on_restored(&self, call: impl Fn(&Client, &Restored) + Send + Sync + 'static) {
        self.0.handle(|handlers| handlers.restored.push(Arc::new(call)));
    }

    /// The process that called listen(2) on the broker's socket, as the kernel reports it (`SO_PEERCRED`, unix(7)). A restarted server
    /// inherits the socket, so this may be its predecessor.
    pub fn peer(&self) -> Peer {
        *lock(&self.0.peer)
    }

    /// Whether the connection is up, as far as this process knows: false from the time that a request or the background thread finds it
    /// broken until the reconnect is complete. Does not block, and may be called by the check of
    /// [`Cancel::with_check`](crate::channel::Cancel::with_check) during a request, to learn why it waits.
    pub fn is_connected(&self) -> bool {
        self.0.connected.load(Ordering::Acquire)
    }

    /// Lists the objects whose names start with `prefix` and that this user may read, sorted by name.
    ///
    /// The list arrives in pages: objects that are put or deleted in the meantime may be missing.
    ///
    /// # Errors
    /// [`Error::Broker`] with the code `invalid` for a prefix of more than 255 bytes; [`Error::Peer`], [`Error::System`],
    /// [`Error::Interrupted`].
    pub fn list(&self, prefix: &str) -> Result<Vec<Summary>> {
        check_prefix(prefix)?;
        let mut all = Vec::<Summary>::new();
        loop {
            let after = all.last().map(|last| last.name.clone());
            let request = Message::List(List { prefix: prefix.to_owned(), after });
            let (page, _) = answer!(self.ask(&request)?, Objects, "objects");
            if is_last_page(&mut all, page.objects, page.more)? {
                return Ok(all);
            }
        }
    }

    /// Returns the details of an object's version; by default, the current version.
    ///
    /// # Errors
    /// [`Error::Broker`] with the code `absent` if it does not exist; [`Error::Peer`], [`Error::System`], [`Error::Interrupted`].
    pub fn stat(&self, name: &str, version: Option<u64>) -> Result<ObjectInfo> {
        check_name(name)?;
        let request = Message::Stat(Stat { name: name.to_owned(), version });
        let (mut version, fds) = answer!(self.ask(&request)?, Version, "version");
        let text = read_metadata(version.metadata.take(), &mut fds.into_iter());
        let text = text.map_err(|problem| differs(format!("`{name}`: {problem}")))?;
        let fields = |text: &Attached| Ok::<_, serde_json::Error>((text.read()?, text.read()?));
        let fields = text.as_ref().map(fields).transpose();
        let unreadable = |error: serde_json::Error| differs(format!("the metadata of `{name}`: {error}"));
        let (metadata, texts) = fields.map_err(unreadable)?.unwrap_or_default();
        Ok(ObjectInfo { version: *version, metadata, texts })
    }

    /// Lists the leases of objects whose names start with `prefix` and that this user may read, the claims on such names, and the totals of
    /// each user.
    ///
    /// # Errors
    /// As [`Client::list`].
    pub fn who(&self, prefix: &str) -> Result<Holders> {
        check_prefix(prefix)?;
        let mut leases = Vec::<HeldLease>::new();
        loop {
            let after = leases.last().map(|last| last.number);
            let request = Message::Who(Who { prefix: prefix.to_owned(), after });
            let (page, _) = answer!(self.ask(&request)?, Leases, "leases");
            if is_last_page(&mut leases, page.leases, page.more)? {
                let (claims, topics) = (page.claims.unwrap_or_default(), page.topics.unwrap_or_default());
                return Ok(Holders { leases, topics, totals: page.totals, claims, resuming: page.resuming });
            }
        }
    }

    /// Returns the broker's metrics. The totals of other users are included only for the broker's own user and root.
    ///
    /// # Errors
    /// [`Error::Peer`], [`Error::System`], [`Error::Interrupted`].
    pub fn metrics(&self) -> Result<Measured> {
        Ok(*answer!(self.ask(&Message::Measure(Measure {}))?, Measured, "measured").0)
    }

    /// Deletes a name. Readers keep their leases, and the broker keeps the memory until the last lease ends.
    ///
    /// # Errors
    /// [`Error::Broker`] with the code `absent` if the name does not exist, `denied` if another user owns it; [`Error::Peer`],
    /// [`Error::System`], [`Error::Interrupted`].
    pub fn delete(&self, name: &str) -> Result<()> {
        check_name(name)?;
        // Makes the delete idempotent: it may be sent again after a reconnect.
        let request = Some(new_token()?);
        answer!(self.ask(&Message::Delete(Delete { name: name.to_owned(), request }))?, Done, "done");
        self.0.forget_put(name);
        Ok(())
    }

    /// Ends the waits of other threads, of gets, puts and watches: they fail with [`Error::Broker`] and the code `stopped`. Does not block.
    /// A client [without a path](Client::over) has a single connection, which then closes if one of its requests waits.
    ///
    /// # Errors
    /// [`Error::Misuse`] in a fork.
    pub fn stop(&self) -> Result<()> {
        self.0.check_fork()?;
        self.0.waits.stop();
        Ok(())
    }

    /// Sends a request whose answer is one record.
    fn ask(&self, message: &Message) -> Result<(Message, Vec<OwnedFd>)> {
        self.0.request(|exchange, _| {
            exchange.send_first(message, &[])?;
            exchange.receive("for the broker's answer")
        })
    }
}

impl AsFd for Client {
    /// Readable when the broker has closed the connection, while no request is in progress. A reconnect keeps the descriptor's number; an
    /// epoll(7) instance must register it again.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Adds a page to the entries. Returns whether no other follows.
fn is_last_page<T>(all: &mut Vec<T>, page: Vec<T>, more: bool) -> Result<bool> {
    if page.is_empty() && more {
        return Err(ProtocolError::Content("a page without entries announces more pages".to_owned()).into());
    }
    all.extend(page);
    Ok(!more)
}

/// The random token that makes a request idempotent.
fn new_token() -> Result<Token> {
    let mut bytes = [0; 16];
    // Once the pool is initialised, requests of up to 256 bytes are always served whole. See getrandom(2).
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(_) => Ok(Token(bytes)),
        Err(errno) => Err(Error::system("get random bytes", errno)),
    }
}
