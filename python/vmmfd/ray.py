"""Ray: arrays and PyTorch tensors between actors, mapped where they are and moved once to each other node.

Importing this module imports Ray (2.60 or newer); `vmmfd.nodes` moves the bytes. Each node runs a broker, which `vmmfd.connect()` finds in
the environment of the node's raylet. Every program of the Ray cluster can read the objects that its agents can read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
from ray.experimental import CommunicatorMetadata, TensorTransportManager, TensorTransportMetadata, register_tensor_transport

from . import _arguments, _native
from ._broker import Broker
from ._errors import Disconnected, Invalid, MismatchError, NotFound
from ._lease import Claim, Lease
from ._native import Array
from ._ray_agent import _ANSWER, _PREFIX, _agent, _alive, _answer, _ask, _broker, _copy, _named, _Object
from .records import Published

if TYPE_CHECKING:
    from datetime import timedelta

__all__ = ["agents", "pull", "register"]

# Ray creates its manager of transfers at the first use, without a lock. The two threads of an actor's first read could each create one:
# the read then waited for an array that the other had. Actors import this module before their first read.
_ = ray._private.worker.global_worker.rdt_manager

# Seconds that a pulled array keeps its name after the last lease. It can be pulled again.
_COPY_LINGER = 60.0


@dataclass
class _Arrays(TensorTransportMetadata):  # type: ignore[misc]  # Any, as Ray's types are not read
    """What travels in the `ObjectRef`: for each tensor its object, and its piece and view of the object's memory."""

    objects: list[_Object] = field(default_factory=list)
    places: list[tuple[int, Any, Any]] = field(default_factory=list)


def register(*, linger: float | timedelta = 600, stall: float | timedelta = 10) -> None:
    """Registers the tensor transports `"vmmfd"`, for `vmmfd.Array`, and, if PyTorch is installed, `"vmmfd_torch"`, for its tensors.

    Call it in the process that creates the actors, before `@ray.method(tensor_transport="vmmfd")` names the transport. Create the actors
    with `@ray.remote(enable_tensor_transport=True)`. In an actor that calls such methods of other actors, call it first too: Ray registers
    the transports there in the background. Then such methods, and `ray.put(value, _tensor_transport="vmmfd")`, publish the arrays
    of a value in the broker of the node: without a copy if their memory can be shared, else with one. Readers get read-only arrays of the
    same memory, or of the one copy on their node. A write to such memory kills the process.

    The object lives as long as its `ObjectRef`. If its actor dies, it lives for `linger` more, in seconds or a `timedelta`, from the last
    lease. A pull without progress for `stall` fails and is tried with another node that has the object, three tries in all. Ray limits
    a read to `RAY_rdt_fetch_fail_timeout_milliseconds`, 60 s by default: `pull` larger objects by name first.

    Does not block. A second call does nothing: the first call's values remain. Reads raise `vmmfd.NotFound` if no node has the object any
    more, `vmmfd.Timeout` or `vmmfd.Disconnected` after the last try, and `vmmfd.MismatchError` if the bytes that arrived have another
    digest. Raises `Invalid` if a limit is not a time of more than 0.
    """
    # Ray sends the class to the actors by value, with these limits.
    limits = {"linger": _arguments.limit(linger, "linger"), "stall": _arguments.limit(stall, "stall"), "__module__": __name__}
    kinds: list[tuple[str, type, type]] = [("vmmfd", Arrays, Array)]
    with suppress(ImportError):
        import torch

        kinds.append(("vmmfd_torch", Tensors, torch.Tensor))
    for name, base, data_type in kinds:
        # Ray raises ValueError if the name is registered, as it does itself in each actor.
        with suppress(ValueError):
            register_tensor_transport(name, ["cpu", "cuda"], type(base.__name__, (base,), limits), data_type)


def pull(
    name: str,
    nodes: Iterable[str] | None = None,
    *,
    version: int | None = None,
    deadline: float | timedelta = 600,
    stall: float | timedelta = 10,
) -> dict[str, Published]:
    """Brings a named object to nodes, under the same name. Returns each node's object by Ray's node id.

    `nodes` are Ray's node ids, by default all alive ones. The object is this `version` of the name, or its current one, in the broker of
    the caller's node, else of another node. A node that has it already moves nothing. On a node that has another object of this name, it
    becomes the name's new version. Nodes that received it are sources for the rest.

    Blocks until all nodes have it or one failed, at most `deadline`, in seconds or a `timedelta`; `stall` is as for `register`. Raises
    `Timeout` at the deadline, `NotFound` if no node has it, `MismatchError` if the caller's node has none and the others have different
    objects, `Invalid` if a limit is not a time of more than 0, and the first node's error. Other nodes keep their copies.
    """
    limit, stall = _arguments.limit(deadline, "deadline"), _arguments.limit(stall, "stall")
    here = ray.get_runtime_context().get_node_id()
    wanted = _named(_broker(), name, version, here)
    if wanted is None:
        found = {each.origin: each for each in _ask(agents(), "find", name, version) if each}
        if not found:
            raise NotFound(f"no node's broker has {name!r}{'' if version is None else f' version {version}'}: put it on one", kind="object")
        if len(found) > 1:
            places = ", ".join(each.node for each in found.values())
            raise MismatchError(f"the nodes {places} have different objects named {name!r}: call pull on the right node", kind="object")
        wanted = next(iter(found.values()))
    started = agents(nodes)
    calls = [agent.pull.options(concurrency_group="pull").remote(wanted, name, limit, stall) for agent in started.values()]
    return {node: _answer(call, wanted, limit, _ANSWER) for node, call in zip(started, calls, strict=True)}


def agents(nodes: Iterable[str] | None = None) -> dict[str, Any]:
    """Starts the agents of nodes, by default of all alive ones, and returns their actor handles by Ray's node id.

    Reads start them when they need them, which takes seconds: call this once to save that time. An agent is a detached actor and outlives
    the driver: `ray.kill(handle)` stops it. `handle.pulled.remote()` lists the transfers to its node. Does not block until they run. Raises
    Ray's own errors.
    """
    return {node: _agent(node) for node in (_alive() if nodes is None else nodes)}


class Arrays(TensorTransportManager):  # type: ignore[misc]
    """Ray's transport of `vmmfd.Array`: see `register`. Internal."""

    linger: float
    stall: float

    def __init__(self) -> None:
        # Leases of this process's own objects, by Ray's object id.
        self._put: dict[str, Lease] = {}

    def tensor_transport_backend(self) -> str:
        return "VMMFD"

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        # Otherwise Ray kills the actors. A receive returns at Ray's limit, and holds nothing after that.
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        return True

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> TensorTransportMetadata:
        if not rdt_object:
            return _Arrays([])
        kinds = sorted({self._kind(value) for value in rdt_object})
        if len(kinds) > 1:
            raise Invalid(f"the value has arrays on {' and '.join(kinds)}: return them as two values")
        broker = _broker("host" if kinds == ["cpu"] else "cuda")
        origins = [self._origin(value) for value in rdt_object]
        new = {str(index): self._putable(rdt_object[index]) for index, origin in enumerate(origins) if origin is None}
        if new:
            if obj_id not in self._put:
                # A retry of the task in a new process finds the name.
                made = broker.put(_PREFIX + obj_id, new, lifetime=self.linger, replace=True)
                # This process's lease: the broker starts to count `linger` when it dies.
                self._put[obj_id] = broker.get(made.name, version=made.version)
            for index in new:
                origins[int(index)] = _native.origin(self._put[obj_id][index])
        here = ray.get_runtime_context().get_node_id()
        objects: dict[tuple[str, int, str], _Object] = {}
        places = []
        for origin in origins:
            assert origin is not None, "an array of a lease has an origin"
            _, key, piece, view = origin
            if key not in objects:
                own = None
                # This process's own object is not a copy.
                if obj_id not in self._put or key[2] != self._put[obj_id].id:
                    own = _named(broker, key[0], key[1], here)
                # Another object may have the name now: then only the lease has this one.
                objects[key] = own if own and own.id == key[2] else _Object(key[0], key[1], key[2], key[2], here)
            places.append((list(objects).index(key), piece, view))
        return _Arrays([self._shape(value) for value in rdt_object], kinds[0], list(objects.values()), places)

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> CommunicatorMetadata:
        return CommunicatorMetadata()

    def recv_multiple_tensors(
        self, obj_id: str, tensor_transport_metadata: Any, communicator_metadata: Any, target_buffers: list[Any] | None = None
    ) -> list[Any]:
        if target_buffers:
            raise Invalid("the transport maps memory and can't receive into buffers: copy from the arrays that it returns")
        meta = tensor_transport_metadata
        leases: dict[Any, _native.Lease] = {}
        received = []
        for (index, piece, view), described in zip(meta.places, meta.tensor_meta, strict=True):
            if (index, piece) not in leases:
                leases[index, piece] = self._lease(meta.objects[index], piece, meta.tensor_device)
            received.append(self._received(leases[index, piece].view(piece[0], *view), *described))
        return received

    def send_multiple_tensors(self, tensors: list[Any], tensor_transport_metadata: Any, communicator_metadata: Any) -> None:
        raise NotImplementedError("the readers pull")

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Any, tensors: list[Any]) -> None:
        lease = self._put.pop(obj_id, None)
        if lease is not None:
            lease.close()
            with suppress(NotFound, Disconnected):
                _broker("host" if tensor_transport_meta.tensor_device == "cpu" else "cuda").delete(_PREFIX + obj_id)

    def abort_transport(self, obj_id: str, communicator_metadata: Any) -> None:
        pass

    def _lease(self, wanted: _Object, piece: tuple[str, int, int], kind: str) -> _native.Lease:
        """Maps a piece of the object in this node's broker. If it is not there, one reader lets the agent pull it and the others wait."""
        broker = _broker("host" if kind == "cpu" else "cuda")
        here = ray.get_runtime_context().get_node_id()
        name = _PREFIX + wanted.origin
        if wanted.node == here:
            # The name may be gone, while another node has a copy.
            with suppress(NotFound):
                lease = broker._native.shared(wanted.name, wanted.version, wanted.id, *piece)
                if lease is not None:
                    return lease
        with suppress(NotFound):
            return broker.get(name)._native
        own = _copy(broker, wanted, wanted.name)
        lease = own and broker._native.shared(own.name, own.version, own.id, *piece)
        if lease is not None:
            return lease
        # Ray reports its own error at its limit: ours names the cause.
        limit = max(1.0, int(os.environ.get("RAY_rdt_fetch_fail_timeout_milliseconds", "60000")) / 1000 - 2)
        began = time.monotonic()
        with broker.claim(name, wait=limit) as claim:
            if isinstance(claim, Claim):
                waited = time.monotonic() - began
                left = max(limit - waited, 0.1)
                device = None if kind == "cpu" else _native.device_uuid(backend="cuda")
                # Starts both agents at once.
                if wanted.node in _alive():
                    _agent(wanted.node)
                pull = _agent(here).pull.options(concurrency_group="pull")
                _answer(pull.remote(wanted, name, left, self.stall, waited, device, min(self.linger, _COPY_LINGER)), wanted, left)
        return broker.get(name)._native

    @staticmethod
    def _kind(value: Any) -> str:
        return "cpu" if value.device.backend == "host" else "cuda"

    @staticmethod
    def _shape(value: Any) -> tuple[Any, Any]:
        return value.shape, str(value.dtype)

    @staticmethod
    def _origin(value: Any) -> Any:
        # Private writes of a lease with copy_on_write need a copy.
        return _native.origin(value) if value.readonly else None

    @staticmethod
    def _putable(value: Any) -> Any:
        return value

    @staticmethod
    def _received(array: Array, shape: Any, dtype: Any) -> Any:
        return array


class Tensors(Arrays):
    """Ray's transport of PyTorch tensors: see `register`. Internal."""

    def tensor_transport_backend(self) -> str:
        return "VMMFD_TORCH"

    @staticmethod
    def _kind(value: Any) -> str:
        return str(value.device.type)

    @staticmethod
    def _shape(value: Any) -> tuple[Any, Any]:
        return value.shape, value.dtype

    @staticmethod
    def _origin(value: Any) -> Any:
        return None

    @staticmethod
    def _putable(value: Any) -> Any:
        return value.detach().contiguous()

    @staticmethod
    def _received(array: Array, shape: Any, dtype: Any) -> Any:
        import torch

        if array.device.backend == "cuda":
            torch.cuda.init()
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        # As bytes: DLPack lacks some of PyTorch's types.
        return torch.from_dlpack(array.reinterpret("uint8", array.nbytes)._capsule()).view(dtype).view(shape)
