"""A PyTorch model in vLLM's style, whose quantisation method changes its weights after loading, and engines that load it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import vllm_engine

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
vllm_engine.use_stub()

from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase  # noqa: E402
from vllm.model_executor.model_loader import get_model_loader  # noqa: E402
from vllm.model_executor.utils import is_weights_pre_processed  # noqa: E402

from vmmfd.engines import vllm as engine  # noqa: E402

nn = torch.nn
engine.register()


class ScaledKernel:
    """Has a size that only weight processing sets."""

    def __init__(self) -> None:
        self.size: int | None = None


class Method(QuantizeMethodBase):  # type: ignore[misc]
    supports_pre_processed_weights = True

    def __init__(self) -> None:
        self.scaled = ScaledKernel()

    def process_weights_after_loading(self, layer: Any) -> None:
        if is_weights_pre_processed():
            return
        layer.weight = nn.Parameter(layer.weight.detach().t(), requires_grad=False)
        layer.row = layer.weight.detach()[1]
        layer.scale = layer.raw_scale.detach().max() * torch.ones(3)
        moved = layer.moved
        del layer.moved
        layer.moved = moved + 1
        layer.folded = layer.folded.detach().reshape(-1, 1)
        del layer.raw_scale
        layer.input_scale = None
        layer.ceiling = float("inf")
        layer.is_folded = True
        self.scaled.size = layer.weight.shape[0]


class Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int) -> None:
        super().__init__()
        self.quant_method = Method()
        self.weight = nn.Parameter(torch.empty(width, 2 * width), requires_grad=False)
        self.raw_scale = nn.Parameter(torch.empty(4), requires_grad=False)
        self.input_scale = nn.Parameter(torch.empty(1), requires_grad=False)
        self.register_buffer("folded", torch.ones(6))
        self.register_buffer("moved", torch.ones(2))
        self.is_folded = False
        self._k_scale = torch.ones((), dtype=torch.float32)
        self.kv_cache = torch.tensor([])


class Model(nn.Module):  # type: ignore[misc]
    """`tokens` is the engine's maximum, which sizes buffers as in vLLM."""

    def __init__(self, tokens: int = 8, method: Any = None) -> None:
        super().__init__()
        width = 16
        self.embed = nn.Embedding(32, width)
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.embed.weight
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        if method is not None:
            self.layers[1].quant_method = method
        self.register_buffer("cache", torch.arange(4 * width, dtype=torch.float32).reshape(4, width), persistent=False)
        self.window = self.cache[1:3]
        self.picked = torch.zeros(tokens, 2, dtype=torch.int32)

    def read(self, folder: str) -> None:
        """Fills the tensors with values derived from the file's bytes."""
        seed = int.from_bytes(hashlib.sha256((Path(folder) / "model.safetensors").read_bytes()).digest()[:6], "little")
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def load(config: Any) -> Any:
    return get_model_loader(config.load_config).load_model(vllm_config=config, model_config=config.model_config)


def tensors(model: Any) -> dict[str, tuple[str, Any]]:
    """Returns all tensors of a model and their kinds, by name."""
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for kind, table in (("parameter", module._parameters), ("buffer", module._buffers), ("attribute", vars(module))):
            for leaf, value in table.items():
                if isinstance(value, torch.Tensor):
                    name = f"{path}.{leaf}".lstrip(".")
                    assert name not in found, name
                    found[name] = (kind, value)
    return found


def describe(model: Any) -> dict[str, tuple[Any, ...]]:
    """Returns kind, class, shape, stride, type, device and bytes of all tensors."""
    return {
        name: (
            kind,
            type(tensor),
            *(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device),
            tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"",
        )
        for name, (kind, tensor) in tensors(model).items()
    }


def digest(model: Any) -> str:
    return hashlib.sha256(repr(sorted(describe(model).items())).encode()).hexdigest()
