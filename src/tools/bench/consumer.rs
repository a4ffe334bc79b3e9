//! The process that takes what it is lent.

use std::{
    os::fd::{AsFd, OwnedFd},
    thread,
    time::Instant,
};

use super::{
    orders::{Call, Reply, Way},
    stats::now,
    task::Task,
};
use crate::{
    driver::{Driver, PoolHandle, bare::Opened},
    error::{Error, ProtocolError, Result},
    memory::{Device, Region},
    session::{Config, stream::Subscriber},
    tools::line::Line,
};

/// How many buffers it keeps: one that is handed over anew each time, and one that it holds.
const KEEP: usize = 2;

struct Consumer<'a> {
    task: &'a Task,
    line: &'a Line,
    driver: Driver,
    device: Device,
    subscriber: Option<Subscriber>,
    /// What was opened last, until there is time to close it.
    opened: Option<Opened>,
    pool: Option<PoolHandle>,
}

/// Does what it is told until whoever tells it has gone.
pub(super) fn serve(task: &Task, line: &Line) -> Result<()> {
    let (driver, device) = task.open()?;
    device.activate()?;
    line.send(&Reply::Ready)?;
    let mut consumer = Consumer { task, line, driver, device, subscriber: None, opened: None, pool: None };
    loop {
        let call = line.receive()?;
        let reply = consumer.answer(&call).unwrap_or_else(|error| Reply::Failed(error.into()));
        line.send(&reply)?;
    }
}

impl Consumer<'_> {
    fn answer(&mut self, call: &Call) -> Result<Reply> {
        if let Some(opened) = self.opened.take() {
            self.driver.verbs().bare()?.close(opened)?;
        }
        match call {
            Call::Connect { socket } => {
                let config = Config::default().with_timeout(self.task.timeout);
                let selector = Some(self.task.selector());
                self.subscriber = Some(Subscriber::connect(&self.driver, selector, socket, KEEP, &config)?);
                Ok(Reply::Ready)
            }
            Call::Pool => {
                let fd = self.descriptor()?;
                self.forget_pool()?;
                self.pool = Some(self.driver.verbs().pools()?.import(fd.as_fd())?);
                Ok(Reply::Ready)
            }
            Call::Take { way, size } => {
                self.line.send(&Reply::Ready)?;
                Ok(Reply::Usable { at: self.take(*way, *size)? })
            }
            // As before any other.
            Call::Close => Ok(Reply::Ready),
            Call::LetGo => {
                let Some(subscriber) = &mut self.subscriber else { return Ok(Reply::Ready) };
                self.line.send(&Reply::Ready)?;
                let before = subscriber.held();
                let deadline = Instant::now() + self.task.timeout;
                while subscriber.held() == before && subscriber.try_receive()?.is_none() {
                    if Instant::now() > deadline {
                        let purpose = "for the session to take a buffer back";
                        return Err(Error::Timeout { purpose, waited: self.task.timeout });
                    }
                    thread::yield_now();
                }
                Ok(Reply::Ready)
            }
        }
    }

    /// Takes memory, looks at the clock, and lets go of it again.
    fn take(&mut self, way: Way, size: u64) -> Result<u64> {
        let ordinal = self.device.ordinal();
        match way {
            Way::Floor | Way::ExportEach => {
                let bare = self.driver.verbs().bare()?;
                let fd = self.descriptor()?;
                let (opened, _) = bare.open(ordinal, fd.as_fd(), size)?;
                let at = now();
                // Others may still be opening, and closing would be in their way.
                self.opened = Some(opened);
                Ok(at)
            }
            Way::Fresh | Way::Described | Way::Again => {
                let Some(subscriber) = &mut self.subscriber else { return out_of_turn() };
                let received = subscriber.receive()?;
                let since = u64::try_from(received.usable_since().elapsed().as_nanos()).unwrap_or(u64::MAX);
                let at = now().saturating_sub(since);
                if received.size() < size {
                    return out_of_turn();
                }
                subscriber.give_back(received)?;
                Ok(at)
            }
            Way::Legacy => {
                let legacy = self.driver.verbs().legacy()?;
                let address = legacy.open(ordinal, &self.bytes()?)?;
                let at = now();
                legacy.close(ordinal, address)?;
                Ok(at)
            }
            Way::Pool => {
                let (pools, Some(pool)) = (self.driver.verbs().pools()?, self.pool) else { return out_of_turn() };
                let address = pools.import_pointer(pool, ordinal, &self.bytes()?)?;
                let at = now();
                pools.free(ordinal, address)?;
                Ok(at)
            }
            Way::Hop => {
                self.line.receive_bare(&mut [0; 2])?;
                Ok(now())
            }
        }
    }

    fn descriptor(&self) -> Result<OwnedFd> {
        let fd = self.line.receive_bare(&mut [0; 2])?.fds.pop();
        fd.ok_or(ProtocolError::FdCount { kind: "record", want: 1, claimed: 1, got: 0 }.into())
    }

    fn bytes(&self) -> Result<[u8; 64]> {
        let mut bytes = [0; 65];
        let got = self.line.receive_bare(&mut bytes)?.length;
        let handle = bytes.first_chunk().filter(|_| got == 64);
        handle.copied().ok_or(ProtocolError::ShortRecord { got, header: 64 }.into())
    }

    fn forget_pool(&mut self) -> Result<()> {
        self.pool.take().map_or(Ok(()), |pool| self.driver.verbs().pools()?.destroy(pool))
    }
}

fn out_of_turn<T>() -> Result<T> {
    Err(Error::from(ProtocolError::Unexpected { got: "order", want: "what makes ready for it" }))
}
