//! Memory that other code of this process allocated, shared by its address. `python/tests/test_share.py` has what is shared and refused.

use vmmfd::memory::Neighbours;

use super::*;

cases! {
    on crate::support::Subject; gpus alone: [
    failed_sharing_retains_nothing,
    ]
}

fn failed_sharing_retains_nothing(subject: Subject) {
    let (device, unit) = (subject.device(), subject.unit());
    let failed = subject.fail_each_call(|| {
        let allocations = [Allocation::create(&device, unit)?, Allocation::create(&device, unit)?];
        let reservation = Reservation::new(&device, 2 * unit)?;
        let theirs = Mapping::side_by_side(&reservation, 0, &allocations, &device, ReadWrite)?;
        Shared::from_addresses(&device, &[(theirs.address(), theirs.size())], Neighbours::Refuse).map(drop)
    });
    assert_eq!(failed.iter().filter(|verb| **verb == "retain").count(), 2, "{failed:?}");
}
