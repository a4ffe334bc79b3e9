"""An offer of another machine, and the memory for its copy."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from . import _native
from . import _types as t
from ._errors import Error, Invalid, MismatchError, Unsupported
from ._lease import Lease

# The format of offers. A reader of another format refuses them.
FORMAT = 1

# NIXL shows no progress inside a transfer, so a stall is noticed by pieces.
PIECE = 64 << 20

# NIXL's names for the memory of each backend.
KINDS = {"host": "DRAM", "cuda": "VRAM"}

# Address and size.
Segment = tuple[int, int]
# Kind, address here, device here, address there, device there, size.
Piece = tuple[str, int, int, int, int, int]


def origin(metadata: t.Json) -> dict[str, t.Any] | None:
    """Returns the origin in the metadata of a copy: the `id`, `version` and `node` of the first maker's object. None for other objects."""
    made = metadata.get("origin")
    form = {"id": str, "version": int, "node": str}
    if isinstance(made, dict) and made.keys() == form.keys() and all(type(made[key]) is kind for key, kind in form.items()):
        return made
    return None


def layouts(lease: Lease) -> Iterator[dict[str, t.Any]]:
    """Returns the layout of each part of a lease, as `Copy` takes it. Padded memory has no digest: it does not say which bytes it covers."""
    for part, padded, digest, sizes, arrays in lease._native.layout():
        ((_, memory),) = lease.pieces(part)
        segments, end = [], memory.address
        for size in sizes:
            segments.append((end, size))
            end += size
        device = memory.device
        yield {
            "name": part, "backend": device.backend, "device": device.ordinal, "digest": None if padded else digest,
            "segments": segments, "arrays": arrays,
        }  # fmt: skip


class Offer:
    """The contents of an offer."""

    def __init__(self, offer: bytes) -> None:
        import json
        from base64 import b64decode

        try:
            fields = json.loads(bytes(offer))
            if fields["vmmfd"] != FORMAT:
                raise Invalid(f"the offer has format {fields['vmmfd']!r}, and this version reads {FORMAT}: use one version of vmmfd")
            self.name = str(fields["name"])
            self.origin: dict[str, t.Any] = {
                "id": str(fields["origin"]["id"]),
                "version": int(fields["origin"]["version"]),
                "node": str(fields["origin"]["node"]),
            }
            self.metadata: dict[str, t.Any] = dict(fields["metadata"])
            self.parts: list[dict[str, t.Any]] = list(fields["parts"])
            self.nixl = [b64decode(metadata) for metadata in fields["nixl"]]
            self.node = str(fields["node"])
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, Invalid):
                raise
            raise Invalid(f"these bytes are not an offer ({error!r}): give the result of Node.offer") from None


class Copy:
    """The memory for one part, with the segments of the original."""

    def __init__(self, part: dict[str, t.Any], device: t.DeviceName | None) -> None:
        self.memories: list[_native.Memory] = []
        self.segments: list[Segment] = []
        try:
            self.name, self.backend, self.digest = str(part["name"]), str(part["backend"]), part["digest"]
            self._theirs = [(int(address), int(size)) for address, size in part["segments"]]
            self._their_device = int(part["device"])
            arrays = [(tuple(entry), int(end)) for entry, end in part["arrays"]]
            sizes = [size for _, size in self._theirs]
            self._allocate(sizes, _groups(sizes, [(entry[5], end) for entry, end in arrays]), device)
            self.entries = [self._place(entry) for entry, _ in arrays]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            if isinstance(error, Error):
                raise
            raise Invalid(f"these bytes are not an offer ({error!r}): give the result of Node.offer") from None
        self.device = self.memories[0].device.ordinal

    def _allocate(self, sizes: list[int], groups: list[tuple[int, int]], device: t.DeviceName | None) -> None:
        for first, last in groups:
            group = sizes[first:last]
            memory = _native.Memory(
                sum(group),
                device=device if self.backend == "cuda" else None,
                backend=self.backend,
                segment=group[0] if len(group) > 1 else None,
                # The kernel then stops every process from writing. A GPU driver has no such seal.
                sealed=self.backend == "host",
            )
            regular = all(size == group[0] for size in group[:-1]) and group[-1] <= group[0]
            if memory.mapped_size != sum(group) or not regular:
                raise Unsupported(
                    f"part {self.name!r} has segments of {group[:4]} bytes, which {memory.device} can't allocate: pull it where the pages "
                    "have the size of the source's"
                )
            self.memories.append(memory)
            address = memory.address
            for size in group:
                self.segments.append((address, size))
                address += size

    def _place(self, entry: tuple[t.Any, ...]) -> t.Any:
        """Returns an array for a put: with the number of its memory, and its offset there."""
        name, dtype, shape, strides, _, offset, attributes = entry
        for number, memory in enumerate(self.memories):
            if offset <= memory.mapped_size and (offset < memory.mapped_size or number == len(self.memories) - 1):
                return name, dtype, shape, strides, number, offset, attributes
            offset -= memory.mapped_size
        raise ValueError(f"array {name!r} is outside its part")

    def pieces(self) -> Iterator[Piece]:
        kind = KINDS[self.backend]
        for (here, size), (there, _) in zip(self.segments, self._theirs):
            for start in range(0, size, PIECE):
                yield kind, here + start, self.device, there + start, self._their_device, min(PIECE, size - start)

    def finish(self, name: str) -> bool:
        """Seals the memory. Returns whether its digest was compared. Raises `MismatchError`."""
        for memory in self.memories:
            if self.backend == "host":
                memory.seal()
        if not isinstance(self.digest, str) or not self.digest.startswith("blake3:"):
            return False
        found = _native.digest_of(self.memories)
        if found != self.digest:
            raise MismatchError(
                f"part {self.name!r} of {name!r} has the digest {found}, not its maker's {self.digest}: the source's memory was written to "
                "after the put, or the transfer is broken",
                kind="object",
            )
        return True


class Value:
    """Copies as the value of a put."""

    def __init__(self, copies: list[Copy]) -> None:
        self._copies = copies

    def _plan(
        self, *, copy: bool | None, device: t.DeviceName | None, rdma: t.Rdma
    ) -> tuple[list[_native._PartPlan], dict[str, t.Any], object]:
        return [(of.name, of.memories, of.entries, of.digest) for of in self._copies], {}, self


def _groups(sizes: list[int], spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns ranges of segments, which become one memory each: those that an array spans together, and the others alone."""
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    joined = [False] * len(sizes)
    for start, end in spans:
        for number in range(bisect_right(starts, start), bisect_left(starts, end)):
            joined[number] = True
    firsts = [number for number, before in enumerate(joined) if not before]
    return list(zip(firsts, [*firsts[1:], len(sizes)]))
