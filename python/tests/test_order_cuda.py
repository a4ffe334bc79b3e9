"""The order of GPU work between processes, with the streams of PyTorch, CuPy and Numba."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import LIMIT, Child

import vmmfd

pytestmark = pytest.mark.cuda

COUNT = 200
SIZE = 1 << 20

PUBLISH = f"""
    import sys, time
    import torch
    import vmmfd

    publisher = vmmfd.publish(sys.argv[1], size=4 * {SIZE}, count=8, every=60)
    publisher.set_format({{"x": ("int32", ({SIZE},))}})
    while publisher.event() is None:
        time.sleep(0.001)
    stream = torch.cuda.Stream()

    def publish(number, busy):
        with torch.cuda.stream(stream), publisher.loan() as loan:
            x = torch.from_dlpack(loan["x"])
            # Torn, if a reader did not wait.
            x.fill_(-1)
            torch.cuda._sleep(busy)
            x.fill_(number)
            loan.publish(b"%d" % number, stream=torch.cuda.current_stream())
"""

ALL = f"{PUBLISH}\n    for number in range({COUNT}):\n        publish(number, 200_000)\n    publisher.finish()\n"
HELD = f"{PUBLISH}\n    publish(1, 0)\n    publish(2, 1 << 40)\n    print('ready', flush=True)\n    sys.stdin.readline()\n"


def subscribe(path: str) -> vmmfd.Subscriber:
    subscriber = vmmfd.subscribe(path, policy="every", held=3)
    assert subscriber.order == vmmfd.records.Order("gpu", None)
    return subscriber


def test_torch_streams(tmp_path: Path, child: Callable[..., Child]) -> None:
    torch = pytest.importorskip("torch")
    path = str(tmp_path / "stream")
    other = child(ALL, path)
    stream, whole = torch.cuda.Stream(), []
    with subscribe(path) as subscriber:
        for number in range(COUNT):
            sample = subscriber.receive(LIMIT, stream=stream)
            array = sample["x"]
            assert array.__cuda_array_interface__["stream"] == stream.cuda_stream
            with torch.cuda.stream(stream):
                whole.append((torch.from_dlpack(array) == int(sample.user)).all())
            assert int(sample.user) == number
            del array
            sample.close()
        with pytest.raises(vmmfd.Ended):
            subscriber.receive(LIMIT, stream=stream)
    stream.synchronize()
    assert torch.stack(whole).all()
    other.end()


def test_torch_on_another_stream(tmp_path: Path, child: Callable[..., Child]) -> None:
    """DLPack and copies wait for the sample's stream."""
    torch = pytest.importorskip("torch")
    path = str(tmp_path / "stream")
    other = child(ALL, path)
    stream = torch.cuda.Stream()
    with subscribe(path) as subscriber:
        for number in range(COUNT):
            with subscriber.receive(LIMIT, stream=stream) as sample:
                if number % 2:
                    assert (torch.from_dlpack(sample["x"]) == number).all()
                else:
                    assert sample["x"].tobytes() == number.to_bytes(4, "little") * SIZE
    other.end()


def test_cupy_streams(tmp_path: Path, child: Callable[..., Child]) -> None:
    cupy = pytest.importorskip("cupy")
    pytest.importorskip("torch")
    path = str(tmp_path / "stream")
    other = child(ALL, path)
    stream, whole = cupy.cuda.Stream(non_blocking=True), []
    with subscribe(path) as subscriber:
        for number in range(COUNT):
            with subscriber.receive(LIMIT, stream=stream) as sample, stream:
                # CuPy has no read-only arrays.
                array = sample["x"].writable(never_written=True)
                view = cupy.from_dlpack(array) if number % 2 else cupy.asarray(array)
                whole.append((view == number).all())
                del array, view
    stream.synchronize()
    assert all(map(bool, whole))
    other.end()


@pytest.mark.parametrize("library", ["torch", "cupy", "numba"])
def test_publications_on_streams(tmp_path: Path, library: str) -> None:
    with vmmfd.publish(tmp_path / "stream", size=4096, count=4) as publisher, vmmfd.Timeline() as timeline:
        subscriber = vmmfd.subscribe(tmp_path / "stream")
        while publisher.event() is None:
            pass
        if library == "torch":
            torch = pytest.importorskip("torch")
            streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
        elif library == "cupy":
            cupy = pytest.importorskip("cupy")
            streams = [cupy.cuda.Stream.null, cupy.cuda.Stream()]
        else:
            cuda = pytest.importorskip("numba.cuda")
            streams = [cuda.default_stream(), cuda.stream()]
        for stream in streams:
            loan = publisher.loan()
            loan.memory().copy_from(b"\5" * 4096)
            loan.publish(stream=stream)
            with subscriber.receive(LIMIT, stream=stream) as sample:
                assert sample.memory().tobytes() == b"\5" * 4096 and sample.completion == "done"
            timeline.wait(streams[0], timeline.record(stream), LIMIT)
            timeline.wait_cpu(timeline.value, LIMIT)
        subscriber.close()


def test_killed_publisher_releases_streams(tmp_path: Path, child: Callable[..., Child]) -> None:
    torch = pytest.importorskip("torch")
    path = str(tmp_path / "stream")
    other = child(HELD, path)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # CUDA loads a kernel at its first launch, and that blocks while a stream waits.
        for _ in range(2):
            assert int(torch.ones(SIZE, dtype=torch.int32, device="cuda").sum()) == SIZE
    with subscribe(path) as subscriber:
        other.wait_for()
        whole, torn = (subscriber.receive(LIMIT, stream=stream) for _ in range(2))
        with torch.cuda.stream(stream):
            sums = [torch.from_dlpack(sample["x"]).sum() for sample in (whole, torn)]
        assert torn.completion == "pending"
        other.signal(signal.SIGKILL)
        stream.synchronize()
        assert (whole.completion, torn.completion, int(sums[0])) == ("done", "lost", SIZE)
        with pytest.raises(vmmfd.Crashed):
            subscriber.receive(LIMIT, stream=stream)
        # The context still works.
        assert int(torch.ones(4, device="cuda").sum()) == 4
        other.end(-signal.SIGKILL)
