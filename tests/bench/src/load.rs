//! Many clients and many objects: the rate of gets, the broker's CPU time and memory, and exports beside it.

use vmmfd::{
    broker::{Client, Condition, Put, PutPart},
    driver::GRANULARITY,
};

use crate::{
    broker::{Broker, SMALL, put},
    prelude::*,
    process::{Task, exportable},
};

const NAME: &str = "bench/load";
const PAGE: &str = "bench/page";

/// Gets of each client for each sample of other rows: one is too short for the CPU time. A record reports at most 5000.
const GETS: usize = 10;
const MOST_GETS: usize = 5000;

/// The most GPU memory of a process with a context.
pub(crate) const CONTEXT: u64 = 640 << 20;

/// The time until the first get, and for each client, in nanoseconds: all clients have received the request.
const HEAD_START: u64 = 20_000_000;
const HEAD_START_EACH: u64 = 500_000;

/// The clients of host memory.
const HOST_CLIENTS: u16 = 4;

/// The objects and the connections of a broker whose memory is measured, for each sample of other rows, and the most.
const HELD_EACH: usize = 5;
const HELD: usize = 1000;

/// The objects of a crowd for each sample of other rows, and the most.
const CROWD_EACH: usize = 500;
const CROWD: usize = 100_000;

/// How often the broker gets and loses memory between exports.
const TURNS: usize = 5;

pub(crate) fn measure(run: &mut Run<'_>) -> Result<()> {
    let backend = run.options.backend;
    let clients = run.options.clients;
    let device = run.device()?;
    let host = open_device(Backend::Host, "0")?;
    gets_at_once(run, &device, clients, false, &format!("get by {clients} clients at once"))?;
    let needed = (u64::from(clients) + 1) * CONTEXT;
    let free = run.usable(&device)?;
    let what = format!("get by {clients} clients at once, mapped");
    if backend == Backend::Cuda && needed > free {
        run.leave_out(format!("{what}: they need {}, and {} are free", about(needed), about(free)));
    } else {
        gets_at_once(run, &device, clients, true, &what)?;
    }
    gets_at_once(run, &host, HOST_CLIENTS, false, "get of host memory by 4 clients")?;
    held(run, &host)?;
    crowd(run, &host)?;
    if backend == Backend::Cuda { exports(run, &device) } else { Ok(()) }
}

fn connect(peer: &Peer, broker: &Broker) -> Result<()> {
    peer.receive::<u64>()?;
    peer.call(&Request::Connect { socket: broker.socket.clone() }, &[])
}

/// Clients get one object at the same time. If `map` is set, they map it.
fn gets_at_once(run: &mut Run<'_>, device: &Device, clients: u16, map: bool, what: &str) -> Result<()> {
    run.tick(what, 0, 2)?;
    let broker = Broker::start(run, false)?;
    let memory = Shared::create(device, Spec::vmm(SMALL.next_multiple_of(device.granularity()?)))?;
    put(&broker.connect(run)?, NAME, &memory, 0)?;
    let task = Task { backend: device.backend(), driver: map, ..run.task.clone() };
    // All processes start their drivers at once.
    let start = |_| run.family.peer("a client of the broker", &task, run.cancel, &[]);
    let clients = (0..clients).map(start).collect::<Result<Vec<_>>>()?;
    clients.iter().try_for_each(|client| connect(client, &broker))?;
    let count = if map { run.count() } else { run.count().saturating_mul(GETS) }.min(MOST_GETS);
    gets(run, &clients, count.div_ceil(10), map)?;
    run.tick(what, 1, 2)?;
    let before = broker.cpu()?;
    let (samples, seconds) = gets(run, &clients, count, map)?;
    let [user, system] = broker.cpu()?;
    let number = samples.len() as f64;
    let user = user - before[0];
    let system = system - before[1];
    run.add(About::size(0), vec![(what.to_owned(), samples)], None)?;
    let numbers = [
        ("all together", number / seconds, "/s"),
        ("broker's CPU in the program", user / number, "us"),
        ("broker's CPU in the kernel", system / number, "us"),
        ("broker's use of a CPU", (user + system) / seconds / 1e4, "%"),
    ];
    run.derive(About::size(0), numbers.map(|(name, value, unit)| (format!("{what}: {name}"), value, unit)).into())
}

/// The durations of all clients' gets, and the seconds from the first get to the last.
fn gets(run: &Run<'_>, clients: &[Peer], count: usize, map: bool) -> Result<(Vec<f64>, f64)> {
    let at = now() + HEAD_START + HEAD_START_EACH * clients.len() as u64;
    let request = Request::Gets { name: NAME.to_owned(), count, map, at };
    clients.iter().try_for_each(|client| client.send(&request, &[]))?;
    let mut samples = Vec::new();
    let mut first = u64::MAX;
    let mut last = 0;
    for client in clients {
        run.cancel.check()?;
        let (begun, ended, us): (u64, u64, Vec<f64>) = client.receive()?;
        samples.extend(us);
        (first, last) = (first.min(begun), last.max(ended));
    }
    Ok((samples, last.saturating_sub(first) as f64 / 1e9))
}

/// The memory of a broker with many objects and connections.
fn held(run: &mut Run<'_>, host: &Device) -> Result<()> {
    run.tick("objects and connections", 0, 1)?;
    let broker = Broker::start(run, false)?;
    let idle = broker.resident()?;
    let held = run.count().saturating_mul(HELD_EACH).min(HELD);
    let clients = (0..held).map(|_| broker.connect(run)).collect::<Result<Vec<_>>>()?;
    put_pages(&clients[0], host, PAGE, held)?;
    let resident = broker.resident()?;
    let all = [("idle".to_owned(), idle), (format!("{held} objects and {held} connections"), resident)];
    let all = all.map(|(what, value)| (format!("broker's resident memory, {what}"), value, "MB"));
    run.derive(About::size(0), all.into())
}

/// The longest get of a client while another puts, replaces, lists and deletes very many objects.
fn crowd(run: &mut Run<'_>, host: &Device) -> Result<()> {
    const PHASES: [&str; 4] = ["puts", "replaces", "lists", "deletes"];
    let broker = Broker::start(run, true)?;
    let client = broker.connect(run)?;
    // Less than a user's share of the descriptors, a quarter.
    let room = client.metrics()?.descriptors.allowed as usize / 5;
    let objects = run.count().saturating_mul(CROWD_EACH).min(CROWD).min(room);
    let task = Task { driver: false, ..run.task.clone() };
    let reader = run.family.peer("a client of the broker", &task, run.cancel, &[])?;
    connect(&reader, &broker)?;
    let mut longest = Vec::new();
    for (number, what) in PHASES.into_iter().enumerate() {
        run.tick("gets beside very many objects", number, PHASES.len())?;
        put_pages(&client, host, what, 1)?;
        reader.send(&Request::GetUntilDeleted { name: page_name(what, 0) }, &[])?;
        match what {
            "lists" => drop(client.list("")?),
            "deletes" => (0..objects).try_for_each(|number| client.delete(&page_name(PAGE, number)))?,
            _ => put_pages(&client, host, PAGE, objects)?,
        }
        client.delete(&page_name(what, 0))?;
        let most = reader.receive::<u64>()? as f64 / 1e6;
        longest.push((format!("longest get while another client {what} {objects} objects"), most, "ms"));
    }
    run.derive(About::size(0), longest)
}

/// Exports while the broker holds memory, and while no process holds any. No other process of the bench runs.
fn exports(run: &mut Run<'_>, device: &Device) -> Result<()> {
    let verbs = device.verbs();
    let size = SMALL.next_multiple_of(device.granularity()?);
    let broker = Broker::start(run, false)?;
    let client = broker.connect(run)?;
    let idle = broker.descriptors()?;
    let mut rows =
        ["export, the broker holds memory", "export, no process holds any"].map(|name| (name.to_owned(), Vec::new()));
    for turn in 0..TURNS {
        run.tick("exports beside a broker", turn, TURNS)?;
        for (row, (_, samples)) in rows.iter_mut().enumerate() {
            if row == 0 {
                put(&client, NAME, &Shared::create(device, Spec::vmm(size))?, 0)?;
            }
            // The first is the warm-up.
            for number in 0..=run.count().div_ceil(TURNS) {
                let created = verbs.create(size, &exportable(device))?;
                let begun = Instant::now();
                let fd = verbs.export(created)?;
                let took = begun.elapsed();
                drop(fd);
                verbs.release(created)?;
                samples.extend((number > 0).then(|| us(took)));
            }
            if row == 0 {
                client.delete(NAME)?;
                broker.wait_for_descriptors(run, idle)?;
            }
        }
    }
    run.add(About::size(0), rows.into(), None).map(drop)
}

fn page_name(prefix: &str, number: usize) -> String {
    format!("{prefix}-{number}")
}

/// Puts the same memory under many names. Replaces existing versions.
fn put_pages(client: &Client, host: &Device, prefix: &str, objects: usize) -> Result<()> {
    let page = Shared::create(host, Spec::vmm(GRANULARITY))?;
    (0..objects).try_for_each(|number| {
        let put = Put::new(page_name(prefix, number)).condition(Condition::Any).part(PutPart::of("all", &page)?);
        client.put(&put).map(drop)
    })
}
