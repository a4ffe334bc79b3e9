"""Nested values, and conversions to NumPy and Python."""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple

import numpy as np
import pytest

import vmmfd


class Pair(NamedTuple):
    a: Any


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


def test_flat_value_comes_back(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, {"a/b": np.zeros(2), "c": np.ones(1)})
    with broker.get(name) as lease:
        assert lease.tree(vmmfd.Array.tolist) == {"a/b": [0.0, 0.0], "c": [1.0]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"x": [1, 2]}, "there is no array"),
        ({"a": {"b": np.ones(1)}, "a/b": np.ones(1)}, "two arrays"),
        ({"a": Pair(np.ones(1))}, "_asdict"),
        ({"a": {2.5: np.ones(1)}}, "has the key 2.5"),
    ],
)
def test_unclear_tree_is_refused(broker: vmmfd.Broker, name: str, value: Any, message: str) -> None:
    with pytest.raises(vmmfd.Invalid, match=message):
        broker.put(name, value)


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
    assert f"{vmmfd.Exists.__module__}.{vmmfd.Exists.__qualname__}" == "vmmfd.Exists"
