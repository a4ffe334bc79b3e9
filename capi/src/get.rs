//! The options of a get.

use std::{ffi::c_char, time::Duration};

use vmmfd::broker::Get;

use crate::{
    argument::{json, list, milliseconds, text, unused},
    error::Outcome,
    versioned::{options, versioned},
};

/// Options of a get, which start with `VMMFD_GET_OPTIONS`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vmmfd_get_options_t {
    /// The size of this struct: `sizeof` it.
    pub struct_size: usize,
    /// How long to wait for the object, in milliseconds. 0: not at all.
    pub wait_ms: u64,
    /// The version. 0: the current one.
    pub version: u64,
    /// Only a version that is newer than this. 0: any.
    pub newer_than: u64,
    /// The names of the parts to get; NULL for all.
    pub parts: *const *const c_char,
    /// The number of names in `parts`.
    pub part_count: usize,
    /// Metadata fields that must have these values: a JSON object; NULL for none.
    pub expect: *const c_char,
    /// The user that must own the name, if `expect_owner` is set.
    pub owner: u32,
    /// Whether the name must belong to `owner`. Any user may put a name that does not exist.
    pub expect_owner: bool,
}

versioned!(vmmfd_get_options_t);

/// Builds a get.
pub(crate) fn build_get(name: &str, options: *const vmmfd_get_options_t) -> Outcome<Get> {
    let mut get = Get::new(name);
    let Some(options) = self::options(options)? else { return Ok(get) };
    if options.wait_ms > 0 {
        get = get.wait(milliseconds(options.wait_ms, Duration::ZERO));
    }
    if options.version > 0 {
        get = get.version(options.version);
    }
    if options.newer_than > 0 {
        get = get.newer_than(options.newer_than);
    }
    // An empty list is not all parts.
    unused(options.part_count == 0 && !options.parts.is_null(), "parts", "with a part_count of 0")?;
    let parts = list(options.parts, options.part_count, "parts")?.iter().map(|part| text(*part, "the name of a part"));
    let parts = parts.collect::<Outcome<Vec<&str>>>()?;
    if !parts.is_empty() {
        get = get.parts(parts);
    }
    if let Some(expect) = json(options.expect, "expect")? {
        get = get.expect(expect);
    }
    unused(!options.expect_owner && options.owner != 0, "owner", "without expect_owner")?;
    Ok(if options.expect_owner { get.expect_owner(options.owner) } else { get })
}
