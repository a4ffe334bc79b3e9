//! The group `broker`: the cost of a named object compared with a handoff, in the same pair of processes.

use std::{
    fs, io,
    path::PathBuf,
    process::{Command, Stdio},
};

use nix::sys::signal::{Signal, kill};
use vmmfd::{
    array::{ArrayDescriptor, ElementType, Order},
    broker::{ArrayEntry, Client, Put, PutPart},
    wire,
};
use vmmfd_cli::child::Process;

use crate::{
    child::OBJECTS,
    handoff::{Pair, chunks, descriptors},
    load,
    prelude::*,
    process::{beside, until_asleep, wait_for_word},
};

const PLAIN: &str = "bench/plain";
const NEW: &str = "bench/new";

/// How many segments the largest memory is also split into, and those of a put.
const MANY: u64 = 64;
const SEGMENTS: u64 = 65;

/// The number of arrays in an object, and the size of each in bytes.
const ARRAYS: u64 = 10_000;
const ARRAY: u64 = 200;

/// The size for rows of a single size.
pub(crate) const SMALL: u64 = 2 << 20;

pub(crate) fn measure(run: &mut Run<'_>) -> Result<()> {
    compare(run)?;
    load::measure(run)
}

fn compare(run: &mut Run<'_>) -> Result<()> {
    let mut pair = Pair::start(run, 1)?;
    let broker = Broker::start(run, false)?;
    pair.peer().call(&Request::Connect { socket: broker.socket.clone() }, &[])?;
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
    pair.prepare(size, segments, &[Way::Floor, Way::Fresh])?;
    put(client, PLAIN, pair.shared()?, 0)?;
    let names = ["floor", "handoff", "handoff, with description", "handoff by a sleeper", "get"];
    let rows = run.turns(&format!("getting {}", about(size)), &names, usize::MAX, |row| match row {
        0..3 => pair.hand_over([Way::Floor, Way::Fresh, Way::Described][row]),
        3 => pair.hand_over_asleep(),
        _ => pair.peer().took(&Request::Get { name: PLAIN.to_owned(), array: None }),
    })?;
    client.delete(PLAIN)?;
    pair.clear()?;
    let of = About { segments, ..About::size(size) };
    let medians = run.add(of, rows, Some("floor"))?;
    let more = |(at, name): (usize, &str)| (format!("get, more than {name}"), medians[4] - medians[at], "us");
    run.derive(of, [(1, "a handoff"), (3, "a handoff by a sleeper")].map(more).into())
}

fn arrays(run: &mut Run<'_>, pair: &mut Pair, client: &Client) -> Result<()> {
    pair.prepare(SMALL.next_multiple_of(pair.device.granularity()?), 1, &[Way::Floor])?;
    let counts = [1, ARRAYS];
    counts.iter().try_for_each(|&count| put(client, &format!("bench/arrays-{count}"), pair.shared()?, count))?;
    let rows = run.turns("getting arrays", &["get of one array", "get of 10000 arrays"], usize::MAX, |row| {
        let count = counts[row];
        let array = Some(array(count - 1)?.name);
        pair.peer().took(&Request::Get { name: format!("bench/arrays-{count}"), array })
    })?;
    counts.iter().try_for_each(|count| client.delete(&format!("bench/arrays-{count}")))?;
    pair.clear()?;
    let medians = run.add(About::size(0), rows, None)?;
    let more = (medians[1] - medians[0]) / 1e3;
    run.derive(About::size(0), vec![("get of 10000 arrays, more than of one".to_owned(), more, "ms")])
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
    let medians = run.add(About::size(0), rows, None)?;
    let each = (medians[3] - medians[1]) / (SEGMENTS - 1) as f64;
    let more = medians[1] - medians[0];
    let numbers = [("put, more than the send of a handoff", more), ("put, each further segment", each)];
    run.derive(About::size(0), numbers.map(|(name, number)| (format!("{name}{suffix}"), number, "us")).into())
}

/// Sends the description and the descriptors of memory in one record, like a producer in a handoff.
fn send(pair: &Pair, memory: &Shared) -> Result<f64> {
    let peer = pair.peer();
    peer.call(&Request::Receive, &[])?;
    until_asleep();
    let begun = Instant::now();
    memory.synchronize()?;
    let description = wire::Memory::from(&memory.describe()?);
    peer.line.send_with(&description, &descriptors(&chunks(memory)?))?;
    let took = us(begun.elapsed());
    peer.receive::<u64>().map(|_| took)
}

fn switches(run: &mut Run<'_>, pair: &mut Pair, client: &Client, size: u64) -> Result<()> {
    pair.prepare(size, 1, &[Way::Floor])?;
    put(client, OBJECTS[0], pair.shared()?, 0)?;
    // Only the broker holds the second object.
    put(client, OBJECTS[1], &Shared::create(&pair.device, Spec::vmm(size))?, 0)?;
    let names = ["unmap, map and set access", "switch"];
    let rows = run.turns(&format!("switching {}", about(size)), &names, usize::MAX, |row| {
        pair.peer().took(&Request::Switch { bare: row == 0 })
    })?;
    pair.clear()?;
    OBJECTS.iter().try_for_each(|name| client.delete(name))?;
    run.add(About::size(size), rows, Some(names[0])).map(drop)
}

/// A running `vmmfd serve`. Dropping it stops the processes.
pub(crate) struct Broker {
    process: Process,
    pub(crate) socket: PathBuf,
}

impl Drop for Broker {
    fn drop(&mut self) {
        // Stops the keeper too. Fails if the process has ended.
        let _ = kill(self.process.pid(), Signal::SIGTERM);
        let never = Cancel::new().map(|never| self.process.wait(Instant::now() + Duration::from_secs(1), &never));
        drop(never);
    }
}

impl Broker {
    /// Starts a broker, with a keeper or without, and waits until it listens.
    pub(crate) fn start(run: &Run<'_>, keeper: bool) -> Result<Self> {
        let missing = io::Error::from(io::ErrorKind::NotFound);
        let program = beside("vmmfd").ok_or_else(|| Error::system("find vmmfd beside vmmfd-bench", missing))?;
        let socket = run.family.folder().join(if keeper { "kept.sock" } else { "broker.sock" });
        let mut command = Command::new(program);
        command.args(["serve", "--quiet", "--socket"]).arg(&socket).stdin(Stdio::null()).stdout(Stdio::piped());
        command.args((!keeper).then_some("--no-keeper")).args(run.options.emulated.then_some("--emulated"));
        let mut broker = Self { process: run.family.spawn("the broker", &mut command)?, socket };
        wait_for_word(&mut broker.process, "listening", run.options.timeout, run.cancel)?;
        Ok(broker)
    }

    pub(crate) fn connect(&self, run: &Run<'_>) -> Result<Client> {
        Client::connect(&self.socket, &run.config())
    }

    /// A file of the process in `/proc`.
    fn read(&self, file: &str) -> Result<String> {
        let path = format!("/proc/{}/{file}", self.process.pid());
        fs::read_to_string(&path).map_err(|error| Error::system(format!("read {path}"), error))
    }

    /// The user and system time in microseconds, in steps of 10 ms: fields 14 and 15 of proc_pid_stat(5).
    pub(crate) fn cpu(&self) -> Result<[f64; 2]> {
        let stat = self.read("stat")?;
        let fields = stat.rsplit_once(')').ok_or_else(not_prepared)?.1.split_ascii_whitespace();
        let mut ticks = fields.skip(11).map(|field| field.parse::<f64>().unwrap_or(0.0) * 1e4);
        Ok([ticks.next().unwrap_or(0.0), ticks.next().unwrap_or(0.0)])
    }

    /// The resident memory in megabytes.
    pub(crate) fn resident(&self) -> Result<f64> {
        let status = self.read("status")?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB"));
        Ok(line.and_then(|kib| kib.trim().parse::<f64>().ok()).ok_or_else(not_prepared)? * 1024.0 / 1e6)
    }

    pub(crate) fn descriptors(&self) -> Result<usize> {
        let path = format!("/proc/{}/fd", self.process.pid());
        Ok(fs::read_dir(&path).map_err(|error| Error::system(format!("read {path}"), error))?.count())
    }

    /// Waits until at most `most` descriptors are open: the broker closes those of deleted objects in another thread.
    pub(crate) fn wait_for_descriptors(&self, run: &Run<'_>, most: usize) -> Result<()> {
        let begun = Instant::now();
        while self.descriptors()? > most {
            if begun.elapsed() > run.options.timeout {
                return Err(self.process.failure("does not close the descriptors of deleted objects".to_owned(), None));
            }
            run.cancel.check()?;
            thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }
}

pub(crate) fn put(client: &Client, name: &str, memory: &Shared, arrays: u64) -> Result<()> {
    let arrays = (0..arrays).map(array).collect::<Result<Vec<_>>>()?;
    client.put(&Put::new(name).part(PutPart::of("all", memory)?.arrays(arrays))).map(drop)
}

/// Array `number` of an object of many adjacent arrays.
pub(crate) fn array(number: u64) -> Result<ArrayEntry> {
    let mut array = ArrayDescriptor::new(ElementType::F32, [ARRAY / 4], Order::C)?;
    array.offset = number * ARRAY;
    Ok(ArrayEntry::new(format!("model.layers.{}.weight.{}", number / 100, number % 100), array))
}
