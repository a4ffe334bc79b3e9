"""Models of this process that are attached to an object: their change to another version at the same addresses, and their sleep."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

from vllm.logger import init_logger

from .._errors import MismatchError
from ..torch._module import _refresh
from . import _vllm_ranks as ranks
from ._vllm_object import Found, record_of

_logger = init_logger("vllm.vmmfd")


class Live:
    """An attached model. `copies` are its private tensors, each with its mapped source."""

    def __init__(self, found: Found, copies: list[tuple[Any, Any]], wake: str) -> None:
        self._found = found
        self._copies = copies
        self._wake = wake
        # Whether sleep may have lost the contents of the private tensors.
        self._is_stale = False
        self._prepared: Any = None
        # The seconds of the last exchange.
        self._switched = 0.0
        # Whether all ranks are prepared.
        self._is_prepared = False

    @property
    def _lease(self) -> Any:
        return self._found.held

    def prepare(self, version: int | None, wait: float) -> None:
        """Imports a version on all ranks, by default the newest, while the present one is in use. Raises on all ranks if one of them can't."""
        self.drop()
        if version is None:
            version = ranks.first(self._newest)
        ranks.together(lambda: self._prepare(version, wait), f"prepare version {version}", self.drop)
        self._is_prepared = True

    def switch(self) -> None:
        """Maps the prepared version on all ranks, or leaves all on the present one. Nothing may use the model during the call."""
        if not self._is_prepared:
            return
        before, begin = self._lease.version, time.perf_counter()
        # Also finds a rank that has ended since `prepare`.
        ranks.together(lambda: None, "begin the switch", self.drop)
        ranks.together(self._switch, "switch", self._switch_back)
        switched = self._switched
        self._is_prepared = False
        previous, self._prepared = self._prepared, None
        if previous is not None:
            # The engine need not wait for it: the driver may free the whole version.
            threading.Thread(target=previous.close, name="vmmfd-release").start()
        _logger.info(
            "vmmfd: switched %s from version %d to %d in %.5f s, %.5f s of it unmapped",
            *(self._found.name, before, self._lease.version, time.perf_counter() - begin, switched),
        )

    def drop(self) -> None:
        """Ends the lease of a prepared version."""
        self._is_prepared = False
        if self._prepared is not None:
            self._prepared.close()
            self._prepared = None

    def park(self) -> None:
        """Unmaps the weights and keeps their addresses."""
        if not self._lease.is_parked:
            begin = time.perf_counter()
            self.drop()
            self._lease.park(keep_lease=self._wake == "own", exports_unused=True)
            _logger.info("vmmfd: parked %s version %d in %.4f s", self._found.name, self._lease.version, time.perf_counter() - begin)

    def unpark(self) -> None:
        """Maps the weights at their addresses again, on all ranks or none: the parked version, or the newest."""
        begin, was_parked = time.perf_counter(), self._lease.is_parked
        if was_parked:
            version = ranks.first(self._newest) if self._wake == "newest" else self._lease.version
            self._is_stale |= version != self._lease.version
            ranks.together(lambda: self._unpark(version), f"wake with version {version}", self.park)
        if self._is_stale:
            self.refill()
        if was_parked:
            _logger.info("vmmfd: unparked %s version %d in %.4f s", self._found.name, self._lease.version, time.perf_counter() - begin)

    def remap(self) -> None:
        """Maps the parked version again, on this rank alone."""
        if self._lease.is_parked:
            self._lease.unpark(version=self._lease.version)
        if self._is_stale:
            self.refill()

    def lose(self) -> None:
        """Records that the private tensors lose their contents: `unpark` fills them."""
        self._is_stale = True

    def refill(self) -> None:
        """Copies the version's bytes into the private tensors."""
        import torch

        with torch.inference_mode():
            _refresh(self._copies)
        self._is_stale = False

    def _newest(self) -> int:
        version: int = self._found.broker.stat(self._found.name).summary.version
        return version

    def _prepare(self, version: int, wait: float) -> None:
        if version == self._lease.version:
            return
        self._prepared = self._lease.prepare(version=version, wait=wait)
        try:
            self._check(self._prepared.metadata, version)
        except BaseException:
            self.drop()
            raise

    def _check(self, metadata: Any, version: int) -> None:
        """Raises `MismatchError` unless a version was made from one of this object."""
        theirs, ours = record_of(self._found, metadata), self._found.recorded
        fields = [field for field in sorted(theirs.keys() | ours.keys()) if theirs.get(field) != ours.get(field) and field != "updated"]
        if fields:
            raise MismatchError(
                f"version {version} of {self._found.name!r} was not made from the engine's version {self._lease.version} (different: "
                f"{', '.join(fields)}): make it with vmmfd.engines.vllm.next_version"
            )

    def _exchange(self) -> None:
        if self._prepared is not None:
            begin = time.perf_counter()
            self._prepared = self._lease.switch(self._prepared, exports_unused=True)
            self._switched = time.perf_counter() - begin

    def _switch(self) -> None:
        self._exchange()
        try:
            self.refill()
        except BaseException:
            self._exchange()
            raise

    def _switch_back(self) -> None:
        self._exchange()
        self.refill()
        self.drop()

    def _unpark(self, version: int) -> None:
        if version != self._lease.version:
            self._check(self._found.broker.stat(self._found.name, version=version).metadata, version)
        self._lease.unpark(version=version)


_models: weakref.WeakKeyDictionary[Any, Live] = weakref.WeakKeyDictionary()


def add(model: Any, live: Live) -> None:
    _models[model] = live


def of(model: Any) -> Live | None:
    """Returns a model's lease and private tensors, None if it is not attached."""
    return _models.get(model)


def every() -> Iterator[Live]:
    return iter(list(_models.values()))
