//! The other process of a probe that takes two.

use std::{
    fs,
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use vmmfd::{channel::Cancel, driver::Backend, error::Result};

use super::{
    Environment,
    control::Control,
    task::{Role, Task},
};
use crate::{
    child::{Group, Launch, OnParentDeath, Process},
    line::Line,
};

/// The other process of a probe. Dropping it kills it.
#[derive(Debug)]
pub(super) struct PeerProcess {
    process: Process,
    control: Control,
    socket: PathBuf,
}

/// Starts a process that is killed with this one. `name` is its part, for a person.
pub(super) fn start(
    name: &'static str,
    folder: &Path,
    backend: Backend,
    timeout: Duration,
    role: Role,
) -> Result<(Process, Line)> {
    let launch = Launch {
        name,
        on_parent_death: OnParentDeath::Killed,
        group: Group::Inherited,
        variables: &[],
        keep_stderr: false,
        timeout,
        cancel: &Cancel::new()?,
    };
    launch.start(&Task { backend, folder: folder.to_owned(), timeout, role })
}

impl PeerProcess {
    /// Starts one that creates its socket in a folder, and waits until its driver is ready.
    pub(super) fn start(folder: &Path, backend: Backend, timeout: Duration) -> Result<Self> {
        static NUMBERS: AtomicU32 = AtomicU32::new(0);
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        let socket = folder.join(format!("m{}-{number}", process::id()));
        let role = Role::Peer { socket: socket.clone() };
        let (process, line) = start("the other process of the probe", folder, backend, timeout, role)?;
        let control = Control::over(line);
        let greeted = control.greet(backend, &Environment::default());
        greeted.map_err(|error| process.explain(error, timeout))?;
        Ok(Self { process, control, socket })
    }

    pub(super) fn control(&self) -> &Control {
        &self.control
    }

    /// Where memory is handed over.
    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Kills it, and waits until it has ended.
    pub(super) fn kill(&mut self) {
        self.process.kill();
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        self.kill();
        // A process that is killed while it listens leaves its socket.
        let _ = fs::remove_file(&self.socket);
    }
}
