//! Checkpoints: the driver moves all GPU memory of a process into host memory, and back.

use std::{fmt::Debug, time::Duration};

use crate::error::Result;

/// What the driver has done with a process: `CUprocessState`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessState {
    /// It runs.
    Running,
    /// Its calls of the driver wait.
    Locked,
    /// Its calls of the driver wait, and it has no GPU memory.
    Checkpointed,
    /// The driver failed to restore it: its GPU memory is lost.
    Failed,
}

/// Calls that concern another process of the same user, named by its number in this PID namespace. They need CUDA 12.8 (driver 570).
pub trait Checkpoints: Debug + Send + Sync {
    /// The state of a process. Fails for a process that does not use CUDA. `cuCheckpointProcessGetState`.
    fn state(&self, pid: u32) -> Result<ProcessState>;

    /// Blocks the driver calls of a process, once those in progress have ended, or fails after the timeout. `cuCheckpointProcessLock`.
    fn lock(&self, pid: u32, timeout: Duration) -> Result<()>;

    /// Moves the GPU memory of a locked process into its host memory, and gives back its GPU resources. `cuCheckpointProcessCheckpoint`.
    fn checkpoint(&self, pid: u32) -> Result<()>;

    /// Moves the memory back. The process is then locked. `cuCheckpointProcessRestore`.
    fn restore(&self, pid: u32) -> Result<()>;

    /// Lets a locked process continue. `cuCheckpointProcessUnlock`.
    fn unlock(&self, pid: u32) -> Result<()>;
}
