//! Streams, and the words in registered host memory on which they wait.
//!
//! Work runs when it is enqueued, unless an earlier wait of its stream is not met. Then a thread runs it afterwards, as a GPU does.

use std::{
    collections::{BTreeMap, VecDeque},
    ffi::{c_int, c_uint, c_void},
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::Duration,
};

use crate::{
    Answer,
    emulated::{Emulated, initialised},
    numbers::{INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED},
};

const NOT_READY: u32 = 600;
const CAPTURE_UNSUPPORTED: u32 = 900;
const HOST_MEMORY_ALREADY_REGISTERED: u32 = 712;
const HOST_MEMORY_NOT_REGISTERED: u32 = 713;

/// `CUstreamBatchMemOpType`.
const WAIT_VALUE_64: c_uint = 4;
const WRITE_VALUE_64: c_uint = 5;

/// How often the thread looks at the words, and a blocking call at its streams.
const INTERVAL: Duration = Duration::from_micros(50);

/// `CUstreamBatchMemOpParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operation {
    kind: c_uint,
    address: u64,
    value: u64,
    flags: c_uint,
    alias: u64,
    pad: u64,
}

const _: () = assert!(size_of::<Operation>() == 48);

/// The streams of one process.
#[derive(Default)]
pub(crate) struct Streams {
    streams: BTreeMap<usize, Stream>,
    made: usize,
    /// Registered host memory: start and size.
    registered: BTreeMap<usize, usize>,
    /// Whether the thread runs.
    is_served: bool,
}

struct Stream {
    device: c_int,
    queue: VecDeque<Work>,
    is_destroyed: bool,
    is_capturing: bool,
}

enum Work {
    Wait { address: u64, value: u64 },
    Write { address: u64, value: u64 },
    Run(Box<dyn FnOnce(&mut Emulated) + Send>),
}

/// The legacy default stream and the default stream of a thread, which are not distinguished here.
fn is_default(stream: *mut c_void) -> bool {
    stream.addr() <= 2
}

impl Streams {
    pub(crate) fn live(&self) -> u64 {
        let streams = self.streams.values().filter(|stream| !stream.is_destroyed).count();
        (streams + self.registered.len()) as u64
    }

    pub(crate) fn create(&mut self, device: c_int, flags: c_uint) -> Answer<usize> {
        // vmmfd only creates streams that are not ordered with the default stream.
        if flags != 1 {
            return Err(INVALID_VALUE);
        }
        self.made += 1;
        let number = 0x7B00_0000_0000 + 0x80 * self.made;
        let stream = Stream { device, queue: VecDeque::new(), is_destroyed: false, is_capturing: false };
        self.streams.insert(number, stream);
        Ok(number)
    }

    fn named(&self, stream: *mut c_void) -> Answer<&Stream> {
        self.streams.get(&stream.addr()).filter(|stream| !stream.is_destroyed).ok_or(INVALID_HANDLE)
    }

    fn named_mut(&mut self, stream: *mut c_void) -> Answer<&mut Stream> {
        self.streams.get_mut(&stream.addr()).filter(|stream| !stream.is_destroyed).ok_or(INVALID_HANDLE)
    }

    /// Its work is still done.
    pub(crate) fn destroy(&mut self, stream: *mut c_void) -> Answer {
        let named = self.named_mut(stream)?;
        named.is_destroyed = true;
        if named.queue.is_empty() {
            self.streams.remove(&stream.addr());
        }
        Ok(())
    }

    pub(crate) fn device(&self, stream: *mut c_void) -> Answer<c_int> {
        self.named(stream).map(|stream| stream.device)
    }

    pub(crate) fn is_idle(&self, stream: *mut c_void) -> Answer<bool> {
        if is_default(stream) { Ok(true) } else { self.named(stream).map(|stream| stream.queue.is_empty()) }
    }

    pub(crate) fn query(&self, stream: *mut c_void) -> Answer {
        if self.is_idle(stream)? { Ok(()) } else { Err(NOT_READY) }
    }

    pub(crate) fn is_capturing(&self, stream: *mut c_void) -> Answer<bool> {
        if is_default(stream) { Ok(false) } else { self.named(stream).map(|stream| stream.is_capturing) }
    }

    /// `cuStreamBeginCapture_v2` and `cuStreamEndCapture`: only the state is emulated.
    pub(crate) fn capture(&mut self, stream: *mut c_void, captures: bool) -> Answer {
        let stream = self.named_mut(stream)?;
        if stream.is_capturing == captures {
            return Err(CAPTURE_UNSUPPORTED);
        }
        stream.is_capturing = captures;
        Ok(())
    }

    pub(crate) fn register(&mut self, start: *mut c_void, size: usize, flags: c_uint) -> Answer {
        if start.is_null() || size == 0 || flags & !3 != 0 {
            return Err(INVALID_VALUE);
        }
        if self.registered.contains_key(&start.addr()) {
            return Err(HOST_MEMORY_ALREADY_REGISTERED);
        }
        self.registered.insert(start.addr(), size);
        Ok(())
    }

    pub(crate) fn unregister(&mut self, start: *mut c_void) -> Answer {
        self.registered.remove(&start.addr()).map(drop).ok_or(HOST_MEMORY_NOT_REGISTERED)
    }

    pub(crate) fn device_pointer(&self, start: *mut c_void) -> Answer<u64> {
        self.registered.get(&start.addr()).map(|_| start.addr() as u64).ok_or(INVALID_VALUE)
    }

    /// Whether no stream waits.
    pub(crate) fn are_idle(&self) -> bool {
        self.streams.values().all(|stream| stream.queue.is_empty())
    }

    fn check(&self, operation: &Operation) -> Answer {
        let inside = |(start, size): (&usize, &usize)| {
            let start = *start as u64;
            (start..start + *size as u64).contains(&operation.address) && operation.address.is_multiple_of(8)
        };
        let known = [WAIT_VALUE_64, WRITE_VALUE_64].contains(&operation.kind) && operation.flags == 0;
        let at = self.registered.range(..=operation.address as usize).next_back();
        if known && at.is_some_and(inside) { Ok(()) } else { Err(INVALID_VALUE) }
    }
}

/// # Safety
/// The address is of a word in registered memory.
unsafe fn word<'a>(address: u64) -> &'a AtomicU64 {
    // SAFETY: the caller's promise: a caller of the driver keeps registered memory mapped.
    unsafe { AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(address as usize)) }
}

impl Emulated {
    /// The device of a stream, whose context is current if it is the default stream.
    pub(crate) fn stream_device(&self, stream: *mut c_void) -> Answer<c_int> {
        if is_default(stream) { self.current() } else { self.streams.device(stream) }
    }

    pub(crate) fn batch(&mut self, stream: *mut c_void, operations: &[Operation], flags: c_uint) -> Answer {
        if operations.is_empty() || operations.len() > 255 || flags != 0 {
            return Err(INVALID_VALUE);
        }
        self.stream_device(stream)?;
        operations.iter().try_for_each(|operation| self.streams.check(operation))?;
        for &Operation { kind, address, value, .. } in operations {
            let work =
                if kind == WAIT_VALUE_64 { Work::Wait { address, value } } else { Work::Write { address, value } };
            self.enqueue(stream, work)?;
        }
        Ok(())
    }

    /// Runs a closure behind the work of a stream.
    pub(crate) fn run_on(&mut self, stream: *mut c_void, run: impl FnOnce(&mut Self) + Send + 'static) -> Answer {
        self.enqueue(stream, Work::Run(Box::new(run)))
    }

    fn enqueue(&mut self, stream: *mut c_void, work: Work) -> Answer {
        if is_default(stream) {
            // All other calls on the default stream run at once.
            return if self.attempt(work).is_none() { Ok(()) } else { Err(NOT_SUPPORTED) };
        }
        let named = self.streams.named_mut(stream)?;
        if named.is_capturing {
            // A graph is not emulated: vmmfd refuses the stream first.
            return Err(CAPTURE_UNSUPPORTED);
        }
        named.queue.push_back(work);
        self.pump();
        if !self.streams.are_idle() && !self.streams.is_served {
            self.streams.is_served = true;
            thread::spawn(serve);
        }
        Ok(())
    }

    /// Does a piece of work, unless it has to wait.
    fn attempt(&mut self, work: Work) -> Option<Work> {
        match work {
            Work::Wait { address, value } => {
                // SAFETY: it was checked when it was enqueued, and `unregister` waits for it.
                let has = unsafe { word(address) }.load(Ordering::Acquire);
                // The signed difference, as in NVIDIA's driver.
                return (has.wrapping_sub(value).cast_signed() < 0).then_some(work);
            }
            // SAFETY: as above.
            Work::Write { address, value } => unsafe { word(address) }.store(value, Ordering::Release),
            Work::Run(run) => run(self),
        }
        None
    }

    /// Does the work that need not wait.
    pub(crate) fn pump(&mut self) {
        let numbers: Vec<_> = self.streams.streams.keys().copied().collect();
        for number in numbers {
            while let Some(work) = self.streams.streams.get_mut(&number).and_then(|stream| stream.queue.pop_front()) {
                if let Some(work) = self.attempt(work) {
                    if let Some(stream) = self.streams.streams.get_mut(&number) {
                        stream.queue.push_front(work);
                    }
                    break;
                }
            }
        }
        self.streams.streams.retain(|_, stream| !stream.is_destroyed || !stream.queue.is_empty());
    }
}

fn serve() {
    loop {
        thread::sleep(INTERVAL);
        let mut is_done = false;
        let served = initialised(|driver| {
            driver.pump();
            is_done = driver.streams.are_idle();
            driver.streams.is_served = !is_done;
            Ok(())
        });
        if is_done || served.is_err() {
            return;
        }
    }
}

/// Blocks the caller, like NVIDIA's driver, until a condition holds. Other threads can call the driver.
pub(crate) fn block(until: impl Fn(&Emulated) -> Answer<bool>) -> Answer {
    loop {
        let mut holds = false;
        initialised(|driver| {
            driver.pump();
            holds = until(driver)?;
            Ok(())
        })?;
        if holds {
            return Ok(());
        }
        thread::sleep(INTERVAL);
    }
}
