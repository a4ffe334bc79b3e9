"""The order of GPU work between processes, on the emulated driver."""

from __future__ import annotations

import array as arrays
import ctypes
import gc
import os
import select
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import LIMIT, Child, interrupted
from driver_streams import Gate, Stream

import vmmfd
from vmmfd import _native

pytestmark = pytest.mark.fake

SHORT = 0.05


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    # Else everything that waits for the device would block.
    gate.timeline.release()


@pytest.fixture
def publisher(tmp_path: Path, gate: Gate) -> Iterator[vmmfd.Publisher]:
    with vmmfd.publish(tmp_path / "stream", size=64, count=8, every=LIMIT) as publisher:
        yield publisher
        gate.timeline.release()
        publisher.close()


@pytest.fixture
def subscriber(publisher: vmmfd.Publisher, tmp_path: Path) -> Iterator[vmmfd.Subscriber]:
    with vmmfd.subscribe(tmp_path / "stream", held=3, policy="every") as subscriber:
        assert select.select([publisher], [], [], LIMIT)[0] and publisher.event()
        yield subscriber


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def publish(publisher: vmmfd.Publisher, stream: Stream, byte: int) -> None:
    loan = publisher.loan(wait=LIMIT)
    stream.fill(loan.memory(), byte)
    loan.publish(bytes([byte]), stream=stream)


def test_timelines_order_streams(gate: Gate) -> None:
    with vmmfd.Timeline(0, backend="cuda") as timeline:
        first, second, reader = gate.hold(Stream()), Stream(), Stream()
        assert (timeline.record(first), timeline.record(second)) == (1, 2)
        with vmmfd.Timeline.open(timeline, 0) as other, vmmfd.Timeline.open(timeline.fileno()) as watcher:
            other.wait(reader, 2, LIMIT)
            time.sleep(SHORT)
            assert (other.value, other.completion(1), reader.is_idle, second.is_idle) == (0, "pending", False, False)
            with pytest.raises(vmmfd.Timeout):
                watcher.wait_cpu(1, SHORT)
            gate.open()
            watcher.wait_cpu(2, LIMIT)
            until(lambda: reader.is_idle)
            assert (other.value, other.completion(2), other.completion(3)) == (2, "done", "pending")
            assert repr(other) == "<vmmfd.Timeline at 2>"
    assert timeline.is_closed and repr(timeline) == "<vmmfd.Timeline, closed>"
    with pytest.raises(vmmfd.Invalid, match="the timeline is closed"):
        timeline.record(first)


@pytest.mark.parametrize("loss", ["late", "released", "gone"])
def test_lost_timelines_release_streams(gate: Gate, loss: str) -> None:
    end, peer = socket.socketpair()
    with end, peer, vmmfd.Timeline() as timeline, vmmfd.Timeline.open(timeline, 0) as other:
        recorder, reader = gate.hold(Stream()), Stream()
        other.release_with(end)
        value = timeline.record(recorder)
        other.wait(reader, value, SHORT if loss == "late" else LIMIT)
        if loss == "released":
            other.release()
        if loss == "gone":
            peer.close()
        until(lambda: reader.is_idle)
        assert not recorder.is_idle and other.completion(value) == "lost"
        for call in (lambda: other.wait(reader, value, LIMIT), lambda: other.wait_cpu(value, LIMIT), lambda: timeline.record(reader)):
            with pytest.raises(vmmfd.Disconnected, match="the peer's GPU work is lost") as caught:
                call()
            assert caught.value.kind == "peer"
        gate.open()


def test_subscribers_stream_waits(publisher: vmmfd.Publisher, subscriber: vmmfd.Subscriber, gate: Gate) -> None:
    gpu = vmmfd.records.Order("gpu", None)
    assert (publisher.order, subscriber.order) == (gpu, gpu)
    writer, reader = gate.hold(Stream()), Stream()
    publish(publisher, writer, 7)
    sample = subscriber.receive(LIMIT, stream=reader)
    time.sleep(SHORT)
    assert (sample.completion, reader.is_idle, sample.user) == ("pending", False, b"\7")
    threading.Timer(SHORT, gate.open).start()
    # The copy waits for the stream.
    assert sample.memory().tobytes() == b"\7" * 64 and sample.completion == "done"
    sample.close()
    with pytest.raises(vmmfd.Invalid, match="closed"):
        sample.completion
    # Publications and samples of both kinds mix.
    publisher.loan().publish(b"without")
    assert subscriber.receive(LIMIT, stream=reader).completion == "done"
    gate.hold(writer)
    publish(publisher, writer, 8)
    with pytest.raises(vmmfd.Timeout):
        subscriber.receive(SHORT)
    gate.open()
    assert subscriber.receive(LIMIT).memory().tobytes() == b"\10" * 64


@pytest.mark.parametrize("how", ["close", "drop", "array"])
def test_samples_return_behind_their_stream(
    publisher: vmmfd.Publisher, subscriber: vmmfd.Subscriber, gate: Gate, how: str
) -> None:
    writer, reader = Stream(), Stream()
    kept = weakref.ref(reader)
    publish(publisher, writer, 1)
    sample = subscriber.receive(LIMIT, stream=reader)
    array = sample.memory()
    gate.hold(reader)
    if how == "array":
        sample.close()
        assert subscriber.held == 1
        del array
    else:
        del array
        if how == "close":
            sample.close()
        del sample
    # Without a wait for the stream.
    assert subscriber.held == 0 and not reader.is_idle
    time.sleep(SHORT)
    assert [one.buffers for one in publisher.stats().subscribers] == [1]
    number = ctypes.c_void_p(reader.number)
    del reader
    gate.open()
    until(lambda: publisher.stats().free == 8)
    until(lambda: _native._settle(LIMIT) and gc.collect() >= 0 and kept() is None)
    assert writer.library.cuStreamDestroy_v2(number) == 0


def test_capture_delays_the_return(publisher: vmmfd.Publisher, subscriber: vmmfd.Subscriber) -> None:
    writer, reader = Stream(), Stream()
    publish(publisher, writer, 1)
    sample = subscriber.receive(LIMIT, stream=reader)
    raw = ctypes.c_void_p(reader.number)
    assert reader.library.cuStreamBeginCapture_v2(raw, 2) == 0
    for call in (lambda: publisher.loan().publish(stream=reader), lambda: subscriber.receive(LIMIT, stream=reader)):
        with pytest.raises(vmmfd.Invalid, match="is being captured into a graph"):
            call()
    # Given back once the device is idle.
    sample.close()
    until(lambda: publisher.stats().free == 8)
    assert reader.library.cuStreamEndCapture(raw, ctypes.byref(ctypes.c_void_p())) == 0


HELD_PUBLISHER = """
    import sys
    import vmmfd
    from driver_streams import Gate, Stream

    gate, stream = Gate(), Stream()
    publisher = vmmfd.publish(sys.argv[1], size=64, count=8)
    while publisher.event() is None:
        pass
    for byte in (1, 2):
        loan = publisher.loan()
        stream.fill(loan.memory(), byte)
        loan.publish(stream=stream)
        gate.hold(stream)
    print("ready", flush=True)
    sys.stdin.readline()
"""


def test_killed_publisher_releases_streams(tmp_path: Path, child: Callable[..., Child]) -> None:
    path = str(tmp_path / "stream")
    other = child(HELD_PUBLISHER, path, env={"PYTHONPATH": str(Path(__file__).parent)})
    with vmmfd.subscribe(path, held=3, queue=4) as subscriber:
        other.wait_for()
        reader = Stream()
        whole, torn = subscriber.receive(LIMIT, stream=reader), subscriber.receive(LIMIT, stream=reader)
        until(lambda: whole.completion == "done")
        time.sleep(SHORT)
        assert torn.completion == "pending" and not reader.is_idle
        other.signal(signal.SIGKILL)
        until(lambda: reader.is_idle)
        assert (whole.completion, torn.completion) == ("done", "lost")
        with pytest.raises(vmmfd.Crashed, match=f"pid {other.pid}"):
            subscriber.receive(LIMIT, stream=reader)
        # The context still works.
        assert whole.memory().tobytes() == b"\1" * 64
        other.end(-signal.SIGKILL)


def test_order_of_the_cpu(tmp_path: Path, child: Callable[..., Child]) -> None:
    """On a device whose streams can't wait for host memory."""
    child(
        """
        import sys
        import vmmfd
        from driver_streams import Stream

        with vmmfd.publish(sys.argv[1], size=64, count=4) as publisher, vmmfd.subscribe(sys.argv[1]) as subscriber:
            while publisher.event() is None:
                pass
            for order in (publisher.order, subscriber.order):
                assert order.kind == "cpu" and len(order.reason) > 10, order
            stream, loan = Stream(), publisher.loan()
            stream.fill(loan.memory(), 5)
            loan.publish(stream=stream)
            sample = subscriber.receive(10, stream=stream)
            assert sample.completion == "done" and sample.memory().tobytes() == b"\5" * 64
            del sample
            while publisher.stats().free < 4:
                pass
            try:
                vmmfd.Timeline()
            except vmmfd.Unsupported as error:
                assert "no order of GPU work with other processes" in str(error)
            else:
                raise AssertionError
        """,
        str(tmp_path / "stream"),
        env={"PYTHONPATH": str(Path(__file__).parent), "FAKECUDA_ATTRIBUTE": "122:0"},
    ).end()


def test_late_publisher_is_disconnected(publisher: vmmfd.Publisher, subscriber: vmmfd.Subscriber, gate: Gate) -> None:
    writer, reader = gate.hold(Stream()), Stream()
    publish(publisher, writer, 1)
    sample = subscriber.receive(SHORT, stream=reader)
    until(lambda: reader.is_idle)
    assert sample.completion == "lost"
    with pytest.raises(vmmfd.Disconnected, match="it was not done within [0-9.]+ms"):
        subscriber.receive(LIMIT, stream=reader)
    gate.open()


@pytest.mark.parametrize("next_is", ["cpu", "stream"])
def test_streams_share_a_subscriber(publisher: vmmfd.Publisher, subscriber: vmmfd.Subscriber, gate: Gate, next_is: str) -> None:
    """A sample that waits for a stream of an interrupted call is of use for any other call."""
    writer, reader, other = gate.hold(Stream()), Stream(), Stream()
    publish(publisher, writer, 1)
    abandoned = subscriber._native.on_stream((reader.number, reader))
    assert abandoned.wait(LIMIT) and subscriber._native.taken is None
    receive = subscriber.receive if next_is == "cpu" else lambda wait: subscriber.receive(wait, stream=other)
    assert interrupted(lambda: receive(LIMIT), after=SHORT) is None
    threading.Timer(SHORT, gate.open).start()
    sample = receive(LIMIT)
    assert (sample.number, sample.completion, sample.memory().tobytes()) == (1, "done", b"\1" * 64)
    assert sample.memory().__cuda_array_interface__["stream"] is None
    # It waits for the device, as any work may use the sample.
    gate.hold(other)
    threading.Timer(SHORT, gate.open).start()
    sample.close()
    assert other.is_idle
    until(lambda: publisher.stats().free == 8)


def test_interfaces_name_the_stream(publisher: vmmfd.Publisher, subscriber: vmmfd.Subscriber, gate: Gate) -> None:
    writer, reader = gate.hold(Stream()), Stream()
    publish(publisher, writer, 3)
    memory = subscriber.receive(LIMIT, stream=reader).memory()
    assert memory.__cuda_array_interface__["stream"] == reader.number
    for stream in (reader.number, -1):
        memory.__dlpack__(stream=stream, max_version=(1, 0))
    for stream in (None, 1, writer.number):
        assert interrupted(lambda: memory.__dlpack__(stream=stream, max_version=(1, 0)), after=SHORT) is None
    assert interrupted(memory.tobytes, after=SHORT) is None
    assert interrupted(memory.copy, after=SHORT) is None
    threading.Timer(SHORT, gate.open).start()
    memory.__dlpack__(stream=1, max_version=(1, 0))
    assert reader.is_idle and memory.copy().tobytes() == b"\3" * 64


class Like:
    """A stream of another library."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def synchronize(self) -> None:
        pass


STREAMS: dict[str, Callable[[int], Any]] = {
    "torch": lambda number: Like(cuda_stream=number),
    "cupy": lambda number: Like(ptr=number),
    "numba": lambda number: Like(handle=ctypes.c_void_p(number)),
    "int": lambda number: number,
    "protocol": lambda number: SimpleNamespace(__cuda_stream__=lambda: (0, number)),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_streams_of_other_libraries(publisher: vmmfd.Publisher, subscriber: vmmfd.Subscriber, kind: str) -> None:
    own, timeline = Stream(), vmmfd.Timeline()
    numbers = [own.number, 1] if kind == "int" else [own.number, 0]
    for number in numbers:
        stream = STREAMS[kind](number)
        publisher.loan().publish(stream=stream)
        sample = subscriber.receive(LIMIT, stream=stream)
        assert sample.memory().__cuda_array_interface__["stream"] == (number or 1)
        timeline.wait(stream, timeline.record(stream), LIMIT)
    publisher.loan().publish(stream=2)
    for call in (lambda: subscriber.receive(LIMIT, stream=2), lambda: timeline.record(2)):
        with pytest.raises(vmmfd.Invalid, match="per-thread default stream"):
            call()
    with pytest.raises(vmmfd.Invalid, match="wait=0 allows no time"):
        subscriber.receive(0, stream=own)


WRONG: list[tuple[Any, type[Exception], str]] = [
    (0, vmmfd.Invalid, "stream=0 is ambiguous: give 1 for the legacy default stream, 2 for"),
    (-1, vmmfd.Invalid, "stream=-1"),
    (1 << 64, vmmfd.Invalid, "65 bits"),
    (True, TypeError, "stream=True has type bool: give a stream of PyTorch"),
    ("1", TypeError, "stream='1' has type str: give a stream of PyTorch"),
    (1.0, TypeError, "has type float"),
    # A pointer to memory is no stream.
    (SimpleNamespace(ptr=4096), TypeError, "has type SimpleNamespace"),
    (arrays.array("b"), TypeError, "has type array"),
]


@pytest.mark.parametrize(("stream", "kind", "sentence"), WRONG)
def test_wrong_streams(stream: Any, kind: type[Exception], sentence: str) -> None:
    with vmmfd.Timeline() as timeline, pytest.raises(kind, match=sentence) as caught:
        timeline.record(stream)
    assert type(caught.value) is kind and "\n" not in str(caught.value)


def test_wrong_use(publisher: vmmfd.Publisher, tmp_path: Path) -> None:
    timeline, stream = vmmfd.Timeline(), Stream()
    wrong: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: vmmfd.Timeline(backend="host"), vmmfd.Unsupported, "."),
        (lambda: vmmfd.Timeline(7), vmmfd.NotFound, "7"),
        (lambda: vmmfd.Timeline.open(timeline, backend="cuda"), vmmfd.Invalid, "no effect without device="),
        (lambda: vmmfd.Timeline.open("7"), TypeError, "fileno"),
        (lambda: vmmfd.Timeline.open(1 << 20), vmmfd.Error, "duplicate descriptor 1048576"),
        (lambda: vmmfd.Timeline.open(os.memfd_create("other")), vmmfd.Error, "open a timeline"),
        (lambda: vmmfd.Timeline.open(timeline).wait(stream, 1, LIMIT), vmmfd.Invalid, "without device=: no stream can use it"),
        (lambda: vmmfd.Timeline.open(timeline, 0).record(stream), vmmfd.Invalid, "another process records"),
        (lambda: timeline.record(None), TypeError, "stream=None is not allowed"),
        (lambda: timeline.wait(stream, -1, LIMIT), vmmfd.Invalid, "value=-1"),
        (lambda: timeline.wait(stream, 1, None), TypeError, "timeout=None is not a time"),
        (lambda: timeline.completion("1"), TypeError, "value='1'"),
        (lambda: timeline.release_with("1"), TypeError, "fileno"),
    ]
    for call, kind, sentence in wrong:
        with pytest.raises(kind, match=sentence):
            call()
    timeline.close()
    with vmmfd.publish(tmp_path / "host", size=64, count=8, backend="host") as host:
        assert host.order.kind == "cpu" and "no stream memory operations" in str(host.order.reason)
        with pytest.raises(vmmfd.Unsupported):
            host.loan().publish(stream=1)
        host.close()


def test_waits_can_be_interrupted(gate: Gate) -> None:
    """The test would hang if a wait held the GIL."""
    timeline = vmmfd.Timeline()
    value = timeline.record(gate.hold(Stream()))
    assert interrupted(lambda: timeline.wait_cpu(value, LIMIT), after=SHORT) is None
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            timeline.wait_cpu(value, LIMIT)
        except BaseException as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(SHORT)
    timeline.close()
    waiting.join()
    (error,) = raised
    assert isinstance(error, (vmmfd.Interrupted, vmmfd.Invalid)) and "closed" in str(error), error
    # Without calls in other threads, it blocks while a stream of the device waits.
    closing = threading.Thread(target=vmmfd.Timeline().close)
    closing.start()
    time.sleep(SHORT)
    assert closing.is_alive()
    gate.open()
    closing.join()


def test_dropped_timelines_do_not_block(gate: Gate) -> None:
    timeline, stream = vmmfd.Timeline(), gate.hold(Stream())
    timeline.record(stream)
    begun = time.monotonic()
    del timeline
    assert time.monotonic() - begun < LIMIT / 2 and not _native._settle(0)
    gate.open()
    assert _native._settle(LIMIT)
