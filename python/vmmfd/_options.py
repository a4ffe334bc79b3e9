"""The options of gets, for type checkers and `typing.get_type_hints`."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from . import _types as t


class Expected(TypedDict, total=False):
    """The options of every get."""

    expect: t.Json | None
    expect_owner: int | None
    digest: t.Digest | None
    wait: t.Time


class UnparkOptions(Expected, total=False):
    """The options of `Lease.unpark`."""

    version: int | t.Literal["newest"] | None


class PrepareOptions(Expected, total=False):
    """The options of `Lease.prepare`."""

    version: int | None
    newer_than: int | None


class ClaimOptions(Expected, total=False):
    """The options of `Broker.claim` for an object that exists."""

    parts: Iterable[str] | None
    arrays: Iterable[str] | None
    device: t.DeviceName | None
    copy_on_write: bool


class GetOptions(ClaimOptions, PrepareOptions, total=False):
    """The options of `Broker.get`."""
