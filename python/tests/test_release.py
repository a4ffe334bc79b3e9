"""GPU memory is released in the background: after a drop during a kernel or a capture, and at the exit."""

from __future__ import annotations

import gc
from typing import Any

import pytest

import vmmfd


@pytest.mark.cuda
def test_tensor_dropped_during_kernel() -> None:
    torch = pytest.importorskip("torch")
    from vmmfd import _native

    for _ in range(20):
        array = vmmfd.asarray(torch.ones(64 << 20, device="cuda"))
        tensor = torch.from_dlpack(array)
        out = torch.zeros((), device="cuda")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            for _ in range(4):
                out += tensor.sum()
        del tensor, array
        gc.collect()
        stream.synchronize()
        assert out.item() == 4 * (64 << 20)
    assert _native._settle(30)
    torch.cuda.synchronize()


CAPTURES = """
import gc, sys
import torch
import vmmfd
import vmmfd.legacy
from vmmfd import _native

x = torch.ones(1024, device="cuda")
array = vmmfd.asarray(torch.ones(64 << 20, device="cuda"))
tensors = [torch.from_dlpack(array), torch.from_dlpack(array)]
legacy = vmmfd.legacy.empty(64 << 20, "uint8")
more = [vmmfd.asarray(torch.ones(1 << 20, device="cuda")) for _ in range(3)]
graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
assert _native._settle(30)
torch.cuda.synchronize()
free = torch.cuda.mem_get_info()[0]
with torch.cuda.graph(graph, stream=stream, capture_error_mode=sys.argv[1]):
    y = x + 1
    del array, tensors, legacy, more
    gc.collect()
    assert _native._settle(30)
    z = y * 2
torch.cuda.synchronize()
assert torch.cuda.mem_get_info()[0] - free > 256 << 20, "nothing was given back"
for _ in range(3):
    graph.replay()
torch.cuda.synchronize()
assert z[0].item() == 4
print(torch.rand(3, device="cuda").sum().item() >= 0)
"""


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_drop_during_capture_releases_memory(child: Any, mode: str) -> None:
    pytest.importorskip("torch")
    assert child(CAPTURES, mode).end() == "True\n"


COPIES_IN_A_CAPTURE = """
import sys, threading
import torch
import vmmfd

x = torch.ones(1024, device="cuda")
source = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
array = vmmfd.asarray(source)
graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
torch.cuda.synchronize()
raised = []

def work():
    try:
        copy = vmmfd.asarray(array)
        copy.copy_from(array[::-1])
        raised.append(copy[:2].tobytes())
        vmmfd.empty(16, "uint8").copy_from(bytes(range(16)))
    except BaseException as error:
        raised.append(error)

with torch.cuda.graph(graph, stream=stream, capture_error_mode=sys.argv[1]):
    y = x + 1
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    z = y * 2
graph.replay()
torch.cuda.synchronize()
assert z[0].item() == 4
assert len(raised) == 1 and isinstance(raised[0], bytes), raised
"""


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_copies_in_threads_preserve_capture(child: Any, mode: str) -> None:
    pytest.importorskip("torch")
    child(COPIES_IN_A_CAPTURE, mode).end()


REAPS = """
import ctypes, gc, sys, time
import vmmfd
from vmmfd import _native

library = ctypes.CDLL("libcuda.so.1")
array = vmmfd.empty(1 << 20, "uint8")
array.copy_from(bytes(1 << 20))
del array
gc.collect()
assert _native._settle(60)
"""


@pytest.mark.fake
@pytest.mark.parametrize(
    "fault",
    ["cuMemFreeHost:1:900,cuMemFreeHost:2:906", "cuMemHostAlloc:1:901"],
)
def test_reaper_retries_busy_device(child: Any, tmp_path: Any, fault: str) -> None:
    log = tmp_path / "calls"
    log.touch()
    # Only the reaper thread waits for the whole device here.
    child(REAPS, env={"FAKECUDA_FAIL": fault, "FAKECUDA_LOG": str(log)}).end()
    calls = [line.split()[1] for line in log.read_text().splitlines()]
    waited = [at for at, call in enumerate(calls) if call == "cuMemFreeHost"]
    unmapped = [at for at, call in enumerate(calls) if call == "cuMemUnmap"]
    assert len(unmapped) == 1 and waited[-1] < unmapped[0], calls
    assert len(waited) == (3 if fault.startswith("cuMemFreeHost") else 1), calls
    assert "cuCtxSynchronize" not in calls, calls
    assert calls.count("cuThreadExchangeStreamCaptureMode") % 2 == 0, calls
    assert "cuMemAddressFree" in calls[unmapped[0] :], calls


@pytest.mark.fake
def test_allocation_waits_for_the_reaper(child: Any) -> None:
    child(
        """
        import gc, vmmfd
        for _ in range(20):
            array = vmmfd.empty(6 << 20, "uint8")
            del array
        try:
            vmmfd.empty(10 << 20, "uint8")
        except vmmfd.OutOfMemory as error:
            assert isinstance(error, MemoryError)
        else:
            raise AssertionError("there are 8 MiB")
        """,
        env={"FAKECUDA_FREE": str(8 << 20), "FAKECUDA_SLOW": "cuMemFreeHost:50"},
    ).end()


@pytest.mark.fake
def test_exit_during_release(child: Any) -> None:
    child(
        """
        import vmmfd, sys
        sys.kept = [vmmfd.empty(1 << 20, "uint8") for _ in range(20)]
        sys.kept += [array.__dlpack__() for array in sys.kept]
        del sys.kept[:10]
        """,
        env={"FAKECUDA_SLOW": "cuMemFreeHost:200"},
    ).end()
