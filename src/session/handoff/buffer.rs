//! A buffer to share: memory, its content, and whose turn it is.

use std::{
    ops::Range,
    os::fd::{AsFd, AsRawFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use super::{
    content::{Boxed, Content, Tick},
    gate::{Entered, Gate, Turn},
};
use crate::{
    array::ArrayDescriptor,
    driver::Access,
    error::{Error, ErrorCode, PeerError, Result},
    memory::{Device, Region, Shared, Spec},
    session::{Config, Event, Observer, activate},
    wire::ByteRange,
};

/// Memory to share, with its content.
#[derive(Debug)]
pub struct Buffer<'a> {
    shared: Arc<Shared>,
    content: Boxed<'a>,
    array: Option<ArrayDescriptor>,
    /// Whether it is sealed once it is filled.
    to_be_sealed: bool,
    /// Whether it holds its content. Changed only by the one that has the buffer alone.
    filled: AtomicBool,
    gate: Gate,
}

impl<'a> Buffer<'a> {
    /// A buffer in memory that exists already, and that others of this process may hold too.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`](crate::error::MemoryError::OutOfRange) or
    /// [`MemoryError::Array`](crate::error::MemoryError::Array) if the array is not inside the memory.
    pub fn new(
        shared: impl Into<Arc<Shared>>,
        content: impl Content + 'a,
        array: Option<ArrayDescriptor>,
    ) -> Result<Self> {
        let shared = shared.into();
        if let Some(array) = &array {
            array.check(shared.size())?;
        }
        let (content, filled) = (Boxed(Box::new(content)), AtomicBool::new(false));
        Ok(Self { shared, content, array, to_be_sealed: false, filled, gate: Gate::default() })
    }

    /// Makes the device ready, allocates and maps memory, and exports it unless it is to be sealed. Serving fills it. Blocks for as
    /// long as the driver takes.
    ///
    /// # Errors
    /// Those of [`Shared::create`] and [`Buffer::new`]; [`Error::Interrupted`].
    pub fn create(
        device: &Device,
        spec: impl Into<Spec>,
        content: impl Content + 'a,
        array: Option<ArrayDescriptor>,
        config: &Config,
        observer: Observer<'_>,
    ) -> Result<Self> {
        let (cancel, spec) = (config.cancellation()?, spec.into());
        activate(device, &mut || cancel.check(), observer)?;
        let shared = Shared::create(device, spec)?;
        let (description, timings) = (shared.describe()?, shared.timings());
        observer(Event::Created { description: &description, elapsed: timings.create });
        observer(Event::Mapped { address: shared.address(), access: shared.access(), elapsed: timings.map });
        let buffer = Self { to_be_sealed: spec.is_sealed(), ..Self::new(shared, content, array)? };
        if !spec.is_sealed() {
            buffer.export(observer)?;
        }
        Ok(buffer)
    }

    /// The memory.
    pub fn shared(&self) -> &Shared {
        &self.shared
    }

    pub(super) fn content(&self) -> &(dyn Content + 'a) {
        &*self.content.0
    }

    pub(super) fn array(&self) -> Option<&ArrayDescriptor> {
        self.array.as_ref()
    }

    pub(super) fn turn(
        &self,
        turn: Turn,
        every: std::time::Duration,
        tick: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Entered<'_>> {
        self.gate.enter(turn, every, tick)
    }

    pub(super) fn is_filled(&self) -> bool {
        self.filled.load(Ordering::Acquire)
    }

    /// A consumer is about to change it: what it holds is undefined until it is filled again.
    pub(super) fn spoil(&self) {
        self.filled.store(false, Ordering::Release);
    }

    /// Writes its content unless it holds it, and seals it if it is to be sealed. To be called with the buffer alone.
    pub(super) fn fill(&self, tick: Tick<'_>, observer: Observer<'_>) -> Result<()> {
        if self.is_filled() {
            return Ok(());
        }
        if self.shared.access() == Access::ReadWrite {
            self.content().fill(&self.shared, tick)?;
            self.shared.clear_padding()?;
            self.shared.synchronize()?;
        }
        if self.to_be_sealed && self.shared.access() == Access::ReadWrite {
            let begun = Instant::now();
            let enforced = self.shared.seal()?;
            observer(Event::Sealed { enforced, elapsed: begun.elapsed() });
            self.export(observer)?;
        }
        self.filled.store(true, Ordering::Release);
        Ok(())
    }

    /// Exports what is to be sent before a consumer waits for it.
    fn export(&self, observer: Observer<'_>) -> Result<()> {
        let begun = Instant::now();
        let fds = match (self.shared.pool(), self.shared.chunks(0..self.shared.size())?) {
            (Some(pool), _) => vec![pool.export()?.as_raw_fd()],
            (None, Some((_, chunks))) => chunks.iter().map(|chunk| chunk.as_fd().as_raw_fd()).collect(),
            (None, None) => Vec::new(),
        };
        observer(Event::Exported { fds: &fds, elapsed: begun.elapsed() + self.shared.timings().export });
        Ok(())
    }

    /// The bytes that a consumer asks for.
    pub(super) fn range(&self, asked: Option<ByteRange>) -> Result<Range<u64>> {
        let size = self.shared.size();
        let Some(asked) = asked else { return Ok(0..size) };
        asked.within(size).ok_or_else(|| {
            let ByteRange { offset, length } = asked;
            let message = format!("{length} bytes from {offset} on were asked for, of a buffer of {size} bytes");
            Error::Peer(PeerError::Mismatch { code: ErrorCode::Range, message })
        })
    }
}
