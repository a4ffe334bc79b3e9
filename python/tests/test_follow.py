"""Following versions, asyncio, pollable watches, and the log of a broker's outage."""

from __future__ import annotations

import asyncio
import logging
import select
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from conftest import Child, Server, interrupted

import vmmfd


def test_follow_yields_versions_in_place(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, {"x": np.full(3, 1.0)})
    seen = []
    for lease in broker.follow(name, wait=20):
        x = lease.numpy()["x"]
        seen.append((lease.version, x[0], lease["x"].address))
        if len(seen) == 3:
            break
        broker.put(name, {"x": np.full(3, x[0] + 1)}, replace=True)
    assert [(version, value) for version, value, _ in seen] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert len({address for *_, address in seen}) == 1


def test_follow_survives_a_delete(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, {"x": np.zeros(3)})
    following = broker.follow(name, wait=20)
    first = next(following).id
    broker.delete(name)
    broker.put(name, {"x": np.ones(3)})
    again = next(following)
    assert again.id != first and again.version == 1 and again["x"].tolist() == [1.0, 1.0, 1.0]


def test_follow_ends_after_its_wait(broker: vmmfd.Broker, name: str) -> None:
    assert list(broker.follow(name, wait=0)) == []
    broker.put(name, {"x": np.zeros(3)})
    following = broker.follow(name, wait=0.1)
    (lease,) = following
    broker.put(name, {"x": np.ones(3)}, replace=True)
    assert next(following) is lease and lease.version == 2


def test_lease_outlives_its_follower(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, {"x": np.zeros(3)}, replace=True)
    assert next(broker.follow(name)).tree()["x"].tolist() == [0, 0, 0]
    lease = next(broker.follow(name, newer_than=0, wait=20))
    assert lease.is_held and not lease.is_closed
    with broker.follow(name, copy_on_write=True) as following:
        found = next(following)
        found.numpy()["x"][:] = 7
        assert following.lease is found
    assert found.is_closed and list(following) == [] and lease["x"].tolist() == [0, 0, 0]
    assert list(broker.follow(name, newer_than=1, wait=0)) == []


def test_signals_lose_no_version(broker: vmmfd.Broker, name: str) -> None:
    following, interrupts = broker.follow(name, wait=20), 0
    for version in range(1, 101):
        broker.put(name, {"x": np.full(3, version)}, replace=True)
        # Not `next`: a signal handler may run after it.
        lease = interrupted(following.__next__, after=1e-4 + 8e-5 * version)
        if lease is None:
            interrupts += 1
            lease = next(following)
        assert lease.version == version and lease["x"].tolist() == [version] * 3
    assert interrupts > 5 and following.lease is not None and len(broker.who(name).leases) == 1


def test_signal_handler_starts_no_step(broker: vmmfd.Broker, name: str, child: Callable[..., Child]) -> None:
    """In a child, which would hang."""
    child(
        """
        import signal, sys, numpy, pytest, vmmfd

        with vmmfd.connect(sys.argv[1], backend="host") as broker, broker.follow(sys.argv[2], wait=20) as following:
            signal.signal(signal.SIGALRM, lambda *_: next(following, None))
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(vmmfd.Invalid, match="a step of the follower of .* is already executing"):
                next(following)
            broker.put(sys.argv[2], {"x": numpy.zeros(3)})
            assert next(following).version == 1
        """,
        broker.path,
        name,
    ).end()


def test_interrupt_after_an_event_loses_no_version(broker: vmmfd.Broker, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: object, event: vmmfd.records.Event) -> bool:
        if event.kind == "replaced":
            raise KeyboardInterrupt
        return False

    broker.put(name, {"x": np.zeros(3)})
    following = broker.follow(name, wait=1)
    next(following)
    broker.put(name, {"x": np.ones(3)}, replace=True)
    with monkeypatch.context() as patch:
        patch.setattr(vmmfd.Follower, "_announces", interrupt)
        pytest.raises(KeyboardInterrupt, next, following)
    assert next(following).version == 2


def test_tasks_share_a_follower(broker: vmmfd.Broker, name: str) -> None:
    async def versions() -> list[int]:
        following = broker.follow(name)

        async def version() -> int:
            return (await anext(following)).version

        tasks = [asyncio.ensure_future(version()) for _ in range(2)]
        broker.put(name, {"x": np.zeros(3)})
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0.1)
        broker.put(name, {"x": np.ones(3)}, replace=True)
        return sorted(await asyncio.gather(*tasks))

    assert asyncio.run(versions()) == [1, 2]


@pytest.mark.parametrize("state", ["absent", "returned", "stopped server"])
def test_close_interrupts_a_step(server: Server, name: str, state: str) -> None:
    broker = vmmfd.connect(server.path, backend="host", timeout=60)
    if state != "absent":
        broker.put(name, {"x": np.zeros(3)})
    following = broker.follow(name)
    if state == "returned":
        next(following)
    if state == "stopped server":
        server.pause()
    ended: list[object] = []
    thread = threading.Thread(target=lambda: ended.append(next(following, None)), daemon=True)
    thread.start()
    time.sleep(0.1)
    following.close()
    thread.join(10)
    assert ended == [None]
    server.go_on()
    broker.put(name, {"x": np.ones(3)}, replace=True)
    deadline = time.monotonic() + 20
    while (held := broker.who(name).leases) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not held and list(following) == []


def test_close_during_a_get_leaves_no_lease(broker: vmmfd.Broker, name: str) -> None:
    class ClosesFollower:
        @staticmethod
        def get(name: str, options: dict[str, object]) -> object:
            lease = client.get(name, options)
            following.close()
            return lease

    broker.put(name, {"x": np.zeros(3)})
    following = broker.follow(name)
    client, following._client = following._client, ClosesFollower  # type: ignore[assignment]
    assert list(following) == [] and not broker.who(name).leases


def test_asyncio_service(broker: vmmfd.Broker, name: str) -> None:
    """One loop follows, watches, puts, claims and prepares at once."""

    async def follow(versions: list[float]) -> None:
        async with broker.follow(name, wait=60) as following:
            async for lease in following:
                versions.append(lease.numpy()["x"][0])
                if len(versions) == 3:
                    return

    async def watch(kinds: list[str]) -> None:
        async with broker.watch(name) as watch:
            async for event in watch:
                if event.kind in ("published", "replaced"):
                    kinds.append(event.kind)
                if len(kinds) == 3:
                    return

    async def service() -> None:
        versions: list[float] = []
        kinds: list[str] = []
        tasks = [asyncio.create_task(follow(versions)), asyncio.create_task(watch(kinds))]
        await asyncio.sleep(0.1)
        for number in range(3):
            await broker.put_async(name, {"x": np.full(3, number)}, replace=number > 0)
            while len(versions) <= number:
                await asyncio.sleep(0.01)
        await asyncio.wait_for(asyncio.gather(*tasks), 60)
        assert versions == [0, 1, 2] and kinds == ["published", "replaced", "replaced"]
        claim = await broker.claim_async(name + "/new")
        assert isinstance(claim, vmmfd.Claim)
        async with claim:
            other = asyncio.create_task(broker.claim_async(name + "/new", wait=60))
            await asyncio.sleep(0.05)
            assert not other.done()
        async with await other:
            pass
        async with await broker.get_async(name, version=3) as lease:
            waiting = asyncio.create_task(lease.prepare_async(wait=60))
            await asyncio.sleep(0.05)
            await broker.put_async(name, {"x": np.full(3, 9)}, replace=True)
            async with await waiting as prepared:
                lease.switch(prepared).close()
                assert lease["x"].tolist() == [9, 9, 9]

    asyncio.run(service())


def test_cancelled_steps_lose_nothing(broker: vmmfd.Broker, name: str) -> None:
    """A cancelled step may read the event, and switch the lease."""

    def put(version: int) -> None:
        broker.put(name, {"x": np.full(3, float(version))}, replace=True)

    async def follow() -> None:
        following = broker.follow(name, wait=60)
        lease = await anext(following)
        for version in range(2, 12):
            task = asyncio.ensure_future(anext(following))
            await asyncio.sleep(0.02)
            task.cancel()
            put(version)
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await anext(following)).version == version and lease.is_held

    async def watch() -> None:
        events = broker.watch(name, wait=60)
        version, seen = 11, []
        while len(seen) < 20:
            task = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0.01)
            task.cancel()
            if version < 31:
                version += 1
                put(version)
            try:
                event = await task
            except asyncio.CancelledError:
                event = await anext(events)
            if event.kind == "replaced":
                seen.append(event.version)
        assert seen == list(range(12, 32))

    put(1)
    asyncio.run(follow())
    asyncio.run(watch())


def test_calls_share_threads(broker: vmmfd.Broker, name: str) -> None:
    async def calls() -> None:
        broker.put(name, {"x": np.zeros(3)})
        for _ in range(50):
            (await broker.get_async(name)).close()

    before = threading.active_count()
    asyncio.run(calls())
    assert threading.active_count() <= before + 2


def test_forks_start_their_own_threads(server: Server, child: Callable[..., Child]) -> None:
    started = child(
        """
        import asyncio, os, sys, time
        import numpy as np
        import vmmfd

        def get():
            broker = vmmfd.connect(sys.argv[1], backend="host")
            asyncio.run(broker.get_async("there"))

        vmmfd.connect(sys.argv[1], backend="host").put("there", {"x": np.ones(3)})
        get()
        time.sleep(0.1)
        pid = os.fork()
        if pid == 0:
            get()
            os._exit(7)
        deadline = time.monotonic() + 20
        while (status := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.01)
        if status == (0, 0):
            os.kill(pid, 9)
        assert os.waitstatus_to_exitcode(status[1]) == 7
        """,
        server.path,
    )
    started.end()


def test_closed_coroutine_ends_its_wait(broker: vmmfd.Broker, name: str) -> None:
    async def close() -> None:
        waiting = broker.get_async(name, wait=60)
        waiting.send(None)
        await asyncio.sleep(0.1)
        waiting.close()
        await asyncio.sleep(0.1)

    with broker.watch(name) as watch:
        asyncio.run(close())
        broker.put(name, {"x": np.zeros(3)})
        event = watch.next(20)
        assert event is not None and event.kind == "published"
        assert watch.next(0.2) is None


def test_follow_refuses_another_layout(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, {"x": np.zeros(3)})
    following = broker.follow(name, wait=20)
    next(following)
    broker.put(name, {"x": np.zeros(4)}, replace=True)
    with pytest.raises(vmmfd.MismatchError):
        next(following)


def test_async_get_waits(broker: vmmfd.Broker, name: str) -> None:
    async def both() -> vmmfd.Lease:
        task = asyncio.create_task(broker.get_async(name, wait=60))
        await asyncio.sleep(0.1)
        assert not task.done()
        broker.put(name, {"x": np.ones(2)})
        return await task

    with asyncio.run(both()) as lease:
        assert lease["x"].tolist() == [1.0, 1.0]
    with pytest.raises(vmmfd.NotFound):
        asyncio.run(broker.get_async(name + "/missing"))


@pytest.mark.parametrize("is_there", [False, True])
def test_cancelled_get_leaves_no_lease(broker: vmmfd.Broker, name: str, is_there: bool) -> None:
    async def cancelled() -> None:
        for number in range(20):
            task = asyncio.create_task(broker.get_async(name, wait=60))
            # Also while the lease arrives.
            await asyncio.sleep(0.002 * number if is_there else 0.01)
            task.cancel()
            try:
                (await task).close()
            except asyncio.CancelledError:
                pass

    if is_there:
        broker.put(name, {"x": np.ones(2)})
    asyncio.run(cancelled())
    if not is_there:
        broker.put(name, {"x": np.ones(2)})
    deadline = time.monotonic() + 20
    while (held := broker.who(name).leases) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not held


def test_watch_is_pollable(broker: vmmfd.Broker, name: str) -> None:
    watch = broker.watch(name)
    assert not select.select([watch], [], [], 0.1)[0] and watch.next(0) is None
    for _ in range(2):
        broker.put(name, {"x": np.zeros(2)}, replace=True)
    for kind in ("published", "replaced"):
        assert select.select([watch], [], [], 20)[0]
        place = watch.place
        event = watch.next(0)
        assert event is not None and event.kind == kind and watch.place != place
    assert not select.select([watch], [], [], 0.1)[0]
    watch.close()
    # The end is ready.
    assert select.select([watch], [], [], 0)[0] and list(watch) == []
    with pytest.raises(vmmfd.Invalid, match="the watch is closed"):
        watch.next(0)
    closed = broker.watch(name)
    closed.close()
    with pytest.raises(vmmfd.Invalid, match="the watch is closed"):
        closed.fileno()


def test_asyncio_reads_a_watch(broker: vmmfd.Broker, name: str) -> None:
    async def first() -> str:
        loop, came = asyncio.get_running_loop(), asyncio.Event()
        with broker.watch(name) as watch:
            loop.add_reader(watch, came.set)
            broker.put(name, {"x": np.zeros(2)})
            await asyncio.wait_for(came.wait(), 20)
            loop.remove_reader(watch)
            event = watch.next(0)
            assert event is not None
            return event.kind

    assert asyncio.run(first()) == "published"


def test_outage_is_logged_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    broker = vmmfd.connect(server.path, backend="host", timeout=3)
    server.kill()
    with caplog.at_level(logging.WARNING, "vmmfd"):
        begun = time.monotonic()
        thread = threading.Thread(target=lambda: pytest.raises(vmmfd.Disconnected, broker.get, "x"))
        thread.start()
        while not caplog.records and time.monotonic() < begun + 20:
            time.sleep(0.01)
        thread.join()
        pytest.raises(vmmfd.Disconnected, broker.get, "x")
    (record,) = caplog.records
    assert server.path in record.getMessage() and "waits up to 3 s" in record.getMessage()
    assert record.created and "vmmfd serve" in record.getMessage()
