//! [`Diagnosis`] with the CUDA driver.

use std::{
    ffi::{CStr, c_uint, c_void},
    os::fd::{OwnedFd, RawFd},
    path::PathBuf,
    ptr,
    sync::{PoisonError, RwLockReadGuard, RwLockWriteGuard},
    time::{Duration, Instant},
};

use super::{
    super::{Diagnosis, EventHandle, Handle, Location, MadeFor, code, failure},
    Core, EventTable, adopt, close_on_exec,
    ffi::{AllocationProp, HANDLE_TYPE_FABRIC, HANDLE_TYPE_POSIX_FD, Opaque},
};
use crate::error::Result;

/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`. Bindings older than CUDA 11.7 don't name it.
const RANGE_HANDLE_DMA_BUF: c_uint = 1;

/// `CU_EVENT_DISABLE_TIMING`, required for shared events.
const EVENT_DISABLE_TIMING: c_uint = 2;
/// `CU_EVENT_INTERPROCESS`.
const EVENT_INTERPROCESS: c_uint = 4;

/// A kernel of one thread that stores a word. PTX, which the driver compiles for any GPU.
const STORE: &CStr = c"\
.version 6.0
.target sm_50
.address_size 64

.visible .entry vmmfd_store(.param .u64 vmmfd_to, .param .u32 vmmfd_value)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [vmmfd_to];
    ld.param.u32 %r1, [vmmfd_value];
    cvta.to.global.u64 %rd2, %rd1;
    st.global.u32 [%rd2], %r1;
    ret;
}
";
const STORE_NAME: &CStr = c"vmmfd_store";

impl Core {
    /// Prevents an event's destruction until the guard is dropped. Fails if the driver did not return the event on this device.
    fn hold_event(
        &self,
        call: &'static str,
        ordinal: i32,
        event: EventHandle,
    ) -> Result<RwLockReadGuard<'_, EventTable>> {
        self.origin.check()?;
        let events = self.events.read().unwrap_or_else(PoisonError::into_inner);
        if events.get(&event) == Some(&ordinal) { Ok(events) } else { Err(failure(call, code::INVALID_VALUE)) }
    }

    fn events_mut(&self) -> RwLockWriteGuard<'_, EventTable> {
        self.events.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until all work in the current context has finished.
    pub(super) fn settle(&self) -> Result<()> {
        // SAFETY: no pointers.
        unsafe { self.functions.ctx_synchronize() }.inspect_err(|_| {
            // SAFETY: null is the default stream, which all work uses. A failure here repeats the same error.
            let _ = unsafe { self.functions.stream_synchronize(ptr::null_mut()) };
        })
    }

    fn add_event(&self, ordinal: i32, event: *mut c_void) -> EventHandle {
        let handle = EventHandle(event.addr() as u64);
        self.events_mut().insert(handle, ordinal);
        handle
    }
}

impl Diagnosis for Core {
    fn library(&self) -> Result<PathBuf> {
        self.origin.check()?;
        self.functions.file()
    }

    fn create_with(&self, ordinal: i32, size: u64, made_for: MadeFor) -> Result<Handle> {
        self.device(ordinal)?;
        let (handle_type, rdma) = match made_for {
            MadeFor::Fabric => (HANDLE_TYPE_FABRIC, 0),
            MadeFor::Rdma => (HANDLE_TYPE_POSIX_FD, 1),
        };
        let plain = AllocationProp::pinned(Location::Device(ordinal), handle_type);
        let properties = AllocationProp { gpu_direct_rdma: rdma, ..plain };
        let mut handle = 0;
        // SAFETY: both pointers are valid for the call.
        unsafe { self.functions.mem_create(&mut handle, size as usize, &properties, 0) }?;
        Ok(self.add_handle(handle, None))
    }

    fn export_fabric(&self, handle: Handle) -> Result<[u8; 64]> {
        let _held = self.hold_handle("cuMemExportToShareableHandle", handle)?;
        let mut fabric = Opaque([0; 64]);
        // SAFETY: the handle is alive. For this type the driver writes 64 bytes.
        unsafe { self.functions.mem_export((&raw mut fabric).cast(), handle.number, HANDLE_TYPE_FABRIC, 0) }?;
        Ok(fabric.0)
    }

    fn export_dma_buf(&self, ordinal: i32, address: u64, size: u64) -> Result<OwnedFd> {
        const CALL: &str = "cuMemGetHandleForAddressRange";
        self.origin.check()?;
        let addresses = self.addresses();
        if !addresses.all_mapped(address, size) {
            return Err(failure(CALL, code::INVALID_VALUE));
        }
        let mut fd: RawFd = -1;
        self.in_context(ordinal, || {
            let shareable = (&raw mut fd).cast();
            // SAFETY: the range stays mapped while the table is locked. For this type the driver writes an int.
            unsafe {
                self.functions.mem_get_handle_for_range(shareable, address, size as usize, RANGE_HANDLE_DMA_BUF, 0)
            }
        })?;
        // SAFETY: the driver opened it for the caller, who must close it.
        let fd = unsafe { adopt(CALL, fd) }?;
        // The driver sets this for memory in tests; for dma-bufs it is undocumented.
        close_on_exec(CALL, &fd)?;
        Ok(fd)
    }

    fn copy_within(&self, ordinal: i32, to: u64, from: u64, size: u64) -> Result<Duration> {
        self.origin.check()?;
        let addresses = self.addresses();
        if !addresses.cover(to, size) || !addresses.cover(from, size) {
            return Err(failure("cuMemcpyDtoD_v2", code::INVALID_VALUE));
        }
        self.in_context(ordinal, || {
            let begun = Instant::now();
            // SAFETY: no pointers. Both ranges stay mapped while the table is locked.
            let copied = unsafe { self.functions.memcpy_dtod(to, from, size as usize) };
            // The copy may still be in progress, even after an error, and must finish before the table is unlocked.
            let done = self.settle();
            copied.and(done).map(|()| begun.elapsed())
        })
    }

    fn store(&self, ordinal: i32, address: u64, value: u32) -> Result<()> {
        self.origin.check()?;
        let addresses = self.addresses();
        // A misaligned store would also fault, and destroy the context.
        if !address.is_multiple_of(4) || !addresses.all_mapped(address, 4) {
            return Err(failure("cuLaunchKernel", code::INVALID_VALUE));
        }
        self.in_context(ordinal, || {
            let functions = &self.functions;
            let mut module = ptr::null_mut();
            let mut kernel = ptr::null_mut();
            // SAFETY: the pointer is valid for one write. The text is null-terminated.
            unsafe { functions.module_load_data(&mut module, STORE.as_ptr().cast()) }?;
            // SAFETY: the pointers are valid for the call. The module is loaded.
            let found = unsafe { functions.module_get_function(&mut kernel, module, STORE_NAME.as_ptr()) };
            let stored = found.and_then(|()| {
                let mut to = address;
                let mut value = value;
                let mut arguments = [(&raw mut to).cast(), (&raw mut value).cast()];
                let arguments = arguments.as_mut_ptr();
                let stream = ptr::null_mut();
                let none = ptr::null_mut();
                // SAFETY: the arguments match the kernel, and are read before the call returns. It writes one word, whose address stays
                // mapped while the table is locked. Null is the default stream.
                let launched = unsafe { functions.launch_kernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, arguments, none) };
                // The kernel may still be running, and must finish before the table is unlocked.
                let done = self.settle();
                launched.and(done)
            });
            // SAFETY: it was loaded above, and none of its kernels is running.
            let unloaded = unsafe { functions.module_unload(module) };
            stored.and(unloaded)
        })
    }

    fn event_create(&self, ordinal: i32) -> Result<EventHandle> {
        self.in_context(ordinal, || {
            let mut event = ptr::null_mut();
            // SAFETY: the pointer is valid for one write.
            unsafe { self.functions.event_create(&mut event, EVENT_DISABLE_TIMING | EVENT_INTERPROCESS) }?;
            Ok(self.add_event(ordinal, event))
        })
    }

    fn event_export(&self, ordinal: i32, event: EventHandle) -> Result<[u8; 64]> {
        let _held = self.hold_event("cuIpcGetEventHandle", ordinal, event)?;
        self.in_context(ordinal, || {
            let mut handle = Opaque([0; 64]);
            // SAFETY: the pointer is valid for one write. The event is alive.
            unsafe { self.functions.ipc_get_event_handle(&mut handle, pointer(event)) }?;
            Ok(handle.0)
        })
    }

    fn event_open(&self, ordinal: i32, handle: &[u8; 64]) -> Result<EventHandle> {
        self.in_context(ordinal, || {
            let mut event = ptr::null_mut();
            // SAFETY: the pointer is valid for one write. The driver checks the handle.
            unsafe { self.functions.ipc_open_event_handle(&mut event, Opaque(*handle)) }?;
            Ok(self.add_event(ordinal, event))
        })
    }

    fn event_record(&self, ordinal: i32, event: EventHandle) -> Result<()> {
        let _held = self.hold_event("cuEventRecord", ordinal, event)?;
        // SAFETY: the event is alive. Null is the default stream.
        self.in_context(ordinal, || unsafe { self.functions.event_record(pointer(event), ptr::null_mut()) })
    }

    fn event_wait(&self, ordinal: i32, event: EventHandle) -> Result<()> {
        let _held = self.hold_event("cuStreamWaitEvent", ordinal, event)?;
        self.in_context(ordinal, || {
            // SAFETY: the event is alive. Null is the default stream.
            unsafe { self.functions.stream_wait_event(ptr::null_mut(), pointer(event), 0) }?;
            // SAFETY: null is the default stream.
            unsafe { self.functions.stream_synchronize(ptr::null_mut()) }
        })
    }

    fn event_destroy(&self, ordinal: i32, event: EventHandle) -> Result<()> {
        self.origin.check()?;
        let mut events = self.events_mut();
        if events.get(&event) != Some(&ordinal) {
            return Err(failure("cuEventDestroy_v2", code::INVALID_VALUE));
        }
        // SAFETY: the event was in the table, and no call with it is in progress.
        self.in_context(ordinal, || unsafe { self.functions.event_destroy(pointer(event)) })?;
        events.remove(&event);
        Ok(())
    }
}

fn pointer(event: EventHandle) -> *mut c_void {
    ptr::without_provenance_mut(event.0 as usize)
}
