//! The environment as text.

use crate::units::about;

use super::{CLibrary, Environment, Library, Limit, Node, SharedMemory};

impl Environment {
    /// The environment as pairs of label and text.
    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let value = |value: &Option<String>| value.clone().unwrap_or_default();
        let flag = |holds: bool, text: &str| if holds { text.to_owned() } else { String::new() };
        let wsl = self.wsl.then_some("WSL2");
        let inside = [self.container.as_deref(), wsl, self.gvisor.then_some("gVisor")];
        let c_library = match self.c_library {
            Some(CLibrary::Musl) => "musl, and NVIDIA's driver is built for glibc",
            Some(CLibrary::Other) => "neither glibc nor musl",
            Some(CLibrary::Glibc) | None => "",
        };
        let seccomp = match self.seccomp {
            Some(1) => "strict",
            Some(2..) => "a filter",
            _ => "",
        };
        let module = self.module.as_deref().unwrap_or("none");
        let open = if self.module_open == Some(true) { ", open" } else { "" };
        let visible = self.visible_devices.as_deref().map_or("", |set| match set {
            "" => "set and empty: no device",
            set => set,
        });
        // Lines without a text are left out.
        let lines = [
            ("kernel", self.kernel.clone()),
            ("C library", c_library.to_owned()),
            ("inside", inside.into_iter().flatten().collect::<Vec<_>>().join(", ")),
            ("NVIDIA_DRIVER_CAPABILITIES", value(&self.driver_capabilities)),
            ("label", value(&self.label.clone().filter(|label| label != "unconfined"))),
            ("/proc", flag(self.own_proc == Some(false), "of another PID namespace")),
            (
                "confidential",
                self.confidential.as_ref().map_or_else(String::new, |kind| format!("a virtual machine of kind {kind}")),
            ),
            ("PCI GPUs", self.pci_gpus.join(" ")),
            ("module", format!("{module}{open}")),
            ("library", self.library.as_ref().map_or_else(String::new, Library::line)),
            ("LD_LIBRARY_PATH", value(&self.library_path)),
            ("CUDA_VISIBLE_DEVICES", visible.to_owned()),
            ("MIG", flag(self.mig, "in use")),
            ("MPS", self.mps.as_ref().map_or_else(String::new, |folder| format!("in {folder}"))),
            ("nodes", listed(&self.nodes)),
            ("IMEX channels", listed(&self.imex_channels)),
            ("/dev/shm", self.shared_memory.map_or_else(|| "unknown".to_owned(), SharedMemory::line)),
            ("open files", self.open_files.map_or_else(String::new, |limit| limit.line(|files| files.to_string()))),
            ("locked memory", self.locked_memory.map_or_else(String::new, |limit| limit.line(about))),
            ("user", self.user().unwrap_or_default()),
            ("ptrace scope", self.ptrace_scope.map_or_else(String::new, |scope| scope.to_string())),
            ("seccomp", seccomp.to_owned()),
        ];
        lines.into_iter().filter(|(_, text)| !text.is_empty()).collect()
    }

    fn user(&self) -> Option<String> {
        let mut user = format!("uid {}", self.uid?);
        if self.euid != self.uid {
            user += &format!(", effective {}", self.euid?);
        }
        if self.user_namespace == Some(true) {
            user += ", in a user namespace";
            user += &self.overflow_uid.map_or_else(String::new, |uid| format!(" where other users show as {uid}"));
        }
        Some(user)
    }
}

impl Library {
    fn line(&self) -> String {
        let linked = self.file.as_ref().filter(|file| **file != self.path);
        let linked = linked.map_or_else(String::new, |file| format!(", which is {file}"));
        let stub = if self.stub { ", in a folder of stubs" } else { "" };
        format!("{}{linked}{stub}", self.path)
    }
}

impl Limit {
    pub(super) fn line(self, shown: fn(u64) -> String) -> String {
        let [soft, hard] = [self.soft, self.hard].map(|value| value.map_or_else(|| "unlimited".to_owned(), shown));
        if soft == hard { soft } else { format!("{soft}, can be raised to {hard}") }
    }
}

impl SharedMemory {
    fn line(self) -> String {
        let room = self.size.zip(self.free);
        let room = room.map_or_else(String::new, |(size, free)| format!(", {} of {} free", about(free), about(size)));
        match self {
            Self { exists: false, .. } => "none".to_owned(),
            Self { writable: true, .. } => format!("writable{room}"),
            Self { writable: false, .. } => format!("not writable{room}"),
        }
    }
}

/// Paths of nodes, with the mode and owner if this process can't open the node.
pub(super) fn listed(nodes: &[Node]) -> String {
    let one = |node: &Node| match node.usable {
        true => node.path.clone(),
        false => format!("{} (mode {} of {}:{}, NOT OPEN TO THIS PROCESS)", node.path, node.mode, node.uid, node.gid),
    };
    match nodes.is_empty() {
        true => "none".to_owned(),
        false => nodes.iter().map(one).collect::<Vec<_>>().join(" "),
    }
}
