//! The two C functions through which PyTorch allocates shared memory, and Python's queries about that memory.
//!
//! PyTorch's allocator calls them with its lock held, from any thread, with or without the GIL, and during interpreter shutdown. They never
//! call Python and never unwind into PyTorch. Arenas live as long as the process.

#![allow(unsafe_code)]

use std::{
    collections::BTreeMap,
    ffi::{c_int, c_void},
    panic::{AssertUnwindSafe, catch_unwind},
    ptr,
    sync::{Arc, Mutex},
};

use pyo3::{prelude::*, types::PyDict};
use vmmfd::{
    Error,
    bindings::lock,
    fork::PerProcess,
    memory::{Arenas, Rdma, Selector},
};

use crate::{
    driver,
    error::Outcome,
    memory::{Owned, RdmaOption},
    shared::PyMemory,
};

/// Arenas by device ordinal, which PyTorch and the driver share. A fork has none: it allocates nothing and frees nothing.
static ARENAS: PerProcess<Mutex<BTreeMap<c_int, Arc<Arenas>>>> = PerProcess::new(Mutex::default);

/// The error of the last failed allocation, because PyTorch reports only that memory ran out.
static LAST_ERROR: PerProcess<Mutex<Option<String>>> = PerProcess::new(Mutex::default);

/// Returns the arenas of a device, if they are open.
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

/// Allocates a block of at least `size` bytes from a device's shared memory. Returns null on failure. Called by PyTorch's
/// `CUDAPluggableAllocator`. The stream is ignored, because PyTorch synchronises blocks before it frees them.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn vmmfd_torch_malloc(size: isize, device: c_int, _stream: *mut c_void) -> *mut c_void {
    let answer = catch_unwind(|| allocate(size, device)).unwrap_or_else(|_| Err("the allocator panicked".to_owned()));
    match answer {
        Ok(address) => ptr::without_provenance_mut(address as usize),
        Err(reason) => {
            *lock(LAST_ERROR.get()) = Some(format!("{size} bytes of shared memory: {reason}"));
            ptr::null_mut()
        }
    }
}

/// Frees a block of [`vmmfd_torch_malloc`]. Waits for the device's work if an arena becomes empty, as `cudaFree` does.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn vmmfd_torch_free(block: *mut c_void, _size: isize, device: c_int, _stream: *mut c_void) {
    let free = || {
        let address = block.addr() as u64;
        let freed = arenas(device).is_some_and(|arenas| arenas.free(address));
        freed || all().iter().any(|arenas| arenas.free(address))
    };
    // An unknown block belongs to the parent of this fork.
    let _ = catch_unwind(AssertUnwindSafe(free));
}

/// Opens a CUDA device's arenas. New arenas have `arena` bytes; `size` bytes in total are expected.
#[pyfunction]
#[pyo3(signature = (device, arena, size=None, rdma=RdmaOption(Rdma::Auto)))]
pub(crate) fn torch_pool_open(
    py: Python<'_>,
    device: u32,
    arena: u64,
    size: Option<u64>,
    rdma: RdmaOption,
) -> Outcome<()> {
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
        arenas.set_rdma(rdma.0)?;
        arenas.set_arena_size(arena)?;
        Ok(arenas.expect(size)?)
    })
}

/// Returns the memory that contains an address, and the address's offset in it.
#[pyfunction]
pub(crate) fn torch_pool_find(address: u64) -> Option<(PyMemory, u64)> {
    let (shared, offset) = all().iter().find_map(|arenas| arenas.find(address))?;
    Some((PyMemory::shared(Owned::new(shared)), offset))
}

/// Closes the arena that contains an address: nothing more is allocated in it. Returns whether there is such an arena.
#[pyfunction]
pub(crate) fn torch_pool_close(address: u64) -> bool {
    all().iter().any(|arenas| arenas.close(address))
}

/// Returns the figures of a device's arenas: the numbers of arenas and closed arenas, their bytes, the number of blocks, and the blocks'
/// bytes.
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

/// Returns and clears the error of the last failed allocation.
#[pyfunction]
pub(crate) fn torch_pool_last_error() -> Option<String> {
    lock(LAST_ERROR.get()).take()
}

/// Makes this process's own mapping of its memory read-only. Waits for the device's work.
#[pyfunction]
#[pyo3(signature = (memory, promised=false))]
pub(crate) fn make_read_only(py: Python<'_>, memory: &Bound<'_, PyMemory>, promised: bool) -> Outcome<()> {
    let memory = Arc::clone(&memory.get().owned);
    memory.make_read_only(py, promised)
}

/// Fails if [`make_read_only`] would fail for any of these. Changes nothing.
#[pyfunction]
#[pyo3(signature = (memories, promised=false))]
pub(crate) fn check_read_only(memories: Vec<Bound<'_, PyMemory>>, promised: bool) -> Outcome<()> {
    memories.iter().try_for_each(|memory| memory.get().owned.check_views(promised))
}
