//! Releases memory: from any thread, with or without the GIL, and during interpreter shutdown.
//!
//! When a library drops its last view of an array, its kernels may still use the memory, and unmapping does not always wait for them. So
//! GPU memory is released only after all work of the device's context is done. The dropping thread may be Python's garbage collector, a
//! driver thread, or the interpreter at exit, and must not block. A separate thread waits and makes the driver calls. It never calls
//! Python, and handles no signals.
//!
//! A stream capture in progress is not disturbed, and memory dropped during a capture is released during it.

#![allow(unsafe_code)]

use std::{
    any::Any,
    collections::VecDeque,
    mem::{self, ManuallyDrop},
    ops::{Deref, DerefMut},
    ptr,
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use pyo3::{ffi, prelude::*};
use vmmfd::{
    Error,
    bindings::{lock, spawn},
    fork::{PerProcess, ProcessIdentity},
    memory::Device,
};

/// The pause before the next attempt to wait for a device.
const PAUSE: Duration = Duration::from_millis(20);

/// The longest wait at process exit for a thread that is inside the driver.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// An owner of device memory. Dropping it does not block: the reaper drops the value.
#[derive(Debug)]
pub(crate) struct Reaped<T: Send + 'static> {
    device: Device,
    /// The process that created it: a fork releases nothing.
    by: ProcessIdentity,
    value: ManuallyDrop<T>,
}

impl<T: Send + 'static> Reaped<T> {
    /// Takes ownership. `device` is the device that uses the memory.
    pub(crate) fn new(device: &Device, value: T) -> Self {
        Self { device: device.clone(), by: ProcessIdentity::current(), value: ManuallyDrop::new(value) }
    }

    /// Waits until the device is idle, then drops the value. Blocks: release the GIL.
    pub(crate) fn release_now(self) {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: each is taken once: `this` is not dropped.
        let (device, value) = unsafe { (ptr::read(&this.device), ManuallyDrop::take(&mut this.value)) };
        if !this.by.is_current() {
            mem::forget((device, value));
        } else if wait_until_idle(&device) {
            drop(value);
        } else {
            release_later(device, value);
        }
    }
}

impl<T: Send + 'static> Deref for Reaped<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: Send + 'static> DerefMut for Reaped<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T: Send + 'static> Drop for Reaped<T> {
    fn drop(&mut self) {
        // SAFETY: it is taken once, and not used again.
        let value = unsafe { ManuallyDrop::take(&mut self.value) };
        if !self.by.is_current() {
            mem::forget(value);
        } else if self.device.is_host() {
            without_gil(|| drop(value));
        } else {
            release_later(self.device.clone(), value);
        }
    }
}

/// Runs work that may take long, such as munmap(2), with the GIL released if this thread has it.
pub(crate) fn without_gil(work: impl FnOnce() + Send) {
    // SAFETY: this function may be called without the GIL: it then returns null.
    let is_attached = unsafe { ffi::Py_IsInitialized() != 0 && !ffi::PyThreadState_GetDict().is_null() };
    let mut work = Some(work);
    if is_attached {
        // Not during interpreter shutdown.
        Python::try_attach(|py| py.detach(|| work.take().map(|work| work())));
    }
    if let Some(work) = work {
        work();
    }
}

#[derive(Default)]
struct Pending {
    queue: VecDeque<(Device, Box<dyn Any + Send>)>,
    /// The number of values being dropped.
    busy: usize,
    running: bool,
}

/// A fork has its own queue and thread.
static PENDING: PerProcess<(Mutex<Pending>, Condvar)> = PerProcess::new(Default::default);

/// Set at process exit: nothing more is released, because the kernel frees everything.
static EXITING: AtomicBool = AtomicBool::new(false);

fn is_exiting() -> bool {
    EXITING.load(Ordering::Acquire)
}

fn pending() -> MutexGuard<'static, Pending> {
    lock(&PENDING.get().0)
}

fn changed() -> &'static Condvar {
    &PENDING.get().1
}

/// Queues a value for the reaper thread.
fn release_later(device: Device, value: impl Send + 'static) {
    let mut pending = pending();
    if is_exiting() {
        mem::forget((device, value));
        return;
    }
    pending.queue.push_back((device, Box::new(value)));
    if !pending.running {
        // If the thread cannot start, the value waits for the next attempt.
        pending.running = start();
    }
    changed().notify_all();
}

/// Starts the thread.
fn start() -> bool {
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    if !REGISTERED.swap(true, Ordering::AcqRel) {
        // SAFETY: the function takes no arguments and does not unwind. Registered after the driver was loaded, it runs before the driver's.
        unsafe { libc::atexit(at_exit) };
    }
    spawn("vmmfd-reaper", run).is_ok()
}

fn run() {
    let mut held = pending();
    loop {
        if held.queue.is_empty() || is_exiting() {
            held = changed().wait(held).unwrap_or_else(PoisonError::into_inner);
            continue;
        }
        let mut batch = mem::take(&mut held.queue);
        held.busy = batch.len();
        drop(held);
        let devices: Vec<Device> = batch.iter().fold(Vec::new(), |mut devices, (device, _)| {
            if !devices.iter().any(|known| known.ordinal() == device.ordinal()) {
                devices.push(device.clone());
            }
            devices
        });
        let done: Vec<i32> = devices.iter().filter(|device| wait_until_idle(device)).map(Device::ordinal).collect();
        let mut left = VecDeque::new();
        while let Some((device, value)) = batch.pop_front() {
            if is_exiting() {
                mem::forget((device, value));
            } else if done.contains(&device.ordinal()) {
                drop(value);
            } else {
                left.push_back((device, value));
            }
        }
        held = pending();
        held.busy = 0;
        let again = !left.is_empty();
        left.append(&mut held.queue);
        held.queue = left;
        changed().notify_all();
        if again {
            held = changed().wait_timeout(held, PAUSE).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Waits for a device. Returns false if it cannot be waited for now.
fn wait_until_idle(device: &Device) -> bool {
    if device.is_host() {
        return true;
    }
    // `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` to `..._WRONG_THREAD`. After any other failure no work runs on the device.
    !matches!(device.wait_for_work(), Err(Error::Driver { code: 900..=908, .. }))
}

/// Waits until all dropped memory is released. Blocks: release the GIL. Returns false at the timeout, or if there is no reaper thread.
pub(crate) fn settle(timeout: Duration) -> bool {
    let end = Instant::now() + timeout;
    let mut held = pending();
    while !held.queue.is_empty() || held.busy > 0 {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() || !held.running {
            return false;
        }
        held = changed().wait_timeout(held, left).unwrap_or_else(PoisonError::into_inner).0;
    }
    true
}

/// Runs at process exit: a thread that is inside the driver during the driver's own exit handlers may hang.
extern "C" fn at_exit() {
    EXITING.store(true, Ordering::Release);
    let until = Instant::now() + EXIT_TIMEOUT;
    let mut held = loop {
        match PENDING.get().0.try_lock() {
            Ok(held) => break held,
            Err(TryLockError::Poisoned(held)) => break held.into_inner(),
            // Held for a few instructions at a time, by a thread that may never run again.
            Err(TryLockError::WouldBlock) if Instant::now() < until => thread::sleep(Duration::from_millis(1)),
            Err(TryLockError::WouldBlock) => return,
        }
    };
    while held.busy > 0 && Instant::now() < until {
        let waited = changed().wait_timeout(held, until.saturating_duration_since(Instant::now()));
        held = waited.unwrap_or_else(PoisonError::into_inner).0;
    }
    // The kernel frees the rest.
    mem::forget(mem::take(&mut held.queue));
}
