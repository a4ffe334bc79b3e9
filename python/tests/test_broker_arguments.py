"""Invalid arguments of a client's calls."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from test_broker import floats
import vmmfd


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"mode": 99999}, "mode=0o303237 has bits other than"),
        ({"mode": 0o777}, "mode=0o777 has bits other than.*0o666 at most"),
        ({"mode": 640}, "mode=0o1200 has bits other than.*such as 0o640"),
        ({"keep": 1 << 32}, "keep has 33 bits"),
        ({"part": ""}, "part='' is empty"),
        ({"digest": "x" * 256}, "digest has 256 bytes, and at most 255"),
    ],
)
def test_invalid_put_options(broker: vmmfd.Broker, name: str, options: Any, problem: str) -> None:
    with pytest.raises(vmmfd.Invalid, match=problem):
        broker.put(name, {"x": floats(1)}, **options)
    assert not broker.list(name)


def test_numpy_integers_are_versions(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, {"x": floats(1)}, digest="d", keep=np.uint8(2))
    with broker.get(name, version=np.int64(1), digest={"all": "d"}) as lease:
        assert lease.version == 1
    with pytest.raises(vmmfd.Invalid, match="version has .* bits, and at most 64"):
        broker.get(name, version=10**5000)


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"a": object()}, r'metadata\["a"\] has type object'),
        ({"a": [1, {2}]}, r'metadata\["a"\]\[1\] has type set'),
        ({1: 2}, "has the key 1, of type int"),
        ({"a": math.nan}, "NaN, which JSON"),
        ({"a": 1 << 70}, "more than 64 bits"),
        ({"a": "\ud800"}, "surrogate"),
        (["a"], "metadata has type list: give a mapping"),
        ({"a": np.float32(1)}, "numpy.float32"),
    ],
)
def test_metadata_must_be_json(broker: vmmfd.Broker, name: str, metadata: Any, problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=problem):
        broker.put(name, {"x": floats(1)}, metadata=metadata)


def test_recursive_metadata_is_refused(broker: vmmfd.Broker, name: str) -> None:
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    with pytest.raises(ValueError, match="deep"):
        broker.put(name, {"x": floats(1)}, metadata=loop)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (floats(1), "value has type ndarray: give a mapping"),
        ({}, "no array to put"),
        ({1: floats(1)}, "the key 1, of type int"),
        ({"x": object()}, "array \"x\""),
        ({"x": np.array([object()])}, "array \"x\""),
    ],
)
def test_put_refuses_other_values(broker: vmmfd.Broker, name: str, value: Any, problem: str) -> None:
    with pytest.raises((ValueError, TypeError), match=problem):
        broker.put(name, value)


@pytest.mark.parametrize("name", ["", "/", "a//b", "..", "a b", "é", "a" * 300])
def test_invalid_names_are_refused(broker: vmmfd.Broker, name: str) -> None:
    with pytest.raises(vmmfd.Invalid):
        broker.get(name)
    with pytest.raises(vmmfd.Invalid):
        broker.put(name, {"x": floats(1)})


def test_put_plans_are_checked(broker: vmmfd.Broker, name: str) -> None:
    memory = vmmfd._native.Memory(4096, backend="host")

    def put(memories: Any, *entries: Any) -> None:
        broker._native.put(name, [("all", memories, list(entries), None)])

    for memories, entry, problem in [
        ([], ("x", "uint8", [1], None, 0, 0, None), "has no memory"),
        ([memory], ("x", "uint8", [1], None, 1, 0, None), "in memory 1, but its part has 1"),
        ([memory], ("x", "uint7", [1], None, 0, 0, None), "uint7"),
        ([memory], ("x", "uint8", [memory.mapped_size + 1], None, 0, 0, None), "exceed the size of"),
        ([memory], ("x", "uint8", [1], None, 0, 0, "[1]"), "not a JSON object"),
        ([memory], ("x", "uint8", [1], None, 0, 0, "{"), "not a JSON object"),
        ([memory], ("x\0y", "uint8", [1], None, 0, 0, None), "a null character in its name"),
    ]:
        with pytest.raises(ValueError, match=problem):
            put(memories, entry)
    put([memory], ("x", "uint8", [1], None, 0, 0, '{"kind": "parameter"}'))
    lease = broker.get(name)
    assert lease.attributes("x") == {"kind": "parameter"}
    with pytest.raises(KeyError):
        lease.attributes("y")


@pytest.mark.parametrize("argument", ["wait", "replace", "lifetime"])
def test_argument_interrupts_are_passed_on(broker: vmmfd.Broker, name: str, argument: str) -> None:
    class Odd:
        def interrupt(self, *_: object) -> Any:
            raise KeyboardInterrupt

        __index__ = __float__ = __repr__ = interrupt

    options: Any = {argument: Odd(), **({"parts": ["a"], "part": "a", "group": "g"} if argument == "wait" else {})}
    with pytest.raises(KeyboardInterrupt):
        broker.put(name, {"x": floats(1)}, **options)
