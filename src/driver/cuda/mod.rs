//! The CUDA backend: the real driver, loaded at run time. The build and the program need no toolkit.
//!
//! It tracks all handles and addresses that it returned, because the driver does not catch all mistakes: in tests, mapping a
//! released handle crashed inside the library, and a mapping extended from its reservation into the next. Calls with other handles
//! and addresses fail here, with the driver's own code.
//!
//! Assumptions of the SAFETY comments below: the driver accepts calls from any thread. Each call that names a handle or an address holds
//! its table while it runs, so that no other thread releases it during the call. Other processes with access to shared memory only
//! change its bytes. GPU memory is not Rust memory: only copies by the driver access it, into slices that the caller has borrowed until
//! they are done. Host memory that a GPU shares is read and written by [`super::copy`].

#![allow(unsafe_code)]

mod addresses;
mod checkpoints;
mod diagnosis;
mod ffi;
mod kernels;
mod legacy;
mod pool;
mod streams;
mod verbs;

use std::{
    collections::BTreeMap,
    ffi::{c_int, c_uint, c_void},
    os::fd::{FromRawFd, OwnedFd, RawFd},
    ptr::{self, NonNull},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicU64, Ordering},
    },
};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};

use self::kernels::Slot;
use self::{
    addresses::Addresses,
    ffi::{AllocationProp, Functions, HANDLE_TYPE_POSIX_FD, PROT_NONE, PROT_READ, PROT_READWRITE},
};
use super::EventHandle;
use super::{
    Access, Handle, Identity, Location, PoolHandle, Properties, Verbs, code, failure, failure_with,
    ties::{Tie, Ties},
    window::{PageLocker, Windows},
};
use crate::{
    error::{Error, LoadError, Result},
    sys::{self, fork::ProcessIdentity},
};

/// The first process that loaded or initialized the driver, or 0. The driver does not survive a fork, and does not report this with a clear
/// error.
static INITIALISED_BY: AtomicU64 = AtomicU64::new(0);

/// The CUDA driver of this machine.
#[derive(Debug)]
pub struct CudaDriver {
    core: Arc<Core>,
    /// Windows are only opened, and only looked up, while the addresses are locked.
    windows: Arc<Windows>,
}

/// All pools returned by the driver.
type PoolTable = BTreeMap<PoolHandle, KnownPool>;

#[derive(Debug, Clone, Copy)]
struct KnownPool {
    /// Whether it was created here. Other pools were imported.
    created: bool,
    /// The number of times it was returned: importing a pool again returns the same handle, and the driver does not count.
    count: usize,
}

/// All events returned by the driver, with their devices.
type EventTable = BTreeMap<EventHandle, i32>;

/// State that page-locked memory and windows keep alive after the driver object is dropped. Also implements the other mechanisms, because
/// some of their methods are used by the driver's own.
#[derive(Debug)]
struct Core {
    functions: Functions,
    identity: Identity,
    origin: ProcessIdentity,
    contexts: Mutex<BTreeMap<i32, Context>>,
    /// The kernels of each device. A call holds the device's slot while a kernel runs. Locked before `addresses`.
    programs: Mutex<BTreeMap<i32, Slot>>,
    /// Calls hold it for reading, so that their handle is not released.
    handles: RwLock<HandleTable>,
    /// Calls hold it for reading, so that their event is not destroyed.
    events: RwLock<EventTable>,
    /// Calls hold it for reading, so that their pool is not destroyed. Locked before `addresses`.
    pools: RwLock<PoolTable>,
    /// Held while other processes' memory is opened or closed: the driver returns the same address again, and does not always count.
    /// Locked after `pools` and before `addresses`.
    opening: Mutex<()>,
    /// Copies hold it for reading, so that nothing is unmapped or freed during a copy. Not held for writing during slow driver calls: all
    /// copies would wait.
    addresses: RwLock<Addresses>,
    ties: Arc<Ties>,
}

/// A handle that the driver returned.
#[derive(Debug)]
struct KnownHandle {
    /// The number of times it was returned: retaining memory again returns the same handle.
    count: usize,
    /// Counts an allocation that another process made, until it is released and unmapped. The driver can't restore a process with one.
    imported: Option<Arc<Tie>>,
}

type HandleTable = BTreeMap<Handle, KnownHandle>;

/// A device's primary context, retained until the driver object is dropped.
#[derive(Debug, Clone, Copy)]
struct Context {
    device: c_int,
    context: *mut c_void,
}

// SAFETY: a CUcontext is a handle that any thread may push.
unsafe impl Send for Context {}

impl CudaDriver {
    /// Loads the driver library (`libcuda.so.1`, else `libcuda.so`) and initializes it. The library is never unloaded.
    ///
    /// # Errors
    /// - [`LoadError::NoLibrary`]: no library can be loaded.
    /// - [`LoadError::Stub`]: the loaded library is the toolkit's stub.
    /// - [`LoadError::NoDevice`]: the driver works but reports no device.
    /// - [`LoadError::MissingSymbol`]: the library is not a driver, or too old.
    /// - [`Error::Forked`]: this process is a fork of a process that initialized the driver.
    /// - [`Error::Driver`]: the driver fails.
    ///
    /// Driver calls: `cuInit`, `cuDeviceGetCount`.
    pub fn load() -> Result<Self> {
        Self::start(Functions::load)
    }

    /// Like [`CudaDriver::load`], from a file, for a driver that the loader does not find.
    ///
    /// # Errors
    /// See [`CudaDriver::load`].
    pub fn load_from(path: &std::path::Path) -> Result<Self> {
        let name = path
            .to_str()
            .ok_or_else(|| Error::Load(LoadError::NoLibrary { tried: format!("{path:?} is not UTF-8") }))?;
        Self::start(|| Functions::load_from(name).map_err(|tried| Error::Load(LoadError::NoLibrary { tried })))
    }

    fn start(load: impl FnOnce() -> Result<Functions>) -> Result<Self> {
        let origin = ProcessIdentity::current();
        // Before the library is loaded: in a fork made while another thread loads or initializes it, the library's locks stay held.
        let exchanged = INITIALISED_BY.compare_exchange(0, origin.to_bits(), Ordering::AcqRel, Ordering::Acquire);
        if let Some(earlier) = exchanged.err().and_then(ProcessIdentity::from_bits) {
            earlier.check()?;
        }
        let initialised = load().and_then(|functions| {
            // SAFETY: no pointers.
            unsafe { functions.init(0) }.map_err(|error| match error {
                Error::Driver { code: code::NO_DEVICE, .. } => Error::Load(LoadError::NoDevice),
                error => error,
            })?;
            Ok(functions)
        });
        if initialised.is_err() && exchanged.is_ok() {
            // A fork may then try to load it.
            INITIALISED_BY.store(0, Ordering::Release);
        }
        let functions = initialised?;
        let ties = Arc::new(Ties::publish()?);
        let driver = Self {
            core: Arc::new(Core {
                functions,
                identity: Identity::new(),
                origin,
                contexts: Mutex::default(),
                programs: Mutex::default(),
                handles: RwLock::default(),
                events: RwLock::default(),
                pools: RwLock::default(),
                opening: Mutex::default(),
                addresses: RwLock::new(Addresses::new(&ties)),
                ties,
            }),
            windows: Arc::default(),
        };
        if driver.device_count()? == 0 {
            return Err(Error::Load(LoadError::NoDevice));
        }
        Ok(driver)
    }

    /// Locks the addresses to change the mappings of a range, which must belong to this object and have no open window.
    fn lock_own(&self, call: &'static str, address: u64, size: u64) -> Result<RwLockWriteGuard<'_, Addresses>> {
        self.core.origin.check()?;
        let addresses = self.core.addresses_mut();
        let own = addresses.in_reservation(address, size) && !self.windows.overlap(address, size);
        if own { Ok(addresses) } else { Err(failure(call, code::INVALID_VALUE)) }
    }

    /// Some driver calls accept -1 as a device, meaning the CPU.
    fn check_location(&self, location: Location) -> Result<()> {
        match location {
            Location::Device(ordinal) => self.core.device(ordinal).map(drop),
            Location::HostNuma(_) => self.core.origin.check(),
        }
    }

    /// Runs a copy if memory of this object covers the range. Other addresses could be anything, even host memory.
    fn copy(
        &self,
        call: &'static str,
        ordinal: i32,
        address: u64,
        size: usize,
        copy: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        self.core.origin.check()?;
        let addresses = self.core.addresses();
        if !addresses.cover(address, size as u64) {
            return Err(failure(call, code::INVALID_VALUE));
        }
        self.core.in_context(ordinal, || self.core.with_relaxed_capture(copy))
    }
}

impl Core {
    /// The driver's number of a device. Today it equals the ordinal, but only the driver guarantees it.
    fn device(&self, ordinal: i32) -> Result<c_int> {
        self.origin.check()?;
        let mut device = 0;
        // SAFETY: the pointer is valid for one write.
        unsafe { self.functions.device_get(&mut device, ordinal) }?;
        Ok(device)
    }

    fn context(&self, ordinal: i32) -> Result<Context> {
        let device = self.device(ordinal)?;
        let mut contexts = self.contexts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&context) = contexts.get(&ordinal) {
            return Ok(context);
        }
        let mut context = ptr::null_mut();
        // SAFETY: the pointer is valid for one write. The context is released once, on drop.
        unsafe { self.functions.primary_ctx_retain(&mut context, device) }?;
        let context = Context { device, context };
        contexts.insert(ordinal, context);
        Ok(context)
    }

    /// Runs `call` with the device's primary context current, and restores the thread's context.
    fn in_context<T>(&self, ordinal: i32, call: impl FnOnce() -> Result<T>) -> Result<T> {
        let context = self.context(ordinal)?;
        // SAFETY: the context is retained until this object is dropped.
        unsafe { self.functions.ctx_push_current(context.context) }?;
        let result = call();
        let mut popped = ptr::null_mut();
        // SAFETY: the pointer is valid for one write. The popped context is the pushed one.
        let restored = unsafe { self.functions.ctx_pop_current(&mut popped) };
        result.and_then(|value| restored.map(|()| value))
    }

    /// Runs `call` so that it does not invalidate another thread's stream capture with its waits and frees. Restores the thread's capture
    /// mode.
    fn with_relaxed_capture<T>(&self, call: impl FnOnce() -> Result<T>) -> Result<T> {
        const RELAXED: c_uint = 2;
        let mut mode = RELAXED;
        // SAFETY: the pointer is valid for the read and the write.
        match unsafe { self.functions.thread_exchange_capture_mode(&mut mode) } {
            // Drivers before CUDA 10.1 have no capture modes.
            Err(Error::Load(LoadError::MissingSymbol { .. })) => return call(),
            exchanged => exchanged?,
        }
        let result = call();
        // SAFETY: as above. It is the earlier mode.
        let back = unsafe { self.functions.thread_exchange_capture_mode(&mut mode) };
        result.and_then(|value| back.map(|()| value))
    }

    /// Allocates and frees one byte of page-locked memory, which waits for all work of the current context.
    fn allocate_and_free(&self) -> Result<()> {
        let mut start = ptr::null_mut();
        // SAFETY: the pointer is valid for one write.
        unsafe { self.functions.mem_host_alloc(&mut start, 1, 0) }?;
        // SAFETY: it was just allocated, and no other code has it.
        unsafe { self.functions.mem_free_host(start) }
    }

    /// Prevents a handle's release until the guard is dropped. Fails if the driver did not return the handle.
    fn hold_handle(&self, call: &'static str, handle: Handle) -> Result<RwLockReadGuard<'_, HandleTable>> {
        self.origin.check()?;
        let handles = self.handles.read().unwrap_or_else(PoisonError::into_inner);
        if handles.contains_key(&handle) { Ok(handles) } else { Err(failure(call, code::INVALID_VALUE)) }
    }

    fn add_handle(&self, number: u64, imported: Option<Arc<Tie>>) -> Handle {
        let handle = Handle { by: self.identity, number };
        let mut handles = self.handles.write().unwrap_or_else(PoisonError::into_inner);
        handles.entry(handle).or_insert(KnownHandle { count: 0, imported }).count += 1;
        handle
    }

    fn addresses(&self) -> RwLockReadGuard<'_, Addresses> {
        self.addresses.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn opening(&self) -> MutexGuard<'_, ()> {
        self.opening.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the addresses to change them. Waits for copies in progress.
    fn addresses_mut(&self) -> RwLockWriteGuard<'_, Addresses> {
        self.addresses.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of bytes from an address to the end of its allocation, whose context is current.
    fn reach(&self, address: u64) -> Result<u64> {
        let (base, size) = self.extent(address)?;
        let reach = base.checked_add(size).and_then(|end| end.checked_sub(address));
        reach.ok_or_else(|| failure("cuMemGetAddressRange_v2", code::UNKNOWN))
    }

    /// The start and size of the allocation that contains an address. Its context is current.
    fn extent(&self, address: u64) -> Result<(u64, u64)> {
        let mut base = 0;
        let mut size = 0;
        // SAFETY: both pointers are valid for one write; the driver looks the address up.
        unsafe { self.functions.mem_get_address_range(&mut base, &mut size, address) }?;
        Ok((base, size as u64))
    }
}

impl PageLocker for Core {
    unsafe fn unlock(&self, start: NonNull<u8>, _: usize) -> Result<()> {
        if self.origin.check().is_err() {
            return Ok(());
        }
        // SAFETY: upheld by the caller; the driver allocated it.
        unsafe { self.functions.mem_free_host(start.as_ptr().cast()) }
    }
}

impl Core {
    /// Frees the kernels, and reports events that were not destroyed.
    fn drop_kernels_and_events(&mut self) {
        let events = self.events.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !events.is_empty() {
            tracing::warn!(events = events.len(), "events were not destroyed");
        }
        for (ordinal, slot) in std::mem::take(self.programs.get_mut().unwrap_or_else(PoisonError::into_inner)) {
            let Some(program) = slot.lock().unwrap_or_else(PoisonError::into_inner).take() else { continue };
            let unloaded = self.in_context(ordinal, || {
                program.unload(&self.functions);
                Ok(())
            });
            if let Err(error) = unloaded {
                tracing::warn!(%error, ordinal, "can't unload the kernels");
            }
        }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        if self.origin.check().is_err() {
            return;
        }
        self.drop_kernels_and_events();
        let contexts = self.contexts.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (ordinal, context) in contexts {
            // SAFETY: no pointers. It was retained once, and nothing in this object still uses it.
            if let Err(error) = unsafe { self.functions.primary_ctx_release(context.device) } {
                tracing::warn!(%error, ordinal, "can't release the primary context");
            }
        }
    }
}

/// Exits without running the libraries' exit handlers: the driver's handler may wait forever for a thread inside the driver.
pub fn exit_at_once(code: i32) -> ! {
    // SAFETY: it does not return, and has no preconditions.
    unsafe { nix::libc::_exit(code) }
}

fn flags_of(access: Option<Access>) -> c_uint {
    match access {
        None => PROT_NONE,
        Some(Access::ReadOnly) => PROT_READ,
        Some(Access::ReadWrite) => PROT_READWRITE,
    }
}

fn raw_properties(properties: &Properties) -> AllocationProp {
    let handle_types = if properties.exportable { HANDLE_TYPE_POSIX_FD } else { 0 };
    AllocationProp {
        gpu_direct_rdma: properties.gpu_direct_rdma.into(),
        ..AllocationProp::pinned(properties.location, handle_types)
    }
}

/// Takes ownership of the descriptor that a call returned, if it did.
///
/// # Safety
/// If it is a descriptor, it has no other owner.
unsafe fn adopt(call: &'static str, fd: RawFd) -> Result<OwnedFd> {
    if fd < 0 {
        return Err(failure(call, code::UNKNOWN));
    }
    // SAFETY: upheld by the caller.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    sys::above_standard(fd).map_err(|error| failure_with(call, code::OPERATING_SYSTEM, Some(error)))
}

/// Sets close-on-exec.
fn close_on_exec(call: &'static str, fd: &OwnedFd) -> Result<()> {
    fcntl(fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))
        .map(drop)
        .map_err(|errno| failure_with(call, code::OPERATING_SYSTEM, Some(errno.into())))
}
