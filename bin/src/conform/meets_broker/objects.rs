//! What a broker must do with objects.

use std::{
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use vmmfd::{
    driver::GRANULARITY,
    error::{Error, ErrorCode},
    internals::describe,
    memory::{Part, Placement, Sharing},
    wire::{
        Memory, Segments,
        broker::{Delete, GetObject, Lifetime, Message, Put, RefusalCode},
    },
};

use super::speak::{Broker, Leased, PART, another, descriptors, fresh, memory, named, put_described, put_of};
use crate::conform::{
    Case, Fault, Scene,
    memory::{Flaw, SALT, inspect, memfd, not_memory, verify},
    peer::Peer,
};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = vec![
        Case::new("object", &["P4", "N2", "N3", "G1", "G5", "V1", "V2", "V3", "L1", "Q1", "Q2", "Q4"], object),
        Case::new("who", &["Q3", "L2"], who),
        Case::new("replace", &["P5", "P7", "L1", "N3"], replace),
        Case::new("many-segments", &["P2", "G5", "G6"], many_segments),
        Case::new("two-objects", &["G1", "G6"], two_objects),
        Case::new("maker", &["N5"], maker),
        Case::new("half-a-put", &["P4"], half_a_put),
    ];
    type Descriptor = fn() -> vmmfd::error::Result<OwnedFd>;
    let unfit: [(&str, &str, Descriptor); 5] = [
        ("unsealed-memory", "memory that can shrink", || memfd(GRANULARITY, Flaw::Unsealed)),
        ("seals-not-final", "memory whose seals are not final", || memfd(GRANULARITY, Flaw::SealsNotFinal)),
        ("sparse-memory", "memory that is not committed", || memfd(GRANULARITY, Flaw::Sparse)),
        ("short-memory", "memory of another size", || memfd(GRANULARITY, Flaw::Short)),
        ("no-memory", "a descriptor of no memory", not_memory),
    ];
    for (name, what, descriptor) in unfit {
        cases.push(Case::new(name, &["P3", "P4"], move |scene, peer| {
            let (mut broker, _) = Broker::greet(peer)?;
            let (fd, name) = (descriptor().map_err(Fault::Failed)?, fresh("unfit")?);
            let put = put_described(&name, described(scene, 1, GRANULARITY), vec![GRANULARITY]);
            broker.hand_over(&put, &[], &[fd.as_fd()])?;
            broker.refused("P3", RefusalCode::Memory, &format!("a put of {what}"))?;
            broker.absent("P4", &name, "whose put was refused")
        }));
    }
    let misplaced: [(&str, u64, usize); 2] = [("segments-out-of-order", 255, 1), ("too-many-segments", 254, 2)];
    for (name, first, count) in misplaced {
        cases.push(Case::new(name, &["P2"], move |scene, peer| {
            let (mut broker, _) = Broker::greet(peer)?;
            let memory = memory(scene, 1)?;
            let fd = descriptors(&memory)[0];
            let put = put_described(&fresh("segments")?, described(scene, 255, 255 * GRANULARITY), Vec::new());
            broker.send(&Message::Put(Box::new(Put { sizes: vec![GRANULARITY; 253], ..put })), &[fd; 253])?;
            let send = broker.answer("P2", "send")?.0;
            if !matches!(send, Message::Send(_)) {
                return Fault::broken("P2", format!("answered a put of more segments with {}", send.name()));
            }
            broker.send(&Message::Segments(Segments { first: 253, sizes: vec![GRANULARITY] }), &[fd])?;
            broker.send(&Message::Segments(Segments { first, sizes: vec![GRANULARITY; count] }), &vec![fd; count])?;
            broker.ends_with("P2", ErrorCode::Protocol, "segments that do not follow those before")
        }));
    }
    cases
}

/// The description of so many segments of one size.
pub(super) fn described(scene: &Scene<'_>, segments: u64, size: u64) -> Memory {
    let sharing = Sharing::Vmm { placement: Placement::Device, segments };
    let mapped_size = segments * GRANULARITY;
    (&describe(scene.device.identity(), sharing, size, mapped_size)).into()
}

/// What came is what was put, and the bytes are the pattern's.
pub(super) fn check(scene: &Scene<'_>, leased: &Leased, put: &Put, part: usize) -> Result<(), Fault> {
    let Some(of) = leased.header.parts.get(part) else {
        return Fault::broken("G3", "leased fewer parts than were asked for");
    };
    let same = put.parts.iter().find(|put| put.name == of.name);
    if leased.header.name != put.name || same.is_none_or(|put| put.memory != of.memory || put.digest != of.digest) {
        let what = format!("leased part `{}` of `{}` otherwise than it was put", of.name, leased.header.name);
        return Fault::broken("G5", what);
    }
    let before: u64 = leased.header.parts[..part].iter().flat_map(|part| &part.runs).map(|run| run.segments).sum();
    let mut at = before as usize;
    let mut end = None;
    for run in &of.runs {
        let some = &leased.segments[at..at + run.segments as usize];
        at += run.segments as usize;
        let sum: u64 = some.iter().map(|(_, size)| size).sum();
        let inside = run.offset.checked_add(run.size).is_some_and(|end| end <= of.memory.mapped_size);
        let counted = run.first.checked_add(run.segments).is_some_and(|end| end <= of.memory.segments);
        let ascending = end.is_none_or(|end| run.first > end);
        if run.segments == 0 || sum != run.size || !inside || !counted || !ascending {
            let run = Part::from(*run);
            return Fault::broken("G5", format!("sent {sum} bytes for {run}, behind {end:?}"));
        }
        end = Some(run.first + run.segments);
        some.iter().try_for_each(|(fd, size)| inspect(fd.as_fd(), *size, &of.memory))?;
        let bytes = run.offset..(run.offset + run.size).min(of.memory.size);
        let whole = some.iter().map(|(fd, size)| fd.try_clone().map(|fd| (fd, *size))).collect::<Result<Vec<_>, _>>();
        let whole = whole.map_err(|error| Fault::Failed(Error::system("duplicate a descriptor", error)))?;
        let found = verify(scene, &whole, run.offset, bytes, SALT).map_err(Fault::Failed)?;
        if !found.passed() {
            return Fault::broken("G5", format!("the bytes of `{}` are not those that were put", leased.header.name));
        }
    }
    Ok(())
}

fn object(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let (mut broker, _) = Broker::greet(peer)?;
    let (memory, name) = (memory(scene, 3)?, fresh("object")?);
    let put = put_of(&name, &memory);
    let published = broker.put(&put, &descriptors(&memory))?;
    if published.version != 1 {
        return Fault::broken("N2", format!("published a new name as version {}", published.version));
    }
    let summary = |broker: &mut Broker<'_>, leases: u64| {
        let found = broker.list(&name)?;
        let sound = found.objects.first().is_some_and(|of| {
            let device = of.devices.first().map(|of| (of.device.uuid, of.bytes));
            let (size, mapped) = (put.parts[0].memory.size, put.parts[0].memory.mapped_size);
            (of.name.as_str(), of.version, of.id.as_str(), of.size) == (name.as_str(), 1, published.id.as_str(), size)
                && device == Some((put.parts[0].memory.device.uuid, mapped))
                && (of.parts, of.segments, of.arrays, of.leases) == (1, 3, 0, leases)
                && of.mode == 0o600
        });
        match sound && found.objects.len() == 1 && !found.more {
            true => Ok(()),
            false => Fault::broken("Q1", format!("listed `{name}`, of which {leases} leases are held, as {found:?}")),
        }
    };
    summary(&mut broker, 0)?;
    let leased = broker.get_one(named(&name))?;
    check(scene, &leased, &put, 0)?;
    if (leased.header.version, &leased.header.id) != (1, &published.id) {
        return Fault::broken("N2", "leased another version than was published");
    }
    summary(&mut broker, 1)?;
    broker.release(&leased)?;
    summary(&mut broker, 0)?;
    let (info, _) = broker.stat(&name)?;
    if info.versions != [1] || info.lifetime != Lifetime::Maker || info.parts.len() != 1 || info.parts[0].name != PART {
        return Fault::broken("Q2", format!("described `{name}` as {info:?}"));
    }
    // Held until the end.
    let _again = broker.get_one(named(&name))?;
    broker.send(&Message::Delete(Delete { name: name.clone(), request: None }), &[])?;
    match broker.answer("Q4", "done")? {
        (Message::Done(_), _) => {}
        (other, _) => return Fault::broken("Q4", format!("answered delete with {}", other.name())),
    }
    broker.absent("Q4", &name, "after its delete")?;
    // What is leased stays, with no name.
    let leases = broker.who(&name)?.leases;
    match leases.as_slice() {
        [held] if !held.named && held.id == published.id => Ok(()),
        other => Fault::broken("L1", format!("has these leases of a deleted name: {other:?}")),
    }
}

fn who(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let (mut broker, _) = Broker::greet(peer)?;
    let (memory, name) = (memory(scene, 1)?, fresh("who")?);
    broker.put(&put_of(&name, &memory), &descriptors(&memory))?;
    let (one, other) = (broker.get_one(named(&name))?, broker.get_one(named(&name))?);
    if one.header.token == other.header.token {
        return Fault::broken("L2", "gave two leases one token");
    }
    let found = broker.who(&name)?;
    let uid = nix::unistd::geteuid().as_raw();
    let sound = |held: &vmmfd::wire::broker::HeldLease| {
        (held.name.as_str(), held.version, held.named, held.size) == (name.as_str(), 1, true, GRANULARITY)
    };
    let ascending = found.leases.windows(2).all(|pair| pair[0].number < pair[1].number);
    if found.leases.len() != 2 || !found.leases.iter().all(sound) || !ascending || found.more {
        return Fault::broken("Q3", format!("named the leases {:?}", found.leases));
    }
    if found.totals.iter().all(|total| total.uid != uid && !found.leases.iter().any(|held| held.uid == total.uid)) {
        return Fault::broken("Q3", "has no total of the caller's user with the last answer");
    }
    Ok(())
}

fn replace(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let (mut broker, _) = Broker::greet(peer)?;
    let (old, new, name) = (memory(scene, 1)?, memory(scene, 2)?, fresh("replace")?);
    let (first, second) = (put_of(&name, &old), put_of(&name, &new));
    broker.put(&first, &descriptors(&old))?;
    let refused = |broker: &mut Broker<'_>, put: Put, code, what: &str| {
        broker.hand_over(&put, &[], &descriptors(&new))?;
        broker.refused("P5", code, what)
    };
    refused(&mut broker, second.clone(), RefusalCode::Exists, "a put of a name that exists")?;
    let other = Put { replace: true, if_version: Some(7), ..second.clone() };
    refused(&mut broker, other, RefusalCode::Version, "a put for version 7 of a name at version 1")?;
    let mode = Put { replace: true, mode: Some(0o644), ..second.clone() };
    broker.hand_over(&mode, &[], &descriptors(&new))?;
    broker.refused("N3", RefusalCode::Invalid, "a replacement of another mode")?;
    let held = broker.get_one(named(&name))?;
    let published = broker.put(&Put { if_version: Some(1), ..second.clone() }, &descriptors(&new))?;
    if published.version != 2 {
        return Fault::broken("P5", format!("published a replacement of version 1 as version {}", published.version));
    }
    check(scene, &held, &first, 0)?;
    let current = broker.get_one(named(&name))?;
    check(scene, &current, &second, 0)?;
    let newer = GetObject { newer_than: Some(2), ..named(&name) };
    broker.ask(newer, None)?;
    broker.refused("G2", RefusalCode::Absent, "a get of what is newer than the current version")?;
    let earlier = GetObject { version: Some(1), ..named(&name) };
    let again = broker.get_one(earlier.clone())?;
    check(scene, &again, &first, 0)?;
    broker.release(&held)?;
    broker.release(&again)?;
    broker.ask(earlier, None)?;
    broker.refused("P7", RefusalCode::Absent, "a get of a version that was replaced and is not leased")
}

fn many_segments(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    const COUNT: usize = 600;
    let (mut broker, _) = Broker::greet(peer)?;
    let (memory, name) = (memory(scene, 1)?, fresh("many")?);
    let sizes = vec![GRANULARITY; COUNT];
    let put = put_described(&name, described(scene, COUNT as u64, COUNT as u64 * GRANULARITY), sizes);
    broker.put(&put, &[descriptors(&memory)[0]; COUNT])?;
    let leased = broker.get_one(named(&name))?;
    let different = leased.segments.iter().find(|(_, size)| *size != GRANULARITY);
    match (leased.segments.len(), different) {
        (COUNT, None) => broker.goes_on("G6", "a lease of many segments"),
        (count, _) => Fault::broken("G5", format!("sent {count} segments of {COUNT}, or other sizes")),
    }
}

fn two_objects(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let (mut broker, _) = Broker::greet(peer)?;
    let (memory, names) = (memory(scene, 2)?, [fresh("one")?, fresh("two")?]);
    let puts = names.each_ref().map(|name| put_of(name, &memory));
    for put in &puts {
        broker.put(put, &descriptors(&memory))?;
    }
    let leases = broker.get(names.iter().rev().map(|name| named(name)).collect())?;
    for (leased, put) in leases.iter().zip(puts.iter().rev()) {
        check(scene, leased, put, 0)?;
    }
    let objects = vec![named(&names[0]), named(&fresh("none")?)];
    let get = vmmfd::wire::broker::Get { objects, wait_ms: None, claim: None };
    broker.send(&Message::Get(Box::new(get)), &[])?;
    broker.refused("G1", RefusalCode::Absent, "a get of two objects of which one is absent")?;
    match broker.who(&names[0])?.leases.len() {
        1 => Ok(()),
        held => Fault::broken("G1", format!("has {held} leases where a get of two failed and one was given before")),
    }
}

fn maker(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let (mut broker, _) = Broker::greet(peer)?;
    let (memory, name) = (memory(scene, 1)?, fresh("maker")?);
    let mut gone = another(scene)?;
    let (mut maker, _) = Broker::greet(&mut gone)?;
    maker.put(&put_of(&name, &memory), &descriptors(&memory))?;
    let leased = broker.get_one(named(&name))?;
    maker.peer.shut_down_writing();
    maker.leaves("T2", "after the client had shut down writing")?;
    let deadline = Instant::now() + broker.peer.timeout();
    while !broker.list(&name)?.objects.is_empty() {
        if Instant::now() >= deadline {
            return Fault::broken("N5", "has a name of lifetime `maker` whose maker has left");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    check(scene, &leased, &put_of(&name, &memory), 0)
}

fn half_a_put(scene: &Scene<'_>, peer: &mut Peer) -> Result<(), Fault> {
    let (mut broker, _) = Broker::greet(peer)?;
    let (memory, name) = (memory(scene, 1)?, fresh("half")?);
    let fd = descriptors(&memory)[0];
    let mut gone = another(scene)?;
    let (mut maker, _) = Broker::greet(&mut gone)?;
    let put = put_described(&name, described(scene, 300, 300 * GRANULARITY), vec![GRANULARITY; 200]);
    maker.send(&Message::Put(Box::new(put)), &[fd; 200])?;
    maker.answer("P2", "send")?;
    maker.send(&Message::Segments(Segments { first: 200, sizes: vec![GRANULARITY; 99] }), &[fd; 99])?;
    broker.absent("P4", &name, "of which a segment has not come")?;
    maker.peer.shut_down_writing();
    maker.leaves("T2", "after the client had shut down writing")?;
    broker.absent("P4", &name, "whose put was cut")
}
