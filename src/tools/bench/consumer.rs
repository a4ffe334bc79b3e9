//! The process that opens the memory that the producer shares.

use std::{
    os::fd::{AsFd, OwnedFd},
    thread,
    time::Instant,
};

use super::{
    protocol::{ConsumerRequest, ConsumerResponse, Method},
    stats::now,
    task::Task,
};
use crate::{
    driver::{Driver, PoolHandle, bare::Opened},
    error::{Error, PeerError, ProtocolError, Result},
    memory::{Device, Region},
    session::{Config, stream::Subscriber},
    tools::line::Line,
};

/// How many buffers it keeps: one that is new in each handoff, and one that it holds.
const KEEP: usize = 2;

struct Consumer<'a> {
    task: &'a Task,
    line: &'a Line,
    driver: Driver,
    device: Device,
    subscriber: Option<Subscriber>,
    /// The memory opened last, until it is closed before the next request.
    opened: Option<Opened>,
    pool: Option<PoolHandle>,
}

/// Answers the requests of the producer, until that ends the connection.
pub(super) fn serve(task: &Task, line: &Line) -> Result<()> {
    let (driver, device) = task.open()?;
    device.activate()?;
    line.send(&ConsumerResponse::Ready)?;
    let mut consumer = Consumer { task, line, driver, device, subscriber: None, opened: None, pool: None };
    loop {
        let request = line.receive()?;
        let response = consumer.answer(&request).unwrap_or_else(|error| ConsumerResponse::Failed(error.into()));
        line.send(&response)?;
    }
}

impl Consumer<'_> {
    fn answer(&mut self, request: &ConsumerRequest) -> Result<ConsumerResponse> {
        if let Some(opened) = self.opened.take() {
            self.driver.verbs().bare()?.close(opened)?;
        }
        match request {
            ConsumerRequest::Connect { socket } => {
                let config = Config::default().with_timeout(self.task.timeout);
                let selector = Some(self.task.selector());
                self.subscriber = Some(Subscriber::connect(&self.driver, selector, socket, KEEP, &config)?);
                Ok(ConsumerResponse::Ready)
            }
            ConsumerRequest::Pool => {
                let fd = self.descriptor()?;
                self.destroy_pool()?;
                self.pool = Some(self.driver.verbs().pools()?.import(fd.as_fd())?);
                Ok(ConsumerResponse::Ready)
            }
            ConsumerRequest::Open { method, size } => {
                self.line.send(&ConsumerResponse::Ready)?;
                Ok(ConsumerResponse::Usable { at: self.open(*method, *size)? })
            }
            // It is closed before each request.
            ConsumerRequest::Close => Ok(ConsumerResponse::Ready),
            ConsumerRequest::Release => {
                let Some(subscriber) = &mut self.subscriber else { return Ok(ConsumerResponse::Ready) };
                self.line.send(&ConsumerResponse::Ready)?;
                let before = subscriber.held();
                let deadline = Instant::now() + self.task.timeout;
                while subscriber.held() == before && subscriber.try_receive()?.is_none() {
                    if Instant::now() > deadline {
                        let purpose = "for the session to withdraw a buffer";
                        return Err(Error::Peer(PeerError::Timeout { purpose, waited: self.task.timeout }));
                    }
                    thread::yield_now();
                }
                Ok(ConsumerResponse::Ready)
            }
        }
    }

    /// Opens memory, reads the clock, and closes the memory, now or before the next request.
    fn open(&mut self, method: Method, size: u64) -> Result<u64> {
        let ordinal = self.device.ordinal();
        match method {
            Method::Floor | Method::ExportEach => {
                let bare = self.driver.verbs().bare()?;
                let fd = self.descriptor()?;
                let (opened, _) = bare.open(ordinal, fd.as_fd(), size)?;
                let at = now();
                // Other consumers may still be opening theirs, which closing would disturb.
                self.opened = Some(opened);
                Ok(at)
            }
            Method::Fresh | Method::Described | Method::Again => {
                let Some(subscriber) = &mut self.subscriber else { return not_prepared() };
                let received = subscriber.receive()?;
                let since = u64::try_from(received.usable_since().elapsed().as_nanos()).unwrap_or(u64::MAX);
                let at = now().saturating_sub(since);
                if received.size() < size {
                    return not_prepared();
                }
                subscriber.give_back(received)?;
                Ok(at)
            }
            Method::Legacy => {
                let legacy = self.driver.verbs().legacy()?;
                let address = legacy.open(ordinal, &self.bytes()?)?;
                let at = now();
                legacy.close(ordinal, address)?;
                Ok(at)
            }
            Method::Pool => {
                let (pools, Some(pool)) = (self.driver.verbs().pools()?, self.pool) else { return not_prepared() };
                let address = pools.import_pointer(pool, ordinal, &self.bytes()?)?;
                let at = now();
                pools.free(ordinal, address)?;
                Ok(at)
            }
            Method::Hop => {
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

    fn destroy_pool(&mut self) -> Result<()> {
        self.pool.take().map_or(Ok(()), |pool| self.driver.verbs().pools()?.destroy(pool))
    }
}

fn not_prepared<T>() -> Result<T> {
    Err(Error::from(ProtocolError::Unexpected { got: "request", want: "one that prepares it" }))
}
