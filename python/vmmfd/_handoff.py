"""Handing an array to other processes at a socket: Python, Rust, and the `produce` and `consume` commands."""

from __future__ import annotations

from . import _arguments, _native
from . import _types as t
from ._native import Array
from .records import Served


def serve(
    path: t.Path | None,
    array: t.Any,
    *,
    consumers: int = 1,
    wait: t.Time = 30.0,
    device: t.DeviceName | None = None,
    backend: str | None = None,
) -> list[Served]:
    """Serves an array at a socket, to processes that `take` it, to `vmmfd consume` and to Rust programs.

    Blocks, with the GIL released, until it has served this number of `consumers`; 0 serves until Ctrl-C. First waits for all work queued on
    the array's device. Each consumer maps the memory itself, and its mapping survives this process, except for memory of a pool and legacy
    memory, which consumers must close first.

    `path` is the socket; `None` is this user's default. `array` is a `vmmfd.Array` in memory that this process created; any other array is
    copied into such memory, on `device` of `backend`, as by `vmmfd.asarray`. A consumer can access all of the memory that contains the
    array, not only the array. `wait`, in seconds or a `timedelta`, is how long to wait for a consumer and for each of its answers.

    Returns the consumers, in the order in which they finished. Raises `Timeout` if no consumer connected, and `Error` if another process
    listens at the path.
    """
    if not isinstance(array, _native.Array):
        array = _native.asarray(array, device=device, backend=backend)
    most = _arguments.needed(_arguments.whole(consumers, "consumers"), "consumers")
    return [Served(*one) for one in _native._serve(path, array, most, wait)]


def take(
    path: t.Path | None = None,
    *,
    device: t.DeviceName | None = None,
    readonly: bool = True,
    wait: t.Time = 30.0,
    backend: str | None = None,
) -> Array:
    """Takes the array that another process serves at a socket: with `serve`, with `vmmfd produce`, or from Rust.

    Blocks, with the GIL released, for at most `wait` (seconds or a `timedelta`), until a producer listens and has handed the memory over.
    `path` is the socket; `None` is this user's default. `device` is the device to use the memory on, by default the one that has it.
    `readonly=False` maps it writable: both processes then see each other's writes.

    Memory without an array description arrives as `uint8`. Contents are not checked. Raises `Timeout` if no process serves there in time,
    `NotFound` with `wait=0`, `Disconnected` if the process is silent or gone, `PermissionDenied`, `Invalid`.
    """
    return _native._take(path, device, backend, readonly, wait)
