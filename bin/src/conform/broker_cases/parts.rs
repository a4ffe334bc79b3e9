//! Cases about versions of several parts, and about invalid puts.

use vmmfd::{
    driver::GRANULARITY,
    wire::{
        ByteRange, Mechanism,
        broker::{GetObject, MAX_SEGMENTS, Put, PutPart, RefusalCode},
    },
};

use super::{
    client::{Broker, descriptors, fresh, memory, named, put_described, put_of},
    greeted,
    objects::{check_lease, description},
};
use crate::conform::{Case, CaseResult, Context, case_end::check};

pub(super) fn cases() -> Vec<Case> {
    vec![
        greeted("two-parts", "P2 P6 G3", two_parts),
        greeted("parts-of-others", "P6", parts_of_others),
        greeted("contradictions", "P1 P2 P6 N3", contradictions),
    ]
}

/// A put of single-segment parts.
fn put_parts(context: &Context<'_>, name: &str, announced: &[&str], parts: &[&str]) -> Put {
    let mut put = put_described(name, description(context, 1, GRANULARITY - 5), vec![GRANULARITY; parts.len()]);
    let part = put.parts[0].clone();
    put.parts = parts.iter().map(|name| PutPart { name: (*name).to_owned(), ..part.clone() }).collect();
    put.announced = announced.iter().map(ToString::to_string).collect();
    put
}

fn two_parts(context: &Context<'_>, broker: &mut Broker<'_>) -> CaseResult {
    let (memory, name) = (memory(context, 1)?, fresh("parts")?);
    let (put, fd) = (put_parts(context, &name, &[], &["a", "b"]), descriptors(&memory)[0]);
    broker.put(&put, &[fd, fd])?;
    let leased = broker.get_one(named(&name))?;
    check_lease(context, &leased, &put, 0)?;
    check_lease(context, &leased, &put, 1)?;
    let of_part = |part: &str| GetObject { parts: Some(vec![part.to_owned()]), ..named(&name) };
    let one = broker.get_one(of_part("b"))?;
    let same = one.header.parts.len() == 1 && one.header.parts[0].name == "b";
    check(same, "G3", || "leased other parts than were requested".to_owned())?;
    check_lease(context, &one, &put, 0)?;
    broker.refuse_get(of_part("c"), "G3", RefusalCode::Differs, "a get of a part that does not exist")?;
    let range = GetObject { range: Some(ByteRange { offset: 0, length: 1 }), ..named(&name) };
    broker.refuse_get(range, "G3", RefusalCode::Invalid, "a range of an object of two parts without a part")
}

fn parts_of_others(context: &Context<'_>, first: &mut Broker<'_>) -> CaseResult {
    let (memory, name) = (memory(context, 1)?, fresh("together")?);
    let fds = descriptors(&memory);
    let put = |part: &str, wait_ms| {
        let put = put_parts(context, &name, &["a", "b"], &[part]);
        Put { group: Some("g".to_owned()), wait_ms: Some(wait_ms), ..put }
    };
    first.refuse_put(&put("a", 20), &fds, "P6", RefusalCode::Timeout, "a put without its other part")?;
    first.expect_absent("P4", &name, "with a missing part")?;
    // A disconnected client's part is dropped.
    let mut peer = (context.connect)()?;
    let mut gone = Broker::greet(&mut peer)?;
    gone.send_put(&put("b", 60_000), &[], &fds)?;
    gone.disconnect()?;
    first.refuse_put(&put("a", 20), &fds, "P6", RefusalCode::Timeout, "a put whose other part was dropped")?;
    let mut peer = (context.connect)()?;
    let mut second = Broker::greet(&mut peer)?;
    second.send_put(&put("b", 60_000), &[], &fds)?;
    let (one, two) = (first.put(&put("a", 60_000), &fds)?, second.receive_published()?);
    check(one == two, "P6", || format!("published the parts of one version as {one:?} and {two:?}"))?;
    let parts = first.get_one(named(&name))?.header.parts.len();
    check(parts == 2, "P6", || format!("leased {parts} parts of a version of 2"))
}

fn contradictions(context: &Context<'_>, broker: &mut Broker<'_>) -> CaseResult {
    let (memory, name) = (memory(context, 1)?, fresh("contradictions")?);
    let fd = descriptors(&memory)[0];
    let put = put_of(&name, &memory);
    let changed = |change: fn(&mut Put)| {
        let mut put = put.clone();
        change(&mut put);
        put
    };
    let segments = changed(|put| put.parts[0].memory.segments = MAX_SEGMENTS as u64 + 1);
    for (rule, request, put) in [
        ("P1", "a put without a part", changed(|put| (put.parts, put.sizes) = (Vec::new(), Vec::new()))),
        ("P1", "two parts of the same name", put_parts(context, &name, &[], &["a", "a"])),
        ("P1", "an unknown backend", changed(|put| put.backend = "conform".to_owned())),
        ("P1", "memory of a pool", changed(|put| put.parts[0].memory.mechanism = Mechanism::Pool)),
        ("P1", "more data than memory", changed(|put| put.parts[0].memory.size = u64::MAX)),
        ("P2", "segments of another total size", changed(|put| put.parts[0].memory.mapped_size *= 2)),
        ("P2", "more segments than an object may have", segments),
        ("P6", "a part that is not announced", put_parts(context, &name, &["b"], &["a"])),
        ("N3", "an execute mode", changed(|put| put.mode = Some(0o700))),
    ] {
        let fds = vec![fd; put.sizes.len()];
        broker.refuse_put(&put, &fds, rule, RefusalCode::Invalid, request)?;
    }
    broker.expect_absent("P4", &name, "after its puts were refused")
}
