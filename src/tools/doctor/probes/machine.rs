//! What is of the machine as a whole.

use std::{
    ffi::OsStr,
    fs,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use nix::sys::resource::{Resource, getrlimit};
use serde_json::json;

use super::{Found, Probe, WITHHELD};
use crate::{
    driver::{Backend, Choice, Driver, code, open},
    error::{Error, Result},
    memory::Device,
    tools::doctor::{Environment, report::Seen},
};

pub(super) fn driver(backend: Backend) -> Result<Found> {
    let (found, library) = match start(backend) {
        Ok(started) => started,
        Err(error) => {
            let Some(probe) = Probe::named("driver") else { return Err(error) };
            // There is no driver to be asked for its file: one that does not start may be the wrong one.
            (probe.of_seen(withheld(Seen::of(&error))), loaded(&fs::read("/proc/self/maps").unwrap_or_default()))
        }
    };
    Ok(match library {
        Some(library) if backend == Backend::Cuda => found.figure("library", library.display().to_string()),
        _ => found,
    })
}

/// Names the nodes that this process may not open, where the driver finds no device.
fn withheld(mut seen: Seen) -> Seen {
    if seen.code == Some(code::NO_DEVICE) {
        let nodes = Environment::look(None).nodes;
        let closed: Vec<String> = nodes.into_iter().filter(|node| !node.usable).map(|node| node.path).collect();
        if !closed.is_empty() {
            seen.message += &format!("; {WITHHELD}{}", closed.join(", "));
        }
    }
    seen
}

/// The driver library among the files that a process has mapped.
fn loaded(maps: &[u8]) -> Option<PathBuf> {
    maps.split(|&byte| byte == b'\n').find_map(|line| {
        // Numbers and letters come first, and a path only where there is a file.
        let path = Path::new(OsStr::from_bytes(&line[line.iter().position(|&byte| byte == b'/')?..]));
        path.file_name()?.as_bytes().starts_with(b"libcuda.so").then(|| path.to_owned())
    })
}

/// Starts it; also tells the file that it was loaded from.
fn start(backend: Backend) -> Result<(Found, Option<PathBuf>)> {
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
    let found = Found::ok(meaning).figure("devices", listed);
    // The host backend is of no library, and of no version.
    let found = if backend == Backend::Cuda { found.figure("version", version) } else { found };
    Ok((found, driver.verbs().diagnosis().and_then(|diagnosis| diagnosis.library()).ok()))
}

pub(super) fn descriptors(_: Backend) -> Result<Found> {
    /// What a buffer of many chunks may come to need: at 2 MiB each, 2 GiB.
    const PLENTY: u64 = 1024;
    let limit = getrlimit(Resource::RLIMIT_NOFILE);
    let (soft, hard) = limit.map_err(|errno| Error::system("read the limit of open files", errno))?;
    let found = match hard {
        0..PLENTY => Found::failed(format!(
            "A process may hold only {hard} descriptors: a buffer of many chunks needs one for each."
        )),
        // The commands raise the limit that holds now as far as they may.
        _ => Found::ok(format!("A process may hold {hard} descriptors: one for each allocation that it shares.")),
    };
    Ok(found.figure("soft", soft).figure("hard", hard))
}

pub(super) fn host_memory(_: Backend) -> Result<Found> {
    let info = open(Choice::Only(Backend::Host))?.driver.verbs().memory_info(0)?;
    let meaning = "What the machine, or the control group that this runs in, has left.";
    Ok(Found::ok(meaning).figure("free_bytes", info.free).figure("total_bytes", info.total))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_found_among_what_is_mapped() {
        let maps = b"7f00-7f01 r-xp 00000000 08:01 12 /usr/lib/libcudart.so.12\n\
            7f01-7f02 rw-p 00000000 00:00 0\n\
            7f02-7f03 r--p 00000000 08:01 13 /usr/local/my cuda/stubs/libcuda.so\n\
            7f03-7f04 rw-p 00000000 00:00 0 [stack]\n";
        assert_eq!(loaded(maps).as_deref(), Some(Path::new("/usr/local/my cuda/stubs/libcuda.so")));
        assert_eq!(loaded(b"7f00-7f01 r-xp 00000000 08:01 12 /usr/lib/libcudart.so.12\n"), None);
        assert_eq!(loaded(b""), None);
    }
}
