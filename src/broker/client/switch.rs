//! Another version at the addresses of an object that is mapped.

use std::{
    mem,
    sync::{Arc, OnceLock},
    time::SystemTime,
};

use super::{
    hold::{Hold, about_its_version},
    lease::{Lease, LeasedPart, Run, check_backend},
    object::{Layout, Object, ObjectPart},
};
use crate::{
    error::{BrokerError, Error, ProtocolError, RefusalCode, Result},
    memory::{Description, Device, Imported, Place, Region, Spare, exchange},
    wire::{
        Check,
        broker::{ArrayEntry, Attached, Owner},
    },
};

/// How many differences of a layout are listed.
const LISTED: usize = 8;

/// A version that is imported and mapped nowhere, ready to take the addresses of an object: see [`Object::prepare`].
///
/// It holds the version's lease, and the handles and descriptors of its segments. Dropping it ends and releases them.
#[derive(Debug)]
pub struct Prepared {
    name: String,
    version: u64,
    id: String,
    created: SystemTime,
    owner: Owner,
    metadata: Option<Attached>,
    parts: Vec<PreparedPart>,
    hold: Option<Hold>,
    /// The layout that it was compared with.
    fits: Layout,
    /// Its own.
    layout: Layout,
}

impl Prepared {
    about_its_version!();
}

#[derive(Debug)]
struct PreparedPart {
    description: Description,
    digest: Option<String>,
    arrays: Arc<Vec<ArrayEntry>>,
    spares: Vec<Spare>,
}

/// A version at addresses that stay: tensors, pointers and captured CUDA graphs that have them go on with other bytes.
///
/// [`Object::prepare`] does what takes long while the old version is in use. [`Object::switch`] is then three driver calls for each
/// piece of memory. [`Object::park`] gives the memory back and keeps the addresses, and [`Object::unpark`] fills them again.
///
/// **What the caller promises** for `switch` and `park`: that nothing uses the memory by its address meanwhile. A CUDA graph, a kernel, a
/// tensor of another library or a thread with the raw pointer may have the address, and may use it before and after. On CUDA the
/// addresses are empty between the unmapping and the end of `cuMemSetAccess`: a kernel or copy that runs then fails with
/// `CUDA_ERROR_ILLEGAL_ADDRESS` or `CUDA_ERROR_LAUNCH_FAILED`, after which the context, and all that the process has in it, is lost.
/// `cuMemUnmap` does not wait for such work. `switch`, `park` and `unpark` wait for all work of the devices' primary contexts, where the
/// CUDA runtime, PyTorch and cudarc have theirs; contexts that a program made itself (`cuCtxCreate`) it must synchronise itself. On the
/// host backend a thread that reads by address meanwhile finds old or new bytes, page by page. While an object is parked, a read by
/// address is a fault on both.
///
/// **What safe code can't do** is read memory that is not there: the calls take the object mutably, and fail with [`Error::Misuse`] while
/// an [`Array`](crate::memory::Array) or an `Arc` of its memory is alive. So drop those first, or keep only their addresses. Of a parked
/// object nothing can be read: [`ObjectPart::memory`] and [`ObjectPart::array`] fail, and [`ObjectPart::pieces`] have 0 bytes.
///
/// ```
/// # use vmmfd::{
/// #     broker::{Client, Condition, Get, Put, PutPart, Server, ServerConfig},
/// #     channel::{Cancel, CancelReason},
/// #     driver::{Backend, Choice, open},
/// #     memory::{Device, Region, Selector, Shared, Spec},
/// #     session::Config,
/// # };
/// # fn main() -> vmmfd::Result<()> {
/// # let folder = std::env::temp_dir().join(format!("vmmfd-switch-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder).unwrap();
/// # let path = folder.join("broker.sock");
/// # let cancel = Cancel::new()?;
/// # let server = Server::bind(&path, ServerConfig::default(), &cancel)?;
/// # let serving = std::thread::spawn(move || server.run());
/// # let driver = open(Choice::Only(Backend::Host))?.driver;
/// # let device = Device::find(&driver, Selector::default())?;
/// # let client = Client::connect(&path, &Config::default())?;
/// # let put = |bytes: &[u8]| -> vmmfd::Result<()> {
/// #     let memory = Shared::create(&device, Spec::vmm(1 << 20))?;
/// #     memory.copy_in(0, bytes)?;
/// #     let put = Put::new("weights").condition(Condition::Any).part(PutPart::of("all", &memory)?);
/// #     client.put(&put).map(drop)
/// # };
/// # put(b"one")?;
/// let mut object = client.get(&Get::new("weights"))?.open(&driver, None)?;
/// let address = object.parts()[0].memory()?.address();                    // For tensors, kernels and graphs.
/// # put(b"two")?;
/// let next = object.prepare(client.get(&Get::new("weights").newer_than(1))?)?;
/// let old = object.switch(next)?;                                         // Nothing uses the memory now.
/// drop(old);                                                              // Its lease ends, its memory is released.
/// let memory = object.parts()[0].memory()?;
/// let mut bytes = [0; 3];
/// memory.copy_out(0, &mut bytes)?;
/// assert_eq!((object.version(), memory.address(), &bytes), (2, address, b"two"));
///
/// object.park(false)?;                                                    // Takes no memory of the device now.
/// object.unpark(client.get(&Get::new("weights"))?)?;                      // The newest version there is.
/// assert_eq!(object.parts()[0].memory()?.address(), address);
/// # drop(object);
/// # cancel.cancel(CancelReason::Program);
/// # serving.join().unwrap().ok();
/// # std::fs::remove_dir_all(&folder).unwrap();
/// # Ok(())
/// # }
/// ```
impl Object {
    /// Imports a version that is to take the addresses of this one: maps it elsewhere once, so that the driver has taken it, unmaps it
    /// there, and keeps the handles. The old version stays in use meanwhile; the device holds both.
    ///
    /// It must fit in the place of what is mapped, or was when this was parked:
    /// - the same parts, by name, of each the same pieces: as many, which begin at the same bytes;
    /// - of each piece at least the bytes of data that there are, and no more memory than addresses are reserved;
    /// - each array that is mapped, by name, with the same descriptor. Others may be added.
    ///
    /// So whatever the old version had at an address, the new one has there. How the memory is cut into segments may differ, and
    /// metadata, digests and the arrays' attributes. It may be of another object's name.
    ///
    /// Blocks for the driver's calls. Needs as many free addresses, for a moment.
    ///
    /// # Errors
    /// [`Error::Broker`] with the code `differs` and one sentence that lists what does not fit, before anything is imported; those of
    /// [`Lease::open`]. The lease has ended then.
    ///
    /// Driver calls, for each piece: those of [`Imported::open`](crate::memory::Imported::open), `cuMemUnmap`, `cuMemAddressFree`.
    #[doc(alias("cuMemUnmap", "cuMemAddressFree"))]
    pub fn prepare(&self, lease: Lease) -> Result<Prepared> {
        let Lease { hold, name, version, id, created, owner, metadata, mut parts, backend } = lease;
        if let Some(piece) = self.parts.iter().find_map(|part| part.memory.first()) {
            check_backend(&name, &backend, piece.device().driver())?;
        }
        let here = || format!("version {} of `{}`", self.version, self.name);
        let problems = |problems: Vec<String>| {
            let more = problems.len().saturating_sub(LISTED);
            let mut list = problems.into_iter().take(LISTED).collect::<Vec<_>>().join("; ");
            if more > 0 {
                list += &format!("; and {more} more");
            }
            let message = format!("version {version} of `{name}` does not fit at the addresses of {}: {list}", here());
            Err(BrokerError::new(RefusalCode::Differs, message).into())
        };
        let (old, new): (Vec<_>, Vec<_>) =
            (self.parts.iter().map(Shape::of_mapped).collect(), parts.iter().map(Shape::of_leased).collect());
        let mut found = lacks(&old, &new);
        found.extend(exceeds(&old, &new));
        if !found.is_empty() {
            return problems(found);
        }
        let layout = if lacks(&new, &old).is_empty() { self.layout.clone() } else { Layout::default() };
        let mut prepared = Vec::with_capacity(parts.len());
        for part in &self.parts {
            // It was found above.
            let Some(at) = parts.iter().position(|next| next.name == part.name) else { continue };
            let next = parts.swap_remove(at);
            let part = PreparedPart::of(next, part).inspect_err(|error| {
                // A driver that fails here may fail for reasons of this process.
                if matches!(error, Error::Peer(_)) {
                    hold.report(error);
                }
            });
            prepared.push(part?);
        }
        let (hold, fits) = (Some(hold), self.layout.clone());
        Ok(Prepared { name, version, id, created, owner, metadata, parts: prepared, hold, fits, layout })
    }

    /// Puts a version that was prepared at the addresses of this one, and returns the old one, which can be switched back to: drop it
    /// to end its lease and release its memory.
    ///
    /// The caller promises that nothing uses the memory by its address meanwhile: see above what happens else. Waits until all work in
    /// the devices' primary contexts is done, for as long as that takes (and makes the context, if the process has none); then blocks
    /// for the driver's calls. Name, version, id, metadata and arrays are the new version's afterwards.
    ///
    /// # Errors
    /// Nothing is changed after [`Error::Misuse`]: an array, an `Arc` or a mirror of the memory is alive, this is parked, or the version was
    /// prepared for another object or layout; nor after [`Error::Driver`] if the work before failed. After
    /// [`MemoryError::NotExchanged`](crate::error::MemoryError::NotExchanged) the old version is mapped again; if that failed too, it
    /// has both errors, and this is parked with its lease. What was prepared is released in all cases.
    ///
    /// Driver calls: `cuCtxSynchronize`; for each piece `cuMemUnmap`, `cuMemMap` for each segment, `cuMemSetAccess` once. On the host
    /// backend mmap(2) with `MAP_FIXED`, once for each segment.
    #[doc(alias("cuCtxSynchronize", "cuMemUnmap", "cuMemMap", "cuMemSetAccess"))]
    pub fn switch(&mut self, next: Prepared) -> Result<Prepared> {
        if self.is_parked() {
            let problem = format!("`{}` is parked, so there is nothing to switch from: unpark it", self.name);
            return Err(Error::Misuse { problem });
        }
        self.put_in_place(next)
    }

    /// Gives the memory back: unmaps it and releases its handles and descriptors. The addresses stay reserved for [`Object::unpark`].
    ///
    /// With `keep_lease` the broker keeps this version and counts this process among its readers, so that it can be got by its number
    /// again for as long as its name exists. Without, the lease ends, and where neither the broker nor another process has the memory,
    /// it is free. If it is parked already, the lease ends unless it is to be kept. Without descriptors this process can't offer the
    /// version back to a broker that lost it.
    ///
    /// The caller promises what [`Object::switch`] says. Waits as that does.
    ///
    /// # Errors
    /// Those of [`Object::switch`]: as it was, or parked with its lease.
    ///
    /// Driver calls: `cuCtxSynchronize`, `cuMemUnmap`, `cuMemRelease`.
    #[doc(alias("cuCtxSynchronize", "cuMemUnmap", "cuMemRelease"))]
    pub fn park(&mut self, keep_lease: bool) -> Result<()> {
        if !self.is_parked() {
            let mut places = Vec::new();
            for part in &mut self.parts {
                let pieces = only_owners(&part.name, &mut part.memory)?;
                places.extend(
                    pieces.into_iter().zip(&mut part.remains).map(|(memory, rest)| Place::new(memory, rest, None)),
                );
            }
            exchange(&mut places)?;
        }
        if !keep_lease {
            self.hold = None;
        }
        Ok(())
    }

    /// Whether it is parked, by [`Object::park`] or because neither of two versions could be mapped.
    pub fn is_parked(&self) -> bool {
        self.parts.iter().flat_map(|part| &part.memory).any(|piece| piece.is_parked())
    }

    /// Fills the addresses again, with the same version or another: `lease` is of the version that is to be there, which must fit as
    /// [`Object::prepare`] says. A lease that was kept ends.
    ///
    /// Get the newest version as at first, and the same one by [`Get::version`](super::Get::version): it is there if the lease was kept,
    /// or if the broker has it anyway.
    ///
    /// # Errors
    /// [`Error::Misuse`] if it is not parked; those of [`Object::prepare`]; [`Error::Driver`]. It stays parked then, and can be tried
    /// again.
    ///
    /// Driver calls: those of [`Object::prepare`] and [`Object::switch`].
    pub fn unpark(&mut self, lease: Lease) -> Result<()> {
        if !self.is_parked() {
            let problem = format!("`{}` is not parked: prepare the version, and switch to it", self.name);
            return Err(Error::Misuse { problem });
        }
        let next = self.prepare(lease)?;
        self.put_in_place(next).map(drop)
    }

    /// Puts a version in the place of what is mapped, or of nothing. Returns what was there.
    fn put_in_place(&mut self, mut next: Prepared) -> Result<Prepared> {
        if !next.fits.is(&self.layout) {
            let problem = format!(
                "version {} of `{}` was prepared for another layout than that of version {} of `{}`: prepare it again",
                next.version, next.name, self.version, self.name
            );
            return Err(Error::Misuse { problem });
        }
        let mut places = Vec::new();
        for (part, next) in self.parts.iter_mut().zip(&mut next.parts) {
            let pieces = only_owners(&part.name, &mut part.memory)?.into_iter().zip(&mut part.remains);
            let with = pieces.zip(&mut next.spares);
            places.extend(with.map(|((memory, rest), spare)| Place::new(memory, rest, Some(spare))));
        }
        exchange(&mut places)?;
        drop(places);
        for (part, next) in self.parts.iter_mut().zip(&mut next.parts) {
            mem::swap(&mut part.description, &mut next.description);
            mem::swap(&mut part.digest, &mut next.digest);
            mem::swap(&mut part.arrays, &mut next.arrays);
            part.index = OnceLock::new();
        }
        mem::swap(&mut self.name, &mut next.name);
        mem::swap(&mut self.version, &mut next.version);
        mem::swap(&mut self.id, &mut next.id);
        mem::swap(&mut self.created, &mut next.created);
        mem::swap(&mut self.owner, &mut next.owner);
        mem::swap(&mut self.metadata, &mut next.metadata);
        mem::swap(&mut self.hold, &mut next.hold);
        mem::swap(&mut self.layout, &mut next.layout);
        next.fits = next.layout.clone();
        Ok(next)
    }
}

/// The memory of a part, if nothing else in this process has it.
fn only_owners<'a>(part: &str, memory: &'a mut [Arc<Imported>]) -> Result<Vec<&'a mut Imported>> {
    let others: usize = memory.iter().map(|piece| Arc::strong_count(piece) + Arc::weak_count(piece) - 1).sum();
    let alone: Option<Vec<_>> = memory.iter_mut().map(Arc::get_mut).collect();
    alone.ok_or_else(|| {
        let problem = format!(
            "the memory of part `{part}` is still used, by {others} arrays or other owners of it: drop them, and keep their addresses"
        );
        Error::Misuse { problem }
    })
}

impl PreparedPart {
    /// Imports a part for the device that uses the memory in whose place it is to be.
    fn of(next: LeasedPart, part: &ObjectPart) -> Result<Self> {
        let LeasedPart { description, digest, arrays, runs, .. } = next;
        let mut spares = Vec::with_capacity(runs.len());
        for (run, piece) in runs.into_iter().zip(&part.memory) {
            let (driver, device) = (piece.device().driver(), piece.device());
            let device = Device::for_memory_of(driver, &description.device, Some(device))?;
            let (memory, segments) = run.map(&device, &description, false)?;
            spares.push(Spare::of(memory, segments)?);
        }
        Ok(Self { description, digest, arrays, spares })
    }
}

/// What of a part must be the same, or be there, for another version to take its place.
struct Shape<'a> {
    name: &'a str,
    pieces: Vec<Piece>,
    arrays: &'a [ArrayEntry],
}

#[derive(Clone, Copy)]
struct Piece {
    start: u64,
    /// Bytes of data.
    size: u64,
    /// Bytes of memory, or of addresses that are reserved for it.
    room: u64,
}

impl<'a> Shape<'a> {
    fn of_mapped(part: &'a ObjectPart) -> Self {
        let piece =
            |memory: &Arc<Imported>| Piece { start: memory.start(), size: memory.data_size(), room: memory.room() };
        Self { name: &part.name, pieces: part.memory.iter().map(piece).collect(), arrays: &part.arrays }
    }

    fn of_leased(part: &'a LeasedPart) -> Self {
        let piece = |run: &Run| {
            let (start, room) = (run.part.offset, run.part.size);
            Piece { start, size: part.description.size.min(start.saturating_add(room)).saturating_sub(start), room }
        };
        Self { name: &part.name, pieces: part.runs.iter().map(piece).collect(), arrays: &part.arrays }
    }

    /// The arrays whose bytes are in the memory.
    fn mapped_arrays(&self) -> impl Iterator<Item = &'a ArrayEntry> {
        let inside = |entry: &&ArrayEntry| {
            let span = entry.array.span();
            span.is_ok_and(|span| {
                let holds = |piece: &Piece| piece.start <= span.start && span.end <= piece.start + piece.size;
                self.pieces.iter().any(holds)
            })
        };
        self.arrays.iter().filter(inside)
    }
}

/// What the first have and the second lack: a sentence's part for each.
fn lacks(old: &[Shape<'_>], new: &[Shape<'_>]) -> Vec<String> {
    let mut found = Vec::new();
    let absent = |from: &[Shape<'_>], part: &Shape<'_>| from.iter().all(|other| other.name != part.name);
    found.extend(old.iter().filter(|part| absent(new, part)).map(|part| format!("part `{}` is missing", part.name)));
    found.extend(new.iter().filter(|part| absent(old, part)).map(|part| format!("part `{}` is new", part.name)));
    for (part, next) in pairs(old, new) {
        let name = part.name;
        if part.pieces.len() != next.pieces.len() {
            found.push(format!("part `{name}` is in {} pieces and not {}", next.pieces.len(), part.pieces.len()));
            continue;
        }
        for (piece, other) in part.pieces.iter().zip(&next.pieces) {
            if piece.start != other.start {
                found.push(format!("a piece of part `{name}` begins at byte {} and not {}", other.start, piece.start));
            } else if other.size < piece.size {
                found.push(format!(
                    "part `{name}` has {} bytes from byte {} on and not {}",
                    other.size, other.start, piece.size
                ));
            }
        }
        let others: std::collections::HashMap<&str, &ArrayEntry> =
            next.arrays.iter().map(|entry| (entry.name.as_str(), entry)).collect();
        for ArrayEntry { name, array, .. } in part.mapped_arrays() {
            match others.get(name.as_str()) {
                Some(other) if other.array == *array => {}
                Some(ArrayEntry { array: other, .. }) => {
                    let (at, before) = (other.offset, array.offset);
                    found.push(format!("array `{name}` is {other} at byte {at} and not {array} at byte {before}"));
                }
                None => found.push(format!("array `{name}` is missing")),
            }
        }
    }
    found
}

/// Of the second, what has more memory than there are addresses for.
fn exceeds(old: &[Shape<'_>], new: &[Shape<'_>]) -> Vec<String> {
    let pieces = pairs(old, new).flat_map(|(part, next)| {
        part.pieces.iter().zip(&next.pieces).map(|(piece, other)| (part.name, *piece, *other))
    });
    let too_large = pieces.filter(|(_, piece, other)| other.room > piece.room);
    too_large
        .map(|(name, piece, other)| {
            format!(
                "part `{name}` has {} bytes of memory where {} bytes of addresses are reserved",
                other.room, piece.room
            )
        })
        .collect()
}

/// The parts that both have.
fn pairs<'a, 'b>(old: &'b [Shape<'a>], new: &'b [Shape<'a>]) -> impl Iterator<Item = (&'b Shape<'a>, &'b Shape<'a>)> {
    old.iter().filter_map(|part| Some((part, new.iter().find(|next| next.name == part.name)?)))
}
