"""Checks callers' arguments before they are sent to the broker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import index

from . import _types as t
from ._errors import Invalid

# The protocol's limits: bytes in a name or digest, and parts or arrays in a get.
_LONGEST = 255
_MOST_NAMED = 1024
# The longest time of the extension, which takes longer ones and `inf` for it.
_FOREVER = float(2**32 - 1)


def names(value: t.Any, what: str) -> list[str]:
    """Returns a list of names. Raises `Invalid` for anything else, including a single str."""
    if isinstance(value, str):
        raise Invalid(f"{what}={value!r} is a single name: give a list, [{value!r}]")
    try:
        listed = list(value)
    except TypeError:
        raise Invalid(f"{what}={value!r} has type {type(value).__name__}: give a list of names") from None
    for name in listed:
        if not isinstance(name, str):
            raise Invalid(f"{what} has {name!r}, of type {type(name).__name__}: names are str")
    return listed


def chosen(value: t.Any, what: str) -> list[str] | None:
    """Returns the requested parts or arrays without duplicates. Raises `Invalid` if there are too many for one get."""
    if value is None:
        return None
    unique = list(dict.fromkeys(names(value, what)))
    if len(unique) > _MOST_NAMED:
        raise Invalid(f"{what} has {len(unique)} names, and a get takes at most {_MOST_NAMED}: request all, or use several gets")
    return unique


def whole(value: t.Any, what: str, bits: int = 64) -> int | None:
    """Returns a non-negative integer, such as a version. Raises `Invalid` for anything else, including a bool."""
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
                raise Invalid(f"{what} has {number.bit_length()} bits, and at most {bits} are allowed")
    if number is None or number < 0:
        raise Invalid(f"{what}={value!r}: give an integer of at least 0")
    return number


def mode(value: t.Any) -> int | None:
    """Returns the permissions of a name. Raises `Invalid` for bits other than read and write."""
    number = whole(value, "mode")
    if number is not None and number & ~0o666:
        raise Invalid(f"mode={number:#o} has bits other than read and write, 0o666 at most: give octal, such as 0o640")
    return number


def text(value: t.Any, what: str) -> str:
    """Returns a digest or a part's name. Raises `Invalid` if it is not a str, or too long for a broker."""
    if not isinstance(value, str):
        raise Invalid(f"{what}={value!r} has type {type(value).__name__}: give a str")
    length = len(value.encode(errors="surrogatepass"))
    if length > _LONGEST:
        raise Invalid(f"{what} has {length} bytes, and at most {_LONGEST} are allowed")
    return value


def digest(value: t.Any) -> t.Digest | None:
    """Returns the requested digests: of the only part, or by part name."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {text(part, "a part in digest"): text(one, f"digest[{part!r}]") for part, one in value.items()}
    if not isinstance(value, str):
        raise Invalid(f"digest has type {type(value).__name__}: give a str, or a mapping of parts to their digests")
    return text(value, "digest")


def rdma(value: t.Any) -> t.Rdma:
    """Returns whether RDMA must reach memory. Raises `Invalid` for another value than "auto", True and False."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value == "auto":
        return "auto"
    raise Invalid(f'rdma={value!r} is not "auto", True or False')


def endless(value: t.Time | None) -> t.Time:
    """Returns a wait where None waits for ever."""
    return float("inf") if value is None else value


def seconds(value: t.Any, what: str = "wait") -> float:
    """Returns a time in seconds, which is a number or a `timedelta`. Raises `Invalid` for anything else."""
    try:
        number = value.total_seconds() if hasattr(value, "total_seconds") else float(value)
        if not isinstance(value, (bool, str, bytes, bytearray)) and number >= 0:
            return float(number)
    except (OverflowError, TypeError, ValueError):
        pass
    raise Invalid(f"{what}={value!r} is not a time: give seconds, at least 0, or a timedelta")


def limit(value: t.Any, what: str) -> float:
    """Returns a limit in seconds. Raises `Invalid` for 0, with which nothing would succeed, and for anything but a time, also for None."""
    number = seconds(value, what)
    if number == 0:
        raise Invalid(f"{what}={value!r} allows no time: give seconds, more than 0, or a timedelta")
    return min(number, _FOREVER)


def flag(value: object, what: str) -> bool:
    """Returns a flag. Raises `Invalid` for anything but a bool."""
    if not isinstance(value, bool):
        raise Invalid(f"{what}={value!r} has type {type(value).__name__}: give True or False")
    return value


def condition(replace: t.Any, replace_version: t.Any) -> bool | int:
    """Returns the condition of a put: False for a new name, True for any version, or the only version to replace."""
    if replace_version is not None:
        if replace is not False and replace is not True:
            raise Invalid(f"replace={replace!r} beside replace_version={replace_version!r}: give replace_version only")
        number = whole(replace_version, "replace_version")
        assert number is not None
        return number
    if replace is not None and not isinstance(replace, bool):
        raise Invalid(f"replace={replace!r} is neither True nor False: give replace_version= to replace only one version")
    return bool(replace)


# The options of `Broker.get_all` for each name.
_EACH = ("version", "newer_than", "parts", "arrays", "expect", "expect_owner", "digest")
_ALL = (*_EACH, "wait", "device", "copy_on_write")

# The extension checks the other options.
_CHECKS: dict[str, Callable[[t.Any], t.Any]] = {
    "version": lambda value: whole(value, "version"),
    "newer_than": lambda value: whole(value, "newer_than"),
    "parts": lambda value: chosen(value, "parts"),
    "arrays": lambda value: chosen(value, "arrays"),
    "expect_owner": lambda value: whole(value, "expect_owner", 32),
    "digest": digest,
}


def options(given: Mapping[str, t.Any], *without: str) -> dict[str, t.Any]:
    """Returns all options of a get, checked. Raises `TypeError` for an unknown option, and for those in `without`."""
    for name in given:
        if name in without or name not in _ALL:
            raise TypeError(f"got an unexpected keyword argument {name!r}")
    return {name: _CHECKS[name](given.get(name)) if name in _CHECKS else given.get(name) for name in _ALL}


def requests(wanted: Iterable[str] | Mapping[str, Mapping[str, t.Any]]) -> list[tuple[str, dict[str, t.Any]]]:
    """Returns the requests of `Broker.get_all`. Raises `Invalid` for a duplicate name and for an unknown option."""
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
        unknown = [option for option in given if option not in _EACH]
        if unknown:
            raise Invalid(f"{name!r} has the option {unknown[0]!r}, which is not one of {', '.join(_EACH)}")
    return [(name, options(given)) for name, given in named.items()]
