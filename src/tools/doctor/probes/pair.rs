//! What one device does with another's memory.

use std::time::Duration;

use super::{
    Bench, Found,
    own::{SIZE, shows, write},
};
use crate::{
    driver::{Access, code},
    error::Result,
    memory::{Allocation, Device, Mapping, Region, Reservation},
    tools::check::pattern::Pattern,
    tools::doctor::{Status, report::Seen},
};

pub(super) fn peer(bench: &mut Bench, owner: &Device) -> Result<Found> {
    let device = &bench.device;
    let claimed = device.can_access(owner)?;
    let allocation = Allocation::create(owner, SIZE)?;
    let theirs = Mapping::new(&allocation, Access::ReadWrite)?;
    let reservation = Reservation::new(device, allocation.size())?;
    let mapped = Mapping::side_by_side(&reservation, 0, std::slice::from_ref(&allocation), device, Access::ReadWrite);
    let ours = match mapped {
        Ok(mapping) => mapping,
        Err(error) if !claimed => {
            let found = Found::of(Status::Unsupported, "This device can't reach that one's memory, and says so.");
            return Ok(found.with(Seen::of(&error)).figure("claimed", false));
        }
        Err(error) => return Err(error),
    };
    for (writer, reader) in [(&theirs, &ours), (&ours, &theirs)] {
        let pattern = Pattern::new(rand::random());
        write(writer, pattern)?;
        writer.synchronize()?;
        if !shows(reader, pattern)? {
            return Ok(Found::failed("One device does not see what the other wrote.").figure("claimed", claimed));
        }
    }
    let found = Found::ok("This device reads and writes that one's memory.").figure("claimed", claimed);
    drop((ours, theirs));
    match speed(device, owner) {
        Ok(speed) => Ok(found.figure("read_gb_per_s", speed).figure("copied_bytes", COPY)),
        // It works, and how fast can't be told: for an old driver, or where there is not so much memory.
        Err(error) if Seen::of(&error).is_lacking() || Seen::of(&error).code == Some(code::OUT_OF_MEMORY) => Ok(found),
        Err(error) => Err(error),
    }
}

/// How much is copied to measure.
const COPY: u64 = 64 << 20;

/// How fast this device copies out of the owner's memory, in GB/s: the best of a few.
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
