"""Nested values, and conversions to NumPy and Python."""

from __future__ import annotations

import gc
import json
import math
import operator
import os
import sys
import threading
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pytest

import vmmfd


CYCLE: list[Any] = []
CYCLE += [CYCLE, CYCLE]


class Pair(NamedTuple):
    a: Any


class Key(str, Enum):
    A = "a"


def test_nested_value_comes_back(broker: vmmfd.Broker, name: str) -> None:
    value = {
        "params": {"w": np.ones((2, 3)), "b": np.arange(3, dtype="f2")},
        "opt": [({"m": np.zeros(2)},), (1.5, float("inf"), None), []],
        "state": {0: np.arange(2), "empty": {}, "none": ()},
        "step": 3,
        "lr": 0.1,
    }
    broker.put(name, value)
    with broker.get(name) as lease:
        assert list(lease) == ["params/w", "params/b", "opt/0/0/m", "state/0"]
        found = lease.tree(vmmfd.Array.tolist)
        assert found == {
            "params": {"w": [[1.0] * 3] * 2, "b": [0.0, 1.0, 2.0]},
            "opt": [({"m": [0.0, 0.0]},), (1.5, math.inf, None), []],
            "state": {0: [0, 1], "empty": {}, "none": ()},
            "step": 3,
            "lr": 0.1,
        }
        array = lease.numpy()["params"]["w"]
        assert isinstance(array, np.ndarray) and not array.flags.writeable and array.ctypes.data == lease["params/w"].address


@pytest.mark.parametrize(
    "leaf",
    [0, 2**64, -(2**63) - 1, 2**127 + 1, 10**400, 5e-324, -0.0, math.nan, -math.inf, True, None, "", "\0", "ä😀", "x" * 100_000,
     (), [], {}, (1, [2, (3,)]), {"z": 1, "a": {7: -1, -2: math.inf}}, {"a/b": 1, "": 2}, {"~0": 1, "$ref": 2, "dict": []}],
    ids=lambda leaf: repr(leaf)[:20],
)  # fmt: skip
def test_leaves_are_exact(broker: vmmfd.Broker, name: str, leaf: Any) -> None:
    broker.put(name, {"g": {"v": leaf, "x": np.zeros(1)}})
    with broker.get(name) as lease:
        found = lease.tree()["g"]["v"]
    assert repr(found) == repr(leaf)


def test_integers_have_any_size(broker: vmmfd.Broker, name: str) -> None:
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)
    try:
        numbers = [10**5000, -(10**5000) - 1, 10**1000]
        broker.put(name, {"g": {"x": np.zeros(1)}, "n": numbers})
        with broker.get(name) as lease:
            assert lease.tree()["n"] == numbers
    finally:
        sys.set_int_max_str_digits(limit)


def test_keys_have_no_class(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, {"g": {Key.A: np.zeros(1)}, "h": {Key.A: {"n": 1}}, Key.A: [np.ones(1)]})
    with broker.get(name) as lease:
        tree = lease.tree()
        assert list(lease) == ["g/a", "a/0"]
    assert list(tree) == ["g", "h", "a"] and list(tree["g"]) == list(tree["h"]) == ["a"] and type(next(iter(tree["g"]))) is str


def put_parts(broker: vmmfd.Broker, name: str, *values: Any) -> None:
    """Puts the parts `a`, `b` and so on of one version, in this order."""
    parts = [chr(ord("a") + number) for number in range(len(values))]

    def put(part: str, value: Any) -> None:
        broker.put(name, value, part=part, parts=parts, group="g", wait=60)

    threads = [threading.Thread(target=put, args=pair) for pair in zip(parts, values)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


X = np.arange(2.0)


def test_parts_become_one_value(broker: vmmfd.Broker, name: str) -> None:
    same = {"step": 3, "nan": math.nan, "list": [1, {"k": 1}], "meta": {"lr": 0.1}, "none": {}}
    put_parts(broker, name, {"m": {"x": X}, "only": 1, **same}, {"m": {"y": X, "d": {7: X}}, "z": (X, 2), **same, "meta": {"wd": 2**70}})
    with broker.get(name) as lease:
        tree = lease.tree(vmmfd.Array.tolist)
    whole = {"m": {"x": [0, 1], "y": [0, 1], "d": {7: [0, 1]}}, "only": 1, **same, "meta": {"lr": 0.1, "wd": 2**70}, "z": ([0, 1], 2)}
    assert repr(sorted(tree.items())) == repr(sorted(whole.items())).replace("[0, 1]", "[0.0, 1.0]")


@pytest.mark.parametrize(
    ("first", "second", "place"),
    [
        ({"z": 1}, {"z": 2}, "z"),
        ({"z": 1}, {"z": True}, "z"),
        ({"z": {"k": 1}}, {"z": {"k": 1.0}}, "z/k"),
        ({"z": [1]}, {"z": (1,)}, "z"),
        ({"z": 1}, {"z": {}}, "z"),
        ({"z": 1}, {"z": {"k": X}}, "z"),
        ({"z": {"k": X}}, {"z": 1}, "z"),
        ({"z": {"k": X}}, {"z": [X]}, "z"),
        ({"z": X}, {"z": [X]}, "z"),
        ({"z": [X, 3]}, {"z": X}, "z"),
        ({"z": {"k": (X, 1)}}, {"z": {"k": [2, X]}}, "z/k"),
        ({"z": [X, 1]}, {"z": [2, X]}, "z/0"),
        ({"z": X}, {"z": None}, "z"),
    ],
)
def test_conflicts_of_parts_are_named(broker: vmmfd.Broker, name: str, first: Any, second: Any, place: str) -> None:
    put_parts(broker, name, {"a": [X], **first}, {"b": [X], **second})
    with broker.get(name) as lease:
        with pytest.raises(vmmfd.Invalid) as caught:
            lease.tree()
        assert f"the parts 'a' and 'b' have different values at {place!r}" in str(caught.value)
        assert list(lease.tree(part="a")) == ["a", "z"]


def test_parts_may_order_keys_differently(broker: vmmfd.Broker, name: str) -> None:
    first, second = {"k": 1, 7: {"a": math.nan, "b": (2,)}}, {7: {"b": (2,), "a": math.nan}, "k": 1}
    put_parts(broker, name, {"a": [X], "z": [first]}, {"b": [X], "z": [second]})
    with broker.get(name) as lease:
        assert repr(lease.tree()["z"]) == repr([first])


def test_order_of_keys_is_kept(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, {"z": 1, "b": {"y": 2, "w": np.zeros(1), "c": 3}, "a": 4, "v": np.ones(1), "epoch": 5})
    with broker.get(name) as lease:
        tree = lease.tree()
    assert list(tree) == ["z", "b", "a", "v", "epoch"] and list(tree["b"]) == ["y", "w", "c"]


def test_random_generator_continues(broker: vmmfd.Broker, name: str) -> None:
    random = np.random.default_rng(7)
    broker.put(name, {"w": np.zeros(1), "state": random.bit_generator.state})
    other = np.random.default_rng(0)
    with broker.get(name) as lease:
        other.bit_generator.state = lease.tree()["state"]
    assert (random.random(3) == other.random(3)).all()


def adam(parameters: int) -> dict[str, Any]:
    """An optimizer's state, as `torch.optim.AdamW.state_dict()` has it."""
    moments = np.zeros(4, "f4")
    state = {i: {"step": np.float32(1), "exp_avg": moments, "exp_avg_sq": moments} for i in range(parameters)}
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "foreach": None, "amsgrad": False, "params": list(range(parameters))}
    return {"state": state, "param_groups": [group]}


@pytest.mark.parametrize("parameters", [300, 20_000])
def test_state_of_many_tensors_comes_back(broker: vmmfd.Broker, name: str, parameters: int) -> None:
    broker.put(name, adam(parameters))
    with broker.get(name) as lease:
        tree = lease.tree(vmmfd.Array.numpy)
        assert list(tree["state"]) == list(range(parameters)) and tree["state"][parameters - 1]["step"] == 1
        assert tree["param_groups"] == adam(parameters)["param_groups"]


def test_copies_are_writable(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, {"a": np.arange(3.0), "n": 1})
    with broker.get(name) as lease:
        for convert in (None, vmmfd.Array.numpy):
            copied = lease.tree(convert, copy=True)["a"]
            np.asarray(copied)[:] = 7
        assert lease["a"].tolist() == [0, 1, 2]


def test_copies_share_one_memory(broker: vmmfd.Broker, name: str) -> None:
    value = [np.full((2, number), number, "i4") for number in range(100)]
    broker.put(name, {"l": value, "t": np.arange(6.0).reshape(2, 3).T})
    with broker.get(name) as lease:
        before = len(os.listdir("/proc/self/fd"))
        tree = lease.tree(copy=True)
        assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert [array.tolist() for array in tree["l"]] == [array.tolist() for array in value]
    assert tree["t"].tolist() == [[0, 3], [1, 4], [2, 5]] and tree["l"][1].address % 256 == 0


def test_trees_need_few_objects(broker: vmmfd.Broker, name: str) -> None:
    """The garbage collector, which holds the GIL, visits few objects for each array."""
    sizes, objects = [], []

    def convert(array: vmmfd.Array) -> int:
        sizes.append(array.size)
        if len(sizes) in (1, 1000):
            objects.append(len(gc.get_objects()))
        return array.size

    broker.put(name, {"d": [np.zeros(1)] * 1000})
    with broker.get(name) as lease:
        gc.collect()
        gc.disable()
        objects.append(len(gc.get_objects()))
        try:
            lease.tree(convert)
        finally:
            gc.enable()
    assert len(sizes) == 1000 and max(objects) - objects[0] < 200, objects


def test_some_arrays_have_no_other_values(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, {"a": {"x": np.zeros(4096)}, "b": [np.ones(1)], "n": 1}, copy=True)
    with broker.get(name, arrays=["b/0"]) as lease:
        assert lease.tree()["b"][0].tolist() == [1]


def test_flat_value_comes_back(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, {"a/b": np.zeros(2), "c": np.ones(1)})
    with broker.get(name) as lease:
        assert lease.tree(vmmfd.Array.tolist) == {"a/b": [0.0, 0.0], "c": [1.0]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"x": [1, 2], "y": 3}, "there is no array"),
        ({"x": np.ones(1), "y": "\ud800"}, r"a str in value\['y'\] has an unpaired surrogate"),
        ({"x": {10**5000: np.ones(1)}}, r"value\['x'\] has a key of 16610 bits"),
        ({"x": np.ones(1), "y": ["z" * 2**20]}, "the numbers and texts of the value need"),
        ({"x": np.ones(1), "y": CYCLE}, "nested more than 32 levels"),
        ({"a": {"b": np.ones(1)}, "a/b": np.ones(1)}, "two arrays"),
        ({"a": Pair(np.ones(1))}, "_asdict"),
        ({"a": {2.5: np.ones(1)}}, "has the key 2.5"),
    ],
)
def test_unclear_tree_is_refused(broker: vmmfd.Broker, name: str, value: Any, message: str) -> None:
    with pytest.raises((TypeError, vmmfd.Invalid), match=message):
        broker.put(name, value)


@pytest.mark.parametrize(
    "attributes",
    [
        {"path": []},
        {"path": None},
        {"path": "ab"},
        {"path": ["a"] * 20000},
        {"path": [0]},
        {"path": [[0]]},
        {"path": ["a", []]},
        {"path": ["a", ["b"]]},
        {"path": ["a", True]},
        {"path": ["a", {"b": 1}]},
        {"path": ["a", {"int": []}]},
        {"leaves": 5},
        {"leaves": "zz"},
        {"leaves": "{}"},
        {"leaves": '[["0", ["b"], 1]]'},
        {"leaves": "[[0, [], 1]]"},
        {"leaves": "[[1, [], 1]]"},
        {"leaves": '[[0, ["b"]]]'},
        {"leaves": '[[0, ["b"], {}]]'},
        {"leaves": '[[0, ["b"], {"int": "zz"}]]'},
        {"leaves": '[[0, ["b"], {"float": []}]]'},
        {"leaves": '[[0, ["b"], {"other": []}]]'},
        {"leaves": '[[0, ["b"], {"dict": 5}]]'},
        {"leaves": '[[0, ["b"], [{"dict": [[[], 1]]}]]]'},
        {"leaves": "[" * 100_000},
        {"leaves": f'[[0, ["b"], {"[" * 500}{"]" * 500}]]'},
    ],
    ids=lambda attributes: repr(attributes)[:50],
)  # fmt: skip
def test_other_attributes_are_no_tree(broker: vmmfd.Broker, name: str, attributes: dict[str, Any]) -> None:
    memory = vmmfd._native.Memory(4, backend="host")
    broker._native.put(name, [("all", [memory], [("x", "uint8", [4], None, 0, 0, json.dumps(attributes))], None)])
    with broker.get(name) as lease:
        with pytest.raises(vmmfd.Invalid, match="the attributes of the arrays do not describe a nested value"):
            lease.tree()
        assert lease["x"].nbytes == 4


@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8", "c16", ">i4", ">f8", ">c8", "V3"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 0, 3), (0, 3)])
def test_lists_equal_numpy(dtype: str, shape: tuple[int, ...]) -> None:
    numbers = np.frombuffer((bytes(range(1, 250)) * 2)[: np.dtype(dtype).itemsize * math.prod(shape)], "u1")
    if dtype == "?":
        numbers = numbers % 2
    array = numbers.view(dtype).reshape(shape)
    assert repr(vmmfd.asarray(array, backend="host").tolist()) == repr(array.tolist())


def test_items_are_numbers() -> None:
    assert vmmfd.asarray(np.array([[3.5]]), backend="host").item() == 3.5
    assert vmmfd.asarray(np.array([16256, 49152], "u2"), backend="host").reinterpret("bfloat16").tolist() == [1.0, -2.0]
    with pytest.raises(vmmfd.Invalid, match="item.. returns the only element"):
        vmmfd.asarray(np.ones(2), backend="host").item()


@pytest.mark.parametrize("given", [np.array(49, "u1"), np.array([[-3]], "i2"), np.array(2.5), np.array(True), np.array([0]), np.array(1j)])
@pytest.mark.parametrize("kind", [int, float, complex, bool])
def test_one_element_converts_as_numpys(given: np.ndarray[Any, Any], kind: type) -> None:
    array = vmmfd.asarray(given, backend="host")
    if given.dtype.kind == "c" and kind in (int, float):
        with pytest.raises(TypeError):
            kind(array)
    else:
        assert kind(array) == kind(given.reshape(()))


@pytest.mark.parametrize("given", [np.array([1, 2], "u1"), np.array([]), np.zeros(1, "V2")])
@pytest.mark.parametrize("kind", [int, float, complex, bool])
def test_other_arrays_are_no_number(given: np.ndarray[Any, Any], kind: type) -> None:
    with pytest.raises(TypeError, match="only an array of one element converts to a number"):
        kind(vmmfd.asarray(given, backend="host"))


def test_only_integers_are_an_index() -> None:
    assert list(range(vmmfd.asarray(np.array(3), backend="host"))) == [0, 1, 2]
    for other in (np.array([3]), np.array(3.0), np.array(True)):
        with pytest.raises(TypeError, match="only an integer array without dimensions is an index"):
            operator.index(vmmfd.asarray(other, backend="host"))


def test_environment_selects_the_backend(socket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMMFD_BACKEND", "host")
    assert vmmfd.empty(2, "u1").device.backend == "host"
    with vmmfd.connect(socket) as broker:
        assert broker.backend == "host"
    monkeypatch.setenv("VMMFD_BACKEND", "rocm")
    with pytest.raises(vmmfd.Invalid, match="VMMFD_BACKEND"):
        vmmfd.empty(2, "u1")
    assert "VMMFD_BACKEND" in os.environ


def test_exceptions_name_the_package() -> None:
    assert f"{vmmfd.AlreadyExists.__module__}.{vmmfd.AlreadyExists.__qualname__}" == "vmmfd.AlreadyExists"
