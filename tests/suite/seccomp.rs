//! Seccomp filters, see seccomp(2). They simulate a kernel or a security module that refuses a system call.

#![allow(unsafe_code, reason = "a filter is installed with prctl(2)")]

use std::io;

use nix::libc::{self, sock_filter, sock_fprog};

use crate::support::in_thread;

/// Offsets into `seccomp_data`: the system call number, and the low half of an argument.
pub(crate) const NUMBER: u32 = 0;
const fn argument(index: u32) -> u32 {
    let low_half = if cfg!(target_endian = "little") { 0 } else { 4 };
    16 + 8 * index + low_half
}

const fn statement(code: u32, k: u32) -> sock_filter {
    sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

pub(crate) const fn load(offset: u32) -> sock_filter {
    statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset)
}

pub(crate) const fn refuse(errno: i32) -> sock_filter {
    statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | errno as u32)
}

pub(crate) const ALLOW: sock_filter = statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW);

/// Continues with the next instruction if the loaded value satisfies `test`, otherwise skips `skip` more.
pub(crate) const fn require(test: u32, k: u32, skip: u8) -> sock_filter {
    sock_filter { code: (libc::BPF_JMP | libc::BPF_K | test) as u16, jt: 0, jf: skip, k }
}

/// Continues with the next instruction unless the loaded value satisfies `test`.
pub(crate) const fn unless(test: u32, k: u32, skip: u8) -> sock_filter {
    sock_filter { code: (libc::BPF_JMP | libc::BPF_K | test) as u16, jt: skip, jf: 0, k }
}

/// A condition on an argument: its index, the jump, the BPF test, and the operand.
pub(crate) type Test = (u32, fn(u32, u32, u8) -> sock_filter, u32, u32);

/// Returns the instructions that refuse a system call if every test holds, and otherwise allow it.
pub(crate) fn rule(call: libc::c_long, tests: &[Test], errno: i32) -> Vec<sock_filter> {
    let mut left = 2 * tests.len() as u8 + 2;
    let mut program = vec![load(NUMBER), require(libc::BPF_JEQ, call as u32, left)];
    for &(index, condition, test, k) in tests {
        left -= 2;
        program.extend([load(argument(index)), condition(test, k, left)]);
    }
    program.extend([refuse(errno), ALLOW]);
    program
}

/// Runs `test` in a thread with this filter. Its child threads and processes inherit the filter.
pub(crate) fn under(program: Vec<sock_filter>, test: impl FnOnce() + Send + 'static) {
    in_thread(move || {
        let filter = sock_fprog { len: program.len() as u16, filter: program.as_ptr().cast_mut() };
        // SAFETY: the filter and its program live until the call returns, and the kernel copies them. The filter applies to this thread
        // only, and returns errors that the system calls define.
        let installed = unsafe {
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &filter)
        };
        assert_eq!(installed, 0, "{}", io::Error::last_os_error());
        test();
    });
}
