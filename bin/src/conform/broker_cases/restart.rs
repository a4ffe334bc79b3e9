//! Cases about reconnecting clients, events and metrics.

use uuid::Builder;
use vmmfd::wire::broker::{
    Delete, Event, EventKind, Events, Measure, Message, Published, Put, RefusalCode, Restore, Resume, Resumed, Stop,
    Token, Watch,
};

use super::{
    client::{Broker, descriptors, fresh, memory, named, put_of, random},
    greeted,
    objects::check_lease,
};
use crate::conform::{Case, CaseResult, Context, case_end::check, peer::receive};

pub(super) fn cases() -> Vec<Case> {
    vec![
        greeted("resume", "D1 D2 L1", resume),
        greeted("request-again", "D3", request_again),
        greeted("restore", "D4", restore),
        greeted("watch", "E1 E3 B11", watch),
        greeted("watch-another-instance", "E2", |_, broker| {
            let events =
                broker.watch(Watch { prefix: String::new(), after: Some(u64::MAX), instance: Some(new_id()?) })?;
            check(events.lost, "E2", || "reported no lost events to a watcher of another instance".to_owned())
        }),
        greeted("measure", "E4", measure),
    ]
}

fn new_id() -> CaseResult<String> {
    Ok(Builder::from_random_bytes(random()?).into_uuid().to_string())
}

impl Broker<'_> {
    fn resume(&mut self, leases: &[Token], puts: &[Token]) -> CaseResult<Resumed> {
        self.send(&Message::Resume(Resume { leases: leases.to_vec(), puts: puts.to_vec() }))?;
        Ok(receive!(self, "D2", "resumed", (Message::Resumed(resumed), _) => resumed))
    }

    /// Starts a watch, and returns the first answer.
    fn watch(&mut self, watch: Watch) -> CaseResult<Events> {
        self.send(&Message::Watch(watch))?;
        self.receive_events()
    }

    fn receive_events(&mut self) -> CaseResult<Events> {
        Ok(receive!(self, "E1", "events", (Message::Events(events), _) => events))
    }
}

fn resume(context: &Context<'_>, broker: &mut Broker<'_>) -> CaseResult {
    let (memory, name, unknown) = (memory(context, 1)?, fresh("resume")?, Token(random()?));
    broker.put(&put_of(&name, &memory), &descriptors(&memory))?;
    let leased = broker.get_one(named(&name))?;
    let resumed = broker.resume(&[leased.header.token, unknown], &[unknown])?;
    check(resumed.lost == [unknown, unknown], "D2", || {
        format!("reported {} tokens as lost; 2 are unknown", resumed.lost.len())
    })?;
    let mut peer = (context.connect)()?;
    let mut next = Broker::greet(&mut peer)?;
    let again = next.resume(&[leased.header.token], &[])?;
    check(again.instance == resumed.instance, "D1", || "sent two connections different instances".to_owned())?;
    check(again.lost.is_empty(), "D2", || "did not let another connection of the user resume a lease".to_owned())?;
    // The lease now belongs to the other connection.
    broker.delete(&name)?;
    let held = broker.who(&name)?.leases.len();
    check(held == 1, "L1", || format!("reported {held} leases of one resumed lease"))?;
    next.release(&leased)?;
    next.expect_usable("L1", "the release of a resumed lease")?;
    let left = broker.who(&name)?.leases.len();
    check(left == 0, "L1", || format!("reported {left} leases after the release of the resumed lease"))
}

fn request_again(context: &Context<'_>, broker: &mut Broker<'_>) -> CaseResult {
    let (memory, name) = (memory(context, 1)?, fresh("again")?);
    let put = Put { request: Some(Token(random()?)), ..put_of(&name, &memory) };
    let first = broker.put(&put, &descriptors(&memory))?;
    let again = broker.put(&put, &descriptors(&memory))?;
    check(again == first, "D3", || format!("answered {put:?} with {first:?}, then with {again:?}"))?;
    let delete = Message::Delete(Delete { name: name.clone(), request: Some(Token(random()?)) });
    broker.send(&delete)?;
    broker.next_message("Q4", "done")?;
    // A new object with the same name, which the repeated request must not delete.
    let other = put_of(&name, &memory);
    broker.put(&other, &descriptors(&memory))?;
    broker.send(&delete)?;
    broker.next_message("D3", "done")?;
    check_lease(context, &broker.get_one(named(&name))?, &other, 0)
}

fn restore(context: &Context<'_>, broker: &mut Broker<'_>) -> CaseResult {
    let (memory, name) = (memory(context, 1)?, fresh("restore")?);
    let own = fresh("restore-owner")?;
    broker.put(&put_of(&own, &memory), &descriptors(&memory))?;
    let owner = broker.get_one(named(&own))?.header.owner;
    let (id, lease) = (new_id()?, Token(random()?));
    let restore = Restore { version: 5, id: id.clone(), created_ms: 1_790_000_000_000, owner, leases: vec![lease] };
    let put = Put { restore: Some(restore.clone()), ..put_of(&name, &memory) };
    let published = broker.put(&put, &descriptors(&memory))?;
    check(published.version == 5 && published.id == id, "D4", || {
        format!("published the restored version 5 as version {}", published.version)
    })?;
    let resumed = broker.resume(&[lease], &[])?;
    check(resumed.lost.is_empty(), "D4", || "did not restore the lease of the restored version".to_owned())?;
    let leased = broker.get_one(named(&name))?;
    let header = &leased.header;
    let same = (header.version, header.id.as_str(), header.created_ms) == (5, id.as_str(), restore.created_ms);
    check(same, "D4", || "leased the restored version as another version".to_owned())?;
    check_lease(context, &leased, &put, 0)?;
    let older = Put { restore: Some(Restore { version: 4, id: new_id()?, ..restore }), ..put };
    broker.refuse_put(&older, &descriptors(&memory), "D4", RefusalCode::Exists, "the restore of an older version")
}

fn watch(context: &Context<'_>, broker: &mut Broker<'_>) -> CaseResult {
    let (memory, name) = (memory(context, 1)?, fresh("watch")?);
    let first_answer = broker.watch(Watch { prefix: name.clone(), after: None, instance: None })?;
    check(first_answer.events.is_empty() && !first_answer.lost, "E1", || {
        "sent earlier events to a watch without `after`".to_owned()
    })?;
    let mut peer = (context.connect)()?;
    let mut maker = Broker::greet(&mut peer)?;
    let put = put_of(&name, &memory);
    let first = maker.put(&put, &descriptors(&memory))?;
    let second = maker.put(&Put { replace: true, ..put.clone() }, &descriptors(&memory))?;
    let leased = maker.get_one(named(&name))?;
    maker.release(&leased)?;
    maker.delete(&name)?;
    let want = [
        (EventKind::Published, &first),
        (EventKind::Replaced, &second),
        (EventKind::Leased, &second),
        (EventKind::Ended, &second),
        (EventKind::Deleted, &second),
    ];
    let (mut came, mut next): (Vec<Event>, _) = (Vec::new(), first_answer.next);
    while came.len() < want.len() {
        let events = broker.receive_events()?;
        next = events.next;
        came.extend(events.events);
    }
    let same = |(event, (kind, published)): (&Event, &(EventKind, &Published))| {
        (event.kind, &event.name, event.version, &event.id) == (*kind, &name, published.version, &published.id)
    };
    let ascending = came.windows(2).all(|pair| pair[0].seq < pair[1].seq);
    check(came.len() == want.len() && came.iter().zip(&want).all(same) && ascending, "E3", || {
        let kinds: Vec<_> = came.iter().map(|event| (event.seq, event.kind)).collect();
        format!("sent the events {kinds:?}; 5 occurred")
    })?;
    broker.refuse(&Message::Stop(Stop {}), "B11", RefusalCode::Stopped, "a watch that was stopped")?;
    let instance = Some(first_answer.instance);
    let again = broker.watch(Watch { prefix: name, after: Some(came[1].seq), instance })?;
    check(!again.lost && again.events == came[2..] && again.next >= next, "E1", || {
        format!("sent {} events after the second of 5", again.events.len())
    })
}

fn measure(context: &Context<'_>, broker: &mut Broker<'_>) -> CaseResult {
    let (memory, name) = (memory(context, 1)?, fresh("measure")?);
    broker.put(&put_of(&name, &memory), &descriptors(&memory))?;
    broker.expect_absent("B9", &fresh("measure-absent")?, "that was never put")?;
    broker.send(&Message::Measure(Measure {}))?;
    let measured = receive!(broker, "E4", "measured", (Message::Measured(measured), _) => measured);
    let counted = |verb: &str, outcome: &str| {
        measured.requests.iter().any(|of| (of.verb.as_str(), of.outcome.as_str()) == (verb, outcome) && of.count > 0)
    };
    let counts = measured.objects > 0 && measured.connections > 0 && counted("put", "ok") && counted("stat", "absent");
    check(counts, "E4", || format!("measured {:?} after a put and a stat of an absent name", measured.requests))?;
    match measured.durations.iter().find(|of| of.counts.len() != of.bounds_us.len() + 1) {
        None => Ok(()),
        Some(of) => check(false, "E4", || format!("sent {} counts for {} bounds", of.counts.len(), of.bounds_us.len())),
    }
}
