"""vLLM's load format `vmmfd`: one engine loads a model and leaves it in a broker, all others map the same memory.

    vllm serve MODEL --load-format vmmfd

vLLM finds `register` by the entry point `vllm.general_plugins`. `--model-loader-extra-config` takes a JSON object with these fields:

- `broker`: the path of the broker's socket; by default the path that `vmmfd.connect()` uses.
- `trust`: the numbers of users whose broker is trusted, besides root and this process's own user.
- `owner`: the number of the user whose object is used; by default this process's own. Another user's object is refused.
- `name`: the name of the object; by default one made of the model and the key below. The GPU's UUID and the rank are appended.
- `on_missing`: `"load"` (the default) loads the model from disk and publishes it if there is no object; `"fail"` fails.
- `wait`: how many seconds to wait for the object while another engine loads it, or with `"fail"` for any to appear; 600 by default.
- `on_unsupported`: `"fail"` (the default) refuses a model that can't be shared; `"load"` loads it from disk for this engine alone.

An object is used only if its key equals the engine's: engine and version, types, quantisation, parallel sizes and rank, the backends that
change the layout of weights, and the identity of the contents. Otherwise the engine fails with an error that names the fields.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import time
import weakref
from collections.abc import Iterator
from typing import Any

import vmmfd

from .._errors import Differs, Error, NotFound, Timeout, Unsupported
from . import _state
from ._contents import Contents, is_record
from ._options import read

_FORMAT = "vmmfd"
# Environment variables that change how vLLM lays out weights.
_VARIABLES = ("VLLM_USE_DEEP_GEMM", "VLLM_USE_DEEP_GEMM_E8M0", "VLLM_BATCH_INVARIANT")
# Lists of names that an object's metadata has: tensors that loading set to None, and tensors that it changed in shape.
_NAMES = ("none", "reshaped")

# What `get_external_weight_memory` found, for `load_model`, which vLLM calls on another loader: the connection, the claim or lease, and the
# key. By the path of the broker and the name.
_found: dict[tuple[str | None, str], _Found] = {}
_registered = False


def register() -> None:
    """Registers the load format with vLLM. Opens no driver and no connection. A second call does nothing."""
    global _registered
    if _registered:
        return
    try:
        from vllm.model_executor.model_loader import register_model_loader

        register_model_loader(_FORMAT)(_loader_class())
    except Exception as error:
        # vLLM calls this at each start, also where nobody asks for the load format.
        logging.getLogger("vllm.vmmfd").warning("vmmfd: this vLLM can't have the load format vmmfd: %r", error)
        return
    _registered = True


@dataclasses.dataclass
class _Found:
    broker: Any
    name: str
    held: Any
    key: dict[str, Any]
    contents: Contents
    seconds: float
    # The maker's record of an object.
    recorded: dict[str, Any] = dataclasses.field(default_factory=dict)


def _key(vllm_config: Any, model_config: Any) -> dict[str, Any]:
    """What decides the layout and the values of weights after processing, but for the contents of the checkpoint."""
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
    # vLLM unties embeddings if the files have a head of their own, and so not once the files are gone.
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
        # These divide experts too, with and without expert parallelism.
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
    return {field: _plain(value) for field, value in key.items()}


def _plain(value: Any) -> Any:
    """A value as JSON that is the same in each process: sets have no order, and JSON has no infinity."""
    if isinstance(value, dict):
        return {str(field): _plain(of) for field, of in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    is_json = value is None or type(value) in (bool, str) or (type(value) in (int, float) and abs(value) < 1 << 63)
    return value if is_json else str(value)


def _object_name(options: dict[str, Any], model: str, device: str, key: dict[str, Any]) -> str:
    """The name of the object: the user's or one of the model and the key, the GPU, and the rank where there are several. `model` is a
    folder's real path, or a repository."""
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


def _flat(key: dict[str, Any]) -> dict[str, Any]:
    """A key without nested mappings: their fields are named `mapping.field`."""
    flat: dict[str, Any] = {}
    for field, value in key.items():
        flat.update({f"{field}.{name}": of for name, of in value.items()} if isinstance(value, dict) else {field: value})
    return flat


def _recorded(found: _Found) -> dict[str, Any]:
    """The maker's record beside the tensors. Raises `Differs` if another kind of program made the object."""
    recorded = found.held.metadata.get("vllm")
    if (
        not isinstance(recorded, dict)
        or not isinstance(recorded.get("key"), dict)
        or not is_record(recorded.get("contents"))
        or not _state.is_changes(recorded.get("state"))
        or not isinstance(recorded.get("backends"), dict)
        or not isinstance(recorded.get("untied"), bool)
        or not all(isinstance(recorded.get(names), list) and all(isinstance(name, str) for name in recorded[names]) for names in _NAMES)
    ):
        raise Differs(f"{found.name!r} in the broker was not published by load format vmmfd: set another name")
    return recorded


def _check_key(found: _Found) -> dict[str, Any]:
    """The maker's record. Raises `Differs` unless the leased object equals the model that this engine would load."""
    recorded = _recorded(found)
    theirs, ours = _flat(recorded["key"]), _flat(found.key)
    fields = [
        f"{field}: {theirs.get(field)!r} in the object, {ours.get(field)!r} here"
        for field in sorted(theirs.keys() | ours.keys())
        if theirs.get(field) != ours.get(field)
    ]
    difference = found.contents.difference(recorded["contents"])
    if difference:
        fields.append(f"contents: {difference}")
    if fields:
        raise Differs(
            f"{found.name!r} in the broker, version {found.held.version}, does not fit this engine ({'; '.join(fields)}). "
            f"Set another name, or remove it with `vmmfd rm {found.name}`"
        )
    return recorded


@contextlib.contextmanager
def _in_turn() -> Iterator[None]:
    """The first rank of an engine asks before the others. If all asked at once, two engines could get a claim each and wait for each other:
    no rank loads before all ranks of its engine have their answer."""
    from vllm.distributed import get_world_group

    group = get_world_group()
    if group.world_size > 1 and group.rank_in_group > 0:
        group.barrier()
    try:
        yield
    finally:
        if group.world_size > 1 and group.rank_in_group == 0:
            group.barrier()


def _unshareable(vllm_config: Any) -> str | None:
    """Why the weights of a configuration can't be shared, or None."""
    if getattr(vllm_config.parallel_config, "enable_eplb", False):
        return "EPLB moves experts between ranks at run time"
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        return "weight transfer writes to the weights at run time"
    offload = getattr(vllm_config, "offload_config", None)
    if getattr(getattr(offload, "uva", None), "cpu_offload_gb", 0) or getattr(getattr(offload, "prefetch", None), "offload_group_size", 0):
        return "offloading moves weights from the GPU"
    return None


def _check_methods(model: Any) -> None:
    """Raises `Unsupported` if a layer's quantisation does not declare that it takes processed weights."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and not getattr(method, "supports_pre_processed_weights", False):
            raise Unsupported(
                f"layer {name or 'of the model'}: {type(method).__name__} does not declare that it takes processed weights. "
                'Use --load-format auto, or set "on_unsupported": "load"',
                kind="unsupported",
            )


def _check_backends(name: str, theirs: dict[str, Any], ours: dict[str, int]) -> None:
    """Raises `Differs` unless a model is built with the backends of an object's maker, which lay out weights."""
    fields = [
        f"{backend} in {theirs.get(backend, 0)} layers of the object, {ours.get(backend, 0)} here"
        for backend in sorted(theirs.keys() | ours.keys())
        if theirs.get(backend) != ours.get(backend)
    ]
    if fields:
        raise Differs(f"{name!r} was made with other backends ({'; '.join(fields)}): start both engines with the same options and environment")


@contextlib.contextmanager
def _untied(model_config: Any, untied: bool) -> Iterator[None]:
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


def _refuse_loading(model: Any) -> None:
    """Lets a model refuse new weights: other engines use the same memory."""

    def load_weights(*_: Any, **__: Any) -> Any:
        raise Unsupported("load format vmmfd does not load into a model in place: other engines use its memory", kind="unsupported")

    model.load_weights = load_weights


def _loader_class() -> Any:
    """The loader, a subclass of vLLM's."""
    import torch
    from vllm.logger import init_logger
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader import BaseModelLoader, utils
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.utils.torch_utils import set_default_torch_dtype

    from ..torch import _exact, pool

    logger = init_logger("vllm.vmmfd")

    class DiskLoader(DefaultModelLoader):  # type: ignore[misc]
        """vLLM's own loading. Refuses an unshareable model before the weights are read, and records the model as built."""

        must_be_shareable = True
        claim: Any

        def create_model(self, *arguments: Any, **named: Any) -> Any:
            model = super().create_model(*arguments, **named)
            try:
                _check_methods(model)
            except Unsupported:
                if self.must_be_shareable:
                    raise
                self.claim.close()  # No other engine has to wait for this one.
            self.layout, self.state, self.backends = _exact.layout(model), _state.state(model), _state.backends(model)
            return model

    class VmmfdLoader(BaseModelLoader):  # type: ignore[misc]
        """Attaches a model's weights, or loads and publishes them."""

        def __init__(self, load_config: Any) -> None:
            super().__init__(load_config)
            self.options = read(load_config.model_loader_extra_config)

        def get_external_weight_memory(self, vllm_config: Any) -> int:
            """The bytes that other processes hold for this engine, which vLLM leaves out of its own budget. Finds the object, or
            takes the claim to load it."""
            if _unshareable(vllm_config):
                return 0
            found = self._find(vllm_config, vllm_config.model_config)
            _found[self.options["broker"], found.name] = found
            return sum(part.mapped_size for part in found.held.parts) if isinstance(found.held, vmmfd.Lease) else 0

        def download_model(self, model_config: Any) -> None:
            self._from_disk().download_model(model_config)

        def load_weights(self, model: Any, model_config: Any) -> None:
            raise Unsupported(
                "load format vmmfd does not load into a model in place: other engines use the same memory. Restart the engine",
                kind="unsupported",
            )

        def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
            arguments: dict[str, Any] = {"vllm_config": vllm_config, "model_config": model_config, "prefix": prefix}
            speculative = vllm_config.speculative_config
            if speculative is not None and model_config is speculative.draft_model_config:
                logger.info("vmmfd: the draft model is not shared, and loads from disk")
                return self._from_disk().load_model(**arguments)
            reason = _unshareable(vllm_config)
            if reason:
                if self.options["on_unsupported"] == "fail":
                    raise Unsupported(
                        f"this model can't be shared: {reason}. Use --load-format auto, or set \"on_unsupported\": \"load\"",
                        kind="unsupported",
                    )
                logger.warning("vmmfd: loading from disk for this engine alone: %s", reason)
                return self._from_disk().load_model(**arguments)
            found = self._find(vllm_config, model_config)
            if isinstance(found.held, vmmfd.Lease):
                return self._attach_or_load(found, arguments)
            with found.held:
                return self._load(found, arguments)

        def _device(self, vllm_config: Any) -> Any:
            device = torch.device(self.load_config.device or vllm_config.device_config.device)
            if device.type == "cuda" and device.index is None:
                device = torch.device("cuda", torch.cuda.current_device())
            return device

        def _from_disk(self, loader: Any = DefaultModelLoader) -> Any:
            return loader(dataclasses.replace(self.load_config, load_format="auto", model_loader_extra_config={}))

        def _find(self, vllm_config: Any, model_config: Any) -> _Found:
            """The object, or the claim to make it. `load_model` takes over the result of `get_external_weight_memory`."""
            begin = time.perf_counter()
            options, device = self.options, self._device(vllm_config)
            backend = "cuda" if device.type == "cuda" else "host"
            key = _key(vllm_config, model_config)
            uuid = vmmfd.device_uuid(device.index or 0, backend=backend)
            contents = Contents(model_config.model, getattr(model_config.hf_config, "_commit_hash", None))
            name = _object_name(options, contents.source, uuid, key)
            if (options["broker"], name) in _found:
                return _found.pop((options["broker"], name))
            broker = vmmfd.connect(options["broker"], backend=backend, trust=options["trust"])
            with _in_turn():
                held = self._ask(broker, name)
            found = _Found(broker, name, held, key, contents, 0)
            if isinstance(held, vmmfd.Lease):
                try:
                    found.recorded = _check_key(found)
                except BaseException:
                    held.close()
                    raise
            found.seconds = time.perf_counter() - begin
            return found

        def _ask(self, broker: Any, name: str) -> Any:
            """A lease of the object, or the claim to make it."""
            ask = broker.get if self.options["on_missing"] == "fail" else broker.claim
            owner = os.geteuid() if self.options["owner"] is None else self.options["owner"]
            try:
                return ask(name, expect_owner=owner)
            except (NotFound, Timeout):
                if not self.options["wait"]:
                    raise
            logger.info("vmmfd: waiting up to %g s for %s", self.options["wait"], name)
            return ask(name, expect_owner=owner, wait=self.options["wait"])

        def _attach_or_load(self, found: _Found, arguments: dict[str, Any]) -> Any:
            """Attaches, or loads from disk for this engine alone if the model's classes do not take processed weights and the user asked so."""
            try:
                return self._attach(found, arguments)
            except Differs:
                raise
            except Exception as error:
                found.held.close()
                if self.options["on_unsupported"] == "fail":
                    raise Unsupported(
                        f"{found.name!r} can't be attached: {str(error).rstrip('.')}. Use --load-format auto, or set \"on_unsupported\": \"load\"",
                        kind="unsupported",
                    ) from error
                logger.warning("vmmfd: %s can't be attached, and loads from disk for this engine alone: %s", found.name, error)
            # The first model's layers are registered here by their names.
            arguments["vllm_config"].compilation_config.static_forward_context.clear()
            return self._from_disk().load_model(**arguments)

        def _attach(self, found: _Found, arguments: dict[str, Any]) -> Any:
            """Builds the model on meta and gives it the object's tensors."""
            try:
                from vllm.model_executor.utils import weights_already_processed
            except ImportError:
                raise Unsupported("this vLLM takes no processed weights: install 0.33 or newer", kind="unsupported") from None
            vllm_config, model_config = arguments["vllm_config"], arguments["model_config"]
            times = [time.perf_counter()]
            recorded = found.recorded
            with set_default_torch_dtype(model_config.dtype), _untied(model_config, recorded["untied"]):
                with torch.device("meta"):
                    model = utils.initialize_model(**arguments)
                _check_methods(model)
                _check_backends(found.name, recorded["backends"], _state.backends(model))
                times.append(time.perf_counter())
                attached = _exact.attach(found.held, model, set(recorded["reshaped"]), is_deferred_attention_layer)
                times.append(time.perf_counter())
                device = self._device(vllm_config)
                with weights_already_processed():
                    utils.process_weights_after_loading(model, model_config, device)
                absent = attached.finish(model)
                left = _exact.settle(model, device, set(recorded["none"]))
                absent += _state.restore(model, recorded["state"])
                if absent:
                    raise Unsupported(f"processing left out what the maker has: {', '.join(absent[:5])}", kind="unsupported")
                times.append(time.perf_counter())
            _refuse_loading(model)
            # The lease lasts as long as the model.
            weakref.finalize(model, found.held.close)
            build, bind, process = (end - begin for begin, end in zip(times, times[1:], strict=False))
            logger.info(
                "vmmfd: attached %s version %d: %d arrays, %d bytes, %d of them copied; find %.4f s, meta build %.4f s, bind %.4f s, "
                "process %.4f s; read %d bytes of files; left on meta: %s",
                *(found.name, found.held.version, attached.arrays, sum(part.size for part in found.held.parts), attached.copied),
                *(found.seconds, build, bind, process, found.contents.read, ", ".join(left) or "none"),
            )
            return model.eval()

        def _load(self, found: _Found, arguments: dict[str, Any]) -> Any:
            """Loads the model as vLLM does, in memory that can be shared, and publishes it."""
            vllm_config = arguments["vllm_config"]
            device = self._device(vllm_config)
            loader = self._from_disk(DiskLoader)
            loader.must_be_shareable, loader.claim = self.options["on_unsupported"] == "fail", found.held
            times = [time.perf_counter()]
            with self._pool(device, found):
                model = loader.load_model(**arguments)
            times.append(time.perf_counter())
            try:
                _check_methods(model)
                value = _exact.Exact(found.broker, model, device)
                recorded = {
                    "key": found.key,
                    "contents": found.contents.record(),
                    "none": sorted(loader.layout.keys() & _exact.nones(model)),
                    "reshaped": _exact.reshaped(loader.layout, _exact.layout(model)),
                    "state": _state.changes(loader.state, _state.state(model)),
                    "backends": loader.backends,
                    "untied": bool(getattr(vllm_config.model_config, "word_embeddings_untied_by_checkpoint", False)),
                }
                times.append(time.perf_counter())
                published = found.held.put(value, metadata={"vllm": recorded})
            except (Error, RuntimeError) as error:
                if isinstance(error, Unsupported) and loader.must_be_shareable:
                    raise
                # The model is loaded and right: this engine serves it.
                logger.warning("vmmfd: %s is loaded for this engine alone, and not published: %s", found.name, error)
                return model
            times.append(time.perf_counter())
            _refuse_loading(model)
            load, digest, publish = (end - begin for begin, end in zip(times, times[1:], strict=False))
            logger.info(
                "vmmfd: loaded and published %s version %d: load %.3f s, digests of %d bytes of files %.3f s, publish %.4f s",
                *(published.name, published.version, load, found.contents.read, digest, publish),
            )
            return model

        def _pool(self, device: Any, found: _Found) -> Any:
            if device.type != "cuda":
                return contextlib.nullcontext()
            ranks = found.key["tensor_parallel"][1] * found.key["pipeline_parallel"][1]
            # Of the weights nearly all, and the rest in pieces as small as PyTorch's: a piece that is not full is memory lost.
            return pool(20 << 20, device, size=max(found.contents.nbytes * 24 // 25 // ranks, 1))

    return VmmfdLoader
