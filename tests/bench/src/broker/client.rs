//! A process that puts and gets objects when it is asked to, and exports memory.

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
    producer::not_prepared,
    protocol::Failure,
    stats::{now, us},
    task::Task,
};
use vmmfd_cli::line::Line;
use vmmfd_cli::verbs::HasVerbs;

/// The bytes of a memfd that is put as it is: a broker keeps no smaller ones.
const PAGE: u64 = GRANULARITY;

/// How many of the longest gets are reported.
const LONGEST: usize = 100;

/// From the measuring process.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ClientRequest {
    /// Open so many connections to the broker at this socket, in place of those before.
    Connect { socket: PathBuf, connections: usize },
    /// Make memory, put it under this name, and free it here.
    Put { name: String, size: u64 },
    /// Make a memfd, and put it under so many names, whose versions it replaces.
    PutPages { objects: usize },
    /// Make a memfd, and put it under this name.
    PutPage { name: String },
    /// List all objects so many times.
    List { times: usize },
    /// Delete so many of the pages.
    DeletePages { objects: usize },
    /// Get an object again and again until it is deleted, and end each lease at once.
    GetUntilDeleted { name: String },
    /// Delete an object.
    Delete { name: String },
    /// Get an object so many times, from that moment on (`CLOCK_MONOTONIC`, in nanoseconds), and end each lease at once.
    Get { name: String, count: usize, map: bool, at: u64 },
    /// Create memory of so many bytes, export it, close the descriptor and release the memory.
    Export { size: u64 },
}

/// The response to a [`ClientRequest`].
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ClientResponse {
    Ready,
    /// When the gets began and ended, and how long each was.
    Gets {
        begun: u64,
        ended: u64,
        us: Vec<f64>,
    },
    /// The export, and all four.
    Exported {
        export_us: f64,
        all_us: f64,
    },
    Failed(Failure),
}

struct BrokerClient<'a> {
    task: &'a Task,
    /// What it was started with, if it was.
    driver: Option<(Driver, Device)>,
    clients: Vec<Client>,
}

/// Answers the requests of the measuring process, until that ends the connection.
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

    /// Puts a memfd, as the host backend demands it, with nothing of a driver.
    fn put_page(&self, memfd: BorrowedFd<'_>, name: String) -> Result<()> {
        let (device, size) = (self.driver()?.1.identity(), PAGE);
        let sharing = Sharing::Vmm { placement: Placement::Device, segments: 1 };
        let description = describe(device, sharing, size, size);
        let backend = self.driver()?.0.backend();
        let part = PutPart::of_segments("all", backend, description, [(size, memfd)])?;
        self.client()?.put(&Put::new(name).condition(Condition::Any).part(part)).map(drop)
    }

    /// Reports the longest gets alone: there may be very many.
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
        // In steps that a record of all has room for.
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

/// A memfd that a broker takes for memory of the host backend.
fn page() -> nix::Result<OwnedFd> {
    let memfd = memfd_create(c"vmmfd-bench", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
    fallocate(memfd.as_fd(), FallocateFlags::empty(), 0, PAGE.cast_signed())?;
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    fcntl(&memfd, FcntlArg::F_ADD_SEALS(seals))?;
    Ok(memfd)
}
