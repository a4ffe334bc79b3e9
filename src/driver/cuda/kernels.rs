//! The kernels that write and check the pattern: loaded once for each device, and kept.

use std::{
    ffi::{CStr, c_uint, c_void},
    ptr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use cudarc::driver::sys::CUdevice_attribute as DeviceAttribute;

use super::{
    super::{
        Access, code, failure,
        kernels::{Counted, Kernels, Stretch},
    },
    Core, Functions,
};
use crate::error::Result;

/// As text, for every GPU that there is: the driver compiles it. It ends with a null byte.
const TEXT: &str = concat!(include_str!("pattern.ptx"), "\0");
const FILL: &CStr = c"vmmfd_fill";
const VERIFY: &CStr = c"vmmfd_verify";

/// Threads of a block.
const THREADS: u32 = 256;

/// The most blocks that check, for each multiprocessor: on an H200 4.55 TB/s at 8 GiB, as with 32, and at 1 GiB 2 % more. Of those
/// that write there are as many as the memory has vectors for: 4.69 TB/s where 64 for each multiprocessor write 4.33.
const CHECKING: u32 = 64;

/// The most blocks that there can be.
const MOST_BLOCKS: u32 = (1 << 31) - 1;

/// The bytes that a thread moves at a time.
const VECTOR: u64 = 16;

/// What `vmmfd_verify` begins with: nothing wrong yet, and no first.
const NOTHING: [u64; 2] = [0, u64::MAX];

/// The kernels of one device, and what they need there.
#[derive(Debug, Default)]
pub(super) struct Program {
    module: Handle,
    fill: Handle,
    verify: Handle,
    begin: Handle,
    end: Handle,
    /// Two numbers in the device's memory: how many words were wrong, and the first of them.
    result: u64,
    multiprocessors: u32,
}

/// What the driver numbers by a pointer.
#[derive(Debug, Clone, Copy)]
struct Handle(*mut c_void);

impl Default for Handle {
    fn default() -> Self {
        Self(ptr::null_mut())
    }
}

// SAFETY: it is a number that the driver takes from any thread.
unsafe impl Send for Handle {}

/// A device's kernels, if they are loaded. A caller holds it while it runs one: the numbers in the device's memory are one caller's.
pub(super) type Slot = Arc<Mutex<Option<Program>>>;

impl Program {
    /// Loads the kernels into the current context. What is there when it fails is for [`Program::unload`].
    fn load(&mut self, functions: &Functions, multiprocessors: u32) -> Result<()> {
        // SAFETY: all pointers are valid for the calls, and the text ends with a null byte.
        unsafe {
            functions.module_load_data(&mut self.module.0, TEXT.as_ptr().cast())?;
            functions.module_get_function(&mut self.fill.0, self.module.0, FILL.as_ptr())?;
            functions.module_get_function(&mut self.verify.0, self.module.0, VERIFY.as_ptr())?;
            functions.event_create(&mut self.begin.0, 0)?;
            functions.event_create(&mut self.end.0, 0)?;
            functions.mem_alloc(&mut self.result, size_of_val(&NOTHING))?;
        }
        self.multiprocessors = multiprocessors.max(1);
        Ok(())
    }

    /// Gives back what there is. The context that it was loaded into is current, and nothing of it runs.
    pub(super) fn unload(&self, functions: &Functions) {
        // SAFETY: what is not null was given out by the driver, and is given back once.
        let given_back = unsafe {
            [
                (self.result != 0).then(|| functions.mem_free(self.result)),
                (!self.begin.0.is_null()).then(|| functions.event_destroy(self.begin.0)),
                (!self.end.0.is_null()).then(|| functions.event_destroy(self.end.0)),
                (!self.module.0.is_null()).then(|| functions.module_unload(self.module.0)),
            ]
        };
        for error in given_back.into_iter().flatten().filter_map(Result::err) {
            tracing::warn!(%error, "what the kernels needed can't be given back");
        }
    }

    /// Runs a kernel on a stretch, between the two events, on so many blocks at most. It is under way when this returns, also if
    /// it failed.
    fn launch(&self, functions: &Functions, kernel: Handle, most: u32, stretch: &Stretch) -> Result<()> {
        let Stretch { mut address, mut start, mut size, mut salt } = *stretch;
        let mut result = self.result;
        // The one that only writes has no last argument, and does not look for it.
        let mut arguments: [*mut c_void; 5] = [
            (&raw mut address).cast(),
            (&raw mut start).cast(),
            (&raw mut size).cast(),
            (&raw mut salt).cast(),
            (&raw mut result).cast(),
        ];
        let wanted = (size / VECTOR).div_ceil(THREADS.into());
        let blocks = u32::try_from(wanted).unwrap_or(most).clamp(1, most);
        let (stream, none) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: null is the default stream; the events and the kernel are alive; the arguments are those of the kernel, and
        // are read before the call returns. The caller vouches for the memory.
        unsafe {
            functions.event_record(self.begin.0, stream)?;
            functions.launch_kernel(kernel.0, blocks, 1, 1, THREADS, 1, 1, 0, stream, arguments.as_mut_ptr(), none)?;
            functions.event_record(self.end.0, stream)
        }
    }

    /// How long what ran between the two events took. Both have passed.
    fn took(&self, functions: &Functions) -> Result<Duration> {
        let mut milliseconds = 0.0;
        // SAFETY: the pointer is valid for the one write; the events are alive.
        unsafe { functions.event_elapsed_time(&mut milliseconds, self.begin.0, self.end.0) }?;
        Ok(Duration::try_from_secs_f64(f64::from(milliseconds.max(0.0)) / 1000.0).unwrap_or_default())
    }
}

impl Core {
    fn slot(&self, ordinal: i32) -> Slot {
        let mut programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(programs.entry(ordinal).or_default())
    }

    /// Loads the kernels of the current context, if they are not loaded.
    fn loaded<'a>(&self, ordinal: i32, program: &'a mut Option<Program>) -> Result<&'a Program> {
        if program.is_none() {
            let mut multiprocessors = 0;
            let number = DeviceAttribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as c_uint;
            let device = self.device(ordinal)?;
            // SAFETY: the pointer is valid for the one write.
            unsafe { self.functions.device_get_attribute(&mut multiprocessors, number, device) }?;
            let mut fresh = Program::default();
            if let Err(error) = fresh.load(&self.functions, multiprocessors.unsigned_abs()) {
                fresh.unload(&self.functions);
                return Err(error);
            }
            *program = Some(fresh);
        }
        program.as_ref().ok_or_else(|| failure("cuModuleLoadData", code::UNKNOWN))
    }

    /// Runs a kernel on memory that the device may access so, and nothing of it is under way when this returns.
    fn run<T>(
        &self,
        ordinal: i32,
        stretch: &Stretch,
        access: Access,
        work: impl FnOnce(&Functions, &Program) -> Result<T>,
    ) -> Result<T> {
        self.origin.check()?;
        let Stretch { address, start, size, .. } = *stretch;
        let slot = self.slot(ordinal);
        self.within(ordinal, || {
            let mut program = locked(&slot);
            let program = self.loaded(ordinal, &mut program)?;
            let addresses = self.known_addresses();
            let ends = start.checked_add(size).is_some();
            if !ends || address % 4 != start % 4 || !addresses.let_device(ordinal, address, size, access) {
                return Err(failure("cuLaunchKernel", code::INVALID_VALUE));
            }
            work(&self.functions, program).inspect_err(|_| {
                // It may still run, and must not when the table is unlocked. Its own failure is the same one again.
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
        // Held while they are loaded or run, and a caller that waits for that finds them.
        self.slot(ordinal).try_lock().map_or(true, |program| program.is_some())
    }

    fn load(&self, ordinal: i32) -> Result<()> {
        self.origin.check()?;
        let slot = self.slot(ordinal);
        self.within(ordinal, || self.loaded(ordinal, &mut locked(&slot)).map(drop))
    }

    fn fill(&self, ordinal: i32, stretch: &Stretch) -> Result<Duration> {
        self.run(ordinal, stretch, Access::ReadWrite, |functions, program| {
            program.launch(functions, program.fill, MOST_BLOCKS, stretch)?;
            // SAFETY: null is the default stream.
            unsafe { functions.stream_synchronize(ptr::null_mut()) }?;
            program.took(functions)
        })
    }

    fn verify(&self, ordinal: i32, stretch: &Stretch) -> Result<Counted> {
        self.run(ordinal, stretch, Access::ReadOnly, |functions, program| {
            let mut result = NOTHING;
            // SAFETY: both ends have room for the two numbers. The second copy is on the kernel's stream, and waits for it.
            unsafe {
                functions.memcpy_htod(program.result, (&raw const result).cast(), size_of_val(&result))?;
                program.launch(functions, program.verify, program.multiprocessors.saturating_mul(CHECKING), stretch)?;
                functions.memcpy_dtoh((&raw mut result).cast(), program.result, size_of_val(&result))?;
            }
            let [mismatches, first] = result;
            Ok(Counted { mismatches, first: (mismatches > 0).then_some(first), took: program.took(functions)? })
        })
    }
}
