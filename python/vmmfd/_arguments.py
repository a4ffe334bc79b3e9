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

# The most characters of an argument in a message.
_LONGEST_SHOWN = 200

# The types among arrays that a put keeps as they are. A subclass is not: a NumPy scalar is an array.
PLAIN = (str, int, float, bool, type(None))


def shown(value: object) -> str:
    """Formats an argument for a message: shortened, and only its type if it has no text, as an int of more digits than Python converts."""
    try:
        text = repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def names(value: t.Any, what: str) -> list[str]:
    """Returns a list of names. Raises `TypeError` for anything else, including a single str."""
    if isinstance(value, str):
        raise TypeError(f"{what}={shown(value)} is a single name: give a list, [{shown(value)}]")
    try:
        listed = list(value)
    except TypeError:
        raise TypeError(f"{what}={shown(value)} has type {type(value).__name__}: give a list of names") from None
    for name in listed:
        if not isinstance(name, str):
            raise TypeError(f"{what} has {shown(name)}, of type {type(name).__name__}: names are str")
        encoded(name, f"{shown(name)} in {what}")
    return listed


def encoded(value: str, what: str) -> bytes:
    """Returns the bytes of a str. Raises `Invalid` for an unpaired surrogate."""
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise Invalid(f"{what} has an unpaired surrogate, which is not valid Unicode: remove it") from None


def chosen(value: t.Any, what: str) -> list[str] | None:
    """Returns the requested parts or arrays without duplicates. Raises `Invalid` if there are too many for one get."""
    if value is None:
        return None
    unique = list(dict.fromkeys(names(value, what)))
    if len(unique) > _MOST_NAMED:
        raise Invalid(f"{what} has {len(unique)} names, and a get takes at most {_MOST_NAMED}: request all, or use several gets")
    return unique


def whole(value: t.Any, what: str, bits: int = 64) -> int | None:
    """Returns a non-negative integer, such as a version, or None. Raises `TypeError` for another type, also for a bool, and `Invalid` for a
    number below 0 or of more bits."""
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{what}={shown(value)} has type {type(value).__name__}: give an integer of at least 0")
    number = index(value)
    if number.bit_length() > bits:
        raise Invalid(f"{what} has {number.bit_length()} bits, and at most {bits} are allowed")
    if number < 0:
        raise Invalid(f"{what}={shown(value)}: give an integer of at least 0")
    return number


def users(value: t.Any, what: str) -> list[int]:
    """Returns user ids. Raises `TypeError` for anything but integers in a list or another iterable, and `Invalid` for other numbers."""
    if isinstance(value, (str, bytes, bytearray)) or not hasattr(value, "__iter__"):
        raise TypeError(f"{what}={shown(value)} has type {type(value).__name__}: give a list of user ids")
    return [needed(whole(uid, what, 32), what) for uid in value]


def needed(value: t.Result | None, what: str) -> t.Result:
    """Returns an option for which None has no meaning. Raises `TypeError` for None."""
    if value is None:
        raise TypeError(f"{what}=None is not allowed: omit {what}, or give a value")
    return value


def mode(value: t.Any) -> int | None:
    """Returns the permissions of a name. Raises `Invalid` for bits other than read and write."""
    number = whole(value, "mode")
    if number is not None and number & ~0o666:
        raise Invalid(f"mode={number:#o} has bits other than read and write, 0o666 at most: give octal, such as 0o640")
    return number


def text(value: t.Any, what: str) -> str:
    """Returns a digest or a part's name. Raises `TypeError` if it is not a str, `Invalid` if it is too long for a broker."""
    if not isinstance(value, str):
        raise TypeError(f"{what}={shown(value)} has type {type(value).__name__}: give a str")
    length = len(encoded(value, what))
    if length > _LONGEST:
        raise Invalid(f"{what} has {length} bytes, and at most {_LONGEST} are allowed")
    return value


def digest(value: t.Any) -> t.Digest | None:
    """Returns the requested digests: of the only part, or by part name."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {text(part, "a part in digest"): text(one, f"digest[{shown(part)}]") for part, one in value.items()}
    if not isinstance(value, str):
        raise TypeError(f"digest has type {type(value).__name__}: give a str, or a mapping of parts to their digests")
    return text(value, "digest")


def rdma(value: t.Any) -> t.Rdma:
    """Returns whether RDMA must reach memory. Raises `Invalid` for another str than "auto", `TypeError` for anything else but a bool."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value == "auto":
        return "auto"
    raise (Invalid if isinstance(value, str) else TypeError)(f'rdma={shown(value)} is not "auto", True or False')


def endless(value: t.Time | None) -> t.Time:
    """Returns a wait where None waits for ever."""
    return float("inf") if value is None else value


def seconds(value: t.Any, what: str = "wait") -> float:
    """Returns a time in seconds, which is a number or a `timedelta`. Raises `TypeError` for anything else, `Invalid` below 0."""
    problem = f"{what}={shown(value)} is not a time: give seconds, at least 0, or a timedelta"
    if isinstance(value, (bool, str, bytes, bytearray)):
        raise TypeError(problem)
    try:
        number = float(value.total_seconds() if hasattr(value, "total_seconds") else value)
    except OverflowError:
        number = -1.0
    except (TypeError, ValueError):
        raise TypeError(problem) from None
    if not number >= 0:
        raise Invalid(problem)
    return number


def limit(value: t.Any, what: str) -> float:
    """Returns a limit in seconds. Raises `Invalid` for 0, with which nothing would succeed, and as `seconds`, also for None."""
    number = seconds(value, what)
    if number == 0:
        raise Invalid(f"{what}={shown(value)} allows no time: give seconds, more than 0, or a timedelta")
    return min(number, _FOREVER)


def flag(value: object, what: str) -> bool:
    """Returns a flag. Raises `TypeError` for anything but a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{what}={shown(value)} has type {type(value).__name__}: give True or False")
    return value


def function(value: object, what: str) -> None:
    """Raises `TypeError` for an object that can't be called."""
    if not callable(value):
        raise TypeError(f"{what}={shown(value)} has type {type(value).__name__}, which can't be called")


def condition(replace: t.Any, replace_version: t.Any) -> bool | int:
    """Returns the condition of a put: False for a new name, True for any version, or the only version to replace."""
    if not isinstance(replace, bool):
        raise TypeError(f"replace={shown(replace)} is neither True nor False: give replace_version= to replace only one version")
    number = whole(replace_version, "replace_version")
    return replace if number is None else number


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
    "copy_on_write": lambda value: None if value is None else flag(value, "copy_on_write"),
}


def options(given: Mapping[str, t.Any], *without: str) -> dict[str, t.Any]:
    """Returns all options of a get, checked. Raises `TypeError` for an unknown option, and for those in `without`."""
    if "wait" in given:
        seconds(given["wait"])
    for name in given:
        if name in without or name not in _ALL:
            raise TypeError(f"got an unexpected keyword argument {name!r}")
    return {name: _CHECKS[name](given.get(name)) if name in _CHECKS else given.get(name) for name in _ALL}


def requests(wanted: Iterable[str] | Mapping[str, Mapping[str, t.Any]]) -> list[tuple[str, dict[str, t.Any]]]:
    """Returns the requests of `Broker.get_all`. Raises `Invalid` for a duplicate name, `TypeError` for an unknown option."""
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
        if not isinstance(given, Mapping):
            raise TypeError(f"the options of {shown(name)} have type {type(given).__name__}: give a mapping")
        unknown = [option for option in given if option not in _EACH]
        if unknown:
            raise TypeError(f"{shown(name)} has the option {shown(unknown[0])}, which is not one of {', '.join(_EACH)}")
    return [(name, options(given)) for name, given in named.items()]
