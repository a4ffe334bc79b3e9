//! Why no CUDA driver can be used.

/// No CUDA driver can be used in this process.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// No driver library could be loaded: there is no NVIDIA driver here, or the container does not see it.
    #[error("no CUDA driver library loads: {tried}")]
    NoLibrary {
        /// Each name that was tried, with the loader's answer.
        tried: String,
    },

    /// The library that was loaded is the toolkit's link-time stub, which has no driver in it.
    #[error("{library} is the CUDA toolkit's stub library, not a driver")]
    Stub {
        /// The name it was loaded by.
        library: String,
    },

    /// The driver library lacks a function: it is older than what this needs.
    #[error("the driver library {library} has no {symbol}: the driver is too old for this")]
    MissingSymbol {
        /// The name it was loaded by.
        library: String,
        /// The function's exported name.
        symbol: &'static str,
    },

    /// The driver works and says that there is no device.
    #[error("the CUDA driver finds no device")]
    NoDevice,
}
