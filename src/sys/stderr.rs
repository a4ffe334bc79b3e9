//! Standard error for a process that must not wait for its reader.

use std::{
    io::{self, Write},
    os::fd::AsFd,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, AtomicUsize, Ordering},
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

/// How many bytes may wait for the reader.
const MOST: usize = 256 << 10;

/// How long [`flush_stderr`] waits for the reader.
const LAST_WAIT: Duration = Duration::from_millis(500);

static QUEUE: OnceLock<Queue> = OnceLock::new();

/// What waits to be written by a thread of its own. `O_NONBLOCK` is no way: it is of the open file, which other processes share.
struct Queue {
    lines: Sender<Vec<u8>>,
    waiting: Arc<Waiting>,
}

#[derive(Default)]
struct Waiting {
    bytes: AtomicUsize,
    dropped: AtomicU64,
}

/// Writes to standard error. After [`never_block_on_stderr`] it queues what it is given, or drops and counts it while the queue is full.
#[derive(Debug)]
pub struct Stderr;

impl Write for Stderr {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let Some(Queue { lines, waiting }) = QUEUE.get() else { return io::stderr().write(line) };
        let room = |bytes: usize| bytes.checked_add(line.len()).filter(|sum| *sum <= MOST);
        let taken = waiting.bytes.fetch_update(Ordering::AcqRel, Ordering::Acquire, room).is_ok();
        if !taken || lines.send(line.to_vec()).is_err() {
            waiting.dropped.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// From now on [`Stderr`] never blocks in this process.
///
/// # Errors
/// Those of pthread_create(3).
pub fn never_block_on_stderr() -> io::Result<()> {
    let (lines, to_write) = mpsc::channel();
    let waiting = Arc::new(Waiting::default());
    let shared = Arc::clone(&waiting);
    // The thread must leave every signal to the others, of which some wait for them.
    let mask = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    let spawned = thread::Builder::new().name("stderr".to_owned()).spawn(move || write_lines(&to_write, &shared));
    mask.thread_set_mask()?;
    spawned?;
    // Fails if it was set before.
    let _ = QUEUE.set(Queue { lines, waiting });
    Ok(())
}

/// Waits until everything is written, but not for long: the reader may have stopped.
pub fn flush_stderr() {
    let Some(Queue { waiting, .. }) = QUEUE.get() else { return };
    let begun = Instant::now();
    while waiting.bytes.load(Ordering::Acquire) > 0 && begun.elapsed() < LAST_WAIT {
        thread::sleep(Duration::from_millis(1));
    }
}

fn write_lines(lines: &Receiver<Vec<u8>>, waiting: &Waiting) {
    for line in lines {
        write_all(&line);
        let dropped = waiting.dropped.swap(0, Ordering::Relaxed);
        if dropped > 0 {
            write_all(format!("{dropped} lines of the log were dropped: standard error was not read\n").as_bytes());
        }
        waiting.bytes.fetch_sub(line.len(), Ordering::AcqRel);
    }
}

/// Without the lock of [`io::stderr`], for which other threads would wait. A closed one is not an error.
fn write_all(mut bytes: &[u8]) {
    while !bytes.is_empty() {
        match write(io::stderr().as_fd(), bytes) {
            Ok(length) => bytes = &bytes[length..],
            Err(Errno::EINTR) => {}
            // Another process has made it non-blocking.
            Err(Errno::EAGAIN) => thread::sleep(Duration::from_millis(10)),
            Err(_) => return,
        }
    }
}
