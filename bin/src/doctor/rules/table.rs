//! The table of the rules. It exceeds 500 lines because it is one table: each entry is a rule's code, condition and sentence.

use vmmfd::error::code;

use super::{
    Rule,
    predicates::{
        SHARING, VMM, categories, cu_init_unknown, device_hidden, error_code, error_kind, fabric_denied, has_error,
        has_problem, has_reason, is_call, is_gpu, is_killed, is_of, no_device, no_gpu, no_library, other_categories,
        unsupported,
    },
};
use crate::doctor::{
    Status,
    environment::{CLibrary, SharedMemory},
    error_details::Reason,
    probes::problem,
};

/// All rules, the most specific first.
pub const RULES: &[Rule] = &[
    Rule {
        name: "no-gpu-visible",
        symptom: "`no CUDA driver library loads` or `the CUDA driver finds no device`, without a PCI device, a kernel module \
                  or a device node of NVIDIA",
        cause: "No NVIDIA GPU is visible, because this machine has none, or because this container or virtual machine was \
                started without it.",
        remedy: "If the machine has a GPU, start the container with it: `--gpus all` for Docker, a limit of nvidia.com/gpu \
                 for Kubernetes, `--device nvidia.com/gpu=all` for podman; if not, try every command on host memory with \
                 `--backend host` or VMMFD_BACKEND=host, as `make demo` does in the source tree.",
        matches: |finding, environment, _| {
            (has_reason(finding, Reason::LibraryMissing) || no_device(finding)) && no_gpu(environment)
        },
    },
    // Containers, and programs built for another C library.
    Rule {
        name: "musl",
        symptom: "`no CUDA driver library loads`, of a program that was built for musl",
        cause: "NVIDIA's driver library requires glibc, but this program was built for musl: static programs can't \
                load libraries (`Dynamic loading not supported`), and dynamic ones can't load a glibc library.",
        remedy: "Build for a target that ends in -gnu, such as x86_64-unknown-linux-gnu, and use an image with glibc 2.28 or \
                 newer: Debian, Ubuntu or UBI rather than Alpine.",
        matches: |finding, environment, _| no_library(finding) && environment.c_library == Some(CLibrary::Musl),
    },
    Rule {
        name: "capability-missing",
        symptom: "`no CUDA driver library loads`, with `NVIDIA_DRIVER_CAPABILITIES` set and without compute",
        cause: "The container runtime adds the libraries that NVIDIA_DRIVER_CAPABILITIES selects; libcuda.so.1 belongs \
                to compute, which is not in the list.",
        remedy: "Set NVIDIA_DRIVER_CAPABILITIES=compute in the image or for the container, or unset it.",
        matches: |finding, environment, _| {
            let gives_compute = |list: &str| {
                list.split(',').map(str::trim).any(|capability| matches!(capability, "all" | "compute" | ""))
            };
            let named = environment.driver_capabilities.as_deref();
            no_library(finding) && named.is_some_and(|list| !gives_compute(list))
        },
    },
    Rule {
        name: "selinux-categories",
        symptom: "`does not let this user connect`, although the modes permit it, or `descriptors were cut off`, \
                  between processes of different SELinux categories",
        cause: "SELinux, which usually gives each container its own categories, does not let this process connect to a \
                socket, or receive a descriptor, of a process with another label.",
        remedy: "Give both containers the same label: one pod in Kubernetes, or the same \
                 seLinuxOptions.level; --security-opt label=level:s0:c100,c200 for Docker and Podman.",
        matches: |finding, environment, peer| {
            let own = categories(environment);
            let permitted = finding.figures.get("permitted").is_some_and(|permitted| permitted == true);
            let denied = permitted && has_reason(finding, Reason::ConnectDenied) && own.is_some();
            let cut_off = has_reason(finding, Reason::DescriptorsLost);
            denied || cut_off && peer.is_some_and(|peer| other_categories(environment, peer))
        },
    },
    Rule {
        name: "legacy-namespaces",
        symptom: "`legacy` fails between different PID or IPC namespaces",
        cause: "The processes are in different namespaces, and the driver identifies the owner of a legacy handle by its \
                pid: two processes that are both pid 1 may look like one process to it.",
        remedy: "Share by file descriptor, which works across namespaces: --mechanism vmm, the default.",
        matches: |finding, environment, peer| {
            let apart = peer.is_some_and(|peer| {
                let differ =
                    |own: Option<u64>, theirs: Option<u64>| own.zip(theirs).is_some_and(|(own, theirs)| own != theirs);
                differ(environment.pid_namespace, peer.pid_namespace)
                    || differ(environment.ipc_namespace, peer.ipc_namespace)
            });
            is_of(finding, &["legacy"]) && has_error(finding) && apart
        },
    },
    // The broker's socket.
    Rule {
        name: "broker-folder",
        symptom: "`broker` fails: the folder of its socket is unsafe or unusable",
        cause: "Clients require a folder that belongs to this user, is not a link, and is not writable for other \
                users: otherwise another user could listen there in the broker's place.",
        remedy: "Remove whatever is at the folder's path, or set its mode to 0700, and start `vmmfd serve` again.",
        matches: |finding, _, _| has_problem(finding, problem::FOLDER),
    },
    Rule {
        name: "broker-stale",
        symptom: "`broker` fails: no process listens on its socket",
        cause: "The socket's file exists without a listener: a broker that was killed, or a restart of the machine, \
                leaves it.",
        remedy: "Start `vmmfd serve`, which replaces the socket, or remove the file if no broker is needed.",
        matches: |finding, _, _| has_problem(finding, problem::STALE),
    },
    Rule {
        name: "broker-silent",
        symptom: "`broker` fails: the process that listens on its socket does not answer",
        cause: "The broker is stopped (SIGSTOP, a debugger, a frozen control group), hangs, or gets no CPU.",
        remedy: "Find it with `ss -xlp` and check its state with `ps`; send SIGCONT if it is stopped, otherwise end it \
                 and start `vmmfd serve` again: memory that clients have mapped stays valid.",
        matches: |finding, _, _| {
            has_problem(finding, problem::SILENT)
                || is_of(finding, &["broker"]) && error_kind(finding) == Some("timeout")
        },
    },
    Rule {
        name: "broker-denied",
        symptom: "`broker` fails: this user may not connect to its socket",
        cause: "The socket's mode does not let this user connect, or a security module forbids it.",
        remedy: "Run the broker and its clients as the same user, or start the broker with --allow-uid for this user; \
                 with SELinux, give both containers the same label.",
        matches: |finding, _, _| has_problem(finding, problem::DENIED),
    },
    Rule {
        name: "broker-refused",
        symptom: "`broker` fails: the broker refuses this connection",
        cause: "The broker's access rules or limits exclude this connection: see its answer.",
        remedy: "Depending on the answer, start the broker with --allow-uid for this user or with a larger --quota, or \
                 stop clients that are not needed.",
        matches: |finding, _, _| has_problem(finding, problem::REFUSED),
    },
    Rule {
        name: "broker-other-program",
        symptom: "`broker` fails: its socket belongs to another program or user",
        cause: "Another program, or another file, occupies the path of the broker's socket.",
        remedy: "Find the process with `ss -xlp`, end it or remove the file, and start `vmmfd serve`; or use another \
                 path for the broker and its clients with --socket.",
        matches: |finding, _, _| has_problem(finding, problem::OTHER),
    },
    // The driver does not start.
    Rule {
        name: "stub-library",
        symptom: "`is the CUDA toolkit's stub library`",
        cause: "The loader found a CUDA toolkit's stub library, which serves only to link programs, and no driver \
                before it.",
        remedy: "Remove the folder from LD_LIBRARY_PATH and from the loader's configuration (/etc/ld.so.conf.d).",
        matches: |finding, environment, _| {
            let stub = environment.library.as_ref().is_some_and(|library| library.stub);
            is_of(finding, &["driver"]) && (stub || error_code(finding) == Some(code::STUB_LIBRARY))
        },
    },
    Rule {
        name: "library-broken",
        symptom: "`no CUDA driver library loads`, although a file of that name exists",
        cause: "The driver library exists but can't be loaded: it is truncated, of another architecture, or lacks a \
                library that it needs.",
        remedy: "Inspect the file that the error names with `ldd`, and reinstall the driver; in a container, let the \
                 runtime provide the driver's files.",
        matches: |finding, _, _| has_reason(finding, Reason::LibraryBroken),
    },
    Rule {
        name: "library-not-found",
        symptom: "`no CUDA driver library loads`, although the device nodes of a GPU exist",
        cause: "The GPU's device nodes exist, but the loader does not find the driver library.",
        remedy: "Add its folder to LD_LIBRARY_PATH, or run `ldconfig`; in a container, NVIDIA_DRIVER_CAPABILITIES must \
                 include compute.",
        matches: |finding, environment, _| no_library(finding) && environment.nodes.iter().any(is_gpu),
    },
    Rule {
        name: "library-missing-wsl",
        symptom: "`no CUDA driver library loads`, on WSL2",
        cause: "The loader finds no driver library, which on WSL2 comes from Windows, in /usr/lib/wsl/lib.",
        remedy: "Install NVIDIA's driver in Windows but not in Linux, then run `wsl --update` and `wsl --shutdown`.",
        matches: |finding, environment, _| no_library(finding) && environment.wsl,
    },
    Rule {
        name: "library-missing-container",
        symptom: "`no CUDA driver library loads`, in a container",
        cause: "The loader finds no driver library in this container, which gets it from the host and not from its \
                image: either the container was started without the GPU, or the host has no driver.",
        remedy: "Check `nvidia-smi` on the host, and start the container with the GPU: `--gpus all` for Docker, a limit of \
                 nvidia.com/gpu for Kubernetes, `--device nvidia.com/gpu=all` for podman; NVIDIA_DRIVER_CAPABILITIES \
                 must include compute.",
        matches: |finding, environment, _| no_library(finding) && environment.container.is_some(),
    },
    Rule {
        name: "library-missing",
        symptom: "`no CUDA driver library loads`",
        cause: "No NVIDIA driver is installed, or its library libcuda.so.1 is not on the loader's path.",
        remedy: "Install NVIDIA's driver, or run `ldconfig` if it is installed.",
        matches: |finding, _, _| no_library(finding),
    },
    Rule {
        name: "old-driver",
        symptom: "`the driver is too old for this`",
        cause: "The driver library is too old: it lacks a function.",
        remedy: "Update the driver: sharing by file descriptor needs CUDA 11.4 or newer, host memory 12.2, fabric \
                 handles 12.3.",
        matches: |finding, _, _| has_reason(finding, Reason::MissingFunction),
    },
    Rule {
        name: "fabric-manager",
        symptom: "`CUDA_ERROR_SYSTEM_NOT_READY (802)`",
        cause: "The driver waits for a service: usually for NVIDIA's Fabric Manager, on a machine with NVSwitches, or, \
                with confidential computing, for the GPU to be set ready.",
        remedy: "Start nvidia-fabricmanager in exactly the driver's version, and check its log and `nvidia-smi -q` \
                 (Fabric State must be Completed); with confidential computing, run `nvidia-smi conf-compute -srs 1`.",
        matches: |finding, _, _| error_code(finding) == Some(802),
    },
    Rule {
        name: "version-mismatch",
        symptom: "`CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)`",
        cause: "The driver library and the kernel module have different versions, often after an update.",
        remedy: "Reboot or reload the module; in a container, use the host's library and not one from the image.",
        matches: |finding, _, _| error_code(finding) == Some(code::SYSTEM_DRIVER_MISMATCH),
    },
    Rule {
        name: "compatibility-library",
        symptom: "`CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE (804)`",
        cause: "A forward-compatibility library (cuda-compat) is loaded, but does not support this GPU.",
        remedy: "Remove the compat folder from LD_LIBRARY_PATH, and update the host's driver instead.",
        matches: |finding, _, _| error_code(finding) == Some(804),
    },
    Rule {
        name: "nodes-denied",
        symptom: "the driver does not start, and this user can't open one of its nodes in /dev",
        cause: "This process may not open the driver's device nodes: their owner or mode, or the container's device \
                list, denies access.",
        remedy: "Join the group that owns the nodes, or let the container runtime add the devices.",
        matches: |finding, environment, _| {
            is_of(finding, &["driver"]) && has_error(finding) && environment.nodes.iter().any(|node| !node.usable)
        },
    },
    Rule {
        name: "devices-hidden",
        symptom: "`the CUDA driver finds no device`, with `CUDA_VISIBLE_DEVICES` set",
        cause: "CUDA_VISIBLE_DEVICES selects no device: it is empty, or its first entry does not exist.",
        remedy: "Unset it, or name devices by the UUIDs of `nvidia-smi -L`.",
        matches: |finding, environment, _| no_device(finding) && environment.visible_devices.is_some(),
    },
    Rule {
        name: "no-device-in-container",
        symptom: "`the CUDA driver finds no device`, in a container without `/dev/nvidia0`",
        cause: "The container has the driver library but no device node of a GPU.",
        remedy: "Start it with the GPU: `--gpus all` for Docker, a limit of nvidia.com/gpu for Kubernetes.",
        matches: |finding, environment, _| {
            no_device(finding) && environment.container.is_some() && !environment.nodes.iter().any(is_gpu)
        },
    },
    Rule {
        name: "no-device",
        symptom: "`the CUDA driver finds no device`",
        cause: "The driver sees no GPU: none is installed, it fell off the bus, or another driver (nouveau, vfio) \
                holds it.",
        remedy: "Check `nvidia-smi -L`, `lspci -k` for the driver in use, and `dmesg` for NVRM and Xid.",
        matches: |finding, _, _| no_device(finding),
    },
    Rule {
        name: "no-uvm-node",
        symptom: "`cuInit failed: CUDA_ERROR_UNKNOWN (999)`, without `/dev/nvidia-uvm`",
        cause: "The kernel module nvidia-uvm is not loaded, or its device node is missing.",
        remedy: "Run `nvidia-modprobe -u -c 0` as root; a container needs the node /dev/nvidia-uvm too.",
        matches: |finding, environment, _| {
            cu_init_unknown(finding)
                && !environment.wsl
                && !environment.nodes.iter().any(|node| node.path.ends_with("/nvidia-uvm"))
        },
    },
    Rule {
        name: "other-proc",
        symptom: "`cuInit failed: CUDA_ERROR_OPERATING_SYSTEM (304)`, in a PID namespace",
        cause: "/proc belongs to another PID namespace, so the driver does not find its own process there.",
        remedy: "Mount a /proc for the namespace, as `unshare --mount-proc` does.",
        matches: |finding, environment, _| {
            is_of(finding, &["driver"]) && error_code(finding) == Some(304) && environment.own_proc == Some(false)
        },
    },
    Rule {
        name: "driver-broken",
        symptom: "`cuInit failed: CUDA_ERROR_UNKNOWN (999)`",
        cause: "The driver gives no reason: often its kernel module is in a bad state, after a suspend or a GPU error.",
        remedy: "Check `dmesg` for NVRM and Xid, then reload the module nvidia_uvm, reset the GPU or reboot.",
        matches: |finding, _, _| cu_init_unknown(finding),
    },
    Rule {
        name: "driver-hangs",
        symptom: "the probe `driver` times out",
        cause: "The driver does not finish initialising: a GPU has failed, or many processes start at once and queue.",
        remedy: "Check whether `nvidia-smi` responds and `dmesg` for NVRM and Xid, and retry with a longer --timeout.",
        matches: |finding, _, _| is_of(finding, &["driver"]) && error_kind(finding) == Some("timeout"),
    },
    // Limits and permissions of the process.
    Rule {
        name: "few-descriptors",
        symptom: "`open files are needed`, `descriptors were cut off`, `Too many open files`",
        cause: "The limit of open files is too low, as each shared allocation needs a descriptor; or, if descriptors \
                were cut off, a security module may have refused them.",
        remedy: "Raise `ulimit -n` (LimitNOFILE of a systemd unit, --ulimit nofile of Docker), and close descriptors \
                 after importing them.",
        matches: |finding, _, _| {
            is_of(finding, &["descriptors"])
                || has_reason(finding, Reason::FileLimit)
                || has_reason(finding, Reason::DescriptorsLost)
        },
    },
    Rule {
        name: "mps",
        symptom: "`CUDA_ERROR_MPS_...` (805 to 810)",
        cause: "The process is an MPS client, but the MPS server is not running, is full, or has exited.",
        remedy: "Start nvidia-cuda-mps-control for this user, or unset CUDA_MPS_PIPE_DIRECTORY to run without MPS.",
        matches: |finding, _, _| matches!(error_code(finding), Some(805..=810)),
    },
    Rule {
        name: "exclusive",
        symptom: "`CUDA_ERROR_DEVICE_UNAVAILABLE (46)`, or 201 or 999 with a non-default compute mode",
        cause: "The GPU's compute mode admits one process or none, or another process holds the GPU.",
        remedy: "Run `nvidia-smi -c DEFAULT` as root, or stop the process that `nvidia-smi` lists for that GPU.",
        matches: |finding, _, _| {
            let exclusive = finding.figures.get("compute_mode").is_some_and(|mode| mode.as_u64() != Some(0));
            error_code(finding) == Some(46)
                || exclusive && matches!(error_code(finding), Some(code::INVALID_CONTEXT | code::UNKNOWN))
        },
    },
    // Exhausted resources.
    Rule {
        name: "no-addresses",
        symptom: "`cuMemAddressReserve failed: CUDA_ERROR_OUT_OF_MEMORY (2)`",
        cause: "The process has no address range left: `ulimit -v` limits it, or reservations were not freed.",
        remedy: "Run `ulimit -v unlimited`, reserve only what is mapped, and free a reservation once it is unmapped.",
        matches: |finding, _, _| {
            is_call(finding, "cuMemAddressReserve") && error_code(finding) == Some(code::OUT_OF_MEMORY)
        },
    },
    Rule {
        name: "out-of-memory",
        symptom: "`CUDA_ERROR_OUT_OF_MEMORY (2)`, `were requested, but`",
        cause: "The GPU has less free memory than requested, or the driver reports another exhausted resource the same \
                way.",
        remedy: "Check in `nvidia-smi` which processes hold memory, and free some; if there is enough, raise `ulimit \
                 -n` and the container's memory limit.",
        matches: |finding, _, _| error_code(finding) == Some(code::OUT_OF_MEMORY),
    },
    // WSL, gVisor, confidential machines and MIG.
    Rule {
        name: "wsl-rdma",
        symptom: "`cuMemSetAccess failed: CUDA_ERROR_UNKNOWN (999)`, on WSL2",
        cause: "On WSL2, memory can be created as GPUDirect RDMA capable, but not be used.",
        remedy: "Do not request gpuDirectRDMACapable on WSL2.",
        matches: |finding, environment, _| {
            environment.wsl && is_call(finding, "cuMemSetAccess") && error_code(finding) == Some(code::UNKNOWN)
        },
    },
    Rule {
        name: "wsl-sharing",
        symptom: "`INVALID_VALUE (1)`, `INVALID_HANDLE (400)` or `NOT_SUPPORTED (801)`, on WSL2",
        cause: "The WSL2 driver does not share memory between processes, even if its attributes claim support.",
        remedy: "Run on native Linux, or keep the work in one process.",
        matches: |finding, environment, _| {
            let refused = [code::INVALID_VALUE, code::INVALID_HANDLE, code::NOT_SUPPORTED];
            environment.wsl
                && (is_of(finding, SHARING) || is_of(finding, &["dma-buf", "fabric", "peer", "memory"]))
                && (error_code(finding).is_some_and(|code| refused.contains(&code))
                    || finding.status == Status::Unsupported)
        },
    },
    Rule {
        name: "gvisor-confidential",
        symptom: "a probe times out, in gVisor on a confidential machine",
        cause: "In gVisor on a confidential machine, the driver was observed to retry forever while creating a \
                context.",
        remedy: "Use a newer runsc, or another runtime on confidential machines.",
        matches: |finding, environment, _| {
            environment.gvisor && environment.confidential.is_some() && error_kind(finding) == Some("timeout")
        },
    },
    Rule {
        name: "gvisor-export",
        symptom: "`cuMemExportToShareableHandle` fails, in gVisor",
        cause: "gVisor forwards only driver requests that it knows: some versions do not know one that an export makes \
                on machines with NVSwitches.",
        remedy: "Use a newer runsc, or another runtime for this container.",
        matches: |finding, environment, _| environment.gvisor && is_call(finding, "cuMemExportToShareableHandle"),
    },
    Rule {
        name: "confidential",
        symptom: "`CUDA_ERROR_NOT_SUPPORTED (801)`, on a confidential machine",
        cause: "This is a confidential virtual machine: if its GPU is in confidential mode, it can't access the host's \
                memory, and the driver refuses calls that need it.",
        remedy: "Check `nvidia-smi conf-compute -f`; share device memory instead, or disable confidential computing.",
        matches: |finding, environment, _| {
            environment.confidential.is_some() && error_code(finding) == Some(code::NOT_SUPPORTED)
        },
    },
    Rule {
        name: "mig",
        symptom: "`peer` is unsupported, or it, `legacy` or `pool` fails with 101, 217 or 801, with MIG in use",
        cause: "The instances of a partitioned GPU (MIG) can't access each other's memory.",
        remedy: "Use the same instance for both processes, or disable MIG.",
        matches: |finding, environment, _| {
            let apart = [code::INVALID_DEVICE, code::PEER_ACCESS_UNSUPPORTED, code::NOT_SUPPORTED];
            let refused = error_code(finding).is_some_and(|code| apart.contains(&code));
            environment.mig
                && (refused && is_of(finding, &["peer", "legacy", "pool"])
                    || is_of(finding, &["peer"]) && finding.status == Status::Unsupported)
        },
    },
    // Fabric handles.
    Rule {
        name: "fabric-no-channel",
        symptom: "`CUDA_ERROR_NOT_PERMITTED (800)` of `fabric`, without a node in `/dev/nvidia-caps-imex-channels`",
        cause: "Fabric handles go through an IMEX channel, and this process has no channel's node.",
        remedy: "Create one (the module's option NVreg_CreateImexChannel0=1, or nvidia-modprobe), give it to the \
                 container, and run nvidia-imex on each node.",
        matches: |finding, environment, _| fabric_denied(finding) && environment.imex_channels.is_empty(),
    },
    Rule {
        name: "fabric-channel-denied",
        symptom: "`CUDA_ERROR_NOT_PERMITTED (800)` of `fabric`, with a channel node that this user can't open",
        cause: "An IMEX channel exists, but this process may not open its node.",
        remedy: "Add this user to the node's group, or let the container runtime add the channel.",
        matches: |finding, environment, _| {
            fabric_denied(finding) && !environment.imex_channels.iter().any(|node| node.usable)
        },
    },
    Rule {
        name: "fabric-other-channel",
        symptom: "`CUDA_ERROR_NOT_PERMITTED (800)` of `fabric`, with a channel's node",
        cause: "nvidia-imex is not running, or the two processes use different channels or users.",
        remedy: "Check `nvidia-imex-ctl -N` and its log, and use the same channel and user for both processes.",
        matches: |finding, _, _| fabric_denied(finding),
    },
    Rule {
        name: "fabric-export",
        symptom: "`cuMemExportToShareableHandle failed: CUDA_ERROR_INVALID_VALUE (1)` of `fabric`",
        cause: "On a GPU without a fabric the driver creates memory for fabric handles, and only the export fails.",
        remedy: "Try create, export and import, and fall back to file descriptors, whatever the attribute claims.",
        matches: |finding, _, _| {
            is_of(finding, &["fabric"])
                && is_call(finding, "cuMemExportToShareableHandle")
                && error_code(finding) == Some(code::INVALID_VALUE)
        },
    },
    Rule {
        name: "fabric-unsupported",
        symptom: "`fabric` is unsupported",
        cause: "Fabric handles need GPUs in an NVLink fabric, and a driver for CUDA 12.3 or newer.",
        remedy: "Nothing, unless memory must be shared between machines: within one machine, use file descriptors.",
        matches: |finding, environment, _| unsupported(finding, environment, &["fabric"]),
    },
    // Pairs of devices.
    Rule {
        name: "peer-set-access",
        symptom: "`cuMemSetAccess failed: CUDA_ERROR_INVALID_VALUE (1)` of `peer`",
        cause: "The driver refuses the device access to the other device's memory, even if it claims peer access.",
        remedy: "Query cuDeviceCanAccessPeer in both directions, check `nvidia-smi topo -p2p r`, and copy through the \
                 host where peer access is missing.",
        matches: |finding, _, _| {
            is_of(finding, &["peer"])
                && is_call(finding, "cuMemSetAccess")
                && error_code(finding) == Some(code::INVALID_VALUE)
        },
    },
    Rule {
        name: "no-peer-access",
        symptom: "`CUDA_ERROR_PEER_ACCESS_UNSUPPORTED (217)`, or `peer` is unsupported",
        cause: "The two GPUs can't access each other's memory: there is no NVLink, or the PCIe path does not allow \
                peer access.",
        remedy: "Choose GPUs that `nvidia-smi topo -p2p r` shows as OK, or copy through the host; on PCIe check the \
                 IOMMU and ACS.",
        matches: |finding, environment, _| {
            error_code(finding) == Some(code::PEER_ACCESS_UNSUPPORTED) || unsupported(finding, environment, &["peer"])
        },
    },
    // Imports.
    Rule {
        name: "gpu-hidden-by-variable",
        symptom: "`CUDA_ERROR_INVALID_DEVICE (101)` at an import, with `CUDA_VISIBLE_DEVICES` set",
        cause: "The importer does not see the GPU that owns the memory, probably because CUDA_VISIBLE_DEVICES hides it.",
        remedy: "Make that GPU visible to both processes, and compare UUIDs: ordinals count only visible devices.",
        matches: |finding, environment, _| device_hidden(finding) && environment.visible_devices.is_some(),
    },
    Rule {
        name: "gpu-hidden",
        symptom: "`CUDA_ERROR_INVALID_DEVICE (101)` at an import",
        cause: "The importer does not see the GPU that owns the memory, for example because each container has its own \
                GPU.",
        remedy: "Give both containers the same GPU, by UUID (--gpus device=UUID, or a shared resource claim).",
        matches: |finding, _, _| device_hidden(finding),
    },
    // Host memory by NUMA node.
    Rule {
        name: "host-numa-crash",
        symptom: "`host-numa` is killed by a signal",
        cause: "Drivers before r595 were observed to crash on host memory if the kernel denies them NUMA calls.",
        remedy: "Update the driver, or give the container --cap-add SYS_NICE.",
        matches: |finding, environment, _| {
            let major = environment.module.as_deref().and_then(|module| module.split('.').next()?.parse::<u32>().ok());
            is_of(finding, &["host-numa"]) && is_killed(finding) == Some(false) && major.is_none_or(|major| major < 595)
        },
    },
    Rule {
        name: "host-numa-filtered",
        symptom: "`cuMemCreate` of `host-numa` fails in a container, or under a seccomp filter",
        cause: "Probably a seccomp filter denies NUMA calls such as get_mempolicy, as containers' filters do: the driver \
                needs them for host memory.",
        remedy: "Give the container --cap-add SYS_NICE, or a seccomp profile that allows them.",
        matches: |finding, environment, _| {
            let filtered = environment.seccomp.map_or(environment.container.is_some(), |mode| mode == 2);
            is_of(finding, &["host-numa"])
                && filtered
                && is_call(finding, "cuMemCreate")
                && finding.status == Status::Failed
        },
    },
    Rule {
        name: "host-numa-unsupported",
        symptom: "`host-numa` is unsupported",
        cause: "The driver is too old for host memory by NUMA node (CUDA 12.2), or the GPU does not support it.",
        remedy: "Update the driver, or share device memory.",
        matches: |finding, environment, _| unsupported(finding, environment, &["host-numa"]),
    },
    // Events.
    Rule {
        name: "event-without-shm",
        symptom: "`event` fails, and `/dev/shm` is missing or not writable",
        cause: "The driver keeps an inter-process event in a file in /dev/shm, and this process can't create one \
                there.",
        remedy: "Mount a tmpfs on /dev/shm with mode 1777, and let both containers share it.",
        matches: |finding, environment, _| {
            let usable = |folder: SharedMemory| folder.exists && folder.writable;
            is_of(finding, &["event"])
                && has_error(finding)
                && environment.shared_memory.is_some_and(|folder| !usable(folder))
        },
    },
    Rule {
        name: "event-not-shared",
        symptom: "`CUDA_ERROR_MAP_FAILED (205)` of `event`",
        cause: "The driver keeps an inter-process event in a file in /dev/shm, and the two processes run as different \
                users or have different /dev/shm.",
        remedy: "Run both processes as one user with one /dev/shm (Docker: --ipc), or use no events: synchronise the \
                 stream, then send a message.",
        matches: |finding, _, _| is_of(finding, &["event"]) && error_code(finding) == Some(205),
    },
    // Other missing features.
    Rule {
        name: "dma-buf-closed-module",
        symptom: "`dma-buf` is unsupported, with NVIDIA's closed kernel module",
        cause: "Only NVIDIA's open kernel modules export memory as dma-buf, on Linux 5.12 or newer.",
        remedy: "Install the open modules, or let the network card use nvidia-peermem.",
        matches: |finding, environment, _| {
            environment.module_open == Some(false)
                && is_of(finding, &["dma-buf"])
                && (finding.status == Status::Unsupported || error_code(finding) == Some(code::NOT_SUPPORTED))
        },
    },
    Rule {
        name: "pool-unsupported",
        symptom: "`pool` is unsupported",
        cause: "The GPU or its driver does not support memory pools that are shared by file descriptor.",
        remedy: "Share allocations of virtual memory management instead, which need no pool.",
        matches: |finding, environment, _| unsupported(finding, environment, &["pool"]),
    },
    Rule {
        name: "no-vmm",
        symptom: "`memory`, `export` or `round-trip` is unsupported",
        cause: "The GPU or its driver does not support virtual memory management with file descriptors, as on some \
                virtual GPUs.",
        remedy: "Check the probes `legacy` and `pool` for an alternative, or use a driver and GPU that support it.",
        matches: |finding, environment, _| {
            let claimed_not = error_kind(finding) == Some("unsupported") && error_code(finding).is_none();
            let lacking = claimed_not && (is_of(finding, VMM) || is_of(finding, &["import", "round-trip"]))
                || finding.status == Status::Unsupported && is_of(finding, &["memory", "export"]);
            lacking && environment.library.is_some()
        },
    },
    // Memory.
    Rule {
        name: "memory-held",
        symptom: "`memory-returned` fails: less is free than before",
        cause: "Shared memory is freed when its last descriptor, handle or mapping is gone from every process, \
                including descriptors queued in a socket; or another process allocated memory during the test.",
        remedy: "Run again on an otherwise idle GPU; in a program, close each descriptor after importing it, and find \
                 holders with `ls -l /proc/*/fd`.",
        matches: |finding, _, _| is_of(finding, &["memory-returned"]) && !has_error(finding),
    },
    // Any probe.
    Rule {
        name: "killed",
        symptom: "`SIGKILL` kills a probe",
        cause: "Something killed the probe's process, usually the kernel when memory ran out on the machine or in the \
                container.",
        remedy: "Check `dmesg` for oom-kill, and raise the container's memory limit: a process with CUDA needs about \
                 150 MiB.",
        matches: |finding, _, _| is_killed(finding) == Some(true),
    },
    Rule {
        name: "crashed",
        symptom: "another signal kills a probe",
        cause: "A signal ended the probe's process, usually because the driver crashed.",
        remedy: "Check `dmesg` for NVRM and Xid, update the driver, and report the crash with the output of `vmmfd \
                 doctor --json`.",
        matches: |finding, _, _| is_killed(finding).is_some(),
    },
    Rule {
        name: "hangs",
        symptom: "a probe times out",
        cause: "A driver call, or the other process, did not finish in time.",
        remedy: "Check `dmesg` for NVRM and Xid and the GPU's other processes, and retry with a longer --timeout.",
        matches: |finding, _, _| error_kind(finding) == Some("timeout"),
    },
    // Memory kept by a broker, for errors that no other rule explains.
    Rule {
        name: "persistence-off",
        symptom: "`persistence` is unsupported: persistence mode is off",
        cause: "Persistence mode is off: when the last process that uses the device exits, the driver drops the \
                device's state, including memory that only descriptors hold.",
        remedy: "If a broker keeps memory, run `nvidia-persistenced` on the host, or `nvidia-smi -pm 1` as root: \
                 otherwise the memory survives only while some process has the device open.",
        matches: |finding, _, _| is_of(finding, &["persistence"]) && finding.status == Status::Unsupported,
    },
    Rule {
        name: "descriptor-not-kept",
        symptom: "`held-descriptor` fails at `cuMemImportFromShareableHandle` or `cuMemMap`, or because the bytes \
                  changed",
        cause: "The driver freed the memory when its creator died, although another process held its descriptor.",
        remedy: "Do not rely on a broker here: keep the memory's creator alive, or a process that has imported the \
                 memory, and check whether a newer driver, or running outside of this container or sandbox, keeps it.",
        matches: |finding, _, _| {
            let lost = ["cuMemImportFromShareableHandle", "cuMemMap"].iter().any(|call| is_call(finding, call));
            is_of(finding, &["held-descriptor"]) && finding.status == Status::Failed && (lost || !has_error(finding))
        },
    },
];
