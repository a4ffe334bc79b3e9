//! `_native.Client`: requests to a broker. `vmmfd.Broker` wraps it.

use std::{
    os::fd::{IntoRawFd, RawFd},
    path::PathBuf,
    sync::{Arc, Weak},
};

use pyo3::{PyTraverseError, PyVisit, prelude::*, types::PyList};
use serde::Serialize;
use vmmfd::{
    bindings::lock,
    broker::{self, ClaimOf, Condition, Found, LeasedPart, Lifetime, Put, RecallOf},
    channel::{BrokerPath, Trust},
    memory::Rdma,
    session::Config,
};

use crate::{
    client_put::{self, Plan},
    connections::{Connections, Purpose},
    device::Wanted,
    driver,
    error::{Failure, Outcome},
    json,
    lazy::Lazy,
    lease::{Claim, Lease, Prepared},
    leased_memory::{Opening, Selection},
    memory::{BrokerAddress, PickledAddress, RdmaOption},
    requests::{GetOptions, condition, lifetime, wait_time},
    signals, suspend,
    text::{FilePath, Text},
    time::required,
    watch::Watch,
};

/// A client of a broker.
#[pyclass(name = "Client", module = "vmmfd._native", frozen, weakref)]
pub(crate) struct Client(pub(crate) Arc<Connections>);

#[pymethods]
impl Client {
    /// Connects. Waits up to `wait` seconds for a broker to listen.
    #[new]
    #[pyo3(signature = (path, backend, timeout, wait, trust))]
    fn new(
        py: Python<'_>,
        path: Option<FilePath>,
        backend: Option<Text>,
        timeout: &Bound<'_, PyAny>,
        wait: &Bound<'_, PyAny>,
        trust: Vec<u32>,
    ) -> Outcome<Self> {
        let backend = driver::backend(backend.as_deref())?.to_owned();
        let timeout = required(timeout, "timeout")?;
        if timeout.is_zero() {
            return Err(Failure::invalid(
                "timeout=0 leaves the broker no time to answer: give a positive number of seconds",
            ));
        }
        let wait = required(wait, "wait")?;
        let path = path
            .map(|FilePath(path)| path)
            .or_else(|| std::env::var_os("VMMFD_BROKER_SOCKET").filter(|path| !path.is_empty()).map(Into::into));
        let found = BrokerPath::find(path.as_deref())?;
        let path = found.path().to_owned();
        let config =
            Config::default().timeout(timeout).trust(Trust { uids: trust.clone() }).cancel(&signals::cancel()?);
        let connections = Arc::new(Connections::new(BrokerAddress { path, backend, timeout, trust }, config, wait));
        connections.call(py, Purpose::Any, |_| Ok(())).map_err(|failure| match failure {
            Failure::Library(error) => Failure::Library(found.complete(error)),
            other => other,
        })?;
        Ok(Self(connections))
    }

    /// The path of the broker's socket.
    #[getter]
    fn path(&self) -> PathBuf {
        self.0.place.path.clone()
    }

    #[getter]
    fn backend(&self) -> &str {
        &self.0.place.backend
    }

    /// The data another process needs to connect to the same broker.
    #[getter]
    fn place(&self) -> PickledAddress {
        self.0.place.sent()
    }

    #[getter]
    fn is_closed(&self) -> bool {
        self.0.closed.is_set()
    }

    /// Interrupts the waits of other threads. Leases remain valid.
    fn close(&self, py: Python<'_>) {
        self.0.close(py);
    }

    /// Publishes memory.
    #[pyo3(signature = (name, parts, *, replace=None, metadata=None, mode=None, lifetime=None, keep=None, announced=None,
                        group=None, wait=None))]
    #[allow(clippy::too_many_arguments)]
    fn put(
        &self,
        py: Python<'_>,
        name: Text,
        parts: Vec<Plan<'_>>,
        replace: Option<&Bound<'_, PyAny>>,
        metadata: Option<&Bound<'_, PyAny>>,
        mode: Option<u16>,
        lifetime: Option<&Bound<'_, PyAny>>,
        keep: Option<u32>,
        announced: Option<Vec<String>>,
        group: Option<Text>,
        wait: Option<&Bound<'_, PyAny>>,
    ) -> Outcome<(u64, String)> {
        self.0.check()?;
        let condition = condition(replace)?;
        let lifetime = lifetime.map(self::lifetime).transpose()?;
        let wait = wait_time(wait)?;
        let metadata = metadata.map(|metadata| json::from_mapping(metadata, "metadata")).transpose()?;
        let purpose = match lifetime {
            Some(Lifetime::Maker | Lifetime::Leased) => Purpose::Maker,
            // The name keeps its lifetime, which may be the maker's.
            None if condition != Condition::New => Purpose::Maker,
            _ => Purpose::Any,
        };
        if announced.is_some() != group.is_some() {
            return Err(Failure::invalid(
                "parts names all parts of the version, and group identifies its puts: give both",
            ));
        }
        let parts: Vec<client_put::PlannedPart> =
            parts.into_iter().map(client_put::PlannedPart::of).collect::<Outcome<_>>()?;
        let published = self.0.call(py, purpose, |client| {
            let mut put = Put::new(&*name).condition(condition);
            for part in &parts {
                put = put.part(part.finish()?);
            }
            if let (Some(announced), Some(group)) = (announced, group) {
                put = put.together(announced, group.0, wait.unwrap_or_default());
            }
            put = metadata.into_iter().fold(put, Put::metadata);
            put = mode.into_iter().fold(put, Put::mode);
            put = lifetime.into_iter().fold(put, Put::lifetime);
            put = keep.into_iter().fold(put, Put::keep);
            Ok(client.put(&put)?)
        })?;
        Ok((published.version, published.id))
    }

    /// Copies arrays that are not in shared memory, and returns the part.
    #[pyo3(signature = (values, part, *, device=None, copy=None, rdma=RdmaOption(Rdma::Auto)))]
    fn plan<'py>(
        &self,
        py: Python<'py>,
        values: &Bound<'py, PyList>,
        part: Text,
        device: Option<Wanted>,
        copy: Option<bool>,
        rdma: RdmaOption,
    ) -> Outcome<Plan<'py>> {
        self.0.check()?;
        client_put::plan(py, &self.0.place.backend, values, part.0, device, copy, rdma)
    }

    /// Leases an object, and maps it.
    fn get(&self, py: Python<'_>, name: Text, mut options: GetOptions<'_>) -> Outcome<Lease> {
        let opening = options.opening()?;
        let get = options.request(&name, &opening.selection)?;
        let leased = self.0.call(py, Purpose::Any, |client| self.0.open(client.get(&get)?, opening))?;
        Ok(Lease::new(leased))
    }

    /// Returns a descriptor of an object's only allocation, which the caller must close. Maps nothing. The lease ends: the descriptor keeps
    /// the memory.
    fn descriptor(&self, py: Python<'_>, name: Text, options: GetOptions<'_>) -> Outcome<RawFd> {
        let get = options.request(&name, &Selection::default())?;
        let segments = self.0.call(py, Purpose::Any, |client| {
            let parts = client.get(&get)?.into_parts().into_iter();
            Ok(parts.map(LeasedPart::into_segments).collect::<vmmfd::Result<Vec<_>>>()?)
        })?;
        let mut descriptors: Vec<_> = segments.into_iter().flatten().map(|(_, fd)| fd).collect();
        match (descriptors.pop(), descriptors.len()) {
            (Some(fd), 0) => Ok(fd.into_raw_fd()),
            (_, others) => Err(Failure::invalid(format!("{:?} has {} allocations, not one", &*name, others + 1))),
        }
    }

    /// Checks the arguments of a get.
    fn check_get(&self, name: Text, mut options: GetOptions<'_>) -> Outcome<()> {
        let opening = options.opening()?;
        Ok(options.request(&name, &opening.selection)?.check()?)
    }

    /// Leases several objects as of one moment. `options` have the wait, the device and `copy_on_write`.
    fn get_all(
        &self,
        py: Python<'_>,
        requests: Vec<(Text, GetOptions<'_>)>,
        mut options: GetOptions<'_>,
    ) -> Outcome<Vec<Lease>> {
        let Opening { device, copy_on_write, .. } = options.opening()?;
        let wait = options.wait()?;
        let mut gets = Vec::with_capacity(requests.len());
        let mut openings = Vec::with_capacity(requests.len());
        for (name, mut options) in requests {
            let opening = Opening { device, copy_on_write, ..options.opening()? };
            gets.push(options.request(&name, &opening.selection)?);
            openings.push(opening);
        }
        let leased = self.0.call(py, Purpose::Any, |client| {
            let leases = client.get_all(&gets, wait)?.into_iter().zip(openings);
            leases.map(|(lease, opening)| self.0.open(lease, opening)).collect::<Outcome<Vec<_>>>()
        })?;
        Ok(leased.into_iter().map(Lease::new).collect())
    }

    /// Leases an object, or returns the claim to create it.
    fn claim<'py>(
        &self,
        py: Python<'py>,
        name: Text,
        part: Option<Text>,
        group: Option<Text>,
        mut options: GetOptions<'_>,
    ) -> Outcome<Bound<'py, PyAny>> {
        let of = match (part, group) {
            (None, None) => ClaimOf::whole(),
            (Some(Text(part)), Some(Text(group))) => ClaimOf::part(part, group),
            _ => {
                return Err(Failure::invalid(
                    "part names the part to create, and group identifies the version's puts: give both",
                ));
            }
        };
        let opening = options.opening()?;
        // Also without a wait: a get that has no wait is no claim.
        let get = options.request(&name, &opening.selection)?.wait(options.wait()?.unwrap_or_default());
        let found = self.0.call_with(py, Purpose::Any, |client| {
            match client.get_or_claim(&get, &of)? {
                Found::Lease(lease) => {
                    drop(client);
                    self.0.open(lease, opening).map(Ok)
                }
                // The claim keeps the connection: cancelling another wait on it would release the claim.
                Found::Claim(claim) => Ok(Err(Claim::new(claim, client))),
                _ => Err(Failure::invalid(
                    "the library returned an unknown result: install library and package of one release",
                )),
            }
        })?;
        Ok(match found {
            Ok(leased) => Bound::new(py, Lease::new(leased))?.into_any(),
            Err(claim) => Bound::new(py, claim)?.into_any(),
        })
    }

    /// Gets and imports a version that fits the addresses of a lease.
    fn prepare(&self, py: Python<'_>, lease: &Lease, name: Option<Text>, options: GetOptions<'_>) -> Outcome<Prepared> {
        let leased = lease.leased()?;
        let get = options.request(&name.map_or_else(|| leased.name(py), |Text(name)| name), &leased.selection)?;
        let prepared = self.0.call(py, Purpose::Any, |client| leased.prepare(client.get(&get)?))?;
        Ok(Prepared::new(prepared))
    }

    /// Gets a version and maps it at the addresses of a parked lease.
    fn unpark(&self, py: Python<'_>, lease: &Lease, name: Option<Text>, options: GetOptions<'_>) -> Outcome<()> {
        let leased = lease.leased()?;
        leased.check_parked()?;
        let get = options.request(&name.map_or_else(|| leased.name(py), |Text(name)| name), &leased.selection)?;
        self.0.call(py, Purpose::Any, |client| leased.unpark(client.get(&get)?))
    }

    /// Parks all leases of the process.
    fn suspend(&self, py: Python<'_>, keep_lease: bool, exports_unused: bool, own_copies: bool) -> Outcome<()> {
        suspend::suspend(py, &self.0, keep_lease, exports_unused, own_copies)
    }

    /// Unparks the leases that [`Client::suspend`] parked.
    fn resume(&self, py: Python<'_>, newest: bool) -> Outcome<()> {
        suspend::resume(py, &self.0, newest)
    }

    /// Returns a lease of a byte range of a part, shared by all received arrays there. Returns None if the name now has another object at
    /// this version.
    #[allow(clippy::too_many_arguments)]
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
        let shared = || lock(&self.0.shared);
        self.0.check()?;
        let known = shared().get(&key).and_then(Weak::upgrade);
        if let Some(leased) = known {
            return Ok(Some(Lease::new(leased)));
        }
        let range = Some(start..start.saturating_add(length));
        let selection = Selection { parts: Some(vec![key.1.clone()]), arrays: None, range };
        let get = selection.get(name).version(version);
        let opening = Opening { selection, ..Opening::default() };
        let leased = self.0.call(py, Purpose::Any, |client| {
            let lease = client.get(&get)?;
            if lease.id() != key.0 {
                return Ok(None);
            }
            self.0.open(lease, opening).map(Some)
        })?;
        let Some(leased) = leased else { return Ok(None) };
        let mut shared = shared();
        shared.retain(|_, leased| leased.strong_count() > 0);
        shared.insert(key, Arc::downgrade(&leased));
        Ok(Some(Lease::new(leased)))
    }

    /// Returns the objects whose names start with `prefix`, as dicts.
    fn list(&self, py: Python<'_>, prefix: Text) -> Outcome<Lazy> {
        let found = self.0.call(py, Purpose::Any, |client| Ok(client.list(&prefix)?))?;
        let found = py.detach(|| found.iter().map(json::value).collect::<Outcome<Vec<_>>>())?;
        Ok(Lazy::of(found, |py, summary| Ok(json::to_python(py, &summary)?.unbind())))
    }

    /// Describes a version as a dict.
    #[pyo3(signature = (name, version=None))]
    fn stat<'py>(&self, py: Python<'py>, name: Text, version: Option<u64>) -> Outcome<Bound<'py, PyAny>> {
        let found = self.0.call(py, Purpose::Any, |client| Ok(client.stat(&name, version)?))?;
        let metadata = json::read(py, &found.metadata_text())?;
        let described = json::serialized(py, found)?;
        described.set_item("metadata", metadata)?;
        Ok(described)
    }

    /// Returns the leases and the users' totals as a dict.
    fn who<'py>(&self, py: Python<'py>, prefix: Text) -> Outcome<Bound<'py, PyAny>> {
        self.report(py, |client| client.who(&prefix))
    }

    /// Asks the holders of versions to release them, and waits up to `wait` seconds. Returns the result as a dict.
    #[pyo3(signature = (name, version, earlier, wait))]
    fn recall<'py>(
        &self,
        py: Python<'py>,
        name: Text,
        version: Option<u64>,
        earlier: bool,
        wait: &Bound<'py, PyAny>,
    ) -> Outcome<Bound<'py, PyAny>> {
        let wait = required(wait, "wait")?;
        let of = match (version, earlier) {
            (Some(version), _) => RecallOf::Version(version),
            (None, true) => RecallOf::Earlier,
            (None, false) => RecallOf::Current,
        };
        self.report(py, |client| client.recall(&name, of, wait))
    }

    /// Deletes a name.
    fn delete(&self, py: Python<'_>, name: Text) -> Outcome<()> {
        self.0.call(py, Purpose::Any, |client| Ok(client.delete(&name)?))
    }

    /// Follows the events of names.
    #[pyo3(signature = (prefix, after=None))]
    fn watch(&self, py: Python<'_>, prefix: Text, after: Option<(Text, u64)>) -> Outcome<Watch> {
        self.0.call_with(py, Purpose::Any, |client| {
            Watch::new(client, &prefix, after.map(|(Text(instance), seq)| (instance, seq)))
        })
    }

    /// Calls `call` for each lost lease, with name, version, id, kind and reason.
    fn on_lost(&self, call: Py<PyAny>) -> Outcome<()> {
        self.0.check()?;
        self.0.handlers.add(&self.0.handlers.lost, call);
        Ok(())
    }

    /// Calls `call` for each restored lease, with name, version, id, and whether it was rebuilt.
    fn on_restored(&self, call: Py<PyAny>) -> Outcome<()> {
        self.0.check()?;
        self.0.handlers.add(&self.0.handlers.restored, call);
        Ok(())
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        for handlers in [&self.0.handlers.lost, &self.0.handlers.restored] {
            // Free, or in a fork held by a thread of the parent.
            if let Ok(handlers) = handlers.try_lock() {
                handlers.iter().try_for_each(|handler| visit.call(handler))?;
            }
        }
        Ok(())
    }

    fn __clear__(&self) {
        for handlers in [&self.0.handlers.lost, &self.0.handlers.restored] {
            let gone = std::mem::take(&mut *lock(handlers));
            drop(gone);
        }
    }
}

impl Client {
    /// Asks the broker, and converts its answer to Python's types.
    fn report<'py, T: Serialize + Send>(
        &self,
        py: Python<'py>,
        ask: impl FnOnce(&broker::Client) -> vmmfd::Result<T> + Send,
    ) -> Outcome<Bound<'py, PyAny>> {
        let answer = self.0.call(py, Purpose::Any, |client| Ok(ask(client)?))?;
        json::serialized(py, answer)
    }
}
