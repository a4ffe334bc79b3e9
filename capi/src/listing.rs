//! Descriptions of objects.

use std::{ffi::c_char, ptr};

use vmmfd::broker::Summary;

use crate::owned::{self, Kept};

/// An object of the broker, at one version.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vmmfd_object_t {
    /// The name.
    pub name: *const c_char,
    /// The version's UUID.
    pub id: *const c_char,
    /// The memory's backend: `cuda` or `host`.
    pub backend: *const c_char,
    /// The creator's metadata, a JSON object; NULL in a list.
    pub metadata: *const c_char,
    /// The version's number, counted from 1.
    pub version: u64,
    /// The size of the memory in bytes.
    pub size: u64,
    /// The number of parts.
    pub parts: u64,
    /// The number of arrays.
    pub arrays: u64,
    /// The number of leases of all versions.
    pub leases: u64,
    /// The time of publication, in milliseconds since 1970.
    pub created_ms: u64,
    /// The user that owns the name.
    pub owner: u32,
    /// The permissions of the name.
    pub mode: u16,
}

/// Objects. The caller frees it with `vmmfd_listing_free`, which also frees the texts.
#[repr(C)]
#[derive(Debug)]
pub struct vmmfd_listing_t {
    /// The number of objects.
    pub count: usize,
    /// The objects.
    pub objects: *const *const vmmfd_object_t,
}

/// The contents of a listing.
#[derive(Default)]
pub(crate) struct Listing {
    objects: Vec<vmmfd_object_t>,
    kept: Kept,
}

impl Listing {
    pub(crate) fn add(&mut self, summary: &Summary, metadata: Option<String>) {
        let mut keep = |text: &str| self.kept.text(text);
        let object = vmmfd_object_t {
            name: keep(&summary.name),
            id: keep(&summary.id),
            backend: keep(&summary.backend),
            metadata: metadata.map_or(ptr::null(), |text| keep(&text)),
            version: summary.version,
            size: summary.size,
            parts: summary.parts,
            arrays: summary.arrays,
            leases: summary.leases,
            created_ms: summary.created_ms,
            owner: summary.owner.uid,
            mode: summary.mode,
        };
        self.objects.push(object);
    }

    pub(crate) fn allocate(self) -> *mut vmmfd_listing_t {
        let Self { objects, mut kept } = self;
        let count = objects.len();
        let objects = kept.addresses(objects);
        kept.allocate(vmmfd_listing_t { count, objects })
    }
}

/// Frees a listing. Does not block.
#[unsafe(no_mangle)]
pub extern "C" fn vmmfd_listing_free(listing: *mut vmmfd_listing_t) {
    owned::free(listing);
}
