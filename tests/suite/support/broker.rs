//! A broker in a thread of the test.

use std::thread::JoinHandle;

use vmmfd::broker::ServerReport;

use super::{Kind, Subject, pause};
use crate::support::prelude::*;

/// A broker in a thread.
pub(crate) struct Broker {
    _folder: TempDir,
    pub(crate) path: PathBuf,
    cancel: Cancel,
    server: Option<JoinHandle<vmmfd::Result<ServerReport>>>,
}

impl Broker {
    pub(crate) fn start(subject: &Subject) -> Self {
        Self::with(subject, ServerConfig::default())
    }

    pub(crate) fn with(subject: &Subject, config: ServerConfig) -> Self {
        Self::at(tempfile::tempdir().unwrap(), subject, config)
    }

    pub(crate) fn at(folder: TempDir, subject: &Subject, mut config: ServerConfig) -> Self {
        if subject.kind == Kind::Fake {
            config = internals::emulated(config);
        }
        let path = folder.path().join("broker.sock");
        let cancel = Cancel::new().unwrap();
        let server = Server::bind(&path, config, &cancel).unwrap();
        let server = Some(thread::spawn(move || server.run()));
        Self { _folder: folder, path, cancel, server }
    }

    pub(crate) fn client(&self) -> Client {
        Client::connect(&self.path, &Config::default()).unwrap()
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        self.cancel.cancel(CancelReason::Program);
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
    }
}

/// Memory whose bytes all have the same value.
pub(crate) fn filled(driver: &Driver, size: u64, chunk: Option<u64>, value: u8) -> Shared {
    let device = Device::find(driver, Selector::default()).unwrap();
    let spec = Spec::vmm(size);
    let memory = Shared::create(&device, chunk.map_or(spec, |chunk| spec.chunk(chunk))).unwrap();
    memory.copy_in(0, &vec![value; size as usize]).unwrap();
    memory
}

#[track_caller]
pub(crate) fn refused<T: std::fmt::Debug>(result: vmmfd::Result<T>) -> (RefusalCode, String) {
    match result {
        Err(Error::Broker(refusal)) => (refusal.code, refusal.message),
        other => panic!("{other:?}"),
    }
}

/// The time limit of each wait, generous for a busy machine.
const PATIENCE: Duration = Duration::from_secs(600);

/// Waits until another thread makes the condition true.
#[track_caller]
pub(crate) fn until(done: impl Fn() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < PATIENCE, "it does not happen");
        pause(begun);
    }
}
