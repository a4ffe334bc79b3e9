//! What the processes of a bench tell each other.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::{
    driver::{
        Backend,
        bare::{Closing, Opening},
    },
    error::{DeviceError, Error, LoadError},
    memory::Device,
    tools::check::pattern::Engine,
    tools::error::{ToolError, hint},
};

/// A way of handing memory over that is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Way {
    /// The driver's calls and a socket; exported once, and the descriptor sent again.
    Floor,
    /// The same, exported for each handoff.
    ExportEach,
    /// This library's session: a buffer that the consumer does not hold, and that was described to it before.
    Fresh,
    /// The same, with its description.
    Described,
    /// This library's session: a buffer that the consumer holds.
    Again,
    /// A legacy handle, opened each time.
    Legacy,
    /// A pointer of a pool that was imported before.
    Pool,
    /// A record of one byte, and nothing else.
    Hop,
}

/// From who measures to the producer, and from the one that measures alone to itself.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Order {
    /// Make ready for these ways, of so many bytes.
    Prepare { size: u64, ways: Vec<Way> },
    /// Hand over once, to all consumers at the same time.
    Measure { way: Way },
    /// Let go of what was made ready.
    Clear,
    /// Fill and verify once, by this engine; memory for it is there from `Prepare`.
    Pattern { engine: Engine },
    /// Each call of the driver once.
    Stages { size: u64 },
    /// Load the kernels.
    Load,
}

/// What comes back.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Answer {
    /// The driver is started: how many bytes the device has free.
    Started {
        name: String,
        uuid: String,
        version: i32,
        granularity: u64,
        free: u64,
    },
    Done,
    /// From before the export, or the send, to the memory being usable at the other end.
    Took {
        us: f64,
    },
    /// How long filling and verifying took: by the device's own events where a kernel did it, and with all around it.
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

impl Answer {
    /// That the driver is started.
    pub(super) fn started(device: &Device) -> Result<Self, Error> {
        Ok(Self::Started {
            name: device.name().to_owned(),
            uuid: device.prefixed_uuid(),
            version: device.driver().version()?,
            granularity: device.granularity()?,
            free: device.memory_info()?.free,
        })
    }

    /// What came of it, or what it failed with.
    pub(super) fn of(result: Result<Self, Error>) -> Self {
        result.unwrap_or_else(|error| Self::Failed(error.into()))
    }
}

/// An error on its way to another process: whole where a program branches on it, else as its sentence.
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
    /// Of a process that the one that tells of it had started.
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
    /// The error, of the process that told of it.
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
pub(super) enum Call {
    /// Connect to the session that waits there.
    Connect { socket: PathBuf },
    /// A pool's descriptor comes with the next bare record.
    Pool,
    /// Take what comes, of so many bytes.
    Take { way: Way, size: u64 },
    /// Let the session take back what it withdraws.
    LetGo,
    /// Whatever was opened can be closed now.
    Close,
}

/// What they answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Reply {
    Ready,
    /// When it was usable, by the clock that all processes share.
    Usable {
        at: u64,
    },
    Failed(Failure),
}
