//! Whose fault it is that offered memory can't be opened: the peer's that offered it, or the driver's.

use super::{Description, Device};
use crate::{
    driver::code,
    error::{DeviceError, Error, ErrorCode, MemoryError, PeerError, ProtocolError, Result},
};

/// The steps of opening offered memory, each of them one driver call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Importing it, or opening its handle.
    Open,
    /// Mapping it.
    Map,
    /// Giving the device access to it.
    Allow,
}

/// A failure to open offered memory. It has no step if another call failed.
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
    /// Adds the step to the error of its driver call.
    pub(super) fn at(step: Step) -> impl FnOnce(Error) -> Self {
        move |error| Self { step: Some(step), error }
    }

    /// Where the driver refuses memory because it is not what the peer claims, the error is the peer's, not the driver's. Where the
    /// device can't reach the memory, the error names both.
    pub(super) fn explain(self, device: &Device, description: &Description) -> Error {
        let Self { step, error } = self;
        let code = match &error {
            Error::Memory(MemoryError::Unaligned { size, granularity }) => {
                let claim = format!("{size} bytes are offered as mapped, where memory comes in units of {granularity}");
                return ProtocolError::Content(claim).into();
            }
            // The host backend has inspected the memory itself, and reports what is wrong with it.
            Error::Driver { code: code::INVALID_VALUE | code::UNKNOWN, source: Some(reason), .. }
                if step == Some(Step::Open) && device.is_host() =>
            {
                return ProtocolError::Content(reason.to_string()).into();
            }
            Error::Driver { code, .. } => *code,
            _ => return error,
        };
        let of_the_peer = match code {
            code::INVALID_VALUE => step.is_some(),
            code::NOT_SUPPORTED => matches!(step, Some(Step::Open | Step::Map)),
            code::UNKNOWN | code::INVALID_HANDLE => step == Some(Step::Open),
            _ => false,
        };
        let reaches = device.uuid() == description.device.uuid;
        let out_of_reach = [code::INVALID_DEVICE, code::PEER_ACCESS_UNSUPPORTED].contains(&code);
        if !reaches && (out_of_reach || (step == Some(Step::Allow) && code == code::INVALID_VALUE)) {
            let (device, owner) = (device.to_string(), description.device.to_string());
            return Error::Device(DeviceError::NoPeerAccess { device, owner, source: Some(Box::new(error)) });
        }
        if !of_the_peer {
            return error;
        }
        let message = format!("what the producer sent is not the memory that it offered: {}", error.in_full());
        Error::Peer(PeerError::Mismatch { code: ErrorCode::Failed, message })
    }
}

/// The error of an offer that contradicts itself.
pub(super) fn nonsense<T>(message: String) -> Result<T> {
    Err(ProtocolError::Content(message).into())
}
