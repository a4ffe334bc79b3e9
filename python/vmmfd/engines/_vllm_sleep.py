"""vLLM's sleep backend `vmmfd`: parks the weights, and leaves all other memory to vLLM's own backend."""

from __future__ import annotations

from vllm.device_allocator.sleep_mode_backend import CuMemBackend

from . import _vllm_apart, _vllm_live
from . import _vllm_ranks as ranks


class SleepBackend(CuMemBackend):  # type: ignore[misc]
    """The weights remain in the broker: neither level copies them to the host."""

    def suspend(self, level: int = 1) -> None:
        ranks.together(lambda: self._suspend(level), "sleep", self._stay_awake)

    def resume(self, tags: list[str] | None = None) -> None:
        # A rank that has memory again keeps it, and a second call continues.
        ranks.together(lambda: super(SleepBackend, self).resume(tags), "wake", lambda: None)
        if tags is None or "weights" in tags:
            for live in _vllm_live.every():
                live.unpark()

    def discard(self, tags: tuple[str, ...]) -> None:
        if "weights" in tags:
            for live in _vllm_live.every():
                live.park()
                live.lose()
        super().discard(tags)

    def _suspend(self, level: int) -> None:
        _vllm_apart.publish()
        for live in _vllm_live.every():
            live.park()
            if level > 1:
                live.lose()
        try:
            super().suspend(level)
        except BaseException:
            for live in _vllm_live.every():
                live.remap()
            raise

    def _stay_awake(self) -> None:
        super().resume()
        for live in _vllm_live.every():
            live.remap()
