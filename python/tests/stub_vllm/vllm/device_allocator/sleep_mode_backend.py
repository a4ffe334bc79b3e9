import importlib

# What vLLM's own backend was asked, in order.
asked: list = []


class CuMemBackend:
    def suspend(self, level: int = 1) -> None:
        asked.append(("suspend", level))

    def resume(self, tags: "list[str] | None" = None) -> None:
        asked.append(("resume", tags))

    def discard(self, tags: "tuple[str, ...]") -> None:
        asked.append(("discard", tags))


class SleepModeBackendFactory:
    _registry: dict = {}

    @classmethod
    def register_backend(cls, name: str, module_path: str, class_name: str) -> None:
        assert name not in cls._registry
        cls._registry[name] = lambda: getattr(importlib.import_module(module_path), class_name)

    @classmethod
    def create_backend(cls, model_config: "ModelConfig") -> "CuMemBackend":
        return cls._registry[model_config.sleep_mode_backend]()()
