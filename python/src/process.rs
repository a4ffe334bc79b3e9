//! State of a process that a fork of it must not find locked.

use std::{
    process, ptr,
    sync::atomic::{AtomicPtr, Ordering},
};

/// A value for each process. A fork finds a new one: the parent's may have been locked, by a thread that the fork does not have, at the
/// moment of the fork. That one is never dropped.
pub(crate) struct OfProcess<T: 'static> {
    at: AtomicPtr<(u32, T)>,
    make: fn() -> T,
}

impl<T: Sync> OfProcess<T> {
    pub(crate) const fn new(make: fn() -> T) -> Self {
        Self { at: AtomicPtr::new(ptr::null_mut()), make }
    }

    /// This process's. Does not block.
    #[allow(unsafe_code)]
    pub(crate) fn get(&self) -> &'static T {
        let pid = process::id();
        let mut found = self.at.load(Ordering::Acquire);
        loop {
            // SAFETY: it is null, or was leaked below and is never freed; it is only read.
            if let Some((by, value)) = unsafe { found.as_ref::<'static>() }
                && *by == pid
            {
                return value;
            }
            let made = Box::into_raw(Box::new((pid, (self.make)())));
            match self.at.compare_exchange(found, made, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => found = made,
                Err(other) => {
                    // SAFETY: it was just made, and no one else has seen it.
                    drop(unsafe { Box::from_raw(made) });
                    found = other;
                }
            }
        }
    }
}
