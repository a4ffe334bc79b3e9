//! The records that the processes of a bench send each other.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use vmmfd::{
    driver::Backend,
    error::{DeviceError, Error, LoadError},
    internals::{Closing, Opening},
    memory::Device,
};

use vmmfd_cli::{
    check::pattern::Engine,
    error::{ToolError, hint},
};

/// A method of handing over memory that is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Method {
    /// Driver calls and a socket: exported once, and the descriptor sent again.
    Floor,
    /// The same, exported for each handoff.
    ExportEach,
    /// A session of this library: a buffer that the consumer does not hold, and that was described to it before.
    Fresh,
    /// The same, with the description sent each time.
    Described,
    /// A session of this library: a buffer that the consumer holds.
    Again,
    /// A legacy handle, opened each time.
    Legacy,
    /// A pointer of a pool that was imported before.
    Pool,
    /// A record of one byte.
    Hop,
    /// The driver calls and the socket of the floor, by a process that slept since its last handoff, from the request on.
    Sleeper,
    /// A lease of an object of the broker, until the memory is usable.
    Get,
    /// The same, of an object that has one array.
    GetOneArray,
    /// The same, of an object that has very many.
    GetManyArrays,
    /// One record with a description and the descriptor, until it is sent.
    Send,
    /// The same, with the descriptors of several segments.
    SendSegments,
    /// A new object of the broker, until it is published.
    Put,
    /// The same, of memory in several segments.
    PutSegments,
    /// Other memory at the same addresses, by the driver's calls.
    SwitchBare,
    /// The same, by an object of the broker.
    Switch,
}

/// From the measuring process to the producer, or to the single process.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Request {
    /// Prepare buffers of so many bytes for these methods, in segments of so many if that is given.
    Prepare { size: u64, segment: Option<u64>, methods: Vec<Method> },
    /// Say whether the driver is the emulated one of the tests.
    IsEmulated,
    /// Connect to the broker at this socket.
    Connect { socket: PathBuf },
    /// Hand over once, to all consumers at the same time.
    Measure { method: Method },
    /// Free what was prepared.
    Clear,
    /// Fill and verify once with this engine, after `Prepare`.
    Pattern { engine: Engine },
    /// Make each driver call once.
    Stages { size: u64 },
    /// Load the kernels.
    Load,
}

/// The response to a [`Request`].
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Response {
    /// The driver is started.
    Started {
        name: String,
        uuid: String,
        version: i32,
        granularity: u64,
        free: u64,
    },
    Done,
    IsEmulated(bool),
    /// The time from before the export, or the send, until the memory is usable at the other end.
    Time {
        us: f64,
    },
    /// The times of filling and verifying: of the kernels by events of the device, and of the whole calls.
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

impl Response {
    /// The description of a device whose driver is started.
    pub(super) fn started(device: &Device) -> Result<Self, Error> {
        Ok(Self::Started {
            name: device.name().to_owned(),
            uuid: device.prefixed_uuid(),
            version: device.driver().version()?,
            granularity: device.granularity()?,
            free: device.memory_info()?.free,
        })
    }

    /// A response, or the error in its place.
    pub(super) fn of(result: Result<Self, Error>) -> Self {
        result.unwrap_or_else(|error| Self::Failed(error.into()))
    }
}

/// An error that is reported to another process: as it is where that process branches on it, else as its message.
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
    /// Of a process that the reporting process had started.
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
    /// The error, as one of the reporting process.
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

/// From the producer to its consumers.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ConsumerRequest {
    /// Connect to the session at this socket.
    Connect { socket: PathBuf },
    /// Import the pool whose descriptor comes with the next bare record.
    Pool,
    /// Open what is handed over next, of so many bytes, in so many segments.
    Open { method: Method, size: u64, segments: usize },
    /// Let a sleeper keep the descriptors that come with the next bare record.
    Sleeper,
    /// Wake the sleeper, and open what it hands over, of so many bytes.
    Wake { size: u64 },
    /// Connect to the broker at this socket.
    Broker { socket: PathBuf },
    /// Get an object of the broker, and one of its arrays if one is named.
    Get { name: String, array: Option<String> },
    /// Put the other of two objects at the addresses of the one that is mapped there.
    Switch { method: Method },
    /// Take a record, and close its descriptors.
    Take,
    /// Let the session withdraw a buffer.
    Release,
    /// Close what was opened.
    Close,
}

/// The response to a [`ConsumerRequest`].
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ConsumerResponse {
    Ready,
    /// When the memory was usable, by the clock that all processes share, in nanoseconds.
    Usable {
        at: u64,
    },
    /// The time from the request until the memory was usable.
    Got {
        us: f64,
    },
    Failed(Failure),
}
