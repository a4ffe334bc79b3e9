//! Checkpoints: the state of each process is a digit in a file, so that several programs see it. No memory is moved.

use std::{
    ffi::{c_int, c_uint},
    fs,
    path::PathBuf,
};

use crate::{
    Answer, controls,
    numbers::{ILLEGAL_STATE, NOT_INITIALIZED, NOT_SUPPORTED, OPERATING_SYSTEM},
};

const RUNNING: c_uint = 0;
const LOCKED: c_uint = 1;
const CHECKPOINTED: c_uint = 2;

/// A step of a checkpoint: the states before and after it.
pub(crate) const LOCK: (c_uint, c_uint) = (RUNNING, LOCKED);
pub(crate) const CHECKPOINT: (c_uint, c_uint) = (LOCKED, CHECKPOINTED);
pub(crate) const RESTORE: (c_uint, c_uint) = (CHECKPOINTED, LOCKED);
pub(crate) const UNLOCK: (c_uint, c_uint) = (LOCKED, RUNNING);

/// The file with a process's state.
fn file(pid: c_int) -> Answer<PathBuf> {
    let folder = controls::settings().checkpoints.clone().ok_or(NOT_SUPPORTED)?;
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).map_err(|_| OPERATING_SYSTEM)?;
    if maps.contains("fakecuda") || maps.contains("libcuda.so") {
        Ok(folder.join(pid.to_string()))
    } else {
        Err(NOT_INITIALIZED)
    }
}

pub(crate) fn state(pid: c_int) -> Answer<c_uint> {
    let state = fs::read_to_string(file(pid)?).unwrap_or_default();
    Ok(state.trim().parse().unwrap_or(RUNNING))
}

/// Moves a process to its next state.
pub(crate) fn step(pid: c_int, (before, after): (c_uint, c_uint)) -> Answer {
    if state(pid)? != before {
        return Err(ILLEGAL_STATE);
    }
    fs::write(file(pid)?, after.to_string()).map_err(|_| OPERATING_SYSTEM)
}
