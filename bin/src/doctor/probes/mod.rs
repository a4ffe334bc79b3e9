//! The table of all probes.

mod broker;
mod held_descriptor;
mod killed_owner;
mod machine;
mod one_process;
mod persistence;
mod two_devices;

pub(super) use self::{
    broker::problem,
    held_descriptor::{hold, make},
};
use super::{
    probe::{Probe, ProbeFn, probe},
    sharing::{MemoryKind, event},
};

impl Probe {
    pub fn named(name: &str) -> Option<&'static Self> {
        PROBES.iter().find(|probe| probe.name == name)
    }
}

/// The calls of virtual memory management, and of the copies that test it.
const VMM: &[&str] = &[
    "cuMemGetAllocationGranularity",
    "cuMemCreate",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemcpyHtoD_v2",
    "cuMemcpyDtoH_v2",
];

/// All probes, in execution order.
pub static PROBES: &[Probe] = &[
    probe(
        "driver",
        ProbeFn::Machine(machine::driver),
        "the driver library loads, starts, and has devices",
        "The driver can't be used, so nothing else can be tried.",
    )
    .required(),
    probe(
        "descriptors",
        ProbeFn::Machine(machine::descriptors),
        "how many files a process may have open: each allocation that is shared takes one",
        "The limit of open files can't be read.",
    ),
    probe(
        "host-memory",
        ProbeFn::Machine(machine::host_memory),
        "how much of the machine's memory this process can use",
        "The amount of memory can't be read.",
    ),
    probe(
        "broker",
        ProbeFn::Machine(broker::broker),
        "the broker at this user's default socket answers; without one it is skipped",
        "The broker does not answer.",
    ),
    probe(
        "attributes",
        ProbeFn::Device(one_process::attributes),
        "the attributes that the device claims",
        "The device's attributes can't be read.",
    ),
    probe(
        "granularity",
        ProbeFn::Device(one_process::granularity),
        "the granularity of allocations",
        "The granularity can't be read.",
    ),
    probe(
        "memory",
        ProbeFn::Device(one_process::memory),
        "memory is created, mapped, made accessible, written and read back",
        "Virtual memory management does not work, so there is nothing to share.",
    )
    .whether("memory can be created, mapped, written and read", VMM)
    .required(),
    probe(
        "export",
        ProbeFn::Device(one_process::export),
        "memory is exported as a descriptor, and what kind of file that is",
        "Memory can't be exported as a descriptor.",
    )
    .whether("memory can be exported as a descriptor", &["cuMemExportToShareableHandle"])
    .required(),
    probe(
        "import",
        ProbeFn::Device(one_process::import),
        "an exported descriptor is imported again in the same process",
        "An exported descriptor can't be imported.",
    )
    .whether("an exported descriptor can be imported", &["cuMemImportFromShareableHandle"])
    .required(),
    probe(
        "round-trip",
        ProbeFn::Share(MemoryKind::ROUND_TRIP),
        "two processes share memory over a socket, and each reads what the other wrote",
        "Two processes can't share memory here.",
    )
    .whether("two processes can share memory here", &["cuMemExportToShareableHandle", "cuMemImportFromShareableHandle"])
    .required(),
    probe(
        "aliases",
        ProbeFn::Device(one_process::aliases),
        "two mappings of one allocation show the same bytes",
        "Two mappings of one allocation do not show the same bytes.",
    )
    .whether("two mappings of one allocation show the same bytes", &[]),
    probe(
        "read-only-copy",
        ProbeFn::Device(one_process::read_only_copy),
        "a copy into a read-only mapping is refused",
        "A read-only mapping does not keep a copy out.",
    )
    .whether("a read-only mapping keeps a copy out", &[]),
    probe(
        "read-only-store",
        ProbeFn::Device(one_process::read_only_store),
        "a kernel's store into a read-only mapping faults, in a process of its own",
        "A read-only mapping does not keep a kernel's store out.",
    )
    .whether("a read-only mapping keeps a kernel's store out", &[])
    .alone()
    .faults(),
    probe(
        "wrong-descriptor",
        ProbeFn::Device(one_process::wrong_descriptor),
        "a descriptor of another kind of file is refused, without side effects",
        "A wrong descriptor is not refused, or has side effects.",
    )
    .whether("a wrong descriptor is refused without side effects", &[]),
    probe(
        "exporter-killed",
        ProbeFn::Device(killed_owner::exporter_killed),
        "memory stays readable where it was imported when its exporter is killed",
        "Imported memory does not outlive its exporter.",
    )
    .whether("imported memory outlives its exporter", &[])
    .alone(),
    probe(
        "memory-returned",
        ProbeFn::Device(killed_owner::memory_returned),
        "all memory of a killed process is free again once its importer has released it",
        "Memory of a killed process stays in use.",
    )
    .whether("memory of a killed process becomes free again", &[])
    .alone(),
    probe(
        "held-descriptor",
        ProbeFn::Device(held_descriptor::held_descriptor),
        "memory of a killed process stays while a process without the driver holds its descriptor, as a broker does",
        "A descriptor alone does not keep memory: a broker can't.",
    )
    .whether("a descriptor alone keeps memory", &["cuMemImportFromShareableHandle", "cuMemMap"]),
    probe(
        "persistence",
        ProbeFn::Device(persistence::persistence),
        "the driver keeps the device's state, and so a broker's memory, while no process uses the device",
        "It can't be found out whether the driver keeps the device's state.",
    ),
    probe(
        "export-cost",
        ProbeFn::Device(one_process::export_cost),
        "the time of an export, with and without another exported descriptor held open",
        "The time of an export can't be measured.",
    )
    .machine_wide(),
    probe(
        "host-numa",
        ProbeFn::Share(MemoryKind::HOST),
        "two processes share the host's memory next to the device",
        "Host-NUMA memory can't be shared.",
    )
    .whether(
        "host-NUMA memory can be shared",
        &["cuMemCreate", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle"],
    ),
    probe(
        "dma-buf",
        ProbeFn::Device(one_process::dma_buf),
        "memory is exported as a dma-buf, for devices of other vendors",
        "Memory can't be exported as a dma-buf.",
    )
    .whether("memory can be exported as a dma-buf", &["cuMemCreate", "cuMemGetHandleForAddressRange"]),
    probe(
        "fabric",
        ProbeFn::Device(one_process::fabric),
        "memory is created for, and exported as, a fabric handle, for other machines",
        "Fabric handles do not work.",
    )
    .whether("fabric handles work", &["cuMemCreate", "cuMemExportToShareableHandle"]),
    probe(
        "pool",
        ProbeFn::Share(MemoryKind::POOL),
        "two processes share memory of a memory pool",
        "Memory pools can't be shared.",
    )
    .whether(
        "memory pools can be shared",
        &[
            "cuMemPoolCreate",
            "cuMemPoolExportToShareableHandle",
            "cuMemPoolImportFromShareableHandle",
            "cuMemPoolExportPointer",
            "cuMemPoolImportPointer",
            "cuMemPoolSetAccess",
            "cuMemAllocFromPoolAsync",
        ],
    ),
    probe(
        "legacy",
        ProbeFn::Share(MemoryKind::LEGACY),
        "two processes share memory by a legacy handle (cuIpc)",
        "Legacy handles do not work.",
    )
    .whether("legacy handles work", &["cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2"]),
    probe(
        "event",
        ProbeFn::Device(event),
        "one process waits for another's event on the device",
        "Events can't be shared between processes.",
    )
    .whether("events can be shared between processes", &["cuIpcGetEventHandle", "cuIpcOpenEventHandle"]),
    probe(
        "peer",
        ProbeFn::Pair(two_devices::peer),
        "one device reads, writes and copies memory of another",
        "One device can't use the other's memory.",
    )
    .whether("one device can use the other's memory", &["cuDeviceCanAccessPeer", "cuMemSetAccess"]),
];

#[cfg(test)]
mod tests;
