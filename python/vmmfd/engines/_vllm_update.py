"""vLLM's weight transfer engine `vmmfd`: an engine changes to a version that a trainer has put."""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from .._errors import Unsupported
from . import _vllm_live


@dataclasses.dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing: the load format is connected to the broker."""


@dataclasses.dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The version, by default the newest, and the seconds to wait for it."""

    version: int | None = None
    wait: float = 0


class TransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """`update_weights` prepares a version while the engine serves the old one, and `finish_weight_update` switches to it."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        live = _vllm_live.of(model)
        if live is None:
            raise Unsupported("weight transfer by vmmfd needs the load format: start the engine with --load-format vmmfd", kind="unsupported")
        self._live = live

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        self._live.drop()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self._live.prepare(update_info.version, update_info.wait)

    def finish_weight_update(self) -> None:
        self._live.switch()

    def shutdown(self) -> None:
        self._live.drop()
