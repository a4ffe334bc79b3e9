//! Kernels, recognized by name: a module's text is searched for their signatures, and their effects are implemented here.

use std::{
    collections::BTreeMap,
    ffi::{CStr, c_int, c_uint, c_void},
};

use vmmfd_cli::check::pattern::Pattern;

use crate::{
    Answer,
    emulated::{Emulated, INVALID_HANDLE, INVALID_VALUE, NOT_FOUND},
};

const INVALID_PTX: u32 = 218;

/// An emulated kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kernel {
    /// Stores a word.
    Store,
    /// Writes the pattern.
    Fill,
    /// Counts the words that differ from the pattern.
    Verify,
    /// Adds a value to each word: the kernel of the example `launch`.
    Add,
}

/// The name of each kernel, and the first line of its text.
const KERNELS: [(Kernel, &CStr, &str); 4] = [
    (Kernel::Store, c"vmmfd_store", ".visible .entry vmmfd_store(.param .u64 vmmfd_to, .param .u32 vmmfd_value)\n{"),
    (
        Kernel::Fill,
        c"vmmfd_fill",
        ".visible .entry vmmfd_fill(.param .u64 vmmfd_to, .param .u64 vmmfd_start, .param .u64 vmmfd_size, \
         .param .u32 vmmfd_salt)\n{",
    ),
    (
        Kernel::Verify,
        c"vmmfd_verify",
        ".visible .entry vmmfd_verify(.param .u64 vmmfd_from, .param .u64 vmmfd_start, .param .u64 vmmfd_size, \
         .param .u32 vmmfd_salt, .param .u64 vmmfd_result)\n{",
    ),
    (Kernel::Add, c"add", ".visible .entry add(.param .u64 to, .param .u32 count, .param .u32 value)\n{"),
];

/// The loaded modules, with their kernels.
pub(crate) struct Modules {
    loaded: BTreeMap<usize, Vec<Kernel>>,
    made: usize,
}

impl Modules {
    pub(crate) fn new() -> Self {
        Self { loaded: BTreeMap::new(), made: 0 }
    }

    pub(crate) fn live(&self) -> u64 {
        self.loaded.len() as u64
    }

    /// Loads a text with the expected header and at least one known kernel signature.
    pub(crate) fn load(&mut self, text: &CStr) -> Answer<usize> {
        let text = text.to_str().map_err(|_| INVALID_PTX)?;
        let kernels: Vec<_> =
            KERNELS.iter().filter(|(_, _, entry)| text.contains(entry)).map(|known| known.0).collect();
        if !text.starts_with(".version 6.0\n.target sm_50\n.address_size 64\n") || kernels.is_empty() {
            return Err(INVALID_PTX);
        }
        self.made += 1;
        // Not a small number, like other handles.
        let number = 0x7C00_0000_0000 + 0x40 * self.made;
        self.loaded.insert(number, kernels);
        Ok(number)
    }

    /// A function's number is its module's number plus the kernel's index, counted from 1.
    pub(crate) fn function(&self, module: *mut c_void, name: &CStr) -> Answer<usize> {
        let kernels = self.loaded.get(&module.addr()).ok_or(INVALID_HANDLE)?;
        let known = KERNELS.iter().position(|known| known.1 == name && kernels.contains(&known.0));
        known.map(|at| module.addr() + 1 + at).ok_or(NOT_FOUND)
    }

    /// The kernel of a function in a loaded module.
    pub(crate) fn kernel(&self, function: *mut c_void) -> Answer<Kernel> {
        let (number, kernels) = self.loaded.range(..function.addr()).next_back().ok_or(INVALID_HANDLE)?;
        let kernel = KERNELS.get(function.addr() - number - 1).map(|known| known.0);
        kernel.filter(|kernel| kernels.contains(kernel)).ok_or(INVALID_HANDLE)
    }

    pub(crate) fn unload(&mut self, module: *mut c_void) -> Answer {
        self.loaded.remove(&module.addr()).map(drop).ok_or(INVALID_HANDLE)
    }
}

/// The memory that a pattern kernel processes.
pub(crate) struct Stretch {
    pub(crate) address: u64,
    pub(crate) start: u64,
    pub(crate) size: u64,
    pub(crate) salt: u32,
}

/// The number of bytes processed at a time.
const PIECE: u64 = 1 << 20;

impl Stretch {
    /// Splits the stretch into pieces: address, offset in the object, and length. No word is in two pieces.
    fn pieces(&self) -> impl Iterator<Item = (u64, u64, usize)> {
        let (address, start, size) = (self.address, self.start, self.size);
        let mut done = 0;
        std::iter::from_fn(move || {
            let at = start + done;
            let length = (PIECE - at % PIECE).min(size - done);
            let piece = (address + done, at, length as usize);
            done += length;
            (length > 0).then_some(piece)
        })
    }
}

/// Checks the grid of a launch. Pattern kernels run with any number of threads that a GPU accepts. The store kernel only runs with one
/// thread, as vmmfd launches it.
pub(crate) fn check_grid(kernel: Kernel, grid: [c_uint; 3], block: [c_uint; 3], shared: c_uint) -> Answer {
    let some = grid[0] >= 1 && (8..=1024).contains(&block[0]);
    let good = if kernel == Kernel::Store { [grid[0], block[0]] == [1, 1] } else { some };
    let good = good && grid[1..] == [1, 1] && block[1..] == [1, 1];
    if good && shared == 0 { Ok(()) } else { Err(INVALID_VALUE) }
}

/// The effect of `add`, with a thread for each word.
pub(crate) fn add(driver: &mut Emulated, device: c_int, address: u64, count: u32, value: u32, threads: u64) {
    let mut bytes = vec![0; 4 * threads.min(count.into()) as usize];
    if driver.copy_out(device, address, &mut bytes).is_err() {
        return driver.ruin(device);
    }
    for word in bytes.chunks_exact_mut(4) {
        let sum = u32::from_le_bytes(word.try_into().expect("4 bytes")).wrapping_add(value);
        word.copy_from_slice(&sum.to_le_bytes());
    }
    if driver.copy_in(device, address, &bytes).is_err() {
        driver.ruin(device);
    }
}

/// The effect of `vmmfd_fill`. Memory without access ruins the context: the launch has already succeeded.
pub(crate) fn fill(driver: &mut Emulated, device: c_int, stretch: &Stretch) {
    let pattern = Pattern::new(stretch.salt);
    for (address, start, length) in stretch.pieces() {
        let mut bytes = vec![0; length];
        pattern.write(start, &mut bytes);
        if driver.copy_in(device, address, &bytes).is_err() {
            return driver.ruin(device);
        }
    }
}

/// The effect of `vmmfd_verify`, word by word. Updates the two numbers at `result`.
pub(crate) fn verify(driver: &mut Emulated, device: c_int, stretch: &Stretch, result: u64) {
    let mut numbers = [0; 16];
    if driver.copy_out(device, result, &mut numbers).is_err() {
        return driver.ruin(device);
    }
    let [mut count, mut first] =
        [0, 8].map(|at| numbers[at..at + 8].iter().rev().fold(0, |n, &b| n << 8 | u64::from(b)));
    for (address, start, length) in stretch.pieces() {
        let mut found = vec![0; length];
        if driver.copy_out(device, address, &mut found).is_err() {
            return driver.ruin(device);
        }
        let mut expected = vec![0; length];
        Pattern::new(stretch.salt).write(start, &mut expected);
        let mut last = None;
        for (at, _) in (start..).zip(found.iter().zip(&expected)).filter(|(_, (found, expected))| found != expected) {
            if last != Some(at / 4) {
                last = Some(at / 4);
                count += 1;
                first = first.min(at / 4);
            }
        }
    }
    numbers[..8].copy_from_slice(&count.to_le_bytes());
    numbers[8..].copy_from_slice(&first.to_le_bytes());
    if driver.copy_in(device, result, &numbers).is_err() {
        driver.ruin(device);
    }
}
