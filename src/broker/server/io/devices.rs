//! The nodes of NVIDIA's devices, held open: where no process has a device open and persistence is off, its driver state goes, and
//! memory with it that only descriptors keep.

use std::{collections::HashMap, fs, io, os::fd::OwnedFd};

use crate::{
    broker::keeper::{Name, Store},
    error::{Error, Result},
};

/// Where the nodes are.
const FOLDER: &str = "/dev";

/// Holds the nodes of all devices open, and has the keeper hold them too; or none, if that is not wanted any more. `inherited` are those
/// that the keeper held already. Opening one may take seconds, while the driver sets the device up.
///
/// # Errors
/// [`Error::System`] if there is none, or if one can't be opened.
pub(crate) fn hold(store: &mut Store, mut inherited: HashMap<u8, OwnedFd>, wanted: bool) -> Result<Vec<(u8, OwnedFd)>> {
    store.count(inherited.len());
    let mut held = Vec::new();
    let numbers = if wanted { numbers()? } else { Vec::new() };
    for number in numbers {
        let fd = match inherited.remove(&number) {
            Some(fd) => fd,
            None => {
                let node = format!("{FOLDER}/nvidia{number}");
                let failed = |error| Error::system(format!("hold {node} open"), error);
                let fd = OwnedFd::from(fs::OpenOptions::new().read(true).write(true).open(&node).map_err(failed)?);
                store.keep_own(Name::Device(number), fd.try_clone().map_err(failed)?);
                fd
            }
        };
        held.push((number, fd));
    }
    inherited.into_keys().for_each(|number| store.remove(Name::Device(number)));
    Ok(held)
}

/// The numbers of the nodes that exist, in ascending order.
fn numbers() -> Result<Vec<u8>> {
    let failed = |error| Error::system("look for the nodes of NVIDIA's devices in /dev", error);
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
        true => {
            Err(failed(io::Error::new(io::ErrorKind::NotFound, "there is no /dev/nvidia0: leave out --hold-devices")))
        }
    }
}
