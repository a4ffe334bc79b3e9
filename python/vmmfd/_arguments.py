"""What callers give: names, numbers and digests, checked before they go to the broker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import index

from . import _types as t
from ._errors import Invalid

# How many bytes a name or a digest has at most, and how many parts and arrays a get can name: more breaks the protocol.
_LONGEST = 255
_MOST_NAMED = 1024


def names(value: t.Any, what: str) -> list[str]:
    """A list of names. Raises `Invalid` for what is none, one str included."""
    if isinstance(value, str):
        raise Invalid(f"{what}={value!r} is one name where a list belongs: give [{value!r}]")
    try:
        listed = list(value)
    except TypeError:
        raise Invalid(f"{what}={value!r} is of type {type(value).__name__}: give a list of names") from None
    for name in listed:
        if not isinstance(name, str):
            raise Invalid(f"{what} has {name!r}, of type {type(name).__name__}: names are str")
    return listed


def chosen(value: t.Any, what: str) -> list[str] | None:
    """The names of parts or arrays that are asked for, each once. Raises `Invalid` for more than a get takes."""
    if value is None:
        return None
    unique = list(dict.fromkeys(names(value, what)))
    if len(unique) > _MOST_NAMED:
        raise Invalid(f"{what} has {len(unique)} names, and a get takes {_MOST_NAMED}: ask for all, or in several gets")
    return unique


def owner(value: t.Any) -> int | None:
    """The number of a user."""
    return whole(value, "expect_owner", 32)


def whole(value: t.Any, what: str, bits: int = 64) -> int | None:
    """A number of a version or the like. Raises `Invalid` for what is none, a bool included."""
    number = None
    if value is None:
        return None
    if not isinstance(value, bool):
        try:
            number = index(value)
        except TypeError:
            pass
        else:
            if number.bit_length() > bits:
                raise Invalid(f"{what} is a number of {number.bit_length()} bits, and it has at most {bits}")
    if number is None or number < 0:
        raise Invalid(f"{what}={value!r}: give a whole number, from 0 on")
    return number


def mode(value: t.Any) -> int | None:
    """The permissions of a name. Raises `Invalid` for more than read and write."""
    number = whole(value, "mode")
    if number is not None and number & ~0o666:
        raise Invalid(f"mode={number:#o} has more than read and write for each: at most 0o666; give it in octal, such as 0o640")
    return number


def text(value: t.Any, what: str) -> str:
    """A digest or a part's name. Raises `Invalid` for what is no str, or longer than a broker takes."""
    if not isinstance(value, str):
        raise Invalid(f"{what}={value!r} is of type {type(value).__name__}: give a str")
    length = len(value.encode(errors="surrogatepass"))
    if length > _LONGEST:
        raise Invalid(f"{what} has {length} bytes, and at most {_LONGEST} are allowed")
    return value


def digest(value: t.Any) -> t.Digest | None:
    """The digests that are asked for: of the one part, or of several by their names."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {text(part, "a part in digest"): text(one, f"digest[{part!r}]") for part, one in value.items()}
    if not isinstance(value, str):
        raise Invalid(f"digest is of type {type(value).__name__}: give a str, or a mapping of parts to their digests")
    return text(value, "digest")


def promised(exported: object) -> bool:
    """Whether the caller promises that no other library uses the memory meanwhile."""
    if exported not in (None, "valid"):
        raise Invalid(f'exported={exported!r} is none of None and "valid"')
    return exported is not None


# What `Broker.get_all` takes for each name.
_OPTIONS = ("version", "newer_than", "parts", "arrays", "expect", "expect_owner", "digest")


def requests(wanted: Iterable[str] | Mapping[str, Mapping[str, t.Any]]) -> list[t.Any]:
    """The objects that `Broker.get_all` asks for, each once. Raises `Invalid` for a name given twice and for an unknown option."""
    named: Mapping[str, Mapping[str, t.Any]]
    if isinstance(wanted, Mapping):
        named = wanted
    else:
        listed = names(wanted, "wanted")
        named = dict.fromkeys(listed, {})
        if len(named) < len(listed):
            twice = next(name for name in named if listed.count(name) > 1)
            raise Invalid(f"wanted has {twice!r} twice: name each object once")
    for name, given in named.items():
        unknown = [option for option in given if option not in _OPTIONS]
        if unknown:
            raise Invalid(f"{name!r} is to be got with {unknown[0]!r}, which is none of {', '.join(_OPTIONS)}")
    return [
        (
            name,
            whole(given.get("version"), "version"),
            whole(given.get("newer_than"), "newer_than"),
            chosen(given.get("parts"), "parts"),
            chosen(given.get("arrays"), "arrays"),
            given.get("expect"),
            owner(given.get("expect_owner")),
            digest(given.get("digest")),
        )
        for name, given in named.items()
    ]
