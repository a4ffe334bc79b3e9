"""An array handed from one process to others at a path: with `produce` and `consume`, with Rust programs, and with each other."""

from __future__ import annotations

from collections import namedtuple

from . import _native
from . import _types as t
from ._native import Array

# Importing `typing` takes longer than this package may.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NamedTuple

    class _Served(NamedTuple):
        pid: int
        uid: int
        error: str | None

else:
    _Served = namedtuple("_Served", ("pid", "uid", "error"))
    _Served.__annotations__ = {"pid": int, "uid": int, "error": str | None}


class Served(_Served):
    """A consumer that was served, or refused: its process `pid` and its user `uid`, as the kernel says, and what went wrong with it
    (`error`), or `None`."""

    __slots__ = ()


def serve(
    path: t.Path | None,
    array: t.Any,
    *,
    consumers: int = 1,
    timeout: t.Time = 30.0,
    device: t.DeviceName | None = None,
    backend: str = "auto",
) -> list[Served]:
    """Serves an array at a socket, to processes that `take` it, to `vmmfd consume` and to Rust programs.

    Blocks, with the GIL released, until so many `consumers` were served; 0 serves until Ctrl-C. All work that is queued on the array's
    device is waited for first. Each consumer maps the memory itself: it stays valid there when this process ends, but for memory of a
    pool and legacy memory, which consumers must close first.

    `path` is the socket's; `None` is this user's default. `array` is a `vmmfd.Array` in memory that this process made; anything else is
    copied into such memory, on `device` of `backend`, as by `vmmfd.asarray`. Not only the array: all of the memory that it is in can be
    reached by a consumer. `timeout`, in seconds, is how long to wait for a consumer, and for a silent one.

    Returns the consumers, in the order in which they ended. Raises `Timeout` if none came, and `Error` if another process listens
    there.
    """
    if isinstance(array, _native.Array):
        return [Served(*one) for one in _native._serve(path, array, consumers, timeout)]
    copied = _native.asarray(array, device=device, backend=backend)
    return [Served(*one) for one in _native._serve(path, copied, consumers, timeout)]


def take(
    path: t.Path | None = None,
    *,
    device: t.DeviceName | None = None,
    readonly: bool = True,
    wait: t.Time = 30.0,
    backend: str = "auto",
) -> Array:
    """Takes the array that another process serves at a socket: with `serve`, with `vmmfd produce`, or from Rust.

    Blocks, with the GIL released, until the producer is there and has handed the memory over, for at most `wait` seconds. `path` is
    the socket's; `None` is this user's default. `device` is the one that is to use the memory, by default the one that it is on.
    `readonly=False` maps it for writing too: both processes then see what either writes.

    Memory without a described array comes as `uint8`. Contents are not checked. Raises `NotFound` if no process serves there in time,
    `Disconnected` if it is silent or gone, `Denied`, `Invalid`.
    """
    return _native._take(path, device, backend, readonly, wait)
