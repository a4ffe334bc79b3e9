from abc import ABC, abstractmethod

from . import utils


class BaseModelLoader(ABC):
    def __init__(self, load_config: "LoadConfig"):
        self.load_config = load_config

    def get_external_weight_memory(self, vllm_config: "VllmConfig") -> int:
        return 0

    @abstractmethod
    def download_model(self, model_config: "ModelConfig") -> None: ...

    @abstractmethod
    def load_weights(self, model: "nn.Module", model_config: "ModelConfig") -> None: ...

    def create_model(self, vllm_config: "VllmConfig", model_config: "ModelConfig", prefix: str = "") -> "nn.Module":
        return utils.initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)

    def load_model(self, vllm_config: "VllmConfig", model_config: "ModelConfig", prefix: str = "") -> "nn.Module":
        import torch

        from vllm.utils.torch_utils import set_default_torch_dtype

        device = torch.device(vllm_config.device_config.device)
        with set_default_torch_dtype(model_config.dtype):
            with device:
                model = self.create_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
            self.load_weights(model, model_config)
            utils.process_weights_after_loading(model, model_config, device)
        return model.eval()
