//! A buffer to share: memory, what it holds, and whose turn it is.

use std::{
    ops::Range,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use crate::{
    array::ArrayDescriptor,
    channel::Cancel,
    driver::Access,
    error::{Error, Result},
    memory::{Device, Region, Shared, Spec},
    session::{
        Event, Observer, activate,
        gate::{Entered, Gate, Turn},
    },
    tools::check::files::Source,
    tools::check::pattern::{self, Choice, Pattern, Verification, Work},
    wire::{ByteRange, DEFAULT_OBJECT, ErrorCode, Offer},
};

/// What a buffer holds.
#[derive(Debug)]
#[non_exhaustive]
pub enum Content {
    /// The pattern of a salt. [`super::serve`] writes it.
    Pattern(u32),
    /// A file's bytes, with their digest. [`super::serve`] reads them in.
    File(Source),
    /// What the program writes into it by itself: consumers have nothing to check it against.
    Own,
}

/// Memory to share, with what it holds.
#[derive(Debug)]
pub struct Buffer {
    shared: Shared,
    content: Content,
    array: Option<ArrayDescriptor>,
    engine: Choice,
    corrupt: bool,
    sealed: bool,
    /// The digest of all that it holds, once that is known.
    digest: Mutex<Option<String>>,
    gate: Gate,
}

impl Buffer {
    /// A buffer in memory that there is already.
    ///
    /// # Errors
    /// [`Error::Array`] if the array is not inside the memory.
    pub fn new(shared: Shared, content: Content, array: Option<ArrayDescriptor>) -> Result<Self> {
        if let Some(array) = &array {
            array.check(shared.data_size())?;
        }
        let (digest, gate) = (Mutex::default(), Gate::default());
        Ok(Self { shared, content, array, engine: Choice::Auto, corrupt: false, sealed: false, digest, gate })
    }

    /// Makes the device ready, allocates and maps memory, and exports it unless it is to be sealed. [`super::serve`] fills it.
    ///
    /// # Errors
    /// Those of [`Shared::create`] and [`Buffer::new`]; [`Error::Interrupted`].
    pub fn create(
        device: &Device,
        spec: &Spec,
        content: Content,
        array: Option<ArrayDescriptor>,
        cancel: &Cancel,
        observer: Observer<'_>,
    ) -> Result<Self> {
        activate(device, &mut || cancel.check(), observer)?;
        let shared = Shared::create(device, spec)?;
        let (description, took) = (shared.describe()?, shared.took());
        observer(Event::Created { description: &description, took: took.create });
        observer(Event::Mapped { address: shared.address(), access: shared.access(), took: took.map });
        let buffer = Self { sealed: spec.sealed, ..Self::new(shared, content, array)? };
        if !spec.sealed {
            buffer.exported(observer)?;
        }
        Ok(buffer)
    }

    /// Flips one byte of it after each fill, so that every check of it must fail.
    pub fn corrupt(self, corrupt: bool) -> Self {
        Self { corrupt, ..self }
    }

    /// Has the pattern written and checked by this engine: by default by the one that is through first.
    pub fn engine(self, engine: Choice) -> Self {
        Self { engine, ..self }
    }

    /// The memory.
    pub fn shared(&self) -> &Shared {
        &self.shared
    }

    /// Adds `size` bytes of data behind those that there are, while nobody else has a turn: consumers that ask again get the new
    /// allocations. A pattern goes on into them.
    ///
    /// # Errors
    /// Those of [`Shared::grow`]; [`Error::Unsupported`] for a file's bytes; [`Error::Interrupted`] if it was cancelled while it
    /// waited; [`Error::Driver`]. After one it holds what it held.
    pub fn grow(&self, size: u64, cancel: &Cancel) -> Result<()> {
        if let Content::File(_) = self.content {
            let device = self.shared.device().to_string();
            return Err(Error::Unsupported { device, feature: "growing a buffer that holds a file" });
        }
        let _alone = self.turn(Turn::Alone, &mut || cancel.check())?;
        let before = self.shared.data_size();
        let after = self.shared.make_room(size)?;
        if let Content::Pattern(salt) = self.content {
            self.engine.fill(&self.shared, before..after, Pattern::new(salt), &mut |_| cancel.check())?;
        }
        self.shared.publish(after);
        Ok(())
    }

    pub(super) fn turn(&self, turn: Turn, tick: &mut dyn FnMut() -> Result<()>) -> Result<Entered<'_>> {
        self.gate.enter(turn, tick)
    }

    /// Writes what it is to hold, and seals it if it is to be sealed. To be called by whoever has it alone.
    pub(super) fn fill(&self, tick: &mut dyn FnMut() -> Result<()>, observer: Observer<'_>) -> Result<()> {
        let (begun, size) = (Instant::now(), self.shared.data_size());
        let mut progress = |done| {
            observer(Event::Progress { done, all: size });
            tick()
        };
        match &self.content {
            Content::Pattern(salt) => {
                let work = self.engine.fill(&self.shared, 0..size, Pattern::new(*salt), &mut progress)?;
                let words = pattern::words(&(0..size));
                observer(Event::Filled { words, salt: *salt, work: &work, took: begun.elapsed() });
            }
            Content::File(source) => {
                let digest = source.load(&self.shared, &mut progress)?;
                observer(Event::Loaded { size, digest: &digest, took: begun.elapsed() });
                *self.digest() = Some(digest);
            }
            Content::Own => {}
        }
        if self.corrupt {
            let (at, mut byte) = (size / 2, [0]);
            self.shared.copy_out(at, &mut byte)?;
            self.shared.copy_in(at, &[byte[0] ^ 0x01])?;
            self.shared.synchronize()?;
        }
        if self.sealed && self.shared.access() == Access::ReadWrite {
            let begun = Instant::now();
            let enforced = self.shared.seal()?;
            observer(Event::Sealed { enforced, took: begun.elapsed() });
            self.exported(observer)?;
        }
        Ok(())
    }

    /// Exports what is to be sent, now and not with the first consumer waiting.
    fn exported(&self, observer: Observer<'_>) -> Result<()> {
        let begun = Instant::now();
        let fds = match (self.shared.pool(), self.shared.chunks(0..self.shared.size(), 0)?) {
            (Some(pool), _) => vec![raw(&pool.export()?)],
            (None, Some((_, chunks))) => chunks.iter().map(|chunk| raw(&**chunk)).collect(),
            (None, None) => Vec::new(),
        };
        observer(Event::Exported { fds: &fds, took: begun.elapsed() + self.shared.took().export });
        Ok(())
    }

    /// The bytes that a consumer asks for.
    pub(super) fn range(&self, asked: Option<ByteRange>) -> Result<Range<u64>> {
        let size = self.shared.data_size();
        let Some(asked) = asked else { return Ok(0..size) };
        asked.within(size).ok_or_else(|| {
            let ByteRange { offset, length } = asked;
            let message = format!("{length} bytes from {offset} on were asked for, of a buffer of {size} bytes");
            Error::Mismatch { code: ErrorCode::Range, message }
        })
    }

    /// What a consumer is told of it. `tick` is called while a digest is made.
    pub(super) fn offer(
        &self,
        range: &Range<u64>,
        access: Access,
        tick: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Offer> {
        let (salt, digest) = match &self.content {
            Content::Pattern(salt) => (Some(*salt), None),
            Content::File(_) if *range == (0..self.shared.data_size()) => (None, self.digest().clone()),
            // From the file, not from the memory: what went wrong on the way in must be found too.
            Content::File(source) => (None, Some(source.digest(range.clone(), tick)?)),
            Content::Own => (None, None),
        };
        let (object, array) = (DEFAULT_OBJECT.to_owned(), self.array.clone());
        let memory = self.shared.describe()?;
        Ok(Offer { object, memory, array, access, part: None, salt, digest, reply_salt: None, buffer: None })
    }

    /// Checks a range of it against a pattern, by its engine.
    pub(super) fn verify(
        &self,
        range: Range<u64>,
        pattern: Pattern,
        tick: &mut dyn FnMut() -> Result<()>,
    ) -> Result<(Verification, Work)> {
        self.engine.verify(&self.shared, 0, range, pattern, &mut |_| tick())
    }

    /// The pattern's salt, if it holds one.
    pub(super) fn salt(&self) -> Option<u32> {
        match self.content {
            Content::Pattern(salt) => Some(salt),
            _ => None,
        }
    }

    fn digest(&self) -> MutexGuard<'_, Option<String>> {
        self.digest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn raw(fd: &impl std::os::fd::AsFd) -> i32 {
    std::os::fd::AsRawFd::as_raw_fd(&fd.as_fd())
}
