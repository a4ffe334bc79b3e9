"""Arguments of a wrong type raise `TypeError`, and bad values `Invalid`: one table of all calls and options."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

import vmmfd

BROKEN = "\ud800"  # An unpaired surrogate.
HUGE = 10**5000  # More digits than Python converts to text.

# Values of a wrong type, and bad values of the right type.
TEXT: Any = ([5, HUGE, b"x", ["x"]], [BROKEN])
NAMES: Any = ([5, HUGE, "x", b"x", [5], [HUGE]], [[BROKEN]])
NUMBER: Any = ([True, 1.0, "1"], [-1, 1 << 64, HUGE, -HUGE])
FLAG: Any = ([1, HUGE, "yes", [True]], [])
TIME: Any = (["5", True, [5], np.array([1, 2])], [-1, -0.001, math.nan, HUGE, -HUGE, timedelta(seconds=-1)])
LIMIT: Any = ([*TIME[0], None], TIME[1])
MAPPING: Any = ([["a"], 5, {"a": object()}, {5: 5}], [{"a": BROKEN}, {BROKEN: 1}, {"a": math.nan}, {"a": 1 << 70}, {"a": HUGE}])
DEVICE: Any = ([1.5, True, ["0"]], [-1, 1 << 40, HUGE, "first", BROKEN])
BACKEND: Any = ([5, b"host"], ["gpu", BROKEN])
PATH: Any = ([5, ["x"]], ["a\0b", BROKEN])
RDMA: Any = ([5, HUGE, None], ["no", BROKEN])
FUNCTION: Any = ([5, HUGE, "x"], [])
PREPARED: Any = ([5, HUGE, None, object()], [])
MODULE: Any = ([5, {}], [])
DTYPE: Any = ([5, None, b"f4"], ["float31", BROKEN, np.dtype("S4"), np.dtype([("a", "f4")])])
SHAPE: Any = ([1.5, "3", b"3", bytearray(b"3"), None, True, (1, True), [True], (1, 2.5)], [-1, (1, -1), 1 << 70, HUGE])
ARRAY: Any = ([5, object(), None], [np.array([object()]), np.array(["x"])])
PROMISE: Any = ([1, "yes"], [False])
COUNT: Any = ([*NUMBER[0], None], [*NUMBER[1], 1 << 16])

OPTIONS = {
    "after": ([5, HUGE, b"a:5"], ["5", "a:-1", BROKEN]),
    "array": ARRAY,
    "arrays": NAMES,
    "backend": BACKEND,
    "call": FUNCTION,
    "consumers": NUMBER,
    "convert": FUNCTION,
    "copy": FLAG,
    "copy_on_write": FLAG,
    "destination": ARRAY,
    "device": DEVICE,
    "digest": ([5, {"all": 5}, {5: "x"}], ["x" * 256, BROKEN, {"all": BROKEN}]),
    "dtype": DTYPE,
    "earlier": FLAG,
    "everything": FLAG,
    "expect": MAPPING,
    "expect_owner": NUMBER,
    "exports_unused": FLAG,
    "group": TEXT,
    "held": COUNT,
    "history": COUNT,
    "into": MODULE,
    "keep": NUMBER,
    "keep_lease": FLAG,
    "newest": FLAG,
    "own_copies": FLAG,
    "lifetime": ([[5], True], ["forever", BROKEN, -1]),
    "metadata": MAPPING,
    "mode": NUMBER,
    "module": MODULE,
    "name": TEXT,
    "never_written": PROMISE,
    "newer_than": NUMBER,
    "object": ARRAY,
    "ordinal": (["0", 0.5], [-1, 1 << 40]),
    "part": TEXT,
    "parts": NAMES,
    "path": PATH,
    "paths": PATH,
    "policy": ([], ["all", 5, None]),
    "prefix": TEXT,
    "prepared": PREPARED,
    "private": NAMES,
    "progress": FUNCTION,
    "queue": NUMBER,
    "rdma": RDMA,
    "readonly": FLAG,
    "replace": FLAG,
    "replace_version": NUMBER,
    "seal": FLAG,
    "shape": SHAPE,
    "source": ARRAY,
    "strict": FLAG,
    "threads": ([True, 1.5, "1"], [0, -1, 10**6, 1 << 70]),
    "recall_old": TIME,
    "timeout": (LIMIT[0], [*TIME[1], 0]),
    "trust": ([5, HUGE, "ab", b"ab", bytearray(b"ab"), [True], ["0"], [None]], [[-1], [1 << 40], [HUGE]]),
    "value": ([5, np.ones(3), {5: np.ones(3)}, {"x": object()}], [{}, {"x": np.array([object()])}, {BROKEN: np.ones(3)}]),
    "version": NUMBER,
    "wait": LIMIT,
    "wanted": ([5, "x", [5], {"x": 5}, {"x": {"verson": 1}}], [[BROKEN], ["x", "x"]]),
    "writable_buffers": FLAG,
}

# Options with another meaning than above.
SPECIAL: dict[str, Any] = {
    "Lease.unpark.version": ([True, 1.0], [-1, "oldest"]),
    "empty.dtype": ([5, b"f4"], DTYPE[1]),
    "zeros.dtype": ([5, b"f4"], DTYPE[1]),
    "Broker.follow.wait": TIME,
    "Broker.watch.wait": TIME,
    "Watch.next.wait": TIME,
    "load_safetensors.digest": FLAG,
    "load_safetensors.paths": ([5, [5]], ["a\0b", BROKEN, [BROKEN]]),
    "Array.reinterpret.shape": ([1.5, "3", (1, 2.5)], SHAPE[1]),
    "Broker.put.digest": ([5, {"all": "x"}], ["x" * 256, BROKEN]),
    "Broker.put_async.digest": ([5, {"all": "x"}], ["x" * 256, BROKEN]),
}

# Arguments that can be anything, or that another method receives.
ANY = {
    "Array.__array__.dtype",  # NumPy's.
    "same_device.a",
    "same_device.b",
}


class Calls:
    """All calls, with valid arguments for the others than the tested one."""

    def __init__(self, broker: vmmfd.Broker, name: str, folder: Path) -> None:
        broker.put(name, {"x": np.ones(4)}, digest="d")
        self.lease = broker.get(name)
        self.parked = broker.get(name)
        self.parked.park()
        self.watched = broker.watch(name)
        array = vmmfd.empty(4, "float64", backend="host")
        new = f"{name}/new"

        def later(call: Callable[..., Any]) -> Callable[..., Any]:
            return lambda **options: asyncio.run(call(**options))

        lease, many = self.lease, {"name": new, "value": {"x": np.ones(4)}}
        self.all: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
            "connect": (vmmfd.connect, {"path": broker.path, "backend": "host"}),
            "Broker": (vmmfd.Broker, {"path": broker.path, "backend": "host"}),
            "asarray": (vmmfd.asarray, {"object": np.ones(4), "backend": "host"}),
            "empty": (vmmfd.empty, {"shape": 4, "dtype": "uint8", "backend": "host"}),
            "zeros": (vmmfd.zeros, {"shape": 4, "dtype": "uint8", "backend": "host"}),
            "empty_like": (vmmfd.empty_like, {"object": np.ones(4), "backend": "host"}),
            "devices": (vmmfd.devices, {}),
            "device_uuid": (vmmfd.device_uuid, {"backend": "host"}),
            "serve": (vmmfd.serve, {"path": folder / "a.sock", "array": np.ones(4), "wait": 0.05, "backend": "host"}),
            "take": (vmmfd.take, {"path": folder / "none.sock", "wait": 0, "backend": "host"}),
            "load_safetensors": (vmmfd.load_safetensors, {"paths": str(folder / "none"), "backend": "host"}),
            "DType": (vmmfd.DType, {"dtype": "float32"}),
            "Broker.put": (broker.put, many),
            "Broker.put_async": (later(broker.put_async), many),
            "Broker.get": (broker.get, {"name": name}),
            "Broker.get_async": (later(broker.get_async), {"name": name}),
            "Broker.get_all": (broker.get_all, {"wanted": [name]}),
            "Broker.claim": (broker.claim, {"name": name}),
            "Broker.claim_async": (later(broker.claim_async), {"name": name}),
            "Broker.follow": (broker.follow, {"name": name}),
            "Broker.follow_topics": (lambda **given: broker.follow_topics(**({} if "prefix" in given else {"name": name}) | given), {}),
            "Broker.load": (broker.load, {"name": name, "into": None}),
            "Broker.state_dict": (broker.state_dict, {"name": name}),
            "Broker.list": (broker.list, {}),
            "Broker.stat": (broker.stat, {"name": name}),
            "Broker.bytes_of": (broker.bytes_of, {"name": name}),
            "Broker.who": (broker.who, {}),
            "Broker.watch": (broker.watch, {}),
            "Broker.recall": (broker.recall, {"name": f"{name}/none", "wait": 0}),
            "Broker.suspend": (broker.suspend, {}),
            "Broker.resume": (broker.resume, {}),
            "Broker.delete": (broker.delete, {"name": f"{name}/none"}),
            "Broker.on_lost": (broker.on_lost, {}),
            "Broker.on_restored": (broker.on_restored, {}),
            "Watch.next": (self.watched.next, {}),
            "Lease.__getitem__": (lambda name: lease[name], {}),
            "Lease.array": (lease.array, {"name": "x"}),
            "Lease.attributes": (lease.attributes, {"name": "x"}),
            "Lease.tree": (lease.tree, {}),
            "Lease.numpy": (lease.numpy, {}),
            "Lease.memory": (lease.memory, {}),
            "Lease.pieces": (lease.pieces, {}),
            "Lease.prepare": (lease.prepare, {}),
            "Lease.prepare_async": (later(lease.prepare_async), {}),
            "Lease.switch": (lambda **options: lease.switch(**{"prepared": lease.prepare(version=1), **options}), {}),
            "Lease.on_recall": (lease.on_recall, {}),
            "Lease.park": (lease.park, {}),
            "Lease.unpark": (self.parked.unpark, {}),
            "Lease.state_dict": (lease.state_dict, {}),
            "Lease.load": (lease.load, {"into": None}),
            "Array.reinterpret": (array.reinterpret, {"dtype": "uint8"}),
            "Array.writable": (array.writable, {}),
            "Array.copy_from": (array.copy_from, {}),
            "Array.copy_to": (array.copy_to, {}),
        }

    def close(self) -> None:
        self.lease.close()
        self.parked.close()
        self.watched.close()


def options_of(call: str) -> list[str]:
    """Returns the options in the signature of a call, those of `**options` included."""
    found: Any = vmmfd
    for part in call.split("."):
        found = getattr(found, part)
    names = []
    for option in inspect.signature(found).parameters.values():
        if option.kind is inspect.Parameter.VAR_KEYWORD:
            hint = get_type_hints(found)[option.name]
            if hint is Any:  # `put_async` has the options of `put`.
                names += [name for name in options_of(call.removesuffix("_async")) if name not in names]
            else:
                names += hint.__args__[0].__annotations__
        elif option.name not in ("self", "args", "kwargs"):
            names.append(option.name)
    return [name for name in names if f"{call}.{name}" not in ANY]


CALLS = [
    *("connect", "Broker", "asarray", "empty", "zeros", "empty_like", "devices", "device_uuid", "serve", "take", "load_safetensors"),
    *(f"Broker.{name}" for name in vars(vmmfd.Broker) | vars(vmmfd.Broker.__mro__[1]) if name[0] != "_" and callable(getattr(vmmfd.Broker, name))),
    *(f"Lease.{name}" for name in vars(vmmfd.Lease) if name[0] != "_" and callable(getattr(vmmfd.Lease, name))),
    *("Array.reinterpret", "Array.writable", "Array.copy_from", "Array.copy_to", "Lease.__getitem__", "Watch.next"),
]


@pytest.fixture
def calls(broker: vmmfd.Broker, name: str, tmp_path: Path) -> Iterator[Calls]:
    calls = Calls(broker, name, tmp_path)
    yield calls
    calls.close()
    broker.delete(name)


def test_follow_checks_its_wait_at_once(broker: vmmfd.Broker, name: str) -> None:
    for value, kind in [*((value, TypeError) for value in TIME[0]), *((value, vmmfd.Invalid) for value in TIME[1])]:
        with pytest.raises(kind, match="wait="):
            broker.follow(name, wait=value)


@pytest.mark.parametrize(("call", "option"), [(call, option) for call in CALLS for option in options_of(call)])
def test_wrong_arguments_are_refused(calls: Calls, call: str, option: str) -> None:
    if option in ("into", "module", "private", "strict", "everything", "writable_buffers") or call.endswith((".load", ".state_dict")):
        torch = pytest.importorskip("torch")
    function, valid = calls.all[call]
    if "into" in valid:
        valid = {**valid, "into": torch.nn.Linear(2, 2)}
    wrong, bad = SPECIAL.get(f"{call}.{option}", OPTIONS[option])
    if option in ("part", "group") and call.startswith(("Broker.put", "Broker.claim")):
        valid = {"part": "a", "group": "g", **({"parts": ["a"]} if "put" in call else {}), **valid}
    if option == "wait" and "put" in call:
        valid = {"part": "a", "parts": ["a"], "group": "g", **valid}
    for value, kind in [*((value, TypeError) for value in wrong), *((value, vmmfd.Invalid) for value in bad)]:
        with pytest.raises((TypeError, ValueError)) as caught:
            function(**{**valid, option: value})
        assert type(caught.value) is kind, (value, caught.value)
