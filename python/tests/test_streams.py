"""Streams: publish and subscribe, between processes."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import pickle
import select
import signal
import socket as sockets
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import LIMIT, PYTHON, Child, interrupted

import vmmfd

Start = Callable[..., Child]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("VMMFD_BACKEND", "host")
    return str(tmp_path / "stream.sock")


@pytest.fixture
def publisher(path: str) -> Iterator[vmmfd.Publisher]:
    """A publisher of one array, with room for several subscribers."""
    with vmmfd.publish(path, size=4096, count=16, history=2, every=LIMIT) as publisher:
        assert publisher.set_format({"x": ("int32", (8,))}) == 32
        yield publisher
        publisher.close()


def publish(publisher: vmmfd.Publisher, value: int = 0) -> int:
    with publisher.loan() as loan:
        loan["x"].numpy()[:] = value
        return loan.publish(str(value).encode()).number


def event(publisher: vmmfd.Publisher, kind: str) -> vmmfd.records.StreamEvent:
    """Waits for an event of this kind, by the descriptor."""
    while True:
        while found := publisher.event():
            if found.kind == kind:
                return found
        assert select.select([publisher], [], [], LIMIT)[0]


def subscribe(publisher: vmmfd.Publisher, path: str, **options: Any) -> vmmfd.Subscriber:
    """Subscribes, and waits until the publisher gives the next publication to the subscriber."""
    subscriber = vmmfd.subscribe(path, **options)
    event(publisher, "joined")
    return subscriber


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


PUBLISH = """
    import sys, time
    import vmmfd

    publisher = vmmfd.publish(sys.argv[1], size=4096, count=8, history=4)
    publisher.set_format({"x": ("int32", (8,))}, b"blob")

    def publish(value):
        with publisher.loan() as loan:
            loan["x"].fill(value)
            loan.publish(b"%d" % value)

    publish(1)
    print("ready", flush=True)
    sys.stdin.readline()
"""

SUBSCRIBE = """
    import sys
    import vmmfd

    subscriber = vmmfd.subscribe(sys.argv[1], policy=sys.argv[2], history=1)
    sample = subscriber.receive()
    print("ready", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("on", ["host", pytest.param("cuda", marks=pytest.mark.fake)])
def test_arrays_reach_another_process(path: str, child: Start, on: str) -> None:
    count = 20
    with vmmfd.publish(path, size=1 << 16, count=8, every=LIMIT, backend=on) as publisher:
        needed = publisher.set_format({"image": ("uint8", (16, 15, 3)), "depth": np.zeros((4, 5), "f4")}, b"camera 7")
        assert needed == 768 + 80
        other = child(
            """
            import sys, time
            import numpy as np, vmmfd

            with vmmfd.subscribe(sys.argv[1], policy="every", backend=sys.argv[2]) as subscriber:
                numbers = []
                for sample in subscriber:
                    value = int(sample.user)
                    image, depth = sample["image"], sample.array("depth")
                    assert (image.shape, image.dtype, image.readonly) == ((16, 15, 3), "uint8", True)
                    assert image.tobytes() == bytes([value]) * 720
                    assert np.frombuffer(depth.tobytes(), "f4").tolist() == [value] * 20
                    assert sample.blob == b"camera 7" and sample.keys() == ["image", "depth"] and sample.skipped_before == 0
                    assert 0 <= time.monotonic() - sample.published_at < 600
                    numbers.append(sample.number)
                print(numbers)
            """,
            path,
            on,
        )
        joined = event(publisher, "joined")
        assert (joined.pid, joined.uid, joined.policy) == (other.pid, os.getuid(), "every")
        for value in range(count):
            with publisher.loan() as loan:
                loan["image"].copy_from(np.full((16, 15, 3), value, "u1"))
                loan["depth"].copy_from(np.full((4, 5), value, "f4"))
                published = loan.publish(b"%d" % value)
                assert published.number == value + 1 and published.delivered in (0, 1)
        stats = publisher.finish(LIMIT)
    assert other.end().strip() == str(list(range(1, count + 1)))
    assert stats.published == count and all((one.delivered, one.skipped) == (count, 0) for one in stats.subscribers)


def test_killed_publisher_is_a_crash(path: str, child: Start) -> None:
    other = child(PUBLISH, path)
    other.wait_for()
    subscriber = vmmfd.subscribe(path, history=4)
    assert subscriber.peer == vmmfd.records.Peer(other.pid, os.getuid())
    steps = iter(subscriber)
    sample = next(steps)
    view = np.from_dlpack(sample["x"])
    other.signal(signal.SIGKILL)
    with pytest.raises(vmmfd.Crashed, match=f"the publisher, pid {other.pid}, died") as caught:
        next(steps)
    assert caught.value.peer == pickle.loads(pickle.dumps(caught.value)).peer == subscriber.peer
    with pytest.raises(vmmfd.Crashed):
        subscriber.try_receive()
    assert view.tolist() == [1] * 8 and sample.user == b"1" and not view.flags.writeable


def test_stopped_publisher_does_not_block(path: str, child: Start) -> None:
    other = child(PUBLISH + "    publish(2)\n    publisher.finish()\n", path)
    other.wait_for()
    with vmmfd.subscribe(path, history=4) as subscriber:
        subscriber.receive(LIMIT).close()
        other.signal(signal.SIGSTOP)
        assert subscriber.try_receive() is None
        with pytest.raises(vmmfd.Timeout, match="no buffer arrived within 0.05 seconds$"):
            subscriber.receive(0.05)
        with pytest.raises(TimeoutError):
            subscriber.receive(timedelta(milliseconds=1))
        other.signal(signal.SIGCONT)
        other.send_line()
        assert subscriber.receive(LIMIT)["x"].tolist() == [2] * 8
        with pytest.raises(vmmfd.Ended):
            subscriber.receive(LIMIT)
        with pytest.raises(EOFError):
            subscriber.try_receive()
    other.end()


def test_killed_subscriber_frees_its_buffers(publisher: vmmfd.Publisher, path: str, child: Start) -> None:
    publish(publisher)
    other = child(SUBSCRIBE, path, "latest")
    other.wait_for()
    (usage,) = publisher.stats().subscribers
    assert (usage.pid, usage.buffers, usage.bytes) == (other.pid, 1, 4096)
    other.signal(signal.SIGKILL)
    left = event(publisher, "left")
    assert (left.id, left.orderly) == (usage.id, False)
    other.end(expected=-signal.SIGKILL)
    # The publication stays in the history.
    until(lambda: (publisher.stats().free, publisher.stats().subscribers) == (15, ()))


def test_stopped_subscriber_is_evicted(path: str, child: Start) -> None:
    with vmmfd.publish(path, size=4096, count=8, history=1, every=0.2) as publisher:
        publisher.set_format({"x": ("int32", (8,))})
        publish(publisher)
        other = child(SUBSCRIBE, path, "every")
        other.wait_for()
        other.signal(signal.SIGSTOP)
        for value in range(8):
            publish(publisher, value)
        evicted = event(publisher, "evicted")
        assert evicted.pid == other.pid
        assert not publisher.evict(evicted.id) and not publisher.evict(12345)
        # It may still read its buffers.
        (usage,) = publisher.stats().subscribers
        assert not usage.is_subscribed and usage.buffers == 2
        other.signal(signal.SIGKILL)
        publisher.finish(0)


def test_policies(publisher: vmmfd.Publisher, path: str) -> None:
    latest = subscribe(publisher, path, held=1)
    queue = vmmfd.subscribe(path, held=1, queue=2)
    joined = event(publisher, "joined")
    assert (joined.policy, joined.queue) == ("queue", 2)
    for value in range(1, 6):
        publish(publisher, value)
    for subscriber, numbers, skipped in ((latest, [1, 5], [0, 3]), (queue, [1, 4, 5], [0, 2, 0])):
        samples = []
        for _ in numbers:
            with subscriber.receive(LIMIT) as sample:
                samples.append(sample)
        assert [sample.number for sample in samples] == numbers
        assert [sample.skipped_before for sample in samples] == skipped
    assert publisher.evict(1) and not publisher.evict(1)
    with pytest.raises(vmmfd.Disconnected, match="ended this subscription"):
        latest.receive(LIMIT)


def test_publisher_refuses_subscribers(path: str) -> None:
    with vmmfd.publish(path, size=64, count=4):
        with pytest.raises(vmmfd.PermissionDenied, match="`every` is not allowed here"):
            vmmfd.subscribe(path, policy="every")
        with pytest.raises(vmmfd.Error, match="would need 5 buffers, and it has 4"):
            vmmfd.subscribe(path, held=3)
        with vmmfd.subscribe(path):
            pass
    with pytest.raises(vmmfd.NotFound):
        vmmfd.subscribe(path, wait=0)
    with pytest.raises(vmmfd.Timeout):
        vmmfd.subscribe(path, wait=0.05)


def test_sizes_vary_within_a_budget(path: str) -> None:
    with vmmfd.publish(path, budget=4096, loans=2) as publisher, subscribe(publisher, path) as subscriber:
        with publisher.loan(3000) as loan:
            assert loan.memory().nbytes == 3000
            loan.publish()
        sample = subscriber.receive(LIMIT)
        assert sample.memory().nbytes == 3000 and publisher.try_loan(3000) is None
        with pytest.raises(vmmfd.Timeout, match=f"pid {os.getpid()} has 1 buffer with 3000 bytes"):
            publisher.loan(3000, wait=0)
        (starved,) = (found for found in publisher.events() if found.kind == "starved")
        assert starved.by[0].pid == os.getpid() and starved.by[0].bytes == 3000
        sample.close()
        publisher.loan(3000, LIMIT).close()
        with pytest.raises(vmmfd.Invalid, match="name the size of the loan"):
            publisher.loan()
        with pytest.raises(vmmfd.Invalid, match="5000 bytes exceeds the 4096 bytes"):
            publisher.loan(5000)


def test_arrays_keep_their_buffer(publisher: vmmfd.Publisher, path: str) -> None:
    subscriber = subscribe(publisher, path, held=1)
    publish(publisher, 3)
    sample = subscriber.receive(LIMIT)
    view = sample.numpy()["x"]
    subscriber.close()
    sample.close()
    with pytest.raises(vmmfd.Invalid, match="the buffer is published or closed"):
        sample["x"]
    assert sample.is_closed and sample.number == 1
    # The publisher's history keeps two.
    for value in range(20):
        publish(publisher, value)
    assert view.tolist() == [3] * 8 and publisher.stats().subscribers[0].buffers == 1
    del view
    until(lambda: not publisher.stats().subscribers)


def test_held_samples_explain_a_timeout(publisher: vmmfd.Publisher, path: str) -> None:
    with subscribe(publisher, path, held=1) as subscriber:
        publish(publisher, 1)
        publish(publisher, 2)
        array = subscriber.receive(LIMIT)["x"]
        with pytest.raises(vmmfd.Timeout, match="still has 1 samples or arrays of them, and held=1 allows no more"):
            subscriber.receive(0)
        assert subscriber.held == 1 and array[0].item() == 1
        del array
        assert subscriber.receive(LIMIT).number == 2


def test_loop_needs_one_buffer(publisher: vmmfd.Publisher, path: str) -> None:
    """A step of a loop closes the sample of the step before, to which the loop's variable refers."""
    subscriber = subscribe(publisher, path, held=1, policy="every")
    thread = threading.Thread(target=lambda: [publish(publisher, value) for value in range(5)] and publisher.finish(LIMIT))
    thread.start()
    assert [sample["x"][0].item() for sample in subscriber] == list(range(5))
    thread.join()


def test_published_buffer_refuses_writes(publisher: vmmfd.Publisher) -> None:
    loan = publisher.loan()
    array = loan["x"]
    assert not array.readonly and publisher.try_loan() is None
    with pytest.raises(vmmfd.Invalid, match="user has 5000 bytes, and at most 4096 are allowed"):
        loan.publish(bytes(5000))
    loan.publish()
    for use in (lambda: array.fill(1), lambda: array.copy_from(np.zeros(8, "i4")), array.numpy, lambda: np.from_dlpack(array)):
        with pytest.raises(vmmfd.Invalid, match="the buffer is published"):
            use()
    with pytest.raises(vmmfd.Invalid, match="the buffer is published or closed"):
        loan.publish()
    # A loan returns with its last array.
    with publisher.loan() as other:
        view = other["x"].numpy()
    assert other.is_closed and publisher.try_loan() is None
    del view
    publisher.loan(wait=LIMIT).close()


def test_block_completes_or_crashes(path: str) -> None:
    with vmmfd.publish(path, size=64, count=8) as publisher:
        ended = subscribe(publisher, path)
    assert publisher.is_closed and list(ended) == []
    with pytest.raises(KeyError), vmmfd.publish(path, size=64, count=8) as publisher:
        crashed = subscribe(publisher, path)
        raise KeyError
    with pytest.raises(vmmfd.Crashed):
        next(iter(crashed))
    for use in (publisher.loan, publisher.stats, publisher.finish, publisher.fileno, publisher.event):
        with pytest.raises(vmmfd.Invalid, match="the publisher is closed"):
            use()


def test_connected_sockets(path: str) -> None:
    pairs = [sockets.socketpair(sockets.AF_UNIX, sockets.SOCK_SEQPACKET) for _ in range(2)]
    with vmmfd.publish(pairs[0][0], size=64, count=8) as publisher:
        publisher.admit(pairs[1][0])
        subscribers = [vmmfd.subscribe(pair[1]) for pair in pairs]
        for _ in pairs:
            event(publisher, "joined")
        # The caller's sockets stay open, and belong to it.
        for pair in pairs:
            pair[0].close()
            pair[1].close()
        publisher.loan().publish(b"over sockets")
        assert [subscriber.receive(LIMIT).user for subscriber in subscribers] == [b"over sockets"] * 2
        with pytest.raises(TypeError, match="is not an open socket"):
            publisher.admit(pairs[0][0])
        with sockets.socket() as tcp, pytest.raises(vmmfd.Error, match="SOCK_SEQPACKET"):
            publisher.admit(tcp)


@pytest.mark.parametrize("call", ["receive", "loan", "finish"])
def test_close_and_signals_interrupt_waits(publisher: vmmfd.Publisher, path: str, call: str) -> None:
    """The test would hang if a wait held the GIL: the other thread must run to end it."""
    subscriber = subscribe(publisher, path, held=1)
    publish(publisher)
    samples = [subscriber.receive(LIMIT), publisher.loan()]
    side = subscriber if call == "receive" else publisher
    wait = getattr(side, call)
    assert interrupted(lambda: wait(wait=LIMIT), after=0.05) is None
    assert not side.is_closed
    raised: list[BaseException] = []

    def run() -> None:
        try:
            wait(wait=LIMIT)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.05)
    side.close()
    thread.join()
    (error,) = raised
    assert isinstance(error, (vmmfd.Interrupted, vmmfd.Invalid)) and "closed" in str(error), error
    del samples


def test_signals_lose_no_sample(publisher: vmmfd.Publisher, path: str) -> None:
    subscriber, numbers, interrupts = subscribe(publisher, path, policy="every"), [], 0
    for number in range(150):
        publish(publisher)
        sample = interrupted(lambda: subscriber.receive(LIMIT), after=1e-4 + 2e-6 * number)
        if sample is None:
            interrupts += 1
            sample = subscriber.receive(LIMIT)
        numbers.append(sample.number)
    assert numbers == list(range(1, 151)) and subscriber.try_receive() is None


def test_threads_share_a_subscriber(publisher: vmmfd.Publisher, path: str) -> None:
    subscriber, numbers = subscribe(publisher, path, policy="every", held=4), []

    def run() -> None:
        for sample in subscriber:
            numbers.append(sample.number)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for value in range(60):
        publish(publisher, value)
    publisher.finish(LIMIT)
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 61))


def test_tasks_share_a_subscriber(publisher: vmmfd.Publisher, path: str) -> None:
    async def main() -> list[int]:
        numbers: list[int] = []
        async with subscribe(publisher, path, policy="every", held=4) as subscriber:

            async def run() -> None:
                async for sample in subscriber:
                    numbers.append(sample.number)
                    assert sample["x"][0].item() == int(sample.user)

            tasks = [asyncio.create_task(run()) for _ in range(3)]
            for value in range(30):
                publish(publisher, value)
                await asyncio.sleep(0)
                while len(numbers) < value - 2:
                    await asyncio.sleep(0.001)
            await publisher.__aexit__(None, None, None)
            await asyncio.gather(*tasks)
        return numbers

    assert sorted(asyncio.run(main())) == list(range(1, 31))


def test_cancelled_task_loses_no_sample(publisher: vmmfd.Publisher, path: str) -> None:
    async def main() -> None:
        subscriber = subscribe(publisher, path)
        descriptors = len(os.listdir("/proc/self/fd"))
        task = asyncio.create_task(subscriber.receive_async())
        await asyncio.sleep(0.01)
        assert len(os.listdir("/proc/self/fd")) == descriptors + 1
        # The loop does not run until the task is cancelled.
        publish(publisher, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(os.listdir("/proc/self/fd")) == descriptors
        sample = subscriber.try_receive()
        assert sample is not None and sample["x"].tolist() == [5] * 8
        # Closing it ends an iteration.
        steps = asyncio.create_task(anext(subscriber.__aiter__(), None))
        await asyncio.sleep(0.01)
        subscriber.close()
        assert await steps is None

    asyncio.run(main())


def test_forks_are_refused(path: str, child: Start) -> None:
    child(
        """
        import os, sys, warnings
        import numpy as np, vmmfd

        # Python warns of forks beside threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        publisher = vmmfd.publish(sys.argv[1], size=64, count=8, loans=2, history=1)
        publisher.set_format({"x": ("int32", (4,))})
        loan = publisher.loan()
        loan["x"].fill(1)
        loan.publish()
        subscriber = vmmfd.subscribe(sys.argv[1], history=1)
        sample, loan = subscriber.receive(), publisher.loan()
        array, view = sample["x"], sample["x"].numpy()
        pid = os.fork()
        if pid == 0:
            uses = [publisher.loan, publisher.try_loan, publisher.event, publisher.stats, publisher.finish, publisher.fileno,
                    lambda: publisher.set_format({}), lambda: publisher.evict(1), lambda: subscriber.receive(1),
                    subscriber.try_receive, subscriber.fileno, lambda: subscriber.held, lambda: next(iter(subscriber)),
                    loan.publish, loan.memory, lambda: loan["x"], sample.memory, lambda: sample["x"], array.tobytes]
            for use in uses:
                try:
                    use()
                except vmmfd.Invalid as error:
                    assert str(error).startswith(f"process {os.getpid()} is a fork of process {os.getppid()}, "), error
                else:
                    raise AssertionError(use)
            for each in (sample, loan, subscriber, publisher):
                each.close()
            assert view.tolist() == [1] * 4
            del array, view, sample, loan, subscriber, publisher
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert view.tolist() == [1] * 4
        loan["x"].fill(2)
        loan.publish()
        assert subscriber.receive()["x"].tolist() == [2] * 4
        del array, view, sample
        publisher.finish()
        assert list(subscriber) == []
        """,
        path,
    ).end()


def test_objects_may_be_alive_at_exit(path: str, child: Start) -> None:
    child(
        """
        import sys, threading
        import vmmfd

        publisher = vmmfd.publish(sys.argv[1], size=64, count=8, loans=2, history=1)
        publisher.loan().publish()
        subscriber = vmmfd.subscribe(sys.argv[1], history=1)
        sample, loan = subscriber.receive(), publisher.loan()
        view = sample.memory().numpy()
        threading.Thread(target=subscriber.receive, daemon=True).start()
        """,
        path,
    ).end()


WRONG: list[tuple[Callable[[str], Any], type[Exception], str]] = [
    (lambda path: vmmfd.publish(path), vmmfd.Invalid, "a pool has either size and count, .* or budget"),
    (lambda path: vmmfd.publish(path, size=64), vmmfd.Invalid, "a pool has either size and count, .* or budget"),
    (lambda path: vmmfd.publish(path, size=64, count=8, budget=64), vmmfd.Invalid, "a pool has either"),
    (lambda path: vmmfd.publish(path, size=0, count=8), vmmfd.Invalid, "a pool of 8 with 1 loans has no buffer"),
    (lambda path: vmmfd.publish(path, size="64", count=8), TypeError, "size='64' has type str: give an integer"),
    (lambda path: vmmfd.publish(path, size=64, count=8, history=-1), vmmfd.Invalid, "history=-1: give an integer of at least 0"),
    (lambda path: vmmfd.publish(path, size=64, count=8, every="1"), TypeError, "every='1' is not a time"),
    (lambda path: vmmfd.publish(path, size=64, count=8, placement="gpu"), vmmfd.Invalid, 'placement="gpu" is not one of device, host'),
    (lambda path: vmmfd.publish(path, size=64, count=8, timeout=None), TypeError, "timeout=None is not a time"),
    (lambda path: vmmfd.publish(path, size=64, count=8, backend="gpu"), vmmfd.Invalid, "is not one of auto, cuda, host"),
    (lambda path: vmmfd.publish(path, size=64, count=8, device=1.5), TypeError, "device=1.5 is not a device"),
    (lambda path: vmmfd.publish(path, size=64, count=8, trust="1"), TypeError, "trust='1' has type str: give a list of user ids"),
    (lambda path: vmmfd.publish(7, size=64, count=8), TypeError, "int"),
    (lambda path: vmmfd.subscribe(path, policy="all"), vmmfd.Invalid, "policy='all' is not \"latest\" or \"every\""),
    (lambda path: vmmfd.subscribe(path, policy="every", queue=2), vmmfd.Invalid, "give one of them"),
    (lambda path: vmmfd.subscribe(path, queue=0), vmmfd.Invalid, "a queue has 1 to [0-9]+ buffers, not 0"),
    (lambda path: vmmfd.subscribe(path, held=0), vmmfd.Invalid, "a subscriber holds 1 to [0-9]+ buffers, not 0"),
    (lambda path: vmmfd.subscribe(path, held=1 << 20), vmmfd.Invalid, "held has 21 bits, and at most 16 are allowed"),
    (lambda path: vmmfd.subscribe(path, wait=-1), vmmfd.Invalid, "wait=-1 is not a time"),
]


@pytest.mark.parametrize(("call", "kind", "sentence"), WRONG)
def test_wrong_arguments(path: str, call: Callable[[str], Any], kind: type[Exception], sentence: str) -> None:
    with vmmfd.publish(f"{path}.other", size=64, count=8), pytest.raises(kind, match=sentence) as caught:
        call(path if "publish" in call.__code__.co_names else f"{path}.other")
    assert type(caught.value) is kind and "\n" not in str(caught.value)


def test_wrong_arguments_of_methods(publisher: vmmfd.Publisher, path: str) -> None:
    subscriber = subscribe(publisher, path)
    loan = publisher.loan()
    wrong: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: publisher.set_format({"x": "int32"}), TypeError, r"arrays\['x'\]='int32' is not \(dtype, shape\) or"),
        (lambda: publisher.set_format({"x": ("int32", (-1,))}), vmmfd.Invalid, "is not a shape"),
        (lambda: publisher.set_format({"x": ("int3", (1,))}), vmmfd.Invalid, "is not an element type"),
        (lambda: publisher.set_format({"x": ("int32", (1,), -4)}), vmmfd.Invalid, "the offset of 'x'=-4"),
        (lambda: publisher.set_format({"x": ("int32", (2000,))}), vmmfd.Error, "8000 bytes"),
        (lambda: publisher.set_format({}, "blob"), TypeError, "blob='blob' has type str: give bytes"),
        (lambda: publisher.set_format({}, bytes(70000)), vmmfd.Invalid, "70000"),
        (lambda: publisher.loan(0), vmmfd.Invalid, "a buffer has at least 1 byte"),
        (lambda: publisher.loan(wait=None), TypeError, "wait=None is not a time"),
        (lambda: publisher.evict("1"), TypeError, "id='1' has type str"),
        (lambda: publisher.finish("1"), TypeError, "wait='1' is not a time"),
        (lambda: loan.publish("text"), TypeError, "user='text' has type str: give bytes"),
        (lambda: loan["y"], KeyError, "the stream's format has no array \"y\": it has x"),
        (lambda: subscriber.receive("1"), TypeError, "wait='1' is not a time"),
        (lambda: subscriber.receive(-1), vmmfd.Invalid, "wait=-1 is not a time"),
    ]
    for call, kind, sentence in wrong:
        with pytest.raises(kind, match=sentence):
            call()
    # The format is as before, and the loan was not lost.
    loan["x"].fill(4)
    loan.publish(bytearray(b"text"))
    assert subscriber.receive(LIMIT)["x"].tolist() == [4] * 8


def test_data_loader_example() -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "data_loader.py"
    if importlib.util.find_spec("torch") is None or not example.exists():
        pytest.skip("there is no torch, or the example is not beside the tests")
    ended = subprocess.run([*PYTHON, str(example)], capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (ended.returncode, ended.stdout) == (0, "published 40 batches to 2 trainers, all as they should be\n"), ended
