//! The effects of the kernels.

use std::ffi::{c_int, c_uint};

use vmmfd_cli::check::pattern::Pattern;

use crate::{Answer, emulated::Emulated, modules::Kernel, numbers::INVALID_VALUE};

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
        let address = self.address;
        let start = self.start;
        let size = self.size;
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
