//! The kernels that write and check the pattern. Loaded once for each device.

use std::{
    ffi::{CStr, c_void},
    ptr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use super::{
    super::{
        Access, code, failure,
        kernels::{Counted, Kernels, PatternSpan},
    },
    Core, Functions,
    ffi::attribute::MULTIPROCESSOR_COUNT,
};
use crate::error::Result;

/// PTX, which the driver compiles for any GPU. Null-terminated.
const TEXT: &str = concat!(include_str!("pattern.ptx"), "\0");
const FILL: &CStr = c"vmmfd_fill";
const VERIFY: &CStr = c"vmmfd_verify";

/// Threads in a block.
const THREADS: u32 = 256;

/// The largest number of blocks that check, for each multiprocessor. On an H200 it reaches 4.55 TB/s at 8 GiB, as with 32, and 2 % more
/// at 1 GiB. Writing uses a thread for each vector of the memory: 4.69 TB/s, while 64 blocks for each multiprocessor reach 4.33.
const CHECK_BLOCKS: u32 = 64;

/// The largest number of blocks in a grid.
const MAX_BLOCKS: u32 = (1 << 31) - 1;

/// Bytes that a thread processes at a time.
const VECTOR: u64 = 16;

/// The initial result of `vmmfd_verify`: no mismatch, and no first index.
const NO_MISMATCH: [u64; 2] = [0, u64::MAX];

/// The kernels of one device, with their resources.
#[derive(Debug, Default)]
pub(super) struct Program {
    module: Handle,
    fill: Handle,
    verify: Handle,
    begin: Handle,
    end: Handle,
    /// The address of the result in device memory: the number of wrong words, and the index of the first.
    result: u64,
    multiprocessors: u32,
}

/// A driver object that is identified by a pointer.
#[derive(Debug, Clone, Copy)]
struct Handle(*mut c_void);

impl Default for Handle {
    fn default() -> Self {
        Self(ptr::null_mut())
    }
}

// SAFETY: it is a number that the driver accepts from any thread.
unsafe impl Send for Handle {}

/// A device's kernels, if they are loaded. A caller holds the lock while a kernel runs, because the result memory is shared.
pub(super) type Slot = Arc<Mutex<Option<Program>>>;

impl Program {
    /// Loads the kernels into the current context. After a failure, [`Program::unload`] frees the part that was loaded.
    fn load(&mut self, functions: &Functions, multiprocessors: u32) -> Result<()> {
        // SAFETY: all pointers are valid for the calls, and the text ends with a null byte.
        unsafe {
            functions.module_load_data(&mut self.module.0, TEXT.as_ptr().cast())?;
            functions.module_get_function(&mut self.fill.0, self.module.0, FILL.as_ptr())?;
            functions.module_get_function(&mut self.verify.0, self.module.0, VERIFY.as_ptr())?;
            functions.event_create(&mut self.begin.0, 0)?;
            functions.event_create(&mut self.end.0, 0)?;
            functions.mem_alloc(&mut self.result, size_of_val(&NO_MISMATCH))?;
        }
        self.multiprocessors = multiprocessors.max(1);
        Ok(())
    }

    /// Frees all loaded resources. Their context is current, and no kernel is running.
    pub(super) fn unload(&self, functions: &Functions) {
        // SAFETY: non-null values were returned by the driver, and are released once.
        let released = unsafe {
            [
                (self.result != 0).then(|| functions.mem_free(self.result)),
                (!self.begin.0.is_null()).then(|| functions.event_destroy(self.begin.0)),
                (!self.end.0.is_null()).then(|| functions.event_destroy(self.end.0)),
                (!self.module.0.is_null()).then(|| functions.module_unload(self.module.0)),
            ]
        };
        for error in released.into_iter().flatten().filter_map(Result::err) {
            tracing::warn!(%error, "can't free a resource of the kernels");
        }
    }

    /// Starts a kernel on a span, with at most `max_blocks` blocks, between the two events. It may still run on return, even
    /// after an error.
    fn launch(&self, functions: &Functions, kernel: Handle, max_blocks: u32, span: &PatternSpan) -> Result<()> {
        let PatternSpan { mut address, mut start, mut size, mut salt } = *span;
        let mut result = self.result;
        // The kernel that writes does not use the last argument.
        let mut arguments: [*mut c_void; 5] = [
            (&raw mut address).cast(),
            (&raw mut start).cast(),
            (&raw mut size).cast(),
            (&raw mut salt).cast(),
            (&raw mut result).cast(),
        ];
        let wanted = (size / VECTOR).div_ceil(THREADS.into());
        let blocks = u32::try_from(wanted).unwrap_or(max_blocks).clamp(1, max_blocks);
        let stream = ptr::null_mut();
        let none = ptr::null_mut();
        // SAFETY: null is the default stream. The events and the kernel are alive. The arguments match the kernel, and are read before the
        // call returns. The caller guarantees access to the memory.
        unsafe {
            functions.event_record(self.begin.0, stream)?;
            functions.launch_kernel(kernel.0, blocks, 1, 1, THREADS, 1, 1, 0, stream, arguments.as_mut_ptr(), none)?;
            functions.event_record(self.end.0, stream)
        }
    }

    /// The time between the two events, which have completed.
    fn took(&self, functions: &Functions) -> Result<Duration> {
        let mut milliseconds = 0.0;
        // SAFETY: the pointer is valid for one write. The events are alive.
        unsafe { functions.event_elapsed_time(&mut milliseconds, self.begin.0, self.end.0) }?;
        Ok(Duration::try_from_secs_f64(f64::from(milliseconds.max(0.0)) / 1000.0).unwrap_or_default())
    }
}

impl Core {
    fn slot(&self, ordinal: i32) -> Slot {
        let mut programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(programs.entry(ordinal).or_default())
    }

    /// Loads the kernels into the current context unless they are loaded.
    fn loaded<'a>(&self, ordinal: i32, program: &'a mut Option<Program>) -> Result<&'a Program> {
        if program.is_none() {
            let mut multiprocessors = 0;
            let device = self.device(ordinal)?;
            // SAFETY: the pointer is valid for one write.
            unsafe { self.functions.device_get_attribute(&mut multiprocessors, MULTIPROCESSOR_COUNT, device) }?;
            let mut fresh = Program::default();
            if let Err(error) = fresh.load(&self.functions, multiprocessors.unsigned_abs()) {
                fresh.unload(&self.functions);
                return Err(error);
            }
            *program = Some(fresh);
        }
        program.as_ref().ok_or_else(|| failure("cuModuleLoadData", code::UNKNOWN))
    }

    /// Runs a kernel on memory that the device may access. It has finished on return.
    fn run<T>(
        &self,
        ordinal: i32,
        span: &PatternSpan,
        access: Access,
        work: impl FnOnce(&Functions, &Program) -> Result<T>,
    ) -> Result<T> {
        self.origin.check()?;
        let PatternSpan { address, start, size, .. } = *span;
        let slot = self.slot(ordinal);
        self.in_context(ordinal, || {
            let mut program = locked(&slot);
            let program = self.loaded(ordinal, &mut program)?;
            let addresses = self.addresses();
            let ends = start.checked_add(size).is_some();
            if !ends || address % 4 != start % 4 || !addresses.device_may_access(ordinal, address, size, access) {
                return Err(failure("cuLaunchKernel", code::INVALID_VALUE));
            }
            work(&self.functions, program).inspect_err(|_| {
                // The kernel may still be running, and must finish before the table is unlocked. A failure here repeats the same error.
                let _ = self.settle();
            })
        })
    }
}

fn locked(slot: &Slot) -> MutexGuard<'_, Option<Program>> {
    slot.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Kernels for Core {
    fn are_loaded(&self, ordinal: i32) -> bool {
        // A locked slot is being loaded or used: a caller that waits for it finds the kernels loaded.
        self.slot(ordinal).try_lock().map_or(true, |program| program.is_some())
    }

    fn load(&self, ordinal: i32) -> Result<()> {
        self.origin.check()?;
        let slot = self.slot(ordinal);
        self.in_context(ordinal, || self.loaded(ordinal, &mut locked(&slot)).map(drop))
    }

    fn fill(&self, ordinal: i32, span: &PatternSpan) -> Result<Duration> {
        self.run(ordinal, span, Access::ReadWrite, |functions, program| {
            program.launch(functions, program.fill, MAX_BLOCKS, span)?;
            // SAFETY: null is the default stream.
            unsafe { functions.stream_synchronize(ptr::null_mut()) }?;
            program.took(functions)
        })
    }

    fn verify(&self, ordinal: i32, span: &PatternSpan) -> Result<Counted> {
        self.run(ordinal, span, Access::ReadOnly, |functions, program| {
            let mut result = NO_MISMATCH;
            // SAFETY: source and destination have room for the two numbers. The second copy uses the kernel's stream, and waits for it.
            unsafe {
                functions.memcpy_htod(program.result, (&raw const result).cast(), size_of_val(&result))?;
                let max_blocks = program.multiprocessors.saturating_mul(CHECK_BLOCKS);
                program.launch(functions, program.verify, max_blocks, span)?;
                functions.memcpy_dtoh((&raw mut result).cast(), program.result, size_of_val(&result))?;
            }
            let [mismatches, first] = result;
            Ok(Counted { mismatches, first: (mismatches > 0).then_some(first), took: program.took(functions)? })
        })
    }
}
