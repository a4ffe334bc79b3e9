from abc import ABC, abstractmethod


class WeightTransferInitInfo(ABC):
    pass


class WeightTransferUpdateInfo(ABC):
    pass


class WeightTransferEngine(ABC):
    def __init__(self, config: "WeightTransferConfig", vllm_config: "VllmConfig", device: "torch.device", model: "nn.Module"):
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model

    def update_weights(self, update_info: dict) -> None:
        self.receive_weights(self.update_info_cls(**update_info))

    @abstractmethod
    def init_transfer_engine(self, init_info: "WeightTransferInitInfo") -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def receive_weights(self, update_info: "WeightTransferUpdateInfo") -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...
