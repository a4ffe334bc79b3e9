//! Copies between private memory and memory that others may access at the same time.
//!
//! Other processes, and other threads of this process, write to shared memory without ordering their accesses against ours. A plain copy
//! would be a data race, which is undefined behaviour in Rust whatever the bytes are used for. So every CPU access of this crate to shared
//! memory uses [`read`] or [`write()`]. Each is equivalent to relaxed atomic accesses to every byte, one or more times, in any order:
//! a read may return part of another thread's write, and orders nothing.
//!
//! [`bytes`] does exactly this, and copies 1 to 3 bytes in a nanosecond. It is used where assembly is not available: on other processors,
//! under Miri, and with `--cfg vmmfd_atomic_copy`, for sanitizers, which don't see accesses by assembly. Whole words with single bytes at
//! both edges would be faster but undefined again: unordered atomic accesses of different sizes to the same bytes are also a data race.
//!
//! [`assembly`] is used on x86-64 and AArch64. The compiler only knows that it accesses memory. On these processors a load or store of
//! any width accesses each of its bytes atomically, so the instructions do the same as `bytes`. It calls the C library's `memcpy`, except
//! for sizes where the call itself would dominate. We tried our own loops: with 16 or 32 bytes at a time they took up to 1.5 times as
//! long between 4 KiB and 1 MiB, and `rep movsb` 2 to 4 times as long below 1 KiB. The best loop differs between processors, and the C
//! library chooses it. Only the machine code of `memcpy` matters here: loads from the source and stores to the destination, never to
//! bytes beside it, which C forbids.

#![allow(unsafe_code)]

#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(any(miri, vmmfd_atomic_copy))))]
use self::assembly as chosen;
#[cfg(not(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(any(miri, vmmfd_atomic_copy)))))]
use self::bytes as chosen;

/// Copies shared memory into private memory.
///
/// # Safety
/// `from` is mapped for reading for the length of `to` until this returns, and is outside of all memory that Rust has allocated
/// and borrowed mutably. During the call, anything may write to it except plain accesses of Rust code in this process.
#[inline]
pub unsafe fn read(from: *const u8, to: &mut [u8]) {
    // SAFETY: the caller upholds the contract for `from`. `to` is borrowed mutably, so no other thread accesses it and it does not overlap
    // `from`.
    unsafe { chosen::read(from, to.as_mut_ptr(), to.len()) }
}

/// Copies private memory into shared memory.
///
/// # Safety
/// `to` is mapped for writing for the length of `from` until this returns, and is outside of all memory that Rust has allocated
/// and borrowed. During the call, anything may access it except plain accesses of Rust code in this process.
#[inline]
pub unsafe fn write(from: &[u8], to: *mut u8) {
    // SAFETY: the caller upholds the contract for `to`. `from` is borrowed, so nothing writes to it and it does not overlap `to`.
    unsafe { chosen::write(from.as_ptr(), to, from.len()) }
}

/// One relaxed atomic access for each byte of shared memory.
#[allow(dead_code, reason = "most machines use it only in the tests of the other module")]
mod bytes {
    use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

    /// # Safety
    /// Both are valid for `length` bytes, `from` for atomic loads, and `to` is accessed by no other thread.
    pub(super) unsafe fn read(from: *const u8, to: *mut u8, length: usize) {
        for at in 0..length {
            // SAFETY: upheld by the caller. Relaxed loads of one byte are allowed on read-only memory.
            unsafe { to.add(at).write((*from.add(at).cast::<AtomicU8>()).load(Relaxed)) }
        }
    }

    /// # Safety
    /// Both are valid for `length` bytes, `to` for atomic stores, and `from` is written by no other thread.
    pub(super) unsafe fn write(from: *const u8, to: *mut u8, length: usize) {
        for at in 0..length {
            // SAFETY: upheld by the caller.
            unsafe { AtomicU8::from_ptr(to.add(at)).store(from.add(at).read(), Relaxed) }
        }
    }
}

/// The same in assembly.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[allow(dead_code, reason = "with vmmfd_atomic_copy, and under Miri, which can't run it")]
mod assembly {
    use std::arch::asm;

    use nix::libc::memcpy;

    pub(super) use self::{copy as read, copy as write};

    /// # Safety
    /// Both are valid for `length` bytes and don't overlap. No other thread writes to the private one, and if it is `to`, none reads it.
    #[inline]
    pub(super) unsafe fn copy(from: *const u8, to: *mut u8, length: usize) {
        match length {
            // SAFETY: upheld by the caller, and `length` is in the range.
            16..=64 => unsafe { few(from, to, length) },
            // SAFETY: upheld by the caller. The function follows the C ABI, whose registers are declared as clobbered. The stack is aligned
            // for a call at the start of assembly that may use it.
            #[cfg(target_arch = "x86_64")]
            _ => unsafe {
                asm!(
                    "call {memcpy}",
                    memcpy = sym memcpy,
                    in("rdi") to,
                    in("rsi") from,
                    in("rdx") length,
                    clobber_abi("C"),
                )
            },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            _ => unsafe {
                asm!(
                    "bl {memcpy}",
                    memcpy = sym memcpy,
                    in("x0") to,
                    in("x1") from,
                    in("x2") length,
                    clobber_abi("C"),
                )
            },
        }
    }

    /// Copies 16 to 64 bytes: loads four vectors, which overlap below 64 bytes, then stores them.
    ///
    /// # Safety
    /// As for [`copy`], and `length` is 16 to 64.
    #[inline]
    unsafe fn few(from: *const u8, to: *mut u8, length: usize) {
        // The offsets of the vectors: the first two at 0 and `second`, the last two at the same distance from the last byte.
        let second = if length > 32 { 16 } else { 0 };
        let third = length - 16 - second;
        let fourth = length - 16;
        // SAFETY: upheld by the caller; each vector lies in the `length` bytes.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            asm!(
                "movups {a}, [{from}]",
                "movups {b}, [{from} + {second}]",
                "movups {c}, [{from} + {third}]",
                "movups {d}, [{from} + {fourth}]",
                "movups [{to}], {a}",
                "movups [{to} + {second}], {b}",
                "movups [{to} + {third}], {c}",
                "movups [{to} + {fourth}], {d}",
                from = in(reg) from,
                to = in(reg) to,
                second = in(reg) second,
                third = in(reg) third,
                fourth = in(reg) fourth,
                a = out(xmm_reg) _,
                b = out(xmm_reg) _,
                c = out(xmm_reg) _,
                d = out(xmm_reg) _,
                options(nostack, preserves_flags),
            );
        }
        // SAFETY: as above.
        #[cfg(target_arch = "aarch64")]
        unsafe {
            asm!(
                "ldr {a:q}, [{from}]",
                "ldr {b:q}, [{from}, {second}]",
                "ldr {c:q}, [{from}, {third}]",
                "ldr {d:q}, [{from}, {fourth}]",
                "str {a:q}, [{to}]",
                "str {b:q}, [{to}, {second}]",
                "str {c:q}, [{to}, {third}]",
                "str {d:q}, [{to}, {fourth}]",
                from = in(reg) from,
                to = in(reg) to,
                second = in(reg) second,
                third = in(reg) third,
                fourth = in(reg) fourth,
                a = out(vreg) _,
                b = out(vreg) _,
                c = out(vreg) _,
                d = out(vreg) _,
                options(nostack, preserves_flags),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Copy = unsafe fn(*const u8, *mut u8, usize);

    /// Tests every length with its own code path, at every alignment in a vector, and two longer ones.
    fn check_copies(copy: Copy) {
        let source: Vec<u8> = (0..200_100_u32).map(|at| (at % 251) as u8 + 1).collect();
        for length in (0..=200).chain([4096, 200_000]) {
            for (skip_from, skip_to) in [(0, 0), (1, 0), (0, 1), (3, 5), (15, 7), (16, 16)] {
                let from = &source[skip_from..][..length];
                let mut found = vec![0; length + 64];
                // SAFETY: both have that length, and don't overlap.
                unsafe { copy(from.as_ptr(), found[skip_to..].as_mut_ptr(), length) };
                assert_eq!(&found[skip_to..][..length], from, "{length} bytes from {skip_from} to {skip_to}");
                let beside = found[..skip_to].iter().chain(&found[skip_to + length..]);
                assert!(beside.into_iter().all(|byte| *byte == 0), "{length} bytes from {skip_from} to {skip_to}");
            }
        }
    }

    #[test]
    fn byte_copies_are_exact() {
        check_copies(bytes::read);
        check_copies(bytes::write);
    }

    #[test]
    #[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
    fn assembly_copies_are_exact() {
        check_copies(assembly::copy);
    }
}
