use std::{
    ffi::OsString,
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
};

use nix::unistd::geteuid;

use super::{lines::listed, *};

/// A machine that has these files.
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

#[test]
fn what_does_not_exist_is_absent() {
    let seen = read(&[]);
    assert!(seen.kernel.starts_with("Linux "));
    assert!(seen.open_files.is_some() && seen.uid.is_some());
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
}

#[test]
fn this_machine_is_read_and_read_back_from_json() {
    let seen = Environment::read(None);
    let again: Environment = serde_json::from_str(&serde_json::to_string(&seen).unwrap()).unwrap();
    assert_eq!(again, seen);
    assert!(seen.lines().iter().any(|(label, text)| *label == "kernel" && *text == seen.kernel));
}

#[test]
fn what_a_report_leaves_out_is_absent() {
    assert_eq!(serde_json::from_str::<Environment>("{}").unwrap(), Environment::default());
}

#[test]
fn containers_are_recognised_by_their_traces() {
    let cgroup = |text| read(&[("proc/self/cgroup", text)]).container;
    assert_eq!(cgroup("0::/\n"), None);
    assert_eq!(cgroup("0::/system.slice/docker.service\n"), None);
    assert_eq!(cgroup("0::/user.slice/user-1000.slice/docker-desktop\n"), None);
    assert_eq!(cgroup("12:pids:/docker/0123abcd\n").as_deref(), Some("docker"));
    assert_eq!(cgroup("0::/system.slice/docker-0123abcd.scope\n").as_deref(), Some("docker"));
    assert_eq!(cgroup("0::/machine.slice/libpod-0123.scope/container\n").as_deref(), Some("podman"));
    assert_eq!(cgroup("0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-0.scope\n").unwrap(), "kubernetes");
    assert_eq!(cgroup("0::/system.slice/cri-containerd-0.scope\n").as_deref(), Some("containerd"));
    assert_eq!(cgroup("0::/lxc.payload.box/init.scope\n").as_deref(), Some("lxc"));
    assert_eq!(read(&[(".dockerenv", "")]).container.as_deref(), Some("docker"));
    assert_eq!(read(&[("run/.containerenv", "")]).container.as_deref(), Some("podman"));
    let pod = read_with(&[(".dockerenv", "")], &[("KUBERNETES_SERVICE_HOST", "10.0.0.1")]);
    assert_eq!(pod.container.as_deref(), Some("kubernetes"));
    assert_eq!(read_with(&[], &[("container", "systemd-nspawn")]).container.as_deref(), Some("systemd-nspawn"));
}

#[test]
fn wsl_and_gvisor_are_recognised() {
    let version = |text| {
        let seen = read(&[("proc/version", text)]);
        (seen.wsl, seen.gvisor)
    };
    assert_eq!(version("Linux version 5.15.153.1-microsoft-standard-WSL2 (root@1) #1 SMP"), (true, false));
    assert_eq!(version("Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016"), (false, true));
    assert_eq!(version("Linux version 4.19.0-gvisor #1 SMP Mon Jan 1 00:00:00 UTC 2026"), (false, true));
    assert_eq!(version("Linux version 4.4.0 (builder@host) #1 SMP Mon Feb 1 2016"), (false, false));
    assert_eq!(version("Linux version 6.18.0 (builder@host) #1 SMP"), (false, false));
}

#[test]
fn a_confidential_guest_is_recognised_by_its_node() {
    assert_eq!(read(&[("dev/tdx_guest", "")]).confidential.as_deref(), Some("tdx"));
    assert_eq!(read(&[("dev/sev-guest", "")]).confidential.as_deref(), Some("sev-snp"));
    assert_eq!(read(&[("dev/sev", "")]).confidential, None);
}

#[test]
fn the_module_is_named_with_its_kind() {
    let module = |text| {
        let seen = read(&[("proc/driver/nvidia/version", text)]);
        (seen.module, seen.module_open)
    };
    let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.154.05  Thu Dec 28 15:37:48 UTC 2023\nGCC 12.2.0";
    assert_eq!(module(closed), (Some("535.154.05".to_owned()), Some(false)));
    let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159  Release Build  (root@1)\n";
    assert_eq!(module(open), (Some("580.159".to_owned()), Some(true)));
    assert_eq!(module("..\n1.0"), (None, Some(false)));
}

#[test]
fn mps_is_recognised_by_its_variable_or_its_pipe() {
    assert_eq!(read_with(&[], &[("CUDA_MPS_PIPE_DIRECTORY", "/run/mps")]).mps.as_deref(), Some("/run/mps"));
    assert_eq!(read(&[("tmp/nvidia-mps/control", "")]).mps.as_deref(), Some("/tmp/nvidia-mps"));
    assert_eq!(read(&[("tmp/nvidia-mps/log", "")]).mps, None);
}

#[test]
fn mig_is_recognised_by_an_instance_and_not_by_the_driver() {
    assert!(read(&[("proc/driver/nvidia/capabilities/gpu0/mig/gi1/access", "")]).mig);
    assert!(read_with(&[], &[("CUDA_VISIBLE_DEVICES", "MIG-0123")]).mig);
    assert!(!read(&[("proc/driver/nvidia/capabilities/mig/config", "")]).mig);
    assert!(!read(&[("proc/driver/nvidia/capabilities/gpu0/mig/config", "")]).mig);
    assert!(!read_with(&[], &[("CUDA_VISIBLE_DEVICES", "0,1")]).mig);
}

#[test]
fn a_variable_that_is_empty_is_set() {
    let seen = read_with(&[], &[("CUDA_VISIBLE_DEVICES", ""), ("LD_LIBRARY_PATH", "/opt/lib")]);
    assert_eq!(seen.visible_devices.as_deref(), Some(""));
    assert_eq!(seen.library_path.as_deref(), Some("/opt/lib"));
    let lines = seen.lines();
    assert!(lines.contains(&("CUDA_VISIBLE_DEVICES", "set and empty: no device".to_owned())), "{lines:?}");
}

#[test]
fn a_library_is_resolved_to_its_file_and_a_stub_recognised() {
    let root = machine(&[("lib/libcuda.so.580.159", ""), ("cuda/stubs/libcuda.so", ""), ("lib/mystubs", "")]);
    let link = root.path().join("lib/libcuda.so.1");
    symlink("libcuda.so.580.159", &link).unwrap();
    let library = Environment::read(Some(&link)).library.unwrap();
    let file = fs::canonicalize(root.path()).unwrap().join("lib/libcuda.so.580.159");
    assert_eq!(library.file, Some(file.display().to_string()));
    assert!(!library.stub);
    let to_stub = root.path().join("lib/libcuda.so");
    symlink("../cuda/stubs/libcuda.so", &to_stub).unwrap();
    assert!(Environment::read(Some(&to_stub)).library.unwrap().stub);
    assert!(!Environment::read(Some(&root.path().join("lib/mystubs"))).library.unwrap().stub);
    let gone = Environment::read(Some(Path::new("/nonexistent/stubs/libcuda.so.1"))).library.unwrap();
    assert_eq!((gone.file, gone.stub), (None, true));
}

#[test]
fn nodes_are_listed_with_their_rights() {
    let files = ["nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "nvidia-modeset", "nvidiaX", "nvidia"];
    let files: Vec<String> = files.iter().map(|name| format!("dev/{name}")).collect();
    let mut files: Vec<(&str, &str)> = files.iter().map(|path| (path.as_str(), "")).collect();
    files.extend([("dev/nvidia-caps-imex-channels/channel0", ""), ("dev/nvidia-caps/nvidia-cap1", "")]);
    let root = machine(&files);
    let locked = root.path().join("dev/nvidia2");
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o440)).unwrap();
    let seen = Environment::read_under(root.path(), &|_| None, None);
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
fn a_node_that_is_denied_is_listed_with_its_owner() {
    let node = Node { path: "/dev/nvidia0".to_owned(), mode: "0660".to_owned(), uid: 0, gid: 44, usable: false };
    assert_eq!(listed(&[node]), "/dev/nvidia0 (mode 0660 of 0:44, NOT OPEN TO THIS PROCESS)");
}

#[test]
fn shared_memory_has_a_size_and_free_space() {
    // Not empty, for then all would be free.
    let seen = read(&[("dev/shm/file", &"x".repeat(1 << 16))]).shared_memory.unwrap();
    assert!(seen.exists && seen.writable && seen.size > seen.free && seen.free > Some(0), "{seen:?}");
}

#[test]
fn limits_without_a_bound_have_no_number() {
    assert_eq!(Limit { soft: Some(1024), hard: None }.to_string(), "1024, can be raised to unlimited");
    assert_eq!(Limit { soft: Some(64), hard: Some(64) }.to_string(), "64");
}

#[test]
fn a_user_namespace_is_recognised_by_its_map() {
    let user = |map| read(&[("proc/self/uid_map", map)]).user_namespace;
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
    let want = "uid 0, in a user namespace where other users show as 65534".to_owned();
    assert!(lines.contains(&("user", want)), "{lines:?}");
}

#[test]
fn what_a_container_gives_a_process_is_read() {
    let files = [("proc/self/attr/current", "system_u:system_r:container_t:s0:c1,c2\0")];
    let root = machine(&files);
    for (kind, target) in [("pid", "pid:[4026531836]"), ("ipc", "ipc:[4026532198]")] {
        let link = root.path().join("proc/self/ns").join(kind);
        fs::create_dir_all(link.parent().unwrap()).unwrap();
        symlink(target, link).unwrap();
    }
    let variable = |name: &str| (name == "NVIDIA_DRIVER_CAPABILITIES").then(|| OsString::from("utility"));
    let seen = Environment::read_under(root.path(), &variable, None);
    assert_eq!(seen.label.as_deref(), Some("system_u:system_r:container_t:s0:c1,c2"));
    assert_eq!((seen.pid_namespace, seen.ipc_namespace), (Some(4_026_531_836), Some(4_026_532_198)));
    let lines = seen.lines();
    assert!(lines.contains(&("NVIDIA_DRIVER_CAPABILITIES", "utility".to_owned())), "{lines:?}");
    assert!(lines.contains(&("label", "system_u:system_r:container_t:s0:c1,c2".to_owned())), "{lines:?}");
    assert_eq!(read(&[("proc/self/attr/current", "\n")]).label, None);
    let unconfined = read(&[("proc/self/attr/current", "unconfined\n")]);
    assert!(unconfined.label.is_some() && !unconfined.lines().iter().any(|(label, _)| *label == "label"));
}

#[test]
fn a_c_library_that_is_not_the_drivers_is_named() {
    let lines = |c_library| Environment { c_library: Some(c_library), ..Environment::default() }.lines();
    let named = |c_library| lines(c_library).iter().any(|(label, _)| *label == "C library");
    assert!(named(CLibrary::Musl) && named(CLibrary::Other) && !named(CLibrary::Glibc));
    let of_another: Environment = serde_json::from_str(r#"{ "c_library": "bionic" }"#).unwrap();
    assert_eq!(of_another.c_library, Some(CLibrary::Other));
}

#[test]
fn small_numbers_of_the_kernel_are_read() {
    let seen = read(&[
        ("proc/sys/kernel/yama/ptrace_scope", "1\n"),
        ("proc/sys/kernel/overflowuid", "65534\n"),
        ("proc/self/status", "Name:\tx\nSeccomp:\t2\nSeccomp_filters:\t1\n"),
    ]);
    assert_eq!((seen.ptrace_scope, seen.overflow_uid, seen.seccomp), (Some(1), Some(65534), Some(2)));
    assert_eq!(read(&[("proc/sys/kernel/yama/ptrace_scope", "many")]).ptrace_scope, None);
}
