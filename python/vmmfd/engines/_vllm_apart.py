"""The memory of other ranks that this rank has mapped, published for `vmmfd suspend`: the driver can't restore such a process."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Any

from vllm.distributed import get_world_group

# Libraries of a device communicator that map memory of other ranks: the field, the name, and the option that turns the library off.
_LIBRARIES = {
    "ca_comm": ("vLLM's custom all-reduce", "--disable-custom-all-reduce"),
    "symm_mem_comm": ("PyTorch's symmetric memory", "VLLM_ALLREDUCE_USE_SYMM_MEM=0"),
    "fi_ar_comm": ("FlashInfer's all-reduce", "VLLM_ALLREDUCE_USE_FLASHINFER=0"),
    "fi_pcie_ipc_ar_comm": ("FlashInfer's all-reduce over PCIe", "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC=0"),
    "all2all_manager": ("expert parallelism", "no expert parallelism"),
}
_NCCL = {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0"}
# `vmmfd suspend` finds the file in /proc/PID/fd.
_FILE = "vmmfd-ranks"
_published: int | None = None


def publish() -> None:
    """Publishes the libraries that have mapped memory of other ranks, and the options that prevent it; an empty text if there are none. Does
    nothing in an engine with one rank. A later call replaces the text."""
    global _published
    if get_world_group().world_size == 1:
        return
    ties = list(_ties())
    libraries, options = ", ".join(name for name, _ in ties), ", ".join(option for _, option in ties)
    text = f"memory of the engine's other ranks ({libraries})\nstart the engine with {options}" if ties else ""
    # The process's number, as a fork has the file too.
    content = struct.pack("=Q", os.getpid()) + text.encode()
    file = os.memfd_create(_FILE)
    os.write(file, content)
    if _published is not None:
        os.close(_published)
    _published = file


def _ties() -> Iterator[tuple[str, str]]:
    missing = [f"{name}={value}" for name, value in _NCCL.items() if os.environ.get(name) != value]
    if missing:
        yield "NCCL", " ".join(missing)
    for field, named in _LIBRARIES.items():
        if any(_is_used(field, getattr(each, field, None)) for each in _communicators()):
            yield named


def _communicators() -> Iterator[Any]:
    from vllm.distributed import parallel_state

    for reference in list(parallel_state._groups.values()):
        group = reference()
        if group is not None and group.device_communicator is not None:
            yield group.device_communicator


def _is_used(field: str, library: Any) -> bool:
    # Without multicast, symmetric memory is disabled after its buffer was mapped, and the restore fails.
    is_off = field != "symm_mem_comm" and getattr(library, "disabled", False)
    return library is not None and not is_off
