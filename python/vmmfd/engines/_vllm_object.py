"""The object that an engine uses: the maker's record, its comparison with this engine, and the order in which ranks request it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from .._errors import MismatchError
from . import _state
from ._contents import Contents, is_record
from ._vllm_key import flat

# Lists of names in the object's metadata: tensors that loading set to None, and tensors whose shape it changed.
_NAMES = ("none", "reshaped")


@dataclasses.dataclass
class Found:
    broker: Any
    name: str
    held: Any
    key: dict[str, Any]
    contents: Contents
    seconds: float
    # Whether the engine takes versions that a trainer has made.
    takes_updates: bool = False
    # The maker's record in the object's metadata.
    recorded: dict[str, Any] = dataclasses.field(default_factory=dict)


def record_of(found: Found, metadata: Any) -> dict[str, Any]:
    """Returns the maker's record in a version's metadata. Raises `MismatchError` if another kind of program made it."""
    recorded = metadata.get("vllm")
    if (
        not isinstance(recorded, dict)
        or not isinstance(recorded.get("key"), dict)
        or not is_record(recorded.get("contents"))
        or not _state.is_changes(recorded.get("state"))
        or not isinstance(recorded.get("backends"), dict)
        or not isinstance(recorded.get("untied"), bool)
        or not isinstance(recorded.get("updated", False), bool)
        or not all(isinstance(recorded.get(names), list) and all(isinstance(name, str) for name in recorded[names]) for names in _NAMES)
    ):
        raise MismatchError(f"{found.name!r} in the broker was not published by load format vmmfd: choose another name")
    return recorded


def check_key(found: Found) -> dict[str, Any]:
    """Returns the maker's record. Raises `MismatchError` unless the leased object equals the model that this engine would load."""
    recorded = record_of(found, found.held.metadata)
    theirs, ours = flat(recorded["key"]), flat(found.key)
    fields = [
        f"{field}: {theirs.get(field)!r} in the object, {ours.get(field)!r} here"
        for field in sorted(theirs.keys() | ours.keys())
        if theirs.get(field) != ours.get(field)
    ]
    difference = found.contents.difference(recorded["contents"])
    if difference:
        fields.append(f"contents: {difference}")
    if recorded.get("updated") and not found.takes_updates:
        fields.append("contents: a trainer has changed them, and this engine was started without --weight-transfer-config")
    if fields:
        raise MismatchError(
            f"{found.name!r} in the broker, version {found.held.version}, does not fit this engine ({'; '.join(fields)}). "
            f"Choose another name, or remove it with `vmmfd rm {found.name}`"
        )
    return recorded


@contextlib.contextmanager
def in_turn() -> Iterator[None]:
    """Makes the first rank of an engine request the object before the others. If all asked at once, two engines could get one claim each
    and wait for each other: no rank loads before all ranks of its engine have an answer."""
    from vllm.distributed import get_world_group

    group = get_world_group()
    if group.world_size > 1 and group.rank_in_group > 0:
        group.barrier()
    try:
        yield
    finally:
        if group.world_size > 1 and group.rank_in_group == 0:
            group.barrier()
