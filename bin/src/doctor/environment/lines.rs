//! The environment as text.

use std::fmt;

use crate::units::about;

use super::{CLibrary, Environment, Limit, Node, SharedMemory};

impl Environment {
    /// The environment as pairs of label and text.
    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let owned = |text: Option<&str>| text.map(str::to_owned);
        let c_library = match self.c_library {
            Some(CLibrary::Musl) => Some("musl, and NVIDIA's driver is built for glibc"),
            Some(CLibrary::Other) => Some("neither glibc nor musl"),
            Some(CLibrary::Glibc) | None => None,
        };
        let inside = [self.container.as_deref(), self.wsl.then_some("WSL2"), self.gvisor.then_some("gVisor")];
        let inside: Vec<&str> = inside.into_iter().flatten().collect();
        let open = if self.module_open == Some(true) { ", open" } else { "" };
        let library = self.library.as_ref().map(|library| {
            let linked = library.file.as_ref().filter(|file| **file != library.path);
            let linked = linked.map(|file| format!(", which is {file}")).unwrap_or_default();
            let stub = if library.stub { ", in a folder of stubs" } else { "" };
            format!("{}{linked}{stub}", library.path)
        });
        let locked_memory = self.locked_memory.map(|limit| {
            let shown = |value: Option<u64>| value.map_or_else(|| "unlimited".to_owned(), about);
            let soft = shown(limit.soft);
            let hard = shown(limit.hard);
            if soft == hard { soft } else { format!("{soft}, at most {hard}") }
        });
        let seccomp = match self.seccomp {
            Some(1) => Some("strict"),
            Some(2..) => Some("a filter"),
            _ => None,
        };
        let visible = self.visible_devices.as_deref();
        let lines = [
            ("kernel", Some(self.kernel.clone())),
            ("C library", owned(c_library)),
            ("inside", (!inside.is_empty()).then(|| inside.join(", "))),
            ("NVIDIA_DRIVER_CAPABILITIES", self.driver_capabilities.clone()),
            ("label", self.label.clone().filter(|label| label != "unconfined")),
            ("/proc", owned((self.own_proc == Some(false)).then_some("of another PID namespace"))),
            ("confidential", self.confidential.as_ref().map(|kind| format!("a virtual machine of kind {kind}"))),
            ("PCI GPUs", (!self.pci_gpus.is_empty()).then(|| self.pci_gpus.join(" "))),
            (
                "module",
                Some(self.module.as_ref().map_or_else(|| "none".to_owned(), |module| format!("{module}{open}"))),
            ),
            ("library", library),
            ("LD_LIBRARY_PATH", self.library_path.clone().filter(|path| !path.is_empty())),
            (
                "CUDA_VISIBLE_DEVICES",
                owned(visible.map(|set| if set.is_empty() { "set and empty: no device" } else { set })),
            ),
            ("MIG", owned(self.mig.then_some("in use"))),
            ("MPS", self.mps.as_ref().map(|folder| format!("in {folder}"))),
            ("nodes", Some(listed(&self.nodes))),
            ("IMEX channels", Some(listed(&self.imex_channels))),
            ("/dev/shm", Some(shared(self.shared_memory))),
            ("open files", self.open_files.map(|limit| limit.to_string())),
            ("locked memory", locked_memory),
            ("user", self.user()),
            ("ptrace scope", self.ptrace_scope.map(|scope| scope.to_string())),
            ("seccomp", owned(seccomp)),
        ];
        lines.into_iter().filter_map(|(label, text)| Some((label, text?))).collect()
    }

    fn user(&self) -> Option<String> {
        let uid = self.uid?;
        let euid = self.euid?;
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

/// Paths of nodes, with the mode and owner if this process can't open the node.
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
