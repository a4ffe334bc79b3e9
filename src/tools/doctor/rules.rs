//! What is known of how sharing fails: rules that give a finding its cause and its remedy.
//!
//! A rule speaks only of what was seen to fail, here or in others' reports: where none matches, nothing is guessed.

use super::{
    Environment, Finding, Status,
    environment::{Node, SharedMemory},
    probes::NO_LIBRARY,
};
use crate::error::code;

/// What is known of one way to fail.
#[derive(Debug)]
pub struct Rule {
    /// Its name, in a report.
    pub name: &'static str,
    /// What a person sees, for the README.
    pub symptom: &'static str,
    /// Why.
    pub cause: &'static str,
    /// What to do.
    pub remedy: &'static str,
    /// Whether a finding that is `failed` or `unsupported`, of this environment, is of this kind.
    pub matches: fn(&Finding, &Environment) -> bool,
}

/// The rules, the most particular first.
pub const RULES: &[Rule] = &[
    // The driver does not start.
    Rule {
        name: "stub-library",
        symptom: "`is the CUDA toolkit's stub library`",
        cause: "A toolkit's stubs folder on the loader's path hides the driver.",
        remedy: "Take the folder out of LD_LIBRARY_PATH and of the loader's configuration (/etc/ld.so.conf.d).",
        matches: |finding, environment| {
            let stub = environment.library.as_ref().is_some_and(|library| library.stub);
            of(finding, &["driver"])
                && (stub || says(finding, "stub library") || code(finding) == Some(code::STUB_LIBRARY))
        },
    },
    Rule {
        name: "library-broken",
        symptom: "`no CUDA driver library loads`, and a file of that name is there",
        cause: "There is a driver library and it can't be loaded: it is cut off, of another architecture, or lacks a \
                library that it needs.",
        remedy: "Look with `ldd` at the file that the error names, and install the driver again; in a container, let \
                 the runtime bring the driver's files.",
        matches: |finding, _| {
            says(finding, NO_LIBRARY) && finding.error.as_ref().is_some_and(|error| !error.is_library_missing())
        },
    },
    Rule {
        name: "library-not-found",
        symptom: "`no CUDA driver library loads`, and the device nodes of a GPU are there",
        cause: "The GPU's device nodes are here, and the loader does not find the driver library.",
        remedy: "Name its folder in LD_LIBRARY_PATH, or run `ldconfig`; in a container NVIDIA_DRIVER_CAPABILITIES must \
                 include compute.",
        matches: |finding, environment| no_library(finding) && environment.nodes.iter().any(is_gpu),
    },
    Rule {
        name: "library-missing-wsl",
        symptom: "`no CUDA driver library loads`, on WSL2",
        cause: "WSL2 takes its driver library from Windows, in /usr/lib/wsl/lib, and it is not found there.",
        remedy: "Install NVIDIA's driver in Windows and none in Linux, then run `wsl --update` and `wsl --shutdown`.",
        matches: |finding, environment| no_library(finding) && environment.wsl,
    },
    Rule {
        name: "library-missing-container",
        symptom: "`no CUDA driver library loads`, in a container",
        cause: "The container was started without the driver library, which comes from the machine and not from the \
                image.",
        remedy: "Start it with the GPU: `--gpus all` for Docker, a limit of nvidia.com/gpu for Kubernetes, `--device \
                 nvidia.com/gpu=all` for podman; NVIDIA_DRIVER_CAPABILITIES must include compute.",
        matches: |finding, environment| no_library(finding) && environment.container.is_some(),
    },
    Rule {
        name: "library-missing",
        symptom: "`no CUDA driver library loads`",
        cause: "No NVIDIA driver is installed, or its library libcuda.so.1 is not on the loader's path.",
        remedy: "Install NVIDIA's driver, or run `ldconfig` if it is installed.",
        matches: |finding, _| no_library(finding),
    },
    Rule {
        name: "old-driver",
        symptom: "`the driver is too old for this`",
        cause: "The driver library lacks a function, as it is older than that function.",
        remedy: "Update the driver: sharing by file descriptor needs CUDA 11.4 or newer, host memory 12.2, fabric \
                 handles 12.3.",
        matches: |finding, _| says(finding, "the driver is too old for this"),
    },
    Rule {
        name: "fabric-manager",
        symptom: "`CUDA_ERROR_SYSTEM_NOT_READY (802)`",
        cause: "The machine has NVSwitches, and NVIDIA's Fabric Manager has not set them up.",
        remedy: "Start nvidia-fabricmanager, of exactly the driver's version, and look at its log and at `nvidia-smi \
                 -q` (Fabric State must be Completed).",
        matches: |finding, _| code(finding) == Some(802),
    },
    Rule {
        name: "version-mismatch",
        symptom: "`CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)`",
        cause: "The driver library and the kernel module are of different versions, often after an update.",
        remedy: "Reboot or reload the module; in a container, use the machine's library and none that the image \
                 brought.",
        matches: |finding, _| code(finding) == Some(code::SYSTEM_DRIVER_MISMATCH),
    },
    Rule {
        name: "compatibility-library",
        symptom: "`CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE (804)`",
        cause: "A forward-compatibility library (cuda-compat) is loaded, and this GPU is not one that it works on.",
        remedy: "Take the compat folder out of LD_LIBRARY_PATH, and update the machine's driver instead.",
        matches: |finding, _| code(finding) == Some(804),
    },
    Rule {
        name: "nodes-denied",
        symptom: "the driver does not start, and a node of it in /dev is not open to this user",
        cause: "This process may not open the driver's device nodes: their owner or mode, or the container's list of \
                devices, forbids it.",
        remedy: "Join the group that owns the nodes, or give the container the devices by its runtime rather than by \
                 hand.",
        matches: |finding, environment| {
            of(finding, &["driver"]) && errs(finding) && environment.nodes.iter().any(|node| !node.usable)
        },
    },
    Rule {
        name: "devices-hidden",
        symptom: "`the CUDA driver finds no device`, with `CUDA_VISIBLE_DEVICES` set",
        cause: "CUDA_VISIBLE_DEVICES leaves no device: it is empty, or the first it names does not exist here.",
        remedy: "Unset it, or name devices by the UUIDs of `nvidia-smi -L`.",
        matches: |finding, environment| no_device(finding) && environment.visible_devices.is_some(),
    },
    Rule {
        name: "no-device-in-container",
        symptom: "`the CUDA driver finds no device`, in a container without `/dev/nvidia0`",
        cause: "The container has the driver's library and no GPU.",
        remedy: "Start it with the GPU: `--gpus all` for Docker, a limit of nvidia.com/gpu for Kubernetes.",
        matches: |finding, environment| {
            no_device(finding) && environment.container.is_some() && !environment.nodes.iter().any(is_gpu)
        },
    },
    Rule {
        name: "no-device",
        symptom: "`the CUDA driver finds no device`",
        cause: "The driver sees no GPU: there is none, it fell off the bus, or another driver (nouveau, vfio) holds \
                it.",
        remedy: "Look at `nvidia-smi -L`, at `lspci -k` for the driver in use, and at `dmesg` for NVRM and Xid.",
        matches: |finding, _| no_device(finding),
    },
    Rule {
        name: "no-uvm-node",
        symptom: "`cuInit failed: CUDA_ERROR_UNKNOWN (999)`, without `/dev/nvidia-uvm`",
        cause: "The kernel module nvidia-uvm is not loaded, or its node is not here.",
        remedy: "Run `nvidia-modprobe -u -c 0` as root; a container needs the node /dev/nvidia-uvm too.",
        matches: |finding, environment| {
            broken(finding)
                && !environment.wsl
                && !environment.nodes.iter().any(|node| node.path.ends_with("/nvidia-uvm"))
        },
    },
    Rule {
        name: "other-proc",
        symptom: "`cuInit failed: CUDA_ERROR_OPERATING_SYSTEM (304)`, in a PID namespace",
        cause: "/proc is of another PID namespace than this process, and the driver does not find itself there.",
        remedy: "Mount a /proc of its own in the namespace, as `unshare --mount-proc` does.",
        matches: |finding, environment| {
            of(finding, &["driver"]) && code(finding) == Some(304) && environment.own_proc == Some(false)
        },
    },
    Rule {
        name: "driver-broken",
        symptom: "`cuInit failed: CUDA_ERROR_UNKNOWN (999)`",
        cause: "The driver is there and its kernel module is in a bad state, often after a suspend or a GPU error.",
        remedy: "Look at `dmesg` for NVRM and Xid, then reload the module nvidia_uvm, reset the GPU or reboot.",
        matches: |finding, _| broken(finding),
    },
    Rule {
        name: "driver-hangs",
        symptom: "the probe `driver` reaches its deadline",
        cause: "The driver does not finish initialising: a GPU is sick, or many processes start at once and wait in \
                line.",
        remedy: "See whether `nvidia-smi` answers, look at `dmesg` for NVRM and Xid, and try again with a longer \
                 --timeout.",
        matches: |finding, _| of(finding, &["driver"]) && kind(finding) == Some("timeout"),
    },
    // The process may not hold what it needs.
    Rule {
        name: "few-descriptors",
        symptom: "`open files are needed`, `descriptors were cut off`, `Too many open files`",
        cause: "This process may not have enough files open, and each shared allocation is a descriptor.",
        remedy: "Raise `ulimit -n` (LimitNOFILE of a systemd unit, --ulimit nofile of Docker), and close descriptors \
                 once they are imported.",
        matches: |finding, _| {
            of(finding, &["descriptors"])
                || ["Too many open files", "descriptors were cut off", "open files are needed"]
                    .iter()
                    .any(|words| says(finding, words))
        },
    },
    Rule {
        name: "mps",
        symptom: "`CUDA_ERROR_MPS_...` (805 to 810)",
        cause: "The process is a client of MPS, and its server is not there, is full, or ended.",
        remedy: "Start nvidia-cuda-mps-control for this user, or unset CUDA_MPS_PIPE_DIRECTORY to go without.",
        matches: |finding, _| matches!(code(finding), Some(805..=810)),
    },
    Rule {
        name: "exclusive",
        symptom: "`CUDA_ERROR_DEVICE_UNAVAILABLE (46)`, or 201 or 999, with a compute mode other than default",
        cause: "The GPU admits one process, or none, as its compute mode is not the default, or another holds it.",
        remedy: "Run `nvidia-smi -c DEFAULT` as root, or end the process that `nvidia-smi` shows on that GPU.",
        matches: |finding, _| {
            let exclusive = finding.figures.get("compute_mode").is_some_and(|mode| mode.as_u64() != Some(0));
            code(finding) == Some(46)
                || exclusive && matches!(code(finding), Some(code::INVALID_CONTEXT | code::UNKNOWN))
        },
    },
    // There is too little of something, whatever surrounds the process.
    Rule {
        name: "no-addresses",
        symptom: "`cuMemAddressReserve failed: CUDA_ERROR_OUT_OF_MEMORY (2)`",
        cause: "The process has no range of addresses left: `ulimit -v` bounds them, or reservations were never \
                freed.",
        remedy: "Run `ulimit -v unlimited`, reserve exactly what is mapped, and free a reservation once it is \
                 unmapped.",
        matches: |finding, _| calls(finding, "cuMemAddressReserve") && code(finding) == Some(code::OUT_OF_MEMORY),
    },
    Rule {
        name: "out-of-memory",
        symptom: "`CUDA_ERROR_OUT_OF_MEMORY (2)`, `bytes are more than the`",
        cause: "The GPU has less free memory than was asked for, or the process has run out of something else that \
                is told the same way.",
        remedy: "See in `nvidia-smi` who holds memory and free some; if there is enough, raise `ulimit -n` and the \
                 container's memory limit.",
        matches: |finding, _| code(finding) == Some(code::OUT_OF_MEMORY) || says(finding, "bytes are more than the"),
    },
    // What surrounds the process changes what the driver can do.
    Rule {
        name: "wsl-rdma",
        symptom: "`cuMemSetAccess failed: CUDA_ERROR_UNKNOWN (999)`, on WSL2",
        cause: "On WSL2 memory that was asked to be capable of GPUDirect RDMA can be created and not be used.",
        remedy: "Do not ask for gpuDirectRDMACapable on WSL2.",
        matches: |finding, environment| {
            environment.wsl && calls(finding, "cuMemSetAccess") && code(finding) == Some(code::UNKNOWN)
        },
    },
    Rule {
        name: "wsl-sharing",
        symptom: "`INVALID_VALUE (1)`, `INVALID_HANDLE (400)` or `NOT_SUPPORTED (801)`, on WSL2",
        cause: "The driver of WSL2 does not share memory between processes, even where its attributes say so.",
        remedy: "Run on Linux itself, or keep the work in one process.",
        matches: |finding, environment| {
            let refused = [code::INVALID_VALUE, code::INVALID_HANDLE, code::NOT_SUPPORTED];
            environment.wsl
                && (of(finding, SHARING) || of(finding, &["dma-buf", "fabric", "peer", "memory"]))
                && (code(finding).is_some_and(|code| refused.contains(&code)) || finding.status == Status::Unsupported)
        },
    },
    Rule {
        name: "gvisor-confidential",
        symptom: "a probe reaches its deadline, in gVisor on a confidential machine",
        cause: "In gVisor on a confidential machine the driver was seen to retry without end when it makes a \
                context.",
        remedy: "Use a newer runsc, or another runtime on confidential machines.",
        matches: |finding, environment| {
            environment.gvisor && environment.confidential.is_some() && kind(finding) == Some("timeout")
        },
    },
    Rule {
        name: "gvisor-export",
        symptom: "`cuMemExportToShareableHandle` fails, in gVisor",
        cause: "gVisor passes on only the driver's requests that it knows, and lacks one that an export makes on \
                machines with NVSwitches.",
        remedy: "Use a newer runsc, or another runtime for this container.",
        matches: |finding, environment| environment.gvisor && calls(finding, "cuMemExportToShareableHandle"),
    },
    Rule {
        name: "confidential",
        symptom: "`CUDA_ERROR_NOT_SUPPORTED (801)`, on a confidential machine",
        cause: "With confidential computing the GPU does not reach the host's memory, and what relies on that is \
                refused.",
        remedy: "Share device memory instead, or switch confidential computing off.",
        matches: |finding, environment| {
            environment.confidential.is_some() && code(finding) == Some(code::NOT_SUPPORTED)
        },
    },
    Rule {
        name: "mig",
        symptom: "`peer` is unsupported, or it, `legacy` or `pool` fails with 101, 217 or 801, with MIG in use",
        cause: "The instances of a partitioned GPU (MIG) are isolated: none reaches another's memory.",
        remedy: "Give both processes the same instance, or switch MIG off.",
        matches: |finding, environment| {
            let apart = [code::INVALID_DEVICE, code::PEER_ACCESS_UNSUPPORTED, code::NOT_SUPPORTED];
            let refused = code(finding).is_some_and(|code| apart.contains(&code));
            environment.mig
                && (refused && of(finding, &["peer", "legacy", "pool"])
                    || of(finding, &["peer"]) && finding.status == Status::Unsupported)
        },
    },
    // Fabric handles.
    Rule {
        name: "fabric-no-channel",
        symptom: "`CUDA_ERROR_NOT_PERMITTED (800)` of `fabric`, without a node in `/dev/nvidia-caps-imex-channels`",
        cause: "Fabric handles go through an IMEX channel, and this process has no channel's node.",
        remedy: "Create one (the module's option NVreg_CreateImexChannel0=1, or nvidia-modprobe), give it to the \
                 container, and run nvidia-imex on each node.",
        matches: |finding, environment| fabric_denied(finding) && environment.imex_channels.is_empty(),
    },
    Rule {
        name: "fabric-channel-denied",
        symptom: "`CUDA_ERROR_NOT_PERMITTED (800)` of `fabric`, with a channel's node that is not open to this user",
        cause: "There is an IMEX channel, and this process may not open its node.",
        remedy: "Give this user the node's group, or have the container's runtime add the channel.",
        matches: |finding, environment| {
            fabric_denied(finding) && !environment.imex_channels.iter().any(|node| node.usable)
        },
    },
    Rule {
        name: "fabric-other-channel",
        symptom: "`CUDA_ERROR_NOT_PERMITTED (800)` of `fabric`, with a channel's node",
        cause: "Either nvidia-imex does not run, or the two processes use different channels or are different users.",
        remedy: "Look at `nvidia-imex-ctl -N` and its log, and give both processes the same channel and user.",
        matches: |finding, _| fabric_denied(finding),
    },
    Rule {
        name: "fabric-export",
        symptom: "`cuMemExportToShareableHandle failed: CUDA_ERROR_INVALID_VALUE (1)` of `fabric`",
        cause: "The driver creates memory for fabric handles on a GPU that is in no fabric, and fails at the export \
                only.",
        remedy: "Fall back to file descriptors after a trial of create, export and import, whatever the attribute \
                 says.",
        matches: |finding, _| {
            of(finding, &["fabric"])
                && calls(finding, "cuMemExportToShareableHandle")
                && code(finding) == Some(code::INVALID_VALUE)
        },
    },
    Rule {
        name: "fabric-unsupported",
        symptom: "`fabric` is unsupported",
        cause: "Fabric handles need GPUs that an NVLink fabric joins, and a driver of CUDA 12.3 or newer.",
        remedy: "Nothing is wrong unless memory is to be shared between machines: within one, file descriptors do.",
        matches: |finding, environment| unsupported(finding, environment, &["fabric"]),
    },
    // Between two devices.
    Rule {
        name: "peer-set-access",
        symptom: "`cuMemSetAccess failed: CUDA_ERROR_INVALID_VALUE (1)` of `peer`",
        cause: "The driver does not give that device access to the other's memory, whatever it claims of peer \
                access.",
        remedy: "Ask cuDeviceCanAccessPeer both ways, see `nvidia-smi topo -p2p r`, and copy through the host where \
                 it is not to be had.",
        matches: |finding, _| {
            of(finding, &["peer"]) && calls(finding, "cuMemSetAccess") && code(finding) == Some(code::INVALID_VALUE)
        },
    },
    Rule {
        name: "no-peer-access",
        symptom: "`CUDA_ERROR_PEER_ACCESS_UNSUPPORTED (217)`, or `peer` is unsupported",
        cause: "The two GPUs have no way to each other's memory: no NVLink, or a PCIe path that does not let peers \
                through.",
        remedy: "Choose GPUs that `nvidia-smi topo -p2p r` shows as OK, or copy through the host; on PCIe look at \
                 the IOMMU and ACS.",
        matches: |finding, environment| {
            code(finding) == Some(code::PEER_ACCESS_UNSUPPORTED) || unsupported(finding, environment, &["peer"])
        },
    },
    // Import.
    Rule {
        name: "gpu-hidden-by-variable",
        symptom: "`CUDA_ERROR_INVALID_DEVICE (101)` at an import, with `CUDA_VISIBLE_DEVICES` set",
        cause: "The GPU that owns the memory is not among those that CUDA_VISIBLE_DEVICES leaves the importer.",
        remedy: "Let both processes see that GPU, and compare UUIDs: ordinals are counted among what each one sees.",
        matches: |finding, environment| hidden(finding) && environment.visible_devices.is_some(),
    },
    Rule {
        name: "gpu-hidden",
        symptom: "`CUDA_ERROR_INVALID_DEVICE (101)` at an import",
        cause: "The importer does not see the GPU that owns the memory, as when each container was given another.",
        remedy: "Give both containers the same GPU, by UUID (--gpus device=UUID, or a shared resource claim).",
        matches: |finding, _| hidden(finding),
    },
    // Host memory by NUMA node.
    Rule {
        name: "host-numa-crash",
        symptom: "`host-numa` is killed by a signal",
        cause: "Drivers before r595 were seen to crash on host memory where the kernel refuses them NUMA calls.",
        remedy: "Update the driver, or give the container --cap-add SYS_NICE.",
        matches: |finding, environment| {
            let major = environment.module.as_deref().and_then(|module| module.split('.').next()?.parse::<u32>().ok());
            let crashed = kind(finding) == Some("signal") && !says(finding, "SIGKILL");
            of(finding, &["host-numa"]) && crashed && major.is_none_or(|major| major < 595)
        },
    },
    Rule {
        name: "host-numa-filtered",
        symptom: "`cuMemCreate` of `host-numa` fails in a container, or under a seccomp filter",
        cause: "The container's seccomp filter refuses NUMA calls such as get_mempolicy, which the driver makes for \
                host memory.",
        remedy: "Give the container --cap-add SYS_NICE, or a seccomp profile that allows them.",
        matches: |finding, environment| {
            let filtered = environment.seccomp.map_or(environment.container.is_some(), |mode| mode == 2);
            of(finding, &["host-numa"]) && filtered && calls(finding, "cuMemCreate") && finding.status == Status::Failed
        },
    },
    Rule {
        name: "host-numa-unsupported",
        symptom: "`host-numa` is unsupported",
        cause: "The driver is older than host memory by NUMA node (CUDA 12.2), or the GPU can't use it.",
        remedy: "Update the driver, or share device memory.",
        matches: |finding, environment| unsupported(finding, environment, &["host-numa"]),
    },
    // Events.
    Rule {
        name: "event-without-shm",
        symptom: "`event` fails, and `/dev/shm` is missing or not writable",
        cause: "The driver keeps an inter-process event in a file of /dev/shm, and this process can't make one.",
        remedy: "Mount a tmpfs on /dev/shm with mode 1777, and let both containers share it.",
        matches: |finding, environment| {
            let usable = |folder: SharedMemory| folder.exists && folder.writable;
            of(finding, &["event"]) && errs(finding) && environment.shared_memory.is_some_and(|folder| !usable(folder))
        },
    },
    Rule {
        name: "event-not-shared",
        symptom: "`CUDA_ERROR_MAP_FAILED (205)` of `event`",
        cause: "An inter-process event lies in a file of /dev/shm, and the ends are different users or see different \
                /dev/shm.",
        remedy: "Run both ends as one user with one /dev/shm (Docker: --ipc), or do without: synchronise the stream, \
                 then send a message.",
        matches: |finding, _| of(finding, &["event"]) && code(finding) == Some(205),
    },
    // What else a device may lack.
    Rule {
        name: "dma-buf-closed-module",
        symptom: "`dma-buf` is unsupported, with NVIDIA's closed kernel module",
        cause: "Only NVIDIA's open kernel modules export memory as dma-buf, on Linux 5.12 or newer.",
        remedy: "Install the open modules, or let the network card use nvidia-peermem.",
        matches: |finding, environment| {
            environment.module_open == Some(false)
                && of(finding, &["dma-buf"])
                && (finding.status == Status::Unsupported || code(finding) == Some(code::NOT_SUPPORTED))
        },
    },
    Rule {
        name: "pool-unsupported",
        symptom: "`pool` is unsupported",
        cause: "The GPU or its driver has no memory pools that can be shared by file descriptor.",
        remedy: "Share allocations of virtual memory management instead, which need no pool.",
        matches: |finding, environment| unsupported(finding, environment, &["pool"]),
    },
    Rule {
        name: "no-vmm",
        symptom: "`memory`, `export` or `round-trip` is unsupported",
        cause: "The GPU or its driver does not offer virtual memory management with file descriptors, as on some \
                virtual GPUs.",
        remedy: "Look at the probes `legacy` and `pool` for another way, or use a driver and GPU that offer it.",
        matches: |finding, environment| {
            let claimed_not = kind(finding) == Some("unsupported") && code(finding).is_none();
            let lacking = claimed_not && (of(finding, VMM) || of(finding, &["import", "round-trip"]))
                || finding.status == Status::Unsupported && of(finding, &["memory", "export"]);
            lacking && environment.library.is_some()
        },
    },
    // Memory.
    Rule {
        name: "memory-held",
        symptom: "`memory-returned` fails: less is free than before",
        cause: "Shared memory is freed when the last descriptor, handle or mapping of it goes, in whichever process, \
                also a descriptor that no one has yet read from a socket; or another process took memory meanwhile.",
        remedy: "Run again on a GPU that nobody else uses; in a program close each descriptor once it is imported, \
                 and look for holders with `ls -l /proc/*/fd`.",
        matches: |finding, _| of(finding, &["memory-returned"]) && !errs(finding),
    },
    // Whatever the probe.
    Rule {
        name: "killed",
        symptom: "a probe is ended by `SIGKILL`",
        cause: "Something killed the probe's process, most often the kernel as memory ran out, on the machine or in \
                the container's limit.",
        remedy: "Look at `dmesg` for oom-kill, and raise the container's memory limit: a process with CUDA takes \
                 some 150 MiB.",
        matches: |finding, _| kind(finding) == Some("signal") && says(finding, "SIGKILL"),
    },
    Rule {
        name: "crashed",
        symptom: "a probe is ended by another signal",
        cause: "The driver crashed the probe's process, which a driver should never do.",
        remedy: "Look at `dmesg` for NVRM and Xid, update the driver, and report it with the output of `vmmfd doctor \
                 --json`.",
        matches: |finding, _| kind(finding) == Some("signal"),
    },
    Rule {
        name: "hangs",
        symptom: "a probe reaches its deadline",
        cause: "A call of the driver, or the other process, did not come back in time.",
        remedy: "Look at `dmesg` for NVRM and Xid and at what else runs on the GPU, and try again with a longer \
                 --timeout.",
        matches: |finding, _| kind(finding) == Some("timeout"),
    },
];

/// The probes of virtual memory management that are not required: they lack what those lack.
const VMM: &[&str] = &[
    "attributes",
    "granularity",
    "aliases",
    "read-only-copy",
    "read-only-store",
    "wrong-descriptor",
    "exporter-killed",
    "memory-returned",
    "export-cost",
];

/// The probes in which one process, or one handle, uses memory of another.
const SHARING: &[&str] = &[
    "export",
    "import",
    "round-trip",
    "wrong-descriptor",
    "exporter-killed",
    "memory-returned",
    "export-cost",
    "read-only-copy",
    "read-only-store",
    "host-numa",
    "pool",
    "legacy",
    "event",
];

/// The rule that explains a finding, if one does: the first that matches. What is `ok` or was skipped has none.
pub fn find(finding: &Finding, environment: &Environment) -> Option<&'static Rule> {
    if !matches!(finding.status, Status::Failed | Status::Unsupported) {
        return None;
    }
    RULES.iter().find(|rule| (rule.matches)(finding, environment))
}

/// Gives a finding that is not `ok` the cause and the remedy of the first rule that matches.
pub fn explain(finding: &mut Finding, environment: &Environment) {
    if let Some(rule) = find(finding, environment) {
        finding.cause = Some(rule.cause.to_owned());
        finding.remedy = Some(rule.remedy.to_owned());
        finding.rule = Some(rule.name.to_owned());
    }
}

fn of(finding: &Finding, probes: &[&str]) -> bool {
    probes.contains(&finding.probe.as_str())
}

fn errs(finding: &Finding) -> bool {
    finding.error.is_some()
}

fn code(finding: &Finding) -> Option<u32> {
    finding.error.as_ref()?.code
}

fn kind(finding: &Finding) -> Option<&str> {
    Some(&finding.error.as_ref()?.kind)
}

fn says(finding: &Finding, words: &str) -> bool {
    finding.error.as_ref().is_some_and(|error| error.message.contains(words))
}

fn calls(finding: &Finding, call: &str) -> bool {
    finding.error.as_ref().is_some_and(|error| error.call.as_deref() == Some(call))
}

fn no_library(finding: &Finding) -> bool {
    says(finding, NO_LIBRARY)
}

fn no_device(finding: &Finding) -> bool {
    of(finding, &["driver"]) && (code(finding) == Some(code::NO_DEVICE) || says(finding, "finds no device"))
}

fn broken(finding: &Finding) -> bool {
    of(finding, &["driver"]) && code(finding) == Some(code::UNKNOWN)
}

fn fabric_denied(finding: &Finding) -> bool {
    of(finding, &["fabric"]) && code(finding) == Some(code::NOT_PERMITTED)
}

fn hidden(finding: &Finding) -> bool {
    let imports = of(finding, SHARING) || calls(finding, "cuMemImportFromShareableHandle");
    imports && code(finding) == Some(code::INVALID_DEVICE)
}

/// Whether a GPU's driver lacks it: host memory lacks most of it too, which says nothing of a GPU.
fn unsupported(finding: &Finding, environment: &Environment, probes: &[&str]) -> bool {
    of(finding, probes) && finding.status == Status::Unsupported && environment.library.is_some()
}

/// Whether a node is a GPU's own, such as `/dev/nvidia0`.
fn is_gpu(node: &Node) -> bool {
    let number = node.path.strip_prefix("/dev/nvidia");
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use std::{
        collections::{BTreeMap, HashSet},
        io,
    };

    use super::*;
    use crate::{
        error::{Error, LoadError, MemoryError, ProtocolError},
        tools::doctor::{environment::Library, report::Seen},
    };

    fn finding(probe: &str, status: Status, error: Option<Seen>) -> Finding {
        Finding {
            probe: probe.to_owned(),
            status,
            us: None,
            figures: BTreeMap::new(),
            error,
            meaning: String::new(),
            cause: None,
            remedy: None,
            rule: None,
        }
    }

    /// A driver's call that failed.
    fn refused(probe: &str, call: &str, code: u32) -> Finding {
        let message = format!("{call} failed: CUDA_ERROR ({code})");
        let (call, kind) = (Some(call.to_owned()), "driver".to_owned());
        finding(probe, Status::Failed, Some(Seen { call, code: Some(code), name: None, kind, message }))
    }

    fn said(probe: &str, kind: &str, message: &str) -> Finding {
        let (kind, message) = (kind.to_owned(), message.to_owned());
        finding(probe, Status::Failed, Some(Seen { call: None, code: None, name: None, kind, message }))
    }

    fn lacking(probe: &str) -> Finding {
        finding(probe, Status::Unsupported, None)
    }

    fn with_mode(mut finding: Finding, mode: u32) -> Finding {
        finding.figures.insert("compute_mode".to_owned(), mode.into());
        finding
    }

    /// A machine where nothing stands in the way.
    fn plain() -> Environment {
        let node = |path: &str, usable| Node { path: path.to_owned(), mode: "0666".to_owned(), uid: 0, gid: 0, usable };
        let paths = ["/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"];
        Environment {
            library: Some(Library { path: "/lib/libcuda.so.1".to_owned(), file: None, stub: false }),
            nodes: paths.map(|path| node(path, true)).into(),
            imex_channels: vec![node("/dev/nvidia-caps-imex-channels/channel0", true)],
            shared_memory: Some(SharedMemory { exists: true, writable: true, size: None, free: None }),
            module_open: Some(true),
            seccomp: Some(0),
            ..Environment::default()
        }
    }

    fn where_(change: impl FnOnce(&mut Environment)) -> Environment {
        let mut environment = plain();
        change(&mut environment);
        environment
    }

    fn container() -> Environment {
        where_(|here| here.container = Some("docker".to_owned()))
    }

    fn visible() -> Environment {
        where_(|here| here.visible_devices = Some("1".to_owned()))
    }

    fn wsl() -> Environment {
        where_(|here| here.wsl = true)
    }

    fn gvisor() -> Environment {
        where_(|here| here.gvisor = true)
    }

    fn confidential() -> Environment {
        where_(|here| here.confidential = Some("tdx".to_owned()))
    }

    /// What a rule sees.
    type Sight = (Finding, Environment);

    /// Of each rule: what it explains, and the nearest that it does not.
    fn cases() -> Vec<(&'static str, Sight, Sight)> {
        const EXPORT: &str = "cuMemExportToShareableHandle";
        const IMPORT: &str = "cuMemImportFromShareableHandle";
        const GONE: &str = "no CUDA driver library loads: libcuda.so.1: cannot open shared object file: No such file \
                            or directory";
        let no_library = || said("driver", "unsupported", GONE);
        let cut_off =
            || said("driver", "unsupported", "no CUDA driver library loads: /lib/libcuda.so.1: file too short");
        let no_device = || said("driver", "unsupported", "the CUDA driver finds no device");
        let timeout = |probe| said(probe, "timeout", "no answer within 5s");
        let segfault = |probe| said(probe, "signal", "the probe's process was ended by SIGSEGV");
        let closed = || where_(|here| here.module_open = Some(false));
        let mig = || where_(|here| here.mig = true);
        let no_shm = || where_(|here| here.shared_memory.as_mut().unwrap().exists = false);
        let no_gpu_node = |mut here: Environment| {
            here.nodes.remove(0);
            here
        };
        vec![
            (
                "stub-library",
                (said("driver", "unsupported", "libcuda.so is the CUDA toolkit's stub library, not a driver"), plain()),
                (refused("driver", "cuInit", 999), plain()),
            ),
            (
                "stub-library",
                (refused("driver", "cuInit", 999), where_(|here| here.library.as_mut().unwrap().stub = true)),
                (timeout("import"), where_(|here| here.library.as_mut().unwrap().stub = true)),
            ),
            ("library-broken", (cut_off(), container()), (no_library(), container())),
            ("library-not-found", (no_library(), plain()), (no_library(), no_gpu_node(plain()))),
            ("library-missing-wsl", (no_library(), no_gpu_node(wsl())), (no_library(), no_gpu_node(plain()))),
            (
                "library-missing-container",
                (no_library(), no_gpu_node(container())),
                (no_library(), no_gpu_node(plain())),
            ),
            ("library-missing", (no_library(), no_gpu_node(plain())), (no_device(), plain())),
            (
                "old-driver",
                (said("pool", "unsupported", "no cuMemPoolCreate: the driver is too old for this"), plain()),
                (said("pool", "unsupported", "host lacks memory pools"), plain()),
            ),
            (
                "fabric-manager",
                (refused("driver", "cuInit", 802), plain()),
                (refused("driver", "cuInit", 801), plain()),
            ),
            (
                "version-mismatch",
                (refused("driver", "cuInit", 803), plain()),
                (refused("driver", "cuInit", 802), plain()),
            ),
            (
                "compatibility-library",
                (refused("driver", "cuInit", 804), plain()),
                (refused("driver", "cuInit", 803), plain()),
            ),
            (
                "nodes-denied",
                (no_device(), where_(|here| here.nodes[0].usable = false)),
                (refused("import", IMPORT, 999), where_(|here| here.nodes[0].usable = false)),
            ),
            ("devices-hidden", (no_device(), visible()), (no_device(), plain())),
            ("no-device-in-container", (no_device(), no_gpu_node(container())), (no_device(), container())),
            ("no-device", (no_device(), no_gpu_node(plain())), (refused("memory", "cuMemCreate", 100), plain())),
            (
                "no-uvm-node",
                (refused("driver", "cuInit", 999), where_(|here| drop(here.nodes.pop()))),
                (refused("driver", "cuInit", 999), plain()),
            ),
            (
                "other-proc",
                (refused("driver", "cuInit", 304), where_(|here| here.own_proc = Some(false))),
                (refused("driver", "cuInit", 304), plain()),
            ),
            (
                "driver-broken",
                (refused("driver", "cuInit", 999), plain()),
                (refused("memory", "cuCtxSynchronize", 999), plain()),
            ),
            ("driver-hangs", (timeout("driver"), plain()), (timeout("memory"), plain())),
            (
                "few-descriptors",
                (finding("descriptors", Status::Failed, None), plain()),
                (finding("host-memory", Status::Failed, None), plain()),
            ),
            (
                "few-descriptors",
                (said("round-trip", "system", "cannot make a socket: Too many open files (os error 24)"), plain()),
                (said("round-trip", "system", "cannot make a socket: Permission denied (os error 13)"), plain()),
            ),
            ("mps", (refused("driver", "cuInit", 807), plain()), (refused("driver", "cuInit", 804), plain())),
            (
                "exclusive",
                (refused("round-trip", "cuDevicePrimaryCtxRetain", 46), plain()),
                (refused("round-trip", "cuDevicePrimaryCtxRetain", 201), plain()),
            ),
            (
                "exclusive",
                (with_mode(refused("round-trip", "cuDevicePrimaryCtxRetain", 201), 3), plain()),
                (with_mode(refused("round-trip", "cuDevicePrimaryCtxRetain", 201), 0), plain()),
            ),
            (
                "wsl-rdma",
                (refused("dma-buf", "cuMemSetAccess", 999), wsl()),
                (refused("dma-buf", "cuMemSetAccess", 999), plain()),
            ),
            (
                "wsl-sharing",
                (refused("legacy", "cuIpcOpenMemHandle", 400), wsl()),
                (refused("legacy", "cuIpcOpenMemHandle", 2), wsl()),
            ),
            ("wsl-sharing", (lacking("export"), wsl()), (refused("export", EXPORT, 1), plain())),
            (
                "gvisor-confidential",
                (timeout("memory"), where_(|here| (here.gvisor, here.confidential) = (true, Some("tdx".to_owned())))),
                (timeout("memory"), gvisor()),
            ),
            ("gvisor-export", (refused("export", EXPORT, 1), gvisor()), (refused("export", EXPORT, 1), plain())),
            (
                "confidential",
                (refused("host-numa", "cuMemCreate", 801), confidential()),
                (refused("host-numa", "cuMemCreate", 1), confidential()),
            ),
            ("mig", (refused("peer", "cuMemSetAccess", 217), mig()), (refused("round-trip", "cuMemMap", 217), mig())),
            ("mig", (lacking("peer"), mig()), (lacking("pool"), mig())),
            (
                "mig",
                (refused("legacy", "cuIpcOpenMemHandle_v2", 801), mig()),
                (refused("legacy", "cuMemAlloc_v2", 2), mig()),
            ),
            ("mig", (refused("pool", "cuMemPoolCreate", 101), mig()), (refused("event", "cuEventCreate", 101), mig())),
            (
                "fabric-no-channel",
                (refused("fabric", "cuMemCreate", 800), where_(|here| here.imex_channels.clear())),
                (refused("memory", "cuMemCreate", 800), where_(|here| here.imex_channels.clear())),
            ),
            (
                "fabric-channel-denied",
                (refused("fabric", "cuMemCreate", 800), where_(|here| here.imex_channels[0].usable = false)),
                (refused("fabric", "cuMemCreate", 1), where_(|here| here.imex_channels[0].usable = false)),
            ),
            (
                "fabric-other-channel",
                (refused("fabric", IMPORT, 800), plain()),
                (refused("import", IMPORT, 800), plain()),
            ),
            ("fabric-export", (refused("fabric", EXPORT, 1), plain()), (refused("export", EXPORT, 1), plain())),
            (
                "fabric-unsupported",
                (lacking("fabric"), plain()),
                (lacking("fabric"), where_(|here| here.library = None)),
            ),
            (
                "peer-set-access",
                (refused("peer", "cuMemSetAccess", 1), plain()),
                (refused("peer", "cuMemMap", 1), plain()),
            ),
            (
                "no-peer-access",
                (refused("peer", "cuMemSetAccess", 217), plain()),
                (refused("peer", "cuMemSetAccess", 2), plain()),
            ),
            ("no-peer-access", (lacking("peer"), plain()), (finding("peer", Status::Skipped, None), plain())),
            (
                "gpu-hidden-by-variable",
                (refused("import", IMPORT, 101), visible()),
                (refused("import", IMPORT, 101), plain()),
            ),
            (
                "gpu-hidden",
                (refused("round-trip", IMPORT, 101), container()),
                (refused("memory", "cuMemCreate", 101), container()),
            ),
            ("host-numa-crash", (segfault("host-numa"), plain()), (segfault("memory"), plain())),
            (
                "host-numa-crash",
                (segfault("host-numa"), where_(|here| here.module = Some("580.159.04".to_owned()))),
                (segfault("host-numa"), where_(|here| here.module = Some("595.58.03".to_owned()))),
            ),
            (
                "host-numa-filtered",
                (refused("host-numa", "cuMemCreate", 1), where_(|here| here.seccomp = Some(2))),
                (refused("host-numa", "cuMemCreate", 1), plain()),
            ),
            (
                "host-numa-filtered",
                (
                    refused("host-numa", "cuMemCreate", 1),
                    where_(|here| (here.container, here.seccomp) = (Some("docker".to_owned()), None)),
                ),
                (refused("host-numa", "cuMemCreate", 1), container()),
            ),
            (
                "host-numa-unsupported",
                (lacking("host-numa"), plain()),
                (finding("host-numa", Status::Skipped, None), plain()),
            ),
            (
                "event-without-shm",
                (refused("event", "cuIpcGetEventHandle", 304), no_shm()),
                (refused("event", "cuIpcGetEventHandle", 304), plain()),
            ),
            (
                "event-without-shm",
                (
                    refused("event", "cuIpcOpenEventHandle", 205),
                    where_(|here| here.shared_memory.as_mut().unwrap().writable = false),
                ),
                (refused("legacy", "cuIpcOpenMemHandle", 205), no_shm()),
            ),
            (
                "event-not-shared",
                (refused("event", "cuIpcOpenEventHandle", 205), plain()),
                (refused("legacy", "cuIpcOpenMemHandle", 205), plain()),
            ),
            ("dma-buf-closed-module", (lacking("dma-buf"), closed()), (lacking("dma-buf"), plain())),
            ("pool-unsupported", (lacking("pool"), plain()), (lacking("legacy"), plain())),
            ("no-vmm", (lacking("export"), plain()), (lacking("export"), where_(|here| here.library = None))),
            ("no-vmm", (lacking("memory"), plain()), (refused("import", IMPORT, 801), plain())),
            (
                "no-vmm",
                (said("exporter-killed", "unsupported", "the device does not offer it"), plain()),
                (said("exporter-killed", "system", "no process can be started"), plain()),
            ),
            (
                "no-addresses",
                (refused("memory", "cuMemAddressReserve", 2), plain()),
                (refused("memory", "cuMemCreate", 2), plain()),
            ),
            (
                "out-of-memory",
                (refused("memory", "cuMemCreate", 2), plain()),
                (refused("memory", "cuMemCreate", 1), plain()),
            ),
            (
                "out-of-memory",
                (said("memory", "system", "9 bytes are more than the 8 bytes that a GPU has free"), plain()),
                (said("memory", "usage", "size 9 is not a positive multiple"), plain()),
            ),
            (
                "memory-held",
                (finding("memory-returned", Status::Failed, None), plain()),
                (refused("memory-returned", "cuMemGetInfo_v2", 1), plain()),
            ),
            (
                "killed",
                (said("memory", "signal", "ended by SIGKILL"), plain()),
                (said("memory", "system", "SIGKILL failed"), plain()),
            ),
            ("crashed", (segfault("memory"), plain()), (said("memory", "signal", "ended by SIGKILL"), plain())),
            ("hangs", (timeout("round-trip"), plain()), (said("round-trip", "peer", "the peer hung up"), plain())),
        ]
    }

    #[test]
    fn each_rule_explains_what_it_is_for_and_not_what_is_near() {
        let name = |(finding, environment): &Sight| find(finding, environment).map(|rule| rule.name);
        for (rule, meant, near) in cases() {
            assert_eq!(name(&meant), Some(rule), "{:?}", meant.0);
            assert_ne!(name(&near), Some(rule), "{:?}", near.0);
        }
    }

    #[test]
    fn every_rule_is_reached() {
        let reached: HashSet<&str> =
            cases().iter().filter_map(|(_, (finding, here), _)| find(finding, here)).map(|rule| rule.name).collect();
        for rule in RULES {
            assert!(reached.contains(rule.name), "{} is hidden, or has no case", rule.name);
        }
        let names: HashSet<&str> = RULES.iter().map(|rule| rule.name).collect();
        assert_eq!(names.len(), RULES.len(), "two rules of one name");
    }

    #[test]
    fn what_works_and_what_was_not_tried_is_not_explained() {
        for (_, (mut finding, environment), _) in cases() {
            for status in [Status::Ok, Status::Skipped] {
                finding.status = status;
                explain(&mut finding, &environment);
                assert_eq!((&finding.cause, &finding.remedy, &finding.rule), (&None, &None, &None));
            }
        }
    }

    #[test]
    fn an_explanation_is_that_of_its_rule() {
        let mut finding = refused("fabric", "cuMemCreate", 800);
        explain(&mut finding, &where_(|here| here.imex_channels.clear()));
        let rule = RULES.iter().find(|rule| rule.name == "fabric-no-channel").unwrap();
        assert_eq!(finding.rule.as_deref(), Some(rule.name));
        assert_eq!((finding.cause.as_deref(), finding.remedy.as_deref()), (Some(rule.cause), Some(rule.remedy)));
    }

    #[test]
    fn the_words_looked_for_are_those_of_the_errors() {
        let library = "libcuda.so.1".to_owned();
        let errors = [
            (
                Error::Load(LoadError::NoLibrary { tried: format!("{library}: No such file or directory") }),
                "library-not-found",
            ),
            (Error::Load(LoadError::NoLibrary { tried: format!("{library}: file too short") }), "library-broken"),
            (Error::Load(LoadError::Stub { library: library.clone() }), "stub-library"),
            (Error::Load(LoadError::MissingSymbol { library, symbol: "cuMemCreate" }), "old-driver"),
            (Error::Load(LoadError::NoDevice), "no-device"),
            (Error::Memory(MemoryError::TooManyDescriptors { needed: 512, limit: 256 }), "few-descriptors"),
            (Error::Memory(MemoryError::OutOfMemory { device: "a GPU".to_owned(), size: 2, free: 1 }), "out-of-memory"),
            (ProtocolError::FdsTruncated { most: 128 }.into(), "few-descriptors"),
            (Error::system("make a socket", io::Error::from_raw_os_error(24)), "few-descriptors"),
        ];
        for (error, rule) in errors {
            let seen = said("driver", error.kind().as_str(), &error.in_full());
            assert_eq!(find(&seen, &plain()).map(|rule| rule.name), Some(rule), "{error}");
        }
    }

    #[test]
    fn an_unknown_failure_is_not_guessed_at() {
        assert!(find(&refused("memory", "cuMemMap", 12345), &plain()).is_none());
        assert!(find(&finding("aliases", Status::Failed, None), &plain()).is_none());
    }

    #[test]
    fn each_text_is_one_sentence_that_fits_a_table() {
        for Rule { name, symptom, cause, remedy, .. } in RULES {
            for text in [symptom, cause, remedy] {
                assert!(!text.contains(['|', '\n']) && !text.contains("  "), "{name}: {text}");
            }
            for text in [cause, remedy] {
                assert!(text.ends_with('.') && !text.contains(". "), "{name}: {text}");
            }
        }
    }
}
