//! Memory of `cuMemAlloc` and of pools, page-locked memory, and sharing without a descriptor for each allocation.
//!
//! Each block is host memory with an open descriptor, so that another process of the same user opens it as `/proc/PID/fd/N`. A freed block has
//! none, which shows stale handles.

use std::{
    alloc::{Layout, alloc, dealloc},
    collections::{BTreeMap, BTreeSet},
    ffi::{c_int, c_uint, c_void},
    fs::{self, File, OpenOptions, Permissions},
    hash::{BuildHasher, Hasher, RandomState},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd, RawFd},
        unix::fs::{FileExt, MetadataExt, PermissionsExt},
    },
    process, ptr,
};

use vmmfd::{
    driver::Access,
    internals::{Handle, HostDriver, Properties, Verbs},
};

use crate::{
    AccessDesc, Answer, PoolProps,
    numbers::{
        DEVICE, HERE, INVALID_CONTEXT, INVALID_DEVICE, INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY,
        PINNED, POSIX_FD, UNKNOWN, code, packed, unpacked,
    },
};

/// The sizes of the memory of blocks are multiples of it.
const UNIT: u64 = 2 << 20;

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
const LAZY_ENABLE_PEER_ACCESS: c_uint = 1;

unsafe extern "C" {
    /// The C library's function. It leaves the new descriptor open across exec; the standard library does not.
    pub(crate) safe fn dup(fd: c_int) -> c_int;
}

/// The state.
pub(crate) struct Ipc {
    host: HostDriver,
    /// By first address.
    blocks: BTreeMap<u64, Block>,
    pools: BTreeMap<usize, Pool>,
    pools_made: usize,
    page_locked: BTreeMap<usize, Layout>,
}

struct Block {
    size: u64,
    handle: Handle,
    /// The size of the memory.
    whole: u64,
    memfd: File,
    inode: u64,
    /// The number of the owning device.
    owner: u32,
    pool: Option<usize>,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Allocated,
    /// The number of openings.
    Opened(usize),
    Pooled,
    Imported,
}

impl Block {
    /// Whether another process allocated it, or this one, which then imported it.
    fn is_foreign(&self) -> bool {
        matches!(self.kind, Kind::Opened(_) | Kind::Imported)
    }
}

struct Pool {
    id: u64,
    owner: u32,
    /// The exported descriptor, if the pool is exportable.
    marker: Option<OwnedFd>,
    /// Whether it was exported. Before that, its pointers can't be exported.
    exported: bool,
    imported: bool,
    granted: BTreeSet<c_int>,
}

/// The 64 bytes of a handle, or of an exported pointer.
struct Ticket {
    pid: u32,
    fd: u32,
    inode: u64,
    /// 0 outside of pools.
    pool: u64,
    size: u64,
}

const MAGIC: u64 = u64::from_le_bytes(*b"fakeIPC\x01");

impl Ticket {
    fn bytes(&self) -> [u8; 64] {
        packed([MAGIC, self.pid.into(), self.fd.into(), self.inode, self.pool, self.size, 0, 0])
    }

    fn read(bytes: &[u8; 64]) -> Answer<Self> {
        match unpacked(bytes) {
            [MAGIC, pid, fd, inode, pool, size, ..] => Ok(Self { pid: pid as u32, fd: fd as u32, inode, pool, size }),
            _ => Err(INVALID_VALUE),
        }
    }

    /// Opens the memory, if its process still has it.
    fn memory(&self) -> Answer<File> {
        let open = OpenOptions::new().read(true).write(true).open(format!("/proc/{}/fd/{}", self.pid, self.fd));
        let memfd = open.map_err(|_| INVALID_VALUE)?;
        let metadata = memfd.metadata().map_err(|_| INVALID_VALUE)?;
        if metadata.ino() == self.inode && self.size <= metadata.size() { Ok(memfd) } else { Err(INVALID_VALUE) }
    }

    /// Whether the ticket's process is gone. A zombie has no executable.
    fn is_orphan(&self) -> bool {
        fs::read_link(format!("/proc/{}/exe", self.pid)).is_err()
    }
}

fn random() -> u64 {
    RandomState::new().build_hasher().finish() | 1
}

impl Ipc {
    pub(crate) fn new() -> vmmfd::Result<Self> {
        Ok(Self {
            host: HostDriver::new()?,
            blocks: BTreeMap::new(),
            pools: BTreeMap::new(),
            pools_made: 0,
            page_locked: BTreeMap::new(),
        })
    }

    /// The numbers of blocks, pools and page-locked allocations.
    pub(crate) fn live(&self) -> [u64; 3] {
        [self.blocks.len(), self.pools.len(), self.page_locked.len()].map(|count| count as u64)
    }

    /// The size of a device's memory that this process allocated.
    pub(crate) fn held(&self, owner: u32) -> u64 {
        self.blocks.values().filter(|block| !block.is_foreign() && block.owner == owner).map(|block| block.whole).sum()
    }

    // The memory

    /// Maps memory as a block.
    fn add(&mut self, handle: Handle, memfd: File, size: u64, of: (u32, Option<usize>, Kind)) -> Answer<u64> {
        let (owner, pool, kind) = of;
        let metadata = memfd.metadata().map_err(|_| UNKNOWN)?;
        let (whole, inode) = (metadata.size(), metadata.ino());
        let address = self.host.reserve(whole, 0).map_err(code)?;
        let mapped = self.host.map(address, whole, 0, handle);
        mapped.and_then(|()| self.host.set_access(address, whole, HERE, Some(Access::ReadWrite))).map_err(code)?;
        self.blocks.insert(address, Block { size, handle, whole, memfd, inode, owner, pool, kind });
        Ok(address)
    }

    fn allocate_block(&mut self, size: u64, owner: u32, pool: Option<usize>) -> Answer<u64> {
        let whole = size.checked_next_multiple_of(UNIT).ok_or(OUT_OF_MEMORY)?;
        let properties = Properties { location: HERE, exportable: true, immutable: false, gpu_direct_rdma: false };
        let handle = self.host.create(whole, &properties).map_err(code)?;
        let memfd = self.host.export(handle).map_err(code)?;
        mark(&memfd, 0, owner)?;
        let kind = if pool.is_some() { Kind::Pooled } else { Kind::Allocated };
        self.add(handle, memfd.into(), size, (owner, pool, kind))
    }

    /// The address of another process's block, which is mapped once.
    fn foreign_block(&mut self, ticket: &Ticket, of: (u32, Option<usize>, Kind)) -> Answer<u64> {
        let memfd = ticket.memory()?;
        let is_it = |block: &Block| block.is_foreign() && (block.inode, block.pool) == (ticket.inode, of.1);
        if let Some((&address, _)) = self.blocks.iter().find(|(_, block)| is_it(block)) {
            return Ok(address);
        }
        let whole = memfd.metadata().map_err(|_| INVALID_VALUE)?.size();
        let handle = self.host.import(memfd.as_fd(), whole).map_err(code)?;
        self.add(handle, memfd, ticket.size, of)
    }

    /// Removes a block. Other processes that have the memory open keep it.
    fn drop_block(&mut self, address: u64) -> Answer {
        let block = self.blocks.remove(&address).ok_or(INVALID_VALUE)?;
        self.host.unmap(address, block.whole).map_err(code)?;
        self.host.free(address, block.whole).map_err(code)?;
        self.host.release(block.handle).map_err(code)
    }

    fn block(&self, address: u64) -> Option<(u64, &Block)> {
        let (&start, block) = self.blocks.range(..=address).next_back()?;
        (address - start < block.size).then_some((start, block))
    }

    /// The number of the device that owns an address, if this module allocated it.
    pub(crate) fn owner(&self, address: u64) -> Option<u32> {
        self.block(address).map(|(_, block)| block.owner)
    }

    /// `cuMemGetAddressRange`, for memory of this module.
    pub(crate) fn range(&self, address: u64) -> Option<(u64, u64)> {
        self.block(address).map(|(start, block)| (start, block.size))
    }

    /// The backend for a copy that starts in this module's memory, if the copy is allowed.
    pub(crate) fn copy(&self, device: c_int, peers: bool, address: u64, size: u64) -> Option<Answer<&HostDriver>> {
        let (start, block) = self.block(address)?;
        let granted = match block.pool {
            Some(pool) => self.pools.get(&pool).is_some_and(|pool| pool.granted.contains(&device)),
            None => peers || i64::from(block.owner) == i64::from(device),
        };
        let whole = size <= block.size - (address - start);
        Some(if granted && whole { Ok(&self.host) } else { Err(INVALID_VALUE) })
    }

    fn ticket(&self, start: u64, pool: u64) -> [u8; 64] {
        let Block { ref memfd, inode, size, .. } = self.blocks[&start];
        Ticket { pid: process::id(), fd: memfd.as_raw_fd() as u32, inode, pool, size }.bytes()
    }

    // Legacy handles

    pub(crate) fn allocate(&mut self, device: c_int, size: u64) -> Answer<u64> {
        if size == 0 { Err(INVALID_VALUE) } else { self.allocate_block(size, device as u32, None) }
    }

    pub(crate) fn deallocate(&mut self, address: u64) -> Answer {
        match self.blocks.get(&address) {
            Some(block) if block.kind == Kind::Allocated => self.drop_block(address),
            _ => Err(INVALID_VALUE),
        }
    }

    pub(crate) fn handle(&self, address: u64) -> Answer<[u8; 64]> {
        match self.block(address) {
            Some((start, block)) if block.kind == Kind::Allocated => Ok(self.ticket(start, 0)),
            _ => Err(INVALID_VALUE),
        }
    }

    pub(crate) fn open(
        &mut self,
        handle: &[u8; 64],
        flags: c_uint,
        visible: impl FnOnce(u32) -> Answer,
    ) -> Answer<u64> {
        let ticket = Ticket::read(handle)?;
        if flags != LAZY_ENABLE_PEER_ACCESS || ticket.pool != 0 {
            return Err(INVALID_VALUE);
        }
        if ticket.pid == process::id() {
            return Err(INVALID_CONTEXT);
        }
        if ticket.is_orphan() {
            return Err(INVALID_HANDLE);
        }
        let owner = marked(ticket.memory()?.metadata().map_err(|_| INVALID_VALUE)?.mode());
        visible(owner)?;
        let address = self.foreign_block(&ticket, (owner, None, Kind::Opened(0)))?;
        match self.blocks.get_mut(&address).map(|block| &mut block.kind) {
            Some(Kind::Opened(count)) => *count += 1,
            _ => return Err(UNKNOWN),
        }
        Ok(address)
    }

    pub(crate) fn close(&mut self, address: u64) -> Answer {
        match self.blocks.get_mut(&address).map(|block| &mut block.kind) {
            Some(Kind::Opened(1)) => self.drop_block(address),
            Some(Kind::Opened(count)) => {
                *count -= 1;
                Ok(())
            }
            _ => Err(INVALID_VALUE),
        }
    }

    // Pools

    pub(crate) fn create_pool(&mut self, properties: &PoolProps) -> Answer<usize> {
        let plain = properties.kind == PINNED
            && properties.location.kind == DEVICE
            && properties.win32_security_attributes.is_null()
            && properties.max_size == 0
            && properties.usage == 0
            && properties.reserved == [0; 54];
        if !plain || ![0, POSIX_FD].contains(&properties.handle_types) {
            return Err(INVALID_VALUE);
        }
        let (id, owner) = (random(), properties.location.id as u32);
        let marker = if properties.handle_types == POSIX_FD { Some(self.marker(id, owner)?) } else { None };
        Ok(self.add_pool(Pool {
            id,
            owner,
            marker,
            exported: false,
            imported: false,
            granted: [owner as c_int].into(),
        }))
    }

    /// The descriptor of a pool: a file with the pool's identity and a unique mode.
    fn marker(&self, id: u64, owner: u32) -> Answer<OwnedFd> {
        let properties = Properties { location: HERE, exportable: true, immutable: false, gpu_direct_rdma: false };
        let handle = self.host.create(UNIT, &properties).map_err(code)?;
        let marker = self.host.export(handle).map_err(code)?;
        self.host.release(handle).map_err(code)?;
        mark(&marker, POOL, owner)?;
        let file = File::from(marker);
        file.write_all_at(&id.to_le_bytes(), 0).map_err(|_| UNKNOWN)?;
        Ok(file.into())
    }

    fn add_pool(&mut self, pool: Pool) -> usize {
        self.pools_made += 1;
        // Not a small number, like other handles.
        let number = 0x7E00_0000_0000 + 0x40 * self.pools_made;
        self.pools.insert(number, pool);
        number
    }

    fn pool(&self, pool: *mut c_void) -> Answer<(usize, &Pool)> {
        self.pools.get(&pool.addr()).map(|found| (pool.addr(), found)).ok_or(INVALID_VALUE)
    }

    pub(crate) fn destroy_pool(&mut self, pool: *mut c_void) -> Answer {
        let (number, _) = self.pool(pool)?;
        if self.blocks.values().any(|block| block.pool == Some(number)) {
            return Err(INVALID_VALUE);
        }
        self.pools.remove(&number);
        Ok(())
    }

    pub(crate) fn export_pool(&mut self, pool: *mut c_void, kind: c_uint, flags: u64) -> Answer<RawFd> {
        let pool = self.pools.get_mut(&pool.addr()).ok_or(INVALID_VALUE)?;
        let marker = pool.marker.as_ref().filter(|_| kind == POSIX_FD && flags == 0).ok_or(INVALID_VALUE)?;
        // Without close-on-exec: vmmfd must not rely on the driver to set it.
        let fd = dup(marker.as_raw_fd());
        pool.exported |= fd >= 0;
        if fd < 0 { Err(UNKNOWN) } else { Ok(fd) }
    }

    /// `memory` reports whether a descriptor is other memory of this driver.
    pub(crate) fn import_pool(
        &mut self,
        fd: RawFd,
        kind: c_uint,
        flags: u64,
        memory: impl FnOnce(RawFd) -> bool,
    ) -> Answer<usize> {
        if kind != POSIX_FD || flags != 0 {
            return Err(INVALID_VALUE);
        }
        let file = File::open(format!("/proc/self/fd/{fd}")).map_err(|_| UNKNOWN)?;
        let mode = file.metadata().map_err(|_| UNKNOWN)?.mode();
        if mode & POOL == 0 {
            return Err(if memory(fd) { NOT_SUPPORTED } else { UNKNOWN });
        }
        let mut id = [0; 8];
        file.read_exact_at(&mut id, 0).map_err(|_| UNKNOWN)?;
        let (id, owner) = (u64::from_le_bytes(id), marked(mode));
        // Importing a pool again returns the same handle, without counting.
        let known = self.pools.iter().find(|(_, pool)| pool.imported && pool.id == id);
        if let Some((&number, _)) = known {
            return Ok(number);
        }
        let granted = [owner as c_int].into();
        Ok(self.add_pool(Pool { id, owner, marker: None, exported: false, imported: true, granted }))
    }

    pub(crate) fn set_pool_access(&mut self, pool: *mut c_void, access: &AccessDesc, peers: bool) -> Answer {
        let (number, found) = self.pool(pool)?;
        let own = found.owner as c_int == access.location.id;
        match access.flags {
            0 if own => return Err(INVALID_DEVICE),
            1 => return Err(NOT_SUPPORTED),
            3 if !own && !peers => return Err(PEER_ACCESS_UNSUPPORTED),
            0 | 3 => {}
            _ => return Err(INVALID_VALUE),
        }
        let pool = self.pools.get_mut(&number).ok_or(INVALID_VALUE)?;
        if access.flags == 3 {
            pool.granted.insert(access.location.id);
        } else {
            pool.granted.remove(&access.location.id);
        }
        Ok(())
    }

    pub(crate) fn allocate_from(&mut self, pool: *mut c_void, size: u64) -> Answer<u64> {
        let (number, found) = self.pool(pool)?;
        let owner = found.owner;
        match size {
            _ if found.imported => Err(INVALID_VALUE),
            0 => Ok(0),
            _ => self.allocate_block(size, owner, Some(number)),
        }
    }

    /// Frees memory of a pool. An imported pointer is freed at once, even after several imports.
    pub(crate) fn free(&mut self, address: u64) -> Answer {
        match self.blocks.get(&address) {
            Some(block) if matches!(block.kind, Kind::Pooled | Kind::Imported) => self.drop_block(address),
            _ => Err(INVALID_VALUE),
        }
    }

    pub(crate) fn export_pointer(&self, address: u64) -> Answer<[u8; 64]> {
        let block = self.blocks.get(&address).filter(|block| block.kind == Kind::Pooled).ok_or(INVALID_VALUE)?;
        let pool = block.pool.and_then(|pool| self.pools.get(&pool));
        let pool = pool.filter(|pool| pool.exported).ok_or(INVALID_VALUE)?;
        Ok(self.ticket(address, pool.id))
    }

    pub(crate) fn import_pointer(&mut self, pool: *mut c_void, data: &[u8; 64]) -> Answer<u64> {
        let (number, found) = self.pool(pool)?;
        let ticket = Ticket::read(data)?;
        if !found.imported || ticket.pool != found.id {
            return Err(INVALID_VALUE);
        }
        let owner = found.owner;
        self.foreign_block(&ticket, (owner, Some(number), Kind::Imported))
    }

    // Page-locked memory

    pub(crate) fn lock(&mut self, size: usize, flags: c_uint) -> Answer<*mut c_void> {
        if flags > 7 {
            return Err(INVALID_VALUE);
        }
        if size == 0 {
            return Ok(ptr::null_mut());
        }
        let layout = Layout::from_size_align(size, 4096).map_err(|_| OUT_OF_MEMORY)?;
        if size as u64 > self.host.memory_info(0).map_err(code)?.free {
            return Err(OUT_OF_MEMORY);
        }
        // SAFETY: the size is not zero.
        let start = unsafe { alloc(layout) };
        if start.is_null() {
            return Err(OUT_OF_MEMORY);
        }
        // The driver may return memory with any contents.
        // SAFETY: it was just allocated with this size.
        unsafe { start.write_bytes(0xA5, size) };
        self.page_locked.insert(start.addr(), layout);
        Ok(start.cast())
    }

    pub(crate) fn unlock(&mut self, start: *mut c_void) -> Answer {
        let layout = self.page_locked.remove(&start.addr()).ok_or(INVALID_VALUE)?;
        // SAFETY: by the table, it was allocated with this layout, and it is freed once.
        unsafe { dealloc(start.cast(), layout) };
        Ok(())
    }
}

pub(crate) const PEER_ACCESS_UNSUPPORTED: u32 = 217;

// A memfd's permission bits describe it to other processes.

/// The owner is not device 0: the read and write bits of group and others encode its number.
const OWNED: u32 = 0o1000;
pub(crate) const POOL: u32 = 0o2000;
/// Host memory of a NUMA node.
pub(crate) const NUMA: u32 = 0o4000;

/// Sets the bits. Ordinary memory of device 0 is not changed.
pub(crate) fn mark(memfd: &OwnedFd, kind: u32, owner: u32) -> Answer {
    if kind == 0 && owner == 0 {
        return Ok(());
    }
    let mode = OWNED | kind | 0o600 | (owner & 0b11) << 1 | (owner >> 2 & 0b11) << 4;
    let memfd = File::from(memfd.try_clone().map_err(|_| UNKNOWN)?);
    memfd.set_permissions(Permissions::from_mode(mode)).map_err(|_| UNKNOWN)
}

/// The owner set by [`mark`].
pub(crate) fn marked(mode: u32) -> u32 {
    if mode & OWNED == 0 { 0 } else { mode >> 1 & 0b11 | (mode >> 4 & 0b11) << 2 }
}
