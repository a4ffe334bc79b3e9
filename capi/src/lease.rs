//! Leases: objects of a broker that this process has mapped.

use std::{
    ffi::c_char,
    mem::MaybeUninit,
    ptr,
    sync::{Arc, Mutex},
    time::UNIX_EPOCH,
};

use vmmfd::{
    bindings::lock,
    broker::{Lease, Object, ObjectPart, Prepared},
};

use crate::{
    argument::{optional_text, run_out, text},
    array::{Array, vmmfd_array_t},
    error::{Failure, Outcome, run, run_logged, vmmfd_code_t, vmmfd_error_t},
    get::{build_get, vmmfd_get_options_t},
    handle::{self, handle},
    leased::Leased,
    memory::Memory,
    owned::{self, Kept},
};

/// A lease: an object that this process has mapped read-only, and that the broker keeps. Any threads may use it at once.
#[derive(Debug)]
pub struct vmmfd_lease_t {
    _opaque: [u8; 0],
}

handle!(vmmfd_lease_t, 5, "a lease", Arc<Leased>);

/// A version that is imported and takes the addresses of a lease at the switch.
#[derive(Debug)]
pub struct vmmfd_prepared_t {
    _opaque: [u8; 0],
}

handle!(vmmfd_prepared_t, 6, "a prepared version", Mutex<Option<Prepared>>);

/// A part of a leased object.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vmmfd_part_t {
    /// The part's name.
    pub name: *const c_char,
    /// The digest of the bytes, in the creator's format; NULL if it gave none.
    pub digest: *const c_char,
    /// The size of the part's memory in bytes.
    pub size: u64,
    /// The number of arrays.
    pub array_count: usize,
    /// The names of the arrays.
    pub arrays: *const *const c_char,
}

/// Facts about a lease, at the time of the call. The caller frees it with `vmmfd_lease_info_free`, which also frees the texts.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vmmfd_lease_info_t {
    /// The object's name.
    pub name: *const c_char,
    /// The version's UUID.
    pub id: *const c_char,
    /// The creator's metadata: a JSON object, empty if it gave none.
    pub metadata: *const c_char,
    /// The number of parts.
    pub part_count: usize,
    /// The parts that were requested.
    pub parts: *const *const vmmfd_part_t,
    /// The version's number, counted from 1.
    pub version: u64,
    /// The time of publication, in milliseconds since 1970.
    pub created_ms: u64,
    /// The user that owns the name.
    pub owner: u32,
    /// Whether the broker counts this process among the readers, as far as this process knows.
    pub held: bool,
    /// Whether nothing is mapped: see `vmmfd_lease_park`.
    pub parked: bool,
}

/// Describes a lease.
///
/// The caller frees `*info` with `vmmfd_lease_info_free`; it is NULL after a failure. Does not block, except while the lease is switched.
///
/// Errors: `VMMFD_INVALID`; `VMMFD_DISCONNECTED` if the metadata is not a JSON object; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_lease_info(
    lease: *const vmmfd_lease_t,
    info: Option<&mut MaybeUninit<*mut vmmfd_lease_info_t>>,
) -> *mut vmmfd_error_t {
    run_out(info, "info", || handle::get(lease)?.read(describe))
}

fn describe(object: &Object) -> Outcome<*mut vmmfd_lease_info_t> {
    let mut kept = Kept::default();
    let mut parts = Vec::with_capacity(object.parts().len());
    for part in object.parts() {
        let names = part.arrays().iter().map(|entry| kept.text(entry.name.as_str())).collect();
        parts.push(vmmfd_part_t {
            name: kept.text(part.name()),
            digest: part.digest().map_or(ptr::null(), |digest| kept.text(digest)),
            size: part.description().size,
            array_count: part.arrays().len(),
            arrays: kept.list(names),
        });
    }
    let created = object.created().duration_since(UNIX_EPOCH).unwrap_or_default();
    let shown = vmmfd_lease_info_t {
        name: kept.text(object.name()),
        id: kept.text(object.id()),
        metadata: kept.text(object.metadata().map(|_| object.metadata_text().to_owned())?),
        part_count: parts.len(),
        parts: kept.addresses(parts),
        version: object.version(),
        created_ms: u64::try_from(created.as_millis()).unwrap_or(u64::MAX),
        owner: object.owner().uid,
        held: object.is_held(),
        parked: object.is_parked(),
    };
    Ok(kept.allocate(shown))
}

/// Frees facts about a lease. Does not block.
#[unsafe(no_mangle)]
pub extern "C" fn vmmfd_lease_info_free(info: *mut vmmfd_lease_info_t) {
    owned::free(info);
}

/// Returns whether the owner of the object has asked its readers for the memory of the lease's version: see `vmmfd_broker_recall`. Then free
/// the lease with all its arrays, switch it to another version and free the old one, or park it without `keep`.
///
/// `*recalled` is false after a failure, and for a parked lease that is not kept. The first call for a connection opens a second connection,
/// which receives only recalls, and blocks for at most the connection's timeout. Later calls do not block, except while the lease is switched.
///
/// Errors: `VMMFD_DISCONNECTED`; `VMMFD_NOT_FOUND` if no broker listens; `VMMFD_INTERRUPTED`; `VMMFD_INVALID`; `VMMFD_SYSTEM`;
/// `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_lease_recalled(
    lease: *const vmmfd_lease_t,
    recalled: Option<&mut MaybeUninit<bool>>,
) -> *mut vmmfd_error_t {
    run_out(recalled, "recalled", || handle::get(lease)?.read(|object| Ok(object.is_recalled()?)))
}

/// Returns an array of a lease by name. After a switch, the same array shows the new version.
///
/// `part` is the name of its part; NULL means the only part that has an array of this name. The caller frees `*array` with
/// `vmmfd_array_free`; it is NULL after a failure. The array keeps the lease: the lease is released when it and all its arrays are freed.
/// Does not block, except while the lease is switched.
///
/// Errors: `VMMFD_NOT_FOUND`; `VMMFD_INVALID` if `part` is NULL and several parts have the array, and for a parked lease; `VMMFD_FORKED`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_lease_array(
    lease: *const vmmfd_lease_t,
    part: *const c_char,
    name: *const c_char,
    array: Option<&mut MaybeUninit<*mut vmmfd_array_t>>,
) -> *mut vmmfd_error_t {
    run_out(array, "array", || {
        let lease = handle::get(lease)?;
        let (part, name) = (optional_text(part, "part")?, text(name, "name")?);
        let (part, descriptor) = lease.read(|object| {
            let part = match part {
                None => object.part_of(name)?,
                Some(wanted) => object.part(wanted).ok_or_else(|| no_part(wanted, object))?,
            };
            let entry = part.entry(name)?;
            Ok((part.name().to_owned(), entry.array.clone()))
        })?;
        Ok(handle::insert(Array::new(Memory::leased(&lease, &part)?, descriptor)?))
    })
}

fn no_part(name: &str, object: &Object) -> Failure {
    let names: Vec<&str> = object.parts().iter().map(ObjectPart::name).collect();
    let message = format!("the lease has no part `{name}`: its parts are {}", names.join(", "));
    Failure::Own(vmmfd_code_t::VMMFD_NOT_FOUND, message, None)
}

/// Leases another version of the object and imports it, ready to take the addresses of this lease. The old version remains in use, so the
/// device holds both.
///
/// `options` select the version, for example `newer_than`; NULL is the current one. Its arrays must have the same names, layouts and
/// offsets; it may have more. The caller frees `*prepared` with `vmmfd_prepared_free`; it is NULL after a failure. Blocks as
/// `vmmfd_broker_get`.
///
/// Errors: as for `vmmfd_broker_get`; `VMMFD_DIFFERS` with the differences if the version does not fit.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_lease_prepare(
    lease: *const vmmfd_lease_t,
    options: *const vmmfd_get_options_t,
    prepared: Option<&mut MaybeUninit<*mut vmmfd_prepared_t>>,
) -> *mut vmmfd_error_t {
    run_out(prepared, "prepared", || {
        let lease = handle::get(lease)?;
        let next = next(&lease, options)?;
        let prepared = lease.read(|object| Ok(object.prepare(next)?))?;
        Ok(handle::insert(Mutex::new(Some(prepared))))
    })
}

/// Leases a version of the same name.
fn next(lease: &Leased, options: *const vmmfd_get_options_t) -> Outcome<Lease> {
    let name = lease.read(|object| Ok(object.name().to_owned()))?;
    Ok(lease.client.get(&build_get(&name, options)?)?)
}

/// Maps a prepared version at the addresses of the lease. Addresses, arrays and captured CUDA graphs remain valid and show the new version.
/// `prepared` then holds the old version: switch back to it, or free it.
///
/// Nothing may use the memory by address during the call: on CUDA, a kernel that does destroys the context, and on the host backend it sees
/// old or new bytes. Copies of this library wait. Blocks without limit until all work in the device's primary context is done, then for the
/// driver's calls.
///
/// Errors: `VMMFD_INVALID` if a DLPack tensor of the lease exists, the lease is parked, or the version was prepared for another lease;
/// `VMMFD_DRIVER`, and then the old version is mapped, or the lease is parked. After an error `prepared` is used up: free it.
/// `VMMFD_FORKED`. Driver calls: `cuCtxSynchronize`, `cuMemUnmap`, `cuMemMap`, `cuMemSetAccess`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_lease_switch(
    lease: *const vmmfd_lease_t,
    prepared: *const vmmfd_prepared_t,
) -> *mut vmmfd_error_t {
    run(|| {
        let lease = handle::get(lease)?;
        let prepared = handle::get(prepared)?;
        let mut prepared = lock(&prepared);
        let used = || Failure::invalid("an error has used up the prepared version: prepare another");
        let next = prepared.take().ok_or_else(used)?;
        *prepared = Some(lease.change(|object| object.switch(next))?);
        Ok(())
    })
}

/// Unmaps the memory of a lease and keeps its addresses reserved. With `keep`, the broker still counts this process among the readers, and
/// keeps the version; otherwise the lease is released, and the device memory is free for others.
///
/// Nothing may use the memory by address from now on. Blocks as `vmmfd_lease_switch`.
///
/// Errors: as for `vmmfd_lease_switch`.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_lease_park(lease: *const vmmfd_lease_t, keep: bool) -> *mut vmmfd_error_t {
    run(|| handle::get(lease)?.change(|object| if keep { object.park_with_lease() } else { object.park() }))
}

/// Leases a version of the object and maps it at the addresses of a parked lease: `options` as for `vmmfd_lease_prepare`.
///
/// Blocks as `vmmfd_broker_get`.
///
/// Errors: `VMMFD_INVALID` if the lease is not parked; as for `vmmfd_lease_prepare`. The lease remains parked then.
#[unsafe(no_mangle)]
#[must_use]
pub extern "C" fn vmmfd_lease_unpark(
    lease: *const vmmfd_lease_t,
    options: *const vmmfd_get_options_t,
) -> *mut vmmfd_error_t {
    run(|| {
        let lease = handle::get(lease)?;
        let next = next(&lease, options)?;
        lease.change(|object| object.unpark(next))
    })
}

/// Frees a lease. It is released, and its memory is unmapped, when all its arrays, memory and tensors are freed too. May block for the
/// driver's calls.
#[unsafe(no_mangle)]
pub extern "C" fn vmmfd_lease_free(lease: *mut vmmfd_lease_t) {
    run_logged(|| handle::remove(lease));
}

/// Frees a prepared version, and releases its lease. May block for the driver's calls.
#[unsafe(no_mangle)]
pub extern "C" fn vmmfd_prepared_free(prepared: *mut vmmfd_prepared_t) {
    run_logged(|| handle::remove(prepared));
}
