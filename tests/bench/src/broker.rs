//! The group `broker`: the cost of a named object compared with a handoff, in the same pair of processes.

use std::{os::fd::AsFd, time::Instant};

use vmmfd::{
    broker::Client,
    error::Result,
    memory::{Region, Shared, Spec},
    wire,
};
use vmmfd_cli::units::about;

use crate::{
    base::{borrowed, until_asleep, us},
    handoff::Pair,
    load,
    process::{Request, Role, Way},
    run::{About, Run},
    server::{Broker, SMALL, array, put},
    switching::OBJECTS,
};

const PLAIN: &str = "bench/plain";
const NEW: &str = "bench/new";

/// How many segments the largest memory is also split into, and those of a put.
const MANY: u64 = 64;
const SEGMENTS: u64 = 65;

/// The number of arrays in an object.
const ARRAYS: u64 = 10_000;

pub(crate) fn measure(run: &mut Run<'_>) -> Result<()> {
    compare(run)?;
    load::measure(run)
}

fn compare(run: &mut Run<'_>) -> Result<()> {
    let mut pair = Pair::start(run, 1)?;
    let broker = Broker::start(run, false)?;
    pair.consumers[0].peer.call(&Request::Connect { socket: broker.socket.clone() }, &[])?;
    let client = broker.connect(run)?;
    let idle = broker.descriptors()?;
    let sizes = run.sizes(&pair.device, 1)?;
    let granularity = pair.device.granularity()?;
    let split = sizes.iter().max().filter(|size| size.is_multiple_of(MANY * granularity)).map(|&size| (size, MANY));
    for (size, segments) in sizes.iter().map(|&size| (size, 1)).chain(split) {
        gets(run, &mut pair, &client, size, segments)?;
        // The next size may need all memory.
        broker.wait_for_descriptors(run, idle)?;
    }
    arrays(run, &mut pair, &client)?;
    puts(run, &pair, &client, "")?;
    let kept = Broker::start(run, true)?;
    puts(run, &pair, &kept.connect(run)?, ", under a keeper")?;
    // A switch needs two objects of the size.
    for size in run.sizes(&pair.device, 2)? {
        switches(run, &mut pair, &client, size)?;
        broker.wait_for_descriptors(run, idle)?;
    }
    Ok(())
}

fn gets(run: &mut Run<'_>, pair: &mut Pair, client: &Client, size: u64, segments: u64) -> Result<()> {
    pair.prepare(size, segments, &[Way::Floor])?;
    put(client, PLAIN, pair.shared()?, 0)?;
    // The consumer gets this process's end of the connection.
    let sleeper = run.peer("the sleeper", &Role::Sleeper)?;
    sleeper.line.send_bare(&[0], &borrowed(pair.fds()))?;
    pair.consumers[0].peer.call(&Request::Sleeper, &[sleeper.line.as_fd()])?;
    let names = ["floor", "handoff", "handoff, with description", "handoff by a sleeper", "get"];
    let rows = run.turns(&format!("getting {}", about(size)), &names, usize::MAX, |row| match row {
        0..3 => pair.hand_over([Way::Floor, Way::Fresh, Way::Described][row]),
        3 => pair.consumers[0].peer.took(&Request::Wake { size }),
        _ => pair.consumers[0].peer.took(&Request::Get { name: PLAIN.to_owned(), array: None }),
    })?;
    client.delete(PLAIN)?;
    pair.clear()?;
    run.add(About { segments, ..About::size(size) }, rows, Some("floor"), |medians| {
        let more = |(at, name): (usize, &str)| (format!("get, more than {name}"), medians[4] - medians[at], "us");
        [(1, "a handoff"), (3, "a handoff by a sleeper")].map(more).into()
    })
}

fn arrays(run: &mut Run<'_>, pair: &mut Pair, client: &Client) -> Result<()> {
    pair.prepare(SMALL.next_multiple_of(pair.device.granularity()?), 1, &[Way::Floor])?;
    let counts = [1, ARRAYS];
    counts.iter().try_for_each(|&count| put(client, &format!("bench/arrays-{count}"), pair.shared()?, count))?;
    let rows = run.turns("getting arrays", &["get of one array", "get of 10000 arrays"], usize::MAX, |row| {
        let count = counts[row];
        let array = Some(array(count - 1)?.name);
        pair.consumers[0].peer.took(&Request::Get { name: format!("bench/arrays-{count}"), array })
    })?;
    counts.iter().try_for_each(|count| client.delete(&format!("bench/arrays-{count}")))?;
    pair.clear()?;
    run.add(About::size(0), rows, None, |medians| {
        vec![("get of 10000 arrays, more than of one".to_owned(), (medians[1] - medians[0]) / 1e3, "ms")]
    })
}

fn puts(run: &mut Run<'_>, pair: &Pair, client: &Client, suffix: &str) -> Result<()> {
    let unit = pair.device.granularity()?;
    let one = Shared::create(&pair.device, Spec::vmm(SMALL.next_multiple_of(unit)))?;
    let many = Shared::create(&pair.device, Spec::vmm(SEGMENTS * unit).chunk(unit))?;
    let names = ["send", "put", "send of 65 segments", "put of 65 segments"].map(|name| format!("{name}{suffix}"));
    let rows = run.turns("putting", &names.each_ref().map(|name| &**name), usize::MAX, |row| {
        let memory = if row < 2 { &one } else { &many };
        if row % 2 == 0 {
            return send(pair, memory);
        }
        until_asleep();
        let begun = Instant::now();
        put(client, NEW, memory, 0)?;
        let took = us(begun.elapsed());
        client.delete(NEW).map(|()| took)
    })?;
    run.add(About::size(0), rows, None, |medians| {
        let each = (medians[3] - medians[1]) / (SEGMENTS - 1) as f64;
        let more = medians[1] - medians[0];
        vec![
            (format!("put, more than the send of a handoff{suffix}"), more, "us"),
            (format!("put, each further segment{suffix}"), each, "us"),
        ]
    })
}

/// Sends the description and the descriptors of memory in one record, like a producer in a handoff.
fn send(pair: &Pair, memory: &Shared) -> Result<f64> {
    let peer = &pair.consumers[0].peer;
    peer.call(&Request::Receive, &[])?;
    until_asleep();
    let begun = Instant::now();
    memory.synchronize()?;
    let description = wire::Memory::from(&memory.describe()?);
    let chunks = memory.chunks(0..memory.size())?.map_or(Vec::new(), |(_, chunks)| chunks);
    let fds: Vec<_> = chunks.iter().map(|chunk| chunk.as_fd()).collect();
    peer.line.send_with(&description, &fds)?;
    let took = us(begun.elapsed());
    peer.receive().map(|_| took)
}

fn switches(run: &mut Run<'_>, pair: &mut Pair, client: &Client, size: u64) -> Result<()> {
    pair.prepare(size, 1, &[Way::Floor])?;
    put(client, OBJECTS[0], pair.shared()?, 0)?;
    // Only the broker holds the second object.
    put(client, OBJECTS[1], &Shared::create(&pair.device, Spec::vmm(size))?, 0)?;
    let names = ["unmap, map and set access", "switch"];
    let rows = run.turns(&format!("switching {}", about(size)), &names, usize::MAX, |row| {
        pair.consumers[0].peer.took(&Request::Switch { bare: row == 0 })
    })?;
    pair.clear()?;
    OBJECTS.iter().try_for_each(|name| client.delete(name))?;
    run.add(About::size(size), rows, Some(names[0]), |_| Vec::new())
}
