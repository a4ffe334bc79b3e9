//! Where the probes run: everything about a machine that decides whether memory can be shared.

mod lines;
mod read;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The environment of one end. What could not be read is absent.
///
/// No device is opened, since opening a faulty one may never return.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Environment {
    /// The kernel: name, release and machine, as uname(2) has them.
    pub kernel: String,
    /// The C library that this program was built for.
    pub c_library: Option<CLibrary>,
    /// The software that created the container, such as `docker`, if it can be recognised.
    pub container: Option<String>,
    /// `NVIDIA_DRIVER_CAPABILITIES`: which of the driver's libraries the container's runtime adds.
    pub driver_capabilities: Option<String>,
    /// The label that SELinux or AppArmor has for this process.
    pub label: Option<String>,
    /// The inode of its PID namespace.
    pub pid_namespace: Option<u64>,
    /// The inode of its IPC namespace.
    pub ipc_namespace: Option<u64>,
    /// Whether this is the Windows Subsystem for Linux, version 2, with the driver of Windows.
    pub wsl: bool,
    /// Whether the kernel is gVisor's.
    pub gvisor: bool,
    /// Whether `/proc` is of this process's own PID namespace.
    pub own_proc: Option<bool>,
    /// The kind of confidential virtual machine, `tdx` or `sev-snp`, if it can be recognised.
    pub confidential: Option<String>,
    /// The version of NVIDIA's kernel module.
    pub module: Option<String>,
    /// Whether that is the open module; absent without a module.
    pub module_open: Option<bool>,
    /// The folder of the pipes of MPS, if it is in use.
    pub mps: Option<String>,
    /// Whether a GPU is partitioned (MIG), or this process has a partition.
    pub mig: bool,
    /// `CUDA_VISIBLE_DEVICES`.
    pub visible_devices: Option<String>,
    /// The driver library.
    pub library: Option<Library>,
    /// `LD_LIBRARY_PATH`.
    pub library_path: Option<String>,
    /// The driver's device nodes.
    pub nodes: Vec<Node>,
    /// The nodes of the IMEX channels, which fabric handles need.
    pub imex_channels: Vec<Node>,
    /// How many files this process may have open.
    pub open_files: Option<Limit>,
    /// How many bytes it may lock in memory.
    pub locked_memory: Option<Limit>,
    /// `/dev/shm`, where the driver keeps the state of inter-process events.
    pub shared_memory: Option<SharedMemory>,
    /// Yama's `ptrace_scope`: which processes may read another's memory and descriptors.
    pub ptrace_scope: Option<u32>,
    /// The real user.
    pub uid: Option<u32>,
    /// The effective user.
    pub euid: Option<u32>,
    /// The effective group.
    pub egid: Option<u32>,
    /// Whether users are mapped, as in a user namespace.
    pub user_namespace: Option<bool>,
    /// The overflow uid, which users that are not mapped show as.
    pub overflow_uid: Option<u32>,
    /// The seccomp mode: 0 none, 1 strict, 2 a filter.
    pub seccomp: Option<u32>,
}

/// A C library.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum CLibrary {
    /// glibc, for which NVIDIA's driver library is built.
    Glibc,
    /// musl.
    Musl,
    /// One that this version does not know.
    #[serde(other)]
    Other,
}

impl CLibrary {
    /// That of this program.
    const OWN: Self = if cfg!(target_env = "gnu") {
        Self::Glibc
    } else if cfg!(target_env = "musl") {
        Self::Musl
    } else {
        Self::Other
    };
}

/// The driver library, as it was loaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Library {
    /// The path that it was loaded from.
    pub path: String,
    /// The file, with all links resolved.
    #[serde(default)]
    pub file: Option<String>,
    /// Whether either is in a folder `stubs`, as a toolkit's link-time library is.
    #[serde(default)]
    pub stub: bool,
}

/// A device node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Node {
    /// Its path.
    pub path: String,
    /// Its permissions, in octal.
    pub mode: String,
    /// Its owner.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Whether this process may open it for reading and writing, by faccessat(2).
    pub usable: bool,
}

/// A limit of a process; `None` is unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Limit {
    /// The limit in force.
    #[serde(default)]
    pub soft: Option<u64>,
    /// How far this process may raise it.
    #[serde(default)]
    pub hard: Option<u64>,
}

/// A folder in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SharedMemory {
    /// Whether the folder exists.
    pub exists: bool,
    /// Whether this process may create files in it.
    pub writable: bool,
    /// Its size in bytes.
    #[serde(default)]
    pub size: Option<u64>,
    /// Its free space, in bytes.
    #[serde(default)]
    pub free: Option<u64>,
}

#[cfg(test)]
mod tests;
