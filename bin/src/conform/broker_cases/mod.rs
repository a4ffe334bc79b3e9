//! Cases for a broker. This side is a client.

mod client;
mod content;
mod objects;
mod parts;
mod restart;

use std::{thread, time::Duration};

use serde_json::json;
use vmmfd::{
    error::ErrorCode,
    wire::{
        Failure, Hello, Received, Segments,
        broker::{Claim, Claimed, Done, Get, List, Message, RefusalCode, Release, Report, Stop, Token, Who},
    },
};

use self::client::{Broker, delete, descriptors, fresh, get, memory, named, put_of, stat};
use super::{
    Case, CaseResult, Context, case,
    case_end::{check, violation},
    peer::{Incoming, Peer, receive, skip_if_slow},
    records::{invalid_for_broker, record},
};

/// A case that starts after `hello`.
fn greeted(
    name: &'static str,
    rules: &'static str,
    run: impl Fn(&Context<'_>, &mut Broker<'_>) -> CaseResult + 'static,
) -> Case {
    case(name, rules, move |context, peer| run(context, &mut Broker::greet(peer)?))
}

pub(super) fn cases() -> Vec<Case> {
    let mut cases = hellos();
    cases.extend(requests());
    cases.extend(objects::cases());
    cases.extend(content::cases().into_iter().chain(parts::cases()).chain(restart::cases()));
    for (name, message) in [
        ("request-before-hello", Message::List(List::default())),
        ("release-before-hello", Message::Release(Release { token: Token([0; 16]) })),
    ] {
        cases.push(case(name, "R2 H2", move |_, peer| {
            Broker { peer }.provoke(&message, "R2", ErrorCode::Protocol, "a first message other than hello")
        }));
    }
    type Misplaced = (&'static str, &'static str, fn(&Broker<'_>) -> Message);
    let misplaced: [Misplaced; 4] = [
        ("second-hello", "H2 R2", |broker| Message::Hello(broker.own_hello())),
        ("answer-as-request", "R2", |_| Message::Done(Done {})),
        ("claimed-as-request", "R2", |_| Message::Claimed(Claimed { token: Token([0; 16]) })),
        ("received-without-lease", "R2 G6", |_| Message::Received(Received { segments: 0 })),
    ];
    for (name, rules, message) in misplaced {
        cases.push(greeted(name, rules, move |context, broker| {
            let message = message(broker);
            broker.provoke(&message, context.rule, ErrorCode::Protocol, "a message other than a request")
        }));
    }
    for invalid in invalid_for_broker().unwrap_or_default() {
        cases.push(case(format!("record: {}", invalid.name), invalid.rule(), move |_, peer| {
            invalid.send::<Message>(Broker::greet(peer)?.peer)
        }));
    }
    cases
}

/// The beginning of a connection, and its end.
fn hellos() -> Vec<Case> {
    vec![
        greeted("hello", "B2 H2", |_, _| Ok(())),
        case("unknown-fields", "R5 R6", unknown_fields),
        case("newer-version", "H1", |_, peer| {
            let mut broker = Broker { peer };
            broker.send(&Message::Hello(Hello { version: u16::MAX, ..broker.own_hello() }))?;
            broker.next_message("H1", "hello")?;
            broker.expect_usable("H1", "a hello of a newer version")
        }),
        case("old-version", "H1", |_, peer| {
            let mut broker = Broker { peer };
            let hello = Message::Hello(Hello { version: 0, ..broker.own_hello() });
            broker.provoke(&hello, "H1", ErrorCode::Version, "a hello of version 0")
        }),
        case("no-capability", "B2", |_, peer| {
            let mut broker = Broker { peer };
            let hello = Message::Hello(Hello { capabilities: vec!["stream".to_owned()], ..broker.own_hello() });
            broker.provoke(&hello, "B2", ErrorCode::Object, "a hello without the capability `broker`")
        }),
        greeted("empty-record", "T2", |_, broker| {
            broker.peer.send_record(b"", &[])?;
            broker.expect_close("T2", "after an empty record")
        }),
        greeted("error", "B3 H5", |_, broker| {
            let message = "an error of conform".to_owned();
            broker.send(&Message::Error(Failure { code: ErrorCode::Failed, message }))?;
            broker.expect_close("H5", "after an error")
        }),
        case("no-hello", "H6", |context, peer| {
            let (_, hello) = Broker::greet_with_hello(peer)?;
            skip_if_slow(&hello)?;
            let mut silent = (context.connect)()?;
            thread::sleep(Duration::from_millis(hello.timeout_ms));
            Broker { peer: &mut silent }.expect_error("H6", ErrorCode::Timeout, "a client that sends no hello")
        }),
    ]
}

/// Requests without objects.
fn requests() -> Vec<Case> {
    vec![
        greeted("nothing-there", "Q1 Q2 Q3 Q4 B9 B12", nothing_there),
        greeted("names", "N1", names),
        greeted("wait", "B12", |_, broker| {
            [0, 20].into_iter().try_for_each(|wait| {
                let get = get(vec![named(&fresh("wait")?)], Some(wait));
                broker.refuse(&get, "B12", RefusalCode::Timeout, &format!("a get that waits {wait} ms"))
            })
        }),
        greeted("stop", "B11", |_, broker| {
            // Without a wait, stop has no effect and no answer.
            broker.send(&Message::Stop(Stop {}))?;
            broker.expect_usable("B10", "a stop without a wait")?;
            broker.send(&get(vec![named(&fresh("stop")?)], Some(LONG_WAIT_MS)))?;
            broker.refuse(&Message::Stop(Stop {}), "B11", RefusalCode::Stopped, "a get that was stopped")
        }),
        greeted("claim", "G7", claim),
        greeted("unknown-tokens", "B10", |_, broker| {
            let token = Token([0xA5; 16]);
            broker.send(&Message::Release(Release { token }))?;
            broker.send(&Message::Report(Report { token, message: "a report of conform".to_owned() }))?;
            broker.expect_usable("B10", "a release and a report with an unknown token")
        }),
        greeted("second-request", "B8", second_request),
        greeted("segments-without-put", "R2 P2", |context, broker| {
            let memory = memory(context, 1)?;
            let (sizes, fds) = memory.descriptors(0..1);
            broker.send_with(&Message::Segments(Segments { first: 0, sizes }), &fds)?;
            broker.expect_error("R2", ErrorCode::Protocol, "segments instead of a request")
        }),
        greeted("empty-get", "B9", |_, broker| {
            broker.refuse(&get(Vec::new(), None), "B9", RefusalCode::Invalid, "a get without objects")
        }),
    ]
}

fn unknown_fields(_: &Context<'_>, peer: &mut Peer) -> CaseResult {
    let mut broker = Broker { peer };
    let own = broker.own_hello();
    let hello = json!({"of the future": [1, {"x": null}], "version": own.version, "pid": own.pid, "backend": own.backend,
        "capabilities": ["", "of the future", "broker"], "timeout_ms": own.timeout_ms});
    broker.peer.send_record(&record(1, &hello), &[])?;
    broker.next_message("R5", "hello")?;
    broker.peer.send_record(&record(38, &json!({"prefix": "conform-", "after": null, "colour": "red"})), &[])?;
    match broker.next_message("R5", "objects")? {
        (Message::Objects(_), _) => Ok(()),
        (other, _) => violation("B9", format!("sent {} instead of objects", other.name())),
    }
}

fn nothing_there(_: &Context<'_>, broker: &mut Broker<'_>) -> CaseResult {
    let name = fresh("nothing")?;
    let found = broker.list(&name)?;
    check(found.objects.is_empty() && !found.more, "Q1", || {
        format!("listed {} objects under an unused prefix", found.objects.len())
    })?;
    broker.expect_absent("Q2", &name, "that does not exist")?;
    broker.refuse(&delete(&name), "Q4", RefusalCode::Absent, "a delete of an absent name")?;
    broker.refuse_get(named(&name), "B12", RefusalCode::Absent, "a get without a wait")?;
    let leases = broker.who(&name)?;
    check(leases.leases.is_empty() && !leases.more, "Q3", || {
        format!("reported {} leases of an absent name", leases.leases.len())
    })
}

fn names(context: &Context<'_>, broker: &mut Broker<'_>) -> CaseResult {
    let memory = memory(context, 1)?;
    for name in ["", "/a", "a/", "a//b", ".", "a/../b", "a b", "a\n", "ä", "a\0b"] {
        for (verb, message) in [("stat", stat(name)), ("get", get(vec![named(name)], None)), ("delete", delete(name))] {
            broker.refuse(&message, "N1", RefusalCode::Invalid, &format!("a {verb} of the name {name:?}"))?;
        }
        let request = format!("a put of the name {name:?}");
        broker.refuse_put(&put_of(name, &memory), &descriptors(&memory), "N1", RefusalCode::Invalid, &request)?;
    }
    // The longest name, and a part name of two components.
    let long = format!("{}/{}", fresh("long")?, "n".repeat(255));
    broker.put(&put_of(&long[..255], &memory), &descriptors(&memory))?;
    let mut put = put_of(&fresh("part")?, &memory);
    put.parts[0].name = "a/b".to_owned();
    broker.refuse_put(&put, &descriptors(&memory), "N1", RefusalCode::Invalid, "a part name of two components")
}

/// A wait that does not time out during a case.
const LONG_WAIT_MS: u64 = 3_600_000;

fn claim(context: &Context<'_>, first: &mut Broker<'_>) -> CaseResult {
    let (mut peers, name) = ([(context.connect)()?, (context.connect)()?], fresh("claim")?);
    let [second, third] = &mut peers;
    let (mut second, mut third) = (Broker::greet(second)?, Broker::greet(third)?);
    let claim = |wait_ms| {
        let claim = Some(Claim::default());
        Message::Get(Box::new(Get { objects: vec![named(&name)], wait_ms, claim }))
    };
    let claimed = |broker: &mut Broker<'_>| {
        CaseResult::Ok(receive!(broker, "G7", "claimed", (Message::Claimed(claimed), _) => claimed.token))
    };
    first.send(&claim(Some(LONG_WAIT_MS)))?;
    let token = claimed(first)?;
    second.refuse(&claim(None), "G7", RefusalCode::Absent, "a claim that another connection holds")?;
    second.send(&claim(Some(LONG_WAIT_MS)))?;
    // Only the connection that holds the claim can release it.
    third.send(&Message::Release(Release { token }))?;
    third.expect_usable("B10", "a release of another connection's token")?;
    third.refuse(&claim(None), "G7", RefusalCode::Absent, "a claim after another connection tried to release it")?;
    first.send(&Message::Release(Release { token }))?;
    let other = claimed(&mut second)?;
    check(other != token, "L2", || "gave two claims the same token".to_owned())?;
    // A put without the claim releases it, and answers the waiting connections.
    third.send(&claim(Some(LONG_WAIT_MS)))?;
    let memory = memory(context, 1)?;
    first.put(&put_of(&name, &memory), &descriptors(&memory))?;
    let leased = third.receive_lease(false)?;
    check(leased.header.name == name, "G7", || format!("leased `{}` instead of `{name}`", leased.header.name))
}

fn second_request(_: &Context<'_>, broker: &mut Broker<'_>) -> CaseResult {
    broker.send(&get(vec![named(&fresh("second")?)], Some(LONG_WAIT_MS)))?;
    broker.send(&Message::Who(Who::default()))?;
    let found = match broker.receive()? {
        Incoming::Message(message, _) => match *message {
            Message::Error(Failure { code: ErrorCode::Protocol, .. }) => {
                return broker.expect_close("H5", "after its error");
            }
            other => format!("sent {}", other.name()),
        },
        Incoming::Closed => "closed the connection without an error".to_owned(),
        Incoming::Timeout => "sent nothing".to_owned(),
    };
    violation("B8", format!("{found} after a second request before the answer to the first"))
}
