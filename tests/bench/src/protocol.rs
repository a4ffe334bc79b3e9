//! The records between the processes of a bench.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use vmmfd::{
    driver::Backend,
    error::{DeviceError, Error, LoadError, ProtocolError},
    internals::{Closing, Opening},
    memory::Device,
};

use vmmfd_cli::{
    check::pattern::Engine,
    error::{ToolError, hint},
};

/// A measured method of handing over memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Method {
    /// Driver calls and a socket. The memory is exported once, and the same descriptor is sent each time.
    Floor,
    /// Like `Floor`, with an export for each handoff.
    ExportEach,
    /// A session of this library. The consumer does not hold the buffer, but already has its description.
    Fresh,
    /// Like `Fresh`, with the description sent each time.
    Described,
    /// A session of this library. The consumer holds the buffer.
    Again,
    /// A legacy handle, opened each time.
    Legacy,
    /// A pointer of a pool that is already imported.
    Pool,
    /// A record of one byte.
    Hop,
    /// Like `Floor`, by a process that has slept since its last handoff. The time includes the request.
    Sleeper,
    /// A lease of an object of the broker, until its memory is usable.
    Get,
    /// Like `Get`, by the C library.
    GetThroughC,
    /// Like `Get`, for an object with one array.
    GetOneArray,
    /// Like `Get`, for an object with very many arrays.
    GetManyArrays,
    /// A record with a description and the descriptor, until it is sent.
    Send,
    /// Like `Send`, with the descriptors of several segments.
    SendSegments,
    /// A new object of the broker, until it is published.
    Put,
    /// Like `Put`, with memory of several segments.
    PutSegments,
    /// A switch to other memory at the same addresses, by the driver's calls.
    SwitchBare,
    /// Like `SwitchBare`, by an object of the broker.
    Switch,
}

/// A request from the measuring process to the producer or to the single process.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ProducerRequest {
    /// Prepare buffers of `size` bytes for these methods, in segments of `segment` bytes if it is set.
    Prepare { size: u64, segment: Option<u64>, methods: Vec<Method> },
    /// Report whether the driver is the emulated driver of the tests.
    IsEmulated,
    /// Connect to the broker at this socket.
    Connect { socket: PathBuf },
    /// Hand over once, to all consumers concurrently.
    Measure { method: Method },
    /// Free the prepared buffers.
    Clear,
    /// Fill and verify once with this engine, after `Prepare`.
    Pattern { engine: Engine },
    /// Make each driver call once.
    Stages { size: u64 },
    /// Load the kernels.
    Load,
}

/// The response to a [`ProducerRequest`].
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ProducerResponse {
    /// The driver has started.
    Started {
        name: String,
        uuid: String,
        version: i32,
        granularity: u64,
        free: u64,
    },
    Done,
    IsEmulated(bool),
    /// The time from before the export, or the send, until the memory is usable in the other process.
    Time {
        us: f64,
    },
    /// The times of filling and verifying: of the kernels, measured by device events, and of the whole calls.
    Pattern {
        fill_us: f64,
        verify_us: f64,
        fill_whole_us: f64,
        verify_whole_us: f64,
        mismatches: u64,
    },
    Stages {
        create_us: f64,
        export_us: f64,
        opening: Opening,
        closing: Closing,
    },
    Failed(Failure),
}

impl ProducerResponse {
    /// Describes a device whose driver has started.
    pub(super) fn started(device: &Device) -> Result<Self, Error> {
        Ok(Self::Started {
            name: device.name().to_owned(),
            uuid: device.prefixed_uuid(),
            version: device.driver().version()?,
            granularity: device.granularity()?,
            free: device.memory_info()?.free,
        })
    }

    /// Converts a result to a response.
    pub(super) fn of(result: Result<Self, Error>) -> Self {
        result.unwrap_or_else(|error| Self::Failed(error.into()))
    }
}

/// An error reported to another process. Errors that the other process distinguishes have variants, others only a message.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Failure {
    NoDriver {
        tried: String,
    },
    NoDevice,
    NoSuchDevice {
        backend: Backend,
        wanted: String,
        available: String,
    },
    /// An error of a process that the reporting process started.
    Child {
        process: String,
        message: String,
        hint: Option<String>,
    },
    Other {
        message: String,
        hint: Option<String>,
    },
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error {
            Error::Load(LoadError::NoLibrary { tried }) => Self::NoDriver { tried },
            Error::Load(LoadError::NoDevice) => Self::NoDevice,
            Error::Device(DeviceError::NotFound { backend, wanted, available }) => {
                let host = backend == Backend::Host.as_str();
                Self::NoSuchDevice { backend: if host { Backend::Host } else { Backend::Cuda }, wanted, available }
            }
            error => match ToolError::of(&error) {
                Some(ToolError::Child { process, message, hint }) => {
                    Self::Child { process: process.clone(), message: message.clone(), hint: hint.clone() }
                }
                _ => Self::Other { message: error.in_full(), hint: hint(&error).map(str::to_owned) },
            },
        }
    }
}

impl Failure {
    /// Converts the failure to an error of the reporting process.
    pub(super) fn of(self, process: &str) -> Error {
        match self {
            Self::NoDriver { tried } => Error::Load(LoadError::NoLibrary { tried }),
            Self::NoDevice => Error::Load(LoadError::NoDevice),
            Self::NoSuchDevice { backend, wanted, available } => {
                Error::Device(DeviceError::NotFound { backend: backend.as_str(), wanted, available })
            }
            Self::Child { process, message, hint } => Error::from(ToolError::Child { process, message, hint }),
            Self::Other { message, hint } => Error::from(ToolError::Child {
                process: process.to_owned(),
                message: format!("failed: {message}"),
                hint,
            }),
        }
    }
}

/// A request from the producer to a consumer.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ConsumerRequest {
    /// Connect to the session at this socket.
    Connect { socket: PathBuf },
    /// Import the pool. Its descriptor is in the next bare record.
    Pool,
    /// Open the memory of the next handoff, of `size` bytes in `segments` segments.
    Open { method: Method, size: u64, segments: usize },
    /// Start a sleeper that keeps the descriptors of the next bare record.
    Sleeper,
    /// Wake the sleeper and open its memory of `size` bytes.
    Wake { size: u64 },
    /// Connect to the broker at this socket.
    Broker { socket: PathBuf },
    /// Get an object of the broker, and an array of the object if `array` is set.
    Get { name: String, array: Option<String> },
    /// Get an object of the broker by the C library.
    GetThroughC { name: String },
    /// Switch to the other of two objects at the same addresses.
    Switch { method: Method },
    /// Receive a record and close its descriptors.
    Take,
    /// Let the session withdraw a buffer.
    Release,
    /// Close all opened memory.
    Close,
}

/// The response to a [`ConsumerRequest`].
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ConsumerResponse {
    Ready,
    /// The time when the memory became usable (`CLOCK_MONOTONIC`, in nanoseconds).
    Usable {
        at: u64,
    },
    /// The time from the request until the memory was usable.
    Got {
        us: f64,
    },
    Failed(Failure),
}

/// The error of a request whose preparation is missing.
pub(super) fn not_prepared() -> Error {
    ProtocolError::Unexpected { got: "request", want: "one that prepares it" }.into()
}
