//! The connections to a broker, and what the program wants to know of them.

use std::{
    collections::HashMap,
    process,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use pyo3::prelude::*;
use vmmfd::{
    broker::{self, LossReason, Lost, Restored},
    fork::ProcessIdentity,
    memory::Selector,
    session::Config,
};

use crate::{
    driver,
    error::{Failure, Outcome},
    leased_memory::{Leased, Selection},
    memory::Place,
    signals::{self, Ended},
};

/// How many connections that are not in use are kept.
const IDLE: usize = 8;

/// The connections to a broker: one for each call that is under way at once, so that a call never waits for that of another
/// thread, and can be ended.
pub(crate) struct Connections {
    pub(crate) place: Arc<Place>,
    config: Config,
    /// Leases of what other processes have sent arrays of.
    pub(crate) shared: Mutex<HashMap<Shared, Weak<Leased>>>,
    /// The process that made them.
    made_by: ProcessIdentity,
    pub(crate) ended: Ended,
    table: Mutex<Table>,
    pub(crate) handlers: Arc<Handlers>,
}

/// A version's id, a part, and which bytes of it.
type Shared = (String, String, u64, u64);

#[derive(Default)]
struct Table {
    idle: [Vec<broker::Client>; 2],
    busy: HashMap<u64, broker::Client>,
    next: u64,
}

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Anything. Leases are of such a connection, and keep it.
    Any,
    /// Puts of names that go with their maker, and so with the connection: no lease is to keep it.
    Make,
}

/// A connection that one call, watch or claim uses. It is given back when it is dropped.
pub(crate) struct Taken {
    of: Arc<Connections>,
    purpose: Purpose,
    number: u64,
    client: Option<broker::Client>,
}

impl Taken {
    pub(crate) fn ended(&self) -> &Ended {
        &self.of.ended
    }
}

impl std::ops::Deref for Taken {
    type Target = broker::Client;

    fn deref(&self) -> &broker::Client {
        self.client.as_ref().expect("it is there until it is dropped")
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let client = self.client.take();
        // In a fork another thread may have held the lock.
        if self.of.made_by.is_current() {
            let superfluous = {
                let mut table = self.of.table();
                let busy = table.busy.remove(&self.number);
                let idle = &mut table.idle[self.purpose as usize];
                match client {
                    Some(client)
                        if !self.of.ended.is_ended() && (idle.len() < IDLE || self.purpose == Purpose::Make) =>
                    {
                        idle.push(client);
                        (busy, None)
                    }
                    client => (busy, client),
                }
            };
            drop(superfluous);
        }
    }
}

impl Connections {
    pub(crate) fn new(place: Place, config: Config) -> Self {
        Self {
            place: Arc::new(place),
            config,
            shared: Mutex::default(),
            made_by: ProcessIdentity::current(),
            ended: Ended::default(),
            table: Mutex::default(),
            handlers: Arc::default(),
        }
    }

    /// Ends waits of other threads, and the connections that no lease needs. In a fork, and once more, it does nothing.
    pub(crate) fn close(&self, py: Python<'_>) {
        if !self.made_by.is_current() || self.ended.end() {
            return;
        }
        py.detach(|| {
            let (idle, busy) = {
                let mut table = self.table();
                let busy: Vec<broker::Client> = table.busy.values().cloned().collect();
                (std::mem::take(&mut table.idle), busy)
            };
            drop(idle);
            for client in busy {
                // A broker that does not answer is not needed for it: the wait looks whether it was closed.
                let _ = client.stop();
            }
        });
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A connection that no other call uses. Blocks while one is made.
    fn take(self: &Arc<Self>, purpose: Purpose) -> Outcome<Taken> {
        let idle = self.table().idle[purpose as usize].pop();
        let client = match idle {
            Some(client) => client,
            None => {
                let client = broker::Client::connect(&self.place.path, &self.config)?;
                let (lost, restored) = (Arc::clone(&self.handlers), Arc::clone(&self.handlers));
                client.on_lost(move |_, what| lost.lost(what));
                client.on_restored(move |_, what| restored.restored(what));
                client
            }
        };
        let mut table = self.table();
        let number = table.next;
        table.next += 1;
        table.busy.insert(number, client.clone());
        drop(table);
        Ok(Taken { of: Arc::clone(self), purpose, number, client: Some(client) })
    }

    /// Runs a request, with the GIL released, until it is answered, a signal's handler raises, or this is closed.
    pub(crate) fn call<T: Send>(
        self: &Arc<Self>,
        py: Python<'_>,
        purpose: Purpose,
        work: impl FnOnce(&Taken) -> Outcome<T> + Send,
    ) -> Outcome<T> {
        self.call_with(py, purpose, |client| work(&client))
    }

    /// As [`Connections::call`], of what may keep the connection.
    pub(crate) fn call_with<T: Send>(
        self: &Arc<Self>,
        py: Python<'_>,
        purpose: Purpose,
        work: impl FnOnce(Taken) -> Outcome<T> + Send,
    ) -> Outcome<T> {
        self.check()?;
        signals::run(py, &[&self.ended], || work(self.take(purpose)?))
    }

    /// Fails if it is closed, or of another process.
    pub(crate) fn check(&self) -> Outcome<()> {
        check_process(self.made_by, "connected to the broker", "connect again")?;
        match self.ended.is_ended() {
            true => Err(signals::closed()),
            false => Ok(()),
        }
    }

    /// Maps what was got. Blocks for the driver's calls.
    pub(crate) fn open(
        &self,
        lease: broker::Lease,
        device: Option<Selector>,
        selection: Selection,
        copy_on_write: bool,
    ) -> Outcome<Leased> {
        // What is there decides, unless the caller has: a broker may have memory of both.
        let backend = if self.place.backend == "auto" { lease.backend() } else { &self.place.backend };
        let driver = driver::driver(backend)?;
        let object = match copy_on_write {
            true => lease.open_copy_on_write(&driver, device)?,
            false => lease.open(&driver, device)?,
        };
        Ok(Leased::new(object, selection, Arc::clone(&self.place)))
    }
}

/// Fails in a fork of the process that made something.
pub(crate) fn check_process(made_by: ProcessIdentity, made: &str, remedy: &str) -> Outcome<()> {
    if made_by.is_current() {
        return Ok(());
    }
    let (parent, fork) = (made_by.pid(), process::id());
    Err(Failure::unusable(format!("process {parent} {made}, and process {fork} is a fork of it: {remedy}")))
}

/// What the program wants to be called with.
#[derive(Default)]
pub(crate) struct Handlers {
    /// Whether there ever was one.
    any: AtomicBool,
    // Their locks are taken by threads that are attached to Python alone: so no other one has them while the collector runs.
    pub(crate) lost: Mutex<Vec<Py<PyAny>>>,
    pub(crate) restored: Mutex<Vec<Py<PyAny>>>,
}

impl Handlers {
    fn lost(&self, lost: &Lost) {
        let kind = match lost.reason {
            LossReason::Unreachable => "unreachable",
            LossReason::Ended => "ended",
            LossReason::NotRestored(_) => "not-restored",
            _ => "unknown",
        };
        let version = lost.version;
        self.call(&self.lost, (&lost.name, version, &lost.id, kind, lost.reason.to_string()));
    }

    fn restored(&self, restored: &Restored) {
        let Restored { name, version, id, rebuilt, .. } = restored;
        self.call(&self.restored, (name, version, id, rebuilt));
    }

    /// Calls them on this thread, a connection's own. Not while the interpreter ends.
    fn call<T>(&self, handlers: &Mutex<Vec<Py<PyAny>>>, arguments: T)
    where
        T: Clone + for<'py> pyo3::call::PyCallArgs<'py>,
    {
        if !self.any.load(Ordering::Acquire) {
            return;
        }
        Python::try_attach(|py| {
            let handlers: Vec<Py<PyAny>> = {
                let handlers = handlers.lock().unwrap_or_else(PoisonError::into_inner);
                handlers.iter().map(|handler| handler.clone_ref(py)).collect()
            };
            for handler in handlers {
                if let Err(error) = handler.call1(py, arguments.clone()) {
                    error.write_unraisable(py, Some(handler.bind(py)));
                }
            }
        });
    }

    /// Adds one to those that are called `with` something.
    pub(crate) fn add(&self, with: &Mutex<Vec<Py<PyAny>>>, handler: Py<PyAny>) {
        with.lock().unwrap_or_else(PoisonError::into_inner).push(handler);
        self.any.store(true, Ordering::Release);
    }
}
