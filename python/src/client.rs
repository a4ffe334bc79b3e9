//! `_native.Client`: the connections to a broker. `vmmfd.Broker` is made of it.

use std::{
    collections::HashMap,
    path::PathBuf,
    process,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use pyo3::{
    PyTraverseError, PyVisit,
    prelude::*,
    types::{PyBool, PyDict, PyList, PyString},
};
use serde::Serialize;
use vmmfd::{
    broker::{self, ClaimOf, Condition, Found, Get, Lifetime, LossReason, Lost, Put, Restored},
    channel::{Trust, broker_socket_path},
    memory::Selector,
    session::Config,
};

use crate::{
    client_put::{self, Plan},
    device, driver,
    error::{Failure, Outcome, shown, tolerant},
    json,
    lease::{Claim, Lease, Leased, Prepared, Selection},
    memory::Place,
    signals::{self, Ended},
    waiting::seconds,
    watch::Watch,
};

/// How many connections that are not in use are kept.
const IDLE: usize = 8;

/// The name of a part where its maker gives none.
pub(crate) const PART: &str = "all";

/// The connections to a broker: one for each call that is under way at once, so that a call never waits for that of another
/// thread, and can be ended.
#[pyclass(name = "Client", module = "vmmfd._native", frozen, weakref)]
pub(crate) struct Client(Arc<Connections>);

/// See [`Client`].
pub(crate) struct Connections {
    place: Arc<Place>,
    config: Config,
    /// Leases of what other processes have sent arrays of.
    shared: Mutex<HashMap<Shared, Weak<Leased>>>,
    /// The process that made them.
    pid: u32,
    ended: Ended,
    table: Mutex<Table>,
    handlers: Arc<Handlers>,
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
        if process::id() == self.of.pid {
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
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A connection that no other call uses. Blocks while one is made.
    pub(crate) fn take(self: &Arc<Self>, purpose: Purpose) -> Outcome<Taken> {
        let idle = self.table().idle[purpose as usize].pop();
        let client = match idle {
            Some(client) => client,
            None => {
                let client = broker::Client::connect(&self.place.path, &self.config)?;
                let (lost, restored) = (Arc::clone(&self.handlers), Arc::clone(&self.handlers));
                client.on_lost(move |what| lost.lost(what));
                client.on_restored(move |what| restored.restored(what));
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
        self.check()?;
        signals::run(py, &[&self.ended], || work(&self.take(purpose)?))
    }

    /// Fails if it is closed, or of another process.
    pub(crate) fn check(&self) -> Outcome<()> {
        check_process(self.pid, "connected to the broker", "connect again")?;
        match self.ended.is_ended() {
            true => Err(signals::closed()),
            false => Ok(()),
        }
    }

    /// Maps what was got. Blocks for the driver's calls.
    fn open(&self, lease: broker::Lease, device: Option<Selector>, selection: Selection) -> Outcome<Leased> {
        // What is there decides, unless the caller has: a broker may have memory of both.
        let backend = if self.place.backend == "auto" { lease.backend() } else { &self.place.backend };
        let driver = driver::driver(backend)?;
        Ok(Leased::new(lease.open(&driver, device)?, selection, Arc::clone(&self.place)))
    }
}

/// Fails in a fork of the process that made something.
pub(crate) fn check_process(pid: u32, made: &str, remedy: &str) -> Outcome<()> {
    match process::id() {
        this if this == pid => Ok(()),
        this => Err(Failure::unusable(format!("process {pid} {made}, and process {this} is a fork of it: {remedy}"))),
    }
}

/// What the program wants to be called with.
#[derive(Default)]
struct Handlers {
    lost: Mutex<Vec<Py<PyAny>>>,
    restored: Mutex<Vec<Py<PyAny>>>,
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
        Self::call(&self.lost, (&lost.name, version, &lost.id, kind, lost.reason.to_string()));
    }

    fn restored(&self, restored: &Restored) {
        let Restored { name, version, id, rebuilt, .. } = restored;
        Self::call(&self.restored, (name, version, id, rebuilt));
    }

    /// Calls them on this thread, a connection's own. Not while the interpreter ends.
    fn call<T>(handlers: &Mutex<Vec<Py<PyAny>>>, arguments: T)
    where
        T: Clone + for<'py> pyo3::call::PyCallArgs<'py>,
    {
        let is_empty = || handlers.lock().unwrap_or_else(PoisonError::into_inner).is_empty();
        if is_empty() {
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

    fn add(handlers: &Mutex<Vec<Py<PyAny>>>, handler: Py<PyAny>) {
        handlers.lock().unwrap_or_else(PoisonError::into_inner).push(handler);
    }
}

#[pymethods]
impl Client {
    /// Connects. Waits up to `timeout` seconds for a broker to listen.
    #[new]
    #[pyo3(signature = (path, backend, timeout, trust))]
    fn new(
        py: Python<'_>,
        path: Option<PathBuf>,
        backend: &str,
        timeout: &Bound<'_, PyAny>,
        trust: Vec<u32>,
    ) -> Outcome<Self> {
        let backend = match backend {
            "auto" | "cuda" | "host" => backend.to_owned(),
            other => return Err(Failure::invalid(format!("backend={other:?} is none of auto, cuda and host"))),
        };
        let timeout = seconds(timeout, "timeout")?
            .filter(|timeout| !timeout.is_zero())
            .ok_or_else(|| Failure::invalid("timeout=0 leaves the broker no time to answer: give some seconds"))?;
        let path =
            path.or_else(|| std::env::var_os("VMMFD_BROKER_SOCKET").filter(|path| !path.is_empty()).map(Into::into));
        if let Some(path) = path.as_ref().filter(|path| path.as_os_str().as_encoded_bytes().contains(&0)) {
            return Err(Failure::invalid(format!("path={path:?} has a null character in it: no file is called so")));
        }
        let path = broker_socket_path(path.as_deref())?;
        let config = Config::default()
            .with_timeout(timeout)
            .with_trust(Trust { uids: trust.clone() })
            .with_cancel(&signals::cancel()?);
        let connections = Arc::new(Connections {
            place: Arc::new(Place { path, backend, timeout, trust }),
            config,
            shared: Mutex::default(),
            pid: process::id(),
            ended: Ended::default(),
            table: Mutex::default(),
            handlers: Arc::default(),
        });
        connections.call(py, Purpose::Any, |_| Ok(()))?;
        Ok(Self(connections))
    }

    /// Where the broker listens.
    #[getter]
    fn path(&self) -> PathBuf {
        self.0.place.path.clone()
    }

    #[getter]
    fn backend(&self) -> &str {
        &self.0.place.backend
    }

    #[getter]
    fn is_closed(&self) -> bool {
        self.0.ended.is_ended()
    }

    /// Ends waits of other threads. Leases go on.
    fn close(&self, py: Python<'_>) {
        if self.0.pid != process::id() || self.0.ended.end() {
            return;
        }
        py.detach(|| {
            let (idle, busy) = {
                let mut table = self.0.table();
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

    /// Hands memory over.
    #[pyo3(signature = (name, parts, *, replace=None, metadata=None, mode=None, lifetime=None, keep=None, announced=None,
                        group=None, wait=None))]
    #[allow(clippy::too_many_arguments)]
    fn put(
        &self,
        py: Python<'_>,
        name: String,
        parts: Vec<Plan>,
        replace: Option<&Bound<'_, PyAny>>,
        metadata: Option<&Bound<'_, PyAny>>,
        mode: Option<u16>,
        lifetime: Option<&Bound<'_, PyAny>>,
        keep: Option<u32>,
        announced: Option<Vec<String>>,
        group: Option<String>,
        wait: Option<&Bound<'_, PyAny>>,
    ) -> Outcome<(u64, String)> {
        self.0.check()?;
        let condition = condition(replace)?;
        let lifetime = lifetime.map(self::lifetime).transpose()?;
        let wait = wait.map(|wait| seconds(wait, "wait")).transpose()?.flatten();
        let metadata = metadata.map(|metadata| json::from_mapping(metadata, "metadata")).transpose()?;
        let purpose = match lifetime {
            Some(Lifetime::Maker | Lifetime::Leased) => Purpose::Make,
            // It has the lifetime that its name had.
            None if condition != Condition::New => Purpose::Make,
            _ => Purpose::Any,
        };
        if announced.is_some() != group.is_some() {
            return Err(Failure::invalid(
                "parts names all parts of the version, and group what its puts have in common: give both",
            ));
        }
        let parts: Vec<client_put::Part> = parts.into_iter().map(client_put::Part::of).collect::<Outcome<_>>()?;
        let published = self.0.call(py, purpose, |client| {
            let parts = client_put::Handed::of(&parts)?;
            let mut put = Put::new(name).condition(condition);
            for part in parts.parts()? {
                put = put.part(part);
            }
            if let (Some(announced), Some(group)) = (announced, group) {
                put = put.together(announced, group, wait.unwrap_or_default());
            }
            put = metadata.into_iter().fold(put, Put::metadata);
            put = mode.into_iter().fold(put, Put::mode);
            put = lifetime.into_iter().fold(put, Put::lifetime);
            put = keep.into_iter().fold(put, Put::keep);
            Ok(client.put(&put)?)
        })?;
        Ok((published.version, published.id))
    }

    /// Copies what is no shared memory into some, and returns the part that it all is.
    #[pyo3(signature = (values, part, *, device=None, copy=None))]
    fn plan(
        &self,
        py: Python<'_>,
        values: Vec<(String, Bound<'_, PyAny>)>,
        part: String,
        device: Option<&Bound<'_, PyAny>>,
        copy: Option<bool>,
    ) -> Outcome<Plan> {
        self.0.check()?;
        let device = device.map(device::selector).transpose()?;
        client_put::plan(py, &self.0.place.backend, values, part, device, copy)
    }

    /// Gets a lease of an object, and maps it.
    #[pyo3(signature = (name, *, version=None, newer_than=None, parts=None, arrays=None, expect=None, digest=None, wait=None,
                        device=None))]
    #[allow(clippy::too_many_arguments)]
    fn get(
        &self,
        py: Python<'_>,
        name: &str,
        version: Option<u64>,
        newer_than: Option<u64>,
        parts: Option<Vec<String>>,
        arrays: Option<Vec<String>>,
        expect: Option<&Bound<'_, PyAny>>,
        digest: Option<&Bound<'_, PyAny>>,
        wait: Option<&Bound<'_, PyAny>>,
        device: Option<&Bound<'_, PyAny>>,
    ) -> Outcome<Lease> {
        let device = device.map(device::selector).transpose()?;
        let selection = Selection { parts, arrays };
        let get = request(name, version, newer_than, &selection, expect, digest)?;
        let get = waiting(get, wait)?;
        let leased = self.0.call(py, Purpose::Any, |client| {
            let lease = client.get(&get)?;
            self.0.open(lease, device, selection)
        })?;
        Ok(Lease::new(leased))
    }

    /// Gets leases of several objects as they are at one moment, each a tuple of name, version, newer_than, parts, arrays, expect, digest.
    #[pyo3(signature = (requests, *, wait=None, device=None))]
    fn get_all(
        &self,
        py: Python<'_>,
        requests: Vec<Wanted<'_>>,
        wait: Option<&Bound<'_, PyAny>>,
        device: Option<&Bound<'_, PyAny>>,
    ) -> Outcome<Vec<Lease>> {
        let device = device.map(device::selector).transpose()?;
        let wait = wait.map(|wait| seconds(wait, "wait")).transpose()?.flatten();
        let mut gets = Vec::with_capacity(requests.len());
        let mut selections = Vec::with_capacity(requests.len());
        for (name, version, newer_than, parts, arrays, expect, digest) in requests {
            let selection = Selection { parts, arrays };
            gets.push(request(&name, version, newer_than, &selection, expect.as_ref(), digest.as_ref())?);
            selections.push(selection);
        }
        let leased = self.0.call(py, Purpose::Any, |client| {
            let leases = client.get_all(&gets, wait)?.into_iter().zip(selections);
            leases.map(|(lease, selection)| self.0.open(lease, device, selection)).collect::<Outcome<Vec<_>>>()
        })?;
        Ok(leased.into_iter().map(Lease::new).collect())
    }

    /// Gets a lease, or the claim of what does not exist.
    #[pyo3(signature = (name, *, part=None, group=None, expect=None, digest=None, parts=None, arrays=None, wait=None, device=None))]
    #[allow(clippy::too_many_arguments)]
    fn claim<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        part: Option<String>,
        group: Option<String>,
        expect: Option<&Bound<'_, PyAny>>,
        digest: Option<&Bound<'_, PyAny>>,
        parts: Option<Vec<String>>,
        arrays: Option<Vec<String>>,
        wait: Option<&Bound<'_, PyAny>>,
        device: Option<&Bound<'_, PyAny>>,
    ) -> Outcome<Bound<'py, PyAny>> {
        let device = device.map(device::selector).transpose()?;
        let of = match (part, group) {
            (None, None) => ClaimOf::whole(),
            (Some(part), Some(group)) => ClaimOf::part(part, group),
            _ => {
                return Err(Failure::invalid(
                    "part names what is to be made, and group the version that it belongs to: give both",
                ));
            }
        };
        let selection = Selection { parts, arrays };
        let get = waiting(request(name, None, None, &selection, expect, digest)?, wait)?;
        self.0.check()?;
        let found = signals::run(py, &[&self.0.ended], || {
            let client = self.0.take(Purpose::Any)?;
            match client.get_or_claim(&get, &of)? {
                Found::Lease(lease) => {
                    drop(client);
                    self.0.open(lease, device, selection).map(Ok)
                }
                // It keeps the connection for itself: a wait on it that is broken off would end the claim.
                Found::Claim(claim) => Ok(Err(Claim::new(claim, client))),
            }
        })?;
        Ok(match found {
            Ok(leased) => Bound::new(py, Lease::new(leased))?.into_any(),
            Err(claim) => Bound::new(py, claim)?.into_any(),
        })
    }

    /// Gets a version that is to take the addresses of one that is mapped, and imports it.
    #[pyo3(signature = (lease, name=None, *, version=None, newer_than=None, expect=None, digest=None, wait=None))]
    #[allow(clippy::too_many_arguments)]
    fn prepare(
        &self,
        py: Python<'_>,
        lease: &Lease,
        name: Option<String>,
        version: Option<u64>,
        newer_than: Option<u64>,
        expect: Option<&Bound<'_, PyAny>>,
        digest: Option<&Bound<'_, PyAny>>,
        wait: Option<&Bound<'_, PyAny>>,
    ) -> Outcome<Prepared> {
        let leased = lease.leased()?;
        let name = match name {
            Some(name) => name,
            None => leased.read(py, |object| object.name().to_owned()),
        };
        let get = waiting(request(&name, version, newer_than, &leased.selection, expect, digest)?, wait)?;
        let prepared = self.0.call(py, Purpose::Any, |client| leased.prepare(client.get(&get)?))?;
        Ok(Prepared::new(prepared))
    }

    /// Gets the version that is to be where one was parked, and puts it there.
    #[pyo3(signature = (lease, name=None, *, version=None, expect=None, digest=None, wait=None))]
    #[allow(clippy::too_many_arguments)]
    fn unpark(
        &self,
        py: Python<'_>,
        lease: &Lease,
        name: Option<String>,
        version: Option<u64>,
        expect: Option<&Bound<'_, PyAny>>,
        digest: Option<&Bound<'_, PyAny>>,
        wait: Option<&Bound<'_, PyAny>>,
    ) -> Outcome<()> {
        let leased = lease.leased()?;
        leased.check_parked()?;
        let name = match name {
            Some(name) => name,
            None => leased.read(py, |object| object.name().to_owned()),
        };
        let get = waiting(request(&name, version, None, &leased.selection, expect, digest)?, wait)?;
        self.0.call(py, Purpose::Any, |client| leased.unpark(client.get(&get)?))
    }

    #[allow(clippy::too_many_arguments)]
    /// A lease of some bytes of a part of a version, shared by all arrays there that other processes sent. None if the version is another
    /// one by now.
    fn shared(
        &self,
        py: Python<'_>,
        name: &str,
        version: u64,
        id: String,
        part: String,
        start: u64,
        length: u64,
    ) -> Outcome<Option<Lease>> {
        let key = (id, part, start, length);
        let shared = || self.0.shared.lock().unwrap_or_else(PoisonError::into_inner);
        self.0.check()?;
        let known = shared().get(&key).and_then(Weak::upgrade);
        if let Some(leased) = known {
            return Ok(Some(Lease::of(leased)));
        }
        let selection = Selection { parts: Some(vec![key.1.clone()]), arrays: None };
        let get =
            request(name, Some(version), None, &selection, None, None)?.range(start..start.saturating_add(length));
        let leased = self.0.call(py, Purpose::Any, |client| {
            let lease = client.get(&get)?;
            if lease.id() != key.0 {
                return Ok(None);
            }
            self.0.open(lease, None, selection).map(Arc::new).map(Some)
        })?;
        let Some(leased) = leased else { return Ok(None) };
        let mut shared = shared();
        shared.retain(|_, leased| leased.strong_count() > 0);
        shared.insert(key, Arc::downgrade(&leased));
        Ok(Some(Lease::of(leased)))
    }

    /// The objects whose names begin with this, each a dict.
    fn list<'py>(&self, py: Python<'py>, prefix: String) -> Outcome<Bound<'py, PyList>> {
        let objects = self.0.call(py, Purpose::Any, |client| values(client.list(&prefix)?))?;
        dicts(py, &objects)
    }

    /// All that is known of a version, as a dict.
    #[pyo3(signature = (name, version=None))]
    fn stat<'py>(&self, py: Python<'py>, name: String, version: Option<u64>) -> Outcome<Bound<'py, PyDict>> {
        let (info, metadata) = self.0.call(py, Purpose::Any, |client| {
            let info = client.stat(&name, version)?;
            Ok((value(&info.version)?, info.metadata))
        })?;
        let dict = json::to_python(py, &info)?.cast_into::<PyDict>().map_err(PyErr::from)?;
        dict.set_item("metadata", json::to_dict(py, &metadata)?)?;
        Ok(dict)
    }

    /// The leases that are held, and what is held for each user: two lists of dicts.
    fn who<'py>(&self, py: Python<'py>, prefix: String) -> Outcome<(Bound<'py, PyList>, Bound<'py, PyList>)> {
        let (leases, totals) = self.0.call(py, Purpose::Any, |client| {
            let holders = client.who(&prefix)?;
            Ok((values(holders.leases)?, values(holders.totals)?))
        })?;
        Ok((dicts(py, &leases)?, dicts(py, &totals)?))
    }

    /// Takes a name away.
    fn delete(&self, py: Python<'_>, name: String) -> Outcome<()> {
        self.0.call(py, Purpose::Any, |client| Ok(client.delete(&name)?))
    }

    /// Follows what happens to names.
    #[pyo3(signature = (prefix, after=None))]
    fn watch(&self, py: Python<'_>, prefix: String, after: Option<(String, u64)>) -> Outcome<Watch> {
        self.0.check()?;
        signals::run(py, &[&self.0.ended], || Watch::new(self.0.take(Purpose::Any)?, &prefix, after))
    }

    /// Calls this for each lease that is lost, with name, version, id, kind and reason.
    fn on_lost(&self, call: Py<PyAny>) -> Outcome<()> {
        self.0.check()?;
        Handlers::add(&self.0.handlers.lost, call);
        Ok(())
    }

    /// Calls this for each lease that is held again, with name, version, id, and whether it was rebuilt.
    fn on_restored(&self, call: Py<PyAny>) -> Outcome<()> {
        self.0.check()?;
        Handlers::add(&self.0.handlers.restored, call);
        Ok(())
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        for handlers in [&self.0.handlers.lost, &self.0.handlers.restored] {
            // They are changed with the GIL alone.
            if let Ok(handlers) = handlers.try_lock() {
                handlers.iter().try_for_each(|handler| visit.call(handler))?;
            }
        }
        Ok(())
    }

    fn __clear__(&self) {
        for handlers in [&self.0.handlers.lost, &self.0.handlers.restored] {
            let gone = std::mem::take(&mut *handlers.lock().unwrap_or_else(PoisonError::into_inner));
            drop(gone);
        }
    }
}

/// One of several objects to get.
type Wanted<'py> = (
    String,
    Option<u64>,
    Option<u64>,
    Option<Vec<String>>,
    Option<Vec<String>>,
    Option<Bound<'py, PyAny>>,
    Option<Bound<'py, PyAny>>,
);

/// What is asked for.
fn request(
    name: &str,
    version: Option<u64>,
    newer_than: Option<u64>,
    selection: &Selection,
    expect: Option<&Bound<'_, PyAny>>,
    digest: Option<&Bound<'_, PyAny>>,
) -> Outcome<Get> {
    let mut get = Get::new(name);
    get = version.into_iter().fold(get, Get::version);
    get = newer_than.into_iter().fold(get, Get::newer_than);
    if let Some(parts) = &selection.parts {
        get = get.parts(parts);
    }
    if let Some(arrays) = &selection.arrays {
        get = get.arrays(arrays);
    }
    if let Some(expect) = expect {
        get = get.expect(json::from_mapping(expect, "expect")?);
    }
    if let Some(digest) = digest {
        if digest.is_instance_of::<PyString>() {
            let part = match selection.parts.as_deref() {
                Some([part]) => part,
                _ => PART,
            };
            return Ok(get.digest(part, digest.extract::<String>()?));
        }
        let digests: Option<HashMap<String, String>> = tolerant(digest.py(), digest.extract())?;
        let digests = digests.ok_or_else(|| {
            let given = json::type_of(digest);
            Failure::invalid(format!("digest is of type {given}: give a str, or a mapping of parts to their digests"))
        })?;
        get = digests.into_iter().fold(get, |get, (part, digest)| get.digest(part, digest));
    }
    Ok(get)
}

fn waiting(get: Get, wait: Option<&Bound<'_, PyAny>>) -> Outcome<Get> {
    let wait = wait.map(|wait| seconds(wait, "wait")).transpose()?.flatten();
    Ok(wait.into_iter().fold(get, Get::wait))
}

/// When a put succeeds: `False`, `True`, or the version that is to be replaced.
fn condition(replace: Option<&Bound<'_, PyAny>>) -> Outcome<Condition> {
    let Some(replace) = replace.filter(|replace| !replace.is_none()) else { return Ok(Condition::New) };
    if let Ok(replace) = replace.cast::<PyBool>() {
        return Ok(if replace.is_true() { Condition::Any } else { Condition::New });
    }
    match tolerant(replace.py(), replace.extract())? {
        Some(version) => Ok(Condition::Version(version)),
        None => Err(Failure::invalid(format!(
            "replace={} is none of False, True and the number of the version to replace",
            shown(replace)?
        ))),
    }
}

/// How long a name stays: `"deleted"`, `"maker"`, `"leased"`, or so long after its last lease.
fn lifetime(value: &Bound<'_, PyAny>) -> Outcome<Lifetime> {
    if value.is_instance_of::<PyString>() {
        return match value.extract::<String>()?.as_str() {
            "deleted" => Ok(Lifetime::Deleted),
            "maker" => Ok(Lifetime::Maker),
            "leased" => Ok(Lifetime::Leased),
            other => Err(Failure::invalid(format!(
                "lifetime={other:?} is none of \"deleted\", \"maker\", \"leased\", and no time in seconds"
            ))),
        };
    }
    let time = seconds(value, "lifetime")?.unwrap_or_default();
    Ok(Lifetime::Idle { ms: u64::try_from(time.as_millis()).unwrap_or(u64::MAX) })
}

fn value(of: &impl Serialize) -> Outcome<serde_json::Value> {
    serde_json::to_value(of).map_err(|error| Failure::unusable(format!("the broker's answer can't be shown: {error}")))
}

fn values<T: Serialize>(of: Vec<T>) -> Outcome<Vec<serde_json::Value>> {
    of.iter().map(value).collect()
}

fn dicts<'py>(py: Python<'py>, values: &[serde_json::Value]) -> Outcome<Bound<'py, PyList>> {
    let dicts: PyResult<Vec<_>> = values.iter().map(|value| json::to_python(py, value)).collect();
    Ok(PyList::new(py, dicts?)?)
}
