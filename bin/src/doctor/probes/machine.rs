//! Probes of the whole machine.

use std::{
    ffi::OsStr,
    fs,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use nix::sys::resource::{Resource, getrlimit};
use serde_json::json;
use vmmfd::{
    driver::{Backend, Choice, Driver, code, open},
    error::{Error, Result},
    memory::Device,
};

use crate::doctor::{
    Environment, ErrorDetails,
    error_details::Reason,
    outcome::{ProbeFailure, ProbeOutcome, ProbeResult},
};
use crate::verbs::HasVerbs;

pub(super) fn driver(backend: Backend) -> ProbeResult {
    let named = |library: Option<PathBuf>| {
        library.filter(|_| backend == Backend::Cuda).map(|library| library.display().to_string())
    };
    match start(backend) {
        Ok((outcome, library)) => Ok(match named(library) {
            Some(library) => outcome.figure("library", library),
            None => outcome,
        }),
        Err(error) => {
            let failure = ProbeFailure::from(with_denied_nodes(ErrorDetails::of(&error)));
            // The driver did not start: report the library file that is mapped, which may be the wrong library.
            Err(match named(loaded(&fs::read("/proc/self/maps").unwrap_or_default())) {
                Some(library) => failure.figure("library", library),
                None => failure,
            })
        }
    }
}

/// Adds the device nodes that this process can't open if the driver finds no device.
fn with_denied_nodes(mut error: ErrorDetails) -> ErrorDetails {
    if error.code == Some(code::NO_DEVICE) {
        let nodes = Environment::read(None).nodes;
        let denied: Vec<String> = nodes.into_iter().filter(|node| !node.usable).map(|node| node.path).collect();
        if !denied.is_empty() {
            error.reason = Some(Reason::NodesDenied);
            error.message += &format!("; this process may not open {}", denied.join(", "));
        }
    }
    error
}

/// The driver library among a process's mapped files.
pub(super) fn loaded(maps: &[u8]) -> Option<PathBuf> {
    maps.split(|&byte| byte == b'\n').find_map(|line| {
        // The path is the last field, and only file mappings have one.
        let path = Path::new(OsStr::from_bytes(&line[line.iter().position(|&byte| byte == b'/')?..]));
        path.file_name()?.as_bytes().starts_with(b"libcuda.so").then(|| path.to_owned())
    })
}

/// Starts the driver. Also returns the file of its library.
fn start(backend: Backend) -> Result<(ProbeOutcome, Option<PathBuf>)> {
    let driver: Driver = open(Choice::Only(backend))?.driver;
    let version = driver.version()?;
    let devices = Device::all(&driver)?;
    let listed: Vec<_> = devices
        .iter()
        .map(|device| json!({ "ordinal": device.ordinal(), "name": device.name(), "uuid": device.uuid() }))
        .collect();
    let meaning = match backend {
        Backend::Host => "Ordinary memory of this machine stands in for a GPU.".to_owned(),
        Backend::Cuda => format!(
            "The driver starts, supports CUDA {}.{}, and has {}.",
            version / 1000,
            version % 1000 / 10,
            match devices.len() {
                1 => "1 device".to_owned(),
                count => format!("{count} devices"),
            }
        ),
    };
    let outcome = ProbeOutcome::ok(meaning).figure("devices", listed);
    // The host backend has no library and no version.
    let outcome = if backend == Backend::Cuda { outcome.figure("version", version) } else { outcome };
    Ok((outcome, driver.verbs().diagnosis().and_then(|diagnosis| diagnosis.library()).ok()))
}

pub(super) fn descriptors(_: Backend) -> ProbeResult {
    /// Required for a buffer of 2 GiB in chunks of 2 MiB.
    const PLENTY: u64 = 1024;
    let limit = getrlimit(Resource::RLIMIT_NOFILE);
    let (soft, hard) = limit.map_err(|errno| Error::system("read the limit of open files", errno))?;
    let outcome = match hard {
        0..PLENTY => ProbeOutcome::failed(format!(
            "A process may hold only {hard} descriptors: a buffer of many chunks needs one for each."
        )),
        // The commands raise the soft limit to the hard one.
        _ => {
            ProbeOutcome::ok(format!("A process may hold {hard} descriptors: one for each allocation that it shares."))
        }
    };
    Ok(outcome.figure("soft", soft).figure("hard", hard))
}

pub(super) fn host_memory(_: Backend) -> ProbeResult {
    let info = open(Choice::Only(Backend::Host))?.driver.verbs().memory_info(0)?;
    let meaning = "The memory that the machine, or the control group of this process, has left.";
    Ok(ProbeOutcome::ok(meaning).figure("free_bytes", info.free).figure("total_bytes", info.total))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_mapped_library() {
        let maps = b"7f00-7f01 r-xp 00000000 08:01 12 /usr/lib/libcudart.so.12\n\
            7f01-7f02 rw-p 00000000 00:00 0\n\
            7f02-7f03 r--p 00000000 08:01 13 /usr/local/my cuda/stubs/libcuda.so\n\
            7f03-7f04 rw-p 00000000 00:00 0 [stack]\n";
        assert_eq!(loaded(maps).as_deref(), Some(Path::new("/usr/local/my cuda/stubs/libcuda.so")));
        assert_eq!(loaded(b"7f00-7f01 r-xp 00000000 08:01 12 /usr/lib/libcudart.so.12\n"), None);
        assert_eq!(loaded(b""), None);
    }
}
