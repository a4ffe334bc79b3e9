//! Tables that do not fit a record: bytes in sealed memfds.

use std::{
    fs::File,
    io::{self, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::FileExt,
    },
};

use nix::{
    fcntl::{FcntlArg, SealFlag, fcntl},
    sys::stat::fstat,
};

use super::memfd;

/// The seals of a table: no process can change it any more.
const SEALS: SealFlag =
    SealFlag::F_SEAL_SHRINK.union(SealFlag::F_SEAL_GROW).union(SealFlag::F_SEAL_WRITE).union(SealFlag::F_SEAL_SEAL);

/// Creates a sealed memfd with a table.
pub(crate) fn sealed(table: impl AsRef<[u8]>) -> io::Result<OwnedFd> {
    let mut file = File::from(memfd::empty(c"vmmfd-table")?);
    file.write_all(table.as_ref())?;
    fcntl(&file, FcntlArg::F_ADD_SEALS(SEALS))?;
    Ok(file.into())
}

/// Checks that a peer's descriptor is a sealed memfd of exactly this length. Does not read it.
///
/// # Errors
/// One sentence that describes the problem.
pub(crate) fn check(fd: BorrowedFd<'_>, length: u64) -> Result<(), String> {
    let seals = fcntl(fd, FcntlArg::F_GET_SEALS).map(SealFlag::from_bits_retain);
    match seals {
        Ok(seals) if seals.contains(SEALS) => {}
        Ok(_) => return Err("the memfd of a table is not sealed against every change".to_owned()),
        Err(_) => return Err("the descriptor of a table is not of a memfd".to_owned()),
    }
    let actual = fstat(fd).map_err(|errno| format!("the memfd of a table can't be inspected: {errno}"))?.st_size;
    match u64::try_from(actual) == Ok(length) {
        true => Ok(()),
        false => Err(format!("the memfd of a table has {actual} bytes where {length} were claimed")),
    }
}

/// Reads a peer's memfd, which must be sealed and have exactly this length.
///
/// # Errors
/// One sentence that describes the problem.
pub(crate) fn read(fd: OwnedFd, length: u64, max: u64) -> Result<Vec<u8>, String> {
    if length > max {
        return Err(format!("a table of {length} bytes is too long: at most {max} are allowed"));
    }
    check(fd.as_fd(), length)?;
    let mut bytes = vec![0; length as usize];
    let read = File::from(fd).read_exact_at(&mut bytes, 0);
    read.map_err(|error| format!("the memfd of a table can't be read: {error}")).map(|()| bytes)
}
