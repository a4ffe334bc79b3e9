//! Test support: drivers of each backend, fault injection, processes with deadlines, and open files.

mod broker;
mod fake;
mod faulty;
mod gpu;
pub(crate) mod manager;
mod mapped;
pub(crate) mod material;
pub(crate) mod pages;
pub(crate) mod prelude;
mod process;
mod raw;
pub(crate) mod schema;
pub(crate) mod served;
pub(crate) mod session;
mod subject;

pub(crate) use self::{
    broker::{Broker, filled, refused, until},
    fake::{Copy, Fake},
    faulty::{Fault, Faulty},
    gpu::Gpu,
    mapped::Mapped,
    process::{
        aborts_in_fork, become_user, in_child, in_fork, in_thread, open_files, parent_of, pause, with_own_descriptors,
    },
    raw::Raw,
    subject::{EXPORTABLE, Kind, Subject},
};

use std::{
    fs, io,
    os::{fd::AsFd, unix::fs::MetadataExt},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use nix::{
    fcntl::{FcntlArg, FdFlag, OFlag, fcntl},
    sys::stat::fstat,
};
use tracing_subscriber::filter::LevelFilter;
use vmmfd::Error;

/// Takes the turn of a test that keeps a CPU busy for seconds. Such tests run one after another, beside the many that wait.
pub(crate) fn cpu_turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the driver's error code, or 0 for success. Any other error fails the test.
#[track_caller]
pub(crate) fn code<T>(answer: Result<T, Error>) -> u32 {
    match answer {
        Ok(_) => 0,
        Err(Error::Driver { code, .. }) => code,
        Err(error) => panic!("not the driver's own error: {error}"),
    }
}

/// Repeats work that seals memory: the kernel refuses while a concurrent fork of another test still has the memory mapped.
pub(crate) fn sealing<T>(work: impl Fn() -> Result<T, Error>) -> Result<T, Error> {
    let begun = Instant::now();
    loop {
        match work() {
            Err(Error::Driver { source: Some(source), .. })
                if source.kind() == io::ErrorKind::ResourceBusy && begun.elapsed() < Duration::from_secs(60) => {}
            done => return done,
        }
    }
}

pub(crate) fn closes_on_exec(fd: impl AsFd) -> bool {
    FdFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFD).unwrap()).contains(FdFlag::FD_CLOEXEC)
}

/// Returns the errors that this thread logs during `run`.
pub(crate) fn errors_logged(run: impl FnOnce()) -> String {
    let log = Arc::new(Mutex::new(Vec::new()));
    let writer = Arc::clone(&log);
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(LevelFilter::ERROR)
        .with_ansi(false)
        .with_writer(move || Log(Arc::clone(&writer)))
        .finish();
    tracing::subscriber::with_default(subscriber, run);
    String::from_utf8(log.lock().unwrap().clone()).unwrap()
}

struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The identity of an open file.
///
/// Leak checks compare inodes: a count of all descriptors would include other tests' files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Inode {
    device: u64,
    number: u64,
}

impl Inode {
    pub(crate) fn of(fd: impl AsFd) -> Self {
        let stat = fstat(fd).unwrap();
        Self { device: stat.st_dev, number: stat.st_ino }
    }

    /// Counts the descriptors of this file in this process.
    pub(crate) fn open_here(self) -> usize {
        self.numbers().len()
    }

    /// Reports whether every descriptor of this file is closed on exec.
    pub(crate) fn closes_on_exec(self) -> bool {
        self.numbers().iter().all(|number| {
            let info = fs::read_to_string(format!("/proc/self/fdinfo/{number}")).unwrap();
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap();
            i32::from_str_radix(flags.trim(), 8).unwrap() & OFlag::O_CLOEXEC.bits() != 0
        })
    }

    /// Reports whether this process maps this file.
    pub(crate) fn mapped_here(self) -> bool {
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        // The columns are address, permissions, offset, device, inode, name. Without a file the inode is 0.
        maps.lines()
            .any(|line| line.split_whitespace().nth(4) == Some(&self.number.to_string()) && line.contains("memfd:"))
    }

    fn numbers(self) -> Vec<String> {
        let is_same =
            |path: &Path| fs::metadata(path).is_ok_and(|seen| (seen.dev(), seen.ino()) == (self.device, self.number));
        let paths = open_files("self").unwrap().into_iter().map(|file| file.path).filter(|path| is_same(path));
        paths.map(|path| path.file_name().unwrap().to_str().unwrap().to_owned()).collect()
    }
}
