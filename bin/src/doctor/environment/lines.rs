//! The environment as text.

use std::fmt;

use crate::units::about;

use super::{CLibrary, Environment, Limit, Node, SharedMemory};

impl Environment {
    /// The environment as text: a label and a line for each fact.
    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let mut lines = Vec::new();
        let mut add = |label, text: String| lines.push((label, text));
        add("kernel", self.kernel.clone());
        match self.c_library {
            Some(CLibrary::Musl) => add("C library", "musl, and NVIDIA's driver is built for glibc".to_owned()),
            Some(CLibrary::Other) => add("C library", "neither glibc nor musl".to_owned()),
            Some(CLibrary::Glibc) | None => {}
        }
        let mut inside: Vec<&str> = Vec::new();
        inside.extend(self.container.as_deref());
        inside.extend(self.wsl.then_some("WSL2"));
        inside.extend(self.gvisor.then_some("gVisor"));
        if !inside.is_empty() {
            add("inside", inside.join(", "));
        }
        if let Some(capabilities) = &self.driver_capabilities {
            add("NVIDIA_DRIVER_CAPABILITIES", capabilities.clone());
        }
        if let Some(label) = self.label.as_deref().filter(|label| *label != "unconfined") {
            add("label", label.to_owned());
        }
        if self.own_proc == Some(false) {
            add("/proc", "of another PID namespace".to_owned());
        }
        if let Some(kind) = &self.confidential {
            add("confidential", format!("a virtual machine of kind {kind}"));
        }
        let open = if self.module_open == Some(true) { ", open" } else { "" };
        add("module", self.module.as_ref().map_or_else(|| "none".to_owned(), |module| format!("{module}{open}")));
        if let Some(library) = &self.library {
            let linked = library.file.as_ref().filter(|file| **file != library.path);
            let linked = linked.map(|file| format!(", which is {file}")).unwrap_or_default();
            let stub = if library.stub { ", in a folder of stubs" } else { "" };
            add("library", format!("{}{linked}{stub}", library.path));
        }
        if let Some(path) = self.library_path.as_deref().filter(|path| !path.is_empty()) {
            add("LD_LIBRARY_PATH", path.to_owned());
        }
        if let Some(devices) = &self.visible_devices {
            let empty = if devices.is_empty() { "set and empty: no device" } else { devices };
            add("CUDA_VISIBLE_DEVICES", empty.to_owned());
        }
        if self.mig {
            add("MIG", "in use".to_owned());
        }
        if let Some(folder) = &self.mps {
            add("MPS", format!("in {folder}"));
        }
        add("nodes", listed(&self.nodes));
        add("IMEX channels", listed(&self.imex_channels));
        add("/dev/shm", shared(self.shared_memory));
        if let Some(limit) = self.open_files {
            add("open files", limit.to_string());
        }
        if let Some(limit) = self.locked_memory {
            let shown = |value: Option<u64>| value.map_or_else(|| "unlimited".to_owned(), about);
            let (soft, hard) = (shown(limit.soft), shown(limit.hard));
            add("locked memory", if soft == hard { soft } else { format!("{soft}, at most {hard}") });
        }
        if let Some(user) = self.user() {
            add("user", user);
        }
        if let Some(scope) = self.ptrace_scope {
            add("ptrace scope", scope.to_string());
        }
        match self.seccomp {
            Some(1) => add("seccomp", "strict".to_owned()),
            Some(mode) if mode > 1 => add("seccomp", "a filter".to_owned()),
            _ => {}
        }
        lines
    }

    fn user(&self) -> Option<String> {
        let (uid, euid) = (self.uid?, self.euid?);
        let mut user = format!("uid {uid}");
        if euid != uid {
            user += &format!(", effective {euid}");
        }
        if self.user_namespace == Some(true) {
            user += ", in a user namespace";
            if let Some(overflow) = self.overflow_uid {
                user += &format!(" where other users show as {overflow}");
            }
        }
        Some(user)
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = |limit: Option<u64>| limit.map_or_else(|| "unlimited".to_owned(), |limit| limit.to_string());
        match self {
            Self { soft, hard } if soft == hard => f.write_str(&value(*soft)),
            Self { soft, hard } => write!(f, "{}, can be raised to {}", value(*soft), value(*hard)),
        }
    }
}

/// Nodes by name, with the rights of those that this process may not open.
pub(super) fn listed(nodes: &[Node]) -> String {
    if nodes.is_empty() {
        return "none".to_owned();
    }
    let one = |node: &Node| match node.usable {
        true => node.path.clone(),
        false => format!("{} (mode {} of {}:{}, NOT OPEN TO THIS PROCESS)", node.path, node.mode, node.uid, node.gid),
    };
    nodes.iter().map(one).collect::<Vec<_>>().join(" ")
}

fn shared(folder: Option<SharedMemory>) -> String {
    match folder {
        None => "unknown".to_owned(),
        Some(SharedMemory { exists: false, .. }) => "none".to_owned(),
        Some(SharedMemory { writable, size, free, .. }) => {
            let room = match (size, free) {
                (Some(size), Some(free)) => format!(", {} of {} free", about(free), about(size)),
                _ => String::new(),
            };
            format!("{}{room}", if writable { "writable" } else { "not writable" })
        }
    }
}
