//! Descriptors that are passed from one program to the next, and the age of a process.

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

/// When a process started, in milliseconds since 1970, to the hundredth of a second. `None` if this PID namespace does not have it. See
/// `starttime` in proc_pid_stat(5).
pub(crate) fn started_ms(pid: u32) -> Option<u64> {
    // The unit of times in /proc, on every architecture.
    const TICK_MS: u64 = 10;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command, in brackets, may have brackets and spaces itself. Behind it is the third field.
    let ticks: u64 = stat.rsplit_once(") ")?.1.split(' ').nth(22 - 3)?.parse().ok()?;
    // A delay between the two clocks must make the result too early, so that no process seems to be younger than what it started.
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).ok()?;
    let since_boot = clock_gettime(ClockId::Boottime);
    let since_boot =
        u64::try_from(since_boot.tv_sec).ok()? * 1000 + u64::try_from(since_boot.tv_nsec).ok()? / 1_000_000;
    let age = since_boot.saturating_sub(ticks * TICK_MS);
    Some(u64::try_from(now.as_millis()).ok()?.saturating_sub(age))
}

/// The first descriptor that a program is passed, as of sd_listen_fds(3).
const FIRST: RawFd = 3;

/// Says that the last descriptor is a file with the names of the others: in the environment they could exceed what execve(2) takes, with
/// an environment or a stack limit that was fine before.
const NAMES_IN_FILE: &str = "VMMFD_LISTEN_NAMES";

/// How many digits the number of a process has at most.
const PID_DIGITS: usize = 10;

/// Takes the descriptors that this program was started with for it to use, by their names, and makes them close-on-exec: those that
/// `LISTEN_FDS` and `LISTEN_FDNAMES` tell of, if `LISTEN_PID` is this process; of a [`Program`], the last one has the names. The first call has them; each further one returns none.
///
/// # Errors
/// EBADF if one of them is not open: then none is taken; `InvalidInput` if the variables can't be understood. See sd_listen_fds(3),
/// fcntl(2).
pub fn take_passed() -> io::Result<Vec<(String, OwnedFd)>> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    if number("LISTEN_PID") != Some(std::process::id()) || TAKEN.swap(true, Ordering::AcqRel) {
        return Ok(Vec::new());
    }
    let count = number("LISTEN_FDS").and_then(|count| RawFd::try_from(count).ok()).and_then(|of| FIRST.checked_add(of));
    let mut end = count.ok_or(io::ErrorKind::InvalidInput)?;
    for fd in FIRST..end {
        // SAFETY: integers; no memory is read or written.
        if unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    let names = if std::env::var_os(NAMES_IN_FILE).is_some() && end > FIRST {
        end -= 1;
        // SAFETY: as below. It is not among those that are returned.
        let mut names = File::from(unsafe { OwnedFd::from_raw_fd(end) });
        let mut text = String::new();
        names.rewind().and_then(|()| names.read_to_string(&mut text))?;
        text
    } else {
        std::env::var("LISTEN_FDNAMES").unwrap_or_default()
    };
    let names = names.split(':').chain(std::iter::repeat("unknown"));
    // SAFETY: they are open, as fcntl said. The program that started this one passed them for whatever asks for them by this
    // convention, and the flag sees to it that they are taken once.
    let take = |(fd, name): (RawFd, &str)| (name.to_owned(), unsafe { OwnedFd::from_raw_fd(fd) });
    Ok((FIRST..end).zip(names).map(take).collect())
}

/// A program to execute with descriptors of this one, which it finds as of sd_listen_fds(3).
#[derive(Debug)]
pub(crate) struct Program {
    path: CString,
    arguments: Vec<CString>,
    environment: Vec<CString>,
    fds: Vec<RawFd>,
    /// The names, open until the program is executed.
    _names: File,
}

impl Program {
    /// The program at a path, with these arguments (the first one is its name), this process's environment and `more` of it, and these
    /// descriptors by their names.
    ///
    /// # Errors
    /// `InvalidInput` if a text has a zero byte. Those of memfd_create(2) and write(2).
    pub(crate) fn new<'a>(
        path: &Path,
        arguments: impl IntoIterator<Item = &'a OsStr>,
        more: &[(&str, OsString)],
        fds: &[(&str, BorrowedFd<'_>)],
    ) -> io::Result<Self> {
        let text =
            |text: &OsStr| CString::new(text.as_bytes()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput));
        let replaced = |name: &OsStr| {
            ["LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID", "LISTEN_PIDFDID", NAMES_IN_FILE].iter().any(|of| name == *of)
                || more.iter().any(|(of, _)| name == *of)
        };
        let mut environment = Vec::new();
        for (name, value) in std::env::vars_os().filter(|(name, _)| !replaced(name)) {
            environment.push(text(&joined(&name, &value))?);
        }
        for (name, value) in more {
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

    /// Starts it as a child process, in a process group of its own: signals from a terminal are for the caller. The caller keeps its descriptors, and waits for the child's end.
    ///
    /// # Errors
    /// Those of fork(2), and of execve(2) in the child: then there is none.
    pub(crate) fn spawn(self) -> io::Result<libc::pid_t> {
        let mut image = Image::of(self);
        let (reader, writer) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
        // The child closes what it does not need when it executes the program, and numbers the others anew: the one by which it
        // reports a failure must not be among those numbers.
        image.report = writer.as_raw_fd();
        // SAFETY: the child calls only functions that are async-signal-safe (setpgid, fcntl, dup2, close, getpid, execve, write, _exit), and
        // touches only memory that was allocated before: other threads of the parent may have held any lock.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            0 => image.run(),
            child => {
                drop(writer);
                let mut errno = [0; 4];
                // The end of the file comes with execve, which closes the other end.
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
                        // SAFETY: the child is this call's own; a null pointer asks for no status.
                        unsafe { libc::waitpid(child, ptr::null_mut(), 0) };
                        Err(error)
                    }
                }
            }
        }
    }

    /// Executes it in place of this program; if that fails, another one in the same way. Returns only if that fails too; then
    /// descriptors of this process have other numbers: the caller must end.
    pub(crate) fn execute(self, or_else: &OsStr) -> io::Error {
        let mut image = Image::of(self);
        let error = io::Error::from_raw_os_error(image.execute());
        if let Ok(path) = CString::new(or_else.as_bytes()) {
            image.program.path = path;
            // SAFETY: as in `Image::execute`, which has made everything ready.
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

/// What execve(2) is called with: all of it allocated before a fork.
struct Image {
    program: Program,
    pid: Vec<u8>,
    arguments: Vec<*const libc::c_char>,
    environment: Vec<*const libc::c_char>,
    report: RawFd,
    /// For each number from 3 on, which descriptor has it now and is to be passed under another.
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
        // The heap's bytes stay where they are when the vector is moved.
        environment.extend([pid.as_ptr().cast(), ptr::null()]);
        let mut holders = vec![None; program.fds.len()];
        for (at, fd) in program.fds.iter().enumerate() {
            if let Some(holder) = usize::try_from(*fd - FIRST).ok().and_then(|number| holders.get_mut(number)) {
                *holder = Some(at);
            }
        }
        Self { program, pid, arguments, environment, report: -1, holders }
    }

    /// The child: executes the program, or reports why not.
    fn run(&mut self) -> ! {
        // SAFETY: integers. It can't fail for a process that has just been made.
        unsafe { libc::setpgid(0, 0) };
        let errno = self.execute().to_ne_bytes();
        // SAFETY: four bytes of the stack are read. The process ends without running anything of the parent's.
        unsafe {
            libc::write(self.report, errno.as_ptr().cast(), errno.len());
            libc::_exit(127)
        }
    }

    /// Returns the error of the call that failed.
    fn execute(&mut self) -> i32 {
        if let Err(errno) = self.number() {
            return errno;
        }
        // SAFETY: it only returns a number.
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
        // SAFETY: both lists end with a null pointer, and each other entry is a text that ends with a zero byte and lives in `self`.
        // The list of variables has the address of `pid`'s bytes, which were written through the vector that owns them.
        unsafe { libc::execve(self.program.path.as_ptr(), self.arguments.as_ptr(), self.environment.as_ptr()) };
        last_errno()
    }

    /// Gives the descriptors the numbers from 3 on. One that is in the way is moved.
    fn number(&mut self) -> Result<(), i32> {
        let fds = &mut self.program.fds;
        let above = FIRST + fds.len() as RawFd;
        let check = |result: RawFd| if result < 0 { Err(last_errno()) } else { Ok(result) };
        if self.report >= 0 && self.report < above {
            // SAFETY: an integer; no memory is read or written.
            self.report = check(unsafe { libc::fcntl(self.report, libc::F_DUPFD_CLOEXEC, above) })?;
        }
        for at in 0..fds.len() {
            let number = FIRST + at as RawFd;
            if fds[at] == number {
                // SAFETY: an integer; no memory is read or written.
                check(unsafe { libc::fcntl(number, libc::F_SETFD, 0) })?;
                continue;
            }
            if let Some(other) = self.holders[at].filter(|other| *other > at) {
                // SAFETY: an integer; no memory is read or written.
                fds[other] = check(unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, above) })?;
            }
            // SAFETY: integers. What had this number is of no use any more, or was moved above.
            check(unsafe { libc::dup2(fds[at], number) })?;
            // One that lies in the range is another's place, which is overwritten in its turn.
            if fds[at] >= above {
                // SAFETY: an integer. What owns the descriptor in this process is not run any more.
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

    /// What a shell that was started with these descriptors reads from each of them, in order.
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
        // SAFETY: the child is this test's own.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "{text}");
        text
    }

    fn holding(text: &str) -> File {
        let file = crate::sys::memfd::empty(c"test").map(File::from).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, text.as_bytes(), 0).unwrap();
        file
    }

    #[test]
    fn a_program_has_descriptors_in_their_order_whatever_numbers_they_had() {
        let texts = ["a", "b", "c", "d", "e", "f"];
        let files: Vec<File> = texts.iter().map(|text| holding(text)).collect();
        // In all orders of which each moves others out of the way.
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
    fn a_program_that_does_not_exist_is_an_error_here() {
        let program = Program::new(Path::new("/no/such/program"), [OsStr::new("x")], &[], &[]).unwrap();
        assert_eq!(program.spawn().unwrap_err().raw_os_error(), Some(libc::ENOENT));
    }
}
