//! Modules. Kernels are recognized by name: a module's text is searched for their signatures.

use std::{
    collections::BTreeMap,
    ffi::{CStr, c_void},
};

use crate::{
    Answer,
    numbers::{INVALID_HANDLE, NOT_FOUND},
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
