//! Events, including events shared by several processes.
//!
//! An event is an empty memfd. Another process of the same user opens it as `/proc/PID/fd/N`. Calls are synchronous here, so recorded work is
//! always finished.

use std::{
    collections::BTreeMap,
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    fs::{self, File},
    os::{
        fd::{AsRawFd, FromRawFd},
        unix::fs::MetadataExt,
    },
    process,
    time::Instant,
};

use crate::{
    Answer, controls,
    numbers::{INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, UNKNOWN, packed, unpacked},
};

const MAP_FAILED: u32 = 205;

/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: c_uint = 2;
/// `CU_EVENT_INTERPROCESS`.
const INTERPROCESS: c_uint = 4;
const FLAGS: c_uint = 7;

const NAME: &CStr = c"fakecuda event";
const CLOSE_ON_EXEC: c_uint = 1;

unsafe extern "C" {
    /// The C library's function.
    fn memfd_create(name: *const c_char, flags: c_uint) -> c_int;
}

/// The events of one process.
pub(crate) struct Events {
    events: BTreeMap<usize, Event>,
    made: usize,
}

struct Event {
    file: File,
    device: c_int,
    shared: bool,
    opened: bool,
    /// Whether the time of the recording is kept.
    timed: bool,
    recorded: Option<Instant>,
}

/// The 64 bytes of a handle.
struct Ticket {
    pid: u64,
    fd: u64,
    inode: u64,
}

const MAGIC: u64 = u64::from_le_bytes(*b"fakeEVT\x01");

impl Ticket {
    fn bytes(&self) -> [u8; 64] {
        packed([MAGIC, self.pid, self.fd, self.inode, 0, 0, 0, 0])
    }

    fn read(bytes: &[u8; 64]) -> Answer<Self> {
        match unpacked(bytes) {
            [MAGIC, pid, fd, inode, 0, 0, 0, 0] => Ok(Self { pid, fd, inode }),
            _ => Err(INVALID_VALUE),
        }
    }
}

fn user(process: &str) -> Answer<u32> {
    fs::metadata(format!("/proc/{process}")).map(|metadata| metadata.uid()).map_err(|_| INVALID_HANDLE)
}

impl Events {
    pub(crate) fn new() -> Self {
        Self { events: BTreeMap::new(), made: 0 }
    }

    pub(crate) fn live(&self) -> u64 {
        self.events.len() as u64
    }

    fn add(&mut self, event: Event) -> usize {
        self.made += 1;
        // Not a small number, like other handles.
        let number = 0x7D00_0000_0000 + 0x40 * self.made;
        self.events.insert(number, event);
        number
    }

    fn named(&self, event: *mut c_void) -> Answer<&Event> {
        self.events.get(&event.addr()).ok_or(INVALID_HANDLE)
    }

    pub(crate) fn create(&mut self, device: c_int, flags: c_uint) -> Answer<usize> {
        let shared = flags & INTERPROCESS != 0;
        // Interprocess events have no timing.
        if flags & !FLAGS != 0 || shared && flags & DISABLE_TIMING == 0 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the name is a C string.
        let fd = unsafe { memfd_create(NAME.as_ptr(), CLOSE_ON_EXEC) };
        if fd < 0 {
            return Err(UNKNOWN);
        }
        // SAFETY: it was just opened, and has no other owner.
        let file = unsafe { File::from_raw_fd(fd) };
        let timed = flags & DISABLE_TIMING == 0;
        Ok(self.add(Event { file, device, shared, opened: false, timed, recorded: None }))
    }

    pub(crate) fn export(&self, event: *mut c_void) -> Answer<[u8; 64]> {
        let event = self.named(event)?;
        // Assumed for opened events.
        if !event.shared || event.opened {
            return Err(INVALID_HANDLE);
        }
        let inode = event.file.metadata().map_err(|_| UNKNOWN)?.ino();
        let fd = event.file.as_raw_fd() as u64;
        Ok(Ticket { pid: process::id().into(), fd, inode }.bytes())
    }

    pub(crate) fn open(&mut self, device: c_int, handle: &[u8; 64]) -> Answer<usize> {
        let ticket = Ticket::read(handle)?;
        if ticket.pid == u64::from(process::id()) {
            return Err(INVALID_CONTEXT);
        }
        if controls::settings().events_fail || user(&ticket.pid.to_string())? != user("self")? {
            return Err(MAP_FAILED);
        }
        let file = File::open(format!("/proc/{}/fd/{}", ticket.pid, ticket.fd)).map_err(|_| INVALID_HANDLE)?;
        if file.metadata().map_err(|_| UNKNOWN)?.ino() != ticket.inode {
            return Err(INVALID_HANDLE);
        }
        Ok(self.add(Event { file, device, shared: true, opened: true, timed: false, recorded: None }))
    }

    /// Fails for a stream of another device.
    pub(crate) fn record(&mut self, device: c_int, event: *mut c_void) -> Answer {
        let event = self.events.get_mut(&event.addr()).ok_or(INVALID_HANDLE)?;
        if event.device != device {
            return Err(INVALID_HANDLE);
        }
        event.recorded = Some(Instant::now());
        Ok(())
    }

    /// Recorded work is always finished.
    pub(crate) fn wait(&self, event: *mut c_void, flags: c_uint) -> Answer {
        if flags > 1 { Err(INVALID_VALUE) } else { self.named(event).map(drop) }
    }

    /// The time between two recordings, in milliseconds.
    pub(crate) fn elapsed(&self, begin: *mut c_void, end: *mut c_void) -> Answer<f32> {
        let at = |event| {
            let event = self.named(event)?;
            event.recorded.filter(|_| event.timed).ok_or(INVALID_HANDLE)
        };
        let begin = at(begin)?;
        let end = at(end)?;
        Ok(end.saturating_duration_since(begin).as_secs_f32() * 1000.0)
    }

    pub(crate) fn destroy(&mut self, event: *mut c_void) -> Answer {
        self.events.remove(&event.addr()).map(drop).ok_or(INVALID_HANDLE)
    }
}
