//! Comparing open files.

use std::{
    cmp::Ordering,
    io,
    os::fd::{AsRawFd, BorrowedFd},
    process,
};

use nix::libc;

/// `KCMP_FILE` of `linux/kcmp.h`.
const KCMP_FILE: libc::c_int = 0;

/// Compares the open file descriptions behind two descriptors of this process. Does not block.
///
/// `Equal` if both descriptors share one open file description: one is a duplicate of the other. Otherwise the result is a total order
/// that is stable while both files are open.
///
/// # Errors
/// EPERM if a seccomp filter forbids the call, as in most containers; ENOSYS if the kernel was built without it. See kcmp(2).
pub(crate) fn kcmp(a: BorrowedFd<'_>, b: BorrowedFd<'_>) -> io::Result<Ordering> {
    let pid = process::id().cast_signed();
    // SAFETY: five integers; no memory of this process is read or written. Both descriptors stay open while they are borrowed.
    let result = unsafe { libc::syscall(libc::SYS_kcmp, pid, pid, KCMP_FILE, a.as_raw_fd(), b.as_raw_fd()) };
    match result {
        0 => Ok(Ordering::Equal),
        1 => Ok(Ordering::Less),
        2 => Ok(Ordering::Greater),
        -1 => Err(io::Error::last_os_error()),
        // 3: the files differ, but the kernel does not give their order.
        _ => Err(io::ErrorKind::Unsupported.into()),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::{fs::File, os::fd::AsFd, panic, thread};

    use nix::libc::sock_filter;

    use super::*;

    /// Runs `test` in a thread for which a seccomp filter refuses kcmp(2) with `errno`.
    pub(crate) fn without_kcmp(errno: libc::c_int, test: impl FnOnce() + Send + 'static) {
        let statement = |code: u32, k: u32, jf| sock_filter { code: code as u16, jt: 0, jf, k };
        let filtered = thread::spawn(move || {
            // The number of the call is the first field of `seccomp_data`.
            let program = [
                statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
                statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::SYS_kcmp as u32, 1),
                statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | errno as u32, 0),
                statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0),
            ];
            let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_ptr().cast_mut() };
            // SAFETY: the filter and its program live until the call returns, and the kernel copies them. The filter applies to this
            // thread alone.
            let installed = unsafe {
                assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
                libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &filter)
            };
            assert_eq!(installed, 0, "{}", io::Error::last_os_error());
            test();
        });
        if let Err(failure) = filtered.join() {
            panic::resume_unwind(failure);
        }
    }

    #[test]
    fn refused_kcmp_is_an_error() {
        for errno in [libc::EPERM, libc::ENOSYS] {
            without_kcmp(errno, move || {
                let file = File::open("/dev/null").unwrap();
                assert_eq!(kcmp(file.as_fd(), file.as_fd()).unwrap_err().raw_os_error(), Some(errno));
            });
        }
    }

    fn files(count: usize) -> Vec<File> {
        (0..count).map(|_| File::open("/dev/null").unwrap()).collect()
    }

    #[test]
    fn duplicates_are_equal_and_reopened_files_differ() {
        let [first, second] = files(2).try_into().unwrap();
        let duplicate = first.try_clone().unwrap();
        assert_eq!(kcmp(first.as_fd(), first.as_fd()).unwrap(), Ordering::Equal);
        assert_eq!(kcmp(first.as_fd(), duplicate.as_fd()).unwrap(), Ordering::Equal);
        let order = kcmp(first.as_fd(), second.as_fd()).unwrap();
        assert_ne!(order, Ordering::Equal);
        assert_eq!(kcmp(second.as_fd(), duplicate.as_fd()).unwrap(), order.reverse());
    }

    #[test]
    fn order_is_total() {
        let mut files = files(50);
        files.sort_by(|a, b| kcmp(a.as_fd(), b.as_fd()).unwrap());
        for (index, a) in files.iter().enumerate() {
            for b in &files[index + 1..] {
                assert_eq!(kcmp(a.as_fd(), b.as_fd()).unwrap(), Ordering::Less);
            }
        }
    }
}
