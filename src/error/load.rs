//! Errors of loading the CUDA driver.

/// No CUDA driver can be used in this process.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// No driver library could be loaded: there is no NVIDIA driver, or it is not visible in this container.
    #[error("no CUDA driver library loads: {tried}")]
    NoLibrary {
        /// Each name that was tried, with the loader's error.
        tried: String,
    },

    /// The loaded library is the toolkit's link-time stub, which contains no driver.
    #[error("{library} is the CUDA toolkit's stub library, not a driver")]
    Stub {
        /// The name of the loaded library.
        library: String,
    },

    /// The driver library lacks a function: the driver is too old.
    #[error("the driver library {library} has no {symbol}: the driver is too old for this")]
    MissingSymbol {
        /// The name of the loaded library.
        library: String,
        /// The function's exported name.
        symbol: &'static str,
    },

    /// The driver works but finds no device.
    #[error("the CUDA driver finds no device")]
    NoDevice,
}
