//! The probe of checkpoints, with another process as an engine has it: it has memory of its own, and has parked memory of this process.

use std::{os::fd::OwnedFd, sync::Arc};

use vmmfd::{
    driver::Access,
    memory::{Allocation, Mapping, Reservation},
};

use super::{
    killed_owner::wait_for_parent,
    one_process::{SIZE, matches_pattern, write},
};
use crate::{
    check::pattern::{Pattern, random_salt},
    doctor::{
        prelude::*,
        process::Role,
        report::{timed, unsupported},
    },
    line::only,
};

/// A step of the other process, or its error.
type Step<T> = std::result::Result<T, ErrorDetails>;

pub(super) fn checkpoint(context: &mut ProbeContext) -> ProbeResult {
    let device = &context.device;
    let driver = device.verbs().checkpoints()?;
    let salt = random_salt()?;
    let shared = Allocation::create(device, SIZE)?;
    write(&Mapping::new(&shared, Access::ReadWrite)?, Pattern::new(salt))?;
    let role = Role::Park { device: device.ordinal(), pattern: salt };
    let mut child = context.start_child("the process that is checkpointed", role)?;
    child.line.send_with(&shared.size(), &[shared.export()?])?;
    child.receive::<Step<()>>()?.map_err(ErrorDetails::of_other_end)?;
    let pid = child.pid();
    if let Err(error) = driver.state(pid) {
        let error = ErrorDetails::from(error);
        return match error.is_unsupported() {
            true => Ok(unsupported("Checkpoints need driver 570 or newer, for CUDA 12.8.").with_error(error)),
            false => Err(error),
        };
    }
    driver.lock(pid, context.end.setting.timeout)?;
    let ((), checkpoint_us) = timed(|| driver.checkpoint(pid))?;
    let ((), restore_us) = timed(|| driver.restore(pid))?;
    driver.unlock(pid)?;
    child.line.send_with(&(), &[shared.export()?])?;
    let intact = child.receive::<Step<bool>>()?.map_err(ErrorDetails::of_other_end)?;
    if !intact {
        return Ok(failed("After a checkpoint and a restore, memory of the process has other bytes."));
    }
    let meaning = "A process that has parked its leases survives a checkpoint: `vmmfd suspend` works here.";
    Ok(ok(meaning).figure("checkpoint_us", checkpoint_us).figure("restore_us", restore_us))
}

/// Memory of its own, and the addresses of another process's memory, as a parked lease has them.
struct Parked {
    own: Mapping,
    addresses: Arc<Reservation>,
    pattern: Pattern,
}

impl Parked {
    fn new(device: &Device, fd: OwnedFd, size: u64, pattern: Pattern) -> Result<Self> {
        let own = Mapping::new(&Allocation::create(device, SIZE)?, Access::ReadWrite)?;
        write(&own, pattern)?;
        let parked = Self { own, addresses: Reservation::new(device, size)?, pattern };
        // Mapped once, and unmapped again.
        parked.unpark(device, fd).map(|_| parked)
    }

    /// Maps the other process's memory for a moment. Returns whether all bytes are as before.
    fn unpark(&self, device: &Device, fd: OwnedFd) -> Result<bool> {
        let imported = Allocation::import(device, fd, self.addresses.size())?;
        let mapping = Mapping::at(&self.addresses, 0, &imported, Access::ReadOnly)?;
        Ok(matches_pattern(&mapping, self.pattern)? && matches_pattern(&self.own, self.pattern)?)
    }
}

/// Parks the parent's memory, and maps it again when the parent asks for it.
pub(in crate::doctor) fn park(device: Result<Device>, salt: u32, line: &Line) -> Result<()> {
    let (size, fds) = line.receive_with()?;
    let fd = only(fds)?;
    let made = device.and_then(|device| Ok((Parked::new(&device, fd, size, Pattern::new(salt))?, device)));
    let (parked, device) = match made {
        Ok(made) => made,
        Err(error) => {
            line.send(&Step::<()>::Err(ErrorDetails::of(&error)))?;
            return wait_for_parent(line);
        }
    };
    line.send(&Step::Ok(()))?;
    let ((), fds) = line.receive_with()?;
    let intact = parked.unpark(&device, only(fds)?);
    line.send(&intact.map_err(|error| ErrorDetails::of(&error)))?;
    wait_for_parent(line)
}
