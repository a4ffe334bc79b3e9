"""LMCache's GPU memory over a broker: the descriptors of tensors in memory of `cuMemCreate` (`use_vmm_api`), for LMCache 0.5.6.

LMCache sends such a tensor to another process as an id, and asks a resolver there for the descriptor of the id. It has no resolver.

- In the process that exports the tensor (an engine), for each wrapper: `publish(broker, wrapper, tensor)`.
- In the process that restores tensors (LMCache's server), once at the start: `install(broker)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import _arguments
from .._native import share

if TYPE_CHECKING:
    from .. import _types as t
    from .._broker import Broker
    from ..records import Published

__all__ = ["install", "publish", "resolver"]


def _name(export_id: bytes) -> str:
    return f"lmcache/{export_id.hex()}"


def publish(broker: Broker, wrapper: Any, tensor: Any, **options: Any) -> Published | None:
    """Puts the allocation of an exported tensor, without a copy, under the name `lmcache/` and the id. Returns None for a fabric handle,
    which needs no descriptor.

    `wrapper` is the `VmmCudaIPCWrapper` of the tensor. The name exists until `broker` is closed, unless `options` of `Broker.put` say
    otherwise. A reader gets the whole allocation, with other tensors in it, as with the wrapper. Raises as `vmmfd.share` and
    `Broker.put`."""
    exported = wrapper.fd_payload()
    if exported is None:
        return None
    memory = {"tensor": share(tensor, neighbours=True)}
    return broker.put(_name(exported[0]), memory, **{"lifetime": "maker", **options})


def resolver(broker: Broker, *, wait: t.Time = 30, expect_owner: int | None = None) -> Callable[[bytes], int]:
    """Returns a function from an export id to the descriptor of its allocation, which its caller owns and must close. `wait` is how long
    it waits for `publish`, in seconds or a `timedelta`. `expect_owner` is as for `Broker.get`.

    It maps nothing, and its lease ends at once: the descriptor keeps the memory, and the broker does not count its owner as a reader. It
    raises `Timeout` for an unknown id, `Invalid` for memory of several allocations, and as `Broker.get`."""
    given = _arguments.options({"wait": wait, "expect_owner": expect_owner})

    def descriptor(export_id: bytes) -> int:
        return broker._native.descriptor(_name(export_id), given)

    return descriptor


def install(broker: Broker, *, wait: t.Time = 30, expect_owner: int | None = None) -> None:
    """Makes `resolver` the resolver of LMCache in this process, which replaces an earlier one. LMCache closes the descriptors. Keep the
    broker open. Raises `ImportError` without LMCache."""
    from lmcache.v1.platform.devices.cuda.ipc_wrapper import set_vmm_fd_resolver

    set_vmm_fd_resolver(resolver(broker, wait=wait, expect_owner=expect_owner))
