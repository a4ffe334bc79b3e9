"""Recalls: the owner asks readers for a version's memory."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import pytest
from conftest import Child, interrupted

import vmmfd


def put(broker: vmmfd.Broker, name: str, value: float = 1) -> None:
    broker.put(name, {"x": np.full(4, value)}, replace=True)


def test_handler_gives_memory_back(broker: vmmfd.Broker, name: str) -> None:
    put(broker, name)
    lease = broker.get(name)
    calls: list[tuple[vmmfd.Lease, bool]] = []

    @lease.on_recall
    def call(held: vmmfd.Lease) -> None:
        calls.append((held, threading.current_thread() is threading.main_thread()))
        held.close()

    put(broker, name)
    current = broker.get(name)
    assert not current.recalled
    with broker.watch(name) as watch:
        recall = broker.recall(name, earlier=True, wait=60)
        event = watch.next(60)
    assert event is not None and event.kind == "recalled"
    [holder] = recall.holders
    assert holder.acknowledged and holder.lease.recalled and holder.lease.version == 1
    assert (holder.lease.holder.pid, holder.lease.holder.uid) == (os.getpid(), os.getuid())
    assert recall.is_complete and recall.free and not recall.kept
    assert calls == [(lease, False)] and lease.is_closed and not current.recalled
    broker.delete(name)
    current.close()
    with pytest.raises(vmmfd.NotFound, match="no object"):
        broker.recall(name)
    with pytest.raises(vmmfd.Invalid, match="closed"):
        lease.recalled  # noqa: B018


def test_park_acknowledges_without_its_lease(broker: vmmfd.Broker, name: str) -> None:
    put(broker, name)
    lease = broker.get(name)
    first = broker.recall(name, wait=0)
    assert not first.is_complete and not first.free and first.kept and lease.recalled
    lease.park(keep_lease=True)
    assert not broker.recall(name, version=1, wait=0.05).is_complete and lease.recalled
    lease.park()
    last = broker.recall(name, wait=60)
    assert last.is_complete and last.holders == () and last.kept
    # The recall is over.
    lease.unpark()
    assert not lease.recalled
    lease.close()
    broker.delete(name)


def test_late_handler_is_called(broker: vmmfd.Broker, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(broker, name)
    raised: list[sys.UnraisableHookArgs] = []
    called = threading.Event()
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    with broker.get(name) as lease:
        broker.recall(name, wait=0)

        def fail(_: vmmfd.Lease) -> None:
            raise ValueError("no")

        assert lease.on_recall(fail) is fail
        lease.on_recall(lambda _: called.set())
        assert called.wait(60)
    assert [type(one.exc_value) for one in raised] == [ValueError]
    broker.delete(name)


def test_handlers_follow_the_version(broker: vmmfd.Broker, name: str) -> None:
    put(broker, name)
    versions: list[int] = []
    called = threading.Semaphore(0)
    lease = broker.get(name)

    @lease.on_recall
    def call(held: vmmfd.Lease) -> None:
        versions.append(held.version)
        called.release()

    put(broker, name, 2)
    old = lease.switch(lease.prepare())
    # The lease of the old version is not the program's business any more, but it is held.
    recall = broker.recall(name, version=1, wait=0.2)
    assert [holder.acknowledged for holder in recall.holders] == [False] and not versions
    old.close()
    broker.recall(name, wait=0)
    assert called.acquire(timeout=60) and versions == [2]
    lease.park()
    put(broker, name, 3)
    lease.unpark(version="newest")
    broker.recall(name, wait=0)
    assert called.acquire(timeout=60) and versions == [2, 3]
    lease.close()
    broker.delete(name)


def test_recall_is_awaited(broker: vmmfd.Broker, name: str) -> None:
    put(broker, name)

    async def main() -> bool:
        with broker.get(name) as lease:
            waiting = asyncio.create_task(lease.recalled_async())
            done, _ = await asyncio.wait({waiting}, timeout=0.1)
            assert not done
            broker.recall(name, wait=0)
            await asyncio.wait_for(waiting, 60)
            # Nothing is left of a wait that was cancelled.
            await asyncio.wait_for(lease.recalled_async(), 60)
            return not lease._calls

    assert asyncio.run(main())
    broker.delete(name)


def test_put_recalls_earlier_versions(broker: vmmfd.Broker, name: str) -> None:
    first = broker.put(name, {"x": np.zeros(4)}, recall_old=0)
    assert first.recall is not None and first.recall.holders == () and first.recall.free
    lease, silent = broker.get(name), broker.get(name)
    lease.on_recall(lambda held: held.close())
    second = broker.put(name, {"x": np.ones(4)}, replace=True, recall_old=0.2)
    assert second.version == 2 == broker.stat(name).version and second.recall is not None
    assert sorted(holder.acknowledged for holder in second.recall.holders) == [False, True] and not second.recall.free
    assert lease.is_closed and silent.recalled and not broker.get(name).recalled
    silent.close()
    third = broker.put(name, {"x": np.ones(4)}, replace=True, recall_old=timedelta(seconds=60))
    assert third.recall is not None and third.recall.is_complete
    assert broker.put(name, {"x": np.ones(4)}, replace=True).recall is None
    # Refused before the put.
    with pytest.raises(vmmfd.Invalid, match="recall_old=-1"):
        broker.put(name, {"x": np.ones(4)}, replace=True, recall_old=-1)
    assert broker.stat(name).version == 4
    broker.delete(name)


def test_handlers_keep_no_lease(broker: vmmfd.Broker, name: str) -> None:
    put(broker, name)
    lease = broker.get(name)
    lease.on_recall(lambda _: lease.close())
    gone = weakref.ref(lease)
    del lease
    gc.collect()
    assert gone() is None
    assert broker.recall(name, wait=60).is_complete
    broker.delete(name)


def test_silent_holder_is_named(broker: vmmfd.Broker, name: str, child: Callable[..., Child]) -> None:
    put(broker, name)
    reader = child(
        """
        import sys, vmmfd
        lease = vmmfd.connect(sys.argv[1], backend="host").get(sys.argv[2])
        print("ready", flush=True)
        sys.stdin.read()
        """,
        broker.path,
        name,
    )
    reader.wait_for()
    broker.delete(name)
    assert interrupted(lambda: broker.recall(name, wait=60), 0.2) is None
    recall = broker.recall(name, wait=0.2)
    assert [(holder.lease.holder.pid, holder.acknowledged) for holder in recall.holders] == [(reader.pid, False)]
    assert not recall.free
    killed = threading.Timer(0.2, reader.process.kill)
    killed.start()
    recall = broker.recall(name, wait=60)
    assert recall.is_complete and recall.free
    killed.join()
