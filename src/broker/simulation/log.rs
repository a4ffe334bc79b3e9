//! Damages the log of a server that has died.

use std::{
    fs::File,
    os::{fd::OwnedFd, unix::fs::FileExt},
};

use super::flaws::Flaw;
use crate::broker::{catalogue::Catalogue, keeper::KeeperProcess};

/// Lengths in a log, in bytes: its header, and a record's prefix.
const HEADER: u64 = 24;
const PREFIX: u64 = 8;

fn newest(logs: &[Option<OwnedFd>; 2]) -> Option<usize> {
    let generation = |fd: &OwnedFd| Catalogue::load(fd.try_clone().unwrap()).map(|(log, _)| log.generation()).ok();
    let generations = logs.iter().enumerate().filter_map(|(at, fd)| Some((generation(fd.as_ref()?)?, at)));
    generations.max().map(|(_, at)| at)
}

/// Hides the newest log from the next server.
pub(super) fn hide_newest(logs: &mut [Option<OwnedFd>; 2]) {
    if let Some(at) = newest(logs) {
        logs[at] = None;
    }
}

/// The positions of the records after a position: start and end of each.
fn records(file: &File, mut at: u64) -> Vec<(u64, u64)> {
    let end = file.metadata().unwrap().len();
    let mut records = Vec::new();
    while at < end {
        let mut length = [0; 4];
        file.read_exact_at(&mut length, at).unwrap();
        let start = at;
        at += PREFIX + u64::from(u32::from_le_bytes(length));
        records.push((start, at));
    }
    records
}

/// Removes the last records, at most `count`, and only after a position.
pub(super) fn cut(file: &File, position: u64, count: u8) {
    if let Some((start, _)) = records(file, position).iter().rev().take(count.into()).next_back() {
        file.set_len(*start).unwrap();
    }
}

/// Changes the last record of the newest log.
pub(super) fn damage(keeper: &KeeperProcess, flaw: Option<Flaw>) {
    let Some(flaw @ (Flaw::LastRecordLost | Flaw::LastRecordRepeated | Flaw::LastRecordDamaged)) = flaw else { return };
    let logs = [".CAT0", ".CAT1"].map(|name| keeper.descriptor(name));
    let Some(file) = newest(&logs).and_then(|at| logs[at].as_ref()).map(|fd| File::from(fd.try_clone().unwrap()))
    else {
        return;
    };
    let Some((last, end)) = records(&file, HEADER).pop() else { return };
    let mut record = vec![0; (end - last) as usize];
    file.read_exact_at(&mut record, last).unwrap();
    match flaw {
        Flaw::LastRecordLost => file.set_len(last).unwrap(),
        Flaw::LastRecordRepeated => file.write_all_at(&record, end).unwrap(),
        _ => file.write_all_at(&[record[record.len() / 2] ^ 1], last + record.len() as u64 / 2).unwrap(),
    }
}
