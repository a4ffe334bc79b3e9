//! Where the probes run: what of a machine decides whether memory can be shared.

use std::{
    ffi::{OsStr, OsString},
    fs,
    os::unix::fs::MetadataExt,
    path::{Component, Path, PathBuf},
};

use nix::{
    fcntl::{AT_FDCWD, AtFlags},
    sys::{
        resource::{RLIM_INFINITY, Resource, getrlimit},
        statvfs::statvfs,
        utsname::uname,
    },
    unistd::{AccessFlags, faccessat, getegid, geteuid, getuid},
};
use serde::{Deserialize, Serialize};

/// What gVisor says of its build in `/proc/version`, whatever release it gives itself: no kernel of Linux says it.
const GVISOR_BUILD: &str = "#1 SMP Sun Jan 10 15:06:54 PST 2016";

/// What was seen of one end. What could not be looked at is absent, and is no failure.
///
/// It is only read: no device is opened, for an open of a sick one may never return.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Environment {
    /// The kernel: name, release and machine, as uname(2) has them.
    pub kernel: String,
    /// What made the container that this is, such as `docker`, if it shows.
    pub container: Option<String>,
    /// Whether this is the Windows Subsystem for Linux, version 2: the driver is that of Windows.
    pub wsl: bool,
    /// Whether the kernel is gVisor's.
    pub gvisor: bool,
    /// Whether `/proc` is of this process's own PID namespace.
    pub own_proc: Option<bool>,
    /// What kind of confidential virtual machine this is, `tdx` or `sev-snp`, if it shows.
    pub confidential: Option<String>,
    /// The version of NVIDIA's kernel module.
    pub module: Option<String>,
    /// Whether that is the open module; absent if there is none.
    pub module_open: Option<bool>,
    /// The folder of the pipes of MPS, if it is in use here.
    pub mps: Option<String>,
    /// Whether a GPU is partitioned (MIG), or this process was given a partition.
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
    /// Yama's `ptrace_scope`: who may take descriptors out of another process.
    pub ptrace_scope: Option<u32>,
    /// The real user.
    pub uid: Option<u32>,
    /// The effective user.
    pub euid: Option<u32>,
    /// The effective group.
    pub egid: Option<u32>,
    /// Whether users are mapped, as in a user namespace of its own.
    pub user_namespace: Option<bool>,
    /// The user that stands for those who are not mapped.
    pub overflow_uid: Option<u32>,
    /// 0: system calls are not filtered; 1 and 2: strictly, and by a filter.
    pub seccomp: Option<u32>,
}

/// A library, as it was loaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Library {
    /// Where it was loaded from.
    pub path: String,
    /// The file itself, with every link followed.
    #[serde(default)]
    pub file: Option<String>,
    /// Whether either lies in a folder `stubs`, as a toolkit's link-time library does.
    #[serde(default)]
    pub stub: bool,
}

/// A device node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Its path.
    pub path: String,
    /// Its permissions, in octal.
    pub mode: String,
    /// Whose it is.
    pub uid: u32,
    /// Of which group.
    pub gid: u32,
    /// Whether the kernel lets this process open it for reading and writing, as far as it says so unopened.
    pub usable: bool,
}

/// A limit of a process; absent is unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limit {
    /// What holds now.
    #[serde(default)]
    pub soft: Option<u64>,
    /// How far this process may raise it.
    #[serde(default)]
    pub hard: Option<u64>,
}

/// A folder in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedMemory {
    /// Whether there is such a folder.
    pub exists: bool,
    /// Whether this process may make files in it.
    pub writable: bool,
    /// Its size in bytes.
    #[serde(default)]
    pub size: Option<u64>,
    /// What of it is free, in bytes.
    #[serde(default)]
    pub free: Option<u64>,
}

impl Environment {
    /// Looks around. `driver_library` is the file that the driver was loaded from, if it was.
    pub fn look(driver_library: Option<&Path>) -> Self {
        Self::look_under(Path::new("/"), &|name| std::env::var_os(name), driver_library)
    }

    /// The same for the machine whose files lie under `root`, and a process with these environment variables. Limits
    /// and users are this process's own.
    pub fn look_under(root: &Path, variable: &dyn Fn(&str) -> Option<OsString>, driver_library: Option<&Path>) -> Self {
        let at = |path: &str| root.join(path);
        let text = |path: &str| fs::read(at(path)).ok().map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let number = |path: &str| text(path).and_then(|text| text.trim().parse().ok());
        let set = |name: &str| variable(name).map(|value| value.to_string_lossy().into_owned());
        let version = text("proc/version").unwrap_or_default();
        let module = text("proc/driver/nvidia/version");
        let visible_devices = set("CUDA_VISIBLE_DEVICES");
        Self {
            kernel: kernel(),
            container: container(root, &text("proc/self/cgroup").unwrap_or_default(), variable),
            // `microsoft-standard-WSL2`; version 1 says `Microsoft` and has no GPU.
            wsl: version.to_ascii_lowercase().contains("microsoft"),
            gvisor: version.contains(GVISOR_BUILD) || version.to_ascii_lowercase().contains("gvisor"),
            own_proc: fs::read_link(at("proc/self"))
                .ok()
                .map(|link| link == Path::new(&std::process::id().to_string())),
            confidential: confidential(root),
            module: module.as_deref().and_then(module_version),
            module_open: module.as_deref().map(|text| text.contains("Open Kernel Module")),
            mps: set("CUDA_MPS_PIPE_DIRECTORY")
                .or_else(|| at("tmp/nvidia-mps/control").exists().then(|| "/tmp/nvidia-mps".to_owned())),
            mig: visible_devices.as_deref().is_some_and(|value| value.starts_with("MIG-")) || partitioned(root),
            library: driver_library.map(Library::at),
            library_path: set("LD_LIBRARY_PATH"),
            nodes: nodes(root, "dev", |name| {
                let number = |rest: &str| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit());
                // `dxg` is WSL's way to the driver of Windows.
                matches!(name, "nvidiactl" | "nvidia-uvm" | "dxg") || name.strip_prefix("nvidia").is_some_and(number)
            }),
            imex_channels: nodes(root, "dev/nvidia-caps-imex-channels", |_| true),
            open_files: limit(Resource::RLIMIT_NOFILE),
            locked_memory: limit(Resource::RLIMIT_MEMLOCK),
            shared_memory: Some(shared_memory(&at("dev/shm"))),
            ptrace_scope: number("proc/sys/kernel/yama/ptrace_scope"),
            uid: Some(getuid().as_raw()),
            euid: Some(geteuid().as_raw()),
            egid: Some(getegid().as_raw()),
            user_namespace: text("proc/self/uid_map").map(|map| !is_identity(&map)),
            overflow_uid: number("proc/sys/kernel/overflowuid"),
            seccomp: text("proc/self/status").and_then(|status| {
                status.lines().find_map(|line| line.strip_prefix("Seccomp:")).and_then(|mode| mode.trim().parse().ok())
            }),
            visible_devices,
        }
    }

    /// What is worth telling a person: a label and a line for each.
    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let mut lines = Vec::new();
        let mut tell = |label, text: String| lines.push((label, text));
        tell("kernel", self.kernel.clone());
        let mut inside: Vec<&str> = Vec::new();
        inside.extend(self.container.as_deref());
        inside.extend(self.wsl.then_some("WSL2"));
        inside.extend(self.gvisor.then_some("gVisor"));
        if !inside.is_empty() {
            tell("inside", inside.join(", "));
        }
        if self.own_proc == Some(false) {
            tell("/proc", "of another PID namespace".to_owned());
        }
        if let Some(kind) = &self.confidential {
            tell("confidential", format!("a virtual machine of kind {kind}"));
        }
        let open = if self.module_open == Some(true) { ", open" } else { "" };
        tell("module", self.module.as_ref().map_or_else(|| "none seen".to_owned(), |module| format!("{module}{open}")));
        if let Some(library) = &self.library {
            let linked = library.file.as_ref().filter(|file| **file != library.path);
            let linked = linked.map(|file| format!(", which is {file}")).unwrap_or_default();
            let stub = if library.stub { ", in a folder of stubs" } else { "" };
            tell("library", format!("{}{linked}{stub}", library.path));
        }
        if let Some(path) = self.library_path.as_deref().filter(|path| !path.is_empty()) {
            tell("LD_LIBRARY_PATH", path.to_owned());
        }
        if let Some(devices) = &self.visible_devices {
            let empty = if devices.is_empty() { "set, and empty: no device" } else { devices };
            tell("CUDA_VISIBLE_DEVICES", empty.to_owned());
        }
        if self.mig {
            tell("MIG", "in use".to_owned());
        }
        if let Some(folder) = &self.mps {
            tell("MPS", format!("in {folder}"));
        }
        tell("nodes", told(&self.nodes));
        tell("IMEX channels", told(&self.imex_channels));
        let shared = match self.shared_memory {
            None => "not looked at".to_owned(),
            Some(SharedMemory { exists: false, .. }) => "none".to_owned(),
            Some(SharedMemory { writable, size, free, .. }) => {
                let room = match (size, free) {
                    (Some(size), Some(free)) => format!(", {free} of {size} bytes free"),
                    _ => String::new(),
                };
                format!("{}{room}", if writable { "writable" } else { "not writable" })
            }
        };
        tell("/dev/shm", shared);
        if let Some(limit) = self.open_files {
            tell("open files", limit.to_string());
        }
        if let Some(limit) = self.locked_memory {
            let unit = if limit.soft.is_some() || limit.hard.is_some() { " bytes" } else { "" };
            tell("locked memory", format!("{limit}{unit}"));
        }
        if let Some(user) = self.user() {
            tell("user", user);
        }
        if let Some(scope) = self.ptrace_scope {
            tell("ptrace scope", scope.to_string());
        }
        match self.seccomp {
            Some(1) => tell("seccomp", "strict".to_owned()),
            Some(mode) if mode > 1 => tell("seccomp", "a filter".to_owned()),
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
                user += &format!(" where strangers show as {overflow}");
            }
        }
        Some(user)
    }
}

impl Library {
    fn at(path: &Path) -> Self {
        let file = fs::canonicalize(path).ok();
        let in_stubs = |path: &Path| path.components().any(|part| part == Component::Normal(OsStr::new("stubs")));
        Self {
            path: path.display().to_string(),
            stub: in_stubs(path) || file.as_deref().is_some_and(in_stubs),
            file: file.map(|file| file.display().to_string()),
        }
    }
}

impl std::fmt::Display for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let told = |value: Option<u64>| value.map_or_else(|| "unlimited".to_owned(), |value| value.to_string());
        match self {
            Self { soft, hard } if soft == hard => f.write_str(&told(*soft)),
            Self { soft, hard } => write!(f, "{}, can be raised to {}", told(*soft), told(*hard)),
        }
    }
}

/// Nodes by name, and what is wrong with those that can't be used.
fn told(nodes: &[Node]) -> String {
    if nodes.is_empty() {
        return "none".to_owned();
    }
    let one = |node: &Node| match node.usable {
        true => node.path.clone(),
        false => format!("{} (mode {} of {}:{}, NOT OPEN TO THIS PROCESS)", node.path, node.mode, node.uid, node.gid),
    };
    nodes.iter().map(one).collect::<Vec<_>>().join(" ")
}

fn kernel() -> String {
    let Ok(name) = uname() else { return String::new() };
    [name.sysname(), name.release(), name.machine()].map(OsStr::to_string_lossy).join(" ")
}

/// Which container this is, by the marks that each leaves; in the order of who says it most plainly.
fn container(root: &Path, cgroup: &str, variable: &dyn Fn(&str) -> Option<OsString>) -> Option<String> {
    // In a hierarchy that is not hidden by a namespace, a folder is named after whoever made it.
    let made_by = |segment: &str| {
        Some(match segment {
            _ if segment.starts_with("kubepods") => "kubernetes",
            _ if segment == "docker" || segment.starts_with("docker-") && segment.ends_with(".scope") => "docker",
            _ if segment.starts_with("libpod-") => "podman",
            _ if segment.starts_with("cri-containerd-") => "containerd",
            _ if segment == "lxc" || segment.starts_with("lxc.payload") => "lxc",
            _ => return None,
        })
    };
    let by_cgroup = || cgroup.lines().flat_map(|line| line.split(['/', ':'])).find_map(made_by);
    let found = if variable("KUBERNETES_SERVICE_HOST").is_some() {
        Some("kubernetes")
    } else if root.join("run/.containerenv").exists() {
        Some("podman")
    } else if root.join(".dockerenv").exists() {
        Some("docker")
    } else {
        by_cgroup()
    };
    // systemd-nspawn, LXC and podman tell their first process so, and it its children.
    found.map(str::to_owned).or_else(|| variable("container").map(|name| name.to_string_lossy().into_owned()))
}

/// These nodes are in the guest alone. Whether the GPU is in its confidential mode they don't say.
fn confidential(root: &Path) -> Option<String> {
    let kinds = [("dev/tdx_guest", "tdx"), ("dev/sev-guest", "sev-snp")];
    kinds.into_iter().find(|(node, _)| root.join(node).exists()).map(|(_, kind)| kind.to_owned())
}

/// The version in `NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159  Wed ...`: the first word that is one.
fn module_version(text: &str) -> Option<String> {
    let is_version = |word: &&str| {
        word.contains('.') && word.split('.').all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
    };
    text.lines().next()?.split_whitespace().find(is_version).map(str::to_owned)
}

/// Whether a GPU has an instance. `capabilities/mig` is no sign: it is there wherever the driver knows of MIG.
fn partitioned(root: &Path) -> bool {
    let gpus = entries(&root.join("proc/driver/nvidia/capabilities"), |name| name.starts_with("gpu"));
    gpus.iter().any(|gpu| !entries(&gpu.join("mig"), |name| name.starts_with("gi")).is_empty())
}

/// What a folder holds, by name; numbers in the order of their value.
fn entries(folder: &Path, wanted: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let Ok(read) = fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<String> = read.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.retain(|name| wanted(name));
    names.sort_by_key(|name| (name.len(), name.clone()));
    names.iter().map(|name| folder.join(name)).collect()
}

fn nodes(root: &Path, folder: &str, wanted: impl Fn(&str) -> bool) -> Vec<Node> {
    let node = |path: PathBuf| {
        let of = fs::metadata(&path).ok().filter(|of| !of.is_dir())?;
        Some(Node {
            mode: format!("{:04o}", of.mode() & 0o7777),
            uid: of.uid(),
            gid: of.gid(),
            usable: allowed(&path, AccessFlags::R_OK | AccessFlags::W_OK),
            path: format!("/{}", path.strip_prefix(root).unwrap_or(&path).display()),
        })
    };
    entries(&root.join(folder), wanted).into_iter().filter_map(node).collect()
}

/// Whether the effective user may; a container's list of devices counts too.
fn allowed(path: &Path, access: AccessFlags) -> bool {
    faccessat(AT_FDCWD, path, access, AtFlags::AT_EACCESS).is_ok()
}

fn limit(resource: Resource) -> Option<Limit> {
    let (soft, hard) = getrlimit(resource).ok()?;
    let bounded = |value| (value != RLIM_INFINITY).then_some(value);
    Some(Limit { soft: bounded(soft), hard: bounded(hard) })
}

fn shared_memory(folder: &Path) -> SharedMemory {
    let of = statvfs(folder).ok();
    let bytes = |blocks: fn(&nix::sys::statvfs::Statvfs) -> u64| {
        of.as_ref().and_then(|of| blocks(of).checked_mul(of.fragment_size()))
    };
    SharedMemory {
        exists: folder.is_dir(),
        writable: allowed(folder, AccessFlags::W_OK | AccessFlags::X_OK),
        size: bytes(|of| of.blocks()),
        free: bytes(|of| of.blocks_available()),
    }
}

/// Whether every user is itself: one range, from 0 to 0, of all.
fn is_identity(map: &str) -> bool {
    map.split_whitespace().eq(["0", "0", "4294967295"])
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    /// A machine of files.
    fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    fn look_with(files: &[(&str, &str)], variables: &[(&str, &str)]) -> Environment {
        let variable =
            |wanted: &str| variables.iter().find(|(name, _)| *name == wanted).map(|(_, value)| OsString::from(value));
        Environment::look_under(machine(files).path(), &variable, None)
    }

    fn look(files: &[(&str, &str)]) -> Environment {
        look_with(files, &[])
    }

    #[test]
    fn an_empty_machine_is_no_failure() {
        let seen = look(&[]);
        assert!(seen.kernel.starts_with("Linux "));
        assert!(seen.open_files.is_some() && seen.uid.is_some());
        let nothing = Environment {
            kernel: seen.kernel.clone(),
            open_files: seen.open_files,
            locked_memory: seen.locked_memory,
            uid: seen.uid,
            euid: seen.euid,
            egid: seen.egid,
            shared_memory: Some(SharedMemory { exists: false, writable: false, size: None, free: None }),
            ..Environment::default()
        };
        assert_eq!(seen, nothing);
    }

    #[test]
    fn this_machine_is_looked_at_whole() {
        let seen = Environment::look(None);
        let again: Environment = serde_json::from_str(&serde_json::to_string(&seen).unwrap()).unwrap();
        assert_eq!(again, seen);
        assert!(seen.lines().iter().any(|(label, text)| *label == "kernel" && *text == seen.kernel));
    }

    #[test]
    fn what_a_report_leaves_out_is_absent() {
        assert_eq!(serde_json::from_str::<Environment>("{}").unwrap(), Environment::default());
    }

    #[test]
    fn containers_are_told_by_the_marks_they_leave() {
        let cgroup = |text| look(&[("proc/self/cgroup", text)]).container;
        assert_eq!(cgroup("0::/\n"), None);
        assert_eq!(cgroup("0::/system.slice/docker.service\n"), None);
        assert_eq!(cgroup("0::/user.slice/user-1000.slice/docker-desktop\n"), None);
        assert_eq!(cgroup("12:pids:/docker/0123abcd\n").as_deref(), Some("docker"));
        assert_eq!(cgroup("0::/system.slice/docker-0123abcd.scope\n").as_deref(), Some("docker"));
        assert_eq!(cgroup("0::/machine.slice/libpod-0123.scope/container\n").as_deref(), Some("podman"));
        assert_eq!(cgroup("0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-0.scope\n").unwrap(), "kubernetes");
        assert_eq!(cgroup("0::/system.slice/cri-containerd-0.scope\n").as_deref(), Some("containerd"));
        assert_eq!(cgroup("0::/lxc.payload.box/init.scope\n").as_deref(), Some("lxc"));
        assert_eq!(look(&[(".dockerenv", "")]).container.as_deref(), Some("docker"));
        assert_eq!(look(&[("run/.containerenv", "")]).container.as_deref(), Some("podman"));
        let pod = look_with(&[(".dockerenv", "")], &[("KUBERNETES_SERVICE_HOST", "10.0.0.1")]);
        assert_eq!(pod.container.as_deref(), Some("kubernetes"));
        assert_eq!(look_with(&[], &[("container", "systemd-nspawn")]).container.as_deref(), Some("systemd-nspawn"));
    }

    #[test]
    fn kernels_that_are_not_linux_on_the_metal_are_told() {
        let version = |text| {
            let seen = look(&[("proc/version", text)]);
            (seen.wsl, seen.gvisor)
        };
        assert_eq!(version("Linux version 5.15.153.1-microsoft-standard-WSL2 (root@1) #1 SMP"), (true, false));
        assert_eq!(version("Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016"), (false, true));
        assert_eq!(version("Linux version 4.19.0-gvisor #1 SMP Mon Jan 1 00:00:00 UTC 2026"), (false, true));
        assert_eq!(version("Linux version 4.4.0 (builder@host) #1 SMP Mon Feb 1 2016"), (false, false));
        assert_eq!(version("Linux version 6.18.0 (builder@host) #1 SMP"), (false, false));
    }

    #[test]
    fn a_confidential_guest_is_told_by_its_node() {
        assert_eq!(look(&[("dev/tdx_guest", "")]).confidential.as_deref(), Some("tdx"));
        assert_eq!(look(&[("dev/sev-guest", "")]).confidential.as_deref(), Some("sev-snp"));
        assert_eq!(look(&[("dev/sev", "")]).confidential, None);
    }

    #[test]
    fn the_module_is_named_with_its_kind() {
        let module = |text| {
            let seen = look(&[("proc/driver/nvidia/version", text)]);
            (seen.module, seen.module_open)
        };
        let closed =
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.154.05  Thu Dec 28 15:37:48 UTC 2023\nGCC 12.2.0";
        assert_eq!(module(closed), (Some("535.154.05".to_owned()), Some(false)));
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159  Release Build  (root@1)\n";
        assert_eq!(module(open), (Some("580.159".to_owned()), Some(true)));
        assert_eq!(module("..\n1.0"), (None, Some(false)));
    }

    #[test]
    fn mps_is_told_by_its_variable_or_its_pipe() {
        assert_eq!(look_with(&[], &[("CUDA_MPS_PIPE_DIRECTORY", "/run/mps")]).mps.as_deref(), Some("/run/mps"));
        assert_eq!(look(&[("tmp/nvidia-mps/control", "")]).mps.as_deref(), Some("/tmp/nvidia-mps"));
        assert_eq!(look(&[("tmp/nvidia-mps/log", "")]).mps, None);
    }

    #[test]
    fn mig_is_told_by_an_instance_and_not_by_a_driver_that_could() {
        assert!(look(&[("proc/driver/nvidia/capabilities/gpu0/mig/gi1/access", "")]).mig);
        assert!(look_with(&[], &[("CUDA_VISIBLE_DEVICES", "MIG-0123")]).mig);
        assert!(!look(&[("proc/driver/nvidia/capabilities/mig/config", "")]).mig);
        assert!(!look(&[("proc/driver/nvidia/capabilities/gpu0/mig/config", "")]).mig);
        assert!(!look_with(&[], &[("CUDA_VISIBLE_DEVICES", "0,1")]).mig);
    }

    #[test]
    fn a_variable_that_is_empty_is_set() {
        let seen = look_with(&[], &[("CUDA_VISIBLE_DEVICES", ""), ("LD_LIBRARY_PATH", "/opt/lib")]);
        assert_eq!(seen.visible_devices.as_deref(), Some(""));
        assert_eq!(seen.library_path.as_deref(), Some("/opt/lib"));
        let lines = seen.lines();
        assert!(lines.contains(&("CUDA_VISIBLE_DEVICES", "set, and empty: no device".to_owned())), "{lines:?}");
    }

    #[test]
    fn a_library_is_followed_to_its_file_and_a_stub_told() {
        let root = machine(&[("lib/libcuda.so.580.159", ""), ("cuda/stubs/libcuda.so", ""), ("lib/mystubs", "")]);
        let link = root.path().join("lib/libcuda.so.1");
        symlink("libcuda.so.580.159", &link).unwrap();
        let library = Environment::look(Some(&link)).library.unwrap();
        let file = fs::canonicalize(root.path()).unwrap().join("lib/libcuda.so.580.159");
        assert_eq!(library.file, Some(file.display().to_string()));
        assert!(!library.stub);
        let to_stub = root.path().join("lib/libcuda.so");
        symlink("../cuda/stubs/libcuda.so", &to_stub).unwrap();
        assert!(Environment::look(Some(&to_stub)).library.unwrap().stub);
        assert!(!Environment::look(Some(&root.path().join("lib/mystubs"))).library.unwrap().stub);
        let gone = Environment::look(Some(Path::new("/nonexistent/stubs/libcuda.so.1"))).library.unwrap();
        assert_eq!((gone.file, gone.stub), (None, true));
    }

    #[test]
    fn nodes_are_listed_with_who_may_use_them() {
        let files = ["nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "nvidia-modeset", "nvidiaX", "nvidia"];
        let files: Vec<String> = files.iter().map(|name| format!("dev/{name}")).collect();
        let mut files: Vec<(&str, &str)> = files.iter().map(|path| (path.as_str(), "")).collect();
        files.extend([("dev/nvidia-caps-imex-channels/channel0", ""), ("dev/nvidia-caps/nvidia-cap1", "")]);
        let root = machine(&files);
        let locked = root.path().join("dev/nvidia2");
        fs::set_permissions(&locked, fs::Permissions::from_mode(0o440)).unwrap();
        let seen = Environment::look_under(root.path(), &|_| None, None);
        let paths: Vec<&str> = seen.nodes.iter().map(|node| node.path.as_str()).collect();
        assert_eq!(paths, ["/dev/nvidia2", "/dev/nvidia10", "/dev/nvidiactl", "/dev/nvidia-uvm"]);
        assert_eq!((seen.nodes[0].mode.as_str(), Some(seen.nodes[0].uid)), ("0440", seen.euid));
        // Root may write whatever its mode says.
        assert_eq!(seen.nodes[0].usable, geteuid().is_root());
        assert!(seen.nodes[1].usable);
        assert_eq!(seen.imex_channels.len(), 1);
        assert_eq!(seen.imex_channels[0].path, "/dev/nvidia-caps-imex-channels/channel0");
    }

    #[test]
    fn a_node_out_of_reach_says_whose_it_is() {
        let node = Node { path: "/dev/nvidia0".to_owned(), mode: "0660".to_owned(), uid: 0, gid: 44, usable: false };
        assert_eq!(told(&[node]), "/dev/nvidia0 (mode 0660 of 0:44, NOT OPEN TO THIS PROCESS)");
    }

    #[test]
    fn shared_memory_has_its_room_told() {
        // Not empty, for then all would be free.
        let seen = look(&[("dev/shm/file", &"x".repeat(1 << 16))]).shared_memory.unwrap();
        assert!(seen.exists && seen.writable && seen.size > seen.free && seen.free > Some(0), "{seen:?}");
    }

    #[test]
    fn limits_without_a_bound_have_no_number() {
        assert_eq!(Limit { soft: Some(1024), hard: None }.to_string(), "1024, can be raised to unlimited");
        assert_eq!(Limit { soft: Some(64), hard: Some(64) }.to_string(), "64");
    }

    #[test]
    fn a_user_namespace_is_told_by_its_map() {
        let user = |map| look(&[("proc/self/uid_map", map)]).user_namespace;
        assert_eq!(user("         0          0 4294967295\n"), Some(false));
        assert_eq!(user("         0       1000          1\n"), Some(true));
        assert_eq!(user("0 0 65536\n1000000 1000000 65536\n"), Some(true));
        let seen = Environment {
            user_namespace: Some(true),
            overflow_uid: Some(65534),
            uid: Some(0),
            euid: Some(0),
            ..Environment::default()
        };
        let lines = seen.lines();
        let want = "uid 0, in a user namespace where strangers show as 65534".to_owned();
        assert!(lines.contains(&("user", want)), "{lines:?}");
    }

    #[test]
    fn small_numbers_of_the_kernel_are_read() {
        let seen = look(&[
            ("proc/sys/kernel/yama/ptrace_scope", "1\n"),
            ("proc/sys/kernel/overflowuid", "65534\n"),
            ("proc/self/status", "Name:\tx\nSeccomp:\t2\nSeccomp_filters:\t1\n"),
        ]);
        assert_eq!((seen.ptrace_scope, seen.overflow_uid, seen.seccomp), (Some(1), Some(65534), Some(2)));
        assert_eq!(look(&[("proc/sys/kernel/yama/ptrace_scope", "many")]).ptrace_scope, None);
    }
}
