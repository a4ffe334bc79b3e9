use std::{
    ffi::OsString,
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
};

use nix::unistd::geteuid;
use serde_json::{Value, json};

use super::{lines::listed, *};

/// A root folder with these files.
fn machine(files: Settings<'_>) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    root
}

/// Reads files and environment variables: the capitalised names.
fn read(settings: Settings<'_>) -> Environment {
    let is_variable = |(name, _): &(&str, &str)| !name.contains(['/', '.']);
    let (variables, files): (Vec<_>, Vec<_>) = settings.iter().copied().partition(is_variable);
    let variable =
        |wanted: &str| variables.iter().find(|(name, _)| *name == wanted).map(|(_, value)| OsString::from(value));
    Environment::read_under(machine(&files).path(), &variable, None)
}

#[test]
fn missing_files_leave_values_absent() {
    let seen = read(&[]);
    assert!(seen.kernel.starts_with("Linux ") && seen.open_files.is_some() && seen.uid.is_some());
    let nothing = Environment {
        kernel: seen.kernel.clone(),
        c_library: Some(CLibrary::OWN),
        open_files: seen.open_files,
        locked_memory: seen.locked_memory,
        uid: seen.uid,
        euid: seen.euid,
        shared_memory: Some(SharedMemory { exists: false, writable: false, size: None, free: None }),
        ..Environment::default()
    };
    assert_eq!(seen, nothing);
    let seen = Environment::read(None);
    let again: Environment = serde_json::from_str(&serde_json::to_string(&seen).unwrap()).unwrap();
    assert_eq!(again, seen);
    assert_eq!(serde_json::from_str::<Environment>("{}").unwrap(), Environment::default());
}

const WSL: &str = "Linux version 5.15.153.1-microsoft-standard-WSL2 (root@1) #1 SMP";
const CLOSED: &str =
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.154.05  Thu Dec 28 15:37:48 UTC 2023\nGCC 12.2.0";
const OPEN: &str = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159  Release Build  (root@1)\n";

/// Files and environment variables with their texts.
type Settings<'a> = &'a [(&'a str, &'a str)];

/// Settings, a field of the environment, and its value.
#[rustfmt::skip]
const READ: &[(Settings<'_>, &str, &str)] = &[
    (&[("proc/self/cgroup", "0::/\n")], "container", "null"),
    (&[("proc/self/cgroup", "0::/system.slice/docker.service\n")], "container", "null"),
    (&[("proc/self/cgroup", "0::/user.slice/user-1000.slice/docker-desktop\n")], "container", "null"),
    (&[("proc/self/cgroup", "12:pids:/docker/0123abcd\n")], "container", "docker"),
    (&[("proc/self/cgroup", "0::/system.slice/docker-0123abcd.scope\n")], "container", "docker"),
    (&[("proc/self/cgroup", "0::/machine.slice/libpod-0123.scope/container\n")], "container", "podman"),
    (&[("proc/self/cgroup", "0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-0.scope\n")], "container", "kubernetes"),
    (&[("proc/self/cgroup", "0::/system.slice/cri-containerd-0.scope\n")], "container", "containerd"),
    (&[("proc/self/cgroup", "0::/lxc.payload.box/init.scope\n")], "container", "lxc"),
    (&[(".dockerenv", "")], "container", "docker"),
    (&[("run/.containerenv", "")], "container", "podman"),
    (&[(".dockerenv", ""), ("KUBERNETES_SERVICE_HOST", "10.0.0.1")], "container", "kubernetes"),
    (&[("container", "systemd-nspawn")], "container", "systemd-nspawn"),
    (&[("proc/version", WSL)], "wsl", "true"),
    (&[("proc/version", WSL)], "gvisor", "false"),
    (&[("proc/version", "Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016")], "gvisor", "true"),
    (&[("proc/version", "Linux version 4.19.0-gvisor #1 SMP Mon Jan 1 00:00:00 UTC 2026")], "gvisor", "true"),
    (&[("proc/version", "Linux version 6.18.0 (builder@host) #1 SMP")], "wsl", "false"),
    (&[("dev/tdx_guest", "")], "confidential", "tdx"),
    (&[("dev/sev-guest", "")], "confidential", "sev-snp"),
    (&[("dev/sev", "")], "confidential", "null"),
    (&[("proc/driver/nvidia/version", CLOSED)], "module", "535.154.05"),
    (&[("proc/driver/nvidia/version", CLOSED)], "module_open", "false"),
    (&[("proc/driver/nvidia/version", OPEN)], "module", "580.159"),
    (&[("proc/driver/nvidia/version", OPEN)], "module_open", "true"),
    (&[("proc/driver/nvidia/version", "..\n1.0")], "module", "null"),
    (&[("proc/driver/nvidia/capabilities/gpu0/mig/gi1/access", "")], "mig", "true"),
    (&[("CUDA_VISIBLE_DEVICES", "MIG-0123")], "mig", "true"),
    (&[("proc/driver/nvidia/capabilities/mig/config", "")], "mig", "false"),
    (&[("proc/driver/nvidia/capabilities/gpu0/mig/config", "")], "mig", "false"),
    (&[("CUDA_VISIBLE_DEVICES", "0,1")], "mig", "false"),
    (&[("CUDA_MPS_PIPE_DIRECTORY", "/run/mps")], "mps", "/run/mps"),
    (&[("tmp/nvidia-mps/control", "")], "mps", "/tmp/nvidia-mps"),
    (&[("tmp/nvidia-mps/log", "")], "mps", "null"),
    (&[("proc/self/uid_map", "         0          0 4294967295\n")], "user_namespace", "false"),
    (&[("proc/self/uid_map", "         0       1000          1\n")], "user_namespace", "true"),
    (&[("proc/self/uid_map", "0 0 65536\n1000000 1000000 65536\n")], "user_namespace", "true"),
    (&[("proc/sys/kernel/yama/ptrace_scope", "1\n")], "ptrace_scope", "1"),
    (&[("proc/sys/kernel/yama/ptrace_scope", "many")], "ptrace_scope", "null"),
    (&[("proc/sys/kernel/overflowuid", "65534\n")], "overflow_uid", "65534"),
    (&[("proc/self/status", "Name:\tx\nSeccomp:\t2\nSeccomp_filters:\t1\n")], "seccomp", "2"),
    (&[("proc/self/attr/current", "\n")], "label", "null"),
    (&[("proc/self/attr/current", "unconfined\n")], "label", "unconfined"),
    (&[("proc/self/attr/current", "u:r:container_t:s0:c1,c2\0")], "label", "u:r:container_t:s0:c1,c2"),
];

#[test]
fn files_and_variables_are_read() {
    for (settings, field, want) in READ {
        let seen = serde_json::to_value(read(settings)).unwrap();
        let text = match &seen[field] {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        assert_eq!(&text, want, "{field}: {settings:?}");
    }
}

#[test]
fn environment_as_lines() {
    for (fields, label, text) in [
        (json!({ "driver_capabilities": "utility" }), "NVIDIA_DRIVER_CAPABILITIES", "utility"),
        (json!({ "label": "u:r:unconfined:s0" }), "label", "u:r:unconfined:s0"),
        (json!({ "label": "unconfined" }), "label", ""),
        (json!({ "visible_devices": "" }), "CUDA_VISIBLE_DEVICES", "set and empty: no device"),
        (json!({ "c_library": "musl" }), "C library", "musl, and NVIDIA's driver is built for glibc"),
        (json!({ "c_library": "bionic" }), "C library", "neither glibc nor musl"),
        (json!({ "c_library": "glibc" }), "C library", ""),
        (json!({ "open_files": { "soft": 1024, "hard": null } }), "open files", "1024, can be raised to unlimited"),
        (json!({ "open_files": { "soft": 64, "hard": 64 } }), "open files", "64"),
        (json!({ "uid": 1, "euid": 2 }), "user", "uid 1, effective 2"),
        (
            json!({ "uid": 0, "euid": 0, "user_namespace": true, "overflow_uid": 65534 }),
            "user",
            "uid 0, in a user namespace where other users show as 65534",
        ),
    ] {
        let environment: Environment = serde_json::from_value(fields).unwrap();
        let shown = environment.lines().into_iter().find(|(name, _)| *name == label);
        assert_eq!(shown.map_or_else(String::new, |(_, text)| text), text, "{label}");
    }
}

#[test]
fn gpus_are_found_on_the_bus() {
    let device = |address: &str, vendor: &str, class: &str| {
        [("vendor", vendor), ("class", class)]
            .map(|(name, text)| (format!("sys/bus/pci/devices/{address}/{name}"), format!("{text}\n")))
    };
    let files = [
        device("0000:1b:00.0", "0x10de", "0x030200"),
        device("0000:01:00.0", "0x10de", "0x030000"),
        device("0000:01:00.1", "0x10de", "0x040300"),
        device("0000:02:00.0", "0x8086", "0x030000"),
    ];
    let files: Vec<(&str, &str)> = files.iter().flatten().map(|(path, text)| (&**path, &**text)).collect();
    assert_eq!(read(&files).pci_gpus, ["0000:01:00.0", "0000:1b:00.0"]);
}

#[test]
fn library_links_and_stubs() {
    let root = machine(&[("lib/libcuda.so.580.159", ""), ("cuda/stubs/libcuda.so", ""), ("lib/mystubs", "")]);
    let library = |path: &Path| Environment::read(Some(path)).library.unwrap();
    let link = root.path().join("lib/libcuda.so.1");
    symlink("libcuda.so.580.159", &link).unwrap();
    let file = fs::canonicalize(root.path()).unwrap().join("lib/libcuda.so.580.159");
    assert_eq!((library(&link).file, library(&link).stub), (Some(file.display().to_string()), false));
    let to_stub = root.path().join("lib/libcuda.so");
    symlink("../cuda/stubs/libcuda.so", &to_stub).unwrap();
    assert!(library(&to_stub).stub && !library(&root.path().join("lib/mystubs")).stub);
    let gone = library(Path::new("/nonexistent/stubs/libcuda.so.1"));
    assert_eq!((gone.file, gone.stub), (None, true));
}

#[test]
fn nodes_have_permissions() {
    #[rustfmt::skip]
    let root = machine(&[
        "dev/nvidia10", "dev/nvidia2", "dev/nvidiactl", "dev/nvidia-uvm", "dev/nvidia-modeset", "dev/nvidiaX", "dev/nvidia",
        "dev/nvidia-caps-imex-channels/channel0", "dev/nvidia-caps/nvidia-cap1",
    ].map(|path| (path, "")));
    fs::set_permissions(root.path().join("dev/nvidia2"), fs::Permissions::from_mode(0o440)).unwrap();
    let seen = Environment::read_under(root.path(), &|_| None, None);
    let paths: Vec<&str> = seen.nodes.iter().chain(&seen.imex_channels).map(|node| node.path.as_str()).collect();
    let channel = "/dev/nvidia-caps-imex-channels/channel0";
    assert_eq!(paths, ["/dev/nvidia2", "/dev/nvidia10", "/dev/nvidiactl", "/dev/nvidia-uvm", channel]);
    assert_eq!((seen.nodes[0].mode.as_str(), Some(seen.nodes[0].uid)), ("0440", seen.euid));
    // Root ignores the mode.
    assert_eq!((seen.nodes[0].usable, seen.nodes[1].usable), (geteuid().is_root(), true));
    let node = Node { path: "/dev/nvidia0".to_owned(), mode: "0660".to_owned(), uid: 0, gid: 44, usable: false };
    assert_eq!(listed(&[node]), "/dev/nvidia0 (mode 0660 of 0:44, NOT OPEN TO THIS PROCESS)");
}

#[test]
fn shared_memory_has_its_size() {
    // A non-empty folder, so that `free` differs from `size`.
    let root = machine(&[("dev/shm/file", &"x".repeat(1 << 16))]);
    let seen = Environment::read_under(root.path(), &|_| None, None).shared_memory.unwrap();
    assert!(seen.exists && seen.writable && seen.size > seen.free && seen.free > Some(0), "{seen:?}");
}
