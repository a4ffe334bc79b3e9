"""vLLM's load format `vmmfd`: one engine loads a model and publishes it in a broker, and all others map the same memory.

    vllm serve MODEL --load-format vmmfd

vLLM finds `register` by the entry point `vllm.general_plugins`. `--model-loader-extra-config` takes a JSON object with these fields:

- `broker`: the path of the broker's socket; by default the path that `vmmfd.connect()` uses.
- `trust`: the user ids whose broker is trusted, besides root and this process's own user.
- `owner`: the user id whose object is used; by default this process's own. Another user's object is refused.
- `name`: the name of the object; by default derived from the model and the key below. The GPU's UUID and the rank are appended.
- `on_missing`: if there is no object, `"load"` (the default) loads the model from disk and publishes it; `"fail"` fails.
- `wait`: seconds to wait for the object while another engine loads it, or with `"fail"` for any object to appear; 600 by default.
- `on_unsupported`: `"fail"` (the default) refuses a model that can't be shared; `"load"` loads it from disk for this engine only.
- `wake`: the version that a sleeping engine wakes with: `"own"` (the default) or `"newest"`.

With `--weight-transfer-config '{"backend": "vmmfd"}'`, `update_weights` changes to a version that a trainer has put (`next_version`, or for
several ranks `next_versions`), at the same addresses. `--sleep-mode-backend vmmfd` parks the weights instead of copying them to the host.

An object is used only if its key equals the engine's: engine and version, types, quantisation, parallel sizes and rank, the backends that
change the layout of weights, and the identity of the contents. Otherwise the engine fails with an error that names the fields.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .._broker import Broker
    from ._next_version import NextVersion, NextVersions

_FORMAT = "vmmfd"
_registered = False


def next_version(broker: Broker, name: str, *, version: int | None = None) -> NextVersion:
    """Returns a writable copy of an object that engines serve, to put as its next version: a context manager that frees it.

    `tensors` are its tensors by name, on the object's device, with the names, shapes and types of the engine's model after loading: fused
    and sharded as there. Change their values in place, then call `put()`. `version` is the version to copy, by default the newest. Blocks
    for the copy. Raises `MismatchError` if the object is not an engine's, and as `Broker.get`; needs PyTorch."""
    from ._next_version import NextVersion

    return NextVersion(broker, name, version)


def next_versions(broker: Broker, name: str) -> NextVersions:
    """Returns writable copies of the objects of all of an engine's ranks, to put as their next version: a context manager that frees them.

    `name` is the option `name` of the load format. `objects` are the copies by the objects' names (`NAME/GPU/tp1of2`), each as from
    `next_version` and on its rank's device, the first rank last. `put()` gives all the same number. If several engines use the name on
    other GPUs, their objects are among them. Raises `NotFound` if there is none, `MismatchError` if their newest versions differ, and as
    `next_version`."""
    from ._next_version import NextVersions

    return NextVersions(broker, name)


def register() -> None:
    """Registers the load format, the weight transfer engine and the sleep backend with vLLM. Opens no driver and no connection. A second call does nothing."""
    global _registered
    if _registered:
        return
    try:
        from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
        from vllm.model_executor.model_loader import register_model_loader

        from ._vllm_loader import VmmfdLoader

        register_model_loader(_FORMAT)(VmmfdLoader)
        WeightTransferEngineFactory.register_engine(_FORMAT, "vmmfd.engines._vllm_update", "TransferEngine")
        SleepModeBackendFactory.register_backend(_FORMAT, "vmmfd.engines._vllm_sleep", "SleepBackend")
    except Exception as error:
        # vLLM calls this at every start, even if no engine uses the load format.
        logging.getLogger("vllm.vmmfd").warning("vmmfd: this vLLM does not support the load format vmmfd: %r", error)
        return
    _registered = True
