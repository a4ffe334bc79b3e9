//! Passing descriptors to another program, and the start time of a process.

use std::{
    ffi::{CString, OsStr, OsString},
    fs::File,
    io::{self, Read, Seek, Write},
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
    ptr,
    sync::atomic::{AtomicBool, Ordering},
    time::SystemTime,
};

use nix::{
    libc,
    sys::memfd::{MFdFlags, memfd_create},
};
use rustix::time::{ClockId, clock_gettime};

/// The start time of a process, in milliseconds since 1970, with a resolution of 10 ms. `None` if the process does not exist in this PID
/// namespace. See `starttime` in proc_pid_stat(5).
pub(crate) fn started_ms(pid: u32) -> Option<u64> {
    // /proc counts in this unit on every architecture.
    const TICK_MS: u64 = 10;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command in parentheses may itself contain parentheses and spaces. The third field follows it.
    let ticks: u64 = stat.rsplit_once(") ")?.1.split(' ').nth(22 - 3)?.parse().ok()?;
    // Read the real-time clock first: a delay before the second clock makes the result earlier, so that a process never seems younger
    // than its children.
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).ok()?;
    let since_boot = clock_gettime(ClockId::Boottime);
    let since_boot =
        u64::try_from(since_boot.tv_sec).ok()? * 1000 + u64::try_from(since_boot.tv_nsec).ok()? / 1_000_000;
    let age = since_boot.saturating_sub(ticks * TICK_MS);
    Some(u64::try_from(now.as_millis()).ok()?.saturating_sub(age))
}

/// The first passed descriptor, `SD_LISTEN_FDS_START` of sd_listen_fds(3).
const FIRST: RawFd = 3;

/// If this variable is set, the last passed descriptor is a file with the names of the others. In the environment, the names could
/// exceed the limit of execve(2).
const NAMES_IN_FILE: &str = "VMMFD_LISTEN_NAMES";

/// The maximum number of digits of a process ID.
const PID_DIGITS: usize = 10;

/// Takes the descriptors that were passed to this program, with their names, and makes them close-on-exec.
///
/// `LISTEN_FDS` and `LISTEN_FDNAMES` describe them, if `LISTEN_PID` is this process. If a [`Program`] passed them, the last descriptor
/// holds the names. Only the first call returns them.
///
/// # Errors
/// EBADF if a descriptor is not open, and then none is taken; `InvalidInput` if a variable is malformed. See sd_listen_fds(3), fcntl(2).
pub fn take_passed() -> io::Result<Vec<(String, OwnedFd)>> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    if number("LISTEN_PID") != Some(std::process::id()) || TAKEN.swap(true, Ordering::AcqRel) {
        return Ok(Vec::new());
    }
    let end = number("LISTEN_FDS").and_then(|count| RawFd::try_from(count).ok()).and_then(|n| FIRST.checked_add(n));
    let mut end = end.ok_or(io::ErrorKind::InvalidInput)?;
    for fd in FIRST..end {
        // SAFETY: the arguments are integers; no memory is read or written.
        if unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    let names = if std::env::var_os(NAMES_IN_FILE).is_some() && end > FIRST {
        end -= 1;
        // SAFETY: as below. The descriptor is not returned to the caller.
        let mut names = File::from(unsafe { OwnedFd::from_raw_fd(end) });
        let mut text = String::new();
        names.rewind().and_then(|()| names.read_to_string(&mut text))?;
        text
    } else {
        std::env::var("LISTEN_FDNAMES").unwrap_or_default()
    };
    let names = names.split(':').chain(std::iter::repeat("unknown"));
    // SAFETY: fcntl succeeded, so they are open. The parent passed them for the code that asks for them by this convention, and `TAKEN`
    // ensures that they are taken once.
    let take = |(fd, name): (RawFd, &str)| (name.to_owned(), unsafe { OwnedFd::from_raw_fd(fd) });
    Ok((FIRST..end).zip(names).map(take).collect())
}

/// A program to execute with descriptors of this process, passed by the convention of sd_listen_fds(3).
#[derive(Debug)]
pub(crate) struct Program {
    path: CString,
    arguments: Vec<CString>,
    environment: Vec<CString>,
    fds: Vec<RawFd>,
    /// Keeps the file of the names open until the program is executed.
    _names: File,
}

impl Program {
    /// Prepares the program at a path. The first argument is the program's name. The environment is this process's, with `variables`
    /// added or replaced. `fds` are the descriptors to pass, with their names.
    ///
    /// # Errors
    /// `InvalidInput` if a text contains a zero byte. See also memfd_create(2), write(2).
    pub(crate) fn new<'a>(
        path: &Path,
        arguments: impl IntoIterator<Item = &'a OsStr>,
        variables: &[(&str, OsString)],
        fds: &[(&str, BorrowedFd<'_>)],
    ) -> io::Result<Self> {
        let text =
            |text: &OsStr| CString::new(text.as_bytes()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput));
        let replaced = |name: &OsStr| {
            ["LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID", "LISTEN_PIDFDID", NAMES_IN_FILE].iter().any(|of| name == *of)
                || variables.iter().any(|(of, _)| name == *of)
        };
        let mut environment = Vec::new();
        for (name, value) in std::env::vars_os().filter(|(name, _)| !replaced(name)) {
            environment.push(text(&joined(&name, &value))?);
        }
        for (name, value) in variables {
            environment.push(text(&joined(OsStr::new(name), value))?);
        }
        let names: Vec<&str> = fds.iter().map(|(name, _)| *name).collect();
        let mut file = File::from(memfd_create(c"vmmfd-names", MFdFlags::MFD_CLOEXEC)?);
        file.write_all(names.join(":").as_bytes())?;
        let fds: Vec<RawFd> = fds.iter().map(|(_, fd)| fd.as_raw_fd()).chain([file.as_raw_fd()]).collect();
        environment.push(text(OsStr::new(&format!("LISTEN_FDS={}", fds.len())))?);
        environment.push(text(OsStr::new(&format!("{NAMES_IN_FILE}=1")))?);
        Ok(Self {
            path: text(path.as_os_str())?,
            arguments: arguments.into_iter().map(text).collect::<io::Result<_>>()?,
            environment,
            fds,
            _names: file,
        })
    }

    /// Starts the program as a child process in its own process group, so that signals from a terminal reach only the caller. The caller
    /// keeps its descriptors and must wait for the child.
    ///
    /// # Errors
    /// See fork(2), and execve(2) in the child. After an error no child exists.
    pub(crate) fn spawn(self) -> io::Result<libc::pid_t> {
        let mut image = Image::of(self);
        let (reader, writer) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
        // The child renumbers the passed descriptors. `Image` moves this one out of their way, because the child reports failures on it.
        image.report = writer.as_raw_fd();
        // SAFETY: the child calls only async-signal-safe functions (setpgid, fcntl, dup2, close, getpid, execve, write, _exit) and
        // accesses only memory that was allocated before the fork: other threads of the parent may have held any lock.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            0 => image.run(),
            child => {
                drop(writer);
                let mut errno = [0; 4];
                // execve closes the write end of the pipe, and then read returns 0.
                let failed = loop {
                    match nix::unistd::read(&reader, &mut errno) {
                        Ok(4) => break Some(io::Error::from_raw_os_error(i32::from_ne_bytes(errno))),
                        Err(nix::errno::Errno::EINTR) => {}
                        _ => break None,
                    }
                };
                match failed {
                    None => Ok(child),
                    Some(error) => {
                        // SAFETY: this call created the child; with a null pointer no status is written.
                        unsafe { libc::waitpid(child, ptr::null_mut(), 0) };
                        Err(error)
                    }
                }
            }
        }
    }

    /// Replaces this program, or if that fails, replaces it with the program at `fallback`. Returns only if both fail; descriptors of
    /// this process then have other numbers, so the caller must exit.
    pub(crate) fn execute(self, fallback: &OsStr) -> io::Error {
        let mut image = Image::of(self);
        let error = io::Error::from_raw_os_error(image.execute());
        if let Ok(path) = CString::new(fallback.as_bytes()) {
            image.program.path = path;
            // SAFETY: as in `Image::execute`, which has prepared the lists.
            unsafe { libc::execve(image.program.path.as_ptr(), image.arguments.as_ptr(), image.environment.as_ptr()) };
        }
        error
    }
}

fn joined(name: &OsStr, value: &OsStr) -> OsString {
    let mut joined = name.to_owned();
    joined.push("=");
    joined.push(value);
    joined
}

/// The arguments of execve(2), all allocated before the fork.
struct Image {
    program: Program,
    /// The variable `LISTEN_PID=...`, completed in the child.
    pid: Vec<u8>,
    arguments: Vec<*const libc::c_char>,
    environment: Vec<*const libc::c_char>,
    /// The descriptor on which the child reports a failure, or -1.
    report: RawFd,
    /// For each number from 3 on, the index of the passed descriptor that currently has this number.
    holders: Vec<Option<usize>>,
}

impl Image {
    fn of(program: Program) -> Self {
        let mut pid = b"LISTEN_PID=".to_vec();
        pid.resize(pid.len() + PID_DIGITS + 1, 0);
        let pointers = |texts: &[CString]| texts.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
        let mut arguments = pointers(&program.arguments);
        arguments.push(ptr::null());
        let mut environment = pointers(&program.environment);
        // Moving the vector does not move its heap buffer.
        environment.extend([pid.as_ptr().cast(), ptr::null()]);
        let mut holders = vec![None; program.fds.len()];
        for (at, fd) in program.fds.iter().enumerate() {
            if let Some(holder) = usize::try_from(*fd - FIRST).ok().and_then(|number| holders.get_mut(number)) {
                *holder = Some(at);
            }
        }
        Self { program, pid, arguments, environment, report: -1, holders }
    }

    /// Runs in the child: executes the program, or reports the error and exits.
    fn run(&mut self) -> ! {
        // SAFETY: the arguments are integers. The call can't fail for a new process.
        unsafe { libc::setpgid(0, 0) };
        let errno = self.execute().to_ne_bytes();
        // SAFETY: write reads four bytes of the stack. `_exit` runs none of the parent's code.
        unsafe {
            libc::write(self.report, errno.as_ptr().cast(), errno.len());
            libc::_exit(127)
        }
    }

    /// Executes the program. Returns only on failure, with the errno of the failed call.
    fn execute(&mut self) -> i32 {
        if let Err(errno) = self.renumber() {
            return errno;
        }
        // SAFETY: the call only returns a number.
        let mut rest = unsafe { libc::getpid() }.cast_unsigned();
        let mut digits = [0; PID_DIGITS];
        let mut at = PID_DIGITS;
        while at > 0 && (rest > 0 || at == PID_DIGITS) {
            at -= 1;
            digits[at] = b'0' + (rest % 10) as u8;
            rest /= 10;
        }
        let start = b"LISTEN_PID=".len();
        self.pid[start..start + PID_DIGITS - at].copy_from_slice(&digits[at..]);
        // SAFETY: both lists end with a null pointer, and every other entry points to a zero-terminated text that lives in `self`. The
        // environment holds the address of `pid`'s bytes, which were written through the vector that owns them.
        unsafe { libc::execve(self.program.path.as_ptr(), self.arguments.as_ptr(), self.environment.as_ptr()) };
        last_errno()
    }

    /// Renumbers the descriptors from 3 on. Moves a descriptor that still holds a number needed by another.
    fn renumber(&mut self) -> Result<(), i32> {
        let fds = &mut self.program.fds;
        let above = FIRST + fds.len() as RawFd;
        let check = |result: RawFd| if result < 0 { Err(last_errno()) } else { Ok(result) };
        if self.report >= 0 && self.report < above {
            // SAFETY: the arguments are integers; no memory is read or written.
            self.report = check(unsafe { libc::fcntl(self.report, libc::F_DUPFD_CLOEXEC, above) })?;
        }
        for at in 0..fds.len() {
            let number = FIRST + at as RawFd;
            if fds[at] == number {
                // SAFETY: the arguments are integers; no memory is read or written.
                check(unsafe { libc::fcntl(number, libc::F_SETFD, 0) })?;
                continue;
            }
            if let Some(other) = self.holders[at].filter(|other| *other > at) {
                // SAFETY: the arguments are integers; no memory is read or written.
                fds[other] = check(unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, above) })?;
            }
            // SAFETY: the arguments are integers. The file that had this number is no longer needed, or was moved above.
            check(unsafe { libc::dup2(fds[at], number) })?;
            // An old number inside the range belongs to a later descriptor, and dup2 replaces it then.
            if fds[at] >= above {
                // SAFETY: the argument is an integer. The descriptor's owner in this process does not run any more.
                unsafe { libc::close(fds[at]) };
            }
        }
        Ok(())
    }
}

fn last_errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    /// Starts a shell with these descriptors and returns the text that it reads from them, in order.
    fn read_back(fds: &[BorrowedFd<'_>]) -> String {
        let (mut reader, writer) = io::pipe().unwrap();
        let script = r#"test "$LISTEN_PID" = $$ || exit 9; i=3; while [ $i -lt $((3 + LISTEN_FDS - 2)) ]; do
            cat /proc/self/fd/$i >&$((3 + LISTEN_FDS - 2)); i=$((i + 1)); done"#;
        let mut passed: Vec<(&str, BorrowedFd<'_>)> = fds.iter().map(|fd| ("x", *fd)).collect();
        passed.push(("out", writer.as_fd()));
        let arguments = ["sh", "-c", script].map(OsStr::new);
        let child = Program::new(Path::new("/bin/sh"), arguments, &[], &passed).unwrap().spawn().unwrap();
        drop(writer);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        let mut status = 0;
        // SAFETY: this test created the child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "{text}");
        text
    }

    fn file_with(text: &str) -> File {
        let file = crate::sys::memfd::empty(c"test").map(File::from).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, text.as_bytes(), 0).unwrap();
        file
    }

    #[test]
    fn descriptors_arrive_in_order() {
        let texts = ["a", "b", "c", "d", "e", "f"];
        let files: Vec<File> = texts.iter().map(|text| file_with(text)).collect();
        // In each of these orders, descriptors hold numbers that others need.
        for turn in 0..texts.len() {
            let mut order: Vec<usize> = (0..texts.len()).collect();
            order.rotate_left(turn);
            if turn % 2 == 1 {
                order.reverse();
            }
            let fds: Vec<BorrowedFd<'_>> = order.iter().map(|at| files[*at].as_fd()).collect();
            let want: String = order.iter().map(|at| texts[*at]).collect();
            assert_eq!(read_back(&fds), want);
        }
    }

    #[test]
    fn spawn_reports_missing_program() {
        let program = Program::new(Path::new("/no/such/program"), [OsStr::new("x")], &[], &[]).unwrap();
        assert_eq!(program.spawn().unwrap_err().raw_os_error(), Some(libc::ENOENT));
    }
}
