//! What a child process of the doctor does from its start to its end.

use std::{
    io::{self, Write},
    mem,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use tracing_subscriber::filter::LevelFilter;

use super::{
    Environment, Status,
    control::{Control, Say},
    probes::{Bench, End, Probe, follow},
    report::Seen,
    task::{Role, Task},
};
use crate::{
    channel::Trust,
    driver::{Choice, open},
    error::Result,
    memory::{Device, Selector},
    tools::{
        child::Entered,
        line::{Line, typed},
    },
};

/// Does the task of a child process.
///
/// # Errors
/// What it can't report to the parent over the line.
pub(in crate::tools) fn run_task(child: &Entered) -> Result<()> {
    let task: Task = typed(child.task.clone())?;
    let line = child.line()?;
    match &task.role {
        Role::Probes { device, owner, names } => task.probe(*device, *owner, names, &line),
        Role::Peer { socket } => task.peer(socket.clone(), line),
    }
}

impl Task {
    fn device(&self, ordinal: i32) -> Result<Device> {
        let driver = open(Choice::Only(self.backend))?.driver;
        Device::find(&driver, Selector::Ordinal(u32::try_from(ordinal).unwrap_or(u32::MAX)))
    }

    fn peer(&self, socket: PathBuf, line: Line) -> Result<()> {
        let mut control = Control::over(line);
        let driver = match open(Choice::Only(self.backend)) {
            Ok(opened) => opened.driver,
            Err(error) => return control.send(&Say::Lent { error: Some(Seen::of(&error)) }),
        };
        control.greet(self.backend, &Environment::default())?;
        let end = End { driver, socket, trust: Trust::default(), timeout: self.timeout };
        follow(&end, &mut control, &mut |_| {})
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
                let seen = Seen::of(&error);
                return probes.try_for_each(|probe| line.send(&probe.cut_short(None, seen.clone())));
            }
        };
        let log = Log::start();
        let mut bench = Bench { device, folder: self.folder.clone(), timeout: self.timeout, peer: None };
        for probe in probes {
            let Some(mut finding) = probe.run_device(&mut bench, owner.as_ref()) else { continue };
            let logged = log.take();
            if finding.status == Status::Ok && !logged.is_empty() && !probe.alone {
                // What a destructor meets it can only log.
                finding.status = Status::Failed;
                finding.meaning = "It works, but what it took can't be given back.".to_owned();
                let kind = "teardown".to_owned();
                finding.error = Some(Seen { call: None, code: None, name: None, kind, message: logged });
            }
            line.send(&finding)?;
            // A context that has failed fails everything after it: a fresh process goes on.
            if finding.status == Status::Failed && bench.device.verbs().synchronize(bench.device.ordinal()).is_err() {
                break;
            }
        }
        Ok(())
    }
}

/// The errors that are logged in this process.
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
        // There is none yet: a process of this kind does nothing else.
        let _ = subscriber.try_init();
        log
    }

    /// The first line since the last time.
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
