//! The doctor's child processes, as they see themselves: the probes, and the other processes of a probe.

use std::{fs::File, os::unix::fs::FileExt, sync::Arc};

use nix::sys::memfd::{MFdFlags, memfd_create};
use serde_json::Value;
use tracing_subscriber::filter::LevelFilter;
use vmmfd::memory::Selector;

use super::{
    Flag, Probe,
    probes::{hold, make, park},
    process::{Endpoint, Role, Setting},
    sharing::{ControlRecord, answer},
};
use crate::{child::line_to_parent, doctor::prelude::*, line::typed};

/// Runs the task of a child process.
///
/// # Errors
/// Errors that can't be reported to the parent.
pub fn run_task(task: Value) -> Result<()> {
    let (setting, role): (Setting, Role) = typed(task)?;
    let line = line_to_parent()?;
    match role {
        Role::Probes { device: None, names, .. } => {
            let probes = names.iter().filter_map(|name| Probe::named(name));
            probes.filter_map(|probe| probe.run_machine(setting.backend)).try_for_each(|found| line.send(&found))
        }
        Role::Probes { device: Some(device), owner, names } => {
            let probes: Vec<&Probe> = names.iter().filter_map(|name| Probe::named(name)).collect();
            setting.probe(device, owner, &probes, &line)
        }
        Role::Peer => match Endpoint::open(&setting) {
            Ok(end) => {
                line.send(&ControlRecord::Ready {})?;
                answer(&end, &line)
            }
            Err(error) => line.send(&ControlRecord::Failed { error: ErrorDetails::of(&error) }),
        },
        Role::Make { device, pattern } => make(setting.device(device), pattern, &line),
        Role::Hold => hold(&line),
        Role::Park { device, pattern } => park(setting.device(device), pattern, &line),
    }
}

impl Setting {
    fn device(&self, ordinal: i32) -> Result<Device> {
        Device::find(&Endpoint::open(self)?.driver, Selector::Ordinal(ordinal.unsigned_abs()))
    }

    /// Runs probes of a device, until one corrupts the context or needs another process. The parent starts that process.
    fn probe(&self, device: i32, owner: Option<i32>, probes: &[&Probe], line: &Line) -> Result<()> {
        let opened = Endpoint::open(self).and_then(|end| {
            let device = Device::find(&end.driver, Selector::Ordinal(device.unsigned_abs()))?;
            let owner = owner.map(|owner| Device::find(&end.driver, Selector::Ordinal(owner.unsigned_abs())));
            Ok((ProbeContext::new(device, end), owner.transpose()?))
        });
        let (mut context, owner) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                let error = ErrorDetails::of(&error);
                return probes.iter().try_for_each(|probe| line.send(&probe.cut_short(None, error.clone())));
            }
        };
        let mut log = Log::start()?;
        for (at, probe) in probes.iter().enumerate() {
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

/// The errors logged by this process, in a file in memory.
struct Log {
    file: Arc<File>,
    /// The length that was read.
    seen: u64,
}

impl Log {
    fn start() -> Result<Self> {
        let file = memfd_create(c"log", MFdFlags::MFD_CLOEXEC);
        let file = Arc::new(File::from(file.map_err(|errno| Error::system("create a file in memory", errno))?));
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(LevelFilter::ERROR)
            .without_time()
            .with_ansi(false)
            .with_target(false)
            .with_level(false)
            .with_writer(Arc::clone(&file));
        // This process has no other subscriber.
        let _ = subscriber.try_init();
        Ok(Self { file, seen: 0 })
    }

    /// The first line since the last call.
    fn take(&mut self) -> String {
        let mut bytes = [0; 4096];
        // Does not move the position, at which the next line is written.
        let length = self.file.read_at(&mut bytes, self.seen).unwrap_or(0);
        self.seen = self.file.metadata().map_or(self.seen, |file| file.len());
        String::from_utf8_lossy(&bytes[..length]).lines().next().unwrap_or_default().to_owned()
    }
}
