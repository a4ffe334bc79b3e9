//! Copies between private memory and memory that others may access at the same time.
//!
//! Other processes, and other threads of this one, write to shared memory with nothing that orders their accesses and
//! these. A plain copy of it is a data race, which is undefined behaviour in Rust whatever the bytes are used for. So
//! every access to shared memory by this crate on a CPU goes through [`read`] and [`write()`]. Each means relaxed
//! atomic accesses to each byte, once or several times and in no particular order: what is read may be half of what
//! another thread writes, and orders nothing.
//!
//! [`bytes`] is exactly that, and copies 1 to 3 bytes in a nanosecond. It is used where assembly is not to be had: on
//! other processors, under Miri, and with `--cfg vmmfd_atomic_copy`, which is for sanitizers, as they don't see what
//! assembly accesses. Whole words with single bytes at the edges would be faster and undefined again: atomic accesses
//! of different sizes to the same bytes, with nothing that orders them, are a data race too.
//!
//! [`assembly`] is used on x86-64 and AArch64. The compiler knows of it only that it accesses memory, and on these
//! processors a load or store of any width accesses each of its bytes atomically, so its instructions do what `bytes`
//! does. It calls the C library's `memcpy`, but for the sizes where the call would count. Loops of our own were tried:
//! with 16 or 32 bytes at a time they took up to 1.5 times as long between 4 KiB and 1 MiB, and `rep movsb` 2 to 4 times as
//! long below 1 KiB. Which is best differs between processors, and the C library knows them. What counts of `memcpy` is its
//! machine code: loads from the source and stores to the destination, never to bytes beside it, which C forbids.

#![allow(unsafe_code)]

#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(any(miri, vmmfd_atomic_copy))))]
use self::assembly as chosen;
#[cfg(not(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(any(miri, vmmfd_atomic_copy)))))]
use self::bytes as chosen;

/// Copies shared memory into private memory.
///
/// # Safety
/// `from` is mapped for reading for as long as `to` is long, until this returns, and is outside of all that Rust allocates
/// and borrows mutably. Anything may write to it meanwhile that is not a plain access of Rust's in this process.
#[inline]
pub unsafe fn read(from: *const u8, to: &mut [u8]) {
    // SAFETY: the caller's promise for `from`; `to` is borrowed mutably, so no other thread accesses it, and it is apart from
    // `from`.
    unsafe { chosen::read(from, to.as_mut_ptr(), to.len()) }
}

/// Copies private memory into shared memory.
///
/// # Safety
/// `to` is mapped for writing for as long as `from` is long, until this returns, and is outside of all that Rust allocates
/// and borrows. Anything may access it meanwhile that is not a plain access of Rust's in this process.
#[inline]
pub unsafe fn write(from: &[u8], to: *mut u8) {
    // SAFETY: the caller's promise for `to`; `from` is borrowed, so nothing writes to it, and it is apart from `to`.
    unsafe { chosen::write(from.as_ptr(), to, from.len()) }
}

/// One relaxed atomic access for each byte of shared memory.
#[allow(dead_code, reason = "on most machines only the tests of the other module use it")]
mod bytes {
    use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

    /// # Safety
    /// Both are valid for `length` bytes, `from` for atomic loads, and `to` is accessed by no other thread.
    pub(super) unsafe fn read(from: *const u8, to: *mut u8, length: usize) {
        for at in 0..length {
            // SAFETY: the caller's promise. The memory may be read-only, of which a relaxed load of one byte is allowed.
            unsafe { to.add(at).write((*from.add(at).cast::<AtomicU8>()).load(Relaxed)) }
        }
    }

    /// # Safety
    /// Both are valid for `length` bytes, `to` for atomic stores, and `from` is written by no other thread.
    pub(super) unsafe fn write(from: *const u8, to: *mut u8, length: usize) {
        for at in 0..length {
            // SAFETY: the caller's promise.
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
    /// Both are valid for `length` bytes and apart from each other. The one that is not shared is written by no other thread, and if it
    /// is `to`, read by none.
    #[inline]
    pub(super) unsafe fn copy(from: *const u8, to: *mut u8, length: usize) {
        match length {
            // SAFETY: the caller's promise, and the length.
            16..=64 => unsafe { few(from, to, length) },
            // SAFETY: the caller's promise. The function follows the C ABI, whose registers are given up; on entry to assembly that
            // may use the stack, the stack is aligned for a call.
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

    /// Copies 16 to 64 bytes: all are loaded, as four vectors that overlap where there are fewer, and then stored.
    ///
    /// # Safety
    /// As for [`copy`], and `length` is in that range.
    #[inline]
    unsafe fn few(from: *const u8, to: *mut u8, length: usize) {
        // Where the vectors begin: the first two at 0 and `second`, the last two as far from the end.
        let second = if length > 32 { 16 } else { 0 };
        let (third, fourth) = (length - 16 - second, length - 16);
        // SAFETY: the caller's promise: each vector lies in the `length` bytes.
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

    /// All lengths that are treated in a way of their own, at all places in a vector, and one beyond every vector.
    fn copies_what_it_should(copy: Copy) {
        let source: Vec<u8> = (0..200_100_u32).map(|at| (at % 251) as u8 + 1).collect();
        for length in (0..=200).chain([4096, 200_000]) {
            for (skip_from, skip_to) in [(0, 0), (1, 0), (0, 1), (3, 5), (15, 7), (16, 16)] {
                let from = &source[skip_from..][..length];
                let mut found = vec![0; length + 64];
                // SAFETY: both are as long, and apart.
                unsafe { copy(from.as_ptr(), found[skip_to..].as_mut_ptr(), length) };
                assert_eq!(&found[skip_to..][..length], from, "{length} bytes from {skip_from} to {skip_to}");
                let beside = found[..skip_to].iter().chain(&found[skip_to + length..]);
                assert!(beside.into_iter().all(|byte| *byte == 0), "{length} bytes from {skip_from} to {skip_to}");
            }
        }
    }

    #[test]
    fn single_bytes_copy_every_length_and_nothing_beside() {
        copies_what_it_should(bytes::read);
        copies_what_it_should(bytes::write);
    }

    #[test]
    #[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
    fn assembly_copies_every_length_and_nothing_beside() {
        copies_what_it_should(assembly::copy);
    }
}
