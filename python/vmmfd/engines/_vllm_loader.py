"""The model loader, a subclass of vLLM's. Importing this module imports vLLM and PyTorch."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import time
import weakref
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader import BaseModelLoader, utils
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.utils.torch_utils import set_default_torch_dtype

import vmmfd

from .._errors import Error, MismatchError, NotFound, Timeout, Unsupported
from ..torch import _exact, pool
from . import _state, _vllm_apart, _vllm_live
from . import _vllm_ranks as ranks
from ._contents import Contents
from ._options import read
from ._vllm_key import key_of, object_name
from ._vllm_model import changes_in_place, check_backends, check_methods, refuse_loading, unshareable, untied
from ._vllm_object import Found, check_key, in_turn

_logger = init_logger("vllm.vmmfd")
# The results of `get_external_weight_memory`, by broker path and object name, for `load_model`, which vLLM calls on another loader.
_found: dict[tuple[str | None, str], Found] = {}


class DiskLoader(DefaultModelLoader):  # type: ignore[misc]
    """vLLM's own loading. Refuses an unshareable model before the weights are read, and records the model as built."""

    must_be_shareable = True
    claim: Any

    def create_model(self, *arguments: Any, **named: Any) -> Any:
        model = super().create_model(*arguments, **named)
        try:
            check_methods(model)
        except Unsupported:
            if self.must_be_shareable:
                raise
            self.claim.close()  # Other engines need not wait for this one.
        self.layout, self.state, self.backends = _exact.layout(model), _state.state(model), _state.backends(model)
        return model


class VmmfdLoader(BaseModelLoader):  # type: ignore[misc]
    """Attaches a model's weights, or loads and publishes them."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self.options = read(load_config.model_loader_extra_config)

    def get_external_weight_memory(self, vllm_config: Any) -> int:
        """Returns the bytes that other processes hold for this engine, which vLLM excludes from its own budget. Finds the object, or takes
        the claim to load it."""
        if unshareable(vllm_config):
            return 0
        found = self._find(vllm_config, vllm_config.model_config)
        _found[self.options["broker"], found.name] = found
        return sum(part.mapped_size for part in found.held.parts) if isinstance(found.held, vmmfd.Lease) else 0

    def download_model(self, model_config: Any) -> None:
        self._from_disk().download_model(model_config)

    def load_weights(self, model: Any, model_config: Any) -> None:
        raise Unsupported(
            "load format vmmfd does not load into a model in place: other engines use its memory. Restart the engine",
            kind="unsupported",
        )

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        arguments: dict[str, Any] = {"vllm_config": vllm_config, "model_config": model_config, "prefix": prefix}
        _vllm_apart.publish()
        speculative = vllm_config.speculative_config
        if speculative is not None and model_config is speculative.draft_model_config:
            _logger.info("vmmfd: the draft model is not shared; loading it from disk")
            return self._from_disk().load_model(**arguments)
        reason = unshareable(vllm_config)
        if reason:
            if self.options["on_unsupported"] == "fail":
                raise Unsupported(
                    f"this model can't be shared: {reason}. Use --load-format auto, or set \"on_unsupported\": \"load\"",
                    kind="unsupported",
                )
            _logger.warning("vmmfd: loading from disk for this engine only: %s", reason)
            return self._from_disk().load_model(**arguments)
        _agree_on_failures(vllm_config)
        found = self._find(vllm_config, model_config)
        if isinstance(found.held, vmmfd.Lease):
            return self._attach_or_load(found, arguments)
        with found.held:
            model = self._load(found, arguments)
        if not changes_in_place(vllm_config):
            return model
        # Only the broker's memory can change under its addresses: this engine attaches like any other.
        del model
        self._forget_model(vllm_config)
        found.held = found.broker.get(found.name, expect_owner=self._owner())
        found.recorded = check_key(found)
        return self._attach(found, arguments)

    def _device(self, vllm_config: Any) -> Any:
        device = torch.device(self.load_config.device or vllm_config.device_config.device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return device

    def _from_disk(self, loader: Any = DefaultModelLoader) -> Any:
        return loader(dataclasses.replace(self.load_config, load_format="auto", model_loader_extra_config={}))

    def _find(self, vllm_config: Any, model_config: Any) -> Found:
        """Finds the object, or takes the claim to create it. `load_model` reuses the result of `get_external_weight_memory`."""
        begin = time.perf_counter()
        options, device = self.options, self._device(vllm_config)
        backend = "cuda" if device.type == "cuda" else "host"
        key = key_of(vllm_config, model_config)
        uuid = vmmfd.device_uuid(device.index or 0, backend=backend)
        contents = Contents(model_config.model, getattr(model_config.hf_config, "_commit_hash", None))
        name = object_name(options, contents.source, uuid, key)
        if (options["broker"], name) in _found:
            return _found.pop((options["broker"], name))
        broker = vmmfd.connect(options["broker"], backend=backend, trust=options["trust"])
        with in_turn():
            held = self._ask(broker, name)
        updates = getattr(vllm_config, "weight_transfer_config", None) is not None
        found = Found(broker, name, held, key, contents, 0, updates)
        if isinstance(held, vmmfd.Lease):
            try:
                found.recorded = check_key(found)
            except BaseException:
                held.close()
                raise
        found.seconds = time.perf_counter() - begin
        return found

    def _owner(self) -> int:
        owner: int = os.geteuid() if self.options["owner"] is None else self.options["owner"]
        return owner

    def _ask(self, broker: Any, name: str) -> Any:
        """Returns a lease of the object, or the claim to create it."""
        ask = broker.get if self.options["on_missing"] == "fail" else broker.claim
        owner = self._owner()
        try:
            return ask(name, expect_owner=owner)
        except (NotFound, Timeout):
            if not self.options["wait"]:
                raise
        _logger.info("vmmfd: waiting up to %g s for %s", self.options["wait"], name)
        return ask(name, expect_owner=owner, wait=self.options["wait"])

    def _attach_or_load(self, found: Found, arguments: dict[str, Any]) -> Any:
        """Attaches. If the model's classes do not accept processed weights and the options allow it, loads from disk for this engine
        only."""
        try:
            return self._attach(found, arguments)
        except MismatchError:
            raise
        except Exception as error:
            found.held.close()
            if self.options["on_unsupported"] == "fail":
                raise Unsupported(
                    f"{found.name!r} can't be attached: {str(error).rstrip('.')}. Use --load-format auto, or set \"on_unsupported\": \"load\"",
                    kind="unsupported",
                ) from error
            _logger.warning("vmmfd: %s can't be attached; loading from disk for this engine only: %s", found.name, error)
        self._forget_model(arguments["vllm_config"])
        return self._from_disk().load_model(**arguments)

    def _forget_model(self, vllm_config: Any) -> None:
        """Frees a model that was built, and its registrations: another is built in its place."""
        vllm_config.compilation_config.static_forward_context.clear()
        gc.collect()
        torch.cuda.empty_cache()

    def _attach(self, found: Found, arguments: dict[str, Any]) -> Any:
        """Builds the model on meta and installs the object's tensors."""
        try:
            from vllm.model_executor.utils import weights_already_processed
        except ImportError:
            raise Unsupported("this vLLM does not accept processed weights: install 0.33 or newer", kind="unsupported") from None
        vllm_config, model_config = arguments["vllm_config"], arguments["model_config"]
        times = [time.perf_counter()]
        recorded = found.recorded
        with set_default_torch_dtype(model_config.dtype), untied(model_config, recorded["untied"]):
            with torch.device("meta"):
                model = utils.initialize_model(**arguments)
            check_methods(model)
            check_backends(found.name, recorded["backends"], _state.backends(model))
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
                raise Unsupported(f"processing did not create objects that the maker has: {', '.join(absent[:5])}", kind="unsupported")
            times.append(time.perf_counter())
        refuse_loading(model)
        _vllm_live.add(model, _vllm_live.Live(found, attached.sources, self.options["wake"]))
        # The lease lasts as long as the model.
        weakref.finalize(model, found.held.close)
        build, bind, process = (end - begin for begin, end in zip(times, times[1:], strict=False))
        _logger.info(
            "vmmfd: attached %s version %d: %d arrays, %d bytes, %d of them copied; find %.4f s, meta build %.4f s, bind %.4f s, "
            "process %.4f s; read %d bytes of files; left on meta: %s",
            *(found.name, found.held.version, attached.arrays, sum(part.size for part in found.held.parts), attached.copied),
            *(found.seconds, build, bind, process, found.contents.read, ", ".join(left) or "none"),
        )
        return model.eval()

    def _load(self, found: Found, arguments: dict[str, Any]) -> Any:
        """Loads the model as vLLM does, in memory that can be shared, and publishes it."""
        vllm_config = arguments["vllm_config"]
        device = self._device(vllm_config)
        loader = self._from_disk(DiskLoader)
        loader.must_be_shareable, loader.claim = self.options["on_unsupported"] == "fail", found.held
        times = [time.perf_counter()]
        with found.contents.reading_beside():
            with self._pool(device, found):
                model = loader.load_model(**arguments)
            times.append(time.perf_counter())
        try:
            check_methods(model)
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
            if (isinstance(error, Unsupported) and loader.must_be_shareable) or changes_in_place(vllm_config):
                raise
            # The model is loaded and correct: this engine serves it.
            _logger.warning("vmmfd: %s is loaded for this engine only, and not published: %s", found.name, error)
            return model
        times.append(time.perf_counter())
        refuse_loading(model)
        load, digest, publish = (end - begin for begin, end in zip(times, times[1:], strict=False))
        _logger.info(
            "vmmfd: loaded and published %s version %d: load %.3f s, digests of %d bytes of files %.3f s, publish %.4f s",
            *(published.name, published.version, load, found.contents.read, digest, publish),
        )
        return model

    def _pool(self, device: Any, found: Found) -> Any:
        if device.type != "cuda":
            return contextlib.nullcontext()
        count = found.key["tensor_parallel"][1] * found.key["pipeline_parallel"][1]
        # Nearly all weights in one go, the rest in pieces as small as PyTorch's: a partly used piece wastes memory.
        return pool(20 << 20, device, size=max(found.contents.nbytes * 24 // 25 // count, 1))


def _agree_on_failures(vllm_config: Any) -> None:
    """With several ranks, makes the worker report a failure as vLLM's executor reads it."""
    parallel = vllm_config.parallel_config
    if parallel.world_size > 1:
        # With this executor, each rank's process reads its own response.
        size = 1 if parallel.distributed_executor_backend == "external_launcher" else parallel.world_size
        ranks.report_once(resolve_obj_by_qualname(parallel.worker_cls), size)
