//! Code that the bindings for C and Python share. Not a public API: it may change at any time.

use std::sync::Mutex;

pub use nix::sys::eventfd::EventFd;

pub use crate::{
    array::walk::Walk,
    driver::ties::TieCounts,
    sys::{dlpack, eventfd, interruptible, lock, thread::spawn, try_lock},
};
use crate::{
    array::{ArrayDescriptor, ElementType, Order},
    driver::{Access, Choice, Driver, open},
    error::{Error, ErrorCode, PeerError, Result, SocketError},
    fork::PerProcess,
    memory::Region,
    session::{
        Verdict,
        handoff::{Consumer, ImportedObject, Request},
    },
};

/// The open drivers of this process. They are never closed: a driver takes tens of milliseconds to start. A fork opens its own, or fails.
static OPEN: PerProcess<Mutex<Vec<OpenDriver>>> = PerProcess::new(Mutex::default);

/// The choice, its driver, and the reason for a fallback to the host.
type OpenDriver = (Choice, Driver, Option<String>);

/// Returns the driver of a choice, and the reason for a fallback to the host. The first call opens it.
///
/// # Errors
/// As [`open`].
pub fn driver(choice: Choice) -> Result<(Driver, Option<String>)> {
    let mut opened = lock(OPEN.get());
    if let Some((_, driver, fallback)) = opened.iter().find(|(known, ..)| *known == choice) {
        return Ok((driver.clone(), fallback.clone()));
    }
    let new = open(choice)?;
    let fallback = new.fallback.map(|error| error.in_full());
    opened.push((choice, new.driver.clone(), fallback.clone()));
    Ok((new.driver, fallback))
}

/// Takes the producer's object without a check of its data, and ends the session. Memory without a type is described as bytes.
///
/// # Errors
/// The errors of [`Consumer::request`] and [`Consumer::report`]; [`PeerError::Mismatch`] if the producer found wrong data.
pub fn take(mut consumer: Consumer<'_>, access: Access) -> Result<(ImportedObject, ArrayDescriptor)> {
    let object = consumer.request(&Request::default().access(access))?;
    if !consumer.report(&object, &Verdict::unchecked(true))?.verified {
        let message = "the producer reports that its data is wrong".to_owned();
        return Err(Error::Peer(PeerError::Mismatch { code: ErrorCode::Failed, message }));
    }
    consumer.close();
    let array = match object.array() {
        Some(array) => array.clone(),
        None => ArrayDescriptor::new(ElementType::U8, [object.size()], Order::C)?,
    };
    Ok((object, array))
}

/// The error of another connection to a broker that this process has met: a missing broker is gone.
pub fn of_known_broker(error: Error) -> Error {
    match error {
        Error::Socket(SocketError::NoBroker { path, waited, .. }) => {
            Error::Peer(PeerError::BrokerGone { path, waited })
        }
        other => other,
    }
}
