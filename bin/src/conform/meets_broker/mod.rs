//! This side is a client: what a broker must do.

mod content;
mod objects;
mod parts;
mod restart;
mod speak;

use std::os::fd::AsFd;

use serde_json::json;
use vmmfd::{
    error::ErrorCode,
    wire::{
        Failure, Hello, Received, Segments,
        broker::{
            Claim, Claimed, Delete, Done, Get, List, Message, RefusalCode, Release, Report, Stat, Stop, Token, Who,
        },
    },
};

use self::speak::{Broker, another, fresh, memory, named, put_of};
use super::{
    Case, Fault, Scene,
    memory::not_memory,
    peer::{Heard, PATIENT, Peer},
    records::{about, record, unreadable_of_broker},
};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = vec![
        Case::new("hello", &["B2", "H2"], |_, peer| Broker::greet(peer).map(drop)),
        Case::new("unknown-fields", &["R5", "R6"], unknown_fields),
        Case::new("newer-version", &["H1"], |_, peer| {
            let broker = Broker { peer };
            let hello = Hello { version: u16::MAX, ..broker.own_hello() };
            broker.send(&Message::Hello(hello), &[])?;
            let mut broker = broker;
            broker.answer("H1", "hello")?;
            broker.goes_on("H1", "a hello of a newer version")
        }),
        Case::new("old-version", &["H1"], |_, peer| {
            let mut broker = Broker { peer };
            let hello = Hello { version: 0, ..broker.own_hello() };
            broker.send(&Message::Hello(hello), &[])?;
            broker.ends_with("H1", ErrorCode::Version, "a hello of version 0")
        }),
        Case::new("no-capability", &["B2"], |_, peer| {
            let mut broker = Broker { peer };
            let hello = Hello { capabilities: vec!["stream".to_owned()], ..broker.own_hello() };
            broker.send(&Message::Hello(hello), &[])?;
            broker.ends_with("B2", ErrorCode::Object, "a hello without the capability `broker`")
        }),
        Case::new("empty-record", &["T2"], |_, peer| {
            let (mut broker, _) = Broker::greet(peer)?;
            broker.peer.send_record(b"", &[])?;
            broker.leaves("T2", "after an empty record")
        }),
        Case::new("error", &["B3", "H5"], |_, peer| {
            let (mut broker, _) = Broker::greet(peer)?;
            let message = "conform tries an error".to_owned();
            broker.send(&Message::Error(Failure { code: ErrorCode::Failed, message }), &[])?;
            broker.leaves("H5", "after an error")
        }),
        Case::new("no-hello", &["H6"], no_hello),
        Case::new("nothing-there", &["Q1", "Q2", "Q3", "Q4", "B9", "B12"], nothing_there),
        Case::new("names", &["N1"], names),
        Case::new("wait", &["B12"], wait),
        Case::new("stop", &["B11"], stop),
        Case::new("claim", &["G7"], claim),
        Case::new("unknown-tokens", &["B10"], unknown_tokens),
        Case::new("second-request", &["B8"], second_request),
    ];
    cases.extend(objects::cases().into_iter().chain(content::cases()).chain(parts::cases()));
    cases.extend(restart::cases());
    misplaced(&mut cases);
    for bad in unreadable_of_broker().unwrap_or_default() {
        let name = format!("record: {}", bad.name);
        cases.push(Case::new(name, about(bad.rule), move |_, peer| {
            let (mut broker, _) = Broker::greet(peer)?;
            let null = not_memory().map_err(Fault::Failed)?;
            broker.peer.send_record(&bad.record, &vec![null.as_fd(); bad.descriptors])?;
            broker.ends_with(bad.rule, bad.code, &bad.name)
        }));
    }
    cases
}

/// Messages that come where another one belongs.
fn misplaced(cases: &mut Vec<Case>) {
    type Early = (&'static str, fn() -> Message);
    let before_hello: [Early; 2] = [
        ("request-before-hello", || Message::List(List::default())),
        ("release-before-hello", || Message::Release(Release { token: Token([0; 16]) })),
    ];
    for (name, message) in before_hello {
        cases.push(Case::new(name, &["R2", "H2"], move |_, peer| {
            let mut broker = Broker { peer };
            broker.send(&message(), &[])?;
            broker.ends_with("R2", ErrorCode::Protocol, "what is no hello comes first")
        }));
    }
    type Misplaced = (&'static str, &'static [&'static str], fn(&Broker<'_>) -> Message);
    let misplaced: [Misplaced; 5] = [
        ("second-hello", &["H2", "R2"], |broker| Message::Hello(broker.own_hello())),
        ("answer-as-request", &["R2"], |_| Message::Done(Done {})),
        ("claimed-as-request", &["R2"], |_| Message::Claimed(Claimed { token: Token([0; 16]) })),
        ("received-without-lease", &["R2", "G6"], |_| Message::Received(Received { segments: 0 })),
        ("empty-get", &["B9"], |_| Message::Get(Box::new(Get { objects: Vec::new(), wait_ms: None, claim: None }))),
    ];
    for (name, rules, message) in misplaced {
        cases.push(Case::new(name, rules, move |_, peer| {
            let (mut broker, _) = Broker::greet(peer)?;
            let message = message(&broker);
            broker.send(&message, &[])?;
            match message {
                Message::Get(_) => broker.refused("B9", RefusalCode::Invalid, "a get of nothing"),
                _ => broker.ends_with(rules[0], ErrorCode::Protocol, "it comes where a request belongs"),
            }
        }));
    }
    cases.push(Case::new("segments-without-put", &["R2", "P2"], |scene, peer| {
        let (mut broker, _) = Broker::greet(peer)?;
        let memory = memory(scene, 1)?;
        let sizes = vec![memory.segments[0].1];
        broker.send(&Message::Segments(Segments { first: 0, sizes }), &[memory.segments[0].0.as_fd()])?;
        broker.ends_with("R2", ErrorCode::Protocol, "segments come where a request belongs")
    }));
}

fn unknown_fields(_: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let mut broker = Broker { peer };
    let own = broker.own_hello();
    let hello = json!({"of the future": [1, {"x": null}], "version": own.version, "pid": own.pid, "backend": own.backend,
        "capabilities": ["", "of the future", "broker"], "timeout_ms": own.timeout_ms});
    broker.peer.send_record(&record(1, &hello), &[])?;
    broker.answer("R5", "hello")?;
    broker.peer.send_record(&record(38, &json!({"prefix": "conform-", "after": null, "colour": "red"})), &[])?;
    match broker.answer("R5", "objects")? {
        (Message::Objects(_), _) => Ok(()),
        (other, _) => Fault::broken("B9", format!("answered list with {}", other.name())),
    }
}

fn no_hello(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let (_, hello) = Broker::greet(peer)?;
    let patience = hello.timeout_ms;
    if patience > PATIENT {
        return Fault::left_out(format!("it waits {patience} ms, and silences are tried up to {PATIENT} ms"));
    }
    let mut silent = another(scene)?;
    std::thread::sleep(std::time::Duration::from_millis(patience));
    Broker { peer: &mut silent }.ends_with("H6", ErrorCode::Timeout, "a client says no hello")
}

fn nothing_there(_: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let (mut broker, _) = Broker::greet(peer)?;
    let name = fresh("nothing")?;
    let found = broker.list(&name)?;
    if !found.objects.is_empty() || found.more {
        return Fault::broken("Q1", format!("listed {} objects where there is none", found.objects.len()));
    }
    broker.absent("Q2", &name, "where there is none")?;
    broker.send(&Message::Delete(Delete { name: name.clone(), request: None }), &[])?;
    broker.refused("Q4", RefusalCode::Absent, "a delete of what is not there")?;
    broker.ask(named(&name), None)?;
    broker.refused("B12", RefusalCode::Absent, "a get that does not wait")?;
    let leases = broker.who(&name)?;
    match leases.leases.is_empty() && !leases.more {
        true => Ok(()),
        false => Fault::broken("Q3", format!("named {} leases of what is not there", leases.leases.len())),
    }
}

fn names(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let (mut broker, _) = Broker::greet(peer)?;
    let memory = memory(scene, 1)?;
    for name in ["", "/a", "a/", "a//b", ".", "a/../b", "a b", "a\n", "ä", "a\0b"] {
        let what = |verb: &str| format!("a {verb} of the name {name:?}");
        broker.send(&Message::Stat(Stat { name: name.to_owned(), version: None }), &[])?;
        broker.refused("N1", RefusalCode::Invalid, &what("stat"))?;
        broker.ask(named(name), None)?;
        broker.refused("N1", RefusalCode::Invalid, &what("get"))?;
        broker.send(&Message::Delete(Delete { name: name.to_owned(), request: None }), &[])?;
        broker.refused("N1", RefusalCode::Invalid, &what("delete"))?;
        broker.hand_over(&put_of(name, &memory), &[], &speak::descriptors(&memory))?;
        broker.refused("N1", RefusalCode::Invalid, &what("put"))?;
    }
    // A name of the longest kind, and a part that is two components.
    let long = format!("{}/{}", fresh("long")?, "n".repeat(255));
    let put = put_of(&long[..255], &memory);
    broker.put(&put, &speak::descriptors(&memory))?;
    let mut put = put_of(&fresh("part")?, &memory);
    put.parts[0].name = "a/b".to_owned();
    broker.hand_over(&put, &[], &speak::descriptors(&memory))?;
    broker.refused("N1", RefusalCode::Invalid, "a part of two components")
}

fn wait(_: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let (mut broker, _) = Broker::greet(peer)?;
    for wait in [0, 20] {
        broker.ask(named(&fresh("wait")?), Some(wait))?;
        broker.refused("B12", RefusalCode::Timeout, &format!("a get that waits {wait} ms"))?;
    }
    Ok(())
}

/// A wait that no peer here sees the end of.
const LONG_MS: u64 = 3_600_000;

fn stop(_: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let (mut broker, _) = Broker::greet(peer)?;
    // Where nothing waits it has no effect, and no answer.
    broker.send(&Message::Stop(Stop {}), &[])?;
    broker.goes_on("B10", "a stop of nothing")?;
    broker.ask(named(&fresh("stop")?), Some(LONG_MS))?;
    broker.send(&Message::Stop(Stop {}), &[])?;
    broker.refused("B11", RefusalCode::Stopped, "a get that is stopped")
}

fn claim(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let (mut first, _) = Broker::greet(peer)?;
    let (mut peers, name) = ([another(scene)?, another(scene)?], fresh("claim")?);
    let [second, third] = &mut peers;
    let ((mut second, _), (mut third, _)) = (Broker::greet(second)?, Broker::greet(third)?);
    let claim = |broker: &Broker<'_>, claim: Claim, wait_ms| {
        broker.send(&Message::Get(Box::new(Get { objects: vec![named(&name)], wait_ms, claim: Some(claim) })), &[])
    };
    let claimed = |broker: &mut Broker<'_>, what: &str| match broker.answer("G7", what)? {
        (Message::Claimed(claimed), _) => Ok(claimed.token),
        (other, _) => Fault::broken("G7", format!("sent {} where {what} belongs", other.name())),
    };
    claim(&first, Claim::default(), Some(LONG_MS))?;
    let token = claimed(&mut first, "claimed, of the first that asks")?;
    claim(&second, Claim::default(), None)?;
    second.refused("G7", RefusalCode::Absent, "a claim that another has")?;
    claim(&second, Claim::default(), Some(LONG_MS))?;
    // Nothing comes of a release but by the token's connection.
    third.send(&Message::Release(Release { token }), &[])?;
    third.goes_on("B10", "a release of another's token")?;
    claim(&third, Claim::default(), None)?;
    third.refused("G7", RefusalCode::Absent, "a claim that another has and one without it released")?;
    first.send(&Message::Release(Release { token }), &[])?;
    let other = claimed(&mut second, "claimed, after its release")?;
    if other == token {
        return Fault::broken("L2", "gave two claims one token");
    }
    // What is put without the claim ends it, and those that wait are answered.
    claim(&third, Claim::default(), Some(LONG_MS))?;
    let memory = memory(scene, 1)?;
    first.put(&put_of(&name, &memory), &speak::descriptors(&memory))?;
    let leased = third.leased(false)?;
    match leased.header.name == name {
        true => Ok(()),
        false => Fault::broken("G7", format!("leased `{}` where `{name}` was asked for", leased.header.name)),
    }
}

fn unknown_tokens(_: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let (mut broker, _) = Broker::greet(peer)?;
    let token = Token([0xA5; 16]);
    broker.send(&Message::Release(Release { token }), &[])?;
    broker.send(&Message::Report(Report { token, message: "conform reports nothing".to_owned() }), &[])?;
    broker.goes_on("B10", "a release and a report of a token that it did not give")
}

fn second_request(_: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let (mut broker, _) = Broker::greet(peer)?;
    broker.ask(named(&fresh("second")?), Some(LONG_MS))?;
    broker.send(&Message::Who(Who::default()), &[])?;
    match broker.hear()? {
        Heard::Message(message, _) => match *message {
            Message::Error(Failure { code: ErrorCode::Protocol, .. }) => broker.leaves("H5", "after its error"),
            other => {
                Fault::broken("B8", format!("sent {} where a second request came before the answer", other.name()))
            }
        },
        Heard::End => Fault::broken("B8", "hung up without an error at a second request"),
        Heard::Silence => Fault::broken("B8", "said nothing to a second request before the answer"),
    }
}
