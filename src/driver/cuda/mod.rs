//! The CUDA backend: the real driver, found at run time. Nothing of a toolkit is needed, to build or to run.
//!
//! It keeps what it gave out, because the driver does not catch all mistakes: mapping a released handle was seen to crash
//! inside the library, and a mapping to reach over the end of its reservation into the next one. What is not in the tables
//! is answered here, with the driver's own number.
//!
//! What the SAFETY comments below take for granted: the driver takes calls from any thread, and each call that names a handle or an
//! address holds its table while it runs, so that no other thread gives it back meanwhile. What other processes do with
//! shared memory changes its bytes and nothing else, and memory of a GPU is no memory of Rust's: only copies by the driver reach
//! it, into slices that the caller has borrowed until they are done. Host memory that a GPU shares is read and written by
//! [`super::copy`].

#![allow(unsafe_code)]

mod addresses;
mod bare;
mod diagnosis;
mod ffi;
mod kernels;
mod legacy;
mod pool;
mod verbs;

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::{c_int, c_uint, c_void},
    os::fd::{FromRawFd, OwnedFd, RawFd},
    ptr::{self, NonNull},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicU64, Ordering},
    },
};

use cudarc::driver::sys::{self};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};

use self::kernels::Slot;
use self::{
    addresses::Addresses,
    ffi::{AllocationProp, Functions, HANDLE_TYPE_POSIX_FD},
};
use super::EventHandle;
use super::{
    Access, Handle, Identity, Location, PoolHandle, Properties, Verbs, code, failure, failure_with,
    window::{PageLocker, Windows},
};
use crate::{
    error::{Error, LoadError, Result},
    sys::fork::ProcessIdentity,
};

/// The process that first began to load and initialise the driver, or 0. The driver does not survive a fork, and reports that by no
/// clear error.
static INITIALISED_BY: AtomicU64 = AtomicU64::new(0);

/// The CUDA driver of this machine.
#[derive(Debug)]
pub struct CudaDriver {
    core: Arc<Core>,
    /// Only opened, and only asked for, while the addresses are held.
    windows: Arc<Windows>,
}

/// The pools that the driver gave out.
type PoolTable = BTreeMap<PoolHandle, KnownPool>;

/// A pool.
#[derive(Debug, Clone, Copy)]
struct KnownPool {
    /// Whether it was created here: the others were imported.
    created: bool,
    /// How often it was given out: importing one again gives the same handle, and the driver does not count.
    count: usize,
}

/// The events that the driver gave out, and the device that each is of.
type EventTable = BTreeMap<EventHandle, i32>;

/// What page-locked memory and windows keep alive beyond the driver object. It is also the other mechanisms, some of whose
/// verbs are called as the driver's own are.
#[derive(Debug)]
struct Core {
    functions: Functions,
    identity: Identity,
    origin: ProcessIdentity,
    contexts: Mutex<BTreeMap<i32, Context>>,
    /// The kernels of each device. A call holds a device's own while one runs; it is taken before the addresses.
    programs: Mutex<BTreeMap<i32, Slot>>,
    /// A call on a handle holds it for reading, so that the handle is not released under it.
    handles: RwLock<BTreeSet<Handle>>,
    /// A call on an event holds it for reading, so that the event is not destroyed under it.
    events: RwLock<EventTable>,
    /// A call on a pool holds it for reading, so that the pool is not destroyed under it. It is taken before the addresses.
    pools: RwLock<PoolTable>,
    /// Held while memory of others is opened or closed: the driver gives the same address again, and does not always count. It
    /// is taken after the pools and before the addresses.
    opening: Mutex<()>,
    /// A copy holds it for reading, so that nothing is unmapped or freed under it. It is not held for writing while the driver
    /// may take long: all copies would wait.
    addresses: RwLock<Addresses>,
}

/// A device's primary context, retained for the life of the driver object.
#[derive(Debug, Clone, Copy)]
struct Context {
    device: c_int,
    context: *mut c_void,
}

// SAFETY: a CUcontext is a handle that the driver lets any thread push.
unsafe impl Send for Context {}

impl CudaDriver {
    /// Loads the driver library (`libcuda.so.1`, else `libcuda.so`) and initialises it. It stays loaded.
    ///
    /// # Errors
    /// - [`LoadError::NoLibrary`]: no library loads.
    /// - [`LoadError::Stub`]: what loads is the toolkit's stub.
    /// - [`LoadError::NoDevice`]: the driver works and has no device to offer.
    /// - [`LoadError::MissingSymbol`]: the library is no driver, or too old.
    /// - [`Error::Forked`]: this process is a fork of one that initialised the driver.
    /// - [`Error::Driver`]: the driver is there and fails.
    ///
    /// Driver calls: `cuInit`, `cuDeviceGetCount`.
    pub fn load() -> Result<Self> {
        Self::start(Functions::load)
    }

    /// As [`CudaDriver::load`], from this file: for a driver that the loader does not find by itself.
    ///
    /// # Errors
    /// As [`CudaDriver::load`].
    pub fn load_from(path: &std::path::Path) -> Result<Self> {
        let name = path
            .to_str()
            .ok_or_else(|| Error::Load(LoadError::NoLibrary { tried: format!("{path:?} is not UTF-8") }))?;
        Self::start(|| Functions::load_from(name).map_err(|tried| Error::Load(LoadError::NoLibrary { tried })))
    }

    fn start(load: impl FnOnce() -> Result<Functions>) -> Result<Self> {
        let origin = ProcessIdentity::current();
        // Before the library is loaded: a fork while another thread loads or initialises it finds the library's locks held.
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
            // A fork may try again.
            INITIALISED_BY.store(0, Ordering::Release);
        }
        let functions = initialised?;
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
                addresses: RwLock::default(),
            }),
            windows: Arc::default(),
        };
        if driver.device_count()? == 0 {
            return Err(Error::Load(LoadError::NoDevice));
        }
        Ok(driver)
    }

    /// The addresses, to change what is mapped in a range, if the range is this object's and no window is open on it.
    fn own(&self, call: &'static str, address: u64, size: u64) -> Result<RwLockWriteGuard<'_, Addresses>> {
        self.core.origin.check()?;
        let addresses = self.core.changed();
        let own = addresses.hold(address, size) && !self.windows.touch(address, size);
        if own { Ok(addresses) } else { Err(failure(call, code::INVALID_VALUE)) }
    }

    /// The driver takes -1 for a device here and there, and means the CPU.
    fn check_location(&self, location: Location) -> Result<()> {
        match location {
            Location::Device(ordinal) => self.core.device(ordinal).map(drop),
            Location::HostNuma(_) => self.core.origin.check(),
        }
    }

    /// Runs a copy if memory of this object covers the range: another address might be anything, host memory too.
    fn copy(
        &self,
        call: &'static str,
        ordinal: i32,
        address: u64,
        size: usize,
        copy: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        self.core.origin.check()?;
        let addresses = self.core.known_addresses();
        if !addresses.cover(address, size as u64) {
            return Err(failure(call, code::INVALID_VALUE));
        }
        self.core.within(ordinal, || self.core.relaxed(copy))
    }
}

impl Core {
    /// The driver's number of a device: the same as its ordinal today, but only the driver may say so.
    fn device(&self, ordinal: i32) -> Result<c_int> {
        self.origin.check()?;
        let mut device = 0;
        // SAFETY: the pointer is valid for the one write.
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
        // SAFETY: the pointer is valid for the one write; the context is released once, on drop.
        unsafe { self.functions.primary_ctx_retain(&mut context, device) }?;
        let context = Context { device, context };
        contexts.insert(ordinal, context);
        Ok(context)
    }

    /// Runs `call` with the device's primary context current, and leaves the thread's own as it was.
    fn within<T>(&self, ordinal: i32, call: impl FnOnce() -> Result<T>) -> Result<T> {
        let context = self.context(ordinal)?;
        // SAFETY: the context is retained until this object is dropped.
        unsafe { self.functions.ctx_push_current(context.context) }?;
        let result = call();
        let mut popped = ptr::null_mut();
        // SAFETY: the pointer is valid for the one write, and what is popped is what was pushed.
        let restored = unsafe { self.functions.ctx_pop_current(&mut popped) };
        result.and_then(|value| restored.map(|()| value))
    }

    /// Runs `call` while another thread may capture a stream into a graph: what it waits for and frees is no concern of that graph's, whose
    /// capture goes on. The thread's own mode is as it was afterwards.
    fn relaxed<T>(&self, call: impl FnOnce() -> Result<T>) -> Result<T> {
        const RELAXED: c_uint = 2;
        let mut mode = RELAXED;
        // SAFETY: the pointer is valid for the read and the write.
        match unsafe { self.functions.thread_exchange_capture_mode(&mut mode) } {
            // A driver before CUDA 10.1, which has no modes.
            Err(Error::Load(LoadError::MissingSymbol { .. })) => return call(),
            exchanged => exchanged?,
        }
        let result = call();
        // SAFETY: as above; it is the mode that there was before.
        let back = unsafe { self.functions.thread_exchange_capture_mode(&mut mode) };
        result.and_then(|value| back.map(|()| value))
    }

    /// Allocates a little page-locked memory and frees it, which waits for all work of the current context.
    fn allocate_and_free(&self) -> Result<()> {
        let mut start = ptr::null_mut();
        // SAFETY: the pointer is valid for the one write.
        unsafe { self.functions.mem_host_alloc(&mut start, 1, 0) }?;
        // SAFETY: it was just allocated, and nothing has it.
        unsafe { self.functions.mem_free_host(start) }
    }

    /// Keeps a handle from being released for as long as the guard lives, if the driver gave it out.
    fn known(&self, call: &'static str, handle: Handle) -> Result<RwLockReadGuard<'_, BTreeSet<Handle>>> {
        self.origin.check()?;
        let handles = self.handles.read().unwrap_or_else(PoisonError::into_inner);
        if handles.contains(&handle) { Ok(handles) } else { Err(failure(call, code::INVALID_VALUE)) }
    }

    fn gained(&self, number: u64) -> Handle {
        let handle = Handle { by: self.identity, number };
        self.handles.write().unwrap_or_else(PoisonError::into_inner).insert(handle);
        handle
    }

    fn known_addresses(&self) -> RwLockReadGuard<'_, Addresses> {
        self.addresses.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn opening(&self) -> MutexGuard<'_, ()> {
        self.opening.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The addresses, to change them. Copies under way are waited for.
    fn changed(&self) -> RwLockWriteGuard<'_, Addresses> {
        self.addresses.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many bytes there are from an address on, of the allocation that it is in. Its context is current.
    fn reach(&self, address: u64) -> Result<u64> {
        let (base, size) = self.extent(address)?;
        let reach = base.checked_add(size).and_then(|end| end.checked_sub(address));
        reach.ok_or_else(|| failure("cuMemGetAddressRange_v2", code::UNKNOWN))
    }

    /// The allocation that an address is in, whose context is current.
    fn extent(&self, address: u64) -> Result<(u64, u64)> {
        let (mut base, mut size) = (0, 0);
        // SAFETY: both pointers are valid for the one write; the driver looks the address up.
        unsafe { self.functions.mem_get_address_range(&mut base, &mut size, address) }?;
        Ok((base, size as u64))
    }
}

impl PageLocker for Core {
    unsafe fn take_back(&self, start: NonNull<u8>, _: usize) -> Result<()> {
        if self.origin.check().is_err() {
            return Ok(());
        }
        // SAFETY: the caller's promise; the driver allocated it.
        unsafe { self.functions.mem_free_host(start.as_ptr().cast()) }
    }
}

impl Core {
    /// Gives back what the tools loaded.
    fn drop_tools(&mut self) {
        let events = self.events.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !events.is_empty() {
            tracing::warn!(events = events.len(), "events were not given back");
        }
        for (ordinal, slot) in std::mem::take(self.programs.get_mut().unwrap_or_else(PoisonError::into_inner)) {
            let Some(program) = slot.lock().unwrap_or_else(PoisonError::into_inner).take() else { continue };
            let unloaded = self.within(ordinal, || {
                program.unload(&self.functions);
                Ok(())
            });
            if let Err(error) = unloaded {
                tracing::warn!(%error, ordinal, "the kernels can't be unloaded");
            }
        }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        if self.origin.check().is_err() {
            return;
        }
        self.drop_tools();
        let contexts = self.contexts.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (ordinal, context) in contexts {
            // SAFETY: no pointers; it was retained once, and nothing of this object uses it any more.
            if let Err(error) = unsafe { self.functions.primary_ctx_release(context.device) } {
                tracing::warn!(%error, ordinal, "the primary context can't be released");
            }
        }
    }
}

/// Ends the process without the exit handlers that libraries registered: the driver's may wait for ever for a thread that
/// is inside it.
pub fn exit_at_once(code: i32) -> ! {
    // SAFETY: it does not return, and needs nothing.
    unsafe { nix::libc::_exit(code) }
}

fn flags_of(access: Option<Access>) -> c_uint {
    let flags = match access {
        None => sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE,
        Some(Access::ReadOnly) => sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ,
        Some(Access::ReadWrite) => sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    flags as c_uint
}

fn raw_properties(properties: &Properties) -> AllocationProp {
    let handle_types = if properties.exportable { HANDLE_TYPE_POSIX_FD } else { 0 };
    AllocationProp {
        gpu_direct_rdma: properties.gpu_direct_rdma.into(),
        ..AllocationProp::pinned(properties.location, handle_types)
    }
}

/// Takes over the descriptor that a call gave, if it gave one.
///
/// # Safety
/// If it is a descriptor, it has no other owner.
unsafe fn adopt(call: &'static str, fd: RawFd) -> Result<OwnedFd> {
    if fd < 0 {
        return Err(failure(call, code::UNKNOWN));
    }
    // SAFETY: the caller vouches for it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Sees to it that a descriptor is closed when a program is executed.
fn close_on_exec(call: &'static str, fd: &OwnedFd) -> Result<()> {
    fcntl(fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))
        .map(drop)
        .map_err(|errno| failure_with(call, code::OPERATING_SYSTEM, Some(errno.into())))
}
