//! A process that puts, gets and exports memory on request.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use nix::{
    fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl},
    sys::memfd::{MFdFlags, memfd_create},
};
use serde::{Deserialize, Serialize};
use vmmfd::{
    broker::{Client, Condition, Get, Put, PutPart},
    driver::{Driver, GRANULARITY},
    error::{Error, RefusalCode, Result},
    internals::describe,
    memory::{Device, Placement, Shared, Sharing, Spec},
    session::Config,
};

use crate::{
    protocol::{Failure, not_prepared},
    stats::{now, us},
    task::Task,
};
use vmmfd_cli::line::Line;
use vmmfd_cli::verbs::HasVerbs;

/// The size of a memfd that is put directly. The broker accepts no smaller memory.
const PAGE: u64 = GRANULARITY;

const LONGEST: usize = 100;

/// A request from the measuring process.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ClientRequest {
    /// Replace all connections with this many connections to the broker at this socket.
    Connect { socket: PathBuf, connections: usize },
    /// Create memory, put it under this name, and free the local memory.
    Put { name: String, size: u64 },
    /// Create a memfd, and put it under this many names. Existing versions are replaced.
    PutPages { objects: usize },
    /// Create a memfd, and put it under this name.
    PutPage { name: String },
    /// List all objects this many times.
    List { times: usize },
    /// Delete this many of the pages.
    DeletePages { objects: usize },
    /// Get an object repeatedly until it is deleted. Each lease is released at once.
    GetUntilDeleted { name: String },
    /// Delete an object.
    Delete { name: String },
    /// Get an object `count` times, starting at `at` (`CLOCK_MONOTONIC`, in nanoseconds). Each lease is released at once.
    Get { name: String, count: usize, map: bool, at: u64 },
    /// Create memory of this size, export it, close the descriptor and release the memory.
    Export { size: u64 },
}

/// The response to a [`ClientRequest`].
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ClientResponse {
    Ready,
    /// The times of the first and last get, and the duration of each get.
    Gets {
        begun: u64,
        ended: u64,
        us: Vec<f64>,
    },
    /// The durations of the export, and of all four calls.
    Exported {
        export_us: f64,
        all_us: f64,
    },
    Failed(Failure),
}

struct BrokerClient<'a> {
    task: &'a Task,
    /// The driver and the device, if the process uses a driver.
    driver: Option<(Driver, Device)>,
    clients: Vec<Client>,
}

/// Answers the requests of the measuring process until it disconnects.
pub(crate) fn serve_client(task: &Task, driver: bool, line: &Line) -> Result<()> {
    let driver = driver.then(|| task.open()).transpose()?;
    if let Some((_, device)) = &driver {
        device.activate()?;
    }
    line.send(&ClientResponse::Ready)?;
    let mut client = BrokerClient { task, driver, clients: Vec::new() };
    loop {
        let response = match client.answer(line.receive()?) {
            Ok(response) => response,
            Err(error) => ClientResponse::Failed(error.into()),
        };
        line.send(&response)?;
    }
}

impl BrokerClient<'_> {
    fn answer(&mut self, request: ClientRequest) -> Result<ClientResponse> {
        match request {
            ClientRequest::Connect { socket, connections } => self.connect(&socket, connections)?,
            ClientRequest::Put { name, size } => {
                let memory = Shared::create(&self.driver()?.1, Spec::vmm(size))?;
                self.client()?.put(&Put::new(name).part(PutPart::of("all", &memory)?))?;
            }
            ClientRequest::PutPages { objects } => {
                let memfd = page().map_err(|errno| Error::system("make a memfd", errno))?;
                (0..objects).try_for_each(|number| self.put_page(memfd.as_fd(), page_name(number)))?;
            }
            ClientRequest::PutPage { name } => {
                let memfd = page().map_err(|errno| Error::system("make a memfd", errno))?;
                self.put_page(memfd.as_fd(), name)?;
            }
            ClientRequest::List { times } => {
                (0..times).try_for_each(|_| self.client()?.list("").map(drop))?;
            }
            ClientRequest::DeletePages { objects } => {
                (0..objects).try_for_each(|number| self.client()?.delete(&page_name(number)))?;
            }
            ClientRequest::GetUntilDeleted { name } => return self.get_until_deleted(&name),
            ClientRequest::Delete { name } => self.client()?.delete(&name)?,
            ClientRequest::Get { name, count, map, at } => return self.get(&name, count, map, at),
            ClientRequest::Export { size } => return self.export(size),
        }
        Ok(ClientResponse::Ready)
    }

    fn connect(&mut self, socket: &Path, connections: usize) -> Result<()> {
        self.clients.clear();
        let config = Config::default().timeout(self.task.timeout);
        let connected = (0..connections).map(|_| Client::connect(socket, &config));
        self.clients = connected.collect::<Result<_>>()?;
        Ok(())
    }

    /// Puts a memfd in the format of the host backend, without driver calls.
    fn put_page(&self, memfd: BorrowedFd<'_>, name: String) -> Result<()> {
        let (device, size) = (self.driver()?.1.identity(), PAGE);
        let sharing = Sharing::Vmm { placement: Placement::Device, segments: 1 };
        let description = describe(device, sharing, size, size);
        let backend = self.driver()?.0.backend();
        let part = PutPart::of_segments("all", backend, description, [(size, memfd)])?;
        self.client()?.put(&Put::new(name).condition(Condition::Any).part(part)).map(drop)
    }

    /// Reports only the longest gets: a run can have very many.
    fn get_until_deleted(&self, name: &str) -> Result<ClientResponse> {
        let (client, get) = (self.client()?, Get::new(name));
        let (begun, mut longest) = (now(), Vec::new());
        loop {
            let since = Instant::now();
            match client.get(&get) {
                Ok(_) => longest.push(us(since.elapsed())),
                Err(Error::Broker(refusal)) if refusal.code == RefusalCode::Absent => break,
                Err(error) => return Err(error),
            }
            if longest.len() >= 2 * LONGEST {
                longest.sort_by(|some: &f64, other| other.total_cmp(some));
                longest.truncate(LONGEST);
            }
        }
        Ok(ClientResponse::Gets { begun, ended: now(), us: longest })
    }

    fn get(&self, name: &str, count: usize, map: bool, at: u64) -> Result<ClientResponse> {
        let (client, get) = (self.client()?, Get::new(name));
        let driver = if map { Some(&self.driver()?.0) } else { None };
        let mut all = Vec::with_capacity(count);
        thread::sleep(Duration::from_nanos(at.saturating_sub(now())));
        let begun = now();
        for _ in 0..count {
            let since = Instant::now();
            let lease = client.get(&get)?;
            match driver {
                Some(driver) => {
                    let object = lease.open(driver, None)?;
                    all.push(since.elapsed());
                    drop(object);
                }
                None => all.push(since.elapsed()),
            }
        }
        let ended = now();
        // Rounded, so that all durations fit into a record.
        let us = all.into_iter().map(|time| (us(time) * 10.0).round() / 10.0).collect();
        Ok(ClientResponse::Gets { begun, ended, us })
    }

    fn export(&self, size: u64) -> Result<ClientResponse> {
        let (driver, device) = self.driver()?;
        let bare = driver.verbs().bare()?;
        let begun = Instant::now();
        let created = bare.create(device.ordinal(), size)?;
        let exporting = Instant::now();
        let fd = bare.export(&created)?;
        let export_us = us(exporting.elapsed());
        drop(fd);
        bare.release(created)?;
        Ok(ClientResponse::Exported { export_us, all_us: us(begun.elapsed()) })
    }

    fn driver(&self) -> Result<&(Driver, Device)> {
        self.driver.as_ref().ok_or_else(not_prepared)
    }

    fn client(&self) -> Result<&Client> {
        self.clients.first().ok_or_else(not_prepared)
    }
}

fn page_name(number: usize) -> String {
    format!("bench/page-{number}")
}

/// Creates a memfd that a broker accepts as memory of the host backend.
fn page() -> nix::Result<OwnedFd> {
    let memfd = memfd_create(c"vmmfd-bench", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
    fallocate(memfd.as_fd(), FallocateFlags::empty(), 0, PAGE.cast_signed())?;
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    fcntl(&memfd, FcntlArg::F_ADD_SEALS(seals))?;
    Ok(memfd)
}
