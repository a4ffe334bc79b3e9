//! The doctor's child processes.

use std::{
    io::{self, Write},
    mem,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
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
    Environment, ErrorDetails, Probe, Status,
    context::ProbeContext,
    control::{Control, ControlRecord},
    endpoint::Endpoint,
    probes::{hold, make},
    sharing::serve_requests,
    task::{Role, Task},
};
use crate::verbs::HasVerbs;
use crate::{
    child::line_to_parent,
    line::{Line, typed},
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
        Role::Peer { socket } => task.peer(socket.clone(), line),
        Role::Make { device, pattern } => make(task.device(*device), *pattern, &line),
        Role::Hold {} => hold(&line),
    }
}

impl Task {
    fn device(&self, ordinal: i32) -> Result<Device> {
        let driver = open(Choice::Only(self.backend))?.driver;
        Device::find(&driver, Selector::Ordinal(u32::try_from(ordinal).unwrap_or(u32::MAX)))
    }

    fn peer(&self, socket: PathBuf, line: Line) -> Result<()> {
        let control = Control::over(line);
        let driver = match open(Choice::Only(self.backend)) {
            Ok(opened) => opened.driver,
            Err(error) => return control.send(&ControlRecord::Shared { error: Some(ErrorDetails::of(&error)) }),
        };
        control.greet(self.backend, &Environment::default(), None)?;
        let end = Endpoint { driver, socket, trust: Trust::default(), timeout: self.timeout };
        serve_requests(&end, &control)
    }

    fn probe(&self, device: Option<i32>, owner: Option<i32>, names: &[String], line: &Line) -> Result<()> {
        let mut probes = names.iter().filter_map(|name| Probe::named(name));
        let Some(ordinal) = device else {
            return probes.try_for_each(|probe| match probe.run_machine(self.backend) {
                Some(finding) => line.send(&finding),
                None => Ok(()),
            });
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
        let mut context = ProbeContext::new(device, self.folder.clone(), self.timeout);
        for probe in probes {
            let Some(mut finding) = probe.run_device(&mut context, owner.as_ref()) else { continue };
            let logged = log.take();
            if finding.status == Status::Ok && !logged.is_empty() && !probe.alone {
                // A destructor can only log its errors.
                finding.status = Status::Failed;
                finding.meaning = "It works, but its resources can't be freed.".to_owned();
                finding.error = Some(ErrorDetails::new("teardown", logged));
            }
            line.send(&finding)?;
            // Later probes would fail in the corrupted context: they run in another process.
            let device = &context.device;
            if finding.status == Status::Failed && device.verbs().synchronize(device.ordinal()).is_err() {
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
