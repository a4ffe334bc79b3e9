//! Phrases in the lines of output.

use vmmfd::{
    array::ArrayDescriptor,
    driver::Access,
    memory::{Description, Mechanism, Placement},
};

use crate::{
    check::{
        Figures,
        pattern::{Engine, Mismatch, Work},
    },
    units::bytes,
};

pub(super) fn spelled(access: Access) -> &'static str {
    match access {
        Access::ReadOnly => "read-only",
        Access::ReadWrite => "read-write",
    }
}

pub(super) fn findings(verified: bool, figures: &Figures) -> String {
    let Figures { words, mismatches, first_mismatch, digest } = figures;
    match digest {
        Some(digest) if verified => format!("{digest}, as expected"),
        Some(digest) => format!("{digest}, which is WRONG"),
        None if *words == 0 => "nothing to check it against".to_owned(),
        None => format!("{words} words, {mismatches} wrong{}", first_words(*first_mismatch)),
    }
}

/// The result of a check in a few words.
pub(super) fn checked(verified: bool, figures: &Figures) -> String {
    let Figures { words, mismatches, digest, .. } = figures;
    match digest {
        Some(digest) => {
            let digits = digest.split(':').next_back().unwrap_or_default();
            let digits = digits.get(..8).unwrap_or(digits);
            format!("digest {digits} {}", if verified { "as expected" } else { "is wrong" })
        }
        None if *words == 0 => if verified { "not checked" } else { "as the peer reports" }.to_owned(),
        None => format!("{mismatches} of {words} words wrong"),
    }
}

/// A process. The ID is 0 if it is not visible in this PID namespace.
pub(super) fn process_named(pid: i32) -> String {
    if pid == 0 { "another process".to_owned() } else { format!("pid {pid}") }
}

pub(super) fn described(array: &ArrayDescriptor) -> String {
    match (&array.strides, array.strides_in_bytes()) {
        (None, Ok(strides)) => ArrayDescriptor { strides: Some(strides), ..array.clone() }.to_string(),
        _ => array.to_string(),
    }
}

/// Mechanism, location and chunks, unless they are VMM, device and one.
pub(super) fn kind(description: &Description) -> String {
    let mut kind = String::new();
    if description.mechanism() != Mechanism::Vmm {
        kind += &format!(", {}", description.mechanism());
    }
    if description.placement() != Placement::Device {
        kind += &format!(", {} memory", description.placement());
    }
    if description.segments() > 1 {
        kind += &format!(", {} chunks", description.segments());
    }
    kind
}

/// The size of received memory, and its descriptors.
pub(super) fn received(description: &Description, fds: &[i32]) -> String {
    let Description { size, mapped_size, .. } = description;
    format!("{} in {} mapped{}, {}", bytes(*size), bytes(*mapped_size), kind(description), numbers(fds))
}

/// The engine, and the speed of a GPU's kernels without their launch.
pub(super) fn engine(work: &Work, words: u64) -> String {
    let rate = words as f64 * 4.0 / work.elapsed.as_secs_f64().max(1e-7);
    match work.engine {
        Engine::Host => "on the CPU".to_owned(),
        Engine::Gpu if rate >= 1e12 => format!("on the GPU at {:.2} TB/s", rate / 1e12),
        Engine::Gpu if rate >= 1e9 => format!("on the GPU at {:.1} GB/s", rate / 1e9),
        Engine::Gpu => format!("on the GPU at {:.3} GB/s", rate / 1e9),
    }
}

/// One descriptor by its number, several by their count.
pub(super) fn numbers(fds: &[i32]) -> String {
    match fds {
        [] => "no fd".to_owned(),
        [fd] => format!("fd {fd}"),
        many => format!("{} fds", many.len()),
    }
}

pub(super) fn first_words(first: Option<Mismatch>) -> String {
    first.map_or_else(String::new, |first| {
        format!(", the first at word {}: {:#010x} instead of {:#010x}", first.index, first.found, first.expected)
    })
}
