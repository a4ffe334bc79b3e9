//! The doctor's child processes: the probes, and the other processes of a probe.

use std::{
    io::{self, Write},
    mem,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use serde_json::Value;
use tracing_subscriber::filter::LevelFilter;
use vmmfd::{
    channel::Trust,
    driver::{Choice, open},
    error::Result,
    memory::{Device, Selector},
};

use super::{
    Environment, ErrorDetails, Flag, Probe, Status,
    context::{Endpoint, ProbeContext, Role, Task},
    control::{ControlRecord, greet},
    probes::{hold, make},
    sharing::answer,
};
use crate::{
    child::line_to_parent,
    line::{Line, typed},
    verbs::HasVerbs,
};

/// Runs the task of a child process.
///
/// # Errors
/// Errors that can't be reported to the parent.
pub fn run_task(task: Value) -> Result<()> {
    let task: Task = typed(task)?;
    let line = line_to_parent()?;
    match &task.role {
        Role::Probes { device, owner, names } => task.probe(*device, *owner, names, &line),
        Role::Peer { socket } => {
            let driver = match open(Choice::Only(task.backend)) {
                Ok(opened) => opened.driver,
                Err(error) => return line.send(&ControlRecord::Failed { error: ErrorDetails::of(&error) }),
            };
            greet(&line, task.backend, &Environment::default(), None)?;
            let socket = socket.clone();
            let timeout = task.timeout;
            let end = Endpoint { driver, socket, trust: Trust::default(), timeout };
            // The parent may run many probes without this process. Its end ends this process too.
            answer(&end, &line, Duration::MAX, &|_| {}).map(drop)
        }
        Role::Make { device, pattern } => make(task.device(*device), *pattern, &line),
        Role::Hold => hold(&line),
    }
}

impl Task {
    fn device(&self, ordinal: i32) -> Result<Device> {
        let driver = open(Choice::Only(self.backend))?.driver;
        Device::find(&driver, Selector::Ordinal(ordinal.unsigned_abs()))
    }

    /// Runs probes, until one corrupts the context or needs another process. The parent starts that process.
    fn probe(&self, device: Option<i32>, owner: Option<i32>, names: &[String], line: &Line) -> Result<()> {
        let mut probes = names.iter().filter_map(|name| Probe::named(name));
        let Some(ordinal) = device else {
            return probes.filter_map(|probe| probe.run_machine(self.backend)).try_for_each(|found| line.send(&found));
        };
        let opened = self.device(ordinal).and_then(|device| {
            let owner = owner.map(|owner| Device::find(device.driver(), Selector::Ordinal(owner.unsigned_abs())));
            Ok((device, owner.transpose()?))
        });
        let (device, owner) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                let error = ErrorDetails::of(&error);
                return probes.try_for_each(|probe| line.send(&probe.cut_short(None, error.clone())));
            }
        };
        let log = Log::start();
        let mut context = ProbeContext::new(device, &self.folder, self.timeout);
        for (at, probe) in probes.enumerate() {
            if probe.is(Flag::Alone) && at > 0 {
                break;
            }
            let Some(mut finding) = probe.run_device(&mut context, owner.as_ref()) else { continue };
            let logged = log.take();
            if finding.status == Status::Ok && !logged.is_empty() && !probe.is(Flag::Alone) {
                // A destructor can only log its errors.
                finding.status = Status::Failed;
                finding.meaning = "It works, but its resources can't be freed.".to_owned();
                finding.error = Some(ErrorDetails::new("teardown", logged));
            }
            line.send(&finding)?;
            let device = &context.device;
            let broken = finding.status == Status::Failed && device.verbs().synchronize(device.ordinal()).is_err();
            if broken || probe.is(Flag::Alone) {
                break;
            }
        }
        Ok(())
    }
}

/// The errors logged by this process.
#[derive(Debug, Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn start() -> Self {
        let log = Self::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(LevelFilter::ERROR)
            .without_time()
            .with_ansi(false)
            .with_target(false)
            .with_level(false)
            .with_writer(move || writer.clone());
        // This process has no other subscriber.
        let _ = subscriber.try_init();
        log
    }

    /// The first line since the last call.
    fn take(&self) -> String {
        let bytes = mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        String::from_utf8_lossy(&bytes).lines().next().unwrap_or_default().to_owned()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
