"""Blocking calls for asyncio. Each call in progress has a thread: the few threads of the default executor would wait for each other."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from . import _types as t
from ._native import Stop

# How long an unused thread waits for another call, in seconds.
_IDLE = 10.0

# The queues of the unused threads.
_idle: list[SimpleQueue[Callable[[], None]]] = []
# A fork has no such threads.
os.register_at_fork(after_in_child=_idle.clear)


def _work(calls: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        try:
            call = calls.get(timeout=_IDLE)
        except Empty:
            try:
                _idle.remove(calls)
            except ValueError:  # A call is on its way.
                continue
            return
        call()
        del call
        _idle.append(calls)


def _start(call: Callable[[], None]) -> None:
    try:
        _idle.pop().put(call)
    except IndexError:
        calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        calls.put(call)
        threading.Thread(target=_work, args=(calls,), name="vmmfd-async", daemon=True).start()


async def in_thread(call: Callable[[], t.Result]) -> t.Result:
    """Returns the result of a call that blocks. If the task is cancelled, stops the call's waits and closes its result."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[t.Result] = loop.create_future()
    stop = Stop()
    left = False

    def deliver(result: t.Result | None, error: BaseException | None) -> None:
        if left or future.cancelled():
            _close(result)
        elif error is None:
            future.set_result(result)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def run() -> None:
        result, raised = None, None
        try:
            result = stop.run(call)
        except BaseException as error:
            raised = error
        try:
            loop.call_soon_threadsafe(deliver, result, raised)
        except RuntimeError:  # The loop is closed.
            _close(result)

    try:
        _start(run)
        return await future
    except BaseException:  # Also a closed coroutine, whose future is not cancelled.
        left = True
        stop.set()
        # Cancelled between the result and this task's next step.
        if future.done() and not future.cancelled() and future.exception() is None:
            _close(future.result())
        raise


def _close(result: object) -> None:
    close = getattr(result, "close", None)
    if close is not None:
        close()
