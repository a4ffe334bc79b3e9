//! The settings with which a test controls the library.
//!
//! | Setting | Meaning |
//! |---|---|
//! | `FAKECUDA_FAIL=cuMemMap:2:801,cuInit:1:999` | the second call of `cuMemMap` from now on fails with 801 and has no effect |
//! | `FAKECUDA_SLOW=cuInit:500` | every call of `cuInit` takes 500 ms longer, or until the setting is removed |
//! | `FAKECUDA_ABORT=cuMemMap` | a call of `cuMemMap` aborts the process, like a fault in NVIDIA's driver |
//! | `FAKECUDA_ATTRIBUTE=102:0` | the device attribute 102 has the value 0 |
//! | `FAKECUDA_CHECKPOINTS=folder` | processes can be checkpointed: a file of this folder has the state of each; without it they can't |
//! | `FAKECUDA_DEVICES=2` | the number of devices, from `cuInit` on; at most 16 |
//! | `FAKECUDA_EVENTS_FAIL=1` | opening an event of another process fails |
//! | `FAKECUDA_FABRIC=1` | memory for fabric handles can be created and exported; by default 0: there is no IMEX channel |
//! | `FAKECUDA_FREE=4194304` | free bytes of each device while nothing is allocated |
//! | `FAKECUDA_GRANULARITY=4194304` | the granularity in bytes, from `cuInit` on: a power of two, at least 4096 |
//! | `FAKECUDA_MIG=1` | NVML reports each device as a MIG instance of a GPU; by default 0: as a GPU |
//! | `FAKECUDA_PEERS=0` | no device can access another; by default 1: all can |
//! | `FAKECUDA_PERSISTENCE=0` | NVML reports persistence mode as off; by default 1: on |
//! | `FAKECUDA_RDMA=0` | `gpuDirectRDMACapable` is ignored at creation; by default 1: it is respected |
//! | `FAKECUDA_LOG=path` | each call is appended to this file, as `pid name`, before it is executed |
//!
//! An empty `CUDA_VISIBLE_DEVICES` hides all devices, as with NVIDIA's driver. Its other values are ignored: they concern real GPUs of the
//! test machine.
//!
//! An invalid setting aborts: a test with a misspelled setting would prove nothing.

use std::{
    collections::BTreeMap,
    env,
    fs::{File, OpenOptions},
    io::Write,
    path::PathBuf,
    process,
    str::FromStr,
    sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use crate::{Answer, numbers::MAX_DEVICES};

/// The settings, and the counts of calls.
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
    pub(crate) checkpoints: Option<PathBuf>,
}

/// Signals each change of a setting.
static CHANGED: Condvar = Condvar::new();

struct Fault {
    name: String,
    /// The number of calls until the fault. It fires at 0.
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
        checkpoints: None,
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

/// Runs before each call: counts and logs it, and delays, aborts or fails it according to the settings.
pub(crate) fn before(name: &'static str) -> Answer {
    let mut settings = settings();
    *settings.calls.entry(name).or_default() += 1;
    if let Some(log) = &mut settings.log {
        // One write to a file opened for appending: the lines of different processes are not mixed.
        if let Err(error) = log.write_all(format!("{} {name}\n", process::id()).as_bytes()) {
            refuse(&format!("can't write the log: {error}"));
        }
    }
    if settings.aborts.iter().any(|aborts| aborts == name) {
        refuse(&format!("{name} aborts, as set by FAKECUDA_ABORT"));
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
    if let Some(pause) = settings.slow.get(name).copied() {
        // Removing the setting ends the wait.
        let _ = CHANGED.wait_timeout_while(settings, pause, |settings| settings.slow.contains_key(name));
    }
    fails.map_or(Ok(()), Err)
}

pub(crate) fn set(name: &str, value: &str) {
    settings().set(name, value);
    CHANGED.notify_all();
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
            "FAKECUDA_CHECKPOINTS" => {
                self.checkpoints = Some(value.into());
                Some(())
            }
            "FAKECUDA_LOG" => {
                let log = OpenOptions::new().create(true).append(true).open(value).ok();
                log.map(|log| self.log = Some(log))
            }
            _ => None,
        };
        known.unwrap_or_else(|| refuse(&format!("{name}={value} is not a valid setting")));
    }
}

/// The entries of a comma-separated list. An empty text is an empty list.
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

/// Aborts the process: the call is an error of the test, or would have crashed NVIDIA's driver.
pub(crate) fn refuse(reason: &str) -> ! {
    eprintln!("fakecuda: {reason}");
    process::abort()
}
