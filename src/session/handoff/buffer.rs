//! A buffer to share: memory, content, and turns.

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
    content::{BoxedContent, Content, Tick},
    gate::{Entered, Gate, Turn},
};
use crate::{
    array::ArrayDescriptor,
    driver::Access,
    error::{ErrorCode, Result},
    memory::{Device, Region, Shared, Spec},
    session::{Config, Event, Observer, activate, interrupt::interruptibly, link::mismatch},
    wire::ByteRange,
};

/// Memory to share, with its content.
#[derive(Debug)]
pub struct Buffer<'a> {
    shared: Arc<Shared>,
    content: BoxedContent<'a>,
    array: Option<ArrayDescriptor>,
    seal_after_fill: bool,
    /// Whether the memory holds its content. Changes only during an exclusive turn.
    filled: AtomicBool,
    gate: Gate,
}

impl<'a> Buffer<'a> {
    /// Creates a buffer from existing memory, which other owners in this process may hold too. Does not block.
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
        let content = BoxedContent(Box::new(content));
        let filled = AtomicBool::new(false);
        Ok(Self { shared, content, array, seal_after_fill: false, filled, gate: Gate::default() })
    }

    /// Activates the device, allocates and maps memory, and exports it unless `spec` seals it. Serving fills it, then seals and exports
    /// sealed memory. Blocks until the driver has finished; a cancellation interrupts the wait, and a thread then frees the memory.
    ///
    /// # Errors
    /// The errors of [`Shared::create`] and [`Buffer::new`]; [`Error::Interrupted`](crate::error::Error::Interrupted).
    pub fn create(
        device: &Device,
        spec: impl Into<Spec>,
        content: impl Content + 'a,
        array: Option<ArrayDescriptor>,
        config: &Config,
        observer: Observer<'_>,
    ) -> Result<Self> {
        let cancel = config.cancellation()?;
        let spec = spec.into();
        activate(device, &mut || cancel.check(), observer)?;
        let on = device.clone();
        let shared = interruptibly(&mut || cancel.check(), move || Shared::create(&on, spec))?;
        let description = shared.describe()?;
        let timings = shared.timings();
        observer(Event::Created { description: &description, elapsed: timings.create });
        observer(Event::Mapped { address: shared.address(), access: shared.access(), elapsed: timings.map });
        let buffer = Self { seal_after_fill: spec.is_sealed(), ..Self::new(shared, content, array)? };
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
        interval: std::time::Duration,
        tick: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Entered<'_>> {
        self.gate.enter(turn, interval, tick)
    }

    pub(super) fn is_filled(&self) -> bool {
        self.filled.load(Ordering::Acquire)
    }

    /// Marks the contents undefined until the next [`Buffer::fill`], because a consumer is about to write.
    pub(super) fn invalidate(&self) {
        self.filled.store(false, Ordering::Release);
    }

    /// Writes the content if it is missing, and seals the memory if requested. The caller has an exclusive turn.
    pub(super) fn fill(&self, tick: Tick<'_>, observer: Observer<'_>) -> Result<()> {
        if self.is_filled() {
            return Ok(());
        }
        if self.shared.access() == Access::ReadWrite {
            self.content().fill(&self.shared, tick)?;
            self.shared.clear_padding()?;
            self.shared.synchronize()?;
        }
        if self.seal_after_fill && self.shared.access() == Access::ReadWrite {
            let begun = Instant::now();
            let enforced = self.shared.seal()?;
            observer(Event::Sealed { enforced, elapsed: begun.elapsed() });
            self.export(observer)?;
        }
        self.filled.store(true, Ordering::Release);
        Ok(())
    }

    /// Exports the memory now, so that no consumer waits for it.
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

    /// Returns the requested bytes. `None` requests all of them.
    pub(super) fn range(&self, requested: Option<ByteRange>) -> Result<Range<u64>> {
        let size = self.shared.size();
        let Some(requested) = requested else { return Ok(0..size) };
        requested.within(size).ok_or_else(|| {
            let ByteRange { offset, length } = requested;
            let message =
                format!("{length} bytes from byte {offset} on were requested, but the buffer has {size} bytes");
            mismatch(ErrorCode::Range, message)
        })
    }
}
