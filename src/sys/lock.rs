//! Locks that a panic does not break.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// Locks a mutex even if another thread panicked while it held the lock: no critical section of this project leaves inconsistent data.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Like [`lock`], but returns `None` while another thread holds the lock.
pub fn try_lock<T: ?Sized>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Err(TryLockError::WouldBlock) => None,
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Ok(guard) => Some(guard),
    }
}
