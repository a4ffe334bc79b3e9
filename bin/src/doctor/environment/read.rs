//! Reads the environment of a process.

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
    unistd::{AccessFlags, faccessat, geteuid, getuid},
};
use vmmfd::internals::wsl;

use super::{CLibrary, Environment, Library, Limit, Node, SharedMemory};

/// The build string of gVisor in `/proc/version`, the same in every release. No Linux kernel has it.
const GVISOR_BUILD: &str = "#1 SMP Sun Jan 10 15:06:54 PST 2016";

impl Environment {
    /// Reads the environment of this process. `driver_library` is the loaded driver library.
    pub fn read(driver_library: Option<&Path>) -> Self {
        Self::read_under(Path::new("/"), &|name| std::env::var_os(name), driver_library)
    }

    /// Reads the environment below another root, with other environment variables. Limits and users are still this process's.
    pub fn read_under(root: &Path, variable: &dyn Fn(&str) -> Option<OsString>, driver_library: Option<&Path>) -> Self {
        let at = |path: &str| root.join(path);
        let text = |path: &str| fs::read(at(path)).ok().map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let number = |path: &str| text(path).and_then(|text| text.trim().parse().ok());
        let set = |name: &str| variable(name).map(|value| value.to_string_lossy().into_owned());
        let version = text("proc/version").unwrap_or_default();
        let module = text("proc/driver/nvidia/version");
        let visible_devices = set("CUDA_VISIBLE_DEVICES");
        Self {
            kernel: kernel(),
            c_library: Some(CLibrary::OWN),
            container: container(root, &text("proc/self/cgroup").unwrap_or_default(), variable),
            driver_capabilities: set("NVIDIA_DRIVER_CAPABILITIES"),
            // The value has a trailing NUL or newline. Without a security module, reading fails.
            label: text("proc/self/attr/current")
                .map(|label| label.trim_end_matches(['\0', '\n']).to_owned())
                .filter(|label| !label.is_empty()),
            wsl: wsl::is_named_in(&version),
            gvisor: version.contains(GVISOR_BUILD) || version.to_ascii_lowercase().contains("gvisor"),
            own_proc: fs::read_link(at("proc/self"))
                .ok()
                .map(|link| link == Path::new(&std::process::id().to_string())),
            confidential: confidential(root),
            pci_gpus: pci_gpus(&at("sys/bus/pci/devices")),
            module: module.as_deref().and_then(module_version),
            module_open: module.as_deref().map(|text| text.contains("Open Kernel Module")),
            mps: set("CUDA_MPS_PIPE_DIRECTORY")
                .or_else(|| at("tmp/nvidia-mps/control").exists().then(|| "/tmp/nvidia-mps".to_owned())),
            mig: visible_devices.as_deref().is_some_and(|value| value.starts_with("MIG-")) || partitioned(root),
            library: driver_library.map(Library::at),
            library_path: set("LD_LIBRARY_PATH"),
            nodes: nodes(root, "dev", |name| {
                let number = |rest: &str| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit());
                // `dxg` is the WSL device for the Windows driver.
                matches!(name, "nvidiactl" | "nvidia-uvm" | "dxg") || name.strip_prefix("nvidia").is_some_and(number)
            }),
            imex_channels: nodes(root, "dev/nvidia-caps-imex-channels", |_| true),
            open_files: limit(Resource::RLIMIT_NOFILE),
            locked_memory: limit(Resource::RLIMIT_MEMLOCK),
            shared_memory: Some(shared_memory(&at("dev/shm"))),
            ptrace_scope: number("proc/sys/kernel/yama/ptrace_scope"),
            uid: Some(getuid().as_raw()),
            euid: Some(geteuid().as_raw()),
            user_namespace: text("proc/self/uid_map").map(|map| !is_identity(&map)),
            overflow_uid: number("proc/sys/kernel/overflowuid"),
            seccomp: text("proc/self/status").and_then(|status| {
                status.lines().find_map(|line| line.strip_prefix("Seccomp:")).and_then(|mode| mode.trim().parse().ok())
            }),
            visible_devices,
        }
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

fn kernel() -> String {
    let Ok(name) = uname() else { return String::new() };
    [name.sysname(), name.release(), name.machine()].map(OsStr::to_string_lossy).join(" ")
}

/// The container software, recognised by files and variables, the most reliable first.
fn container(root: &Path, cgroup: &str, variable: &dyn Fn(&str) -> Option<OsString>) -> Option<String> {
    // Without a cgroup namespace, the path names the software that created the cgroup.
    let created_by = |segment: &str| {
        Some(match segment {
            _ if segment.starts_with("kubepods") => "kubernetes",
            _ if segment == "docker" || segment.starts_with("docker-") && segment.ends_with(".scope") => "docker",
            _ if segment.starts_with("libpod-") => "podman",
            _ if segment.starts_with("cri-containerd-") => "containerd",
            _ if segment == "lxc" || segment.starts_with("lxc.payload") => "lxc",
            _ => return None,
        })
    };
    let by_cgroup = || cgroup.lines().flat_map(|line| line.split(['/', ':'])).find_map(created_by);
    let found = if variable("KUBERNETES_SERVICE_HOST").is_some() {
        Some("kubernetes")
    } else if root.join("run/.containerenv").exists() {
        Some("podman")
    } else if root.join(".dockerenv").exists() {
        Some("docker")
    } else {
        by_cgroup()
    };
    // systemd-nspawn, LXC and podman set this variable for their first process; its children inherit it.
    found.map(str::to_owned).or_else(|| variable("container").map(|name| name.to_string_lossy().into_owned()))
}

/// These nodes exist only in a guest. They do not indicate whether the GPU is in confidential mode.
fn confidential(root: &Path) -> Option<String> {
    let kinds = [("dev/tdx_guest", "tdx"), ("dev/sev-guest", "sev-snp")];
    kinds.into_iter().find(|(node, _)| root.join(node).exists()).map(|(_, kind)| kind.to_owned())
}

/// The version in `NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159  Wed ...`: the first word in the form of a version.
fn module_version(text: &str) -> Option<String> {
    let is_version = |word: &&str| {
        word.contains('.') && word.split('.').all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
    };
    text.lines().next()?.split_whitespace().find(is_version).map(str::to_owned)
}

/// Whether a GPU has a MIG instance. `capabilities/mig` exists with every driver that supports MIG.
fn partitioned(root: &Path) -> bool {
    let gpus = entries(&root.join("proc/driver/nvidia/capabilities"), |name| name.starts_with("gpu"));
    gpus.iter().any(|gpu| !entries(&gpu.join("mig"), |name| name.starts_with("gi")).is_empty())
}

/// The addresses of the display controllers (class 3) of vendor NVIDIA. Its network cards and bridges are other classes.
fn pci_gpus(folder: &Path) -> Vec<String> {
    let starts = |file: PathBuf, with: &str| fs::read_to_string(file).is_ok_and(|text| text.starts_with(with));
    let is_gpu = |device: &PathBuf| starts(device.join("vendor"), "0x10de") && starts(device.join("class"), "0x03");
    let gpus = entries(folder, |_| true).into_iter().filter(is_gpu);
    gpus.filter_map(|device| device.file_name()?.to_str().map(str::to_owned)).collect()
}

/// The entries of a folder, sorted by length and name, so that numbers are in order.
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

/// Whether the effective user has this access. A container's device list applies too.
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

/// Whether a uid map is the identity: one range from 0 to 0 with all uids.
fn is_identity(map: &str) -> bool {
    map.split_whitespace().eq(["0", "0", "4294967295"])
}
