//! Holds NVIDIA device nodes open. Without persistence mode, the driver drops a device's state once no process has the device open, and
//! memory that only descriptors keep is lost with it.

use std::{fs, io, os::fd::OwnedFd};

use crate::{
    error::{Error, Result},
    sys::above_standard,
};

const FOLDER: &str = "/dev";

/// Opens the nodes of all devices. Opening a node can take seconds while the driver initialises the device.
///
/// # Errors
/// [`Error::System`] if there is no node or it can't be opened.
pub(crate) fn open() -> Result<Vec<(u8, OwnedFd)>> {
    let node = |number: u8| {
        let node = format!("{FOLDER}/nvidia{number}");
        let opened = fs::OpenOptions::new().read(true).write(true).open(&node);
        let fd = opened.and_then(|node| above_standard(node.into()));
        fd.map(|fd| (number, fd)).map_err(|error| Error::system(format!("hold {node} open"), error))
    };
    numbers()?.into_iter().map(node).collect()
}

/// The numbers of the existing nodes, ascending.
fn numbers() -> Result<Vec<u8>> {
    let failed = |error| Error::system("find NVIDIA device nodes in /dev", error);
    let mut numbers = Vec::new();
    for entry in fs::read_dir(FOLDER).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let number: Option<u8> =
            name.to_str().and_then(|name| name.strip_prefix("nvidia")).and_then(|number| number.parse().ok());
        numbers.extend(number);
    }
    numbers.sort_unstable();
    match numbers.is_empty() {
        false => Ok(numbers),
        true => Err(failed(io::Error::new(io::ErrorKind::NotFound, "no /dev/nvidia0 exists: omit --hold-devices"))),
    }
}
