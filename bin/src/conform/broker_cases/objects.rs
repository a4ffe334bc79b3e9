//! Cases about objects.

use std::{
    io,
    os::fd::AsFd,
    thread,
    time::{Duration, Instant},
};

use vmmfd::{
    driver::GRANULARITY,
    error::{Error, ErrorCode},
    internals::describe,
    memory::{Part, Placement, Sharing},
    wire::{
        Memory, Segments,
        broker::{GetObject, HeldLease, Lifetime, Message, Put, RefusalCode},
    },
};

use super::{
    client::{Broker, Leased, PART, descriptors, fresh, get, memory, named, put_described, put_of},
    greeted,
};
use crate::conform::{
    Case, CaseResult, Context,
    case_end::{check, violation},
    memory::{Flaw, SALT, check_descriptor, memfd, verify},
    peer::receive,
};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = vec![
        greeted("object", "P4 N2 N3 G1 G5 V1 V2 V3 L1 Q1 Q2 Q4", object),
        greeted("who", "Q3 L2", who),
        greeted("replace", "P5 P7 L1 N3", replace),
        greeted("many-segments", "P2 G5 G6", many_segments),
        greeted("two-objects", "G1 G6", two_objects),
        greeted("maker", "N5", maker),
        greeted("half-a-put", "P4", half_a_put),
    ];
    for (name, request, flaw) in [
        ("unsealed-memory", "a put of memory that can shrink", Flaw::Unsealed),
        ("seals-not-final", "a put of memory with changeable seals", Flaw::SealsNotFinal),
        ("sparse-memory", "a put of uncommitted memory", Flaw::Sparse),
        ("short-memory", "a put of memory of another size", Flaw::Short),
        ("no-memory", "a put of a descriptor that is not memory", Flaw::NotMemory),
    ] {
        cases.push(greeted(name, "P3 P4", move |context, broker| {
            let (fd, name) = (memfd(GRANULARITY, flaw)?, fresh("invalid")?);
            let put = put_described(&name, description(context, 1, GRANULARITY), vec![GRANULARITY]);
            broker.refuse_put(&put, &[fd.as_fd()], "P3", RefusalCode::Memory, request)?;
            broker.expect_absent("P4", &name, "after its put was refused")
        }));
    }
    for (name, first, count) in [("segments-out-of-order", 255, 1), ("too-many-segments", 254, 2)] {
        cases.push(greeted(name, "P2", move |context, broker| {
            let memory = memory(context, 1)?;
            let fd = descriptors(&memory)[0];
            let sizes = vec![GRANULARITY; 253];
            let put = put_described(&fresh("segments")?, description(context, 255, 255 * GRANULARITY), sizes);
            broker.send_with(&Message::Put(Box::new(put)), &[fd; 253])?;
            receive!(broker, "P2", "send", (Message::Send(_), _) => ());
            broker.send_with(&Message::Segments(Segments { first: 253, sizes: vec![GRANULARITY] }), &[fd])?;
            let segments = Message::Segments(Segments { first, sizes: vec![GRANULARITY; count] });
            broker.send_with(&segments, &vec![fd; count])?;
            broker.expect_error("P2", ErrorCode::Protocol, "segments out of order, or too many")
        }));
    }
    cases
}

/// The description of `segments` segments of one granule.
pub(super) fn description(context: &Context<'_>, segments: u64, size: u64) -> Memory {
    let sharing = Sharing::Vmm { placement: Placement::Device, segments };
    let mapped_size = segments * GRANULARITY;
    (&describe(context.device.identity(), sharing, size, mapped_size)).into()
}

/// The leased part must match the put, and hold the pattern.
pub(super) fn check_lease(context: &Context<'_>, leased: &Leased, put: &Put, part: usize) -> CaseResult {
    let (name, parts) = (&leased.header.name, &leased.header.parts);
    let Some(header) = parts.get(part) else { return violation("G3", "leased fewer parts than were requested") };
    let same = put.parts.iter().find(|put| put.name == header.name);
    let same = same.is_some_and(|put| put.memory == header.memory && put.digest == header.digest);
    check(*name == put.name && same, "G5", || {
        format!("leased part `{}` of `{name}` with another description than was put", header.name)
    })?;
    let before: u64 = parts[..part].iter().flat_map(|part| &part.runs).map(|run| run.segments).sum();
    let (mut at, mut end) = (before as usize, None);
    for run in &header.runs {
        let segments = &leased.segments[at..at + run.segments as usize];
        at += run.segments as usize;
        let sum: u64 = segments.iter().map(|(_, size)| size).sum();
        let inside = run.offset.checked_add(run.size).is_some_and(|end| end <= header.memory.mapped_size);
        let counted = run.first.checked_add(run.segments).is_some_and(|end| end <= header.memory.segments);
        let ascending = end.is_none_or(|end| run.first > end);
        check(run.segments > 0 && sum == run.size && inside && counted && ascending, "G5", || {
            format!("sent {sum} bytes for {}, after segment {end:?}", Part::from(*run))
        })?;
        end = Some(run.first + run.segments);
        segments.iter().try_for_each(|(fd, size)| check_descriptor(fd.as_fd(), *size, &header.memory))?;
        let bytes = run.offset..(run.offset + run.size).min(header.memory.size);
        let copies: io::Result<Vec<_>> = segments.iter().map(|(fd, size)| Ok((fd.try_clone()?, *size))).collect();
        let copies = copies.map_err(|error| Error::system("duplicate a descriptor", error))?;
        let found = verify(context, &copies, run.offset, bytes, SALT)?;
        check(found.passed(), "G5", || format!("leased `{name}` with other bytes than were put"))?;
    }
    Ok(())
}

fn object(context: &Context<'_>, broker: &mut Broker<'_>) -> CaseResult {
    let (memory, name) = (memory(context, 3)?, fresh("object")?);
    let put = put_of(&name, &memory);
    let published = broker.put(&put, &descriptors(&memory))?;
    let (version, id) = (published.version, published.id.as_str());
    check(version == 1, "N2", || format!("published a new name as version {version}"))?;
    let check_summary = |broker: &mut Broker<'_>, leases: u64| {
        let found = broker.list(&name)?;
        let valid = found.objects.first().is_some_and(|summary| {
            let device = summary.devices.first().map(|device| (device.device.uuid, device.bytes));
            let memory = &put.parts[0].memory;
            (summary.name.as_str(), summary.version, summary.id.as_str()) == (name.as_str(), 1, id)
                && (summary.size, device) == (memory.size, Some((memory.device.uuid, memory.mapped_size)))
                && (summary.parts, summary.segments, summary.arrays, summary.leases) == (1, 3, 0, leases)
                && summary.mode == 0o600
        });
        check(valid && found.objects.len() == 1 && !found.more, "Q1", || {
            format!("listed `{name}`, which has {leases} leases, as {found:?}")
        })
    };
    check_summary(broker, 0)?;
    let leased = broker.get_one(named(&name))?;
    check_lease(context, &leased, &put, 0)?;
    let same = leased.header.version == 1 && leased.header.id == id;
    check(same, "N2", || "leased another version than was published".to_owned())?;
    check_summary(broker, 1)?;
    broker.release(&leased)?;
    check_summary(broker, 0)?;
    let (info, _) = broker.stat(&name)?;
    let one_part = info.parts.len() == 1 && info.parts[0].name == PART;
    check(info.versions == [1] && info.lifetime == Lifetime::Maker && one_part, "Q2", || {
        format!("described `{name}` as {info:?}")
    })?;
    // Keep a lease of the deleted version.
    let _lease = broker.get_one(named(&name))?;
    broker.delete(&name)?;
    broker.expect_absent("Q4", &name, "after its delete")?;
    let leases = broker.who(&name)?.leases;
    let kept = matches!(leases.as_slice(), [held] if !held.named && held.id == id);
    check(kept, "L1", || format!("reported these leases of a deleted name: {leases:?}"))
}

fn who(context: &Context<'_>, broker: &mut Broker<'_>) -> CaseResult {
    let (memory, name) = (memory(context, 1)?, fresh("who")?);
    broker.put(&put_of(&name, &memory), &descriptors(&memory))?;
    let (one, other) = (broker.get_one(named(&name))?, broker.get_one(named(&name))?);
    check(one.header.token != other.header.token, "L2", || "gave two leases the same token".to_owned())?;
    let found = broker.who(&name)?;
    let valid = |held: &HeldLease| {
        (held.name.as_str(), held.version, held.named, held.size) == (name.as_str(), 1, true, GRANULARITY)
    };
    let ascending = found.leases.windows(2).all(|pair| pair[0].number < pair[1].number);
    check(found.leases.len() == 2 && found.leases.iter().all(valid) && ascending && !found.more, "Q3", || {
        format!("reported the leases {:?}", found.leases)
    })?;
    let uid = nix::unistd::geteuid().as_raw();
    let own = |of: u32| of == uid || found.leases.iter().any(|held| held.uid == of);
    check(found.totals.iter().any(|total| own(total.uid)), "Q3", || {
        "reported no total of the caller's user with the last answer".to_owned()
    })
}

fn replace(context: &Context<'_>, broker: &mut Broker<'_>) -> CaseResult {
    let (old, new, name) = (memory(context, 1)?, memory(context, 2)?, fresh("replace")?);
    let (first, second) = (put_of(&name, &old), put_of(&name, &new));
    broker.put(&first, &descriptors(&old))?;
    let version = Put { replace: true, if_version: Some(7), ..second.clone() };
    let mode = Put { replace: true, mode: Some(0o644), ..second.clone() };
    for (put, rule, code, request) in [
        (&second, "P5", RefusalCode::Exists, "a put of an existing name"),
        (&version, "P5", RefusalCode::Version, "a put that expects version 7 of a name at version 1"),
        (&mode, "N3", RefusalCode::Invalid, "a replacement with another mode"),
    ] {
        broker.refuse_put(put, &descriptors(&new), rule, code, request)?;
    }
    let held = broker.get_one(named(&name))?;
    let published = broker.put(&Put { if_version: Some(1), ..second.clone() }, &descriptors(&new))?;
    check(published.version == 2, "P5", || {
        format!("published a replacement of version 1 as version {}", published.version)
    })?;
    check_lease(context, &held, &first, 0)?;
    let current = broker.get_one(named(&name))?;
    check_lease(context, &current, &second, 0)?;
    let newer = GetObject { newer_than: Some(2), ..named(&name) };
    broker.refuse_get(newer, "G2", RefusalCode::Absent, "a get of a newer version than the current one")?;
    let earlier = GetObject { version: Some(1), ..named(&name) };
    let again = broker.get_one(earlier.clone())?;
    check_lease(context, &again, &first, 0)?;
    broker.release(&held)?;
    broker.release(&again)?;
    broker.refuse_get(earlier, "P7", RefusalCode::Absent, "a get of a replaced version without leases")
}

fn many_segments(context: &Context<'_>, broker: &mut Broker<'_>) -> CaseResult {
    const COUNT: usize = 600;
    let (memory, name) = (memory(context, 1)?, fresh("many")?);
    let sizes = vec![GRANULARITY; COUNT];
    let put = put_described(&name, description(context, COUNT as u64, COUNT as u64 * GRANULARITY), sizes);
    broker.put(&put, &[descriptors(&memory)[0]; COUNT])?;
    let leased = broker.get_one(named(&name))?;
    let count = leased.segments.len();
    check(count == COUNT && leased.segments.iter().all(|(_, size)| *size == GRANULARITY), "G5", || {
        format!("sent {count} segments instead of {COUNT}, or other sizes")
    })?;
    broker.expect_usable("G6", "a lease of many segments")
}

fn two_objects(context: &Context<'_>, broker: &mut Broker<'_>) -> CaseResult {
    let (memory, names) = (memory(context, 2)?, [fresh("one")?, fresh("two")?]);
    let puts = names.each_ref().map(|name| put_of(name, &memory));
    for put in &puts {
        broker.put(put, &descriptors(&memory))?;
    }
    let leases = broker.get(names.iter().rev().map(|name| named(name)).collect())?;
    for (leased, put) in leases.iter().zip(puts.iter().rev()) {
        check_lease(context, leased, put, 0)?;
    }
    let get = get(vec![named(&names[0]), named(&fresh("none")?)], None);
    broker.refuse(&get, "G1", RefusalCode::Absent, "a get of two objects, one of them absent")?;
    let held = broker.who(&names[0])?.leases.len();
    check(held == 1, "G1", || format!("reported {held} leases after one lease and a failed get of two objects"))
}

fn maker(context: &Context<'_>, broker: &mut Broker<'_>) -> CaseResult {
    let (memory, name) = (memory(context, 1)?, fresh("maker")?);
    let put = put_of(&name, &memory);
    let mut peer = (context.connect)()?;
    let mut maker = Broker::greet(&mut peer)?;
    maker.put(&put, &descriptors(&memory))?;
    let leased = broker.get_one(named(&name))?;
    maker.disconnect()?;
    let deadline = Instant::now() + broker.peer.timeout();
    while !broker.list(&name)?.objects.is_empty() {
        check(Instant::now() < deadline, "N5", || {
            "kept a name of lifetime `maker` after its maker disconnected".to_owned()
        })?;
        thread::sleep(Duration::from_millis(5));
    }
    check_lease(context, &leased, &put, 0)
}

fn half_a_put(context: &Context<'_>, broker: &mut Broker<'_>) -> CaseResult {
    let (memory, name) = (memory(context, 1)?, fresh("half")?);
    let fd = descriptors(&memory)[0];
    let mut peer = (context.connect)()?;
    let mut maker = Broker::greet(&mut peer)?;
    let put = put_described(&name, description(context, 300, 300 * GRANULARITY), vec![GRANULARITY; 200]);
    maker.send_with(&Message::Put(Box::new(put)), &[fd; 200])?;
    maker.next_message("P2", "send")?;
    maker.send_with(&Message::Segments(Segments { first: 200, sizes: vec![GRANULARITY; 99] }), &[fd; 99])?;
    broker.expect_absent("P4", &name, "before its last segment was sent")?;
    maker.disconnect()?;
    broker.expect_absent("P4", &name, "after its put was interrupted")
}
