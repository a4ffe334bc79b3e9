//! Lets go of memory: on any thread, with or without the GIL, and while the interpreter ends.
//!
//! A library that drops its last view of an array may have kernels under way that still use it, and unmapping does not always wait
//! for them. So memory of a GPU is let go of once all work of the device's context is done. That wait, and the driver's calls, are
//! nothing for the thread that happens to drop the last view: it may be Python's collector, a thread of the driver's own, or the
//! interpreter's last breath. A thread of this module does them. It never touches Python, and no signal is handled on it.
//!
//! A stream that is being captured into a graph meanwhile is not disturbed, and what is dropped during a capture is given back during it.

#![allow(unsafe_code)]

use std::{
    any::Any,
    collections::VecDeque,
    mem::{self, ManuallyDrop, MaybeUninit},
    ops::Deref,
    ptr,
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use vmmfd::{
    Error,
    fork::{PerProcess, ProcessIdentity},
    memory::Device,
};

/// How long to wait before a device is asked again that could not be waited for.
const PAUSE: Duration = Duration::from_millis(20);

/// The longest that the end of the process waits for a thread that is inside the driver.
const AT_EXIT: Duration = Duration::from_secs(2);

/// What holds memory of a device: let go of when it is dropped, in no time of the thread's that drops it.
#[derive(Debug)]
pub(crate) struct Kept<T: Send + 'static> {
    device: Device,
    /// The process that made it: in a fork of it nothing is given back.
    by: ProcessIdentity,
    thing: ManuallyDrop<T>,
}

impl<T: Send + 'static> Kept<T> {
    /// Takes it over. `device` is the one that uses the memory.
    pub(crate) fn new(device: &Device, thing: T) -> Self {
        Self { device: device.clone(), by: ProcessIdentity::current(), thing: ManuallyDrop::new(thing) }
    }

    /// Lets go of it now: waits until the device is done, then drops it. Blocks: release the GIL.
    pub(crate) fn let_go_now(self) {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: each is taken once, here: `this` is not dropped.
        let (device, thing) = unsafe { (ptr::read(&this.device), ManuallyDrop::take(&mut this.thing)) };
        if !this.by.is_current() {
            mem::forget((device, thing));
        } else if is_done(&device) {
            drop(thing);
        } else {
            later(device, thing);
        }
    }
}

impl<T: Send + 'static> Deref for Kept<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.thing
    }
}

impl<T: Send + 'static> Drop for Kept<T> {
    fn drop(&mut self) {
        // SAFETY: it is taken once, here, and not used again.
        let thing = unsafe { ManuallyDrop::take(&mut self.thing) };
        if !self.by.is_current() {
            mem::forget(thing);
        } else if self.device.is_host() {
            drop(thing);
        } else {
            later(self.device.clone(), thing);
        }
    }
}

#[derive(Default)]
struct State {
    queue: VecDeque<(Device, Box<dyn Any + Send>)>,
    /// How many are being let go of.
    busy: usize,
    running: bool,
}

/// A fork has a queue and a thread of its own.
static STATE: PerProcess<(Mutex<State>, Condvar)> = PerProcess::new(Default::default);

/// The process ends: nothing is given back any more, the kernel takes it all.
static ENDING: AtomicBool = AtomicBool::new(false);

fn ending() -> bool {
    ENDING.load(Ordering::Acquire)
}

fn state() -> MutexGuard<'static, State> {
    STATE.get().0.lock().unwrap_or_else(PoisonError::into_inner)
}

fn changed() -> &'static Condvar {
    &STATE.get().1
}

/// Has the thread let go of it.
fn later(device: Device, thing: impl Send + 'static) {
    let mut state = state();
    if ending() {
        mem::forget((device, thing));
        return;
    }
    state.queue.push_back((device, Box::new(thing)));
    if !state.running {
        // Without a thread it stays where it is until the next one is let go of.
        state.running = start();
    }
    changed().notify_all();
}

/// Starts the thread, with all signals blocked.
fn start() -> bool {
    static AT_EXIT: AtomicBool = AtomicBool::new(false);
    if !AT_EXIT.swap(true, Ordering::AcqRel) {
        // SAFETY: the function takes nothing and does not unwind. Registered after the driver was loaded, it runs before the driver's.
        unsafe { libc::atexit(end) };
    }
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the first is filled before it is read; the second is written by the call. The new thread inherits the mask.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
    }
    let started = thread::Builder::new().name("vmmfd-reaper".to_owned()).spawn(work).is_ok();
    // SAFETY: the call above wrote it.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut()) };
    started
}

fn work() {
    let mut held = state();
    loop {
        if held.queue.is_empty() || ending() {
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
        let done: Vec<i32> = devices.iter().filter(|device| is_done(device)).map(Device::ordinal).collect();
        let mut left = VecDeque::new();
        while let Some((device, thing)) = batch.pop_front() {
            if ending() {
                mem::forget((device, thing));
            } else if done.contains(&device.ordinal()) {
                drop(thing);
            } else {
                left.push_back((device, thing));
            }
        }
        held = state();
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

/// Waits for a device. False while that can't be done.
fn is_done(device: &Device) -> bool {
    if device.is_host() {
        return true;
    }
    // `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` to `..._WRONG_THREAD`. After any other failure nothing runs on the device any more.
    !matches!(device.wait_for_work(), Err(Error::Driver { code: 900..=908, .. }))
}

/// Waits until all that was dropped is given back. Blocks: release the GIL. False if that took longer, or can't be done now.
pub(crate) fn settle(timeout: Duration) -> bool {
    let end = Instant::now() + timeout;
    let mut held = state();
    while !held.queue.is_empty() || held.busy > 0 {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() || !held.running {
            return false;
        }
        held = changed().wait_timeout(held, left).unwrap_or_else(PoisonError::into_inner).0;
    }
    true
}

/// Runs as the process ends: a thread inside the driver while the driver's own handlers run may hang it.
extern "C" fn end() {
    ENDING.store(true, Ordering::Release);
    let until = Instant::now() + AT_EXIT;
    let mut held = loop {
        match STATE.get().0.try_lock() {
            Ok(held) => break held,
            Err(TryLockError::Poisoned(held)) => break held.into_inner(),
            // Held for some instructions at a time, by a thread that may never run again.
            Err(TryLockError::WouldBlock) if Instant::now() < until => thread::sleep(Duration::from_millis(1)),
            Err(TryLockError::WouldBlock) => return,
        }
    };
    while held.busy > 0 && Instant::now() < until {
        let waited = changed().wait_timeout(held, until.saturating_duration_since(Instant::now()));
        held = waited.unwrap_or_else(PoisonError::into_inner).0;
    }
    // What is left is the kernel's to take.
    mem::forget(mem::take(&mut held.queue));
}
