//! The last crashes of server and keeper, kept beside the catalogue for the next server.

use std::{
    collections::VecDeque,
    fs::File,
    io::{self, Read, Seek, Write},
    os::fd::OwnedFd,
    process,
};

use serde::{Deserialize, Serialize};

use super::time::Time;
use crate::{
    broker::keeper::{Keeper, Name, Store},
    error::units::count,
    sys::memfd,
    wire::{broker::Crash, shorten},
};

/// Limits: crashes, names of lost versions per crash, and bytes per name.
const MAX_CRASHES: usize = 16;
const MAX_NAMES: usize = 3;
const MAX_BYTES: usize = 100;

/// The largest accepted history file, in bytes.
const MAX_TEXT: u64 = 64 << 10;

/// The losses of one crash.
#[derive(Debug, Clone, Default)]
pub(crate) struct LostVersions {
    pub(crate) versions: u64,
    names: Vec<String>,
}

impl LostVersions {
    /// Counts a lost version. The first names are listed.
    pub(crate) fn add(&mut self, name: &str, version: u64) {
        self.versions += 1;
        if self.names.len() < MAX_NAMES {
            let mut name = format!("{name} {version}");
            shorten(&mut name, MAX_BYTES);
            self.names.push(name);
        }
    }
}

/// Crash history for the next server. Each update goes into a new memfd, so the file is never half written.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct History {
    /// The pid of a server that has not shut down cleanly.
    running: Option<u32>,
    crashes: VecDeque<Crash>,
    #[serde(skip)]
    file: Option<OwnedFd>,
}

impl History {
    /// Reads the history of the previous server. An unreadable history counts as empty: it must not stop the server from starting.
    pub(crate) fn read(file: Option<OwnedFd>) -> Self {
        let Some(file) = file else { return Self::default() };
        let read = || -> io::Result<Self> {
            let mut text = Vec::new();
            let mut source = File::from(file.try_clone()?);
            source.rewind()?;
            source.take(MAX_TEXT).read_to_end(&mut text)?;
            Ok(serde_json::from_slice(&text)?)
        };
        let read = read()
            .inspect_err(|error| tracing::warn!(%error, "the crash history can't be read: starting an empty one"));
        Self { file: Some(file), ..read.unwrap_or_default() }
    }

    pub(crate) fn crashes(&self) -> impl Iterator<Item = &Crash> {
        self.crashes.iter()
    }

    /// Takes over from the previous server. `whole`: the keeper's set was complete.
    pub(crate) fn take_over(&mut self, whole: bool, lost: &LostVersions, store: &mut Store) {
        let process = match (self.running, whole) {
            (Some(_), false) => "both",
            (None, false) => "keeper",
            (Some(_), true) => "server",
            (None, true) => "",
        };
        if !process.is_empty() || lost.versions > 0 {
            let process = if process.is_empty() { "both" } else { process };
            self.push(process, self.running, Some(lost.clone()));
        }
        self.running = Some(process::id());
        self.save(store);
    }

    /// Starts without objects. `before` is the pid of a previous server that crashed and left nothing.
    pub(crate) fn begin(&mut self, before: Option<u32>, store: &mut Store) {
        if let Some(pid) = before.or(self.running) {
            let process = if store.keeper() == Keeper::None { "server" } else { "both" };
            self.push(process, Some(pid), None);
        }
        self.running = Some(process::id());
        self.save(store);
    }

    /// Records a keeper crash without losses.
    pub(crate) fn record_keeper_crash(&mut self, pid: u32, store: &mut Store) {
        self.push("keeper", Some(pid), Some(LostVersions::default()));
        self.save(store);
    }

    /// Records a clean shutdown.
    pub(crate) fn end(&mut self, store: &mut Store) {
        self.running = None;
        self.save(store);
    }

    /// Gives the history to a new keeper.
    pub(crate) fn hand_to(&self, store: &mut Store) -> io::Result<()> {
        if let Some(file) = &self.file {
            store.keep_own(Name::History, file.try_clone()?);
        }
        Ok(())
    }

    fn push(&mut self, process: &str, pid: Option<u32>, lost: Option<LostVersions>) {
        let (lost_versions, names) = lost.map(|lost| (lost.versions, lost.names)).unzip();
        let lost = lost_versions.map_or_else(|| "everything".to_owned(), |lost: u64| count(lost, "version"));
        tracing::warn!(
            pid,
            lost,
            "{}",
            match process {
                "server" => "the previous server crashed",
                "keeper" => "the keeper crashed",
                _ => "server and keeper crashed",
            }
        );
        self.crashes.push_back(Crash {
            at_ms: Time::now().ms,
            process: process.to_owned(),
            pid: pid.unwrap_or(0),
            lost_versions,
            names: names.unwrap_or_default(),
        });
        while self.crashes.len() > MAX_CRASHES {
            self.crashes.pop_front();
        }
    }

    fn save(&mut self, store: &mut Store) {
        let write = |history: &Self| -> io::Result<[OwnedFd; 2]> {
            let mut file = File::from(memfd::empty(c"vmmfd-history")?);
            file.write_all(&serde_json::to_vec(history)?)?;
            Ok([file.try_clone()?.into(), file.into()])
        };
        match write(self) {
            Ok([copy, file]) => match self.file.replace(file) {
                Some(_) => store.replace(Name::History, copy),
                None => store.keep_own(Name::History, copy),
            },
            Err(error) => tracing::warn!(%error, "the crash history can't be written"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn history_survives_restarts_and_is_bounded() {
        let mut store = Store::none();
        let mut first = History::default();
        first.begin(None, &mut store);
        let mut lost = LostVersions::default();
        (1..=5).for_each(|version| lost.add("a/name", version));
        let mut second = History::read(first.file.take());
        second.take_over(false, &lost, &mut store);
        let crash = second.crashes().next().unwrap();
        assert_eq!((crash.process.as_str(), crash.pid, crash.lost_versions), ("both", process::id(), Some(5)));
        assert_eq!(crash.names, ["a/name 1", "a/name 2", "a/name 3"]);
        (0..100).for_each(|pid| second.record_keeper_crash(pid, &mut store));
        second.end(&mut store);
        let mut third = History::read(second.file.take());
        third.take_over(true, &LostVersions::default(), &mut store);
        let pids: Vec<u32> = third.crashes().map(|crash| crash.pid).collect();
        assert_eq!(pids, (100 - MAX_CRASHES as u32..100).collect::<Vec<_>>());
    }

    #[test]
    fn damaged_history_is_empty() {
        let mut file = File::from(memfd::empty(c"vmmfd-history").unwrap());
        file.write_all(b"{\"running\":1,").unwrap();
        assert_eq!(History::read(Some(file.into())).crashes().count(), 0);
    }
}
