//! What a broker must do with versions of several parts, and with puts that contradict themselves.

use std::os::fd::BorrowedFd;

use vmmfd::{
    driver::GRANULARITY,
    wire::{
        ByteRange, Mechanism,
        broker::{GetObject, MAX_SEGMENTS, Put, PutPart, RefusalCode},
    },
};

use super::{
    objects::{check, described},
    speak::{Broker, another, descriptors, fresh, memory, named, put_described, put_of},
};
use crate::conform::{Case, Fault, Scene, peer::Peer};

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("two-parts", &["P2", "P6", "G3"], two_parts),
        Case::new("parts-of-others", &["P6"], parts_of_others),
        Case::new("contradictions", &["P1", "P2", "P6", "N3"], contradictions),
    ]
}

/// A put of two parts.
fn parted(scene: &Scene<'_>, name: &str, announced: &[&str], parts: &[&str]) -> Put {
    let mut put = put_described(name, described(scene, 1, GRANULARITY - 5), vec![GRANULARITY; parts.len()]);
    let one = put.parts[0].clone();
    put.parts = parts.iter().map(|part| PutPart { name: (*part).to_owned(), ..one.clone() }).collect();
    put.announced = announced.iter().map(ToString::to_string).collect();
    put
}

fn two_parts(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let (mut broker, _) = Broker::greet(peer)?;
    let (memory, name) = (memory(scene, 1)?, fresh("parts")?);
    let (put, fd) = (parted(scene, &name, &[], &["a", "b"]), descriptors(&memory)[0]);
    broker.put(&put, &[fd, fd])?;
    let leased = broker.get_one(named(&name))?;
    check(scene, &leased, &put, 0)?;
    check(scene, &leased, &put, 1)?;
    let one = broker.get_one(GetObject { parts: Some(vec!["b".to_owned()]), ..named(&name) })?;
    if one.header.parts.len() != 1 || one.header.parts[0].name != "b" {
        return Fault::broken("G3", "leased other parts than were asked for");
    }
    check(scene, &one, &put, 0)?;
    broker.ask(GetObject { parts: Some(vec!["c".to_owned()]), ..named(&name) }, None)?;
    broker.refused("G3", RefusalCode::Differs, "a get of a part that is not there")?;
    let range = Some(ByteRange { offset: 0, length: 1 });
    broker.ask(GetObject { range, ..named(&name) }, None)?;
    broker.refused("G3", RefusalCode::Invalid, "a range of an object of two parts, of which none is named")
}

fn parts_of_others(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let (mut first, _) = Broker::greet(peer)?;
    let (memory, name) = (memory(scene, 1)?, fresh("together")?);
    let fd = descriptors(&memory)[0];
    let put = |part: &str, wait_ms| {
        let put = parted(scene, &name, &["a", "b"], &[part]);
        Put { group: Some("g".to_owned()), wait_ms: Some(wait_ms), ..put }
    };
    first.hand_over(&put("a", 20), &[], &[fd])?;
    first.refused("P6", RefusalCode::Timeout, "a put whose other part does not come")?;
    first.absent("P4", &name, "of which a part did not come")?;
    // One that ends takes its part with it.
    let mut gone = another(scene)?;
    let (mut dying, _) = Broker::greet(&mut gone)?;
    dying.hand_over(&put("b", 60_000), &[], &[fd])?;
    dying.peer.shut_down_writing();
    dying.leaves("T2", "after the client had shut down writing")?;
    first.hand_over(&put("a", 20), &[], &[fd])?;
    first.refused("P6", RefusalCode::Timeout, "a put whose other part went with its connection")?;
    let mut other = another(scene)?;
    let (mut second, _) = Broker::greet(&mut other)?;
    second.hand_over(&put("b", 60_000), &[], &[fd])?;
    let one = first.put(&put("a", 60_000), &[fd])?;
    let two = second.published()?;
    if one != two {
        return Fault::broken("P6", format!("published the parts of one version as {one:?} and {two:?}"));
    }
    let leased = first.get_one(named(&name))?;
    match leased.header.parts.len() {
        2 => Ok(()),
        got => Fault::broken("P6", format!("leased {got} parts of a version of two")),
    }
}

fn contradictions(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let (mut broker, _) = Broker::greet(peer)?;
    let (memory, name) = (memory(scene, 1)?, fresh("contradictions")?);
    let fd = descriptors(&memory)[0];
    let put = put_of(&name, &memory);
    let changed = |change: fn(&mut Put)| {
        let mut put = put.clone();
        change(&mut put);
        put
    };
    let cases: [(&'static str, &str, Put, Vec<BorrowedFd<'_>>); 9] = [
        ("P1", "a put of no part", changed(|put| (put.parts, put.sizes) = (Vec::new(), Vec::new())), Vec::new()),
        ("P1", "two parts of one name", parted(scene, &name, &[], &["a", "a"]), vec![fd, fd]),
        ("P1", "a backend that there is not", changed(|put| put.backend = "conform".to_owned()), vec![fd]),
        ("P1", "memory of a pool", changed(|put| put.parts[0].memory.mechanism = Mechanism::Pool), vec![fd]),
        ("P1", "more data than memory", changed(|put| put.parts[0].memory.size = u64::MAX), vec![fd]),
        ("P2", "another sum of segments", changed(|put| put.parts[0].memory.mapped_size *= 2), vec![fd]),
        (
            "P2",
            "more segments than an object has",
            changed(|put| put.parts[0].memory.segments = MAX_SEGMENTS as u64 + 1),
            vec![fd],
        ),
        ("P6", "a part that is not announced", parted(scene, &name, &["b"], &["a"]), vec![fd]),
        ("N3", "a mode that files alone have", changed(|put| put.mode = Some(0o700)), vec![fd]),
    ];
    for (rule, what, put, fds) in cases {
        broker.hand_over(&put, &[], &fds)?;
        broker.refused(rule, RefusalCode::Invalid, what)?;
    }
    broker.absent("P4", &name, "whose puts were refused")
}
