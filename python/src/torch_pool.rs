//! The two C functions through which PyTorch allocates in shared memory, and what Python asks of that memory.
//!
//! PyTorch's allocator calls them with its lock held, from any thread, with or without the GIL, and while the interpreter ends. They
//! never touch Python and never panic into it. What they cut from is kept for as long as the process lives.

#![allow(unsafe_code)]

use std::{
    collections::BTreeMap,
    ffi::{c_int, c_void},
    panic::{AssertUnwindSafe, catch_unwind},
    ptr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use pyo3::{prelude::*, types::PyDict};
use vmmfd::{
    Error,
    fork::PerProcess,
    memory::{Arenas, Selector},
};

use crate::{driver, error::Outcome, memory::Owned, shared::PyMemory};

/// Arenas by the device's number, which PyTorch counts as the driver does. A fork has none: it takes nothing and gives nothing back.
static ARENAS: PerProcess<Mutex<BTreeMap<c_int, Arc<Arenas>>>> = PerProcess::new(Mutex::default);

/// Why the last block was refused, for whom PyTorch only tells that memory ran out.
static TROUBLE: PerProcess<Mutex<Option<String>>> = PerProcess::new(Mutex::default);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The arenas of a device, opened before.
fn arenas(device: c_int) -> Option<Arc<Arenas>> {
    lock(ARENAS.get()).get(&device).cloned()
}

fn all() -> Vec<Arc<Arenas>> {
    lock(ARENAS.get()).values().cloned().collect()
}

fn allocate(size: isize, device: c_int) -> Result<u64, String> {
    let arenas = arenas(device).ok_or("no vmmfd.torch.pool() is open for this device in this process")?;
    let size = u64::try_from(size).map_err(|_| format!("{size} bytes were asked for"))?;
    arenas.allocate(size).map_err(|error: Error| error.in_full())
}

/// Cuts a block of at least `size` bytes from shared memory of a device. Null means that there is none. PyTorch's
/// `CUDAPluggableAllocator` calls it; the stream does not matter, as PyTorch has synchronised what it freed before.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn vmmfd_torch_malloc(size: isize, device: c_int, _stream: *mut c_void) -> *mut c_void {
    let answer = catch_unwind(|| allocate(size, device)).unwrap_or_else(|_| Err("the allocator panicked".to_owned()));
    match answer {
        Ok(address) => ptr::without_provenance_mut(address as usize),
        Err(reason) => {
            *lock(TROUBLE.get()) = Some(format!("{size} bytes of shared memory: {reason}"));
            ptr::null_mut()
        }
    }
}

/// Takes a block back that [`vmmfd_torch_malloc`] cut. Waits for the device's work if an arena becomes empty, as `cudaFree` does.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn vmmfd_torch_free(block: *mut c_void, _size: isize, device: c_int, _stream: *mut c_void) {
    let free = || {
        let address = block.addr() as u64;
        let freed = arenas(device).is_some_and(|arenas| arenas.free(address));
        freed || all().iter().any(|arenas| arenas.free(address))
    };
    // A block that is not found is one of another process: of the parent of this fork.
    let _ = catch_unwind(AssertUnwindSafe(free));
}

/// Makes ready to cut blocks for a device of CUDA, from arenas of `arena` bytes from now on, `size` bytes of which are expected.
#[pyfunction]
#[pyo3(signature = (device, arena, size=None))]
pub(crate) fn torch_pool_open(py: Python<'_>, device: u32, arena: u64, size: Option<u64>) -> Outcome<()> {
    py.detach(|| {
        let ordinal = device as c_int;
        let arenas = match arenas(ordinal) {
            Some(arenas) => arenas,
            None => {
                let device = driver::device(&driver::driver("cuda")?, Some(Selector::Ordinal(device)))?;
                let made = Arc::new(Arenas::new(&device, arena)?);
                Arc::clone(lock(ARENAS.get()).entry(ordinal).or_insert(made))
            }
        };
        arenas.set_arena_size(arena)?;
        Ok(arenas.expect(size)?)
    })
}

/// The memory that an address is in, and how many bytes behind its beginning.
#[pyfunction]
pub(crate) fn torch_pool_find(address: u64) -> Option<(PyMemory, u64)> {
    let (shared, offset) = all().iter().find_map(|arenas| arenas.find(address))?;
    Some((PyMemory(Owned::new(shared)), offset))
}

/// Closes the arena that an address is in: nothing is cut from it any more. Returns whether there is one.
#[pyfunction]
pub(crate) fn torch_pool_close(address: u64) -> bool {
    all().iter().any(|arenas| arenas.close(address))
}

/// What the arenas of a device hold: how many there are, how many are closed, their bytes, their blocks, the bytes of those.
#[pyfunction]
pub(crate) fn torch_pool_figures(py: Python<'_>, device: u32) -> PyResult<Bound<'_, PyDict>> {
    let figures = arenas(device as c_int).map(|arenas| arenas.figures()).unwrap_or_default();
    let dictionary = PyDict::new(py);
    dictionary.set_item("arenas", figures.arenas)?;
    dictionary.set_item("closed", figures.closed)?;
    dictionary.set_item("bytes", figures.bytes)?;
    dictionary.set_item("blocks", figures.blocks)?;
    dictionary.set_item("used", figures.used)?;
    Ok(dictionary)
}

/// Why the last block was refused, if one was since the last call.
#[pyfunction]
pub(crate) fn torch_pool_trouble() -> Option<String> {
    lock(TROUBLE.get()).take()
}

/// Takes this process's own right to write memory of its own, once other processes have it. Waits for the device's work.
#[pyfunction]
#[pyo3(signature = (memory, promised=false))]
pub(crate) fn make_read_only(py: Python<'_>, memory: &Bound<'_, PyMemory>, promised: bool) -> Outcome<()> {
    let memory = Arc::clone(&memory.get().0);
    memory.make_read_only(py, promised)
}

/// Fails as [`make_read_only`] would of any of these, and changes nothing.
#[pyfunction]
#[pyo3(signature = (memories, promised=false))]
pub(crate) fn check_read_only(memories: Vec<Bound<'_, PyMemory>>, promised: bool) -> Outcome<()> {
    memories.iter().try_for_each(|memory| memory.get().0.check_views(promised))
}
