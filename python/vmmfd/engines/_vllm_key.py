"""An engine's key, which determines the layout and the values of its weights, and the object name derived from it."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

# Environment variables that change how vLLM lays out weights.
_VARIABLES = ("VLLM_USE_DEEP_GEMM", "VLLM_USE_DEEP_GEMM_E8M0", "VLLM_BATCH_INVARIANT")


def key_of(vllm_config: Any, model_config: Any) -> dict[str, Any]:
    """Returns everything that determines the layout and the values of processed weights, except the contents of the checkpoint."""
    import vllm
    from vllm.distributed import (
        get_dp_group,
        get_pcp_group,
        get_pp_group,
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    def of(config: str, field: str) -> Any:
        return getattr(getattr(vllm_config, config, None), field, None)

    parallel = vllm_config.parallel_config
    hf_config = model_config.hf_config
    values = {name: value for name, value in hf_config.to_dict().items() if name not in ("_name_or_path", "transformers_version")}
    # vLLM unties embeddings if the files have a separate head; without the files it cannot know.
    if getattr(model_config, "word_embeddings_untied_by_checkpoint", False):
        values["tie_word_embeddings"] = True
        if isinstance(values.get("text_config"), dict):
            values["text_config"] = values["text_config"] | {"tie_word_embeddings": True}
    key = {
        "engine": f"vllm {vllm.__version__}",
        "architectures": getattr(hf_config, "architectures", None),
        "dtype": model_config.dtype,
        "quantization": model_config.quantization,
        "quantization_config": getattr(model_config, "quantization_config", None),
        "config": values,
        "model_impl": getattr(model_config, "model_impl", None),
        "convert": getattr(model_config, "convert_type", None),
        "kv_cache_dtype": of("cache_config", "cache_dtype"),
        "kv_cache_dtype_skip_layers": sorted(of("cache_config", "kv_cache_dtype_skip_layers") or []),
        "tensor_parallel": [get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()],
        "pipeline_parallel": [get_pp_group().rank_in_group, get_pp_group().world_size],
        # These ranks divide experts too, with and without expert parallelism.
        "data_parallel": [get_dp_group().rank_in_group, get_dp_group().world_size],
        "prefill_context_parallel": [get_pcp_group().rank_in_group, get_pcp_group().world_size],
        "expert_parallel": getattr(parallel, "expert_placement_strategy", "linear") if parallel.enable_expert_parallel else None,
        "moe_backend": of("kernel_config", "moe_backend"),
        "linear_backend": of("kernel_config", "linear_backend"),
        "linear_backend_per_quant": of("kernel_config", "linear_backend_per_quant"),
        "attention_backend": of("attention_config", "backend"),
        "lora": vllm_config.lora_config is not None,
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
    return {field: plain(value) for field, value in key.items()}


def plain(value: Any) -> Any:
    """Returns a value as JSON that is equal in every process: sets are sorted, and numbers that JSON lacks become text."""
    if isinstance(value, dict):
        return {str(field): plain(of) for field, of in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    is_json = value is None or type(value) in (bool, str) or (type(value) in (int, float) and abs(value) < 1 << 63)
    return value if is_json else str(value)


def object_name(options: dict[str, Any], model: str, device: str, key: dict[str, Any]) -> str:
    """Returns the object's name: the user's base name, or one made of the model and the key; then the GPU, and each rank if there are
    several. `model` is a folder's real path, or a repository."""
    base = options["name"]
    if base is None:
        digest = hashlib.sha256(json.dumps([model, key], sort_keys=True).encode()).hexdigest()[:16]
        plain = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in model.rstrip("/").rpartition("/")[2])
        base = f"vllm/{plain[:80] or 'model'}-{digest}"
    ranks = [
        f"{short}{key[field][0]}of{key[field][1]}"
        for short, field in (
            *(("tp", "tensor_parallel"), ("pp", "pipeline_parallel")),
            *(("dp", "data_parallel"), ("pcp", "prefill_context_parallel")),
        )
        if key[field][1] > 1
    ]
    return "/".join([base, device, *ranks])


def flat(key: dict[str, Any]) -> dict[str, Any]:
    """Returns a key without nested mappings: their fields are named `mapping.field`."""
    flat: dict[str, Any] = {}
    for field, value in key.items():
        flat.update({f"{field}.{name}": of for name, of in value.items()} if isinstance(value, dict) else {field: value})
    return flat
