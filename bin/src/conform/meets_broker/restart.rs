//! What helps a client over a restart of the broker, and what it tells those who look on.

use uuid::Builder;
use vmmfd::wire::broker::{
    Delete, Event, EventKind, Events, Measure, Message, Put, RefusalCode, Restore, Resume, Resumed, Stop, Token, Watch,
};

use super::{
    Case, Fault, Scene,
    objects::check,
    speak::{Broker, another, descriptors, fresh, memory, named, put_of},
};
use crate::conform::peer::Peer;

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("resume", &["D1", "D2", "L1"], resume),
        Case::new("request-again", &["D3"], request_again),
        Case::new("restore", &["D4"], restore),
        Case::new("watch", &["E1", "E3", "B11"], watch),
        Case::new("watch-another-instance", &["E2"], |_, peer| {
            let (mut broker, _) = Broker::greet(peer)?;
            let instance = Some(Builder::from_random_bytes(random()?).into_uuid().to_string());
            let events = broker.watch(Watch { prefix: String::new(), after: Some(u64::MAX), instance })?;
            match events.lost {
                true => Ok(()),
                false => Fault::broken("E2", "told of no loss to one that had watched another instance"),
            }
        }),
        Case::new("measure", &["E4"], measure),
    ]
}

fn random() -> Result<[u8; 16], Fault> {
    let mut bytes = [0; 16];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(16) => Ok(bytes),
        _ => Err(Fault::Absent("this machine has no random bytes".to_owned())),
    }
}

impl Broker<'_> {
    fn resume(&mut self, leases: &[Token], puts: &[Token]) -> Result<Resumed, Fault> {
        self.send(&Message::Resume(Resume { leases: leases.to_vec(), puts: puts.to_vec() }), &[])?;
        match self.answer("D2", "resumed")? {
            (Message::Resumed(resumed), _) => Ok(resumed),
            (other, _) => Fault::broken("B9", format!("answered resume with {}", other.name())),
        }
    }

    /// Begins to watch, and returns what comes at once.
    fn watch(&mut self, watch: Watch) -> Result<Events, Fault> {
        self.send(&Message::Watch(watch), &[])?;
        self.events()
    }

    fn events(&mut self) -> Result<Events, Fault> {
        match self.answer("E1", "events")? {
            (Message::Events(events), _) => Ok(events),
            (other, _) => Fault::broken("B9", format!("answered watch with {}", other.name())),
        }
    }
}

fn resume(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let (mut broker, _) = Broker::greet(peer)?;
    let (memory, name, unknown) = (memory(scene, 1)?, fresh("resume")?, Token(random()?));
    let put = put_of(&name, &memory);
    broker.put(&put, &descriptors(&memory))?;
    let leased = broker.get_one(named(&name))?;
    let resumed = broker.resume(&[leased.header.token, unknown], &[unknown])?;
    if resumed.lost != [unknown, unknown] {
        return Fault::broken("D2", format!("names {} tokens as lost where two are unknown to it", resumed.lost.len()));
    }
    let mut peer = another(scene)?;
    let (mut next, _) = Broker::greet(&mut peer)?;
    let again = next.resume(&[leased.header.token], &[])?;
    if again.instance != resumed.instance {
        return Fault::broken("D1", "named two instances to two connections");
    }
    if !again.lost.is_empty() {
        return Fault::broken("D2", "did not let another connection of the user take up a lease");
    }
    // The lease is the other connection's now: it ends with that.
    broker.send(&Message::Delete(Delete { name: name.clone(), request: None }), &[])?;
    broker.answer("Q4", "done")?;
    let held = broker.who(&name)?.leases.len();
    if held != 1 {
        return Fault::broken("L1", format!("has {held} leases of what one connection has taken up"));
    }
    next.release(&leased)?;
    next.goes_on("L1", "a release of a lease that was taken up")?;
    match broker.who(&name)?.leases.len() {
        0 => Ok(()),
        left => Fault::broken("L1", format!("has {left} leases after the release of the one that was taken up")),
    }
}

fn request_again(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let (mut broker, _) = Broker::greet(peer)?;
    let (memory, name) = (memory(scene, 1)?, fresh("again")?);
    let put = Put { request: Some(Token(random()?)), ..put_of(&name, &memory) };
    let first = broker.put(&put, &descriptors(&memory))?;
    let again = broker.put(&put, &descriptors(&memory))?;
    if again != first {
        return Fault::broken("D3", format!("answered the same put with version {} of another id", again.version));
    }
    let delete = Message::Delete(Delete { name: name.clone(), request: Some(Token(random()?)) });
    broker.send(&delete, &[])?;
    broker.answer("Q4", "done")?;
    // Another object of the name, which is not what was to be deleted.
    let other = put_of(&name, &memory);
    broker.put(&other, &descriptors(&memory))?;
    broker.send(&delete, &[])?;
    broker.answer("D3", "done")?;
    check(scene, &broker.get_one(named(&name))?, &other, 0)
}

fn restore(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let (mut broker, _) = Broker::greet(peer)?;
    let (memory, name) = (memory(scene, 1)?, fresh("restore")?);
    let owner = {
        let plain = fresh("restore-owner")?;
        broker.put(&put_of(&plain, &memory), &descriptors(&memory))?;
        broker.get_one(named(&plain))?.header.owner
    };
    let (id, lease) = (Builder::from_random_bytes(random()?).into_uuid().to_string(), Token(random()?));
    let restore = Restore { version: 5, id: id.clone(), created_ms: 1_790_000_000_000, owner, leases: vec![lease] };
    let put = Put { restore: Some(restore.clone()), ..put_of(&name, &memory) };
    let published = broker.put(&put, &descriptors(&memory))?;
    if (published.version, &published.id) != (5, &id) {
        return Fault::broken(
            "D4",
            format!("published version {} for version 5 that was offered back", published.version),
        );
    }
    if !broker.resume(&[lease], &[])?.lost.is_empty() {
        return Fault::broken("D4", "gave no lease of the version that was offered back");
    }
    let leased = broker.get_one(named(&name))?;
    if (leased.header.version, &leased.header.id, leased.header.created_ms) != (5, &id, restore.created_ms) {
        return Fault::broken("D4", "leases the version that was offered back as another one");
    }
    check(scene, &leased, &put, 0)?;
    let older = Restore { version: 4, id: Builder::from_random_bytes(random()?).into_uuid().to_string(), ..restore };
    broker.hand_over(&Put { restore: Some(older), ..put }, &[], &descriptors(&memory))?;
    broker.refused("D4", RefusalCode::Exists, "an offer of an older version than there is")
}

fn watch(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let (mut broker, _) = Broker::greet(peer)?;
    let (memory, name) = (memory(scene, 1)?, fresh("watch")?);
    let begun = broker.watch(Watch { prefix: name.clone(), after: None, instance: None })?;
    if !begun.events.is_empty() || begun.lost {
        return Fault::broken("E1", "told of what was before a watch without `after`");
    }
    let mut peer = another(scene)?;
    let (mut maker, _) = Broker::greet(&mut peer)?;
    let put = put_of(&name, &memory);
    let first = maker.put(&put, &descriptors(&memory))?;
    let second = maker.put(&Put { replace: true, ..put.clone() }, &descriptors(&memory))?;
    let leased = maker.get_one(named(&name))?;
    maker.release(&leased)?;
    maker.send(&Message::Delete(Delete { name: name.clone(), request: None }), &[])?;
    maker.answer("Q4", "done")?;
    let want = [
        (EventKind::Published, &first),
        (EventKind::Replaced, &second),
        (EventKind::Leased, &second),
        (EventKind::Ended, &second),
        (EventKind::Deleted, &second),
    ];
    let (mut came, mut next): (Vec<Event>, _) = (Vec::new(), begun.next);
    while came.len() < want.len() {
        let events = broker.events()?;
        next = events.next;
        came.extend(events.events);
    }
    let same = |(event, (kind, published)): (&Event, &(EventKind, &vmmfd::wire::broker::Published))| {
        (event.kind, &event.name, event.version, &event.id) == (*kind, &name, published.version, &published.id)
    };
    let ascending = came.windows(2).all(|pair| pair[0].seq < pair[1].seq);
    if came.len() != want.len() || !came.iter().zip(&want).all(same) || !ascending {
        let kinds: Vec<_> = came.iter().map(|event| (event.seq, event.kind)).collect();
        return Fault::broken("E3", format!("told of {kinds:?} where five events happened"));
    }
    broker.send(&Message::Stop(Stop {}), &[])?;
    broker.refused("B11", RefusalCode::Stopped, "a watch that was ended")?;
    // From the third on.
    let again = broker.watch(Watch { prefix: name, after: Some(came[1].seq), instance: Some(begun.instance) })?;
    if again.lost || again.events != came[2..] || again.next < next {
        return Fault::broken("E1", format!("told of {} events behind the second of five", again.events.len()));
    }
    Ok(())
}

fn measure(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let (mut broker, _) = Broker::greet(peer)?;
    let (memory, name) = (memory(scene, 1)?, fresh("measure")?);
    broker.put(&put_of(&name, &memory), &descriptors(&memory))?;
    broker.absent("B9", &fresh("measure-absent")?, "which was never put")?;
    broker.send(&Message::Measure(Measure {}), &[])?;
    let measured = match broker.answer("E4", "measured")? {
        (Message::Measured(measured), _) => measured,
        (other, _) => return Fault::broken("B9", format!("answered measure with {}", other.name())),
    };
    let counted = |verb: &str, outcome: &str| {
        measured.requests.iter().any(|of| (of.verb.as_str(), of.outcome.as_str()) == (verb, outcome) && of.count > 0)
    };
    if measured.objects == 0 || measured.connections == 0 || !counted("put", "ok") || !counted("stat", "absent") {
        return Fault::broken("E4", format!("measured {:?} after a put and a stat of nothing", measured.requests));
    }
    match measured.durations.iter().find(|of| of.counts.len() != of.bounds_us.len() + 1) {
        None => Ok(()),
        Some(of) => Fault::broken("E4", format!("has {} counts for {} bounds", of.counts.len(), of.bounds_us.len())),
    }
}
