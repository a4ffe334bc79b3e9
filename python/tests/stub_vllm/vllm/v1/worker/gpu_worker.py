class Worker:
    """Calls a transfer engine and a sleep backend as vLLM does: a failed update ends the session, a failed finish does not."""

    def __init__(self, weight_transfer_engine: "WeightTransferEngine", sleep_mode_backend: "SleepModeBackend") -> None:
        self.weight_transfer_engine, self.sleep_mode_backend = weight_transfer_engine, sleep_mode_backend
        self._weight_update_active = False

    def start_weight_update(self) -> None:
        if self._weight_update_active:
            raise RuntimeError("start_weight_update called while a weight update is already active. Call finish_weight_update first.")
        self.weight_transfer_engine.start_weight_update()
        self._weight_update_active = True

    def update_weights(self, update_info: "dict | list[dict]") -> None:
        if not self._weight_update_active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        try:
            self.weight_transfer_engine.update_weights(update_info)
        except BaseException:
            self._weight_update_active = False
            raise

    def finish_weight_update(self) -> None:
        if not self._weight_update_active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        self.weight_transfer_engine.finish_weight_update()
        self._weight_update_active = False

    def sleep(self, level: int = 1) -> None:
        self.sleep_mode_backend.suspend(level)

    def wake_up(self, tags: "list[str] | None" = None) -> None:
        self.sleep_mode_backend.resume(tags)
