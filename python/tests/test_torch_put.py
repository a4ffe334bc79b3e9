"""Putting PyTorch modules and tensors: copies, and refused values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import vmmfd

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch_models import Net  # noqa: E402

nn = torch.nn


def test_only_named_bytes_are_copied(broker: vmmfd.Broker, name: str) -> None:
    large = torch.arange(1 << 20, dtype=torch.float32)
    broker.put(name, {"a": large[1000:1010], "b": large[1020:1030]})
    found = broker.state_dict(name)
    assert torch.equal(found["a"], large[1000:1010]) and torch.equal(found["b"], large[1020:1030])
    assert found["a"].untyped_storage().nbytes() < 1024
    assert found["b"].storage_offset() - found["a"].storage_offset() == 20


def fake() -> Any:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(2)


class Packed(nn.Module):  # type: ignore[misc]
    """A module with extra state."""

    def get_extra_state(self) -> Any:
        return {"version": 1}


def test_column_is_put_without_gaps(broker: vmmfd.Broker, name: str) -> None:
    whole = torch.arange(1 << 20).view(1024, 1024)
    broker.put(name, {"column": whole[:, 7]})
    found = broker.state_dict(name)["column"]
    assert torch.equal(found, whole[:, 7]) and found.stride() == (1,) and found.untyped_storage().nbytes() == 8192
    # Ties and shared storages are kept.
    broker.put(name, {"a": whole[:, 7], "b": whole[:, 7]}, replace=True)
    tied = broker.state_dict(name)
    assert tied["a"].data_ptr() == tied["b"].data_ptr() and tied["a"].stride() == (1024,)


@pytest.mark.parametrize("kind", ["int1", "int7", "uint4", "complex32", "bits8"])
def test_only_a_put_takes_torchs_own_types(broker: vmmfd.Broker, name: str, kind: str) -> None:
    if not hasattr(torch, kind):
        pytest.skip(f"this PyTorch has no {kind}")
    tensor = torch.arange(16, dtype=torch.uint8).view(getattr(torch, kind))
    bytes_of = vmmfd.empty(tensor.shape, "uint8", backend="host")
    for call in (lambda: vmmfd.asarray(tensor, backend="host"), lambda: bytes_of.copy_from(tensor), lambda: bytes_of.copy_to(tensor)):
        with pytest.raises(vmmfd.Invalid, match=f"dtype=torch.{kind} is not a supported element type"):
            call()
    broker.put(name, {"x": tensor})
    found = broker.state_dict(name)["x"]
    assert found.dtype == tensor.dtype and torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: {"x": torch.ones(2, device="meta")}, "x is on the meta device and has no bytes"),
        (lambda: {"x": torch.ones(2).to_sparse()}, "x has layout torch.sparse_coo"),
        (lambda: {"x": nn.parameter.UninitializedParameter()}, "x has no shape yet: run the module once"),
        (lambda: {"x": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}, "x is quantised"),
        (lambda: {"x": torch.zeros(2, dtype=torch.uint8).view(torch.quint8)}, "x is a view of bytes as torch.quint8"),
        (lambda: {"x": torch.ones(2), "y": 1j}, "tensors can only be put together with tensors"),
        (lambda: {"x": torch.ones(2), 3: torch.ones(2)}, "the name 3 is not a str"),
        (lambda: nn.ReLU(), "there is no tensor to put"),
        (lambda: {"x": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, "x is a nested tensor"),
        (lambda: {"x": fake()}, "x is a FakeTensor and has no bytes"),
        (lambda: {"x": torch.ones(2), "_extra_state": {"v": 1}}, "- _extra_state: dict"),
        (lambda: {"x": torch.ones(2), "y": vmmfd.empty(2, "u1", backend="host")}, "a vmmfd.Array through torch.from_dlpack):\n- y: Array"),
        (lambda: Packed(), "there is no tensor to put: Packed only has extra state"),
    ],
)
def test_refused_values_are_named(broker: vmmfd.Broker, name: str, value: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, vmmfd.Invalid)) as raised:
        broker.put("x", value())
    assert message in str(raised.value)


def test_tensor_under_vmap_is_refused(broker: vmmfd.Broker, name: str) -> None:
    def function(x: Any) -> Any:
        with pytest.raises(vmmfd.Invalid, match=r"x belongs to a function under torch.func"):
            broker.put(name, {"x": x})
        return x

    torch.func.vmap(function)(torch.ones(2, 3))


def test_omitted_extra_state_warns(broker: vmmfd.Broker, name: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2), Packed())
    with pytest.warns(UserWarning, match="the extra state of 1 is not put") as caught:
        broker.put(name, module)
    assert caught[0].filename == __file__


def test_copy_false_lists_copies(broker: vmmfd.Broker, name: str) -> None:
    with pytest.raises(vmmfd.ExportError) as raised:
        broker.put(name, {"x": torch.ones(2), "y": torch.ones(3)}, copy=False)
    assert str(raised.value).splitlines()[1:] == ["- x", "- y"]


def test_sealing_copies_leaves_tensors_writable(broker: vmmfd.Broker, name: str) -> None:
    module = Net(1)
    broker.put(name, module, seal=True)
    with torch.no_grad():
        module.first.add_(1)
    assert torch.equal(broker.state_dict(name)["first"] + 1, module.first)
