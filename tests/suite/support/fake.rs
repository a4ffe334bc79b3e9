//! Copies of the emulated CUDA driver library.
//!
//! Each loaded copy of the library has its own state. The loader identifies a file by its inode, so each test copies the file. Concurrent
//! tests then share no devices, faults or counts.

#![allow(unsafe_code, reason = "functions of a loaded library")]

use std::{
    env,
    ffi::{CString, c_char},
    fs,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use libloading::os::unix::Library;
use memchr::memmem;
use tempfile::TempDir;

const DEVICE_NAME: &str = "fakecuda: emulated, no GPU";

/// The library's file without debug information, which takes most of the file.
static LIBRARY: LazyLock<Vec<u8>> = LazyLock::new(|| {
    // Cargo builds the library beside the test program. A bundle for another machine has the same layout.
    let library = env::current_exe().unwrap().with_file_name("libfakecuda.so");
    let bytes = fs::read(&library).unwrap_or_else(|error| panic!("{}: {error}", library.display()));
    bytes[..loaded_length(&bytes)].to_vec()
});

/// A copy of the library in its own folder, not loaded yet.
pub(crate) struct Copy {
    folder: TempDir,
    bytes: Vec<u8>,
}

impl Copy {
    pub(crate) fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), bytes: LIBRARY.clone() }
    }

    /// Removes a function from the library: renames it to a name of the same length.
    pub(crate) fn without(mut self, function: &str) -> Self {
        let name = format!("\0{function}\0");
        let other = format!("\0{}X\0", &function[..function.len() - 1]);
        self.replace(name.as_bytes(), other.as_bytes());
        self
    }

    /// Renames the library's devices. The name is truncated or padded to the length of `DEVICE_NAME`.
    pub(crate) fn with_device_name(mut self, name: &str) -> Self {
        let name = format!("{name:width$.width$}", width = DEVICE_NAME.len());
        self.replace(DEVICE_NAME.as_bytes(), name.as_bytes());
        self
    }

    fn replace(&mut self, from: &[u8], to: &[u8]) {
        let found: Vec<usize> = memmem::find_iter(&self.bytes, from).collect();
        assert!(!found.is_empty(), "the library has no {}", from.escape_ascii());
        for at in found {
            self.bytes[at..at + to.len()].copy_from_slice(to);
        }
    }

    /// The folder for files of this copy. Dropping the copy deletes the folder.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Writes the library under `name` and returns the path.
    pub(crate) fn write(&self, name: &str) -> PathBuf {
        let path = self.folder().join(name);
        fs::write(&path, &self.bytes).unwrap();
        path
    }

    /// Loads the library with one device, even if the environment hides the GPUs of this machine.
    pub(crate) fn load(&self) -> Fake {
        let fake = Fake::load(self.write("libfakecuda.so"));
        fake.set("FAKECUDA_DEVICES", "1");
        fake
    }
}

/// Returns the offset at which the last loaded segment of an ELF file ends.
fn loaded_length(elf: &[u8]) -> usize {
    const LOAD: u64 = 1;
    let number =
        |at: usize, length: usize| elf[at..at + length].iter().rev().fold(0, |n, &byte| n << 8 | u64::from(byte));
    assert!(elf.starts_with(b"\x7FELF\x02\x01"), "a 64-bit little-endian ELF file");
    let table = number(32, 8);
    let entry_size = number(54, 2);
    let count = number(56, 2);
    let entries = (0..count).map(|index| (table + index * entry_size) as usize);
    let loaded = entries.filter(|&at| number(at, 4) == LOAD);
    loaded.map(|at| (number(at + 8, 8) + number(at + 32, 8)) as usize).max().unwrap()
}

/// A loaded copy of the library.
pub(crate) struct Fake {
    path: PathBuf,
    library: &'static Library,
}

impl Fake {
    /// Loads the library from `path`. The file may be deleted afterwards.
    pub(crate) fn load(path: PathBuf) -> Self {
        // SAFETY: the library runs no code when it is loaded.
        let library = unsafe { Library::new(&path) }.unwrap();
        // Drivers are never unloaded.
        Self { path, library: Box::leak(Box::new(library)) }
    }

    /// The functions of another library.
    pub(crate) fn of(library: Library) -> Self {
        Self { path: PathBuf::new(), library: Box::leak(Box::new(library)) }
    }

    /// The same library.
    pub(crate) fn again(&self) -> Self {
        Self { path: self.path.clone(), library: self.library }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Looks up a function of the library.
    ///
    /// # Safety
    /// `F` must be the function's type.
    pub(crate) unsafe fn function<F: 'static>(&self, name: &str) -> libloading::os::unix::Symbol<F> {
        const { assert!(size_of::<F>() == size_of::<usize>()) };
        // SAFETY: the caller's promise.
        unsafe { self.library.get(name.as_bytes()) }.unwrap()
    }

    /// Changes a setting. The library's documentation lists the settings.
    pub(crate) fn set(&self, name: &str, value: &str) {
        let name = CString::new(name).unwrap();
        let value = CString::new(value).unwrap();
        // SAFETY: the type is the function's, which expects two C strings.
        unsafe {
            self.function::<unsafe extern "C" fn(*const c_char, *const c_char)>("fakecuda_set")(
                name.as_ptr(),
                value.as_ptr(),
            );
        }
    }

    /// Returns the number of calls to a function; for an empty name, the number of all calls.
    pub(crate) fn calls(&self, name: &str) -> u64 {
        let name = CString::new(name).unwrap();
        // SAFETY: the type is the function's, which expects a C string.
        unsafe { self.function::<unsafe extern "C" fn(*const c_char) -> u64>("fakecuda_calls")(name.as_ptr()) }
    }

    /// Counts live handles, reservations, mappings, retained contexts, blocks, pools, page-locked pieces, events and modules.
    pub(crate) fn live(&self) -> [u64; 9] {
        let mut counts = [u64::MAX; 9];
        // SAFETY: the type is the function's, which writes nine numbers.
        unsafe { self.function::<unsafe extern "C" fn(*mut [u64; 9])>("fakecuda_live")(&mut counts) };
        counts
    }
}
