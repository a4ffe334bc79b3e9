"""Agreement of an engine's ranks: a step counts only if all of them can take it, and one rank reports a failure."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from vllm.distributed import get_world_group
from vllm.logger import init_logger

from .._errors import Error

T = TypeVar("T")


class Agreed(Error):
    """A failure that is raised on all ranks, in the same words."""


_logger = init_logger("vllm.vmmfd")
# A longer wait for another rank is logged, in seconds.
_PATIENCE = 30.0
# The worker's methods that use `first` and `together`.
_METHODS = ("start_weight_update", "update_weights", "finish_weight_update", "sleep", "wake_up", "discard")


def first(work: Callable[[], T]) -> T:
    """Runs `work` on the first rank and returns its result on all ranks. Raises on all ranks if it fails, or a rank has ended."""
    group = get_world_group()
    results = _exchange(group, _attempt(work) if group.rank_in_group == 0 else (None, None))
    found: T = _checked(group, results, results[:1])[0]
    return found


def together(work: Callable[[], T], what: str, undo: Callable[[], object]) -> T:
    """Runs `work` on all ranks and returns this rank's result. If it fails on one of them, or a rank has ended, the ranks on which
    it succeeded call `undo`, and all raise; `what` completes the sentence "rank 1 could not ..."."""
    group = get_world_group()
    mine = _attempt(work)
    try:
        # Results remain in their process.
        results = _exchange(group, (None, mine[1]))
        results[group.rank_in_group] = mine
        done: T = _checked(group, results, results, what)[group.rank_in_group]
        return done
    except BaseException:
        if mine[1] is None:
            undo()
        raise


def report_once(worker: type, size: int) -> None:
    """Makes a method of vLLM's worker that fails on any rank raise on the last of each `size` ranks only.

    vLLM's executors for several processes and for Ray read the ranks' responses in order and stop at the first failure. The later ranks'
    responses stay in their queues and answer the next call. A transfer engine can't prevent this itself: the worker ends its session only
    if the transfer engine raises, so all ranks must raise there. A second call does nothing.
    """
    for name in _METHODS:
        method = getattr(worker, name, None)
        if method is not None and not hasattr(method, "reports_once"):
            setattr(worker, name, _reporting_once(method, name, size))


def _reporting_once(method: Callable[..., Any], name: str, size: int) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(worker: Any, *arguments: Any, **named: Any) -> Any:
        global _early
        group = get_world_group()
        _early = None
        value, error = _attempt(lambda: method(worker, *arguments, **named))
        results = _early or _exchange(group, (None, error), ends=True)
        failed = [(rank, text) for rank, (_, text) in enumerate(results) if text is not None]
        if error is None and not failed:
            return value
        if error is not None:
            _logger.error("vmmfd: rank %d could not %s", group.rank_in_group, name, exc_info=error)
        # With data parallelism, the group has the ranks of several executors.
        if (group.rank_in_group + 1) % size:
            return None
        if error is not None and (isinstance(error, Agreed) or not failed):
            raise error
        rank, text = failed[0]
        raise Error(f"rank {rank} failed in {name}: {text}", kind="peer") from error

    call.reports_once = True  # type: ignore[attr-defined]
    return call


_Result = tuple[Any, Exception | str | None]
# The results of an exchange in which a rank's call ended, before the other ranks' calls.
_early: list[_Result] | None = None


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def _exchange(group: Any, mine: _Result, ends: bool = False) -> list[_Result]:
    """Returns the results of all ranks. Waits for a stopped rank: vLLM's executors wait for its response too, and a rank that gave up
    would be out of step with it afterwards. If a rank's call `ends` before this step, the step fails, and is the last of the call."""
    global _early
    if group.world_size == 1:
        return [mine]
    rank = group.rank_in_group
    sent = ends, mine[0], mine[1] and (str(mine[1]) or repr(mine[1]))
    received: list[Any] = [None] * group.world_size
    waiting = threading.Timer(_PATIENCE, _logger.warning, ["vmmfd: rank %d has waited %g s for another rank: is one stopped?", rank, _PATIENCE])
    waiting.daemon = True
    waiting.start()
    try:
        torch.distributed.all_gather_object(received, sent, group=group.cpu_group)
    except RuntimeError as error:
        raise Error(f"a rank of the engine has ended, so no rank changes its weights: {error}", kind="peer") from error
    finally:
        waiting.cancel()
    results: list[_Result] = [(value, text) for _, value, text in received]
    if any(each[0] for each in received) and not all(each[0] for each in received):
        _early = results
    results[rank] = mine
    return results


def _checked(group: Any, results: list[_Result], considered: list[_Result], what: str = "find the version") -> list[Any]:
    own = results[group.rank_in_group][1]
    if isinstance(own, Exception) and group.world_size == 1:
        raise own
    if _early:
        raise Error("another rank failed before this step, so no rank changes its weights", kind="peer")
    for rank, (_, error) in enumerate(considered):
        if error is not None:
            raise Agreed(f"rank {rank} could not {what}, so no rank changes its weights: {error}", kind="peer")
    return [value for value, _ in results]
