//! Restores the previous server's objects from the keeper's entries.

use std::{
    collections::{BTreeMap, HashMap},
    os::fd::OwnedFd,
    sync::Arc,
    time::Duration,
};

use super::{Events, Objects};
use crate::broker::{
    keeper::{Entry, Source, Store},
    manifest::{BROKER, Manifest, Version},
    server::{
        admit::{Limits, NOBODY, Resource},
        state::{caller::ConnectionId, root::Time},
    },
};

impl Objects {
    /// Restores the objects of the keeper's entries, if any, and the descriptors of the broker itself: the listening socket and `devices`.
    /// Clients may resume their leases for so long.
    pub(crate) fn restore(
        now: Time,
        limits: Limits,
        resume: Duration,
        store: Store,
        entries: BTreeMap<u64, Entry>,
    ) -> Self {
        let mut identity = None;
        let (mut versions, mut all_done, mut last_deletion) = (Vec::new(), Vec::new(), HashMap::new());
        let (mut garbage, mut damaged) = (Vec::new(), Vec::new());
        for (key, Entry { manifest, fds }) in entries {
            match serde_json::from_slice(&manifest) {
                Ok(Manifest::Broker(of)) => {
                    identity = Some(of);
                    garbage.extend(fds);
                }
                Ok(Manifest::Version(version))
                    if version.descriptors() == fds.len()
                        && version.parts.iter().all(|part| part.sizes.len() == part.segments()) =>
                {
                    versions.push((key, version, fds))
                }
                Ok(done @ (Manifest::Completed(_) | Manifest::Deleted(_))) if fds.is_empty() => {
                    if let Manifest::Deleted(of) = &done {
                        last_deletion.insert(of.name.clone(), key);
                    }
                    all_done.push((key, done));
                }
                other => {
                    let why = match other {
                        Ok(Manifest::Version(of)) => {
                            format!("version {} of `{}` lacks descriptors", of.version, of.name)
                        }
                        Ok(_) => "it has other descriptors than it names".to_owned(),
                        Err(error) => error.to_string(),
                    };
                    tracing::error!(key, why, "an entry of the keeper can't be used: its version is lost");
                    damaged.push((key, fds.len()));
                    garbage.extend(fds);
                }
            }
        }
        let mut objects = Self::empty(now, limits, Events::new(identity), store);
        objects.garbage.push((NOBODY, garbage));
        for (key, done) in all_done {
            objects.last_key = objects.last_key.max(key);
            objects.note_done(key, done);
        }
        for (key, fds) in damaged {
            objects.store.count(fds);
            objects.store.remove(key, fds);
        }
        for (key, mut version, fds) in versions {
            objects.store.count(fds.len());
            // The server died while it deleted the name.
            if !version.is_unnamed && last_deletion.get(&version.name).is_some_and(|deletion| *deletion > key) {
                version.is_unnamed = true;
                objects.store.update(key);
            }
            objects.restore_version(key, version, fds);
        }
        for entry in objects.names.values_mut() {
            entry.maker = Some(ConnectionId::PREVIOUS_SERVER);
        }
        let is_unresumed = |version: &Version| version.resume_by_ms.is_some_and(|by| by <= now.ms);
        let unresumed = objects.versions.iter().filter(|(_, version)| is_unresumed(&version.record));
        for key in unresumed.map(|(key, _)| *key).collect::<Vec<_>>() {
            objects.drop_unless_kept(key);
        }
        objects.resume_by_ms = now.ms.saturating_add(resume.as_millis() as u64);
        objects.last_restored = objects.last_key;
        objects
    }

    /// Remembers a completed request. The keeper drops one that is no longer needed.
    pub(super) fn note_done(&mut self, key: u64, done: Manifest) {
        self.requests.extend(done.requests().iter().map(|request| (*request, key)));
        if let Some((oldest, done)) = self.events.note_done(key, done) {
            for request in done.requests() {
                self.requests.remove(request);
            }
            self.store.remove(oldest, 0);
        }
    }

    fn restore_version(&mut self, key: u64, version: Box<Version>, fds: Vec<OwnedFd>) {
        self.users.add_version(&version);
        if !version.is_unnamed && !self.names.contains_key(version.name.as_str()) {
            self.users.add(version.owner.uid, Resource::Objects, 1);
        }
        self.last_key = self.last_key.max(key);
        self.add_version(key, version, fds);
    }

    /// Ends the time in which clients resume the leases of the previous server: drops the versions that nobody holds, and lets names expire.
    pub(crate) fn end_unresumed(&mut self) {
        if std::mem::take(&mut self.last_restored) == 0 {
            return;
        }
        let unnamed = self.versions.iter().filter(|(_, version)| version.record.is_unnamed);
        let unnamed: Vec<u64> = unnamed.map(|(key, _)| *key).collect();
        for key in unnamed {
            self.drop_if_unused(key);
        }
        for (key, version) in &mut self.versions {
            if version.leases == 0 && std::mem::take(&mut version.record.is_recalled) {
                self.store.update(*key);
            }
        }
        for name in self.names.keys().cloned().collect::<Vec<Arc<str>>>() {
            if let Some(entry) = self.names.get_mut(&name) {
                entry.maker.take_if(|maker| *maker == ConnectionId::PREVIOUS_SERVER);
                entry.idle_since = self.now.at;
            }
            self.drop_old(&name, usize::MAX);
            self.note_expiry(&name);
        }
    }

    /// Notes in a version's entry until when its holders may resume their leases.
    pub(super) fn limit_resume(&mut self, key: u64) {
        if let Some(version) = self.versions.get_mut(&key).filter(|version| version.record.resume_by_ms.is_none()) {
            version.record.resume_by_ms = Some(self.resume_by_ms);
            self.store.update(key);
        }
    }

    /// Whether clients may still resume leases of this version.
    pub(super) fn is_awaited(&self, key: u64) -> bool {
        key <= self.last_restored
    }

    /// Whether clients may still resume leases of the previous server.
    pub(crate) fn awaits_clients(&self) -> bool {
        self.last_restored > 0
    }

    /// Gives the keeper the listening socket and the device nodes.
    pub(crate) fn hold_own(&mut self, socket: OwnedFd, devices: Vec<(u8, OwnedFd)>) {
        let (numbers, nodes): (Vec<u8>, Vec<OwnedFd>) = devices.into_iter().unzip();
        self.events.identity.devices = numbers;
        self.own = std::iter::once(socket).chain(nodes).collect();
        self.users.add(NOBODY, Resource::Descriptors, self.own.len() as u64);
        self.store.send(BROKER, self.own.len());
    }

    /// Gives the keeper another listening socket.
    pub(crate) fn hold_socket(&mut self, socket: OwnedFd) {
        let count = self.own.len();
        let old = self.own.first_mut().map(|own| std::mem::replace(own, socket));
        self.garbage.push((NOBODY, old.into_iter().collect()));
        self.store.replace(BROKER, count, count);
    }

    /// Sends everything to a new keeper, the newest versions first: if the server dies before the last one is sent, an old version is lost, and
    /// no name falls back to it.
    pub(crate) fn resend(&mut self) {
        self.store.send(BROKER, self.own.len());
        self.events.keys().for_each(|key| self.store.send(key, 0));
        let mut versions: Vec<_> =
            self.versions.iter().chain(&self.pending).map(|(key, of)| (*key, of.fds.len())).collect();
        versions.sort_unstable_by(|a, b| b.cmp(a));
        for (key, descriptors) in versions {
            self.store.send(key, descriptors);
        }
    }

    /// Sends unsent messages to the keeper.
    pub(crate) fn flush_store(&mut self) -> crate::broker::keeper::Flushed {
        let mut store = std::mem::take(&mut self.store);
        let flushed = store.flush(self);
        self.store = store;
        flushed
    }
}

impl Source for Objects {
    fn manifest(&self, key: u64) -> Option<(Vec<u8>, usize)> {
        let (manifest, descriptors) = if key == BROKER {
            (Manifest::Broker(self.events.identity.clone()), self.own.len())
        } else if let Some(version) = self.version(key) {
            (Manifest::Version(version.record.clone()), version.fds.len())
        } else {
            (self.events.manifest(key)?.clone(), 0)
        };
        let json = serde_json::to_vec(&manifest).expect("a manifest is plain data");
        Some((json, descriptors))
    }

    fn descriptors(&self, key: u64) -> Option<&[OwnedFd]> {
        if key == BROKER {
            return Some(&self.own);
        }
        match self.version(key) {
            Some(version) => Some(&version.fds),
            None => self.events.manifest(key).map(|_| &[][..]),
        }
    }
}
