//! The environment of the probes: the properties of a machine that affect memory sharing.

mod lines;
mod read;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Values that could not be read are absent.
///
/// No device is opened: opening a faulty device may hang.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Environment {
    /// Name, release and machine from uname(2).
    pub kernel: String,
    /// The C library that this program was built for.
    pub c_library: Option<CLibrary>,
    /// The container software, such as `docker`, if recognised.
    pub container: Option<String>,
    /// `NVIDIA_DRIVER_CAPABILITIES`: the driver libraries that the container runtime adds.
    pub driver_capabilities: Option<String>,
    /// The SELinux or AppArmor label of this process.
    pub label: Option<String>,
    /// Whether this is WSL 2, with the Windows driver.
    pub wsl: bool,
    /// Whether the kernel is gVisor.
    pub gvisor: bool,
    /// Whether `/proc` belongs to this process's PID namespace.
    pub own_proc: Option<bool>,
    /// The kind of confidential virtual machine, `tdx` or `sev-snp`, if recognised.
    pub confidential: Option<String>,
    /// The PCI addresses of NVIDIA's GPUs. A container sees those of its host.
    pub pci_gpus: Vec<String>,
    /// The version of NVIDIA's kernel module.
    pub module: Option<String>,
    /// Whether it is the open module; absent without a module.
    pub module_open: Option<bool>,
    /// The pipe folder of MPS, if in use.
    pub mps: Option<String>,
    /// Whether MIG is in use on a GPU or by this process.
    pub mig: bool,
    /// `CUDA_VISIBLE_DEVICES`.
    pub visible_devices: Option<String>,
    /// The driver library.
    pub library: Option<Library>,
    /// `LD_LIBRARY_PATH`.
    pub library_path: Option<String>,
    /// The driver's device nodes.
    pub nodes: Vec<Node>,
    /// The nodes of the IMEX channels, which fabric handles require.
    pub imex_channels: Vec<Node>,
    /// `RLIMIT_NOFILE`.
    pub open_files: Option<Limit>,
    /// `RLIMIT_MEMLOCK`, in bytes.
    pub locked_memory: Option<Limit>,
    /// `/dev/shm`, where the driver keeps the state of inter-process events.
    pub shared_memory: Option<SharedMemory>,
    /// Yama's `ptrace_scope`: which processes may access another's memory and descriptors.
    pub ptrace_scope: Option<u32>,
    /// The real uid.
    pub uid: Option<u32>,
    /// The effective uid.
    pub euid: Option<u32>,
    /// Whether this is a user namespace with mapped uids.
    pub user_namespace: Option<bool>,
    /// The overflow uid, as which unmapped users appear.
    pub overflow_uid: Option<u32>,
    /// The seccomp mode: 0 disabled, 1 strict, 2 filter.
    pub seccomp: Option<u32>,
}

/// A C library.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum CLibrary {
    Glibc,
    Musl,
    /// Unknown to this version.
    #[serde(other)]
    Other,
}

impl CLibrary {
    /// The C library of this program.
    const OWN: Self = if cfg!(target_env = "gnu") {
        Self::Glibc
    } else if cfg!(target_env = "musl") {
        Self::Musl
    } else {
        Self::Other
    };
}

/// The loaded driver library.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Library {
    /// The path that it was loaded from.
    pub path: String,
    /// The file after resolving links.
    pub file: Option<String>,
    /// Whether it is in a folder named `stubs`, as a toolkit's link-time library.
    #[serde(default)]
    pub stub: bool,
}

/// A device node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Node {
    pub path: String,
    /// The permissions in octal.
    pub mode: String,
    pub uid: u32,
    pub gid: u32,
    /// Whether this process may open it for reading and writing, by faccessat(2).
    pub usable: bool,
}

/// A resource limit; `None` means unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Limit {
    /// The limit in force.
    pub soft: Option<u64>,
    /// The highest value to which this process may raise it.
    pub hard: Option<u64>,
}

/// A folder in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SharedMemory {
    pub exists: bool,
    /// Whether this process may create files in it.
    pub writable: bool,
    /// In bytes.
    pub size: Option<u64>,
    /// In bytes.
    pub free: Option<u64>,
}

#[cfg(test)]
mod tests;
