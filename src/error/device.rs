//! What is wrong with a device.

use super::Error;

/// A device is not there, or can not do what is asked of it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// No device has the ordinal or UUID that was asked for.
    #[error("there is no {backend} device {wanted}: {available}")]
    NotFound {
        /// The backend that was searched.
        backend: &'static str,
        /// What was asked for.
        wanted: String,
        /// What there is instead.
        available: String,
    },

    /// Several devices have a UUID that begins with the digits that were given.
    #[error("{wanted} could be any of these: {fitting}")]
    Ambiguous {
        /// The beginning of the UUID.
        wanted: String,
        /// The devices that it fits.
        fitting: String,
    },

    /// A device can't reach memory of another.
    #[error("{device} can't reach the memory of {owner}")]
    NoPeerAccess {
        /// The device that was to use it.
        device: String,
        /// The device that owns it.
        owner: String,
        /// What the driver said, if it was asked to try.
        source: Option<Box<Error>>,
    },

    /// The device lacks something that sharing needs.
    #[error("{device} does not support {feature}")]
    Unsupported {
        /// The device's name.
        device: String,
        /// What it lacks.
        feature: &'static str,
    },
}
