"""State dicts from an object, mapped or as private copies."""

from __future__ import annotations

import copy
import gc
import json
import threading
import warnings
from typing import Any

import pytest

import vmmfd

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch_models import Net, X, everything, is_mapped  # noqa: E402

nn = torch.nn


def test_state_dict_round_trip(broker: vmmfd.Broker, name: str) -> None:
    module = Net(3).eval()
    expected = module(X)
    broker.put(name, module)
    tensors = broker.state_dict(name)
    assert tensors.keys() == module.state_dict().keys()
    assert broker.state_dict(name, everything=True).keys() == everything(module).keys()
    other = Net(4).eval()
    other.plain, other.norm.note, other.cache = module.plain, module.norm.note, module.cache
    other.load_state_dict(tensors, assign=True)
    assert torch.equal(other(X), expected)
    # Kinds of tensors that PyTorch's state_dict does not distinguish.
    broker.put(name, module.state_dict(), replace=True)
    with broker.get(name) as lease:
        kinds = {key: lease.attributes(key)["kind"] for key in lease}
        assert kinds["table"] == kinds["norm.running_mean"] == kinds["first"] == "tensor"
        again = lease.state_dict()
        assert not any(is_mapped(tensor, lease) for tensor in again.values() if tensor.numel())
        assert is_mapped(lease.state_dict(writable_buffers=False)["norm.running_mean"], lease)
    for key, tensor in module.state_dict().items():
        assert torch.equal(again[key], tensor), key
    third = Net(device="meta")
    with pytest.raises(vmmfd.MismatchError) as raised:
        broker.load(name, third)
    # Tensors in no state_dict are an error if they would remain on the meta device.
    assert "cache: it is on the meta device" in str(raised.value) and "plain: it is" in str(raised.value)


def test_tensors_keep_the_lease(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, Net(1))
    tensors = broker.state_dict(name)
    kept = tensors["first"].clone()
    broker.delete(name)
    assert torch.equal(tensors["first"], kept)
    view = tensors["first"][1]
    tensors.clear()
    gc.collect()
    assert len(broker.who(name).leases) == 1
    assert torch.equal(view, kept[1])
    del view
    gc.collect()
    assert vmmfd._native._settle(10)
    assert len(broker.who(name).leases) == 0


def test_torch_only_types_round_trip(broker: vmmfd.Broker, name: str) -> None:
    bits = torch.arange(48, dtype=torch.uint8)
    names = ["bool", "int8", "int64", "uint16", "float16", "bfloat16", "float64", "complex64", "complex32", "uint32"]
    names += ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"]
    tensors = {key: (bits % 2 if key == "bool" else bits).clone().view(getattr(torch, key)) for key in names if hasattr(torch, key)}
    tensors["scalar"] = torch.tensor(3.5)
    tensors["conjugated"] = torch.tensor([1 + 2j, 3 - 4j]).conj()
    tensors["negated"] = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    tensors["expanded"] = torch.arange(3).expand(4, 3)
    tensors["diagonal"] = torch.arange(9.0).view(3, 3).diagonal()
    tensors["empty"] = torch.empty(2, 0, 3, dtype=torch.bfloat16)
    broker.put(name, tensors)
    found = broker.state_dict(name)
    assert list(found) == list(tensors)
    for key, tensor in tensors.items():
        assert found[key].dtype == tensor.dtype and found[key].shape == tensor.shape, key
        one, two = (of.resolve_conj().resolve_neg().contiguous() for of in (tensor, found[key]))
        assert tensor.numel() == 0 or torch.equal(one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8)), key
    assert found["expanded"].stride() == (0, 1) and found["diagonal"].stride() == (4,)
    assert len(found) > 18
    broker.put(name, {"nothing": torch.empty(0)}, replace=True)
    assert broker.state_dict(name)["nothing"].shape == (0,)


def test_select_parts_and_arrays(broker: vmmfd.Broker, name: str) -> None:
    def put(part: str, value: float) -> None:
        broker.put(name, {"weight": torch.full((1, 1), value)}, part=part, parts=["a", "b"], group="g", wait=20)

    other = threading.Thread(target=put, args=("a", 1.0))
    other.start()
    put("b", 2.0)
    other.join()
    with pytest.raises(vmmfd.Invalid, match=r"the parts 'a' and 'b' both have an array 'weight': .* parts=\['b'\]"):
        broker.state_dict(name)
    with pytest.raises(vmmfd.MismatchError, match="weight: the parts 'a' and 'b' have it: select one with parts="):
        broker.load(name, nn.Linear(1, 1, bias=False))
    assert broker.state_dict(name, parts=["b"])["weight"] == 2
    module = nn.Linear(1, 1, bias=False)
    loaded = broker.load(name, module, parts=["a"], arrays=["weight"], newer_than=0)
    assert module.weight == 1 and loaded.version == 1
    with pytest.raises(vmmfd.Timeout):
        broker.state_dict(name, newer_than=1, wait=0.05)


def test_private_selects_copies(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, Net(1))
    module = Net(device="meta")
    loaded = broker.load(name, module, private=["embed.weight"])
    assert {"embed.weight", "head.weight"} <= set(loaded.private) and module.head.weight is module.embed.weight
    with torch.no_grad():
        module.head.weight.add_(1)
    with broker.get(name) as lease:
        found = lease.state_dict(private=["first", "head.weight"])
        assert is_mapped(found["last"], lease) and not is_mapped(found["first"], lease)
        assert found["embed.weight"].data_ptr() == found["head.weight"].data_ptr() and not is_mapped(found["head.weight"], lease)
    with pytest.raises(vmmfd.MismatchError, match="nosuch: private= names it, but it is not loaded"):
        broker.load(name, Net(2), private=["nosuch"])
    with pytest.raises(vmmfd.Invalid, match="private= names 'nosuch', which the object lacks"):
        broker.state_dict(name, private=["nosuch"])
    with pytest.raises(TypeError, match="is a single name"):
        broker.load(name, Net(2), private="first")
    with pytest.raises(TypeError, match="private=5 has type int: give a list of names"):
        broker.load(name, Net(2), private=5)  # type: ignore[arg-type]


def test_unknown_tensors_are_copied(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, Net(1).state_dict())
    with broker.get(name) as lease:
        found = lease.state_dict()
        assert not is_mapped(found["table"], lease) and not is_mapped(found["first"], lease)
        for tensor in found.values():
            tensor.add_(1)
        assert torch.equal(lease.state_dict()["first"], Net(1).first)
        # The module identifies its parameters.
        found = lease.state_dict(module=Net(2))
        assert not is_mapped(found["table"], lease) and is_mapped(found["first"], lease)
        assert is_mapped(lease.state_dict(module=Net(2), writable_buffers=False)["table"], lease)
    with pytest.raises(TypeError, match="module= takes a torch.nn.Module, not a dict"):
        broker.state_dict(name, module={})  # type: ignore[arg-type]


@pytest.mark.parametrize("load", [False, True])
def test_large_copies_warn(broker: vmmfd.Broker, name: str, load: bool) -> None:
    def quantised() -> Any:
        module = nn.Module()
        module.register_buffer("codes", torch.zeros(65 << 20, dtype=torch.int8))
        return module

    def get(**options: Any) -> Any:
        return broker.load(name, quantised(), **options) if load else broker.state_dict(name, **options)

    broker.put(name, quantised())
    with pytest.warns(UserWarning, match="1 tensors of .* are not known to be parameters: copying them takes another 65 MiB: .*writable_buffers=False") as caught:
        get()
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get(writable_buffers=False)
        get(private=["codes"])
        get(copy_on_write=True)


def test_inference_mode_returns_normal_tensors(broker: vmmfd.Broker, name: str) -> None:
    module = Net(1)
    broker.put(name, module)
    with torch.inference_mode():
        loaded = broker.load(name, module)
        found = broker.state_dict(name, everything=True)
        loaded.refresh()
    assert not any(tensor.is_inference() for tensor in [*everything(module).values(), *found.values()])
    module.cache.add_(1)
    module.requires_grad_(True)(X).sum().backward()
    assert module.first.grad is not None


def test_view_is_copied_alone(broker: vmmfd.Broker, name: str) -> None:
    whole = torch.arange(1 << 18, dtype=torch.float32).view(256, 1024)
    module = nn.Module()
    module.whole = nn.Parameter(whole)
    module.row, module.lap, module.far = (nn.Parameter(whole[place]) for place in (7, slice(7, 9), 200))
    module.register_buffer("column", whole[:, 3])
    broker.put(name, module)
    other = copy.deepcopy(module)
    loaded = broker.load(name, other, private=["row", "lap", "far"], writable_buffers=False)
    assert loaded.private == ["row", "lap", "far"] and is_mapped(other.whole, loaded.lease) and is_mapped(other.column, loaded.lease)
    assert other.row.untyped_storage().nbytes() == 8192 and other.far.untyped_storage().nbytes() == 4096
    assert other.row.data_ptr() == other.lap.data_ptr() and torch.equal(other.lap, whole[7:9]) and torch.equal(other.far, whole[200])
    with torch.no_grad():
        other.row.zero_()
    assert other.lap[0].sum() == 0 and torch.equal(other.whole, whole)
    loaded.refresh()
    assert torch.equal(other.row, whole[7])
    found = broker.state_dict(name)
    assert found["column"].untyped_storage().nbytes() == whole.nbytes - 4096 + 16 and torch.equal(found["column"], whole[:, 3])
    # Elements keep their alignment.
    found = broker.state_dict(name, private=["far"], writable_buffers=False)
    assert found["far"].storage_offset() == 0
    small = torch.arange(300)
    named = {"a": small[:100], "b": small[101:103], "c": small[290:]}
    broker.put(name, {key: nn.Parameter(tensor, requires_grad=False) for key, tensor in named.items()}, replace=True)
    found = broker.state_dict(name, private=["b", "c"])
    assert torch.equal(found["b"], small[101:103]) and torch.equal(found["c"], small[290:])
    assert found["b"].storage_offset() == 101 % 32 and found["c"].untyped_storage().nbytes() == 300 * 8 - 2304


def test_wrong_table_stays_in_bounds(broker: vmmfd.Broker, name: str) -> None:
    truth = torch.arange(1024, dtype=torch.float32)
    part, memories, _, _ = broker._native.plan([("x", truth.numpy())], "all")

    def put(*rows: tuple[int, int, dict[str, Any]]) -> None:
        """Returns arrays with offset, number of elements, and claimed storage."""
        entries = [
            (f"{at}", "float32", [length], None, 0, begin, json.dumps({"kind": "buffer", "storage": 0, "storage_offset": begin, **said}))
            for at, (begin, length, said) in enumerate(rows)
        ]
        broker._native.put(name, [(part, memories, entries, None)], replace=True)

    for rows in (
        [(0, 16, {"storage_bytes": 8})],
        [(0, 16, {"storage_bytes": -64})],
        [(0, 16, {"storage_bytes": 1 << 62})],
        [(64, 16, {"storage_bytes": 128, "storage_offset": -64})],
        [(64, 16, {"storage_bytes": 128, "storage_offset": 64}), (128, 16, {"storage_bytes": 128, "storage_offset": 60})],
        [(0, 4, {"storage_bytes": 16}), (256, 900, {"storage_bytes": 16, "storage_offset": 4000})],
        [(0, 16, {"storage_bytes": 64, "storage": [0]})],
    ):
        put(*rows)
        for writable_buffers in (True, False):
            found = broker.state_dict(name, writable_buffers=writable_buffers)
            for at, (begin, length, _) in enumerate(rows):
                assert torch.equal(found[f"{at}"], truth[begin // 4 :][:length])
    for dtype in ("float64", "nn", 5, ["float32"]):
        put((0, 16, {"storage_bytes": 64, "torch_dtype": dtype}))
        with pytest.raises(vmmfd.MismatchError, match="'0' has type"):
            broker.state_dict(name)


def test_arrays_of_other_makers(broker: vmmfd.Broker, name: str) -> None:
    numpy = pytest.importorskip("numpy")
    whole = numpy.arange(24, dtype="f4").reshape(4, 6)
    broker.put(name, {"x": whole, "running_mean": whole[0]})
    with broker.get(name) as lease:
        found = lease.state_dict()
        assert numpy.array_equal(found["x"].numpy(), whole) and not is_mapped(found["x"], lease)
        assert is_mapped(lease.state_dict(writable_buffers=False)["x"], lease)
    broker.put(name, {"x": numpy.arange(3, dtype=">f4")}, replace=True)
    with pytest.raises(vmmfd.MismatchError, match="has type >f4, which PyTorch"):
        broker.state_dict(name)


def test_selected_arrays(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, Net(1))
    with broker.get(name, arrays=["last", "turned"]) as lease:
        found = lease.state_dict()
    # The other arrays are in the same segment.
    assert {"last", "turned"} <= found.keys()
    assert torch.equal(found["last"], Net(1).last) and torch.equal(found["turned"], Net(1).turned)
