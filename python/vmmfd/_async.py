"""Blocking calls for asyncio, each in its own thread: the default executor's few threads would wait for each other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from . import _native
from . import _types as t


async def in_thread(call: Callable[[], t.Closable], stop: _native.Stop) -> t.Closable:
    """Returns the result of a call that blocks. If the task is cancelled, stops the call and closes its result."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[t.Closable] = loop.create_future()

    def deliver(result: t.Closable | None, error: BaseException | None) -> None:
        if future.cancelled():
            if result is not None:
                result.close()
        elif result is not None:
            future.set_result(result)
        elif error is not None:
            future.set_exception(error)

    def run() -> None:
        result, raised = None, None
        try:
            result = call()
        except BaseException as error:
            raised = error
        try:
            loop.call_soon_threadsafe(deliver, result, raised)
        except RuntimeError:  # The loop is closed.
            if result is not None:
                result.close()

    threading.Thread(target=run, name="vmmfd-async", daemon=True).start()
    try:
        return await future
    except asyncio.CancelledError:
        stop.set()
        # Cancelled between the result and this task's next step.
        if future.done() and not future.cancelled() and future.exception() is None:
            future.result().close()
        raise
