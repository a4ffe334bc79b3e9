//! A driver that fails on demand and records each resource that is acquired and released.

#![allow(unsafe_code, reason = "the verbs are an unsafe trait")]

use std::{
    iter,
    sync::{MutexGuard, PoisonError},
};

use vmmfd::{
    Result,
    driver::{DeviceUuid, MemoryInfo},
    internals::{
        Checkpoints, Counted, Diagnosis, Handle, Kernels, LegacyIpc, Live, PageLocked, PatternSpan, PoolHandle, Pools,
        Retained, Streams, Window,
    },
};

use super::Inode;
use crate::support::prelude::*;

#[derive(Debug, Clone, Copy)]
pub(crate) enum Fault {
    /// The nth call from now. Calls that release resources do not count.
    Nth(u64),
    /// The nth call of this verb from now. This is the same call in each run, even if several threads call the driver.
    NthOf(&'static str, u64),
    /// The nth call from now and all later calls, except calls that release resources.
    From(u64),
    /// Every call of this verb.
    Verb(&'static str),
}

/// Wraps any driver and injects faults.
#[derive(Debug)]
pub(crate) struct Faulty {
    inner: Arc<dyn Verbs>,
    ledger: Mutex<Ledger>,
}

#[derive(Debug, Default)]
struct Ledger {
    fault: Option<(Fault, u32)>,
    /// A verb that is slowed down, and the delay.
    slow: Option<(&'static str, Duration)>,
    panics: Option<&'static str>,
    failed: Option<&'static str>,
    verbs: Vec<&'static str>,
    /// How many times each handle was acquired.
    handles: BTreeMap<Handle, usize>,
    reservations: BTreeSet<u64>,
    mappings: BTreeMap<u64, u64>,
    exported: Vec<Inode>,
    /// The properties of created memory.
    created: Vec<Properties>,
}

const GIVE_BACK: [&str; 7] =
    ["release", "free", "unmap", "legacy deallocate", "legacy close", "pool destroy", "pool free"];

impl Faulty {
    pub(crate) fn new(inner: Arc<dyn Verbs>) -> Self {
        Self { inner, ledger: Mutex::default() }
    }

    /// Makes a call fail with this code before it reaches the driver.
    pub(crate) fn fail(&self, fault: Fault, code: u32) {
        self.ledger().fault = Some((fault, code));
    }

    /// Delays every call of this verb.
    pub(crate) fn slow_down(&self, verb: &'static str, by: Duration) {
        self.ledger().slow = Some((verb, by));
    }

    /// Makes every call of this verb panic; `None` stops the panics.
    pub(crate) fn panic_in(&self, verb: Option<&'static str>) {
        self.ledger().panics = verb;
    }

    /// Clears all faults and returns the verb that failed since the last call of this function.
    pub(crate) fn mend(&self) -> Option<&'static str> {
        let mut ledger = self.ledger();
        ledger.fault = None;
        ledger.failed.take()
    }

    /// Returns the verbs called since the last time, without duplicates and without verbs that release resources.
    pub(crate) fn take_kinds(&self) -> BTreeSet<&'static str> {
        self.take_verbs().into_iter().filter(|verb| !GIVE_BACK.contains(verb)).collect()
    }

    /// Returns the verbs called since the last time, in order.
    pub(crate) fn take_verbs(&self) -> Vec<&'static str> {
        std::mem::take(&mut self.ledger().verbs)
    }

    /// Returns the properties of memory created since the last time, in order.
    pub(crate) fn take_created(&self) -> Vec<Properties> {
        std::mem::take(&mut self.ledger().created)
    }

    /// Counts resources that were acquired and not released.
    pub(crate) fn live(&self) -> Live {
        let ledger = self.ledger();
        Live {
            handles: ledger.handles.values().sum(),
            reservations: ledger.reservations.len(),
            mappings: ledger.mappings.len(),
        }
    }

    /// Releases all remaining handles.
    pub(crate) fn release_all(&self) {
        let handles = self.ledger().handles.clone();
        let each = handles.into_iter().flat_map(|(handle, count)| iter::repeat_n(handle, count));
        each.for_each(|handle| self.release(handle).unwrap());
    }

    pub(crate) fn exported(&self) -> Vec<Inode> {
        self.ledger().exported.clone()
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn acquired(&self, handle: Handle) {
        *self.ledger().handles.entry(handle).or_default() += 1;
    }

    fn meet(&self, verb: &'static str) -> Result<()> {
        let slow = self.ledger().slow.filter(|(slow, _)| *slow == verb);
        if let Some((_, by)) = slow {
            thread::sleep(by);
        }
        let panics = self.ledger().panics == Some(verb);
        assert!(!panics, "an injected panic in {verb}");
        let mut ledger = self.ledger();
        ledger.verbs.push(verb);
        let Some((fault, code)) = &mut ledger.fault else { return Ok(()) };
        let fails = match fault {
            Fault::Nth(left) if !GIVE_BACK.contains(&verb) => {
                *left = left.wrapping_sub(1);
                *left == 0
            }
            Fault::From(left) if !GIVE_BACK.contains(&verb) => {
                *left = left.saturating_sub(1);
                *left == 0
            }
            Fault::NthOf(name, left) if *name == verb => {
                *left = left.wrapping_sub(1);
                *left == 0
            }
            Fault::Nth(_) | Fault::NthOf(..) | Fault::From(_) => false,
            Fault::Verb(name) => *name == verb,
        };
        if !fails {
            return Ok(());
        }
        let code = *code;
        ledger.failed = Some(verb);
        Err(Error::Driver { call: verb, code, name: "an injected fault".into(), source: None })
    }
}

/// Decrements a count, and removes it at 0. Returns whether there was one.
fn removed_once<K: Ord>(counts: &mut BTreeMap<K, usize>, key: &K) -> bool {
    let Some(count) = counts.get_mut(key) else { return false };
    *count -= 1;
    if *count == 0 {
        counts.remove(key);
    }
    true
}

/// The calls that only meet a fault on their way to the driver.
macro_rules! forward {
    ($(fn $name:ident($($arg:ident: $type:ty),*) -> $out:ty;)*) => {$(
        fn $name(&self, $($arg: $type),*) -> Result<$out> {
            self.meet(stringify!($name))?;
            self.inner.$name($($arg),*)
        }
    )*};
    ($prefix:literal, $inner:ident; $(fn $name:ident($($arg:ident: $type:ty),*) -> $out:ty;)*) => {$(
        fn $name(&self, $($arg: $type),*) -> Result<$out> {
            self.meet(concat!($prefix, stringify!($name)))?;
            self.inner.$inner()?.$name($($arg),*)
        }
    )*};
}

// SAFETY: all results come from the wrapped driver.
unsafe impl Verbs for Faulty {
    forward! {
        fn version() -> i32;
        fn device_count() -> i32;
        fn device_name(ordinal: i32) -> String;
        fn device_uuid(ordinal: i32) -> DeviceUuid;
        fn device_attribute(ordinal: i32, attribute: Attribute) -> i32;
        fn memory_info(ordinal: i32) -> MemoryInfo;
        fn activate(ordinal: i32) -> ();
        fn granularity(properties: &Properties, which: Granularity) -> u64;
        fn set_access(address: u64, size: u64, location: Location, access: Option<Access>) -> ();
        fn properties(handle: Handle) -> Properties;
        fn copy_in(ordinal: i32, address: u64, from: &[u8]) -> ();
        fn copy_out(ordinal: i32, address: u64, to: &mut [u8]) -> ();
        fn device_of(address: u64) -> i32;
        fn synchronize(ordinal: i32) -> ();
        fn wait_for_work(ordinal: i32) -> ();
        fn can_access_peer(ordinal: i32, peer: i32) -> bool;
        fn extent(ordinal: i32, address: u64) -> (u64, u64);
        fn seal(handle: Handle) -> bool;
        fn page_lock(ordinal: i32, size: u64) -> PageLocked;
        fn window(address: u64, size: u64) -> Window;
    }

    fn backend(&self) -> Backend {
        self.inner.backend()
    }

    fn create(&self, size: u64, properties: &Properties) -> Result<Handle> {
        self.meet("create")?;
        let handle = self.inner.create(size, properties)?;
        let mut ledger = self.ledger();
        *ledger.handles.entry(handle).or_default() += 1;
        ledger.created.push(*properties);
        Ok(handle)
    }

    // A resource leaves the ledger before the call: right after the call another thread may receive the same handle or address.

    fn release(&self, handle: Handle) -> Result<()> {
        self.meet("release")?;
        let known = removed_once(&mut self.ledger().handles, &handle);
        let answer = self.inner.release(handle);
        if known && answer.is_err() {
            self.acquired(handle);
        }
        answer
    }

    fn reserve(&self, size: u64, alignment: u64) -> Result<u64> {
        self.meet("reserve")?;
        let address = self.inner.reserve(size, alignment)?;
        self.ledger().reservations.insert(address);
        Ok(address)
    }

    fn free(&self, address: u64, size: u64) -> Result<()> {
        self.meet("free")?;
        let known = self.ledger().reservations.remove(&address);
        let answer = self.inner.free(address, size);
        if known && answer.is_err() {
            self.ledger().reservations.insert(address);
        }
        answer
    }

    fn map(&self, address: u64, size: u64, offset: u64, handle: Handle) -> Result<()> {
        self.meet("map")?;
        self.inner.map(address, size, offset, handle)?;
        self.ledger().mappings.insert(address, size);
        Ok(())
    }

    fn map_private(&self, address: u64, size: u64, handle: Handle) -> Result<()> {
        self.meet("map_private")?;
        self.inner.map_private(address, size, handle)?;
        self.ledger().mappings.insert(address, size);
        Ok(())
    }

    fn replace(&self, address: u64, size: u64, handle: Handle) -> Result<()> {
        self.meet("replace")?;
        let known = self.ledger().mappings.remove(&address);
        let answer = self.inner.replace(address, size, handle);
        // After a failure the mapping may or may not exist. The host backend can report it.
        if answer.is_ok() || self.inner.extent(0, address).is_ok() {
            self.ledger().mappings.extend(known.map(|size| (address, size)));
        }
        answer
    }

    fn check_unused(&self, address: u64, size: u64) -> Result<()> {
        self.inner.check_unused(address, size)
    }

    fn unmap(&self, address: u64, size: u64) -> Result<()> {
        self.meet("unmap")?;
        let inside = |start: u64| start >= address && start - address < size;
        let mut known = BTreeMap::new();
        self.ledger().mappings.retain(|&start, &mut size| {
            if inside(start) {
                known.insert(start, size);
            }
            !inside(start)
        });
        let answer = self.inner.unmap(address, size);
        if answer.is_err() {
            self.ledger().mappings.append(&mut known);
        }
        answer
    }

    fn export(&self, handle: Handle) -> Result<OwnedFd> {
        self.meet("export")?;
        let fd = self.inner.export(handle)?;
        self.ledger().exported.push(Inode::of(&fd));
        Ok(fd)
    }

    fn import(&self, fd: BorrowedFd<'_>, size: u64) -> Result<Handle> {
        self.meet("import")?;
        let handle = self.inner.import(fd, size)?;
        self.acquired(handle);
        Ok(handle)
    }

    fn retain(&self, address: u64) -> Result<Retained> {
        self.meet("retain")?;
        let retained = self.inner.retain(address)?;
        self.acquired(retained.handle);
        Ok(retained)
    }

    unsafe fn copy_device(&self, ordinal: i32, ranges: &[(u64, u64, u64)]) -> Result<()> {
        self.meet("copy_device")?;
        // SAFETY: the caller upholds the contract.
        unsafe { self.inner.copy_device(ordinal, ranges) }
    }

    fn legacy(&self) -> Result<&dyn LegacyIpc> {
        self.inner.legacy()?;
        Ok(self)
    }

    fn pools(&self) -> Result<&dyn Pools> {
        self.inner.pools()?;
        Ok(self)
    }

    // The emulated driver injects the faults of these calls.

    fn streams(&self) -> Result<Arc<dyn Streams>> {
        self.inner.streams()
    }

    fn kernels(&self) -> Result<&dyn Kernels> {
        self.inner.kernels()?;
        Ok(self)
    }

    fn diagnosis(&self) -> Result<&dyn Diagnosis> {
        self.inner.diagnosis()
    }

    fn checkpoint_count(&self) -> u64 {
        self.inner.checkpoint_count()
    }

    fn checkpoints(&self) -> Result<&dyn Checkpoints> {
        self.inner.checkpoints()
    }
}

impl Kernels for Faulty {
    forward! {
        "kernels ", kernels;
        fn load(ordinal: i32) -> ();
        fn fill(ordinal: i32, stretch: &PatternSpan) -> Duration;
        fn verify(ordinal: i32, stretch: &PatternSpan) -> Counted;
    }

    fn are_loaded(&self, ordinal: i32) -> bool {
        self.inner.kernels().is_ok_and(|kernels| kernels.are_loaded(ordinal))
    }
}

impl LegacyIpc for Faulty {
    forward! {
        "legacy ", legacy;
        fn allocate(ordinal: i32, size: u64) -> u64;
        fn deallocate(ordinal: i32, address: u64) -> ();
        fn handle(ordinal: i32, address: u64) -> [u8; 64];
        fn open(ordinal: i32, handle: &[u8; 64]) -> u64;
        fn close(ordinal: i32, address: u64) -> ();
    }
}

impl Pools for Faulty {
    forward! {
        "pool ", pools;
        fn create(ordinal: i32) -> PoolHandle;
        fn destroy(pool: PoolHandle) -> ();
        fn export(pool: PoolHandle) -> OwnedFd;
        fn import(fd: BorrowedFd<'_>) -> PoolHandle;
        fn allow(pool: PoolHandle, ordinal: i32) -> ();
        fn allocate(pool: PoolHandle, ordinal: i32, size: u64) -> u64;
        fn free(ordinal: i32, address: u64) -> ();
        fn export_pointer(ordinal: i32, address: u64) -> [u8; 64];
        fn import_pointer(pool: PoolHandle, ordinal: i32, data: &[u8; 64]) -> u64;
    }
}
