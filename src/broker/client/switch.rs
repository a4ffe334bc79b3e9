//! Replaces a mapped object with another version at the same addresses.

use std::{
    mem,
    sync::{Arc, OnceLock},
    time::SystemTime,
};

use super::{
    holdings::{Header, Hold, PartHeader, version_accessors},
    lease::{Lease, LeasedPart, LeasedRun, check_backend},
    object::{Layout, Object, ObjectPart},
};
use crate::{
    error::{BrokerError, Error, ProtocolError, RefusalCode, Result},
    memory::{Device, Imported, Place, Region, Spare, exchange},
    wire::{
        Check,
        broker::{ArrayEntry, Owner},
    },
};

/// The most differences that an error lists.
const LISTED: usize = 8;

/// A version that is imported but not mapped, ready to take an object's addresses: see [`Object::prepare`].
///
/// It owns the version's lease and the handles and descriptors of its segments. Dropping it releases them.
#[derive(Debug)]
pub struct Prepared {
    header: Arc<Header>,
    parts: Vec<PreparedPart>,
    hold: Option<Hold>,
    /// The layout of the object for which this version was prepared.
    fits: Layout,
    /// This version's layout.
    layout: Layout,
}

impl Prepared {
    version_accessors!();
}

#[derive(Debug)]
struct PreparedPart {
    header: PartHeader,
    spares: Vec<Spare>,
}

/// Replacing a version at stable addresses: tensors, pointers and captured CUDA graphs keep their addresses and see the new bytes.
///
/// [`Object::prepare`] does the slow part while the old version is in use. [`Object::switch`] then needs three driver calls for each piece
/// of memory. [`Object::park`] releases the memory and keeps the addresses, and [`Object::unpark`] maps memory there again.
///
/// **The caller must ensure** that nothing accesses the memory by address during `switch` and `park`. CUDA graphs, kernels, tensors of
/// other libraries and threads may hold the address and may use it before and after. On CUDA the addresses are unmapped until
/// `cuMemSetAccess` returns: a kernel or copy that runs in between fails with `CUDA_ERROR_ILLEGAL_ADDRESS` or `CUDA_ERROR_LAUNCH_FAILED`,
/// which destroys the context and everything that the process has in it. `cuMemUnmap` does not wait for such work. `switch`, `park` and
/// `unpark` wait for all work in the devices' primary contexts, which the CUDA runtime, PyTorch and cudarc use. A program that creates its
/// own contexts (`cuCtxCreate`) must synchronise them itself. On the host backend, a thread that reads by address during a switch sees old
/// or new bytes, page by page. On both backends, reading a parked object by address is a fault.
///
/// **Safe code can't** read unmapped memory: the calls borrow the object mutably, and fail with [`Error::Misuse`] while an
/// [`Array`](crate::memory::Array) or an `Arc` of its memory is alive. So drop those first, or keep only their addresses. A parked object
/// can't be read: [`ObjectPart::memory`] and [`ObjectPart::array`] fail, and [`ObjectPart::pieces`] have 0 bytes.
///
/// ```
/// # use vmmfd::{
/// #     broker::{Get, Put, PutPart},
/// #     memory::{Region, Shared, Spec},
/// # };
/// # let broker = vmmfd::internals::ExampleBroker::start()?;
/// # let (client, driver) = (&broker.client, &broker.driver);
/// # let put = |bytes: &[u8]| -> vmmfd::Result<()> {
/// #     let memory = Shared::create(broker.memory.device(), Spec::vmm(1 << 20))?;
/// #     memory.copy_in(0, bytes)?;
/// #     client.put(&Put::new("weights").replace().part(PutPart::of("all", &memory)?)).map(drop)
/// # };
/// # put(b"one")?;
/// let mut object = client.get(&Get::new("weights"))?.open(driver, None)?;
/// let address = object.parts()[0].memory()?.address();                    // For tensors, kernels and graphs.
/// # put(b"two")?;
/// let next = object.prepare(client.get(&Get::new("weights").newer_than(1))?)?;
/// let old = object.switch(next)?;                                         // Nothing may use the memory now.
/// drop(old);                                                              // Ends its lease and releases its memory.
/// let memory = object.parts()[0].memory()?;
/// let mut bytes = [0; 3];
/// memory.copy_out(0, &mut bytes)?;
/// assert_eq!((object.version(), memory.address(), &bytes), (2, address, b"two"));
///
/// object.park()?;                                                         // Uses no device memory now.
/// object.unpark(client.get(&Get::new("weights"))?)?;                      // The current version.
/// assert_eq!(object.parts()[0].memory()?.address(), address);
/// # Ok::<(), vmmfd::Error>(())
/// ```
impl Object {
    /// Imports a version that will take this object's addresses. It is mapped elsewhere once, to verify it with the driver, and unmapped
    /// again; the handles are kept. The old version remains in use, so the device holds both.
    ///
    /// The new version must fit at the addresses of the mapped version, or of the version that was parked:
    /// - It has the same parts, by name, and each part has the same number of pieces, at the same offsets.
    /// - Each piece has at least as many bytes of data, and no more memory than the reserved addresses can hold.
    /// - It has each mapped array, by name, with the same descriptor. It may have further arrays.
    ///
    /// So each address refers to the same array as before. Segment sizes, metadata, digests and the arrays' attributes may differ, and so
    /// may the object's name.
    ///
    /// Blocks for the driver's calls. Temporarily needs the same amount of free address space.
    ///
    /// # Errors
    /// [`Error::Broker`] with the code `differs` and one sentence that lists the differences, before anything is imported; errors of
    /// [`Lease::open`]. Errors end the lease.
    ///
    /// Driver calls, for each piece: as for [`Imported::open`](crate::memory::Imported::open), `cuMemUnmap`, `cuMemAddressFree`.
    #[doc(alias("cuMemUnmap", "cuMemAddressFree"))]
    pub fn prepare(&self, lease: Lease) -> Result<Prepared> {
        let Lease { hold, header, mut parts } = lease;
        let name = &header.name;
        let version = header.version;
        if let Some(piece) = self.parts.iter().find_map(|part| part.memory.first()) {
            check_backend(name, &header.backend, piece.device().driver())?;
        }
        let problems = |problems: Vec<String>| {
            let more = problems.len().saturating_sub(LISTED);
            let mut list = problems.into_iter().take(LISTED).collect::<Vec<_>>().join("; ");
            if more > 0 {
                list += &format!("; and {more} more");
            }
            let message = format!(
                "version {version} of `{name}` does not fit at the addresses of version {} of `{}`: {list}",
                self.version(),
                self.name()
            );
            Err(BrokerError::new(RefusalCode::Differs, message).into())
        };
        let (old, new): (Vec<_>, Vec<_>) =
            (self.parts.iter().map(Shape::of_mapped).collect(), parts.iter().map(Shape::of_leased).collect());
        let mut found = mismatches(&old, &new);
        found.extend(exceeds(&old, &new));
        if !found.is_empty() {
            return problems(found);
        }
        let layout = if mismatches(&new, &old).is_empty() { self.layout.clone() } else { Layout::default() };
        let mut prepared = Vec::with_capacity(parts.len());
        for part in &self.parts {
            // The check above found each part.
            let Some(at) = parts.iter().position(|next| next.header.name == part.header.name) else { continue };
            let next = parts.swap_remove(at);
            let part = PreparedPart::of(next, part).inspect_err(|error| {
                // A driver error may be this process's own fault, so only mismatches are reported.
                if matches!(error, Error::Peer(_)) {
                    hold.report(error);
                }
            });
            prepared.push(part?);
        }
        let hold = Some(hold);
        let fits = self.layout.clone();
        Ok(Prepared { header, parts: prepared, hold, fits, layout })
    }

    /// Maps a prepared version at this object's addresses and returns the old version, which can be switched back to. Drop it to end its
    /// lease and release its memory.
    ///
    /// The caller must ensure that nothing accesses the memory by address during the call; see above for the consequences. Waits without
    /// limit for all work in the devices' primary contexts (and creates the context if the process has none), then blocks for the driver's
    /// calls. Afterwards name, version, id, metadata and arrays are the new version's.
    ///
    /// # Errors
    /// The object is unchanged after [`Error::Misuse`] (an array, an `Arc` or a mirror of the memory is alive, the object is parked, or the
    /// version was prepared for another object or layout), and after [`Error::Driver`] (earlier work failed). After
    /// [`MemoryError::NotExchanged`](crate::error::MemoryError::NotExchanged) the old version is mapped again; if that failed too, the
    /// error holds both causes, and the object is parked with its lease. The prepared version is released in all cases.
    ///
    /// Driver calls: `cuCtxSynchronize`; for each piece `cuMemUnmap`, `cuMemMap` for each segment, `cuMemSetAccess` once. On the host
    /// backend mmap(2) with `MAP_FIXED`, once for each segment.
    #[doc(alias("cuCtxSynchronize", "cuMemUnmap", "cuMemMap", "cuMemSetAccess"))]
    pub fn switch(&mut self, next: Prepared) -> Result<Prepared> {
        if self.is_parked() {
            let problem = format!("`{}` is parked, so there is nothing to switch from: unpark it", self.name());
            return Err(Error::Misuse { problem });
        }
        self.replace_with(next)
    }

    /// Unmaps the memory and releases its handles and descriptors. The addresses remain reserved for [`Object::unpark`]. The lease ends,
    /// also that of an object that was parked with it, and the memory is freed unless the broker or another process holds it.
    ///
    /// The caller has the same obligations as for [`Object::switch`], and this waits for the same work.
    ///
    /// # Errors
    /// All errors of [`Object::switch`]: the object is unchanged, or parked with its lease.
    ///
    /// Driver calls: `cuCtxSynchronize`, `cuMemUnmap`, `cuMemRelease`.
    #[doc(alias("cuCtxSynchronize", "cuMemUnmap", "cuMemRelease"))]
    pub fn park(&mut self) -> Result<()> {
        self.park_with_lease()?;
        self.hold = None;
        Ok(())
    }

    /// As [`Object::park`], but the lease does not end: the broker keeps this version and counts this process among its readers. While the
    /// name exists, the version can be leased again by its number. While parked, this process has no descriptors, so it can't restore the
    /// version on a broker that lost it.
    ///
    /// # Errors
    /// All errors of [`Object::park`].
    pub fn park_with_lease(&mut self) -> Result<()> {
        if !self.is_parked() {
            let mut places = Vec::new();
            for part in &mut self.parts {
                let pieces = exclusive(&part.header.name, &mut part.memory)?;
                places.extend(
                    pieces.into_iter().zip(&mut part.remains).map(|(memory, rest)| Place::new(memory, rest, None)),
                );
            }
            exchange(&mut places)?;
        }
        Ok(())
    }

    /// Whether the object is parked, by [`Object::park`] or because a switch failed and the old version could not be mapped again.
    pub fn is_parked(&self) -> bool {
        self.parts.iter().flat_map(|part| &part.memory).any(|piece| piece.is_parked())
    }

    /// Maps a version at the addresses again: the same version or another that fits, as [`Object::prepare`] describes. A kept lease ends.
    ///
    /// Get the current version, or the same version by [`Get::version`](super::Get::version): it still exists if the lease was kept, or if
    /// the broker has it for another reason.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the object is not parked; errors of [`Object::prepare`]; [`Error::Driver`]. The object stays parked, and the
    /// call can be repeated with another lease.
    ///
    /// Driver calls: those of [`Object::prepare`] and [`Object::switch`].
    pub fn unpark(&mut self, lease: Lease) -> Result<()> {
        if !self.is_parked() {
            let problem = format!("`{}` is not parked: prepare the version, and switch to it", self.name());
            return Err(Error::Misuse { problem });
        }
        let next = self.prepare(lease)?;
        self.replace_with(next).map(drop)
    }

    /// Maps a version at the addresses of this one, mapped or parked. Returns the previous version.
    fn replace_with(&mut self, mut next: Prepared) -> Result<Prepared> {
        if !next.fits.is(&self.layout) {
            let problem = format!(
                "version {} of `{}` was prepared for a layout other than that of version {} of `{}`: prepare it again",
                next.version(),
                next.name(),
                self.version(),
                self.name()
            );
            return Err(Error::Misuse { problem });
        }
        let mut places = Vec::new();
        for (part, next) in self.parts.iter_mut().zip(&mut next.parts) {
            let pieces = exclusive(&part.header.name, &mut part.memory)?.into_iter().zip(&mut part.remains);
            let with = pieces.zip(&mut next.spares);
            places.extend(with.map(|((memory, rest), spare)| Place::new(memory, rest, Some(spare))));
        }
        exchange(&mut places)?;
        drop(places);
        for (part, next) in self.parts.iter_mut().zip(&mut next.parts) {
            mem::swap(&mut part.header, &mut next.header);
            part.index = OnceLock::new();
        }
        mem::swap(&mut self.header, &mut next.header);
        mem::swap(&mut self.hold, &mut next.hold);
        mem::swap(&mut self.layout, &mut next.layout);
        next.fits = next.layout.clone();
        Ok(next)
    }
}

/// Exclusive access to a part's memory, or an error if anything else in this process holds it.
fn exclusive<'a>(part: &str, memory: &'a mut [Arc<Imported>]) -> Result<Vec<&'a mut Imported>> {
    let others: usize = memory.iter().map(|piece| Arc::strong_count(piece) + Arc::weak_count(piece) - 1).sum();
    let alone: Option<Vec<_>> = memory.iter_mut().map(Arc::get_mut).collect();
    alone.ok_or_else(|| {
        let problem = format!(
            "the memory of part `{part}` is still referenced by {others} arrays or other owners: drop them, and keep only their addresses"
        );
        Error::Misuse { problem }
    })
}

impl PreparedPart {
    /// Imports a part for the device that uses the old version's memory.
    fn of(next: LeasedPart, part: &ObjectPart) -> Result<Self> {
        let LeasedPart { header, runs } = next;
        let mut spares = Vec::with_capacity(runs.len());
        for (run, piece) in runs.into_iter().zip(&part.memory) {
            let driver = piece.device().driver();
            let device = piece.device();
            let device = Device::for_memory_of(driver, &header.description.device, Some(device))?;
            let (memory, segments) = run.map(&device, &header.description, false)?;
            spares.push(Spare::of(memory, segments)?);
        }
        Ok(Self { header, spares })
    }
}

/// The properties of a part that decide whether another version fits in its place.
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
    /// Bytes of memory, or of reserved addresses.
    room: u64,
}

impl<'a> Shape<'a> {
    fn of_mapped(part: &'a ObjectPart) -> Self {
        let piece =
            |memory: &Arc<Imported>| Piece { start: memory.start(), size: memory.data_size(), room: memory.room() };
        Self { name: &part.header.name, pieces: part.memory.iter().map(piece).collect(), arrays: &part.header.arrays }
    }

    fn of_leased(part: &'a LeasedPart) -> Self {
        let piece = |run: &LeasedRun| {
            let start = run.run.offset;
            let room = run.run.size;
            Piece {
                start,
                size: part.header.description.size.min(start.saturating_add(room)).saturating_sub(start),
                room,
            }
        };
        Self { name: &part.header.name, pieces: part.runs.iter().map(piece).collect(), arrays: &part.header.arrays }
    }

    /// The arrays that lie inside the pieces.
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

/// The differences that prevent `new` from replacing `old`: one clause for each.
fn mismatches(old: &[Shape<'_>], new: &[Shape<'_>]) -> Vec<String> {
    let mut found = Vec::new();
    let absent = |from: &[Shape<'_>], part: &Shape<'_>| from.iter().all(|other| other.name != part.name);
    found.extend(old.iter().filter(|part| absent(new, part)).map(|part| format!("part `{}` is missing", part.name)));
    found.extend(new.iter().filter(|part| absent(old, part)).map(|part| format!("part `{}` is new", part.name)));
    for (part, next) in pairs(old, new) {
        let name = part.name;
        if part.pieces.len() != next.pieces.len() {
            found.push(format!("part `{name}` is in {} pieces, not {}", next.pieces.len(), part.pieces.len()));
            continue;
        }
        for (piece, other) in part.pieces.iter().zip(&next.pieces) {
            if piece.start != other.start {
                found.push(format!("a piece of part `{name}` starts at byte {}, not {}", other.start, piece.start));
            } else if other.size < piece.size {
                found.push(format!(
                    "part `{name}` has {} bytes from byte {} on, not {}",
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
                    let at = other.offset;
                    let before = array.offset;
                    found.push(format!("array `{name}` is {other} at byte {at}, not {array} at byte {before}"));
                }
                None => found.push(format!("array `{name}` is missing")),
            }
        }
    }
    found
}

/// The parts of `new` whose memory exceeds the reserved addresses of `old`.
fn exceeds<'a>(old: &'a [Shape<'a>], new: &'a [Shape<'a>]) -> impl Iterator<Item = String> {
    pairs(old, new)
        .flat_map(|(part, next)| part.pieces.iter().zip(&next.pieces).map(|pieces| (part.name, pieces)))
        .filter(|(_, (piece, other))| other.room > piece.room)
        .map(|(name, (piece, other))| {
            format!(
                "part `{name}` has {} bytes of memory where {} bytes of addresses are reserved",
                other.room, piece.room
            )
        })
}

/// The parts that exist in both.
fn pairs<'a, 'b>(old: &'b [Shape<'a>], new: &'b [Shape<'a>]) -> impl Iterator<Item = (&'b Shape<'a>, &'b Shape<'a>)> {
    old.iter().filter_map(|part| Some((part, new.iter().find(|next| next.name == part.name)?)))
}
