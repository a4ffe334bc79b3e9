//! The driver's state and rules. The host backend provides the memory, and most rules.
//!
//! One file of more than 500 lines: all calls use its one table of allocations.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    ffi::{c_int, c_uint, c_void},
    fs,
    ops::Range,
    os::{
        fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::fs::MetadataExt,
    },
    process, ptr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use vmmfd::{
    driver::{Access, MemoryInfo},
    internals::{Granularity, Handle, HostDriver, Properties, Verbs},
};

use crate::{
    AccessDesc, AllocationProp, Answer, Location, controls,
    events::Events,
    ipc::{Ipc, NUMA, PEER_ACCESS_UNSUPPORTED, POOL, dup, mark, marked},
    modules::Modules,
    numbers::{
        CONTEXT_IS_DESTROYED, DEVICE, DMA_BUF, FABRIC, HERE, HOST_NUMA, ILLEGAL_ADDRESS, INVALID_CONTEXT,
        INVALID_DEVICE, INVALID_HANDLE, INVALID_VALUE, NO_DEVICE, NOT_FOUND, NOT_INITIALIZED, NOT_PERMITTED,
        NOT_SUPPORTED, NOT_VISIBLE, OPERATING_SYSTEM, OUT_OF_MEMORY, PINNED, POSIX_FD, UNKNOWN, code,
    },
    streams::Streams,
};

/// The attributes that vmmfd requests, with the values of an H200, which claims fabric handles and refuses them.
const ATTRIBUTES: [(c_uint, c_int); 12] = [
    (16, 132),
    (20, 0),
    (102, 1),
    (103, 1),
    (110, 1),
    (115, 1),
    (119, 1),
    (122, 1),
    (128, 1),
    (133, 0),
    (134, 0),
    (141, 1),
];

/// The attribute for memory that RDMA can access.
const RDMA_WITH_VMM: c_uint = 110;

/// This machine's CPUs, as a device that accesses memory.
const CPU: c_int = -1;

static INITIALISED_BY: AtomicU32 = AtomicU32::new(0);
static DRIVER: Mutex<Option<Emulated>> = Mutex::new(None);

thread_local! {
    /// The thread's stack of contexts, by device.
    static CONTEXTS: RefCell<Vec<c_int>> = const { RefCell::new(Vec::new()) };
}

/// The driver of one process.
pub(crate) struct Emulated {
    host: HostDriver,
    devices: u32,
    allocations: BTreeMap<u64, Allocation>,
    handles_made: u64,
    mappings: BTreeMap<u64, Mapping>,
    /// Destinations of copies from pageable memory that may still be in transfer: such a call returns before the last bytes arrive.
    arriving: Vec<Range<u64>>,
    /// The number of times each device's primary context is retained.
    retained: BTreeMap<c_int, usize>,
    /// The devices on which a kernel accessed memory without access. Their contexts are permanently unusable.
    ruined: BTreeSet<c_int>,
    pub(crate) ipc: Ipc,
    pub(crate) events: Events,
    pub(crate) modules: Modules,
    pub(crate) streams: Streams,
}

/// The allocation of a handle.
struct Allocation {
    /// The number of times the handle was returned and not released.
    count: usize,
    handle: Handle,
    size: u64,
    /// The number of the owning device, which may not be visible here.
    owner: u32,
    /// Whether it is host memory.
    numa: bool,
    exportable: bool,
    imported: bool,
    fabric: bool,
    /// The dma-buf, if the allocation was created for RDMA.
    rdma: Option<Arc<OwnedFd>>,
}

/// A mapping, with the access of each device.
struct Mapping {
    /// The handle that was mapped.
    of: u64,
    size: u64,
    owner: u32,
    numa: bool,
    rdma: Option<Arc<OwnedFd>>,
    granted: BTreeMap<c_int, Access>,
}

/// Handles a function's failure: after a failed synchronization the context has failed, and no copy is in transfer any more.
pub(crate) fn failed(function: &str) {
    if function.ends_with("Synchronize") {
        // Before `cuInit` there is nothing to clear.
        let _ = initialised(|driver| {
            driver.arriving.clear();
            Ok(())
        });
    }
}

/// `cuInit`.
pub(crate) fn initialise() -> Answer {
    match INITIALISED_BY.load(Ordering::Acquire) {
        0 => {}
        pid if pid == process::id() => return Ok(()),
        _ => return Err(NOT_INITIALIZED),
    }
    let settings = controls::settings();
    let (devices, granularity) = (settings.devices, settings.granularity);
    drop(settings);
    if devices == 0 {
        return Err(NO_DEVICE);
    }
    let host = HostDriver::with_granularity(granularity).map_err(code)?;
    let ipc = Ipc::new().map_err(code)?;
    let mut driver = DRIVER.lock().unwrap_or_else(PoisonError::into_inner);
    driver.get_or_insert_with(|| Emulated {
        host,
        devices,
        allocations: BTreeMap::new(),
        handles_made: 0,
        mappings: BTreeMap::new(),
        arriving: Vec::new(),
        retained: BTreeMap::new(),
        ruined: BTreeSet::new(),
        ipc,
        events: Events::new(),
        modules: Modules::new(),
        streams: Streams::default(),
    });
    INITIALISED_BY.store(process::id(), Ordering::Release);
    Ok(())
}

/// Runs a call if this process has called `cuInit`. A fork has not.
pub(crate) fn initialised(call: impl FnOnce(&mut Emulated) -> Answer) -> Answer {
    if INITIALISED_BY.load(Ordering::Acquire) != process::id() {
        return Err(NOT_INITIALIZED);
    }
    let mut driver = DRIVER.lock().unwrap_or_else(PoisonError::into_inner);
    driver.as_mut().ok_or(NOT_INITIALIZED).and_then(call)
}

pub(crate) fn live() -> [u64; 9] {
    let driver = DRIVER.lock().unwrap_or_else(PoisonError::into_inner);
    driver.as_ref().map_or([0; 9], |driver| {
        let live = driver.host.live();
        let retained = driver.retained.values().sum::<usize>();
        let handles = driver.allocations.values().map(|allocation| allocation.count).sum();
        let [handles, reservations, mappings, contexts] =
            [handles, live.reservations, live.mappings, retained].map(|count| count as u64);
        let [blocks, pools, page_locked] = driver.ipc.live();
        // Streams and registered memory count as events.
        let [events, modules] = [driver.events.live() + driver.streams.live(), driver.modules.live()];
        [handles, reservations, mappings, contexts, blocks, pools, page_locked, events, modules]
    })
}

/// The devices.
impl Emulated {
    pub(crate) fn device_count(&self) -> c_int {
        self.devices as c_int
    }

    pub(crate) fn check_device(&self, device: c_int) -> Answer {
        if (0..self.device_count()).contains(&device) { Ok(()) } else { Err(INVALID_DEVICE) }
    }

    pub(crate) fn device_name(&self, device: c_int) -> Answer<&'static str> {
        self.check_device(device)?;
        Ok("fakecuda: emulated, no GPU")
    }

    /// The same in all processes of one boot, and different from the host backend's.
    pub(crate) fn device_uuid(&self, device: c_int) -> Answer<[u8; 16]> {
        self.check_device(device)?;
        let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").map_err(|_| OPERATING_SYSTEM)?;
        let digits: String = boot_id.chars().filter(char::is_ascii_hexdigit).collect();
        let number = u128::from_str_radix(&digits, 16).unwrap_or(0) ^ u128::from_be_bytes(*b"fakecuda, no GPU");
        Ok((number ^ device as u128).to_be_bytes())
    }

    pub(crate) fn attribute(&self, attribute: c_uint, device: c_int) -> Answer<c_int> {
        self.check_device(device)?;
        if let Some(&value) = controls::settings().attributes.get(&attribute) {
            return Ok(value);
        }
        ATTRIBUTES.iter().find(|(number, _)| *number == attribute).map(|&(_, value)| value).ok_or(INVALID_VALUE)
    }

    pub(crate) fn granularity(&self) -> usize {
        let properties = Properties { location: HERE, exportable: true, immutable: false, gpu_direct_rdma: false };
        self.host.granularity(&properties, Granularity::Minimum).unwrap_or(0) as usize
    }

    pub(crate) fn can_access_peer(&self, device: c_int, peer: c_int) -> Answer<bool> {
        self.check_device(device)?;
        self.check_device(peer)?;
        Ok(device != peer && controls::settings().peers)
    }

    /// Checks that a device may access memory of an owner.
    pub(crate) fn check_peer(&self, device: c_int, owner: u32) -> Answer {
        if device as u32 == owner || controls::settings().peers { Ok(()) } else { Err(PEER_ACCESS_UNSUPPORTED) }
    }

    /// Checks that a device has enough free memory, if it is limited.
    pub(crate) fn check_free(&self, device: c_int, size: u64) -> Answer {
        let limited = controls::settings().capacity.is_some();
        if limited && size > self.memory_info(device)?.free { Err(OUT_OF_MEMORY) } else { Ok(()) }
    }

    pub(crate) fn memory_info(&self, device: c_int) -> Answer<MemoryInfo> {
        let info = self.host.memory_info(0).map_err(code)?;
        let Some(capacity) = controls::settings().capacity else { return Ok(info) };
        let own = self.allocations.values().filter(|a| !a.imported && !a.numa && a.owner == device as u32);
        let held = own.map(|allocation| allocation.size).sum::<u64>() + self.ipc.held(device as u32);
        let free = capacity.saturating_sub(held);
        Ok(MemoryInfo { free: info.free.min(free), total: info.total })
    }
}

/// The contexts.
impl Emulated {
    /// A context is an address without memory.
    pub(crate) fn context(device: c_int) -> *mut c_void {
        ptr::without_provenance_mut(0xC0DE_0000 + 0x100 * device as usize)
    }

    pub(crate) fn retain(&mut self, device: c_int) -> Answer<*mut c_void> {
        self.check_device(device)?;
        *self.retained.entry(device).or_default() += 1;
        Ok(Self::context(device))
    }

    pub(crate) fn release_context(&mut self, device: c_int) -> Answer {
        self.check_device(device)?;
        let count = self.retained.get_mut(&device).filter(|count| **count > 0).ok_or(INVALID_CONTEXT)?;
        *count -= 1;
        Ok(())
    }

    fn is_retained(&self, device: c_int) -> bool {
        self.retained.get(&device).is_some_and(|count| *count > 0)
    }

    pub(crate) fn push(&self, context: *mut c_void) -> Answer {
        let device = (0..self.device_count()).find(|&device| Self::context(device) == context);
        let device = device.filter(|&device| self.is_retained(device)).ok_or(INVALID_CONTEXT)?;
        CONTEXTS.with_borrow_mut(|contexts| contexts.push(device));
        Ok(())
    }

    pub(crate) fn pop(&self) -> Answer<*mut c_void> {
        CONTEXTS.with_borrow_mut(Vec::pop).map(Self::context).ok_or(INVALID_CONTEXT)
    }

    /// This thread's current context, or null.
    pub(crate) fn top(&self) -> *mut c_void {
        CONTEXTS.with_borrow(|contexts| contexts.last().copied()).map_or(ptr::null_mut(), Self::context)
    }

    /// Replaces this thread's current context. Null removes it.
    pub(crate) fn replace_top(&self, context: *mut c_void) -> Answer {
        if !context.is_null() {
            self.push(context)?;
        }
        CONTEXTS.with_borrow_mut(|contexts| {
            let under = contexts.len().checked_sub(1 + usize::from(!context.is_null()));
            under.map(|under| contexts.remove(under));
        });
        Ok(())
    }

    /// The device of this thread's current context.
    pub(crate) fn current(&self) -> Answer<c_int> {
        let device = CONTEXTS.with_borrow(|contexts| contexts.last().copied()).ok_or(INVALID_CONTEXT)?;
        if !self.is_retained(device) {
            return Err(CONTEXT_IS_DESTROYED);
        }
        if self.ruined.contains(&device) { Err(ILLEGAL_ADDRESS) } else { Ok(device) }
    }
}

/// The memory.
impl Emulated {
    pub(crate) fn check_properties(&self, properties: &AllocationProp) -> Answer {
        let plain = properties.kind == PINNED
            && [DEVICE, HOST_NUMA].contains(&properties.location.kind)
            && properties.win32_handle_meta_data.is_null()
            && properties.compression_type == 0
            && properties.gpu_direct_rdma_capable <= 1
            && properties.usage == 0
            && properties.reserved == [0; 4];
        if !plain || ![0, POSIX_FD, FABRIC].contains(&properties.requested_handle_types) {
            return Err(INVALID_VALUE);
        }
        self.check_location(properties.location)
    }

    fn check_location(&self, location: Location) -> Answer {
        match (location.kind, location.id) {
            (DEVICE, device) => self.check_device(device),
            (HOST_NUMA, 0) => Ok(()),
            _ => Err(INVALID_VALUE),
        }
    }

    pub(crate) fn create(&mut self, size: u64, properties: &AllocationProp, flags: u64) -> Answer<u64> {
        self.check_properties(properties)?;
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        // The driver reports a granularity, and the attribute claims support, but creation fails without an IMEX channel.
        let fabric = properties.requested_handle_types == FABRIC;
        if fabric && !controls::settings().fabric {
            return Err(NOT_PERMITTED);
        }
        // Assumed: no GPU without RDMA support was available.
        let rdma = properties.gpu_direct_rdma_capable != 0;
        if rdma && self.attribute(RDMA_WITH_VMM, properties.location.id) == Ok(0) {
            return Err(NOT_SUPPORTED);
        }
        let exportable = properties.requested_handle_types == POSIX_FD;
        let numa = properties.location.kind == HOST_NUMA;
        if !numa {
            self.check_free(properties.location.id, size)?;
        }
        let on_host = Properties { location: HERE, exportable, immutable: false, gpu_direct_rdma: false };
        let handle = self.host.create(size, &on_host).map_err(code)?;
        let (owner, kind) = if numa { (0, NUMA) } else { (properties.location.id as u32, 0) };
        let marked = if exportable && (owner, kind) != (0, 0) {
            self.host.export(handle).map_err(code).and_then(|fd| mark(&fd, kind, owner))
        } else {
            Ok(())
        };
        let rdma = match rdma {
            true if exportable && controls::settings().rdma => {
                marked.and_then(|()| self.host.export(handle).map_err(code)).map(|fd| Some(Arc::new(fd)))
            }
            _ => marked.map(|()| None),
        };
        match rdma {
            Ok(rdma) => Ok(self.add(Allocation {
                count: 1,
                handle,
                size,
                owner,
                numa,
                exportable,
                imported: false,
                fabric,
                rdma,
            })),
            Err(failed) => {
                self.host.release(handle).map_err(code)?;
                Err(failed)
            }
        }
    }

    fn add(&mut self, allocation: Allocation) -> u64 {
        self.handles_made += 1;
        // Not a small number, which a program could confuse with another value.
        let number = 0x7F00_0000_0000 + 0x40 * self.handles_made;
        self.allocations.insert(number, allocation);
        number
    }

    /// The allocation of a handle, which the caller must have checked: NVIDIA's driver crashes on an invalid one.
    fn named(&self, call: &str, handle: u64) -> &Allocation {
        self.allocations.get(&handle).unwrap_or_else(|| {
            controls::refuse(&format!("{call} of handle {handle:#x}, which is not alive: NVIDIA's driver crashes here"))
        })
    }

    pub(crate) fn release(&mut self, handle: u64) -> Answer {
        let allocation = self.allocations.get_mut(&handle).ok_or(INVALID_VALUE)?;
        allocation.count -= 1;
        if allocation.count > 0 {
            return Ok(());
        }
        let host = allocation.handle;
        self.allocations.remove(&handle);
        self.host.release(host).map_err(code)
    }

    /// Returns the handle of the allocation that is mapped at an address. The driver also finds allocations whose handles were all released;
    /// this is not emulated.
    pub(crate) fn retain_at(&mut self, address: u64) -> Answer<u64> {
        let of = self.inside(address, 1)?.next().ok_or(INVALID_VALUE)?.1.of;
        self.allocations.get_mut(&of).ok_or(INVALID_VALUE)?.count += 1;
        Ok(of)
    }

    /// The start and the size of the mapping that contains an address.
    pub(crate) fn mapping(&self, address: u64) -> Answer<(u64, u64)> {
        self.inside(address, 1)?.next().map(|(&start, mapping)| (start, mapping.size)).ok_or(INVALID_VALUE)
    }

    pub(crate) fn reserve(&self, size: u64, alignment: u64) -> Answer<u64> {
        self.host.reserve(size, alignment).map_err(code)
    }

    pub(crate) fn free(&self, address: u64, size: u64) -> Answer {
        self.host.free(address, size).map_err(code)
    }

    pub(crate) fn map(&mut self, address: u64, size: u64, offset: u64, handle: u64, flags: u64) -> Answer {
        let of = handle;
        let &Allocation { handle, owner, numa, ref rdma, .. } = self.named("cuMemMap", of);
        let rdma = rdma.clone();
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        self.host.map(address, size, offset, handle).map_err(code)?;
        self.mappings.insert(address, Mapping { of, size, owner, numa, rdma, granted: BTreeMap::new() });
        Ok(())
    }

    pub(crate) fn unmap(&mut self, address: u64, size: u64) -> Answer {
        self.host.unmap(address, size).map_err(code)?;
        if let Some(copy) = self.arriving.iter().find(|copy| copy.start < address + size && address < copy.end) {
            controls::refuse(&format!(
                "cuMemUnmap under a copy to {:#x} that may still arrive: a GPU faults here",
                copy.start
            ))
        }
        while let Some((&start, _)) = self.mappings.range(address..address + size).next() {
            self.mappings.remove(&start);
        }
        Ok(())
    }

    pub(crate) fn set_access(&mut self, address: u64, size: u64, access: &AccessDesc) -> Answer {
        let wanted = match access.flags {
            0 => None,
            1 => Some(Access::ReadOnly),
            3 => Some(Access::ReadWrite),
            _ => return Err(INVALID_VALUE),
        };
        self.check_location(access.location)?;
        let device = if access.location.kind == HOST_NUMA { CPU } else { access.location.id };
        for (_, mapping) in self.inside(address, size)? {
            match device {
                CPU if !mapping.numa => return Err(NOT_SUPPORTED),
                CPU => {}
                _ if mapping.numa => {}
                _ => self.check_peer(device, mapping.owner)?,
            }
        }
        // The host backend checks the range. It has one access for all devices: the widest access of any device.
        self.host.set_access(address, size, HERE, wanted).map_err(code)?;
        for (&start, mapping) in self.mappings.range_mut(address..address + size) {
            match wanted {
                Some(access_granted) => mapping.granted.insert(device, access_granted),
                None => mapping.granted.remove(&device),
            };
            let widest = mapping.granted.values().copied().max_by_key(|granted| *granted == Access::ReadWrite);
            self.host.set_access(start, mapping.size, HERE, widest).map_err(code)?;
        }
        Ok(())
    }

    /// The mappings that overlap a range.
    fn inside(&self, address: u64, size: u64) -> Answer<impl Iterator<Item = (&u64, &Mapping)>> {
        let end = address.checked_add(size).ok_or(INVALID_VALUE)?;
        let first = self.mappings.range(..=address).next_back().map_or(address, |(start, _)| *start);
        Ok(self.mappings.range(first..end).filter(move |(start, mapping)| *start + mapping.size > address))
    }

    /// The device that owns the memory at an address.
    pub(crate) fn owner(&self, address: u64) -> Answer<c_int> {
        let mapping = || Some(self.inside(address, 1).ok()?.find(|(_, mapping)| !mapping.numa)?.1.owner);
        let owner = self.ipc.owner(address).or_else(mapping).ok_or(INVALID_VALUE)?;
        c_int::try_from(owner).map_err(|_| INVALID_VALUE)
    }

    /// First address and size of the memory that contains an address.
    pub(crate) fn range(&self, address: u64) -> Answer<(u64, u64)> {
        let mapping = || self.mapping(address).ok();
        self.ipc.range(address).or_else(mapping).ok_or(NOT_FOUND)
    }

    /// The backend for a copy that starts in a block.
    fn blocks(&self, device: c_int, address: u64, size: u64) -> Option<Answer<&HostDriver>> {
        let peers = controls::settings().peers;
        self.ipc.copy(device, peers, address, size)
    }

    /// Checks a device's access to all mappings in a range.
    fn granted(&self, device: c_int, address: u64, size: u64, enough: impl Fn(Access) -> bool) -> Answer {
        let all =
            self.inside(address, size)?.all(|(_, mapping)| mapping.granted.get(&device).copied().is_some_and(&enough));
        if all { Ok(()) } else { Err(INVALID_VALUE) }
    }

    pub(crate) fn copy_in(&mut self, device: c_int, to: u64, from: &[u8]) -> Answer {
        if let Some(host) = self.blocks(device, to, from.len() as u64) {
            return host?.copy_in(0, to, from).map_err(code);
        }
        self.granted(device, to, from.len() as u64, |access| access == Access::ReadWrite)?;
        self.host.copy_in(0, to, from).map_err(code)?;
        self.arriving.push(to..to + from.len() as u64);
        Ok(())
    }

    /// Copies out and in again. Like a copy in, it may still be in progress when the call returns.
    pub(crate) fn copy_within(&mut self, device: c_int, to: u64, from: u64, size: u64) -> Answer {
        const CHUNK: u64 = 4 << 20;
        let mut bytes = Vec::new();
        for done in (0..size).step_by(CHUNK as usize) {
            bytes.resize(CHUNK.min(size - done) as usize, 0);
            let (to, from) = (to.checked_add(done), from.checked_add(done));
            self.copy_out(device, from.ok_or(INVALID_VALUE)?, &mut bytes)?;
            self.copy_in(device, to.ok_or(INVALID_VALUE)?, &bytes)?;
        }
        Ok(())
    }

    /// The effect of the store kernel. An invalid store ruins the context: the launch has already succeeded.
    pub(crate) fn store(&mut self, device: c_int, to: u64, value: u32) -> Answer {
        if !to.is_multiple_of(4) || self.copy_in(device, to, &value.to_le_bytes()).is_err() {
            self.ruin(device);
        }
        Ok(())
    }

    /// Makes the context permanently unusable, as after a kernel's fault.
    pub(crate) fn ruin(&mut self, device: c_int) {
        self.ruined.insert(device);
    }

    /// A dma-buf of memory created for RDMA. Only for a whole mapping, so that its size is right.
    pub(crate) fn range_handle(&self, address: u64, size: u64, kind: c_uint, flags: u64) -> Answer<RawFd> {
        self.current()?;
        let mapping = self.mappings.get(&address).filter(|mapping| mapping.size == size);
        let rdma = mapping.and_then(|mapping| mapping.rdma.as_ref()).filter(|_| kind == DMA_BUF && flags == 0);
        // Without close-on-exec: vmmfd must not rely on the driver to set it.
        let fd = dup(rdma.ok_or(INVALID_VALUE)?.as_raw_fd());
        if fd < 0 { Err(UNKNOWN) } else { Ok(fd) }
    }

    /// Waits for all work of the current context.
    /// No copy is in transfer any more.
    pub(crate) fn arrived(&mut self) {
        self.arriving.clear();
    }

    /// Work of a stream that lacks access destroys its context.
    pub(crate) fn fill(&mut self, device: c_int, to: u64, value: u8, count: usize) {
        let filled = self.copy_in(device, to, &vec![value; count]);
        self.done_on_stream(device, to, filled);
    }

    pub(crate) fn copy_on_stream(&mut self, device: c_int, to: u64, from: u64, size: u64) {
        let copied = self.copy_within(device, to, from, size);
        self.done_on_stream(device, to, copied);
    }

    fn done_on_stream(&mut self, device: c_int, to: u64, result: Answer) {
        if result.is_err() {
            self.ruined.insert(device);
        }
        self.arriving.retain(|range| range.start != to);
    }

    pub(crate) fn synchronize(&mut self) -> Answer {
        self.current()?;
        self.arriving.clear();
        Ok(())
    }

    pub(crate) fn copy_out(&self, device: c_int, from: u64, to: &mut [u8]) -> Answer {
        if let Some(host) = self.blocks(device, from, to.len() as u64) {
            return host?.copy_out(0, from, to).map_err(code);
        }
        self.granted(device, from, to.len() as u64, |_| true)?;
        self.host.copy_out(0, from, to).map_err(code)
    }

    pub(crate) fn export(&self, handle: u64, kind: c_uint, flags: u64) -> Answer<OwnedFd> {
        let allocation = self.named("cuMemExportToShareableHandle", handle);
        if kind != POSIX_FD || flags != 0 {
            return Err(INVALID_VALUE);
        }
        self.host.export(allocation.handle).map_err(code)
    }

    /// The bytes of a fabric handle. They can't be imported here.
    pub(crate) fn export_fabric(&self, handle: u64, flags: u64) -> Answer<[u8; 64]> {
        let allocation = self.named("cuMemExportToShareableHandle", handle);
        if !allocation.fabric || flags != 0 {
            return Err(INVALID_VALUE);
        }
        let mut bytes = [0xFA; 64];
        bytes[..8].copy_from_slice(&handle.to_le_bytes());
        bytes[8..12].copy_from_slice(&process::id().to_le_bytes());
        Ok(bytes)
    }

    pub(crate) fn import(&mut self, fd: RawFd, kind: c_uint) -> Answer<u64> {
        if kind != POSIX_FD {
            return Err(INVALID_VALUE);
        }
        // By name, because the integer may not be an open descriptor.
        let metadata = fs::metadata(format!("/proc/self/fd/{fd}")).map_err(|_| UNKNOWN)?;
        if metadata.mode() & POOL != 0 {
            return Err(NOT_SUPPORTED);
        }
        // SAFETY: it was just open, and a caller that closes it during the call also breaks the driver API.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let handle = self.host.import(fd, metadata.size()).map_err(|error| match code(error) {
            OUT_OF_MEMORY => OUT_OF_MEMORY,
            _ => UNKNOWN,
        })?;
        let (owner, numa) = (marked(metadata.mode()), metadata.mode() & NUMA != 0);
        let size = metadata.size();
        // Assumed: an imported allocation is not created for RDMA, even if the exporter's is.
        let (fabric, rdma) = (false, None);
        Ok(self.add(Allocation {
            count: 1,
            handle,
            size,
            owner,
            numa,
            exportable: false,
            imported: true,
            fabric,
            rdma,
        }))
    }

    pub(crate) fn import_pool(&mut self, fd: RawFd, kind: c_uint, flags: u64) -> Answer<usize> {
        let Self { host, ipc, .. } = self;
        ipc.import_pool(fd, kind, flags, |fd| {
            // SAFETY: it was just open, and a caller that closes it during the call also breaks the driver API.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            let size = fs::metadata(format!("/proc/self/fd/{}", fd.as_raw_fd())).map_or(0, |metadata| metadata.size());
            host.import(fd, size).and_then(|handle| host.release(handle)).is_ok()
        })
    }

    pub(crate) fn open(&mut self, handle: &[u8; 64], flags: c_uint) -> Answer<u64> {
        let current = self.current()?;
        let devices = self.devices;
        let peers = controls::settings().peers;
        self.ipc.open(handle, flags, |owner| match owner {
            _ if owner >= devices => Err(INVALID_DEVICE),
            _ if owner != current as u32 && !peers => Err(PEER_ACCESS_UNSUPPORTED),
            _ => Ok(()),
        })
    }

    pub(crate) fn set_pool_access(&mut self, pool: *mut c_void, access: &AccessDesc) -> Answer {
        if access.location.kind != DEVICE {
            return Err(INVALID_VALUE);
        }
        self.check_device(access.location.id)?;
        self.ipc.set_pool_access(pool, access, controls::settings().peers)
    }

    /// The device of a default stream.
    pub(crate) fn default_stream(&self, stream: *mut c_void) -> Answer<c_int> {
        if stream.is_null() { self.current() } else { Err(INVALID_HANDLE) }
    }

    pub(crate) fn properties(&self, handle: u64) -> AllocationProp {
        let allocation = self.named("cuMemGetAllocationPropertiesFromHandle", handle);
        let visible = allocation.owner < self.devices;
        let location = match allocation.numa {
            true => Location { kind: HOST_NUMA, id: 0 },
            false => Location { kind: DEVICE, id: if visible { allocation.owner as c_int } else { NOT_VISIBLE } },
        };
        AllocationProp {
            kind: PINNED,
            requested_handle_types: match allocation {
                Allocation { exportable: true, .. } => POSIX_FD,
                Allocation { fabric: true, .. } => FABRIC,
                _ => 0,
            },
            location,
            win32_handle_meta_data: ptr::null(),
            compression_type: 0,
            gpu_direct_rdma_capable: allocation.rdma.is_some().into(),
            usage: 0,
            reserved: [0; 4],
        }
    }
}
