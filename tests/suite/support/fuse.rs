//! A file system with the test as its daemon. The daemon records each request of the kernel and can withhold its answers.

use std::{
    ffi::OsString,
    fs::{File, OpenOptions},
    io::{Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::PathBuf,
    process::{Command, Stdio},
    sync::{
        Arc, Condvar, Mutex,
        mpsc::{self, Receiver},
    },
    thread,
    time::Duration,
};

use nix::libc;
use tempfile::TempDir;

/// Opcodes of `linux/fuse.h`.
pub(crate) const GETATTR: u32 = 3;
pub(crate) const FLUSH: u32 = 25;
const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const OPEN: u32 = 14;
const RELEASE: u32 = 18;
const INIT: u32 = 26;

/// The node ID of the file.
const FILE: u64 = 2;

/// The time limit for an expected request.
const PATIENCE: Duration = Duration::from_secs(600);

/// A mounted file system that has a single file. Dropping it unmounts the file system. Needs root.
pub(crate) struct Fuse {
    folder: TempDir,
    requests: Receiver<u32>,
    answering: Arc<(Mutex<bool>, Condvar)>,
}

impl Fuse {
    /// Mounts a file system whose file has `size` bytes.
    pub(crate) fn mount(size: u64) -> Self {
        let device = OpenOptions::new().read(true).write(true).custom_flags(libc::O_CLOEXEC).open("/dev/fuse").unwrap();
        let folder = tempfile::tempdir().unwrap();
        // `-i` skips the mount helper: the command's standard input is the daemon's descriptor.
        let mount = Command::new("mount")
            .args(["-i", "-t", "fuse", "-o", "fd=0,rootmode=40000,user_id=0,group_id=0", "vmmfd-test"])
            .arg(folder.path())
            .stdin(Stdio::from(device.try_clone().unwrap()))
            .status();
        assert!(mount.unwrap().success());
        let answering = Arc::new((Mutex::new(true), Condvar::new()));
        let (sender, requests) = mpsc::channel();
        let gate = Arc::clone(&answering);
        thread::spawn(move || serve(device, size, &gate, &sender));
        Self { folder, requests, answering }
    }

    pub(crate) fn file(&self) -> PathBuf {
        self.folder.path().join("file")
    }

    /// Stops or resumes the answers. Resuming also answers the waiting requests.
    pub(crate) fn answer(&self, answering: bool) {
        *self.answering.0.lock().unwrap() = answering;
        self.answering.1.notify_all();
    }

    /// Waits for the next request.
    pub(crate) fn next_request(&self) -> u32 {
        self.requests.recv_timeout(PATIENCE).unwrap()
    }

    /// Returns the requests received since the last call.
    pub(crate) fn requests(&self) -> Vec<u32> {
        self.requests.try_iter().collect()
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        self.answer(true);
        let path: OsString = self.folder.path().into();
        let unmounted = Command::new("umount").args(["-l".into(), path]).status();
        if !unmounted.is_ok_and(|status| status.success()) {
            eprintln!("the test's file system stays mounted");
        }
    }
}

/// Answers requests until the file system is unmounted.
fn serve(mut device: File, size: u64, answering: &(Mutex<bool>, Condvar), requests: &mpsc::Sender<u32>) {
    // The kernel requires space for its longest request.
    let mut buffer = vec![0; 1 << 20];
    while let Ok(length) = device.read(&mut buffer) {
        let number = |at: usize| u64::from_le_bytes(buffer[at..at + 8].try_into().unwrap());
        let opcode = (number(0) >> 32) as u32;
        let unique = number(8);
        let node = number(16);
        assert!(length >= 40);
        if opcode == FORGET {
            continue;
        }
        // Fails after the end of the test.
        let _ = requests.send(opcode);
        let mut answers = answering.0.lock().unwrap();
        while !*answers {
            answers = answering.1.wait(answers).unwrap();
        }
        let attributes = attributes(if opcode == LOOKUP { FILE } else { node }, size);
        let body = match opcode {
            // Version 7.31 without optional features; a write has at most 4 KiB.
            INIT => [&[7u32, 31, 0, 0, 0, 4096].map(u32::to_le_bytes).concat()[..], &[0; 40]].concat(),
            // Attributes and entries expire immediately.
            LOOKUP => [&[FILE, 0, 0, 0, 0].map(u64::to_le_bytes).concat()[..], &attributes].concat(),
            GETATTR => [&[0; 16][..], &attributes].concat(),
            OPEN => vec![0; 16],
            FLUSH | RELEASE => Vec::new(),
            _ => {
                reply(&mut device, unique, -libc::ENOSYS, &[]);
                continue;
            }
        };
        reply(&mut device, unique, 0, &body);
    }
}

/// `struct fuse_attr` of a directory, or of a file with `size` bytes.
fn attributes(node: u64, size: u64) -> Vec<u8> {
    let mode: u32 = if node == FILE { libc::S_IFREG | 0o666 } else { libc::S_IFDIR | 0o777 };
    let long = [node, size, size.div_ceil(512), 0, 0, 0].map(u64::to_le_bytes).concat();
    let short = [0, 0, 0, mode, 1, 0, 0, 0, 4096, 0].map(u32::to_le_bytes).concat();
    [long, short].concat()
}

fn reply(device: &mut File, unique: u64, error: i32, body: &[u8]) {
    let length = 16 + body.len() as u32;
    let header = [&length.to_le_bytes()[..], &error.to_le_bytes(), &unique.to_le_bytes()].concat();
    // Fails for an interrupted request.
    let _ = device.write_all(&[&header, body].concat());
}
