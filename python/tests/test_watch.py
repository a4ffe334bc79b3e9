"""Watching events of names."""

from __future__ import annotations

import asyncio
import select
import threading
import time
import uuid
from collections.abc import Callable

import numpy as np
import pytest
from conftest import Child, Server, interrupted

import vmmfd


@pytest.fixture
def prefix() -> str:
    return f"watch/{uuid.uuid4().hex}/"


def put(broker: vmmfd.Broker, name: str) -> vmmfd.records.Published:
    return broker.put(name, {"x": np.zeros(3)}, replace=True)


def test_events_in_order(broker: vmmfd.Broker, prefix: str) -> None:
    with broker.watch(prefix) as watch:
        place = watch.place
        first = put(broker, prefix + "a")
        put(broker, prefix + "a")
        put(broker, "watch/" + uuid.uuid4().hex)
        with broker.get(prefix + "a"):
            pass
        broker.delete(prefix + "a")
        events = [watch.next(60) for _ in range(5)]
        assert watch.next(0.1) is None
    kinds = ["published", "replaced", "leased", "ended", "deleted"]
    assert [event.kind for event in events] == kinds
    assert events[0].name == prefix + "a" and events[0].version == 1 and events[0].id == first.id
    assert events[0].seq < events[1].seq and events[0].at.tzinfo is not None and events[0].pid > 0
    # From a place, also in another watch.
    with broker.watch(prefix, after=place) as watch:
        assert watch.next(0).kind == "published"
        later = watch.place
    with broker.watch(prefix, after=later, wait=0) as watch:
        assert [event.kind for event in watch] == kinds[1:]
    for wrong in ("5", ":5", "a:", "a:-1", "a:b", "a:١", "a:" + "9" * 5000):
        with pytest.raises(vmmfd.Invalid, match="is not a place"):
            broker.watch(prefix, after=wrong)  # type: ignore[arg-type]


def test_place_ahead_is_refused(broker: vmmfd.Broker, prefix: str) -> None:
    put(broker, prefix + "a")
    with broker.watch(prefix) as watch:
        here = watch.place
    instance, _, seq = here.rpartition(":")
    for ahead in (int(seq) + 1000, 99999999, (1 << 64) - 1, 99999999999999999999):
        with pytest.raises(vmmfd.Invalid, match=f"after='{instance}:{ahead}' is ahead of the broker, which is at "):
            broker.watch(prefix, after=f"{instance}:{ahead}")
    with broker.watch(prefix, after=here) as watch:
        put(broker, prefix + "a")
        event = watch.next(5)
        assert event is not None and event.kind == "replaced"


def test_place_of_other_store_is_lost(broker: vmmfd.Broker, prefix: str) -> None:
    with broker.watch(prefix, after=f"{uuid.uuid4()}:1") as watch:
        event = watch.next(1)
    assert event.kind == "lost" and event.name is None and event.seq is None


def test_wait_times_out(broker: vmmfd.Broker, prefix: str) -> None:
    with broker.watch(prefix) as watch:
        began = time.monotonic()
        assert watch.next(0.1) is None
        assert time.monotonic() - began >= 0.1
        assert watch.next(0) is None
        with pytest.raises(ValueError, match="wait=-1"):
            watch.next(-1)


@pytest.mark.parametrize("polled", [False, True])
def test_signals_lose_no_event(broker: vmmfd.Broker, prefix: str, polled: bool) -> None:
    watch, got, interrupts = broker.watch(prefix), [], 0
    if polled:
        watch.fileno()
    for number in range(150):
        put(broker, f"{prefix}{number}")
        event = interrupted(lambda: watch.next(5), after=1e-4 + 1e-5 * number)
        if event is None:
            interrupts += 1
            # The place is before an event that was not returned.
            with broker.watch(prefix, after=watch.place) as other:
                event = watch.next(5)
                assert event == other.next(5)
        got.append(event.name)
    assert got == [f"{prefix}{number}" for number in range(150)] and watch.next(0) is None
    assert interrupts > 5


@pytest.mark.parametrize("polled", [False, True])
def test_threads_share_a_watch(broker: vmmfd.Broker, prefix: str, polled: bool) -> None:
    watch = broker.watch(prefix)
    if polled:
        watch.fileno()
    got: list[str | None] = []
    threads = [threading.Thread(target=lambda: got.extend(event.name for event in watch)) for _ in range(3)]
    for thread in threads:
        thread.start()
    names = [f"{prefix}{number}" for number in range(60)]
    for name in names:
        put(broker, name)
    deadline = time.monotonic() + 20
    while len(got) < len(names) and time.monotonic() < deadline:
        time.sleep(0.01)
    watch.close()
    for thread in threads:
        thread.join()
    assert sorted(got) == sorted(names)


def test_tasks_share_a_watch(broker: vmmfd.Broker, prefix: str) -> None:
    async def names() -> list[str | None]:
        watch = broker.watch(prefix)
        tasks = [asyncio.ensure_future(anext(watch)) for _ in range(3)]
        await asyncio.sleep(0.1)
        for number in range(3):
            put(broker, f"{prefix}{number}")
        return [event.name for event in await asyncio.gather(*tasks)]

    assert sorted(asyncio.run(names())) == [f"{prefix}{number}" for number in range(3)]


def test_cancelled_step_keeps_its_event(broker: vmmfd.Broker, prefix: str) -> None:
    async def cancelled(watch: vmmfd.Watch) -> None:
        task = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0.1)
        put(broker, prefix + "a")
        # The loop does not run, and so can't deliver the event that the step receives.
        time.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with broker.watch(prefix) as watch:
        place = watch.place
        asyncio.run(cancelled(watch))
        assert watch.place == place
        assert select.select([watch], [], [], 0)[0]
        event = watch.next(0)
        assert event is not None and event.name == prefix + "a" and watch.place != place
        assert not select.select([watch], [], [], 0.1)[0]


def test_wait_leaves_other_calls_free(broker: vmmfd.Broker, prefix: str) -> None:
    got: list[vmmfd.records.Event] = []
    watch = broker.watch(prefix)
    thread = threading.Thread(target=lambda: got.append(next(watch)))
    thread.start()
    time.sleep(0.1)
    assert watch.next(0) is None
    put(broker, prefix + "a")
    thread.join(60)
    assert got[0].kind == "published"


def test_close_stops_iteration_in_thread(broker: vmmfd.Broker, prefix: str) -> None:
    watch = broker.watch(prefix)
    ended = threading.Event()

    def follow() -> None:
        for _ in watch:
            pass
        ended.set()

    thread = threading.Thread(target=follow)
    thread.start()
    time.sleep(0.1)
    watch.close()
    assert ended.wait(60)
    thread.join()
    assert list(watch) == []
    with pytest.raises(ValueError, match="the watch is closed"):
        watch.next(0)
    watch.close()


def test_broker_close_interrupts_watch(socket: str, prefix: str) -> None:
    broker = vmmfd.connect(socket, backend="host")
    watch, raised = broker.watch(prefix), []

    def follow() -> None:
        try:
            next(watch)
        except vmmfd.Interrupted as error:
            raised.append(error)

    thread = threading.Thread(target=follow)
    thread.start()
    time.sleep(0.1)
    broker.close()
    thread.join(60)
    assert raised and isinstance(raised[0], InterruptedError)


@pytest.mark.parametrize("wait", ["watch.next()", "watch.next(6000)", "next(watch, None)"])
def test_signal_handler_closes_watch(server: Server, child: Callable[..., Child], wait: str) -> None:
    started = child(
        """
        import signal, sys, time
        import vmmfd

        broker = vmmfd.connect(sys.argv[1], backend="host")
        watch = broker.watch()
        signal.signal(signal.SIGALRM, lambda *_: watch.close())
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            print("came:", WAIT)
        except vmmfd.Error as error:
            print("failed:", error)
        assert broker.list() == []
        """.replace("WAIT", wait),
        server.path,
    )
    printed = started.end()
    assert ("came: None" if "next(watch" in wait else "failed: the watch is closed") in printed
