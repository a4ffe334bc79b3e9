//! Direct access to the driver's verbs, for benchmarks, diagnosis and checks on memory that they own.

#![allow(unsafe_code, reason = "the verbs could take memory from under its owner")]

use vmmfd::{
    driver::Driver,
    internals::{self, Verbs},
    memory::Device,
};

/// Types with driver verbs.
pub trait HasVerbs {
    /// The verbs. Callers release only resources that they acquired through them.
    fn verbs(&self) -> &dyn Verbs;
}

impl HasVerbs for Driver {
    fn verbs(&self) -> &dyn Verbs {
        // SAFETY: by the contract of this trait, callers release nothing that the library owns.
        unsafe { internals::verbs(self) }
    }
}

impl HasVerbs for Device {
    fn verbs(&self) -> &dyn Verbs {
        self.driver().verbs()
    }
}
