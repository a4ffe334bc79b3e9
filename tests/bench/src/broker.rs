//! The group `broker`: the cost of a named object compared with a handoff, in the same pair of processes.

use std::{
    fs,
    io::{BufRead, BufReader},
    os::fd::AsFd,
    path::{Path, PathBuf},
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use vmmfd::{
    array::{ArrayDescriptor, ElementType, Order},
    broker::{ArrayEntry, Client, Put, PutPart},
    error::{Error, Result},
    memory::{Region, Shared, Spec},
    wire,
};
use vmmfd_cli::{temporary::temporary_folder, units::about};

use crate::{
    child::not_prepared,
    handoff::{Pair, Way},
    load,
    process::{Program, Request, Role, beside, borrowed, this_program},
    run::{About, Run, until_asleep, us},
    switching::OBJECTS,
};

const PLAIN: &str = "bench/plain";
const NEW: &str = "bench/new";

/// The size for rows of a single size.
pub(crate) const SMALL: u64 = 2 << 20;

/// How many segments the largest memory is also split into, and those of a put.
const MANY: u64 = 64;
const SEGMENTS: u64 = 65;

/// The number of arrays in an object, and their size in bytes.
const ARRAYS: u64 = 10_000;
const ARRAY: u64 = 200;

/// A running `vmmfd serve`. Dropping it stops the process.
pub(crate) struct Broker {
    program: Program,
    pub(crate) socket: PathBuf,
}

impl Broker {
    /// Starts a broker, with a keeper or without, and waits until it listens.
    pub(crate) fn start(run: &Run<'_>, folder: &Path, keeper: bool) -> Result<Self> {
        let missing = std::io::Error::from(std::io::ErrorKind::NotFound);
        let path = beside("vmmfd").ok_or_else(|| Error::system("find vmmfd beside vmmfd-bench", missing))?;
        let socket = folder.join(if keeper { "kept.sock" } else { "broker.sock" });
        let mut arguments =
            vec!["serve".to_owned(), "--quiet".to_owned(), "--socket".to_owned(), socket.display().to_string()];
        arguments.extend((!keeper).then(|| "--no-keeper".to_owned()));
        arguments.extend(run.options.emulated.then(|| "--emulated".to_owned()));
        let mut command = this_program(&Role::Program { path, arguments })?;
        let program = Program::start("the broker", command.stdin(Stdio::null()).stdout(Stdio::piped()))?;
        let (broker, mut line) = (Self { program, socket }, String::new());
        // The read returns if the process exits, and the process has its own deadline for its start.
        let stdout = broker.program.child.borrow_mut().stdout.take();
        match stdout.map(|stdout| BufReader::new(stdout).read_line(&mut line)) {
            Some(Ok(1..)) => Ok(broker),
            _ => Err(broker.program.failure(broker.program.end_of_dead().unwrap_or_default())),
        }
    }

    pub(crate) fn connect(&self, run: &Run<'_>) -> Result<Client> {
        Client::connect(&self.socket, &run.config())
    }

    /// A file of the process in `/proc`.
    fn read(&self, file: &str) -> Result<String> {
        let path = format!("/proc/{}/{file}", self.program.pid());
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
        let path = format!("/proc/{}/fd", self.program.pid());
        Ok(fs::read_dir(&path).map_err(|error| Error::system(format!("read {path}"), error))?.count())
    }

    /// Waits until at most `most` descriptors are open: the broker closes those of deleted objects in another thread.
    pub(crate) fn wait_for_descriptors(&self, run: &Run<'_>, most: usize) -> Result<()> {
        let begun = Instant::now();
        while self.descriptors()? > most {
            if begun.elapsed() > run.options.timeout {
                return Err(self.program.failure("does not close the descriptors of deleted objects".to_owned()));
            }
            run.cancel.check()?;
            thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        self.program.end(Some(Signal::SIGTERM));
    }
}

pub(crate) fn measure(run: &mut Run<'_>) -> Result<()> {
    let folder = temporary_folder("vmmfd-bench.")?;
    compare(run, folder.path())?;
    load::measure(run, folder.path())
}

fn compare(run: &mut Run<'_>, folder: &Path) -> Result<()> {
    let mut pair = Pair::start(run, 1)?;
    let broker = Broker::start(run, folder, false)?;
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
    let kept = Broker::start(run, folder, true)?;
    puts(run, &pair, &kept.connect(run)?, ", under a keeper")?;
    // A switch needs two objects of the size.
    for size in run.sizes(&pair.device, 2)? {
        switches(run, &mut pair, &client, size)?;
        broker.wait_for_descriptors(run, idle)?;
    }
    Ok(())
}

pub(crate) fn put(client: &Client, name: &str, memory: &Shared, arrays: u64) -> Result<()> {
    let arrays = (0..arrays).map(array).collect::<Result<Vec<_>>>()?;
    client.put(&Put::new(name).part(PutPart::of("all", memory)?.arrays(arrays))).map(drop)
}

/// Array `number` of an object of many adjacent arrays.
fn array(number: u64) -> Result<ArrayEntry> {
    let mut array = ArrayDescriptor::new(ElementType::F32, [ARRAY / 4], Order::C)?;
    array.offset = number * ARRAY;
    Ok(ArrayEntry::new(format!("model.layers.{}.weight.{}", number / 100, number % 100), array))
}

fn gets(run: &mut Run<'_>, pair: &mut Pair, client: &Client, size: u64, segments: u64) -> Result<()> {
    pair.prepare(size, segments, &[Way::Floor])?;
    put(client, PLAIN, pair.shared()?, 0)?;
    pair.consumers[0].peer.call(&Request::Sleeper, &borrowed(pair.fds()))?;
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
    peer.line.send(&description, &fds)?;
    let took = us(begun.elapsed());
    peer.ready().map(|()| took)
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
