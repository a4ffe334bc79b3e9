"""Agreement of an engine's ranks: a step counts only if all of them can take it."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from vllm.distributed import get_world_group

from .._errors import Error

T = TypeVar("T")
# A rank that does not answer for this long is reported.
_PATIENCE = datetime.timedelta(seconds=30)


def first(work: Callable[[], T]) -> T:
    """Runs `work` on the first rank and returns its result on all ranks. Raises on all ranks if it fails, or a rank does not answer."""
    group = get_world_group()
    results = _exchange(group, _attempt(work) if group.rank_in_group == 0 else (None, None))
    found: T = _checked(group, results, results[:1])[0]
    return found


def together(work: Callable[[], T], what: str, undo: Callable[[], object]) -> T:
    """Runs `work` on all ranks and returns this rank's result. If it fails on one of them, or a rank does not answer, the ranks on which
    it succeeded call `undo`, and all raise; `what` completes the sentence "rank 1 could not ..."."""
    group = get_world_group()
    mine = _attempt(work)
    try:
        # Results stay in their process.
        results = _exchange(group, (None, mine[1]))
        results[group.rank_in_group] = mine
        done: T = _checked(group, results, results, what)[group.rank_in_group]
        return done
    except BaseException:
        if mine[1] is None:
            undo()
        raise


_Result = tuple[Any, BaseException | str | None]


def _attempt(work: Callable[[], Any]) -> _Result:
    try:
        return work(), None
    except Exception as error:
        return None, error


def _exchange(group: Any, mine: _Result) -> list[_Result]:
    if group.world_size == 1:
        return [mine]
    sent = mine[0], mine[1] and str(mine[1])
    results: list[Any] = [None] * group.world_size
    try:
        # Unlike the exchange itself, it has a limit.
        torch.distributed.monitored_barrier(group.cpu_group, timeout=_PATIENCE)
        torch.distributed.all_gather_object(results, sent, group=group.cpu_group)
    except RuntimeError as error:
        raise Error(f"a rank of the engine does not answer, so no rank changes its weights: {error}", kind="peer") from error
    results[group.rank_in_group] = mine
    return results


def _checked(group: Any, results: list[_Result], considered: list[_Result], what: str = "find the version") -> list[Any]:
    own = results[group.rank_in_group][1]
    if isinstance(own, BaseException):
        raise own
    for rank, (_, error) in enumerate(considered):
        if error is not None:
            raise Error(f"rank {rank} could not {what}, so no rank changes its weights: {error}", kind="peer")
    return [value for value, _ in results]
