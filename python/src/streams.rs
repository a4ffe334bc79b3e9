//! The buffers of streams as memory of arrays, and what publishers and subscribers have in common.

#![allow(unsafe_code)]

use std::{
    os::fd::{BorrowedFd, OwnedFd, RawFd},
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use pyo3::prelude::*;
use vmmfd::{
    Error, Result,
    array::{ArrayDescriptor, ElementType, Order},
    bindings::lock,
    channel::{Trust, socket_path},
    fork::ProcessIdentity,
    memory::{Device, Region, Shared},
    session::{
        Config,
        order::Completion,
        stream::{Format, Loan, MAX_USER_BYTES, Published, Sample},
    },
};

use crate::{
    array::Array,
    closing::UntilClosed,
    error::{Failure, Outcome, shown, tolerant},
    memory::{Export, Memory, Tie},
    order,
    reaper::{Reaped, without_gil},
    signals,
    stream_user::{Given, StreamUser},
    text::{FilePath, Text},
    time::required,
};

/// Where the two sides of a stream meet.
pub(crate) enum Place {
    Path(PathBuf),
    Socket(OwnedFd),
}

impl Place {
    /// Converts a path, a connected socket, or `None` for this user's default path.
    pub(crate) fn of(given: &Bound<'_, PyAny>) -> Outcome<Self> {
        if given.hasattr("fileno")? {
            return socket(given).map(Self::Socket);
        }
        let path: Option<FilePath> = given.extract()?;
        Ok(Self::Path(socket_path(path.as_ref().map(|FilePath(path)| path.as_path()))?))
    }
}

/// Duplicates the descriptor of a Python socket, which stays open.
pub(crate) fn socket(given: &Bound<'_, PyAny>) -> Outcome<OwnedFd> {
    let py = given.py();
    let number = tolerant(py, given.call_method0("fileno").and_then(|number| number.extract::<RawFd>()))?;
    let Some(number) = number.filter(|number| *number >= 0) else {
        return Err(Failure::wrong_type(format!("{} is not an open socket", shown(given)?)));
    };
    // SAFETY: the caller's object keeps it open during this call. dup(2) reports a descriptor that is closed all the same.
    let duplicate = unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned();
    Ok(duplicate.map_err(|source| Error::System { action: "duplicate a socket".into(), source })?)
}

/// The configuration of one side: `limit` is the longest silence of the other side, and `name` its name for the caller.
pub(crate) fn config(limit: &Bound<'_, PyAny>, name: &str, trust: Vec<u32>) -> Outcome<Config> {
    let limit = required(limit, name)?;
    Ok(Config::default().timeout(limit).trust(Trust { uids: trust }).cancel(&signals::cancel()?))
}

/// A buffer of a pool. When its last array is gone, a sample is given back, and a loan that was not published is free again.
struct Pooled {
    /// `None` while it is dropped.
    content: Option<Reaped<Content>>,
    /// Whether the sample's stream is done, and any other work may use the sample.
    is_for_all: AtomicBool,
    device: Device,
    address: u64,
    size: u64,
    _tie: Export,
}

enum Content {
    /// `None` once it is published: the pool remains mapped. The lock is held for a few instructions at a time, also with the GIL held.
    Lent(Mutex<Option<Arc<Loan>>>, #[allow(dead_code, reason = "kept")] Arc<Shared>),
    /// With the stream that it was received for.
    Received(Option<Sample>, Option<Arc<StreamUser>>),
}

impl Drop for Content {
    fn drop(&mut self) {
        if let Self::Received(sample, _) = self
            && let Some(sample) = sample.take()
        {
            // The reaper has waited for the device. A sample for a stream was given back before.
            sample.give_back_idle();
        }
    }
}

impl Pooled {
    fn content(&self) -> &Content {
        self.content.as_deref().expect("it is taken only by a drop")
    }

    /// Drops it. Waits for the device, except for a sample for a stream. Blocks: release the GIL.
    fn release_now(mut self) {
        if self.user().is_none()
            && let Some(content) = self.content.take()
        {
            content.release_now();
        }
    }

    fn completion(&self) -> Completion {
        match self.content() {
            Content::Received(Some(sample), _) => sample.completion(),
            _ => Completion::Done,
        }
    }

    /// The loan, unless it is published or this is a sample.
    fn loan(&self) -> Result<Arc<Loan>> {
        let loan = match self.content() {
            Content::Lent(loan, _) => lock(loan).clone(),
            Content::Received(..) => None,
        };
        loan.ok_or_else(|| Error::Misuse { problem: "the buffer is published: take another loan".to_owned() })
    }

    /// Publishes the buffer: behind the work of a stream, or after the wait for the device.
    fn publish(&self, user: &[u8], stream: Option<Given>) -> Outcome<Published> {
        let stream = stream.map(|stream| StreamUser::new(&self.device, stream)).transpose()?;
        if stream.is_none() {
            self.device.wait_for_work()?;
        }
        let loan = self.loan()?;
        let Content::Lent(place, _) = self.content() else { unreachable!("it has a loan") };
        *lock(place) = None;
        match Arc::try_unwrap(loan) {
            Ok(loan) => Ok(match stream {
                Some(stream) => loan.publish_on(stream.stream(), user)?,
                None => loan.announce(user)?,
            }),
            Err(used) => {
                *lock(place) = Some(used);
                Err(Failure::invalid("another thread uses the buffer: publish it after that"))
            }
        }
    }
}

impl Memory for Pooled {
    fn extent(&self) -> (&Device, u64, u64) {
        (&self.device, self.address, self.size)
    }

    fn is_read_only(&self) -> bool {
        matches!(self.content(), Content::Received(..))
    }

    fn check_mapped(&self) -> Result<()> {
        if self.is_read_only() { Ok(()) } else { self.loan().map(drop) }
    }

    fn with(&self, work: &mut dyn FnMut(&dyn Region) -> Result<()>) -> Result<()> {
        match self.content() {
            Content::Received(Some(sample), _) => work(sample),
            _ => work(&*self.loan()?),
        }
    }

    fn user(&self) -> Option<&StreamUser> {
        match self.content() {
            Content::Received(_, user) if !self.is_for_all.load(Ordering::Acquire) => user.as_deref(),
            _ => None,
        }
    }
}

impl Drop for Pooled {
    /// Gives a sample for a stream back behind the stream's work, now. The reaper gives it back if that needs a wait, or fails, as while the
    /// stream is captured.
    fn drop(&mut self) {
        let is_for_all = *self.is_for_all.get_mut();
        if let Some(content) = &mut self.content
            && let Content::Received(Some(sample), Some(_)) = &mut **content
            && !is_for_all
        {
            without_gil(|| drop(sample.give_back_early()));
        }
    }
}

/// A buffer of a pool, with the arrays of the stream's format: a loan until it is published or closed, or a sample until it is closed.
#[pyclass(name = "Buffer", module = "vmmfd._native", frozen, weakref)]
pub(crate) struct Buffer {
    memory: UntilClosed<Arc<Pooled>>,
    /// The format of a loan.
    format: Arc<Format>,
    /// Of a sample.
    fields: Option<Fields>,
}

/// The number of a sample, the time of its publication in seconds, the number of skipped publications, and the user's bytes.
type Fields = (u64, f64, u64, Vec<u8>);

impl Buffer {
    pub(crate) fn lent(loan: Loan, pool: Arc<Shared>, format: Arc<Format>) -> Self {
        let (device, address, size) = (loan.device().clone(), loan.address(), loan.size());
        Self::new((device, address, size), Content::Lent(Mutex::new(Some(Arc::new(loan))), pool), format, None)
    }

    pub(crate) fn received(sample: Sample, reader: Option<&Arc<StreamUser>>) -> Self {
        let (device, address, size) = (sample.device().clone(), sample.address(), sample.size());
        let (time, user) = (sample.published_at().as_secs_f64(), sample.user().to_vec());
        let fields = Some((sample.number(), time, sample.skipped_before(), user));
        Self::new((device, address, size), Content::Received(Some(sample), reader.cloned()), Arc::default(), fields)
    }

    fn new(
        (device, address, size): (Device, u64, u64),
        content: Content,
        format: Arc<Format>,
        fields: Option<Fields>,
    ) -> Self {
        let tie = if matches!(content, Content::Received(..)) { Tie::Subscribed } else { Tie::Published };
        let (content, _tie) = (Some(Reaped::new(&device, content)), tie.counted(&device));
        let pooled = Arc::new(Pooled { content, is_for_all: AtomicBool::new(false), device, address, size, _tie });
        Self { memory: UntilClosed::new(pooled, ProcessIdentity::current()), format, fields }
    }

    fn pooled(&self) -> Outcome<Arc<Pooled>> {
        self.memory.get("the buffer is published or closed")
    }

    /// Whether a caller may take this sample, who wants one for a stream or for any work.
    pub(crate) fn suits(&self, wanted: Option<&Arc<StreamUser>>) -> bool {
        let pooled = lock(&self.memory.value);
        let user = pooled.as_ref().and_then(|pooled| pooled.user());
        user.is_none_or(|user| wanted.is_some_and(|wanted| wanted.stream() == user.stream()))
    }

    /// Waits for the sample's stream: then the sample suits all. Returns false if the publisher's work is lost.
    pub(crate) fn make_suit_all(&self) -> Outcome<bool> {
        let pooled = self.pooled()?;
        pooled.user().map_or(Ok(()), StreamUser::synchronize)?;
        pooled.is_for_all.store(true, Ordering::Release);
        Ok(pooled.completion() == Completion::Done)
    }

    fn format<'a>(&'a self, pooled: &'a Pooled) -> &'a Format {
        match pooled.content() {
            Content::Received(Some(sample), _) => sample.format(),
            _ => &self.format,
        }
    }
}

#[pymethods]
impl Buffer {
    /// Returns an array of the format.
    fn array(&self, name: Text) -> Outcome<Array> {
        let memory = self.pooled()?;
        if let Some(array) = self.format(&memory).array(&name).cloned() {
            return Array::new(memory, array);
        }
        let known = self.names()?.join(", ");
        let known = if known.is_empty() { "no arrays" } else { &known };
        Err(Failure::no_array(format!("the stream's format has no array {:?}: it has {known}", &*name)))
    }

    /// The names of the arrays of the format.
    fn names(&self) -> Outcome<Vec<String>> {
        let memory = self.pooled()?;
        Ok(self.format(&memory).arrays.iter().map(|(name, _)| name.clone()).collect())
    }

    /// The blob of the format.
    #[getter]
    fn blob(&self) -> Outcome<Vec<u8>> {
        let memory = self.pooled()?;
        Ok(self.format(&memory).blob.clone())
    }

    /// Returns all bytes.
    fn memory(&self) -> Outcome<Array> {
        let memory = self.pooled()?;
        let array = ArrayDescriptor::new(ElementType::U8, [memory.size()], Order::C)?;
        Array::new(memory, array)
    }

    /// The fields of a sample, also after it is closed.
    #[getter]
    fn fields(&self) -> Option<Fields> {
        self.fields.clone()
    }

    /// Whether the publisher's GPU has written a sample.
    #[getter]
    fn completion(&self) -> Outcome<&'static str> {
        Ok(order::name(self.pooled()?.completion()))
    }

    /// Publishes the buffer. Returns its number, and the number of subscribers that were given it at once.
    fn publish(&self, py: Python<'_>, user: &[u8], stream: Option<Given>) -> Outcome<(u64, usize)> {
        let pooled = self.pooled()?;
        if user.len() > MAX_USER_BYTES {
            let length = user.len();
            return Err(Failure::invalid(format!("user has {length} bytes, and at most {MAX_USER_BYTES} are allowed")));
        }
        signals::run(py, &[], || {
            let published = pooled.publish(user, stream)?;
            drop((self.memory.take(), pooled));
            Ok((published.number, published.delivered))
        })
    }

    #[getter]
    fn is_closed(&self) -> bool {
        self.memory.is_closed()
    }

    /// Returns the buffer to the pool, now or when its last array is gone.
    fn close(&self, py: Python<'_>) {
        let pooled = self.memory.take();
        py.detach(|| pooled.and_then(Arc::into_inner).map(Pooled::release_now));
    }
}
