//! The object of a lease, which may be switched to another version or parked.

use std::{
    ffi::{CString, c_char},
    sync::{Arc, Mutex, PoisonError, RwLock},
};

use vmmfd::{
    broker::{Client, Object},
    memory::Imported,
};

use crate::error::{Failure, Outcome, c_text};

pub(crate) struct Leased {
    /// Reads and writes of the memory share it; a switch has it alone.
    object: RwLock<Object>,
    pub(crate) client: Client,
    /// The texts that the caller has seen last.
    pub(crate) texts: Mutex<Option<Texts>>,
}

pub(crate) struct Texts {
    pub(crate) name: CString,
    pub(crate) id: CString,
    pub(crate) metadata: CString,
    _arrays: Vec<CString>,
    pub(crate) arrays: Vec<Start>,
}

/// The start of a text of [`Texts`].
#[repr(transparent)]
pub(crate) struct Start(*const c_char);

// SAFETY: the text lives in the same `Texts`, and is only read.
unsafe impl Send for Start {}

impl Texts {
    pub(crate) fn of(object: &Object) -> Outcome<Self> {
        let metadata = serde_json::Value::Object(object.metadata()?).to_string();
        let entries = object.parts().iter().flat_map(|part| part.arrays());
        let names: Vec<CString> = entries.map(|entry| c_text(entry.name.as_str())).collect();
        let arrays = names.iter().map(|name| Start(name.as_ptr())).collect();
        let name = c_text(object.name());
        let id = c_text(object.id());
        Ok(Self { name, id, metadata: c_text(metadata), _arrays: names, arrays })
    }
}

impl Leased {
    pub(crate) fn new(object: Object, client: Client) -> Self {
        Self { object: RwLock::new(object), client, texts: Mutex::default() }
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
