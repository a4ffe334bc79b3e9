from . import utils
from .base_loader import BaseModelLoader
from .default_loader import DefaultModelLoader

loaders = {"auto": DefaultModelLoader}


def register_model_loader(load_format: str):
    def register(loader):
        assert issubclass(loader, BaseModelLoader) and load_format not in loaders
        loaders[load_format] = loader
        return loader

    return register


def get_model_loader(load_config: "LoadConfig") -> BaseModelLoader:
    return loaders[load_config.load_format](load_config)
