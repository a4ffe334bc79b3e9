//! The object of a lease, which may be switched to another version or parked.

use std::sync::{Arc, PoisonError, RwLock};

use vmmfd::{
    broker::{Client, Object},
    memory::Imported,
};

use crate::error::{Failure, Outcome};

pub(crate) struct Leased {
    /// Reads and writes of the memory share it; a switch has it alone.
    object: RwLock<Object>,
    pub(crate) client: Client,
}

impl Leased {
    pub(crate) fn new(object: Object, client: Client) -> Self {
        Self { object: RwLock::new(object), client }
    }

    pub(crate) fn read<T>(&self, work: impl FnOnce(&Object) -> Outcome<T>) -> Outcome<T> {
        work(&self.object.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn change<T>(&self, work: impl FnOnce(&mut Object) -> vmmfd::Result<T>) -> Outcome<T> {
        Ok(work(&mut self.object.write().unwrap_or_else(PoisonError::into_inner))?)
    }

    /// Passes the memory of a part to a function. The lease is not switched or parked during the call.
    pub(crate) fn part<T>(&self, name: &str, work: impl FnOnce(&Arc<Imported>) -> T) -> Outcome<T> {
        self.read(|object| {
            let part = object.part(name);
            let part = part.ok_or_else(|| Failure::invalid(format!("the lease has no part {name} any more")))?;
            Ok(work(part.memory()?))
        })
    }
}
