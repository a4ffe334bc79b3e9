"""vLLM's sleep backend `vmmfd`: parks the weights, and leaves all other memory to vLLM's own backend."""

from __future__ import annotations

from vllm.device_allocator.sleep_mode_backend import CuMemBackend

from . import _vllm_live


class SleepBackend(CuMemBackend):  # type: ignore[misc]
    """The weights stay in the broker: neither level copies them to the host."""

    def suspend(self, level: int = 1) -> None:
        for live in _vllm_live.every():
            live.park()
            if level > 1:
                live.lose()
        try:
            super().suspend(level)
        except BaseException:
            for live in _vllm_live.every():
                live.unpark()
            raise

    def resume(self, tags: list[str] | None = None) -> None:
        super().resume(tags)
        if tags is None or "weights" in tags:
            for live in _vllm_live.every():
                live.unpark()

    def discard(self, tags: tuple[str, ...]) -> None:
        if "weights" in tags:
            for live in _vllm_live.every():
                live.park()
                live.lose()
        super().discard(tags)
