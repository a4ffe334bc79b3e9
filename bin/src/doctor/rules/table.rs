//! The table of the rules.

use vmmfd::error::code;

use super::{
    Rule,
    predicates::{
        SHARING, VMM, cu_init_unknown, device_hidden, error_code, error_kind, fabric_denied, has_error, has_reason,
        is_call, is_gpu, is_killed, is_of, no_device, no_library, unsupported,
    },
};
use crate::doctor::{Status, environment::SharedMemory, error_details::Reason};

/// The rules of every machine, the most specific first.
pub(super) const GENERAL: &[Rule] = &[
    // The driver does not start.
    Rule {
        name: "stub-library",
        symptom: "`is the CUDA toolkit's stub library`",
        cause: "A toolkit's stubs folder on the loader's path hides the driver.",
        remedy: "Take the folder out of LD_LIBRARY_PATH and of the loader's configuration (/etc/ld.so.conf.d).",
        matches: |finding, environment, _| {
            let stub = environment.library.as_ref().is_some_and(|library| library.stub);
            is_of(finding, &["driver"]) && (stub || error_code(finding) == Some(code::STUB_LIBRARY))
        },
    },
    Rule {
        name: "library-broken",
        symptom: "`no CUDA driver library loads`, and a file of that name is there",
        cause: "The driver library exists and can't be loaded: it is truncated, of another architecture, or lacks a \
                library that it needs.",
        remedy: "Look with `ldd` at the file that the error names, and install the driver again; in a container, let \
                 the runtime bring the driver's files.",
        matches: |finding, _, _| has_reason(finding, Reason::LibraryBroken),
    },
    Rule {
        name: "library-not-found",
        symptom: "`no CUDA driver library loads`, and the device nodes of a GPU are there",
        cause: "The GPU's device nodes are here, and the loader does not find the driver library.",
        remedy: "Name its folder in LD_LIBRARY_PATH, or run `ldconfig`; in a container NVIDIA_DRIVER_CAPABILITIES must \
                 include compute.",
        matches: |finding, environment, _| no_library(finding) && environment.nodes.iter().any(is_gpu),
    },
    Rule {
        name: "library-missing-wsl",
        symptom: "`no CUDA driver library loads`, on WSL2",
        cause: "WSL2 takes its driver library from Windows, in /usr/lib/wsl/lib, and it is not found there.",
        remedy: "Install NVIDIA's driver in Windows and none in Linux, then run `wsl --update` and `wsl --shutdown`.",
        matches: |finding, environment, _| no_library(finding) && environment.wsl,
    },
    Rule {
        name: "library-missing-container",
        symptom: "`no CUDA driver library loads`, in a container",
        cause: "The container was started without the driver library, which comes from the machine and not from the \
                image.",
        remedy: "Start it with the GPU: `--gpus all` for Docker, a limit of nvidia.com/gpu for Kubernetes, `--device \
                 nvidia.com/gpu=all` for podman; NVIDIA_DRIVER_CAPABILITIES must include compute.",
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
        cause: "The driver library lacks a function, as it is older than that function.",
        remedy: "Update the driver: sharing by file descriptor needs CUDA 11.4 or newer, host memory 12.2, fabric \
                 handles 12.3.",
        matches: |finding, _, _| has_reason(finding, Reason::MissingFunction),
    },
    Rule {
        name: "fabric-manager",
        symptom: "`CUDA_ERROR_SYSTEM_NOT_READY (802)`",
        cause: "The machine has NVSwitches, and NVIDIA's Fabric Manager has not set them up.",
        remedy: "Start nvidia-fabricmanager, of exactly the driver's version, and look at its log and at `nvidia-smi \
                 -q` (Fabric State must be Completed).",
        matches: |finding, _, _| error_code(finding) == Some(802),
    },
    Rule {
        name: "version-mismatch",
        symptom: "`CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)`",
        cause: "The driver library and the kernel module are of different versions, often after an update.",
        remedy: "Reboot or reload the module; in a container, use the machine's library and none that the image \
                 brought.",
        matches: |finding, _, _| error_code(finding) == Some(code::SYSTEM_DRIVER_MISMATCH),
    },
    Rule {
        name: "compatibility-library",
        symptom: "`CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE (804)`",
        cause: "A forward-compatibility library (cuda-compat) is loaded, and this GPU is not one that it works on.",
        remedy: "Take the compat folder out of LD_LIBRARY_PATH, and update the machine's driver instead.",
        matches: |finding, _, _| error_code(finding) == Some(804),
    },
    Rule {
        name: "nodes-denied",
        symptom: "the driver does not start, and a node of it in /dev is not open to this user",
        cause: "This process may not open the driver's device nodes: their owner or mode, or the container's list of \
                devices, forbids it.",
        remedy: "Join the group that owns the nodes, or give the container the devices by its runtime rather than by \
                 hand.",
        matches: |finding, environment, _| {
            is_of(finding, &["driver"]) && has_error(finding) && environment.nodes.iter().any(|node| !node.usable)
        },
    },
    Rule {
        name: "devices-hidden",
        symptom: "`the CUDA driver finds no device`, with `CUDA_VISIBLE_DEVICES` set",
        cause: "CUDA_VISIBLE_DEVICES leaves no device: it is empty, or the first it names does not exist here.",
        remedy: "Unset it, or name devices by the UUIDs of `nvidia-smi -L`.",
        matches: |finding, environment, _| no_device(finding) && environment.visible_devices.is_some(),
    },
    Rule {
        name: "no-device-in-container",
        symptom: "`the CUDA driver finds no device`, in a container without `/dev/nvidia0`",
        cause: "The container has the driver's library and no GPU.",
        remedy: "Start it with the GPU: `--gpus all` for Docker, a limit of nvidia.com/gpu for Kubernetes.",
        matches: |finding, environment, _| {
            no_device(finding) && environment.container.is_some() && !environment.nodes.iter().any(is_gpu)
        },
    },
    Rule {
        name: "no-device",
        symptom: "`the CUDA driver finds no device`",
        cause: "The driver sees no GPU: there is none, it fell off the bus, or another driver (nouveau, vfio) holds \
                it.",
        remedy: "Look at `nvidia-smi -L`, at `lspci -k` for the driver in use, and at `dmesg` for NVRM and Xid.",
        matches: |finding, _, _| no_device(finding),
    },
    Rule {
        name: "no-uvm-node",
        symptom: "`cuInit failed: CUDA_ERROR_UNKNOWN (999)`, without `/dev/nvidia-uvm`",
        cause: "The kernel module nvidia-uvm is not loaded, or its node is not here.",
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
        cause: "/proc is of another PID namespace than this process, so the driver does not find its own process \
                there.",
        remedy: "Mount a /proc of its own in the namespace, as `unshare --mount-proc` does.",
        matches: |finding, environment, _| {
            is_of(finding, &["driver"]) && error_code(finding) == Some(304) && environment.own_proc == Some(false)
        },
    },
    Rule {
        name: "driver-broken",
        symptom: "`cuInit failed: CUDA_ERROR_UNKNOWN (999)`",
        cause: "The driver is there and its kernel module is in a bad state, often after a suspend or a GPU error.",
        remedy: "Look at `dmesg` for NVRM and Xid, then reload the module nvidia_uvm, reset the GPU or reboot.",
        matches: |finding, _, _| cu_init_unknown(finding),
    },
    Rule {
        name: "driver-hangs",
        symptom: "the probe `driver` reaches its deadline",
        cause: "The driver does not finish initialising: a GPU has failed, or many processes start at once and wait in \
                line.",
        remedy: "See whether `nvidia-smi` answers, look at `dmesg` for NVRM and Xid, and try again with a longer \
                 --timeout.",
        matches: |finding, _, _| is_of(finding, &["driver"]) && error_kind(finding) == Some("timeout"),
    },
    // The process may not hold what it needs.
    Rule {
        name: "few-descriptors",
        symptom: "`open files are needed`, `descriptors were cut off`, `Too many open files`",
        cause: "The limit of open files is too low: each shared allocation is a descriptor.",
        remedy: "Raise `ulimit -n` (LimitNOFILE of a systemd unit, --ulimit nofile of Docker), and close descriptors \
                 once they are imported.",
        matches: |finding, _, _| {
            is_of(finding, &["descriptors"])
                || has_reason(finding, Reason::FileLimit)
                || has_reason(finding, Reason::DescriptorsLost)
        },
    },
    Rule {
        name: "mps",
        symptom: "`CUDA_ERROR_MPS_...` (805 to 810)",
        cause: "The process is a client of MPS, and its server is not there, is full, or ended.",
        remedy: "Start nvidia-cuda-mps-control for this user, or unset CUDA_MPS_PIPE_DIRECTORY to go without.",
        matches: |finding, _, _| matches!(error_code(finding), Some(805..=810)),
    },
    Rule {
        name: "exclusive",
        symptom: "`CUDA_ERROR_DEVICE_UNAVAILABLE (46)`, or 201 or 999, with a compute mode other than default",
        cause: "The GPU admits one process, or none, as its compute mode is not the default, or another holds it.",
        remedy: "Run `nvidia-smi -c DEFAULT` as root, or end the process that `nvidia-smi` shows on that GPU.",
        matches: |finding, _, _| {
            let exclusive = finding.figures.get("compute_mode").is_some_and(|mode| mode.as_u64() != Some(0));
            error_code(finding) == Some(46)
                || exclusive && matches!(error_code(finding), Some(code::INVALID_CONTEXT | code::UNKNOWN))
        },
    },
    // There is too little of something, whatever surrounds the process.
    Rule {
        name: "no-addresses",
        symptom: "`cuMemAddressReserve failed: CUDA_ERROR_OUT_OF_MEMORY (2)`",
        cause: "The process has no range of addresses left: `ulimit -v` bounds them, or reservations were never freed.",
        remedy: "Run `ulimit -v unlimited`, reserve exactly what is mapped, and free a reservation once it is \
                 unmapped.",
        matches: |finding, _, _| {
            is_call(finding, "cuMemAddressReserve") && error_code(finding) == Some(code::OUT_OF_MEMORY)
        },
    },
    Rule {
        name: "out-of-memory",
        symptom: "`CUDA_ERROR_OUT_OF_MEMORY (2)`, `bytes were requested`",
        cause: "The GPU has less free memory than was asked for, or another resource is exhausted that is reported the \
                same way.",
        remedy: "See in `nvidia-smi` which processes hold memory, and free some; if there is enough, raise `ulimit -n` \
                 and the container's memory limit.",
        matches: |finding, _, _| error_code(finding) == Some(code::OUT_OF_MEMORY),
    },
    // What surrounds the process changes what the driver can do.
    Rule {
        name: "wsl-rdma",
        symptom: "`cuMemSetAccess failed: CUDA_ERROR_UNKNOWN (999)`, on WSL2",
        cause: "On WSL2 memory that was asked to be capable of GPUDirect RDMA can be created and not be used.",
        remedy: "Do not ask for gpuDirectRDMACapable on WSL2.",
        matches: |finding, environment, _| {
            environment.wsl && is_call(finding, "cuMemSetAccess") && error_code(finding) == Some(code::UNKNOWN)
        },
    },
    Rule {
        name: "wsl-sharing",
        symptom: "`INVALID_VALUE (1)`, `INVALID_HANDLE (400)` or `NOT_SUPPORTED (801)`, on WSL2",
        cause: "The driver of WSL2 does not share memory between processes, even where its attributes say so.",
        remedy: "Run on Linux itself, or keep the work in one process.",
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
        symptom: "a probe reaches its deadline, in gVisor on a confidential machine",
        cause: "In gVisor on a confidential machine the driver was seen to retry without end when it creates a \
                context.",
        remedy: "Use a newer runsc, or another runtime on confidential machines.",
        matches: |finding, environment, _| {
            environment.gvisor && environment.confidential.is_some() && error_kind(finding) == Some("timeout")
        },
    },
    Rule {
        name: "gvisor-export",
        symptom: "`cuMemExportToShareableHandle` fails, in gVisor",
        cause: "gVisor passes on only the driver requests that it knows, and does not know one that an export makes on \
                machines with NVSwitches.",
        remedy: "Use a newer runsc, or another runtime for this container.",
        matches: |finding, environment, _| environment.gvisor && is_call(finding, "cuMemExportToShareableHandle"),
    },
    Rule {
        name: "confidential",
        symptom: "`CUDA_ERROR_NOT_SUPPORTED (801)`, on a confidential machine",
        cause: "With confidential computing the GPU can't access the host's memory, and calls that need it are \
                refused.",
        remedy: "Share device memory instead, or switch confidential computing off.",
        matches: |finding, environment, _| {
            environment.confidential.is_some() && error_code(finding) == Some(code::NOT_SUPPORTED)
        },
    },
    Rule {
        name: "mig",
        symptom: "`peer` is unsupported, or it, `legacy` or `pool` fails with 101, 217 or 801, with MIG in use",
        cause: "The instances of a partitioned GPU (MIG) are isolated: none can access another's memory.",
        remedy: "Give both processes the same instance, or switch MIG off.",
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
        symptom: "`CUDA_ERROR_NOT_PERMITTED (800)` of `fabric`, with a channel's node that is not open to this user",
        cause: "There is an IMEX channel, and this process may not open its node.",
        remedy: "Give this user the node's group, or have the container's runtime add the channel.",
        matches: |finding, environment, _| {
            fabric_denied(finding) && !environment.imex_channels.iter().any(|node| node.usable)
        },
    },
    Rule {
        name: "fabric-other-channel",
        symptom: "`CUDA_ERROR_NOT_PERMITTED (800)` of `fabric`, with a channel's node",
        cause: "Either nvidia-imex does not run, or the two processes use different channels or are different users.",
        remedy: "Look at `nvidia-imex-ctl -N` and its log, and give both processes the same channel and user.",
        matches: |finding, _, _| fabric_denied(finding),
    },
    Rule {
        name: "fabric-export",
        symptom: "`cuMemExportToShareableHandle failed: CUDA_ERROR_INVALID_VALUE (1)` of `fabric`",
        cause: "The driver creates memory for fabric handles on a GPU that is in no fabric, and fails only at the \
                export.",
        remedy: "Fall back to file descriptors after a trial of create, export and import, whatever the attribute \
                 says.",
        matches: |finding, _, _| {
            is_of(finding, &["fabric"])
                && is_call(finding, "cuMemExportToShareableHandle")
                && error_code(finding) == Some(code::INVALID_VALUE)
        },
    },
    Rule {
        name: "fabric-unsupported",
        symptom: "`fabric` is unsupported",
        cause: "Fabric handles need GPUs that an NVLink fabric joins, and a driver of CUDA 12.3 or newer.",
        remedy: "No action is needed unless memory is to be shared between machines: within one, use file descriptors.",
        matches: |finding, environment, _| unsupported(finding, environment, &["fabric"]),
    },
    // Between two devices.
    Rule {
        name: "peer-set-access",
        symptom: "`cuMemSetAccess failed: CUDA_ERROR_INVALID_VALUE (1)` of `peer`",
        cause: "The driver does not give the device access to the other's memory, whatever it claims about peer \
                access.",
        remedy: "Ask cuDeviceCanAccessPeer both ways, see `nvidia-smi topo -p2p r`, and copy through the host where it \
                 is not available.",
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
        remedy: "Choose GPUs that `nvidia-smi topo -p2p r` shows as OK, or copy through the host; on PCIe look at the \
                 IOMMU and ACS.",
        matches: |finding, environment, _| {
            error_code(finding) == Some(code::PEER_ACCESS_UNSUPPORTED) || unsupported(finding, environment, &["peer"])
        },
    },
    // Import.
    Rule {
        name: "gpu-hidden-by-variable",
        symptom: "`CUDA_ERROR_INVALID_DEVICE (101)` at an import, with `CUDA_VISIBLE_DEVICES` set",
        cause: "The GPU that owns the memory is not among those that CUDA_VISIBLE_DEVICES leaves the importer.",
        remedy: "Let both processes see that GPU, and compare UUIDs: ordinals are counted among what each one sees.",
        matches: |finding, environment, _| device_hidden(finding) && environment.visible_devices.is_some(),
    },
    Rule {
        name: "gpu-hidden",
        symptom: "`CUDA_ERROR_INVALID_DEVICE (101)` at an import",
        cause: "The importer does not see the GPU that owns the memory, as when each container was given another.",
        remedy: "Give both containers the same GPU, by UUID (--gpus device=UUID, or a shared resource claim).",
        matches: |finding, _, _| device_hidden(finding),
    },
    // Host memory by NUMA node.
    Rule {
        name: "host-numa-crash",
        symptom: "`host-numa` is killed by a signal",
        cause: "Drivers before r595 were seen to crash on host memory where the kernel refuses them NUMA calls.",
        remedy: "Update the driver, or give the container --cap-add SYS_NICE.",
        matches: |finding, environment, _| {
            let major = environment.module.as_deref().and_then(|module| module.split('.').next()?.parse::<u32>().ok());
            is_of(finding, &["host-numa"]) && is_killed(finding) == Some(false) && major.is_none_or(|major| major < 595)
        },
    },
    Rule {
        name: "host-numa-filtered",
        symptom: "`cuMemCreate` of `host-numa` fails in a container, or under a seccomp filter",
        cause: "The container's seccomp filter refuses NUMA calls such as get_mempolicy, which the driver makes for \
                host memory.",
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
        cause: "The driver is older than host memory by NUMA node (CUDA 12.2), or the GPU can't use it.",
        remedy: "Update the driver, or share device memory.",
        matches: |finding, environment, _| unsupported(finding, environment, &["host-numa"]),
    },
    // Events.
    Rule {
        name: "event-without-shm",
        symptom: "`event` fails, and `/dev/shm` is missing or not writable",
        cause: "The driver keeps an inter-process event in a file of /dev/shm, and this process can't make one.",
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
        cause: "An inter-process event lies in a file of /dev/shm, and the ends are different users or see different \
                /dev/shm.",
        remedy: "Run both ends as one user with one /dev/shm (Docker: --ipc), or do without: synchronise the stream, \
                 then send a message.",
        matches: |finding, _, _| is_of(finding, &["event"]) && error_code(finding) == Some(205),
    },
    // What else a device may lack.
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
        cause: "The GPU or its driver has no memory pools that can be shared by file descriptor.",
        remedy: "Share allocations of virtual memory management instead, which need no pool.",
        matches: |finding, environment, _| unsupported(finding, environment, &["pool"]),
    },
    Rule {
        name: "no-vmm",
        symptom: "`memory`, `export` or `round-trip` is unsupported",
        cause: "The GPU or its driver does not offer virtual memory management with file descriptors, as on some \
                virtual GPUs.",
        remedy: "Look at the probes `legacy` and `pool` for another way, or use a driver and GPU that offer it.",
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
        cause: "Shared memory is freed when the last descriptor, handle or mapping of it goes, in whichever process, \
                also a descriptor that is still queued in a socket; or another process allocated memory meanwhile.",
        remedy: "Run again on a GPU that no other process uses; in a program close each descriptor once it is \
                 imported, and look for holders with `ls -l /proc/*/fd`.",
        matches: |finding, _, _| is_of(finding, &["memory-returned"]) && !has_error(finding),
    },
    // Whatever the probe.
    Rule {
        name: "killed",
        symptom: "a probe is ended by `SIGKILL`",
        cause: "Something killed the probe's process, most often the kernel as memory ran out, on the machine or in \
                the container's limit.",
        remedy: "Look at `dmesg` for oom-kill, and raise the container's memory limit: a process with CUDA takes some \
                 150 MiB.",
        matches: |finding, _, _| is_killed(finding) == Some(true),
    },
    Rule {
        name: "crashed",
        symptom: "a probe is ended by another signal",
        cause: "The driver crashed the probe's process.",
        remedy: "Look at `dmesg` for NVRM and Xid, update the driver, and report it with the output of `vmmfd doctor \
                 --json`.",
        matches: |finding, _, _| is_killed(finding).is_some(),
    },
    Rule {
        name: "hangs",
        symptom: "a probe reaches its deadline",
        cause: "A call of the driver, or the other process, did not finish in time.",
        remedy: "Look at `dmesg` for NVRM and Xid and at what else runs on the GPU, and try again with a longer \
                 --timeout.",
        matches: |finding, _, _| error_kind(finding) == Some("timeout"),
    },
];
