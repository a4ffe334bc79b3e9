"""Engine configurations as in vLLM, and the stand-in for vLLM, for the tests of the load format."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

STUB = Path(__file__).with_name("stub_vllm")


def use_stub() -> None:
    """Makes `import vllm` find the stand-in."""
    if str(STUB) not in sys.path:
        sys.path.insert(0, str(STUB))


@dataclasses.dataclass
class LoadConfig:
    model_loader_extra_config: dict[str, Any]
    load_format: str = "vmmfd"
    device: str | None = None


class HfConfig(SimpleNamespace):
    """Writes a model's config file."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def configure(model: object, extra: dict[str, Any], make: Callable[[], Any] | None = None, dtype: Any = "bfloat16") -> Any:
    """Returns the configuration of an engine. `make` creates the model."""
    hf_config = HfConfig(architectures=["LlamaForCausalLM"], hidden_size=64, _commit_hash=None)
    return SimpleNamespace(
        load_config=LoadConfig(extra),
        model_config=SimpleNamespace(
            model=str(model),
            hf_config=hf_config,
            dtype=dtype,
            quantization=None,
            quantization_config=None,
            model_impl="auto",
            convert_type="none",
            make=make,
        ),
        device_config=SimpleNamespace(device="cpu"),
        cache_config=SimpleNamespace(cache_dtype="auto", kv_cache_dtype_skip_layers=[]),
        parallel_config=SimpleNamespace(enable_expert_parallel=False, expert_placement_strategy="linear", enable_eplb=False, world_size=1),
        kernel_config=SimpleNamespace(moe_backend="auto", linear_backend="auto", linear_backend_per_quant=None),
        attention_config=SimpleNamespace(backend=None),
        offload_config=SimpleNamespace(uva=SimpleNamespace(cpu_offload_gb=0), prefetch=SimpleNamespace(offload_group_size=0)),
        lora_config=None,
        speculative_config=None,
        weight_transfer_config=None,
    )
