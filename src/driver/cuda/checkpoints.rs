//! [`Checkpoints`] with the CUDA driver.

use std::{
    ffi::{c_int, c_uint},
    ptr,
    time::Duration,
};

use super::{super::failure, Core};
use crate::{
    driver::{Checkpoints, ProcessState, code},
    error::Result,
};

/// `CUcheckpointLockArgs`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct LockArguments {
    timeout_ms: c_uint,
    reserved: c_uint,
    more: [u64; 7],
}

impl Checkpoints for Core {
    fn state(&self, pid: u32) -> Result<ProcessState> {
        self.origin.check()?;
        let mut state: c_uint = 0;
        // SAFETY: the pointer is valid for one write.
        unsafe { self.functions.process_get_state(pid as c_int, &mut state) }?;
        match state {
            0 => Ok(ProcessState::Running),
            1 => Ok(ProcessState::Locked),
            2 => Ok(ProcessState::Checkpointed),
            3 => Ok(ProcessState::Failed),
            _ => Err(failure("cuCheckpointProcessGetState", code::UNKNOWN)),
        }
    }

    fn lock(&self, pid: u32, timeout: Duration) -> Result<()> {
        self.origin.check()?;
        // 0 would mean no timeout.
        let timeout_ms = c_uint::try_from(timeout.as_millis()).unwrap_or(c_uint::MAX).max(1);
        let arguments = LockArguments { timeout_ms, reserved: 0, more: [0; 7] };
        // SAFETY: the pointer is valid for the call.
        unsafe { self.functions.process_lock(pid as c_int, &arguments) }
    }

    fn checkpoint(&self, pid: u32) -> Result<()> {
        self.origin.check()?;
        // SAFETY: null stands for the default arguments.
        unsafe { self.functions.process_checkpoint(pid as c_int, ptr::null()) }
    }

    fn restore(&self, pid: u32) -> Result<()> {
        self.origin.check()?;
        // SAFETY: null stands for the default arguments.
        unsafe { self.functions.process_restore(pid as c_int, ptr::null()) }
    }

    fn unlock(&self, pid: u32) -> Result<()> {
        self.origin.check()?;
        // SAFETY: null stands for the default arguments.
        unsafe { self.functions.process_unlock(pid as c_int, ptr::null()) }
    }
}
