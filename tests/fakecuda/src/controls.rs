//! The settings by which a test steers the library.
//!
//! | Setting | Meaning |
//! |---|---|
//! | `FAKECUDA_FAIL=cuMemMap:2:801,cuInit:1:999` | the second call of `cuMemMap` from now fails with 801 and does nothing |
//! | `FAKECUDA_SLOW=cuInit:500` | every call of `cuInit` takes 500 ms longer |
//! | `FAKECUDA_ABORT=cuMemMap` | the process is aborted in a call of `cuMemMap`, as by a fault in NVIDIA's driver |
//! | `FAKECUDA_ATTRIBUTE=102:0` | that device attribute has that value |
//! | `FAKECUDA_DEVICES=2` | how many devices there are, from `cuInit` on; at most 16 |
//! | `FAKECUDA_EVENTS_FAIL=1` | no event of another process is opened |
//! | `FAKECUDA_FABRIC=1` | memory for fabric handles is made, and exported; 0, the default, is that there is no IMEX channel |
//! | `FAKECUDA_FREE=4194304` | how many bytes each device has free while nothing is allocated |
//! | `FAKECUDA_GRANULARITY=4194304` | the granularity in bytes, from `cuInit` on: a power of two, at least 4096 |
//! | `FAKECUDA_MIG=1` | NVML knows each device as a MIG instance of a GPU; 0, the default, as a GPU |
//! | `FAKECUDA_PEERS=0` | no device can access another; 1, the default, is that all can |
//! | `FAKECUDA_PERSISTENCE=0` | NVML reports persistence mode as off; 1, the default, is on |
//! | `FAKECUDA_RDMA=0` | memory is made without `gpuDirectRDMACapable` where that is asked for; 1, the default, is with it |
//! | `FAKECUDA_LOG=path` | every call is appended to that file, as `pid name`, before it is done |
//!
//! An empty `CUDA_VISIBLE_DEVICES` leaves no device, as with NVIDIA's driver; its other values are about GPUs that the
//! machine of the test may have, and are not looked at.
//!
//! A setting that makes no sense aborts: a test that believes in one that does not exist proves nothing.

use std::{
    collections::BTreeMap,
    env,
    fs::{File, OpenOptions},
    io::Write,
    process,
    str::FromStr,
    sync::{LazyLock, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use crate::{Answer, emulated::MAX_DEVICES};

/// What the settings say, and what was counted.
pub(crate) struct Settings {
    faults: Vec<Fault>,
    slow: BTreeMap<String, Duration>,
    aborts: Vec<String>,
    log: Option<File>,
    calls: BTreeMap<&'static str, u64>,
    pub(crate) attributes: BTreeMap<u32, i32>,
    pub(crate) devices: u32,
    pub(crate) capacity: Option<u64>,
    pub(crate) granularity: u64,
    pub(crate) peers: bool,
    pub(crate) fabric: bool,
    pub(crate) mig: bool,
    pub(crate) persistence: bool,
    pub(crate) rdma: bool,
    pub(crate) events_fail: bool,
}

struct Fault {
    name: String,
    /// At which call from now: it fires when this reaches 0.
    left: u64,
    code: u32,
}

static SETTINGS: LazyLock<Mutex<Settings>> = LazyLock::new(|| {
    let mut settings = Settings {
        faults: Vec::new(),
        slow: BTreeMap::new(),
        aborts: Vec::new(),
        log: None,
        calls: BTreeMap::new(),
        attributes: BTreeMap::new(),
        devices: 1,
        capacity: None,
        granularity: vmmfd::driver::GRANULARITY,
        peers: true,
        fabric: false,
        mig: false,
        persistence: true,
        rdma: true,
        events_fail: false,
    };
    for (name, value) in env::vars().filter(|(name, _)| name.starts_with("FAKECUDA_")) {
        settings.set(&name, &value);
    }
    if env::var_os("CUDA_VISIBLE_DEVICES").is_some_and(|visible| visible.is_empty()) {
        settings.devices = 0;
    }
    Mutex::new(settings)
});

pub(crate) fn settings() -> MutexGuard<'static, Settings> {
    SETTINGS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What happens before any call is answered: it is counted and logged, may take long, and may fail.
pub(crate) fn before(name: &'static str) -> Answer {
    let mut settings = settings();
    *settings.calls.entry(name).or_default() += 1;
    if let Some(log) = &mut settings.log {
        // One write to a file opened for appending: the lines of several processes do not mix.
        if let Err(error) = log.write_all(format!("{} {name}\n", process::id()).as_bytes()) {
            refuse(&format!("the log can't be written: {error}"));
        }
    }
    if settings.aborts.iter().any(|aborts| aborts == name) {
        refuse(&format!("{name} is to abort"));
    }
    let mut fails = None;
    settings.faults.retain_mut(|fault| {
        if fault.name == name {
            fault.left -= 1;
            if fault.left == 0 {
                fails = Some(fault.code);
            }
        }
        fault.left > 0
    });
    let slow = settings.slow.get(name).copied();
    drop(settings);
    if let Some(pause) = slow {
        thread::sleep(pause);
    }
    fails.map_or(Ok(()), Err)
}

pub(crate) fn set(name: &str, value: &str) {
    settings().set(name, value);
}

pub(crate) fn calls(name: &str) -> u64 {
    settings().calls.iter().filter(|(called, _)| name.is_empty() || **called == name).map(|(_, count)| count).sum()
}

impl Settings {
    fn set(&mut self, name: &str, value: &str) {
        let known = match name {
            "FAKECUDA_FAIL" => parse(value, |entry| {
                let (name, rest) = entry.split_once(':')?;
                let (left, code) = pair(rest)?;
                (left > 0).then(|| Fault { name: name.to_owned(), left, code })
            })
            .map(|faults| self.faults = faults),
            "FAKECUDA_SLOW" => parse(value, |entry| {
                let (name, milliseconds) = pair(entry)?;
                Some((name, Duration::from_millis(milliseconds)))
            })
            .map(|slow| self.slow = slow),
            "FAKECUDA_ABORT" => parse(value, |name| Some(name.to_owned())).map(|aborts| self.aborts = aborts),
            "FAKECUDA_ATTRIBUTE" => parse(value, pair).map(|attributes| self.attributes = attributes),
            "FAKECUDA_DEVICES" => {
                let devices = value.parse().ok().filter(|&devices| devices <= MAX_DEVICES);
                devices.map(|devices| self.devices = devices)
            }
            "FAKECUDA_FREE" => value.parse().ok().map(|bytes| self.capacity = Some(bytes)),
            "FAKECUDA_GRANULARITY" => {
                let bytes = value.parse().ok().filter(|bytes: &u64| bytes.is_power_of_two() && *bytes >= 4096);
                bytes.map(|bytes| self.granularity = bytes)
            }
            "FAKECUDA_PEERS" => switch(value).map(|on| self.peers = on),
            "FAKECUDA_FABRIC" => switch(value).map(|on| self.fabric = on),
            "FAKECUDA_MIG" => switch(value).map(|on| self.mig = on),
            "FAKECUDA_PERSISTENCE" => switch(value).map(|on| self.persistence = on),
            "FAKECUDA_RDMA" => switch(value).map(|on| self.rdma = on),
            "FAKECUDA_EVENTS_FAIL" => switch(value).map(|on| self.events_fail = on),
            "FAKECUDA_LOG" => {
                let log = OpenOptions::new().create(true).append(true).open(value).ok();
                log.map(|log| self.log = Some(log))
            }
            _ => None,
        };
        known.unwrap_or_else(|| refuse(&format!("{name}={value} makes no sense here")));
    }
}

/// The entries of a list with commas between them; an empty text is an empty list.
fn parse<T, C: FromIterator<T>>(value: &str, entry: impl Fn(&str) -> Option<T>) -> Option<C> {
    value.split(',').filter(|text| !text.is_empty()).map(entry).collect()
}

fn switch(value: &str) -> Option<bool> {
    ["0", "1"].contains(&value).then_some(value == "1")
}

fn pair<A: FromStr, B: FromStr>(entry: &str) -> Option<(A, B)> {
    let (a, b) = entry.split_once(':')?;
    Some((a.parse().ok()?, b.parse().ok()?))
}

/// Ends the process: what was asked for is a fault of the test, or would have crashed NVIDIA's driver.
pub(crate) fn refuse(reason: &str) -> ! {
    eprintln!("fakecuda: {reason}");
    process::abort()
}
