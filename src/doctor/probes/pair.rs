//! What one device does with another's memory.

use super::{
    Bench, Found,
    own::{SIZE, shows, write},
};
use crate::{
    doctor::Status,
    driver::Access,
    error::Result,
    memory::{Allocation, Device, Mapping, Region, Reservation},
    pattern::Pattern,
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
            return Ok(found.with(crate::doctor::report::Seen::of(&error)).figure("claimed", false));
        }
        Err(error) => return Err(error),
    };
    for (writer, reader) in [(&theirs, &ours), (&ours, &theirs)] {
        let pattern = Pattern::new(rand::random());
        write(writer, pattern)?;
        writer.synchronize()?;
        if !shows(reader, pattern)? {
            return Ok(Found::wrong("One device does not see what the other wrote.").figure("claimed", claimed));
        }
    }
    Ok(Found::ok("This device reads and writes that one's memory.").figure("claimed", claimed))
}
