"""The options of a load format, from an engine's command line."""

from __future__ import annotations

import re
from typing import Any

from .._errors import Invalid

_DEFAULTS: dict[str, Any] = {"broker": None, "trust": (), "owner": None, "name": None, "on_missing": "load", "wait": 600, "on_unsupported": "fail", "wake": "own"}
# A name in the broker, short enough to append the GPU and the ranks.
_NAME = re.compile(r"(?!.*(?:^|/)\.\.?(?:/|$))[A-Za-z0-9._-]+(?:/[A-Za-z0-9._-]+)*")
_LONGEST = 150


def read(given: Any) -> dict[str, Any]:
    """Checks and returns the fields of `--model-loader-extra-config`."""
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise Invalid(f"--model-loader-extra-config is a {type(given).__name__}: give a JSON object")
    unknown = [field for field in given if field not in _DEFAULTS]
    if unknown:
        raise Invalid(f"--model-loader-extra-config has {unknown[0]!r}: load format vmmfd takes {', '.join(_DEFAULTS)}")
    options = _DEFAULTS | given
    for field, values in (("on_missing", ("load", "fail")), ("on_unsupported", ("fail", "load")), ("wake", ("own", "newest"))):
        if options[field] not in values:
            raise Invalid(f"--model-loader-extra-config has {field!r}: {options[field]!r}, which is not one of {', '.join(values)}")
    for field in ("broker", "name"):
        if options[field] is not None and (not isinstance(options[field], str) or not options[field]):
            raise Invalid(f"--model-loader-extra-config has {field!r}: {options[field]!r}: give text")
    name = options["name"]
    if name is not None and (len(name) > _LONGEST or not _NAME.fullmatch(name)):
        raise Invalid(
            f"--model-loader-extra-config has 'name': {name!r}: give at most {_LONGEST} characters of A-Z, a-z, 0-9, '.', '_' and '-', "
            "in components separated by '/', none of which is '.' or '..'"
        )
    trust, owner = options["trust"], options["owner"]
    if not isinstance(trust, (list, tuple)) or not all(map(_is_user, trust)):
        raise Invalid(f"--model-loader-extra-config has 'trust': {trust!r}: give a list of user ids")
    if owner is not None and not _is_user(owner):
        raise Invalid(f"--model-loader-extra-config has 'owner': {owner!r}: give a user id")
    wait = options["wait"]
    if isinstance(wait, bool) or not isinstance(wait, (int, float)) or not 0 <= wait < 1e9:
        raise Invalid(f"--model-loader-extra-config has 'wait': {wait!r}: give seconds, 0 or more")
    return options


def _is_user(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 32
