//! Handles: numbers in the type of a pointer, and the objects of this process that they name.

use std::{
    any::Any,
    collections::BTreeMap,
    ptr,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicU16, AtomicU64, Ordering},
    },
};

use vmmfd::fork::PerProcess;

use crate::error::{FORK_HINT, Failure, Outcome, vmmfd_code_t};

/// An opaque type of the header, with the objects behind it.
pub(crate) trait Handle: Sized {
    type Object: Send + Sync + 'static;
    /// The type's number in its handles, from 1.
    const KIND: u8;
    /// The type's name in messages, with its article.
    const NAME: &'static str;
}

/// Declares an opaque type of the header.
macro_rules! handle {
    ($(#[$doc:meta])* $name:ident, $kind:literal, $article:literal, $object:ty) => {
        impl $crate::handle::Handle for $name {
            type Object = $object;
            const KIND: u8 = $kind;
            const NAME: &'static str = $article;
        }
    };
}

pub(crate) use handle;

/// The objects of this process. A fork has its own table, and does not drop its parent's objects.
static TABLE: PerProcess<Table> = PerProcess::new(Table::new);

/// How many tables this process and its ancestors have created.
static TABLES: AtomicU16 = AtomicU16::new(0);

struct Table {
    /// Differs from the numbers in the handles of the parent process.
    process: u16,
    last: AtomicU64,
    objects: RwLock<BTreeMap<u64, Arc<dyn Any + Send + Sync>>>,
}

impl Table {
    fn new() -> Self {
        let process = TABLES.fetch_add(1, Ordering::AcqRel) + 1;
        Self { process, last: AtomicU64::new(0), objects: RwLock::default() }
    }
}

/// The fields of a handle: 8 bits of kind, 16 bits of process and 40 bits of serial number, which is used once.
const SERIAL_BITS: u32 = 40;

fn fields(bits: u64) -> (u8, u16, u64) {
    ((bits >> 56) as u8, (bits >> SERIAL_BITS) as u16, bits & ((1 << SERIAL_BITS) - 1))
}

/// Stores an object and returns its handle.
pub(crate) fn insert<H: Handle>(object: H::Object) -> *mut H {
    let table = TABLE.get();
    let serial = table.last.fetch_add(1, Ordering::Relaxed) + 1;
    let bits = u64::from(H::KIND) << 56 | u64::from(table.process) << SERIAL_BITS | serial;
    let mut objects = table.objects.write().unwrap_or_else(PoisonError::into_inner);
    objects.insert(bits, Arc::new(object));
    ptr::without_provenance_mut(bits as usize)
}

/// The object of a handle. It lives at least as long as the result, even if another thread frees the handle.
///
/// # Errors
/// If the handle is null, has another type, was freed, or is of the parent process.
pub(crate) fn get<H: Handle>(handle: *const H) -> Outcome<Arc<H::Object>> {
    let bits = handle.addr() as u64;
    let table = TABLE.get();
    check::<H>(bits, table)?;
    let object = table.objects.read().unwrap_or_else(PoisonError::into_inner).get(&bits).cloned();
    object.and_then(|object| object.downcast().ok()).ok_or_else(|| freed::<H>(bits))
}

/// The object of a handle; `None` for null.
///
/// # Errors
/// As [`get`].
pub(crate) fn optional<H: Handle>(handle: *const H) -> Outcome<Option<Arc<H::Object>>> {
    if handle.is_null() { Ok(None) } else { get(handle).map(Some) }
}

/// Frees a handle. Its object is dropped when no call uses it any more, here or in that call. Null is allowed.
///
/// # Errors
/// As [`get`].
pub(crate) fn remove<H: Handle>(handle: *mut H) -> Outcome<()> {
    if handle.is_null() {
        return Ok(());
    }
    let bits = handle.addr() as u64;
    let table = TABLE.get();
    check::<H>(bits, table)?;
    let object = table.objects.write().unwrap_or_else(PoisonError::into_inner).remove(&bits);
    // Outside of the lock: a drop may block.
    object.map(drop).ok_or_else(|| freed::<H>(bits))
}

fn check<H: Handle>(bits: u64, table: &Table) -> Outcome<()> {
    let (kind, process, _) = fields(bits);
    let name = H::NAME;
    if bits == 0 {
        return Err(Failure::invalid(format!("the handle is NULL: pass {name}")));
    }
    if kind != H::KIND {
        return Err(Failure::invalid(format!(
            "the handle {bits:#x} is not {name}: pass a handle that this library returned"
        )));
    }
    if process != table.process {
        let message = format!(
            "the handle {bits:#x} is of the parent process, and process {} is a fork of it",
            std::process::id()
        );
        return Err(Failure::Own(vmmfd_code_t::VMMFD_FORKED, message, Some(FORK_HINT)));
    }
    Ok(())
}

fn freed<H: Handle>(bits: u64) -> Failure {
    Failure::invalid(format!("the handle {bits:#x} was {} and is freed: use no handle after its free", H::NAME))
}
