//! The host engine: each CPU works on one slice at a time.

use std::{
    ops::Range,
    sync::{Mutex, PoisonError, mpsc},
    thread,
};

use vmmfd::{error::Result, memory::Region};

use super::{Checker, Pattern, Verification, slices};
use crate::check::check_range;

/// The size of a slice in bytes: fits a CPU's cache, and is a multiple of 4.
pub const SLICE: usize = 1 << 20;

/// The size in bytes from which a second thread pays off.
const ALONE: u64 = 4 << 20;

/// Fills a range of memory with the pattern, and zeroes the rest, so that no old content is shared. Otherwise as [`write`].
pub fn fill(
    region: &dyn Region,
    range: Range<u64>,
    pattern: Pattern,
    progress: &mut dyn FnMut(u64) -> Result<()>,
) -> Result<()> {
    let behind = range.end..region.size();
    write(region, 0, range, pattern, progress)?;
    clear(region, behind)
}

/// Writes the pattern into a range of an object, and nothing else. The memory starts at the object's offset `start`. All GPU work is
/// complete on return.
///
/// `progress` is called after each [`SLICE`] with the number of bytes done. Its error stops the work.
///
/// # Errors
/// [`MemoryError::OutOfRange`](vmmfd::error::MemoryError::OutOfRange) if the range is not inside the memory; the errors of the
/// copies and of `progress`.
///
/// Driver calls: `cuMemcpyHtoD`, `cuStreamSynchronize`, `cuCtxSynchronize`.
pub fn write(
    region: &dyn Region,
    start: u64,
    range: Range<u64>,
    pattern: Pattern,
    progress: &mut dyn FnMut(u64) -> Result<()>,
) -> Result<()> {
    check_range(region, start, &range)?;
    let work = |slice: &mut Vec<u8>, part: Range<u64>| {
        let slice = &mut slice[..(part.end - part.start) as usize];
        pattern.write(part.start, slice);
        region.copy_in(part.start - start, slice)
    };
    let begin = || slice_of(&range);
    spread(range.clone(), begin, work, &mut |(), done| progress(done))?;
    region.synchronize()
}

/// Writes zeros into a range of memory.
pub(super) fn clear(region: &dyn Region, range: Range<u64>) -> Result<()> {
    let zeros = slice_of(&range);
    for part in slices(range, SLICE) {
        region.copy_in(part.start, &zeros[..(part.end - part.start) as usize])?;
    }
    region.synchronize()
}

/// Checks a range of an object against the pattern. The memory starts at the object's offset `start`.
///
/// `progress` is called after each [`SLICE`] with the number of bytes done. Its error stops the work.
///
/// # Errors
/// [`MemoryError::OutOfRange`](vmmfd::error::MemoryError::OutOfRange) if the range is not inside the memory; the errors of the copies and
/// of `progress`. Wrong data is not an error: see [`Verification`].
///
/// Driver call: `cuMemcpyDtoH`.
pub fn verify(
    region: &dyn Region,
    start: u64,
    range: Range<u64>,
    pattern: Pattern,
    progress: &mut dyn FnMut(u64) -> Result<()>,
) -> Result<Verification> {
    check_range(region, start, &range)?;
    let begin = || (slice_of(&range), Checker::new(pattern));
    let work = |(found, checker): &mut (Vec<u8>, Checker), part: Range<u64>| {
        let found = &mut found[..(part.end - part.start) as usize];
        region.copy_out(part.start - start, found)?;
        checker.check(part.start, found);
        Ok(std::mem::take(&mut checker.verification))
    };
    let mut all = Verification::default();
    spread(range.clone(), begin, work, &mut |found, done| {
        all.join(found);
        progress(done)
    })?;
    Ok(all)
}

/// A buffer for each slice of a range, of zeros.
fn slice_of(range: &Range<u64>) -> Vec<u8> {
    vec![0; range.end.saturating_sub(range.start).min(SLICE as u64) as usize]
}

/// Processes the slices of a range on all CPUs, each with a state from `begin`. Calls `take` on this thread with each result and the number
/// of bytes done, in any order. Stops at the first error.
fn spread<S, T: Send>(
    range: Range<u64>,
    begin: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, Range<u64>) -> Result<T> + Sync,
    take: &mut dyn FnMut(T, u64) -> Result<()>,
) -> Result<()> {
    let cpus = thread::available_parallelism().map_or(1, |cpus| cpus.get() as u64);
    let workers = cpus.min(range.end.saturating_sub(range.start) / ALONE);
    let left = Mutex::new(slices(range, SLICE));
    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
    let worker = |results: mpsc::Sender<(u64, Result<T>)>| {
        let mut state = begin();
        while let Some(part) = next() {
            let length = part.end - part.start;
            if results.send((length, work(&mut state, part))).is_err() {
                break;
            }
        }
    };
    let mut done = 0;
    let mut finish = |length, result| {
        done += length;
        take(result, done)
    };
    thread::scope(|scope| {
        let worker = &worker;
        // After an error, its drop ends the threads.
        let (sender, results) = mpsc::channel();
        for _ in 0..if workers < 2 { 0 } else { workers } {
            let sender = sender.clone();
            // The others do the work of a thread that can't be started.
            let _ = thread::Builder::new().name("pattern".to_owned()).spawn_scoped(scope, move || worker(sender));
        }
        drop(sender);
        results.iter().try_for_each(|(length, found)| finish(length, found?))?;
        // Without any thread, everything is left.
        let mut state = begin();
        while let Some(part) = next() {
            finish(part.end - part.start, work(&mut state, part)?)?;
        }
        Ok(())
    })
}
