//! Loads files into memory with several threads.

use std::{
    fs::File,
    num::NonZero,
    ops::Range,
    sync::{
        Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use super::{
    Checkpoint,
    digest::{self, Hash},
};
use crate::{
    driver::PageLocked,
    error::{Error, Result},
    memory::{Device, Rdma, Region, Shared, Spec},
};

/// The default size of the memory's segments, in bytes.
pub const SEGMENT_SIZE: u64 = 1 << 30;

/// How many bytes a thread reads and copies at a time: a power of two, as BLAKE3 requires. Page-locking costs more per byte than
/// reading. Blocks of 2 MiB, of which two were copied at a time, were slower on an H200.
const BLOCK: u64 = 4 << 20;

/// The block size for host memory: the CPU copies it, so a block should fit its cache.
const HOST_BLOCK: u64 = 1 << 20;

/// How often progress is reported.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(40);

/// Options for [`Checkpoint::load`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct LoadOptions {
    threads: Option<NonZero<usize>>,
    chunk: u64,
    digest: bool,
    sealed: bool,
    rdma: Rdma,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self { threads: None, chunk: SEGMENT_SIZE, digest: false, sealed: false, rdma: Rdma::Never }
    }
}

impl LoadOptions {
    /// The defaults: one thread for each processor, at most 8; segments of [`SEGMENT_SIZE`]; no digest.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the number of reading threads. Each needs 4 MiB of page-locked memory during the load.
    pub fn threads(self, threads: NonZero<usize>) -> Self {
        Self { threads: Some(threads), ..self }
    }

    /// Sets the size of the segments in bytes, rounded up to the granularity. The last segment may be smaller.
    pub fn chunk(self, size: u64) -> Self {
        Self { chunk: size, ..self }
    }

    /// Computes a digest of the memory, for readers to verify.
    pub fn digest(self) -> Self {
        Self { digest: true, ..self }
    }

    /// Seals the memory when it is full: see [`Shared::seal`].
    pub fn sealed(self) -> Self {
        Self { sealed: true, ..self }
    }

    /// Makes the memory accessible to RDMA: see [`VmmSpec::gpu_direct_rdma`](crate::memory::VmmSpec::gpu_direct_rdma).
    pub fn gpu_direct_rdma(self) -> Self {
        self.rdma(Rdma::Required)
    }

    /// Selects whether RDMA can reach the memory.
    pub fn rdma(self, rdma: Rdma) -> Self {
        Self { rdma, ..self }
    }
}

/// Loaded weights.
#[derive(Debug)]
#[non_exhaustive]
pub struct Loaded {
    /// The memory. Its size is a multiple of the device's granularity, with zeros between the tensors and after the last.
    pub memory: Shared,
    /// The BLAKE3 digest of the whole memory, if requested: `blake3:` and 64 hexadecimal digits.
    pub digest: Option<String>,
}

impl Checkpoint {
    /// Creates memory on a device and reads all tensors into it, each at the offset of its [array](super::Tensor::array). All copies are
    /// complete on return.
    ///
    /// Blocks until everything is loaded. Calls `progress` on this thread every 40 ms and after the last block, with the number of bytes
    /// done, out of [`Checkpoint::size`]. An error of `progress` cancels the load once each thread has finished its block of 4 MiB. Several
    /// loads may run at the same time. On CUDA, no stream of the process may be in capture during a load: a copy invalidates the capture.
    ///
    /// # Errors
    /// [`WeightsError::Changed`](crate::error::WeightsError::Changed) if a file was written to or replaced since its header was read; errors of
    /// [`Shared::create`] and of `progress`; [`Error::Driver`]; [`Error::System`]. The memory is freed on errors.
    ///
    /// Driver calls: those of [`Shared::create`], `cuMemHostAlloc`, `cuMemcpyHtoD`, `cuStreamSynchronize`, `cuMemFreeHost`; with
    /// [`LoadOptions::sealed`] those of [`Shared::seal`].
    #[doc(alias("cuMemHostAlloc", "cuMemcpyHtoD", "cuStreamSynchronize", "cuMemFreeHost"))]
    pub fn load(
        &self,
        device: &Device,
        options: &LoadOptions,
        progress: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<Loaded> {
        let unit = device.granularity()?;
        let size = self.size().checked_next_multiple_of(unit).unwrap_or(self.size());
        let chunk = options.chunk.min(size);
        let spec = Spec::vmm(size).chunk(chunk).rdma(options.rdma);
        let spec = if options.sealed { spec.sealed() } else { spec };

        let block = if device.is_host() { HOST_BLOCK } else { BLOCK };
        let threads = options.threads.map_or_else(digest::default_threads, NonZero::get);
        let threads = threads.min(size.div_ceil(block).try_into().unwrap_or(usize::MAX));
        let work = Work {
            checkpoint: self,
            device,
            size,
            block,
            digests: options.digest,
            memory: OnceLock::new(),
            next: AtomicU64::new(0),
            done: AtomicU64::new(0),
            stopped: AtomicBool::new(false),
            state: Mutex::new(Reading { running: 0, error: None, hashes: Vec::new() }),
            ended: Condvar::new(),
        };
        thread::scope(|scope| {
            for number in 0..threads {
                work.state().running += 1;
                let reader = thread::Builder::new().name("vmmfd weights".to_owned()).spawn_scoped(scope, || work.run());
                if let Err(error) = reader {
                    work.state().running -= 1;
                    // Fewer threads suffice.
                    if number == 0 {
                        work.stop(Error::system("start a thread", error));
                    }
                    break;
                }
            }
            // A panic below must stop the threads too.
            let _guard = StopOnPanic(&work);
            if !work.is_stopped() {
                // In the meantime the threads allocate their buffers and read their first blocks.
                match Shared::create(device, spec) {
                    Ok(memory) => drop(work.memory.set(Some(memory))),
                    Err(error) => work.stop(error),
                }
            }
            if work.is_stopped() {
                work.abort();
            }
            work.wait(progress);
        });
        let Work { memory, state, .. } = work;
        let Reading { error, hashes, .. } = state.into_inner().unwrap_or_else(PoisonError::into_inner);
        let memory = match (error, memory.into_inner().flatten()) {
            (Some(error), _) => return Err(error),
            (None, Some(memory)) => memory,
            (None, None) => return Err(Error::Misuse { problem: "no memory was created".to_owned() }),
        };
        self.check_unchanged()?;
        memory.clear_padding()?;
        if options.sealed {
            memory.seal()?;
        }
        Ok(Loaded { memory, digest: options.digest.then(|| digest::combine(hashes)) })
    }
}

/// The state that the threads share.
struct Work<'a> {
    checkpoint: &'a Checkpoint,
    device: &'a Device,
    /// The size of the memory.
    size: u64,
    block: u64,
    digests: bool,
    /// Set once; `None` if the memory could not be created.
    memory: OnceLock<Option<Shared>>,
    /// The next block to read.
    next: AtomicU64,
    /// Bytes copied so far.
    done: AtomicU64,
    stopped: AtomicBool,
    state: Mutex<Reading>,
    /// Notified when a thread exits.
    ended: Condvar,
}

/// Marks a reading thread as running. When dropped, also by a panic, the thread has finished.
struct Running<'a>(&'a Work<'a>);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.abort();
        }
        self.0.state().running -= 1;
        self.0.ended.notify_one();
    }
}

/// Stops the threads if the waiting thread panics.
struct StopOnPanic<'a>(&'a Work<'a>);

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.abort();
        }
    }
}

struct Reading {
    running: usize,
    /// The first error.
    error: Option<Error>,
    hashes: Vec<(u64, Hash)>,
}

impl Work<'_> {
    fn state(&self) -> MutexGuard<'_, Reading> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    fn stop(&self, error: Error) {
        self.stopped.store(true, Ordering::Relaxed);
        self.state().error.get_or_insert(error);
    }

    /// Waits until all threads have exited. Reports progress while it waits, and a last time afterwards.
    fn wait(&self, progress: &mut dyn FnMut(u64) -> Result<()>) {
        loop {
            let state = self.state();
            let (state, _) = self
                .ended
                .wait_timeout_while(state, PROGRESS_INTERVAL, |state| state.running > 0)
                .unwrap_or_else(PoisonError::into_inner);
            let ended = state.running == 0;
            // `progress` may take any time.
            drop(state);
            if !self.is_stopped()
                && let Err(error) = progress(self.done.load(Ordering::Relaxed).min(self.checkpoint.size()))
            {
                self.stop(error);
            }
            if ended {
                return;
            }
        }
    }

    /// Stops the threads, including threads that wait for the memory.
    fn abort(&self) {
        self.stopped.store(true, Ordering::Relaxed);
        // Fails if the memory exists already.
        let _ = self.memory.set(None);
    }

    /// The body of each thread.
    fn run(&self) {
        let _running = Running(self);
        let mut hashes = Vec::new();
        if let Err(error) = self.read(&mut hashes) {
            self.stop(error);
        }
        self.state().hashes.append(&mut hashes);
    }

    fn read(&self, hashes: &mut Vec<(u64, Hash)>) -> Result<()> {
        let size = self.block.min(self.size);
        let mut buffer: PageLocked = self.device.verbs().page_lock(self.device.ordinal(), size)?;
        let mut open = None;
        while !self.is_stopped() {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(start) = index.checked_mul(self.block).filter(|start| *start < self.size) else { break };
            let range = start..self.size.min(start + self.block);
            let bytes = &mut buffer[..(range.end - range.start) as usize];
            self.fill(&mut open, &range, bytes)?;
            if self.digests {
                hashes.push((index, Hash::of(start, bytes, self.size)));
            }
            let Some(memory) = self.memory.wait() else { break };
            memory.copy_in(start, bytes)?;
            self.done.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Fills a block with the tensors' bytes, and zeros between them.
    fn fill(&self, open: &mut Option<(usize, File)>, range: &Range<u64>, bytes: &mut [u8]) -> Result<()> {
        let mut filled = 0;
        for span in self.checkpoint.layout.within(range.clone()) {
            let at = (span.memory - range.start) as usize;
            let end = at + span.length as usize;
            bytes[filled..at].fill(0);
            self.checkpoint.read(open, span.file, span.offset, &mut bytes[at..end])?;
            filled = end;
        }
        bytes[filled..].fill(0);
        Ok(())
    }
}
