use std::{
    ffi::OsString,
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
};

use nix::unistd::geteuid;

use super::{lines::listed, *};

/// A root folder with these files.
fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    root
}

fn read_with(files: &[(&str, &str)], variables: &[(&str, &str)]) -> Environment {
    let variable =
        |wanted: &str| variables.iter().find(|(name, _)| *name == wanted).map(|(_, value)| OsString::from(value));
    Environment::read_under(machine(files).path(), &variable, None)
}

fn read(files: &[(&str, &str)]) -> Environment {
    read_with(files, &[])
}

fn has_line(environment: &Environment, label: &'static str, text: &str) -> bool {
    environment.lines().contains(&(label, text.to_owned()))
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
        egid: seen.egid,
        shared_memory: Some(SharedMemory { exists: false, writable: false, size: None, free: None }),
        ..Environment::default()
    };
    assert_eq!(seen, nothing);
    let seen = Environment::read(None);
    let again: Environment = serde_json::from_str(&serde_json::to_string(&seen).unwrap()).unwrap();
    assert_eq!(again, seen);
    assert_eq!(serde_json::from_str::<Environment>("{}").unwrap(), Environment::default());
}

#[test]
fn containers_and_kernels_are_recognised() {
    for (cgroup, container) in [
        ("0::/\n", None),
        ("0::/system.slice/docker.service\n", None),
        ("0::/user.slice/user-1000.slice/docker-desktop\n", None),
        ("12:pids:/docker/0123abcd\n", Some("docker")),
        ("0::/system.slice/docker-0123abcd.scope\n", Some("docker")),
        ("0::/machine.slice/libpod-0123.scope/container\n", Some("podman")),
        ("0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-0.scope\n", Some("kubernetes")),
        ("0::/system.slice/cri-containerd-0.scope\n", Some("containerd")),
        ("0::/lxc.payload.box/init.scope\n", Some("lxc")),
    ] {
        assert_eq!(read(&[("proc/self/cgroup", cgroup)]).container.as_deref(), container, "{cgroup}");
    }
    for (file, variable, container) in [
        (".dockerenv", ("", ""), "docker"),
        ("run/.containerenv", ("", ""), "podman"),
        (".dockerenv", ("KUBERNETES_SERVICE_HOST", "10.0.0.1"), "kubernetes"),
        ("other", ("container", "systemd-nspawn"), "systemd-nspawn"),
    ] {
        assert_eq!(read_with(&[(file, "")], &[variable]).container.as_deref(), Some(container));
    }
    for (version, wsl, gvisor) in [
        ("Linux version 5.15.153.1-microsoft-standard-WSL2 (root@1) #1 SMP", true, false),
        ("Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016", false, true),
        ("Linux version 4.19.0-gvisor #1 SMP Mon Jan 1 00:00:00 UTC 2026", false, true),
        ("Linux version 6.18.0 (builder@host) #1 SMP", false, false),
    ] {
        let seen = read(&[("proc/version", version)]);
        assert_eq!((seen.wsl, seen.gvisor), (wsl, gvisor), "{version}");
    }
    for (node, kind) in [("dev/tdx_guest", Some("tdx")), ("dev/sev-guest", Some("sev-snp")), ("dev/sev", None)] {
        assert_eq!(read(&[(node, "")]).confidential.as_deref(), kind, "{node}");
    }
}

#[test]
fn files_of_the_driver_are_parsed() {
    let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.154.05  Thu Dec 28 15:37:48 UTC 2023\nGCC 12.2.0";
    let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159  Release Build  (root@1)\n";
    for (text, version, is_open) in
        [(closed, Some("535.154.05"), false), (open, Some("580.159"), true), ("..\n1.0", None, false)]
    {
        let seen = read(&[("proc/driver/nvidia/version", text)]);
        assert_eq!((seen.module.as_deref(), seen.module_open), (version, Some(is_open)));
    }
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
    assert!(has_line(&read(&files), "PCI GPUs", "0000:01:00.0 0000:1b:00.0"));
    for (file, devices, mig) in [
        ("proc/driver/nvidia/capabilities/gpu0/mig/gi1/access", "", true),
        ("other", "MIG-0123", true),
        ("proc/driver/nvidia/capabilities/mig/config", "", false),
        ("proc/driver/nvidia/capabilities/gpu0/mig/config", "", false),
        ("other", "0,1", false),
    ] {
        assert_eq!(read_with(&[(file, "")], &[("CUDA_VISIBLE_DEVICES", devices)]).mig, mig, "{file} {devices}");
    }
    assert_eq!(read_with(&[], &[("CUDA_MPS_PIPE_DIRECTORY", "/run/mps")]).mps.as_deref(), Some("/run/mps"));
    assert_eq!(read(&[("tmp/nvidia-mps/control", "")]).mps.as_deref(), Some("/tmp/nvidia-mps"));
    assert_eq!(read(&[("tmp/nvidia-mps/log", "")]).mps, None);
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
fn limits_of_the_process() {
    assert_eq!(Limit { soft: Some(1024), hard: None }.to_string(), "1024, can be raised to unlimited");
    assert_eq!(Limit { soft: Some(64), hard: Some(64) }.to_string(), "64");
    // A non-empty folder, so that `free` differs from `size`.
    let seen = read(&[("dev/shm/file", &"x".repeat(1 << 16))]).shared_memory.unwrap();
    assert!(seen.exists && seen.writable && seen.size > seen.free && seen.free > Some(0), "{seen:?}");
    for (map, namespace) in [
        ("         0          0 4294967295\n", false),
        ("         0       1000          1\n", true),
        ("0 0 65536\n1000000 1000000 65536\n", true),
    ] {
        assert_eq!(read(&[("proc/self/uid_map", map)]).user_namespace, Some(namespace), "{map}");
    }
    let seen = read(&[
        ("proc/sys/kernel/yama/ptrace_scope", "1\n"),
        ("proc/sys/kernel/overflowuid", "65534\n"),
        ("proc/self/status", "Name:\tx\nSeccomp:\t2\nSeccomp_filters:\t1\n"),
    ]);
    assert_eq!((seen.ptrace_scope, seen.overflow_uid, seen.seccomp), (Some(1), Some(65534), Some(2)));
    assert_eq!(read(&[("proc/sys/kernel/yama/ptrace_scope", "many")]).ptrace_scope, None);
    let seen = Environment { user_namespace: Some(true), uid: Some(0), euid: Some(0), ..seen };
    assert!(has_line(&seen, "user", "uid 0, in a user namespace where other users show as 65534"));
}

#[test]
fn labels_namespaces_and_variables() {
    const LABEL: &str = "system_u:system_r:container_t:s0:c1,c2";
    let root = machine(&[("proc/self/attr/current", &format!("{LABEL}\0"))]);
    let folder = root.path().join("proc/self/ns");
    fs::create_dir(&folder).unwrap();
    symlink("pid:[4026531836]", folder.join("pid")).unwrap();
    symlink("ipc:[4026532198]", folder.join("ipc")).unwrap();
    let variable = |name: &str| match name {
        "NVIDIA_DRIVER_CAPABILITIES" => Some(OsString::from("utility")),
        "CUDA_VISIBLE_DEVICES" => Some(OsString::new()),
        _ => None,
    };
    let seen = Environment::read_under(root.path(), &variable, None);
    assert_eq!((seen.pid_namespace, seen.ipc_namespace), (Some(4_026_531_836), Some(4_026_532_198)));
    assert!(has_line(&seen, "NVIDIA_DRIVER_CAPABILITIES", "utility") && has_line(&seen, "label", LABEL));
    assert!(has_line(&seen, "CUDA_VISIBLE_DEVICES", "set and empty: no device"));
    assert_eq!(read(&[("proc/self/attr/current", "\n")]).label, None);
    let unconfined = read(&[("proc/self/attr/current", "unconfined\n")]);
    assert!(unconfined.label.is_some() && !unconfined.lines().iter().any(|(label, _)| *label == "label"));
    for (name, c_library, shown) in
        [("musl", CLibrary::Musl, true), ("bionic", CLibrary::Other, true), ("glibc", CLibrary::Glibc, false)]
    {
        let seen: Environment = serde_json::from_value(serde_json::json!({ "c_library": name })).unwrap();
        assert_eq!(seen.c_library, Some(c_library));
        assert_eq!(seen.lines().iter().any(|(label, _)| *label == "C library"), shown, "{name}");
    }
}
