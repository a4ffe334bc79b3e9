//! The probe of a device pair: one device uses memory of the other.

use vmmfd::{
    driver::{Access, code},
    memory::{Allocation, Mapping, Region, Reservation},
};

use super::one_process::{SIZE, matches_pattern, write};
use crate::{
    check::pattern::{Pattern, random_salt},
    doctor::{prelude::*, report::unsupported},
};

pub(super) fn peer(context: &mut ProbeContext, owner: &Device) -> ProbeResult {
    let device = &context.device;
    let claimed = device.can_access(owner)?;
    let allocation = Allocation::create(owner, SIZE)?;
    let theirs = Mapping::new(&allocation, Access::ReadWrite)?;
    let reservation = Reservation::new(device, allocation.size())?;
    let mapped = Mapping::side_by_side(&reservation, 0, std::slice::from_ref(&allocation), device, Access::ReadWrite);
    let ours = match mapped {
        Ok(mapping) => mapping,
        Err(error) if !claimed => {
            let meaning = "This device can't access that one's memory, and does not claim to.";
            let finding = unsupported(meaning);
            return Ok(finding.with_error(ErrorDetails::of(&error)).figure("claimed", false));
        }
        Err(error) => return Err(error.into()),
    };
    for (writer, reader) in [(&theirs, &ours), (&ours, &theirs)] {
        let pattern = Pattern::new(random_salt()?);
        write(writer, pattern)?;
        writer.synchronize()?;
        if !matches_pattern(reader, pattern)? {
            return Ok(failed("One device does not see what the other wrote.").figure("claimed", claimed));
        }
    }
    let finding = ok("This device reads and writes that one's memory.").figure("claimed", claimed);
    drop((ours, theirs));
    match speed(device, owner) {
        Ok(speed) => Ok(finding.figure("read_gb_per_s", speed).figure("copied_bytes", COPY)),
        Err(error) => {
            let error = ErrorDetails::of(&error);
            // Sharing works, but an old driver or too little memory prevents the measurement.
            let unmeasured = error.is_unsupported() || error.code == Some(code::OUT_OF_MEMORY);
            if unmeasured { Ok(finding) } else { Err(error) }
        }
    }
}

/// The size of the measured copies in bytes.
const COPY: u64 = 64 << 20;

/// The bandwidth of copies from the owner's memory in GB/s: the best of three.
fn speed(device: &Device, owner: &Device) -> Result<f64> {
    let far = Allocation::create(owner, COPY)?;
    let near = Mapping::new(&Allocation::create(device, COPY)?, Access::ReadWrite)?;
    let reservation = Reservation::new(device, far.size())?;
    let far = Mapping::side_by_side(&reservation, 0, std::slice::from_ref(&far), device, Access::ReadWrite)?;
    let diagnosis = device.verbs().diagnosis()?;
    let mut best = Duration::MAX;
    for _ in 0..3 {
        best = best.min(diagnosis.copy_within(device.ordinal(), near.address(), far.address(), COPY)?);
    }
    let speed = COPY as f64 / best.as_secs_f64().max(1e-9) / 1e9;
    Ok((speed * 10.0).round() / 10.0)
}
