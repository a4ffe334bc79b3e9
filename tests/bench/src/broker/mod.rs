//! The bench `broker`: the cost of a named object compared with a handoff, and the resources of the broker process.
//!
//! The broker is a separate process, started for the run. The compared methods take turns in one pair of processes: driver calls only, a
//! session of this library, and the broker.

mod client;
mod exports;
mod load;
mod maker;
mod server;
mod sleeper;
mod switching;
mod through_c;

use std::path::Path;

use vmmfd::{driver::Backend, error::Result};

use self::{
    client::ClientRequest,
    maker::{ARRAYS, SEGMENTS},
    server::{Broker, Kept},
};
pub(super) use self::{
    client::{ClientResponse, serve_client},
    maker::Maker,
    server::serve,
    sleeper::{Sleeper, serve_sleeper},
    switching::Switching,
    through_c::{ThroughC, c_text},
};
use super::{
    handoff::take_turns,
    plan::Bench,
    process::BenchProcess,
    protocol::{Method, ProducerRequest, ProducerResponse},
    report::Figure,
    run::{BenchRun, Capacity, FOLDER, ask, ask_done, unexpected},
    stats::Samples,
    task::{Role, Task},
};
use vmmfd_cli::{temporary::temporary_folder, units::about};

const GPU_SIZES: [u64; 4] = [2 << 20, 1 << 30, 8 << 30, 64 << 30];
const HOST_SIZES: [u64; 2] = [2 << 20, 64 << 20];

/// The size for measurements at a single size.
const SMALL: u64 = 2 << 20;

/// How many segments the largest memory is also split into.
const MANY: u64 = 64;

/// The methods at each size: the floor first, then the comparisons, and the gets last.
const COMPARED: [(&str, Method); 6] = [
    ("floor", Method::Floor),
    ("handoff", Method::Fresh),
    ("handoff, with description", Method::Described),
    ("handoff by a sleeper", Method::Sleeper),
    ("get", Method::Get),
    ("get through C", Method::GetThroughC),
];

/// The maximum extra time of a get, compared with handoffs by a busy and by an idle sender, in microseconds.
const GET_AT_MOST: f64 = 15.0;

/// The maximum duration of a get through the C library, relative to one through the Rust library.
const C_AT_MOST: f64 = 1.02;

/// The maximum extra time of a get with very many arrays, compared with a single array, in milliseconds.
const ARRAYS_AT_MOST: f64 = 3.0;

/// The maximum extra time of a put compared with a send, and of each further segment, in microseconds.
const PUT_AT_MOST: f64 = 60.0;
const SEGMENT_AT_MOST: f64 = 5.0;

/// The sizes of memory for switches.
const SWITCH_SIZES: [u64; 3] = [2 << 20, 1 << 30, 8 << 30];

/// The maximum duration of a switch, relative to the driver's calls.
const SWITCH_AT_MOST: f64 = 1.2;

pub(super) fn measure(run: &mut BenchRun<'_>) -> Result<()> {
    let folder = temporary_folder(FOLDER)?;
    let (emulated, capacity) = compare(run, folder.path())?;
    load::measure(run, folder.path(), emulated, capacity)?;
    match run.plan.backend {
        Backend::Cuda => exports::measure(run, folder.path(), emulated, capacity),
        Backend::Host => Ok(()),
    }
}

/// Measures handoffs and gets in turns. Also returns whether the driver is emulated, and the capacity of the device.
fn compare(run: &mut BenchRun<'_>, folder: &Path) -> Result<(bool, Capacity)> {
    run.tick("starting the processes", 0, 1)?;
    let role = Role::Producer { folder: folder.to_owned(), consumers: 1 };
    let (producer, capacity) = run.start(role, &[])?;
    let ProducerResponse::IsEmulated(emulated) = ask(&producer, &ProducerRequest::IsEmulated)? else {
        return Err(unexpected());
    };
    let broker = Broker::start(run, folder.join("broker.sock"), emulated)?;
    ask_done(&producer, &ProducerRequest::Connect { socket: broker.socket.clone() })?;
    let idle = broker.descriptors()?;
    let default = match run.plan.backend {
        Backend::Cuda => &GPU_SIZES[..],
        Backend::Host => &HOST_SIZES[..],
    };
    let mut largest = None;
    for size in run.sizes(default, capacity) {
        if fits(run, "get", size, capacity) {
            gets(run, &producer, size, None)?;
            // The broker closes the descriptors of deleted objects asynchronously, and the next size may need all memory.
            broker.wait_for_descriptors(run, idle)?;
            largest = largest.max(Some(size));
        }
    }
    let segmented = largest.map(|size| (size, (size / MANY).next_multiple_of(capacity.granularity)));
    if let Some((size, segment)) = segmented.filter(|(size, segment)| segment < size && size.is_multiple_of(*segment)) {
        gets(run, &producer, size, Some(segment))?;
        broker.wait_for_descriptors(run, idle)?;
    }
    let (small, unit) = (SMALL.next_multiple_of(capacity.granularity), capacity.granularity);
    if fits(run, "arrays and put", small + SEGMENTS * unit, capacity) {
        arrays(run, &producer, small)?;
        puts(run, &producer, small, "")?;
        let kept = Kept::start(folder.join("kept.sock"), emulated)?;
        ask_done(&producer, &ProducerRequest::Connect { socket: kept.socket.clone() })?;
        puts(run, &producer, small, ", under a keeper")?;
        ask_done(&producer, &ProducerRequest::Connect { socket: broker.socket.clone() })?;
    }
    let default = match run.plan.backend {
        Backend::Cuda => &SWITCH_SIZES[..],
        Backend::Host => &HOST_SIZES[..],
    };
    for size in run.sizes(default, capacity) {
        if size > capacity.usable / 2 {
            let usable = about(capacity.usable);
            run.leave_out(format!("broker switch at {}: it takes as much again, and there are {usable}", about(size)));
            continue;
        }
        switches(run, &producer, size)?;
        broker.wait_for_descriptors(run, idle)?;
    }
    Ok((emulated, capacity))
}

fn fits(run: &mut BenchRun<'_>, what: &str, size: u64, capacity: Capacity) -> bool {
    let fits = size <= capacity.usable;
    if !fits {
        run.leave_out(format!("broker {what} at {}: there are {}", about(size), about(capacity.usable)));
    }
    fits
}

fn gets(run: &mut BenchRun<'_>, producer: &BenchProcess, size: u64, segment: Option<u64>) -> Result<()> {
    let suffix = segment.map_or(String::new(), |segment| format!(", in segments of {}", about(segment)));
    let methods = COMPARED.map(|(_, method)| method);
    let samples = take_turns(run, producer, &format!("getting {}{suffix}", about(size)), size, segment, &methods)?;
    let [_, handoff, described, sleeper, get, in_c] = [0, 1, 2, 3, 4, 5].map(|number| median(&samples[number]));
    for (name, other, at_most) in [
        ("a handoff", handoff, Some(GET_AT_MOST)),
        ("a handoff with description", described, None),
        ("a handoff by a sleeper", sleeper, Some(GET_AT_MOST)),
    ] {
        figure(run, format!("get{suffix}, more than {name}"), size, get - other, "us", at_most);
    }
    figure(run, format!("get through C{suffix}, of a get"), size, in_c / get, "x", Some(C_AT_MOST));
    let names = COMPARED.map(|(name, _)| format!("{name}{suffix}"));
    let floor = names[0].clone();
    run.add(Bench::Broker, size, names.into_iter().zip(samples).collect(), &floor);
    Ok(())
}

fn arrays(run: &mut BenchRun<'_>, producer: &BenchProcess, size: u64) -> Result<()> {
    let methods = [Method::GetOneArray, Method::GetManyArrays];
    let samples = take_turns(run, producer, &format!("getting {ARRAYS} arrays"), size, None, &methods)?;
    let more = (median(&samples[1]) - median(&samples[0])) / 1e3;
    figure(run, format!("get of {ARRAYS} arrays, more than of one"), 0, more, "ms", Some(ARRAYS_AT_MOST));
    let names = ["get of one array".to_owned(), format!("get of {ARRAYS} arrays")];
    run.add(Bench::Broker, 0, names.into_iter().zip(samples).collect(), "");
    Ok(())
}

fn puts(run: &mut BenchRun<'_>, producer: &BenchProcess, size: u64, suffix: &str) -> Result<()> {
    let methods = [Method::Send, Method::Put, Method::SendSegments, Method::PutSegments];
    let samples = take_turns(run, producer, &format!("putting{suffix}"), size, None, &methods)?;
    let [send, put, _, put_segments] = [0, 1, 2, 3].map(|number| median(&samples[number]));
    figure(run, format!("put, more than the send of a handoff{suffix}"), 0, put - send, "us", Some(PUT_AT_MOST));
    let each = (put_segments - put) / (SEGMENTS - 1) as f64;
    figure(run, format!("put, each further segment{suffix}"), 0, each, "us", Some(SEGMENT_AT_MOST));
    let several = |what: &str| format!("{what} of {SEGMENTS} segments");
    let names = ["send".to_owned(), "put".to_owned(), several("send"), several("put")];
    let names = names.map(|name| format!("{name}{suffix}"));
    run.add(Bench::Broker, 0, names.into_iter().zip(samples).collect(), "");
    Ok(())
}

fn switches(run: &mut BenchRun<'_>, producer: &BenchProcess, size: u64) -> Result<()> {
    let methods = [Method::SwitchBare, Method::Switch];
    let samples = take_turns(run, producer, &format!("switching {}", about(size)), size, None, &methods)?;
    let ratio = median(&samples[1]) / median(&samples[0]);
    let name = "switch, of the driver's unmap, map and set access".to_owned();
    figure(run, name, size, ratio, "x", Some(SWITCH_AT_MOST));
    let names = ["unmap, map and set access", "switch"];
    run.add(Bench::Broker, size, names.into_iter().map(str::to_owned).zip(samples).collect(), names[0]);
    Ok(())
}

fn median(samples: &Samples) -> f64 {
    samples.summary().map_or(f64::NAN, |summary| summary.p50_us)
}

fn figure(run: &mut BenchRun<'_>, name: String, size: u64, value: f64, unit: &'static str, at_most: Option<f64>) {
    run.figure(Figure { bench: Bench::Broker, name, size, value, unit, at_most, at_least: None });
}

/// A client process, which responds to [`ClientRequest`]s.
struct ClientProcess(BenchProcess);

impl ClientProcess {
    /// Starts a client without waiting until it is ready.
    fn launch(run: &BenchRun<'_>, backend: Backend, driver: bool) -> Result<Self> {
        let task = run.task(Role::BrokerClient { driver });
        // The host backend has a single device.
        let device = if backend == run.plan.backend { task.device.clone() } else { "0".to_owned() };
        BenchProcess::leader(&Task { backend, device, ..task }, run.cancel, &[]).map(Self)
    }

    /// Starts a client, waits until it is ready, and connects it.
    fn start(run: &BenchRun<'_>, backend: Backend, driver: bool, broker: &Broker) -> Result<Self> {
        let process = Self::launch(run, backend, driver)?;
        process.ready()?;
        process.connect(broker, 1)?;
        Ok(process)
    }

    fn connect(&self, broker: &Broker, connections: usize) -> Result<()> {
        self.call(&ClientRequest::Connect { socket: broker.socket.clone(), connections })
    }

    /// Sends a request without a result and waits until it is done.
    fn call(&self, request: &ClientRequest) -> Result<()> {
        self.0.send(request)?;
        self.ready()
    }

    fn ready(&self) -> Result<()> {
        match self.receive()? {
            ClientResponse::Ready => Ok(()),
            _ => Err(unexpected()),
        }
    }

    fn receive(&self) -> Result<ClientResponse> {
        match self.0.receive()? {
            ClientResponse::Failed(failure) => Err(failure.of(self.0.name())),
            response => Ok(response),
        }
    }
}
