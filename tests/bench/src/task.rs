//! The task of a bench process, as data.

use std::{path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};

use vmmfd::{
    driver::{Backend, Choice, Driver, open},
    error::Result,
    memory::{Device, Selector},
};

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Task {
    pub(super) backend: Backend,
    /// The device, by ordinal or UUID.
    pub(super) device: String,
    /// How long one step may take.
    pub(super) timeout: Duration,
    pub(super) role: Role,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Role {
    /// Shares memory with consumers that it starts, and measures.
    Producer { folder: PathBuf, consumers: usize },
    /// Opens the memory that the producer shares.
    Consumer,
    /// Returns the consumer's memory when the consumer wakes it.
    Sleeper,
    /// Measures the pattern and each driver call, without another process.
    Single,
    /// Starts the driver, prints `ready`, and exits.
    BareStart,
    /// Serves objects at a socket, like `vmmfd serve`.
    BrokerServer { socket: PathBuf, emulated: bool },
    /// Puts and gets objects, with a driver or without.
    BrokerClient { driver: bool },
    /// Leads a group of programs that are not children of this harness, so that the group is killed with the bench.
    GroupLeader,
}

impl Role {
    /// The name in messages.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Producer { .. } => "the producer",
            Self::Consumer => "a consumer",
            Self::Sleeper => "the sleeper",
            Self::Single => "the process that is measured",
            Self::BareStart => "a bare start",
            Self::BrokerServer { .. } => "the broker",
            Self::BrokerClient { .. } => "a client of the broker",
            Self::GroupLeader => "the leader of the commands",
        }
    }
}

impl Task {
    /// Returns the same task with another role.
    pub(super) fn with(&self, role: Role) -> Self {
        Self { role, ..self.clone() }
    }

    pub(super) fn open(&self) -> Result<(Driver, Device)> {
        let driver = open(Choice::Only(self.backend))?.driver;
        let device = Device::find(&driver, self.selector())?;
        Ok((driver, device))
    }

    pub(super) fn selector(&self) -> Selector {
        self.device.parse().unwrap_or_default()
    }
}
