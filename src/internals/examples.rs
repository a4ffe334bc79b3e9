//! Hidden parts of the examples in the documentation.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU64, Ordering},
    thread::{self, JoinHandle},
};

use crate::{
    broker::{Client, Server, ServerConfig, ServerReport},
    channel::{Cancel, CancelReason},
    driver::{Backend, Choice, Driver, open},
    error::{Error, Result},
    memory::{Device, Selector, Shared, Spec},
    session::Config,
};

/// A new folder, which is removed with its files when the value is dropped.
#[derive(Debug)]
pub struct ExampleFolder(PathBuf);

impl ExampleFolder {
    /// # Errors
    /// [`Error::System`].
    pub fn new() -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!("vmmfd-example-{}-{}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = env::temp_dir().join(name);
        fs::create_dir(&path).map_err(|error| Error::system("create a folder", error))?;
        Ok(Self(path))
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for ExampleFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A broker on the host backend, which stops when the value is dropped, with a client and memory to put.
#[derive(Debug)]
pub struct ExampleBroker {
    /// A client of the broker.
    pub client: Client,
    /// The driver of the memory.
    pub driver: Driver,
    /// 1 MiB of zeros.
    pub memory: Shared,
    /// The broker's socket.
    pub path: PathBuf,
    cancel: Cancel,
    serving: Option<JoinHandle<Result<ServerReport>>>,
    _folder: ExampleFolder,
}

impl ExampleBroker {
    /// # Errors
    /// Any error of the library.
    pub fn start() -> Result<Self> {
        let folder = ExampleFolder::new()?;
        let path = folder.path().join("broker.sock");
        let cancel = Cancel::new()?;
        let server = Server::bind(&path, ServerConfig::default(), &cancel)?;
        let serving = Some(thread::spawn(move || server.run()));
        let driver = open(Choice::Only(Backend::Host))?.driver;
        let device = Device::find(&driver, Selector::default())?;
        let memory = Shared::create(&device, Spec::vmm(1 << 20))?;
        let client = Client::connect(&path, &Config::default())?;
        Ok(Self { client, driver, memory, path, cancel, serving, _folder: folder })
    }
}

impl Drop for ExampleBroker {
    fn drop(&mut self) {
        self.cancel.cancel(CancelReason::Program);
        let _ = self.serving.take().map(JoinHandle::join);
    }
}
