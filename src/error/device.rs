//! Errors about devices.

use super::Error;

/// A device was not found, or does not support an operation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// No device has the requested ordinal or UUID.
    #[error("there is no {backend} device {wanted}: {available}")]
    NotFound {
        /// The backend that was searched.
        backend: &'static str,
        /// The requested ordinal or UUID.
        wanted: String,
        /// The devices of this process.
        available: String,
    },

    /// Several devices match the first digits of a UUID.
    #[error("the device {wanted} is ambiguous, it matches: {fitting}")]
    Ambiguous {
        /// The first digits of the UUID.
        wanted: String,
        /// The matching devices.
        fitting: String,
    },

    /// A device has no peer access to another device's memory.
    #[error("{device} can't reach the memory of {owner}")]
    NoPeerAccess {
        /// The device that would use the memory.
        device: String,
        /// The device that owns the memory.
        owner: String,
        /// The driver's error, if the driver was asked to map it.
        source: Option<Box<Error>>,
    },

    /// The device lacks a feature.
    #[error("{device} does not support {feature}")]
    Unsupported {
        /// The device's name.
        device: String,
        /// The missing feature.
        feature: &'static str,
    },

    /// The device's streams can't wait for another process's streams.
    #[error("no order of GPU work with other processes: {reason}")]
    Unordered {
        /// The reason.
        reason: String,
    },
}
