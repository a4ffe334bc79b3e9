"""Model weights: safetensors files, read once into shared memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping

from . import _arguments, _native
from . import _types as t
from ._errors import Invalid
from ._native import Array, Device

# The name of the only part, as in `vmmfd put`.
_PART = "all"


class Weights(Mapping[str, Array]):
    """Weights in shared memory: a mapping of tensor names to `Array`s, in the order of the files.

    Returned by `load_safetensors`. It keeps the memory, as does each of its arrays; `broker.put(name, weights)` shares that memory without
    a copy. The arrays are writable: do not write to them after a put.
    """

    __slots__ = ("__weakref__", "_metadata", "_weights")

    def __init__(self, weights: _native.Weights) -> None:
        import json

        self._weights = weights
        self._metadata: dict[str, t.Any] = json.loads(weights.metadata)

    @property
    def metadata(self) -> dict[str, t.Any]:
        """The `__metadata__` of the files' headers: strings by key; where files differ, a dict of file name to string. A put stores it in
        the object's metadata, under `safetensors`."""
        return self._metadata

    @property
    def digest(self) -> str | None:
        """BLAKE3 of the whole memory, including the zeros between tensors: `blake3:` and 64 hexadecimal digits. None unless requested."""
        return self._weights.digest

    @property
    def files(self) -> list[str]:
        """The paths of the files, in order."""
        return self._weights.files

    @property
    def nbytes(self) -> int:
        """The size of the memory in bytes: all tensors, rounded up to whole device pages (2 MiB on a GPU)."""
        return self._weights.memory.size

    @property
    def device(self) -> Device:
        """The device that has the memory."""
        return self._weights.memory.device

    def __getitem__(self, name: str, /) -> Array:
        return self._weights[name]

    def __contains__(self, name: object, /) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights.names())

    def __len__(self) -> int:
        return len(self._weights)

    def __repr__(self) -> str:
        first, *others = map(os.path.basename, self.files)
        more = f" and {len(others)} other files" if others else ""
        return f"<vmmfd.Weights: {first}{more}, {len(self)} arrays, {self.nbytes} bytes on {self.device}>"

    def __reduce__(self) -> t.Any:
        raise TypeError("Weights can't be copied or pickled: put them, or copy the arrays with dict(weights)")

    def _plan(
        self, *, copy: bool | None, device: t.DeviceName | None, rdma: t.Rdma
    ) -> tuple[list[_native._PartPlan], dict[str, t.Any], object]:
        """Returns the parts for a put, the metadata to add, and the object that must live until the put is done. Raises `Invalid` for
        `copy=True` and for another device."""
        if copy:
            raise Invalid("copy=True is not supported for vmmfd.Weights, which are shared as they are: put dict(weights) to copy the arrays")
        mine = self.device
        if device is not None and not (
            device == mine.ordinal
            if isinstance(device, int) and not isinstance(device, bool)
            else _native.same_device(device, mine)
        ):
            raise Invalid(f"device={_arguments.shown(device)}, but the weights are on {mine}: give device to load_safetensors")
        part: _native._PartPlan = (_PART, [self._weights.memory], self._weights.entries(), self.digest)
        return [part], {"safetensors": self._metadata} if self._metadata else {}, self._weights


def load_safetensors(
    paths: t.Path | Iterable[t.Path],
    *,
    backend: str | None = None,
    device: t.DeviceName | None = None,
    digest: bool = False,
    progress: Callable[[int, int], object] | None = None,
    threads: int | None = None,
    rdma: t.Rdma = "auto",
) -> Weights:
    """Reads safetensors files into device memory that other processes can share.

    `paths` is a file, a folder, an index (`*.safetensors.index.json`), or several of these. In a folder, the files that its index names are
    read, or all `*.safetensors` without an index. Everything is checked before memory is allocated. The memory consists of adjacent
    segments of at most 1 GiB, and each tensor starts at a multiple of 256 bytes.

    `backend` is `"auto"` (CUDA, or ordinary memory if there is no GPU), `"cuda"` or `"host"`; by default the environment variable
    `VMMFD_BACKEND`, else `"auto"`. `device` is an ordinal, a UUID or a `Device`: the first one by default. `digest` computes the memory's
    BLAKE3, for readers to verify. `progress(done, all)` is called in this thread about 25 times per second, with bytes. `threads` is the
    number of reader threads: by default one per processor, at most 8. Each thread uses 4 MiB of page-locked memory during the call. `rdma`
    is as for `vmmfd.empty`.

    Blocks without the GIL. In the main thread Ctrl-C interrupts it, as does an exception from `progress`; the memory is then freed. On a
    GPU, no stream of this process may be in a graph capture: a copy invalidates the capture.

    Raises `NotFound` for a path that does not exist, `PermissionDenied` if it may not be read, `Invalid` for a file of another format, with
    wrong tensor offsets (overlapping, out of range, or with gaps), with duplicate tensors, or changed during the call, `OutOfMemory`, and
    `Unsupported` if the device cannot share memory, or lacks the support that `rdma=True` requires.
    """
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    files = [os.fspath(path) for path in paths]
    count = _arguments.whole(threads, "threads", 63)
    return Weights(
        _native.load_safetensors(
            files, backend=backend, device=device, digest=digest, progress=progress, threads=count, rdma=rdma
        )
    )
