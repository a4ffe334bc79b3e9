//! Non-blocking writes to standard error.

use std::{
    io::{self, Write},
    os::fd::AsFd,
    ptr,
    sync::{
        Arc,
        atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering},
        mpsc::{self, Receiver, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    sys::signal::{SigSet, SigmaskHow},
    unistd::write,
};

/// The maximum number of queued bytes.
const QUEUE_LIMIT: usize = 256 << 10;

/// The time limit of [`flush_stderr`].
const FLUSH_TIMEOUT: Duration = Duration::from_millis(500);

/// Null until [`never_block_on_stderr`]. Never freed: a fork can't free the queue of its parent, whose locks it may have copied.
static QUEUE: AtomicPtr<Queue> = AtomicPtr::new(ptr::null_mut());

fn queue() -> Option<&'static Queue> {
    // SAFETY: the pointer is null or comes from a leaked box.
    unsafe { QUEUE.load(Ordering::Acquire).as_ref() }
}

/// Lines for the writer thread. `O_NONBLOCK` is not an alternative: it belongs to the open file description, which other processes share.
struct Queue {
    lines: Sender<Vec<u8>>,
    counters: Arc<Counters>,
}

#[derive(Default)]
struct Counters {
    queued_bytes: AtomicUsize,
    dropped_lines: AtomicU64,
}

/// Writes to standard error. After [`never_block_on_stderr`] each write is queued; while the queue is full, writes are dropped and counted.
#[derive(Debug)]
pub struct Stderr;

impl Write for Stderr {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let Some(Queue { lines, counters }) = queue() else { return io::stderr().write(line) };
        let add = |bytes: usize| bytes.checked_add(line.len()).filter(|sum| *sum <= QUEUE_LIMIT);
        let fits = counters.queued_bytes.fetch_update(Ordering::AcqRel, Ordering::Acquire, add).is_ok();
        if !fits || lines.send(line.to_vec()).is_err() {
            counters.dropped_lines.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Makes [`Stderr`] non-blocking in this process: a thread writes the lines. A fork needs a call of its own.
///
/// # Errors
/// See pthread_create(3).
pub fn never_block_on_stderr() -> io::Result<()> {
    let (lines, receiver) = mpsc::channel();
    let counters = Arc::new(Counters::default());
    let shared = Arc::clone(&counters);
    // Block every signal in the writer thread: other threads wait for them.
    let mask = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    let spawned = thread::Builder::new().name("stderr".to_owned()).spawn(move || write_lines(&receiver, &shared));
    mask.thread_set_mask()?;
    spawned?;
    QUEUE.store(Box::into_raw(Box::new(Queue { lines, counters })), Ordering::Release);
    Ok(())
}

/// Waits until the queue is empty, for at most half a second: the reader may have stopped.
pub fn flush_stderr() {
    let Some(Queue { counters, .. }) = queue() else { return };
    let started = Instant::now();
    while counters.queued_bytes.load(Ordering::Acquire) > 0 && started.elapsed() < FLUSH_TIMEOUT {
        thread::sleep(Duration::from_millis(1));
    }
}

fn write_lines(lines: &Receiver<Vec<u8>>, counters: &Counters) {
    for line in lines {
        write_all(&line);
        let dropped = counters.dropped_lines.swap(0, Ordering::Relaxed);
        if dropped > 0 {
            write_all(format!("{dropped} lines of the log were dropped: standard error was not read\n").as_bytes());
        }
        counters.queued_bytes.fetch_sub(line.len(), Ordering::AcqRel);
    }
}

/// Writes without the lock of [`io::stderr`], which would block other threads. Ignores a closed standard error.
fn write_all(mut bytes: &[u8]) {
    while !bytes.is_empty() {
        match write(io::stderr().as_fd(), bytes) {
            Ok(length) => bytes = &bytes[length..],
            Err(Errno::EINTR) => {}
            // Another process has set O_NONBLOCK.
            Err(Errno::EAGAIN) => thread::sleep(Duration::from_millis(10)),
            Err(_) => return,
        }
    }
}
