//! The client of a broker.

mod connection;
mod dial;
mod get;
mod hold;
mod holdings;
mod lease;
mod metrics;
mod object;
mod put;
mod reconnect;
mod records;
mod switch;
mod waker;
mod watch;
mod watcher;

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::Arc,
    time::Duration,
};

use self::{connection::Connection, records::unexpected};
pub use self::{
    get::{Claim, ClaimOf, Found, Get},
    holdings::{LossReason, Lost, Restored},
    lease::{Lease, LeasedPart},
    object::{Object, ObjectPart},
    put::{Condition, Put, PutPart},
    switch::Prepared,
    watch::{Watch, WatchPlace, Watched},
};
use super::name::check_name;
use crate::{
    channel::{Config, Peer},
    error::{Error, ProtocolError, Result},
    wire::{
        Check,
        broker::{
            Delete, HeldLease, List, MAX_METADATA, Message, Published, Stat, Summary, Table, Token, UserTotal,
            VersionInfo, Who,
        },
    },
};

/// A connection to a broker. Clones are the same connection, on which one request waits for the other; leases and claims end with
/// it, when the last clone and the last of them is dropped.
///
/// Each call blocks until the broker has answered, for at most the config's timeout and the wait that it was given. A refusal
/// ([`Error::Broker`]) leaves the connection as it was, any other error ends it, and the next call makes another one. A fork must connect
/// anew.
///
/// A connection that breaks because the broker dies or is restarted is made again, within the config's timeout, and the request
/// that was under way is sent again: a get with what is left of its wait, and a put or delete so that it is done once. Leases are taken up
/// by the broker that was restarted with what it had. If it has lost that, the versions of which this process has all are offered
/// back. [`Client::on_lost`] and [`Client::on_restored`] report what becomes of leases, [`Lease::is_held`] says it. Claims end.
///
/// While no request is made, a thread of this process does it, which starts with the first lease, or the first put of a name that goes
/// with its maker: it sleeps in poll(2) and has a descriptor of its own. It blocks all signals and makes no driver call.
#[derive(Debug, Clone)]
pub struct Client(Arc<Connection>);

/// What [`Client::who`] returns.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holders {
    /// The leases that are held.
    pub leases: Vec<HeldLease>,
    /// What is held for each user.
    pub totals: Vec<UserTotal>,
}

/// What [`Client::stat`] returns.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ObjectInfo {
    /// All that is known of the version.
    pub version: VersionInfo,
    /// What its maker says of it; empty if nothing.
    pub metadata: Check,
}

impl Client {
    /// Connects to the broker at a path. Waits up to the config's timeout for one to listen there.
    ///
    /// # Errors
    /// [`Error::Socket`] if no broker listens in time or this user may not connect; [`Error::Peer`] if the broker refuses this user
    /// or is none; [`Error::System`], [`Error::Interrupted`].
    ///
    /// See connect(2), unix(7).
    pub fn connect(path: &Path, config: &Config) -> Result<Self> {
        Connection::connect(path, config).map(Arc::new).map(Self)
    }

    /// A client over a socket that is connected to a broker. If that connection breaks it has ended: nothing says where to connect to.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn over(socket: OwnedFd, config: &Config) -> Result<Self> {
        Connection::over(socket, None, config).map(Arc::new).map(Self)
    }

    /// As [`Client::connect`], over a socket that is connected to the path already.
    pub(crate) fn over_at(socket: OwnedFd, path: &Path, config: &Config) -> Result<Self> {
        Connection::over(socket, Some(path), config).map(Arc::new).map(Self)
    }

    /// Calls this for each lease that the broker does not count any more, although this process has not ended it. What is mapped stays
    /// mapped and valid. Each handler that is set is called.
    ///
    /// It is called on a thread of the connection's own, which meanwhile notices nothing else: it should return soon, and may make
    /// requests with the client that it is given. That is this one: do not let the handler capture a clone, with which the connection
    /// would never end, and would later offer old versions back. Does not block.
    pub fn on_lost(&self, call: impl Fn(&Client, &Lost) + Send + Sync + 'static) {
        self.0.handle(|handlers| handlers.lost.push(Arc::new(call)));
    }

    /// Calls this for each lease that the broker counts again, after the connection broke: as [`Client::on_lost`] does.
    pub fn on_restored(&self, call: impl Fn(&Client, &Restored) + Send + Sync + 'static) {
        self.0.handle(|handlers| handlers.restored.push(Arc::new(call)));
    }

    /// The process at the other end, as the kernel names it: the one that began to listen on the socket (`SO_PEERCRED`, unix(7)). A
    /// server that was restarted goes on with the socket of the one before, which may be named then.
    pub fn peer(&self) -> Peer {
        self.0.peer()
    }

    /// Hands memory over under a name. When it returns the object is published, and the memory may be dropped here.
    ///
    /// # Errors
    /// [`Error::Broker`] if it is refused: nothing of it is kept then; [`Error::Memory`] for an array that is not inside its
    /// part; [`Error::Peer`], [`Error::System`], [`Error::Interrupted`].
    pub fn put(&self, put: &Put<'_>) -> Result<Published> {
        put::put(&self.0, put)
    }

    /// Gets a lease of an object. Waits as long as the get says.
    ///
    /// # Errors
    /// [`Error::Broker`]: with the code `absent` if there is none, `timeout` if none came in time, `differs` if it is not as
    /// expected; [`Error::Peer`], [`Error::System`], [`Error::Interrupted`].
    pub fn get(&self, get: &Get) -> Result<Lease> {
        get::get(&self.0, get)
    }

    /// Gets leases of several objects as they are at one moment, all or none. Waits up to `wait` until all exist; what the gets
    /// themselves say of a wait does not count.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn get_all(&self, gets: &[Get], wait: Option<Duration>) -> Result<Vec<Lease>> {
        get::get_all(&self.0, gets, wait)
    }

    /// Gets a lease of an object, or the right to be the one that makes it. Of several processes that ask at once and find nothing
    /// one gets the claim; the others wait, as long as their gets say, until it is put, or the claim passes on to them.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn get_or_claim(&self, get: &Get, claim: &ClaimOf) -> Result<Found> {
        get::get_or_claim(&self.0, get, claim)
    }

    /// The objects whose names begin with `prefix` and that this user may read, in the order of their names.
    ///
    /// It is asked for page by page: objects that come or go meanwhile may be missing.
    ///
    /// # Errors
    /// [`Error::Peer`], [`Error::System`], [`Error::Interrupted`].
    pub fn list(&self, prefix: &str) -> Result<Vec<Summary>> {
        let (mut all, mut after) = (Vec::<Summary>::new(), None);
        loop {
            let list = Message::List(List { prefix: prefix.to_owned(), after });
            match self.ask(&list)? {
                (Message::Objects(objects), _) if objects.objects.is_empty() && objects.more => return Err(endless()),
                (Message::Objects(objects), _) => {
                    all.extend(objects.objects);
                    after = all.last().map(|last| last.name.clone());
                    if !objects.more || after.is_none() {
                        return Ok(all);
                    }
                }
                (other, _) => return Err(unexpected(&other, "objects")),
            }
        }
    }

    /// All that is known of a version of an object: by default of the current one.
    ///
    /// # Errors
    /// [`Error::Broker`] with the code `absent` if there is none; [`Error::Peer`], [`Error::System`], [`Error::Interrupted`].
    pub fn stat(&self, name: &str, version: Option<u64>) -> Result<ObjectInfo> {
        check_name(name)?;
        let wrong = |message: String| Error::from(ProtocolError::Content(message));
        match self.ask(&Message::Stat(Stat { name: name.to_owned(), version }))? {
            (Message::Version(version), fds) => {
                let metadata = match &version.metadata {
                    None => Ok(Check::new()),
                    Some(Table::Inline(text)) => text.read(),
                    Some(Table::Length(length)) => {
                        let fd = fds.first().ok_or_else(|| wrong("metadata came without a descriptor".to_owned()))?;
                        let text = super::table::read(fd.as_fd(), *length, MAX_METADATA).map_err(wrong)?;
                        serde_json::from_str(&text)
                    }
                };
                let metadata = metadata.map_err(|error| wrong(format!("the metadata is wrong: {error}")))?;
                Ok(ObjectInfo { version: *version, metadata })
            }
            (other, _) => Err(unexpected(&other, "version")),
        }
    }

    /// The leases that are held of objects whose names begin with `prefix` and that this user may read, and what is held for each
    /// user.
    ///
    /// # Errors
    /// [`Error::Peer`], [`Error::System`], [`Error::Interrupted`].
    pub fn who(&self, prefix: &str) -> Result<Holders> {
        let (mut all, mut after) = (Vec::<HeldLease>::new(), None);
        loop {
            match self.ask(&Message::Who(Who { prefix: prefix.to_owned(), after }))? {
                (Message::Leases(leases), _) if leases.leases.is_empty() && leases.more => return Err(endless()),
                (Message::Leases(leases), _) => {
                    all.extend(leases.leases);
                    after = all.last().map(|last| last.number);
                    if !leases.more || after.is_none() {
                        return Ok(Holders { leases: all, totals: leases.totals });
                    }
                }
                (other, _) => return Err(unexpected(&other, "leases")),
            }
        }
    }

    /// Takes a name away. Readers keep what they hold, and the broker keeps the memory until the last of them ends.
    ///
    /// # Errors
    /// [`Error::Broker`]: with the code `absent` if there is none, `denied` if it is another user's; [`Error::Peer`],
    /// [`Error::System`], [`Error::Interrupted`].
    pub fn delete(&self, name: &str) -> Result<()> {
        check_name(name)?;
        // Sent again after the connection broke, it deletes nothing twice.
        let request = Some(new_token()?);
        match self.ask(&Message::Delete(Delete { name: name.to_owned(), request }))? {
            (Message::Done(_), _) => {
                self.0.forget_put(name);
                Ok(())
            }
            (other, _) => Err(unexpected(&other, "done")),
        }
    }

    /// Ends the wait of a request that another thread made: it fails with [`Error::Broker`] and the code `stopped`.
    ///
    /// # Errors
    /// [`Error::Peer`], [`Error::System`].
    pub fn stop(&self) -> Result<()> {
        self.0.stop()
    }

    /// Asks for what comes in one record.
    fn ask(&self, message: &Message) -> Result<(Message, Vec<OwnedFd>)> {
        self.0.request(Duration::ZERO, |exchange, _| {
            exchange.send_first(message, &[])?;
            exchange.receive("for the broker's answer")
        })
    }
}

impl AsFd for Client {
    /// Readable when the broker has closed the connection, while no request is under way. The descriptor stays the same when the
    /// connection is made again; an epoll(7) must be given it anew then.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The broker says that there is more, and gives nothing to go on from.
fn endless() -> Error {
    ProtocolError::Content("a page without entries says that there are more".to_owned()).into()
}

/// What a request is called, so that it is done once.
fn new_token() -> Result<Token> {
    let mut bytes = [0; 16];
    // Requests of up to 256 bytes are neither cut short nor interrupted once the pool is initialised. See getrandom(2).
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(_) => Ok(Token(bytes)),
        Err(errno) => Err(Error::system("get random bytes", errno)),
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
