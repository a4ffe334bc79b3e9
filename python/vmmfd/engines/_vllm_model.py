"""Models that vLLM builds: checks whether they can be shared, and the changes that sharing needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .._errors import MismatchError, Unsupported


def unshareable(vllm_config: Any) -> str | None:
    """Returns the reason why the weights of a configuration can't be shared, or None."""
    if getattr(vllm_config.parallel_config, "enable_eplb", False):
        return "EPLB moves experts between ranks at run time"
    transfer = getattr(vllm_config, "weight_transfer_config", None)
    if transfer is not None and transfer.backend != "vmmfd":
        return f"the weight transfer engine {transfer.backend!r} writes to the weights at run time, unlike vmmfd"
    offload = getattr(vllm_config, "offload_config", None)
    if getattr(getattr(offload, "uva", None), "cpu_offload_gb", 0) or getattr(getattr(offload, "prefetch", None), "offload_group_size", 0):
        return "offloading moves weights from the GPU"
    return None


def changes_in_place(vllm_config: Any) -> bool:
    """Returns whether the engine changes the version of its weights or parks them, so that it must map the broker's memory."""
    updates = getattr(vllm_config, "weight_transfer_config", None) is not None
    return updates or getattr(vllm_config.model_config, "sleep_mode_backend", None) == "vmmfd"


def check_methods(model: Any) -> None:
    """Raises `Unsupported` if a layer's quantisation does not declare that it accepts processed weights."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and not getattr(method, "supports_pre_processed_weights", False):
            raise Unsupported(
                f"layer {name or 'of the model'}: {type(method).__name__} does not declare that it accepts processed weights. "
                'Use --load-format auto, or set "on_unsupported": "load"',
                kind="unsupported",
            )


def check_backends(name: str, theirs: dict[str, Any], ours: dict[str, int]) -> None:
    """Raises `MismatchError` unless the model's backends, which determine the layout of weights, are those of the object's maker."""
    fields = [
        f"{backend} in {theirs.get(backend, 0)} layers of the object, {ours.get(backend, 0)} here"
        for backend in sorted(theirs.keys() | ours.keys())
        if theirs.get(backend) != ours.get(backend)
    ]
    if fields:
        raise MismatchError(f"{name!r} was made with other backends ({'; '.join(fields)}): start both engines with the same options and environment")


@contextlib.contextmanager
def untied(model_config: Any, untied: bool) -> Iterator[None]:
    """Builds a model with the head of the object's maker, tied or not, without a comparison of the weights."""
    config = model_config.hf_config
    if untied:
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    before = getattr(model_config, "word_embeddings_untied_by_checkpoint", False)
    if before:
        model_config.word_embeddings_untied_by_checkpoint = False
    try:
        yield
    finally:
        if before or untied:
            model_config.word_embeddings_untied_by_checkpoint = True


def refuse_loading(model: Any) -> None:
    """Makes a model refuse new weights: other engines use the same memory."""

    def load_weights(*_: Any, **__: Any) -> Any:
        raise Unsupported("load format vmmfd does not load into a model in place: other engines use its memory", kind="unsupported")

    model.load_weights = load_weights
