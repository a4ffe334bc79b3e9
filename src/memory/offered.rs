//! Errors of opening offered memory: decides whether the peer or the driver is at fault.

use super::{Description, Device};
use crate::{
    driver::code,
    error::{DeviceError, Error, ErrorCode, MemoryError, PeerError, ProtocolError, Result},
};

/// The steps of opening offered memory. Each is one driver call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Importing the memory, or opening its handle.
    Open,
    /// Mapping the memory.
    Map,
    /// Giving the device access to the memory.
    Allow,
}

/// A failure to open offered memory. `step` is `None` if another call failed.
#[derive(Debug)]
pub(super) struct OpenError {
    step: Option<Step>,
    error: Error,
}

impl From<Error> for OpenError {
    fn from(error: Error) -> Self {
        Self { step: None, error }
    }
}

impl From<OpenError> for Error {
    fn from(failed: OpenError) -> Self {
        failed.error
    }
}

impl OpenError {
    /// Adds the step to a driver call's error.
    pub(super) fn at(step: Step) -> impl FnOnce(Error) -> Self {
        move |error| Self { step: Some(step), error }
    }

    /// Converts the failure to an error that names the side at fault. If the driver refused memory that differs from the peer's claims,
    /// the error is the peer's. If the device can't reach the memory, the error names the device and the owner.
    pub(super) fn explain(self, device: &Device, description: &Description) -> Error {
        let Self { step, error } = self;
        let code = match &error {
            Error::Memory(MemoryError::Unaligned { size, granularity }) => {
                let claim = format!("an offered segment has {size} bytes, which is not a multiple of {granularity}");
                return ProtocolError::Content(claim).into();
            }
            // The host backend has inspected the memory and gives the reason.
            Error::Driver { code: code::INVALID_VALUE | code::UNKNOWN, source: Some(reason), .. }
                if step == Some(Step::Open) && device.is_host() =>
            {
                return ProtocolError::Content(reason.to_string()).into();
            }
            Error::Driver { code, .. } => *code,
            _ => return error,
        };
        let peer_at_fault = match code {
            code::INVALID_VALUE => step.is_some(),
            code::NOT_SUPPORTED => matches!(step, Some(Step::Open | Step::Map)),
            code::UNKNOWN | code::INVALID_HANDLE => step == Some(Step::Open),
            _ => false,
        };
        let is_owner = device.uuid() == description.device.uuid;
        let out_of_reach = [code::INVALID_DEVICE, code::PEER_ACCESS_UNSUPPORTED].contains(&code);
        if !is_owner && (out_of_reach || (step == Some(Step::Allow) && code == code::INVALID_VALUE)) {
            let device = device.to_string();
            let owner = description.device.to_string();
            return Error::Device(DeviceError::NoPeerAccess { device, owner, source: Some(Box::new(error)) });
        }
        if !peer_at_fault {
            return error;
        }
        let message = format!("the memory from the producer is not the memory that it offered: {}", error.in_full());
        Error::Peer(PeerError::Mismatch { code: ErrorCode::Failed, message })
    }
}

/// Fails because an offer contradicts itself.
pub(super) fn contradiction<T>(message: String) -> Result<T> {
    Err(ProtocolError::Content(message).into())
}
