//! Probes of the whole machine.

use std::{ffi::OsStr, fs, os::unix::ffi::OsStrExt, path::PathBuf};

use nix::sys::resource::{Resource, getrlimit};
use serde_json::json;
use vmmfd::driver::{Choice, Driver, code, open};

use crate::doctor::{
    error_details::Reason,
    prelude::*,
    report::{Figures, Finding},
};

pub(super) fn driver(backend: Backend, figures: &mut Figures) -> ProbeResult {
    let opened = start(backend, figures);
    if backend == Backend::Cuda {
        // If the driver did not start: the library file that is mapped, which may be the wrong library.
        let library = match &opened {
            Ok((_, library)) => library.clone(),
            Err(_) => loaded(&fs::read("/proc/self/maps").unwrap_or_default()),
        };
        figures.extend(library.map(|library| ("library".to_owned(), library.display().to_string().into())));
    }
    opened.map(|(finding, _)| finding).map_err(|error| with_denied_nodes(error.into()))
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
fn start(backend: Backend, figures: &mut Figures) -> Result<(Finding, Option<PathBuf>)> {
    let driver: Driver = open(Choice::Only(backend))?.driver;
    let version = driver.version()?;
    let devices = Device::all(&driver)?;
    let listed: Vec<_> = devices
        .iter()
        .map(|device| json!({ "ordinal": device.ordinal(), "name": device.name(), "uuid": device.prefixed_uuid() }))
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
    figures.insert("devices".to_owned(), listed.into());
    // The host backend has no library and no version.
    if backend == Backend::Cuda {
        figures.insert("version".to_owned(), version.into());
    }
    Ok((ok(meaning), driver.verbs().diagnosis().and_then(|diagnosis| diagnosis.library()).ok()))
}

pub(super) fn descriptors(_: Backend, _: &mut Figures) -> ProbeResult {
    /// Required for a buffer of 2 GiB in chunks of 2 MiB.
    const PLENTY: u64 = 1024;
    let limit = getrlimit(Resource::RLIMIT_NOFILE);
    let (soft, hard) = limit.map_err(|errno| Error::system("read the limit of open files", errno))?;
    let finding = match hard {
        0..PLENTY => {
            failed(format!("A process may hold only {hard} descriptors: a buffer of many chunks needs one for each."))
        }
        // The commands raise the soft limit to the hard one.
        _ => ok(format!("A process may hold {hard} descriptors: one for each allocation that it shares.")),
    };
    Ok(finding.figure("soft", soft).figure("hard", hard))
}

pub(super) fn host_memory(_: Backend, _: &mut Figures) -> ProbeResult {
    let info = open(Choice::Only(Backend::Host))?.driver.verbs().memory_info(0)?;
    let meaning = "The memory that the machine, or the control group of this process, has left.";
    Ok(ok(meaning).figure("free_bytes", info.free).figure("total_bytes", info.total))
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
