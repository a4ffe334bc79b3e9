//! The entry point of a bench process.

use std::{
    io::{self, Write},
    thread,
};

use serde::Serialize;
use serde_json::Value;
use vmmfd::error::{Error, PeerError, Result};

use super::{
    broker, consumer, producer,
    protocol::{ConsumerResponse, Failure, ProducerResponse},
    single,
    task::{Role, Task},
};
use vmmfd_cli::{
    child::line_to_parent,
    line::{Line, typed},
};

/// Runs the task of a child process.
///
/// # Errors
/// Errors that cannot be reported to the parent over the line.
pub fn run_task(task: Value) -> Result<()> {
    let task: Task = typed(task)?;
    match &task.role {
        Role::Producer { folder, consumers } => {
            let line = line_to_parent()?;
            report(&line, producer::serve(&task, folder, *consumers, &line), ProducerResponse::Failed)
        }
        Role::Consumer => {
            let line = line_to_parent()?;
            report(&line, consumer::serve(&task, &line), ConsumerResponse::Failed)
        }
        Role::Sleeper => broker::serve_sleeper(&line_to_parent()?),
        Role::Single => {
            let line = line_to_parent()?;
            report(&line, single::serve(&task, &line), ProducerResponse::Failed)
        }
        Role::BrokerServer { socket, emulated } => {
            let line = line_to_parent()?;
            report(&line, broker::serve(&task, socket, *emulated, &line), ProducerResponse::Failed)
        }
        Role::BrokerClient { driver } => {
            let line = line_to_parent()?;
            report(&line, broker::serve_client(&task, *driver, &line), broker::ClientResponse::Failed)
        }
        // The parent kills this process.
        Role::GroupLeader => loop {
            thread::park();
        },
        Role::BareStart => {
            let (driver, device) = task.open()?;
            device.activate()?;
            // Skip the destructor, like an ordinary program: the kernel frees the driver's resources.
            std::mem::forget(driver);
            let written = writeln!(io::stdout(), "ready").and_then(|()| io::stdout().flush());
            written.map_err(|error| Error::system("write to standard output", error))?;
            std::process::exit(0)
        }
    }
}

/// Reports an error to the parent, unless the parent has exited.
fn report<T: Serialize>(line: &Line, result: Result<()>, record: impl FnOnce(Failure) -> T) -> Result<()> {
    match result {
        Err(error) if !matches!(error, Error::Peer(PeerError::Gone { .. })) => line.send(&record(error.into())),
        result => result,
    }
}
