//! Kernels, by name: the text of one is looked for its signature, and what it does is written here.

use std::{
    collections::BTreeSet,
    ffi::{CStr, c_void},
};

use crate::{
    Answer,
    emulated::{INVALID_HANDLE, NOT_FOUND},
};

const INVALID_PTX: u32 = 218;

/// The kernel that stores a word.
const STORE: &CStr = c"vmmfd_store";
const STORE_ENTRY: &str = ".visible .entry vmmfd_store(.param .u64 vmmfd_to, .param .u32 vmmfd_value)\n{";

/// How far behind a module the function of it is.
const FUNCTION: usize = 8;

/// The modules that are loaded.
pub(crate) struct Modules {
    loaded: BTreeSet<usize>,
    made: usize,
}

impl Modules {
    pub(crate) fn new() -> Self {
        Self { loaded: BTreeSet::new(), made: 0 }
    }

    pub(crate) fn live(&self) -> u64 {
        self.loaded.len() as u64
    }

    /// Loads text that says what it is for and has the kernel with its arguments.
    pub(crate) fn load(&mut self, text: &CStr) -> Answer<usize> {
        let text = text.to_str().map_err(|_| INVALID_PTX)?;
        let head = [".version 6.0\n.target sm_50\n", ".address_size 64\n"];
        if !text.starts_with(head[0]) || !text.contains(head[1]) || !text.contains(STORE_ENTRY) {
            return Err(INVALID_PTX);
        }
        self.made += 1;
        // Far from small numbers, as handles are.
        let number = 0x7C00_0000_0000 + 0x40 * self.made;
        self.loaded.insert(number);
        Ok(number)
    }

    pub(crate) fn function(&self, module: *mut c_void, name: &CStr) -> Answer<usize> {
        match self.loaded.get(&module.addr()) {
            None => Err(INVALID_HANDLE),
            Some(module) if name == STORE => Ok(module + FUNCTION),
            Some(_) => Err(NOT_FOUND),
        }
    }

    /// Fails unless it is the kernel that stores, of a module that is loaded.
    pub(crate) fn check(&self, function: *mut c_void) -> Answer {
        let module = function.addr().checked_sub(FUNCTION);
        if module.is_some_and(|module| self.loaded.contains(&module)) { Ok(()) } else { Err(INVALID_HANDLE) }
    }

    pub(crate) fn unload(&mut self, module: *mut c_void) -> Answer {
        if self.loaded.remove(&module.addr()) { Ok(()) } else { Err(INVALID_HANDLE) }
    }
}
