import importlib

from .base import WeightTransferEngine


class WeightTransferEngineFactory:
    _registry: dict = {}

    @classmethod
    def register_engine(cls, name: str, module_path_or_cls: "str | type", class_name: "str | None" = None) -> None:
        assert name not in cls._registry
        cls._registry[name] = lambda: getattr(importlib.import_module(module_path_or_cls), class_name)

    @classmethod
    def create_engine(
        cls, config: "WeightTransferConfig", vllm_config: "VllmConfig", device: "torch.device", model: "nn.Module"
    ) -> WeightTransferEngine:
        return cls._registry[config.backend]()(config, vllm_config, device, model)
