//! The peer process of a probe.

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

/// A peer process. Drop kills it.
#[derive(Debug)]
pub(super) struct PeerProcess {
    process: Process,
    control: Control,
    socket: PathBuf,
}

/// Starts a process that dies with this one. `name` appears in error messages.
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
    /// Starts a peer that creates its socket in a folder, and waits until its driver is ready.
    pub(super) fn start(folder: &Path, backend: Backend, timeout: Duration) -> Result<Self> {
        static NUMBERS: AtomicU32 = AtomicU32::new(0);
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        let socket = folder.join(format!("m{}-{number}", process::id()));
        let role = Role::Peer { socket: socket.clone() };
        let (process, line) = start("the other process of the probe", folder, backend, timeout, role)?;
        let control = Control::over(line);
        let greeted = control.greet(backend, &Environment::default(), None);
        greeted.map_err(|error| process.explain(error, timeout))?;
        Ok(Self { process, control, socket })
    }

    pub(super) fn control(&self) -> &Control {
        &self.control
    }

    /// The socket for handoffs.
    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    pub(super) fn kill(&mut self) {
        self.process.kill();
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        self.kill();
        // A process killed while listening leaves its socket behind.
        let _ = fs::remove_file(&self.socket);
    }
}
