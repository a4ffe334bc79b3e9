"""The text that a rank publishes for `vmmfd suspend`, with a stand-in for vLLM's communicators."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from vllm_engine import use_stub  # noqa: E402

use_stub()

import vllm.distributed  # noqa: E402
from vllm.device_allocator import sleep_mode_backend  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vmmfd.engines import _vllm_apart  # noqa: E402

APART = {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0"}


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two ranks, and no published text."""
    monkeypatch.setattr(vllm.distributed, "world", [0, 2])
    monkeypatch.setattr(parallel_state, "_groups", {})
    for name in APART:
        monkeypatch.delenv(name, raising=False)
    yield
    if _vllm_apart._published is not None:
        os.close(_vllm_apart._published)
        _vllm_apart._published = None
    sleep_mode_backend.asked.clear()


@pytest.fixture
def communicate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives a group of ranks a device communicator with these libraries."""

    def communicate(**libraries: Any) -> None:
        group = SimpleNamespace(device_communicator=SimpleNamespace(**libraries))
        alone = SimpleNamespace(device_communicator=None)
        monkeypatch.setattr(parallel_state, "_groups", {"tp": lambda: group, "pp": lambda: alone, "dp": lambda: None})

    return communicate


def published() -> list[str]:
    """The texts that a program finds as `vmmfd suspend` does."""
    texts = []
    for entry in os.scandir("/proc/self/fd"):
        try:
            if os.readlink(entry.path).startswith("/memfd:vmmfd-ranks"):
                with open(entry.path, "rb") as file:
                    file.seek(0)
                    content = file.read()
                assert struct.unpack_from("=Q", content) == (os.getpid(),)
                texts.append(content[8:].decode())
        except FileNotFoundError:
            continue
    return texts


def test_ties_are_published_with_remedies(communicate: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    communicate(ca_comm=SimpleNamespace(disabled=False), symm_mem_comm=SimpleNamespace(disabled=True), all2all_manager=None)
    _vllm_apart.publish()
    assert published() == [
        "memory of the engine's other ranks (NCCL, vLLM's custom all-reduce, PyTorch's symmetric memory)\n"
        "start the engine with NCCL_P2P_DISABLE=1 NCCL_CUMEM_ENABLE=0, --disable-custom-all-reduce, VLLM_ALLREDUCE_USE_SYMM_MEM=0"
    ]
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    _vllm_apart.publish()
    assert published() == [
        "memory of the engine's other ranks (NCCL, vLLM's custom all-reduce, PyTorch's symmetric memory)\n"
        "start the engine with NCCL_CUMEM_ENABLE=0, --disable-custom-all-reduce, VLLM_ALLREDUCE_USE_SYMM_MEM=0"
    ]


def test_ranks_apart_publish_an_empty_text(communicate: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in APART.items():
        monkeypatch.setenv(name, value)
    communicate(ca_comm=SimpleNamespace(disabled=True), symm_mem_comm=None)
    _vllm_apart.publish()
    assert published() == [""]
    communicate(all2all_manager=object())
    _vllm_apart.publish()
    assert published() == ["memory of the engine's other ranks (expert parallelism)\nstart the engine with no expert parallelism"]


def test_single_rank_publishes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.distributed, "world", [0, 1])
    _vllm_apart.publish()
    assert published() == []


def test_sleep_publishes_before_it_frees(monkeypatch: pytest.MonkeyPatch) -> None:
    from vmmfd.engines import _vllm_ranks, _vllm_sleep

    monkeypatch.setattr(_vllm_ranks, "together", lambda work, what, undo: work())
    _vllm_sleep.SleepBackend().suspend(1)
    assert [text.partition("\n")[0] for text in published()] == ["memory of the engine's other ranks (NCCL)"]
