//! Many concurrent clients and many objects: the rate of gets, the broker's CPU time for a get, and its memory.

use std::path::Path;

use nix::sys::resource::{Resource, getrlimit};
use vmmfd::{driver::Backend, error::Result};

use super::{Broker, ClientProcess, ClientRequest, Kept, SMALL, figure};
use crate::{
    broker::ClientResponse,
    plan::Bench,
    report::Figure,
    run::{BenchRun, Capacity, unexpected, warm_up},
    stats::{Samples, now},
};
use vmmfd_cli::units::about;

/// The object that all clients get.
const NAME: &str = "bench/load";

/// Gets of each client for each planned sample: a single get is too short to measure CPU time.
const GETS: usize = 10;

/// The maximum of reported gets for each client, the capacity of a record.
const MOST_GETS: usize = 5000;

/// The maximum GPU memory of a process with a context.
const CONTEXT: u64 = 640 << 20;

/// The delay before the first get, so that all clients have received the request: a constant and a part for each client, in nanoseconds.
const HEAD_START: u64 = 20_000_000;
const HEAD_START_EACH: u64 = 500_000;

/// The number of clients without a GPU, and the minimum of their total gets per second.
const HOST_CLIENTS: usize = 4;
const HOST_AT_LEAST: f64 = 10_000.0;

/// The number of held objects and connections, and the broker's maximum resident memory for them, in megabytes.
const HELD: usize = 1000;
const HELD_AT_MOST: f64 = 30.0;

/// The number of objects for each planned sample, and its maximum.
const CROWD_EACH: usize = 500;
const CROWD: usize = 100_000;

/// The maximum latency of a get during requests for very many objects, in milliseconds.
const CROWDED_AT_MOST: f64 = 5.0;

/// The maximum number of descriptors for each connection.
const FDS_EACH: u64 = 4;

pub(super) fn measure(run: &mut BenchRun<'_>, folder: &Path, emulated: bool, capacity: Capacity) -> Result<()> {
    let (backend, clients) = (run.plan.backend, run.plan.clients);
    many_clients(run, folder, emulated, clients, false)?;
    let needed = (clients as u64 + 1).saturating_mul(CONTEXT);
    if backend == Backend::Cuda && needed > capacity.usable {
        let (needed, there) = (about(needed), about(capacity.usable));
        run.leave_out(format!("broker mapped by {clients} clients at once: they need {needed}, and there are {there}"));
    } else {
        many_clients(run, folder, emulated, clients, true)?;
    }
    host_objects(run, folder)?;
    held(run, folder)?;
    crowded(run, folder)
}

/// Measures clients of the run's backend. If `map` is set, they map the memory.
fn many_clients(run: &mut BenchRun<'_>, folder: &Path, emulated: bool, clients: usize, map: bool) -> Result<()> {
    let backend = run.plan.backend;
    let broker = Broker::start(run, folder.join(if map { "mapped.sock" } else { "load.sock" }), emulated)?;
    let what = format!("get by {clients} clients at once{}", if map { ", mapped" } else { "" });
    burst(run, &broker, backend, clients, map, &what, None)
}

/// Measures a few clients of host memory, which need no GPU.
fn host_objects(run: &mut BenchRun<'_>, folder: &Path) -> Result<()> {
    let broker = Broker::start(run, folder.join("host.sock"), false)?;
    let what = format!("get of host memory by {HOST_CLIENTS} clients at once");
    burst(run, &broker, Backend::Host, HOST_CLIENTS, false, &what, Some(HOST_AT_LEAST))
}

/// Measures clients that concurrently get the same object.
fn burst(
    run: &mut BenchRun<'_>,
    broker: &Broker,
    backend: Backend,
    clients: usize,
    map: bool,
    what: &str,
    at_least: Option<f64>,
) -> Result<()> {
    run.tick(what, 0, 2)?;
    let maker = ClientProcess::start(run, backend, true, broker)?;
    maker.call(&ClientRequest::Put { name: NAME.to_owned(), size: SMALL })?;
    // Start all drivers concurrently.
    let clients = (0..clients).map(|_| ClientProcess::launch(run, backend, map)).collect::<Result<Vec<_>>>()?;
    for client in &clients {
        client.ready()?;
        client.connect(broker, 1)?;
    }
    let count = if map { run.plan.count } else { run.plan.count.saturating_mul(GETS) }.min(MOST_GETS);
    get(run, &clients, warm_up(run.plan.count), map)?;
    run.tick(what, 1, 2)?;
    let before = broker.cpu()?;
    let (samples, seconds) = get(run, &clients, count, map)?;
    let after = broker.cpu()?;
    let gets = samples.0.len() as f64;
    run.figure(Figure {
        bench: Bench::Broker,
        name: format!("{what}, all together"),
        size: 0,
        value: gets / seconds,
        unit: "/s",
        at_most: None,
        at_least,
    });
    let total_us = after.total_us - before.total_us;
    for (part, us) in [
        ("", total_us),
        (" in the program", after.user_us - before.user_us),
        (" in the kernel", after.system_us - before.system_us),
    ] {
        figure(run, format!("{what}: CPU time of the broker{part}, each"), 0, us / gets, "us", None);
    }
    figure(run, format!("{what}: use of one CPU by the broker"), 0, total_us / seconds / 1e4, "%", None);
    run.add(Bench::Broker, 0, vec![(what.to_owned(), samples)], "");
    Ok(())
}

/// Returns the durations of all clients' gets, and the seconds from the first get to the last.
fn get(run: &BenchRun<'_>, clients: &[ClientProcess], count: usize, map: bool) -> Result<(Samples, f64)> {
    let at = now() + HEAD_START + HEAD_START_EACH * clients.len() as u64;
    for client in clients {
        client.0.send(&ClientRequest::Get { name: NAME.to_owned(), count, map, at })?;
    }
    let (mut samples, mut first, mut last) = (Samples::default(), u64::MAX, 0);
    for client in clients {
        run.cancel.check()?;
        let ClientResponse::Gets { begun, ended, us } = client.receive()? else { return Err(unexpected()) };
        samples.0.extend(us);
        (first, last) = (first.min(begun), last.max(ended));
    }
    Ok((samples, last.saturating_sub(first) as f64 / 1e9))
}

/// Measures the memory of a broker with many objects and connections.
fn held(run: &mut BenchRun<'_>, folder: &Path) -> Result<()> {
    let needed = HELD as u64 * FDS_EACH;
    if let Ok((_, most)) = getrlimit(Resource::RLIMIT_NOFILE)
        && most < needed
    {
        run.leave_out(format!("broker with {HELD} objects: a process may open {most} files, and this takes {needed}"));
        return Ok(());
    }
    run.tick("objects and connections", 0, 1)?;
    let broker = Broker::start(run, folder.join("held.sock"), false)?;
    let maker = ClientProcess::start(run, Backend::Host, true, &broker)?;
    let idle = broker.resident()?;
    maker.call(&ClientRequest::PutPages { objects: HELD })?;
    let many = ClientProcess::launch(run, Backend::Host, false)?;
    many.ready()?;
    many.connect(&broker, HELD)?;
    let resident = broker.resident()?;
    figure(run, "resident memory of the broker, idle".to_owned(), 0, idle / 1e6, "MB", None);
    let what = format!("resident memory of the broker, {HELD} objects and {HELD} connections");
    figure(run, what, 0, resident / 1e6, "MB", Some(HELD_AT_MOST));
    Ok(())
}

/// Measures the longest get of a client while another client puts, replaces, lists and deletes very many objects. The broker compacts its
/// catalogue at the same time.
fn crowded(run: &mut BenchRun<'_>, folder: &Path) -> Result<()> {
    let objects = run.plan.count.saturating_mul(CROWD_EACH).min(CROWD);
    let broker = Kept::start(folder.join("crowd.sock"), false)?;
    let start = |driver| {
        let client = ClientProcess::launch(run, Backend::Host, driver)?;
        client.ready()?;
        client.call(&ClientRequest::Connect { socket: broker.socket.clone(), connections: 1 })?;
        Ok::<_, vmmfd::error::Error>(client)
    };
    let (maker, reader) = (start(true)?, start(false)?);
    let phases = [
        ("puts", ClientRequest::PutPages { objects }),
        ("replaces", ClientRequest::PutPages { objects }),
        ("lists", ClientRequest::List { times: 3 }),
        ("deletes", ClientRequest::DeletePages { objects: objects / 2 }),
    ];
    for (number, (what, request)) in phases.into_iter().enumerate() {
        run.tick("gets beside very many objects", number, 4)?;
        let name = format!("bench/read-{what}");
        maker.call(&ClientRequest::PutPage { name: name.clone() })?;
        reader.0.send(&ClientRequest::GetUntilDeleted { name: name.clone() })?;
        maker.call(&request)?;
        maker.call(&ClientRequest::Delete { name })?;
        let ClientResponse::Gets { us, .. } = reader.receive()? else { return Err(unexpected()) };
        let longest = us.into_iter().fold(0.0, f64::max) / 1e3;
        let what = format!("longest get while another client {what} {objects} objects");
        figure(run, what, 0, longest, "ms", Some(CROWDED_AT_MOST));
    }
    Ok(())
}
