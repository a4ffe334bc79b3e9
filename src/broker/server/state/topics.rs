//! Topics: who publishes what, and who waits to be introduced.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use super::caller::{Caller, ConnectionId, Right};
use crate::{
    error::BrokerError,
    wire::broker::{HeldTopic, Owner},
};

/// The topics with a publisher, and their followers. Pure state.
#[derive(Debug, Default)]
pub(crate) struct Topics {
    open: BTreeMap<Arc<str>, Topic>,
    publishers: HashMap<ConnectionId, Arc<str>>,
    followers: BTreeMap<ConnectionId, Follower>,
    /// The topics whose publishers have taken their last introductions. So a stopped publisher holds two descriptors, and not two for each
    /// follower.
    ready: BTreeSet<Arc<str>>,
}

#[derive(Debug)]
struct Topic {
    publisher: ConnectionId,
    epoch: u64,
    owner: Owner,
    mode: u16,
    /// The followers that were introduced and are still connected to the broker.
    introduced: BTreeSet<ConnectionId>,
}

#[derive(Debug)]
struct Follower {
    caller: Caller,
    name: String,
    is_prefix: bool,
    ready: bool,
    /// Topics whose publishers it has not met.
    unmet: BTreeSet<Arc<str>>,
}

/// Two clients to introduce.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Meeting {
    pub(crate) topic: Arc<str>,
    pub(crate) epoch: u64,
    pub(crate) publisher: ConnectionId,
    pub(crate) follower: ConnectionId,
}

impl Topics {
    /// Opens a topic until its publisher is removed.
    ///
    /// # Errors
    /// [`RefusalCode::Exists`](crate::error::RefusalCode::Exists) while another publisher has it; `invalid` for the mode; `denied` for a
    /// user that can't own names.
    pub(crate) fn open(&mut self, caller: &Caller, name: &str, epoch: u64, mode: u16) -> Result<(), BrokerError> {
        if mode & !0o666 != 0 {
            return refuse!(Invalid, "the mode {mode:04o} of a topic: only the bits of 0666 are allowed");
        }
        if caller.is_unmapped() {
            let uid = caller.uid;
            return refuse!(Denied, "uid {uid} stands for all unmapped users, and can't own a topic");
        }
        // The publisher has connected again before the end of its former connection was read.
        let former = self.open.get(name).filter(|topic| topic.epoch == epoch && topic.owner.uid == caller.uid);
        if let Some(former) = former.map(|topic| topic.publisher) {
            self.remove(former);
        }
        if let Some(topic) = self.open.get(name) {
            let owner = topic.owner.uid;
            return refuse!(Exists, "the topic `{name}` has a publisher, of uid {owner}");
        }
        let (name, publisher): (Arc<str>, _) = (name.into(), caller.connection);
        let (owner, introduced) = (Owner { uid: caller.uid, gid: caller.gid }, BTreeSet::new());
        let topic = Topic { publisher, epoch, owner, mode, introduced };
        for follower in self.followers.values_mut().filter(|follower| follower.wants(&name, &topic)) {
            follower.unmet.insert(Arc::clone(&name));
        }
        self.ready.insert(Arc::clone(&name));
        self.publishers.insert(publisher, Arc::clone(&name));
        self.open.insert(name, topic);
        Ok(())
    }

    /// Follows a topic, or all topics whose names start with `name`, until the follower is removed.
    pub(crate) fn follow(&mut self, caller: &Caller, name: String, is_prefix: bool) {
        let caller = caller.clone();
        let mut follower = Follower { caller, name, is_prefix, ready: true, unmet: BTreeSet::new() };
        let wanted = self.open.iter().filter(|(name, topic)| follower.wants(name, topic));
        follower.unmet = wanted.map(|(name, _)| Arc::clone(name)).collect();
        self.followers.insert(follower.caller.connection, follower);
    }

    /// A client has taken its last introduction. Returns false if it was not sent one.
    pub(crate) fn met(&mut self, id: ConnectionId) -> bool {
        match (self.publishers.get(&id), self.followers.get_mut(&id)) {
            (Some(name), _) => self.ready.insert(Arc::clone(name)),
            (None, Some(follower)) => !std::mem::replace(&mut follower.ready, true),
            (None, None) => false,
        }
    }

    /// Removes a client that has closed its connection.
    pub(crate) fn remove(&mut self, id: ConnectionId) {
        if let Some(name) = self.publishers.remove(&id) {
            self.open.remove(&name);
            self.ready.remove(&name);
            for follower in self.followers.values_mut() {
                follower.unmet.remove(&name);
            }
        }
        if self.followers.remove(&id).is_some() {
            for topic in self.open.values_mut() {
                topic.introduced.remove(&id);
            }
        }
    }

    /// The clients that can be introduced now. They are not ready again until they have taken the introduction.
    pub(crate) fn meetings(&mut self) -> Vec<Meeting> {
        let mut meetings = Vec::new();
        for (&follower, waiting) in self.followers.iter_mut().filter(|(_, follower)| follower.ready) {
            if self.ready.is_empty() {
                break;
            }
            let (few, many) = match self.ready.len() < waiting.unmet.len() {
                true => (&self.ready, &waiting.unmet),
                false => (&waiting.unmet, &self.ready),
            };
            let Some(name) = few.iter().find(|name| many.contains(*name)).cloned() else { continue };
            let Some(topic) = self.open.get_mut(&name) else { continue };
            self.ready.remove(&name);
            waiting.unmet.remove(&name);
            waiting.ready = false;
            topic.introduced.insert(follower);
            meetings.push(Meeting { topic: name, epoch: topic.epoch, publisher: topic.publisher, follower });
        }
        meetings
    }

    /// Undoes a meeting: at least one of the clients was not sent its introduction.
    pub(crate) fn withdraw(&mut self, meeting: &Meeting) {
        let Meeting { topic: name, publisher, follower, .. } = meeting;
        let topic = self.open.get_mut(name).filter(|topic| topic.publisher == *publisher);
        let is_open = topic.is_some();
        if let Some(topic) = topic {
            topic.introduced.remove(follower);
            self.ready.insert(Arc::clone(name));
        }
        if let Some(waiting) = self.followers.get_mut(follower) {
            waiting.ready = true;
            if is_open {
                waiting.unmet.insert(Arc::clone(name));
            }
        }
    }

    /// The topics that a client may read, with their publishers and the number of followers.
    pub(crate) fn list<'a>(
        &'a self,
        caller: &'a Caller,
        prefix: &'a str,
    ) -> impl Iterator<Item = (ConnectionId, HeldTopic)> + 'a {
        let from = self.open.range::<str, _>((std::ops::Bound::Included(prefix), std::ops::Bound::Unbounded));
        let named = from.take_while(move |(name, _)| name.starts_with(prefix));
        named.filter(|(_, topic)| caller.may(Right::Read, topic.owner, topic.mode)).map(|(name, topic)| {
            let followers = topic.introduced.len() as u64;
            let (name, epoch, uid) = (name.to_string(), topic.epoch, topic.owner.uid);
            (topic.publisher, HeldTopic { name, epoch, pid: 0, uid, command: None, followers })
        })
    }
}

impl Follower {
    fn wants(&self, name: &str, topic: &Topic) -> bool {
        let is_named = if self.is_prefix { name.starts_with(&self.name) } else { name == self.name };
        is_named && self.caller.may(Right::Read, topic.owner, topic.mode)
    }
}
