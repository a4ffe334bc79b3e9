from .base_loader import BaseModelLoader

# The models whose weights were read from disk.
read = []


class DefaultModelLoader(BaseModelLoader):
    def __init__(self, load_config: "LoadConfig"):
        super().__init__(load_config)
        assert not load_config.model_loader_extra_config, load_config

    def download_model(self, model_config: "ModelConfig") -> None:
        pass

    def load_weights(self, model: "nn.Module", model_config: "ModelConfig") -> None:
        read.append(model_config.model)
        model.read(model_config.model)
