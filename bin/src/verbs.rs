//! The driver's verbs, for what only measures, diagnoses or fills memory that it owns.

#![allow(unsafe_code, reason = "the verbs could take memory from under its owner")]

use vmmfd::{
    driver::Driver,
    internals::{self, Verbs},
    memory::Device,
};

/// What has a driver's verbs.
pub trait HasVerbs {
    /// The verbs. The commands and benches give back only what they took by them.
    fn verbs(&self) -> &dyn Verbs;
}

impl HasVerbs for Driver {
    fn verbs(&self) -> &dyn Verbs {
        // SAFETY: as the trait says, nothing that a value of the library owns is given back.
        unsafe { internals::verbs(self) }
    }
}

impl HasVerbs for Device {
    fn verbs(&self) -> &dyn Verbs {
        self.driver().verbs()
    }
}
