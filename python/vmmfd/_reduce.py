"""Leases and their arrays over `multiprocessing`: sent as names in the broker, never as pointers."""

from __future__ import annotations

from _thread import allocate_lock

from . import _native
from . import _types as t
from ._broker import Broker, connect
from ._errors import Invalid, MismatchError
from ._lease import Lease
from ._native import Array

# Connections for received objects, by path and backend.
_brokers: dict[tuple[str, str], Broker] = {}
_lock = allocate_lock()

_STAYS_BEHIND = "this {} belongs to a lease with copy_on_write, and its private writes would not be sent: send a copy, or get it without"


def register_reducer() -> None:
    """Lets `multiprocessing` send a `Broker`, a `Lease` and arrays of a lease to other processes: as arguments, through queues and pipes.

    The message contains the broker's path, the object's name and version, and the array's position in the memory. The other process
    connects and gets its own lease of that version when it unpickles the message, so the sender must hold its lease until then. Call this
    in the sender, with the start method `spawn` or `forkserver` (nothing of this package works in a fork).

    It changes only `multiprocessing`'s pickler: `pickle.dumps` still refuses these objects. Raises nothing; calling it twice does nothing.
    Unpickling raises `NotFound` if there is no broker or the version is gone, and `MismatchError` if the name now belongs to another
    object.
    """
    from multiprocessing.reduction import ForkingPickler

    ForkingPickler.register(Broker, _reduce_broker)
    ForkingPickler.register(Lease, _reduce_lease)
    ForkingPickler.register(_native.Array, _reduce_array)


def _reduce_broker(broker: Broker) -> t.Any:
    return _broker, broker._native.place


def _reduce_lease(lease: Lease) -> t.Any:
    if lease._native.copy_on_write:
        raise Invalid(_STAYS_BEHIND.format("lease"))
    return _lease, (lease._client.place, (lease.name, lease.version, lease.id), *lease._native.selection)


def _reduce_array(array: Array) -> t.Any:
    origin = _native.origin(array)
    if origin is None:
        raise Invalid(
            "this array is not in a broker's memory, and memory can't be pickled: put it, and send an array of a lease of it"
        )
    if not array.readonly:
        raise Invalid(_STAYS_BEHIND.format("array"))
    return _array, origin


def _broker(path: str, backend: str, timeout: float, trust: list[int]) -> Broker:
    broker = _brokers.get((path, backend))
    if broker is not None and not broker.is_closed:
        return broker
    # The sender was connected, so a broker that does not listen is restarting.
    made = connect(path, backend=backend, timeout=timeout, wait=timeout, trust=trust)
    with _lock:
        # Another thread may have connected in between.
        broker = _brokers.get((path, backend))
        if broker is None or broker.is_closed:
            broker = _brokers[path, backend] = made
    if broker is not made:
        made.close()
    return broker


def _lease(
    place: _native._Place,
    object: tuple[str, int, str],
    parts: list[str] | None,
    arrays: list[str] | None,
) -> Lease:
    name, version, id = object
    lease = _broker(*place).get(name, version=version, parts=parts, arrays=arrays)
    if lease.id != id:
        lease.close()
        raise _another(name, version)
    return lease


def _array(
    place: _native._Place,
    object: tuple[str, int, str],
    piece: tuple[str, int, int],
    view: tuple[str, list[int], list[int] | None, int],
) -> Array:
    native = _broker(*place)._native
    lease = native.shared(*object, *piece)
    if lease is None:
        raise _another(*object[:2])
    return lease.view(piece[0], *view)


def _another(name: str, version: int) -> MismatchError:
    return MismatchError(
        f"version {version} of {name!r} is not the object that was sent: its name was deleted and put again",
        kind="object",
    )
