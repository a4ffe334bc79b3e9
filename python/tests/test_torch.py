"""Modules and tensors of PyTorch through a broker, on the host backend: what does not need a GPU."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import LIMIT, Child

import vmmfd

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
nn = torch.nn


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return request.node.name.replace("[", ".").replace("]", "")


class Net(nn.Module):  # type: ignore[misc]
    """Parameters that are tied, buffers of both kinds, views, and a tensor that is a plain attribute."""

    def __init__(self, seed: int = 0, device: str | None = None) -> None:
        super().__init__()
        generator = None if device == "meta" else torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Any:
            return torch.empty(*shape, device=device) if device == "meta" else torch.randn(*shape, generator=generator)

        self.embed = nn.Embedding(11, 8, _weight=random(11, 8), device=device)
        self.norm = nn.BatchNorm1d(8, device=device)
        self.head = nn.Linear(8, 11, bias=False, device=device)
        self.head.weight = self.embed.weight
        whole = random(4, 8)
        self.first = nn.Parameter(whole[:2])
        self.last = nn.Parameter(whole[2:])
        self.turned = nn.Parameter(random(8, 5).T)
        self.nothing = nn.Parameter(torch.empty(0, 3, device=device))
        self.register_buffer("cache", torch.zeros(3, 8, device=device), persistent=False)
        self.register_buffer("table", random(5).double())
        self.plain = random(8)
        self.norm.note = random(2)
        if device != "meta":
            with torch.no_grad():
                self.norm.weight.copy_(random(8))
                self.norm.running_mean.copy_(random(8))

    def forward(self, x: Any) -> Any:
        y = self.norm(self.embed(x)) + self.plain + self.cache[0] + self.table.sum().float()
        y = torch.cat([self.first, self.last]).sum(0) + y + self.turned.sum(0)
        return self.head(y)


X = torch.tensor([1, 2, 3, 10])


def everything(module: Any) -> dict[str, Any]:
    found = dict(module.named_parameters(remove_duplicate=False))
    found |= dict(module.named_buffers(remove_duplicate=False))
    for path, sub in module.named_modules():
        found |= {f"{path}.{leaf}".lstrip("."): value for leaf, value in vars(sub).items() if isinstance(value, torch.Tensor)}
    return found


def assert_same(module: Any, other: Any) -> None:
    one, two = everything(module), everything(other)
    assert one.keys() == two.keys()
    for key in one:
        assert torch.equal(one[key], two[key]), key
        assert one[key].dtype == two[key].dtype and one[key].stride() == two[key].stride(), key


def is_mapped(tensor: Any, lease: Any) -> bool:
    pieces = [(piece.address, piece.nbytes) for piece in lease.memory()]
    return any(address <= tensor.data_ptr() < address + size for address, size in pieces)


def test_a_module_comes_into_one_on_the_meta_device(broker: vmmfd.Broker, name: str) -> None:
    module = Net(1).eval()
    expected = module(X)
    broker.put(name, module)
    other = Net(device="meta").eval()
    loaded = broker.load(name, other)
    assert_same(module, other)
    assert torch.equal(other(X), expected)
    lease = loaded.lease
    # Parameters are the memory itself and need no gradient.
    for key, parameter in other.named_parameters():
        assert isinstance(parameter, nn.Parameter) and not parameter.requires_grad
        assert parameter.numel() == 0 or is_mapped(parameter, lease), key
    # All else is a private copy: it can be written.
    private = ["cache", "table", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "plain", "norm.note"]
    assert sorted(loaded.private) == sorted(private)
    tensors = everything(other)
    for key in private:
        assert not is_mapped(tensors[key], lease)
        tensors[key].add_(1)
    other.train()(X)
    # Which others do not see.
    again = Net(device="meta")
    broker.load(name, again)
    assert_same(module, again)
    assert repr(loaded).startswith("<vmmfd.torch.Loaded Net of <vmmfd.Lease: ")


def test_ties_and_views_and_strides_are_kept(broker: vmmfd.Broker, name: str) -> None:
    module = Net(2)
    broker.put(name, module)
    other = Net(device="meta")
    other.head.weight = nn.Parameter(torch.empty(11, 8, device="meta"))
    broker.load(name, other)
    assert other.head.weight is other.embed.weight
    assert other.first.untyped_storage().data_ptr() == other.last.untyped_storage().data_ptr()
    assert other.last.storage_offset() - other.first.storage_offset() == 16
    assert other.turned.stride() == (1, 5) and not other.turned.is_contiguous()
    assert other.nothing.shape == (0, 3) and other.nothing.dtype == torch.float32
    tensors = broker.state_dict(name)
    assert tensors["head.weight"].data_ptr() == tensors["embed.weight"].data_ptr()
    assert tensors["first"].untyped_storage().data_ptr() == tensors["last"].untyped_storage().data_ptr()
    # Other storages are storages of their own, so that nothing takes them for tied.
    assert tensors["first"].untyped_storage().data_ptr() != tensors["turned"].untyped_storage().data_ptr()
    assert tensors["embed.weight"].untyped_storage().nbytes() == 11 * 8 * 4


def test_what_is_tied_in_the_module_comes_once(broker: vmmfd.Broker, name: str) -> None:
    # As in files of weights, which have tied ones once.
    tensors = dict(Net(1).state_dict(keep_vars=True))
    del tensors["head.weight"]
    broker.put(name, tensors)
    other = Net(5)
    loaded = broker.load(name, other)
    assert other.head.weight is other.embed.weight and torch.equal(other.embed.weight, Net(1).embed.weight)
    assert is_mapped(other.head.weight, loaded.lease)
    # Kinds are known of parameters, and all else is a private copy by what the module says.
    assert "table" in loaded.private and "norm.running_mean" in loaded.private


def test_a_state_dict_goes_there_and_back(broker: vmmfd.Broker, name: str) -> None:
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
    # What PyTorch does not say of a state_dict's tensors.
    broker.put(name, module.state_dict(), replace=True)
    with broker.get(name) as lease:
        kinds = {key: lease.attributes(key)["kind"] for key in lease}
        assert kinds["table"] == "tensor" and kinds["norm.running_mean"] == "buffer" and kinds["first"] == "tensor"
        again = lease.state_dict()
        assert is_mapped(again["table"], lease) and not is_mapped(again["norm.running_mean"], lease)
        assert is_mapped(lease.state_dict(writable_buffers=False)["norm.running_mean"], lease)
    for key, tensor in module.state_dict().items():
        assert torch.equal(again[key], tensor), key
    third = Net(device="meta")
    with pytest.raises(vmmfd.Differs) as raised:
        broker.load(name, third)
    # What no state_dict has is missed where it would stay on the meta device.
    assert "cache: it is on the meta device" in str(raised.value) and "plain: it is" in str(raised.value)


def test_the_tensors_keep_the_memory_and_end_the_lease(broker: vmmfd.Broker, name: str) -> None:
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


def test_what_does_not_fit_is_one_error(broker: vmmfd.Broker, name: str) -> None:
    module = Net(1)
    module.more = nn.Parameter(torch.ones(2))
    module.head = nn.Linear(8, 12)
    broker.put(name, module)
    other = Net(2)
    other.first = nn.Parameter(torch.ones(3, 8))
    other.last = nn.Parameter(torch.ones(2, 8, dtype=torch.float16))
    other.other = nn.Linear(1, 1)
    before = {key: value.clone() for key, value in everything(other).items()}
    with pytest.raises(vmmfd.Differs) as raised:
        broker.load(name, other)
    lines = str(raised.value).splitlines()
    assert lines[0] == f"version 1 of {name!r} does not fit into the Net:"
    assert sorted(lines[1:]) == sorted(
        [
            "- more: the object has it (parameter), and the module has not",
            "- head.bias: the object has it (parameter), and the module has not",
            "- head.weight: shape (12, 8), and (11, 8) in the module",
            "- first: shape (2, 8), and (3, 8) in the module",
            "- last: type torch.float32, and torch.float16 in the module",
            "- other.weight: the module has it (parameter), and the object has not",
            "- other.bias: the module has it (parameter), and the object has not",
        ]
    )
    after = everything(other)
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert len(broker.who(name).leases) == 0
    # Without strictness only what both have counts.
    other.first, other.last, other.head = nn.Parameter(torch.ones(2, 8)), nn.Parameter(torch.ones(2, 8)), nn.Linear(8, 12)
    loaded = broker.load(name, other, strict=False)
    assert torch.equal(other.first, module.first) and torch.equal(other.other.weight, before["other.weight"])
    assert torch.equal(other.head.bias, module.head.bias)
    del loaded
    with pytest.raises(vmmfd.Invalid, match="into= takes a torch.nn.Module, and got a dict"):
        broker.load(name, {})


def test_types_that_others_have_not_come_through(broker: vmmfd.Broker, name: str) -> None:
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


def test_of_a_storage_only_what_is_named_is_copied(broker: vmmfd.Broker, name: str) -> None:
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
    """A module with more in its state than tensors."""

    def get_extra_state(self) -> Any:
        return {"version": 1}


def test_a_column_is_put_without_its_neighbours(broker: vmmfd.Broker, name: str) -> None:
    whole = torch.arange(1 << 20).view(1024, 1024)
    broker.put(name, {"column": whole[:, 7]})
    found = broker.state_dict(name)["column"]
    assert torch.equal(found, whole[:, 7]) and found.stride() == (1,) and found.untyped_storage().nbytes() == 8192
    # What is tied, or shares its storage, stays so.
    broker.put(name, {"a": whole[:, 7], "b": whole[:, 7]}, replace=True)
    tied = broker.state_dict(name)
    assert tied["a"].data_ptr() == tied["b"].data_ptr() and tied["a"].stride() == (1024,)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: {"x": torch.ones(2, device="meta")}, "x is on the meta device, and has no bytes"),
        (lambda: {"x": torch.ones(2).to_sparse()}, "x is of layout torch.sparse_coo"),
        (lambda: {"x": nn.parameter.UninitializedParameter()}, "x has no shape yet: run the module once"),
        (lambda: {"x": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}, "x is quantised"),
        (lambda: {"x": torch.ones(2), "y": [1.0]}, "only tensors can be put together with tensors"),
        (lambda: {"x": torch.ones(2), 3: torch.ones(2)}, "the name 3 is no str"),
        (lambda: nn.ReLU(), "there is no tensor to put"),
        (lambda: {"x": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, "x is a nested tensor"),
        (lambda: {"x": fake()}, "x is a FakeTensor, and has no bytes"),
        (lambda: {"x": torch.ones(2), "_extra_state": {"v": 1}}, "- _extra_state: dict"),
        (lambda: {"x": torch.ones(2), "y": vmmfd.empty(2, "u1", backend="host")}, "an Array of vmmfd in torch.from_dlpack):\n- y: Array"),
        (lambda: Packed(), "there is no tensor to put: what Packed has is in extra state"),
    ],
)
def test_what_can_not_be_put_is_named(broker: vmmfd.Broker, name: str, value: Callable[[], Any], message: str) -> None:
    with pytest.raises(vmmfd.Invalid) as raised:
        broker.put("x", value())
    assert message in str(raised.value)


def test_a_tensor_under_vmap_is_named(broker: vmmfd.Broker, name: str) -> None:
    def function(x: Any) -> Any:
        with pytest.raises(vmmfd.Invalid, match=r"x is of a function under torch.func"):
            broker.put(name, {"x": x})
        return x

    torch.func.vmap(function)(torch.ones(2, 3))


def test_extra_state_that_stays_behind_is_said(broker: vmmfd.Broker, name: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2), Packed())
    with pytest.warns(UserWarning, match="extra state of modules is not carried: that of 1 stays behind") as caught:
        broker.put(name, module)
    assert caught[0].filename == __file__


def test_parts_and_arrays_are_chosen_in_one_call(broker: vmmfd.Broker, name: str) -> None:
    def put(part: str, value: float) -> None:
        broker.put(name, {"weight": torch.full((1, 1), value)}, part=part, parts=["a", "b"], group="g", wait=20)

    other = threading.Thread(target=put, args=("a", 1.0))
    other.start()
    put("b", 2.0)
    other.join()
    with pytest.raises(vmmfd.Invalid, match=r"the parts 'a' and 'b' both have an array 'weight': .* parts=\['b'\]"):
        broker.state_dict(name)
    with pytest.raises(vmmfd.Differs, match="weight: the parts 'a' and 'b' have it: take one, with parts="):
        broker.load(name, nn.Linear(1, 1, bias=False))
    assert broker.state_dict(name, parts=["b"])["weight"] == 2
    module = nn.Linear(1, 1, bias=False)
    loaded = broker.load(name, module, parts=["a"], arrays=["weight"], newer_than=0)
    assert module.weight == 1 and loaded.version == 1
    with pytest.raises(vmmfd.Timeout):
        broker.state_dict(name, newer_than=1, wait=0.05)


def test_copy_false_names_all_that_would_be_copied(broker: vmmfd.Broker, name: str) -> None:
    with pytest.raises(vmmfd.ExportError) as raised:
        broker.put(name, {"x": torch.ones(2), "y": torch.ones(3)}, copy=False)
    assert str(raised.value).splitlines()[1:] == ["- x", "- y"]


def test_a_version_is_switched_under_a_module(broker: vmmfd.Broker, name: str) -> None:
    one, two, three = (Net(seed).eval() for seed in (1, 2, 3))
    broker.put(name, one)
    module = Net(device="meta").eval()
    loaded = broker.load(name, module)
    pointers = {key: tensor.data_ptr() for key, tensor in everything(module).items()}
    broker.put(name, two, replace=True)
    old = loaded.switch()
    assert_same(two, module)
    assert torch.equal(module(X), two(X)) and loaded.lease.version == 2
    loaded.switch(old)
    assert_same(one, module)
    broker.put(name, three, replace=True)
    loaded.switch(refresh=False).close()
    assert torch.equal(module.first, three.first) and torch.equal(module.norm.running_mean, one.norm.running_mean)
    loaded.refresh()
    assert_same(three, module)
    assert pointers == {key: tensor.data_ptr() for key, tensor in everything(module).items()}
    broker.put(name, {"first": one.first}, replace=True)
    with pytest.raises(vmmfd.Differs):
        loaded.switch()
    assert_same(three, module)


def test_a_parked_module_is_not_refreshed(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, nn.BatchNorm1d(4))
    loaded = broker.load(name, nn.BatchNorm1d(4))
    loaded.lease.park(exported="valid")
    with pytest.raises(vmmfd.Invalid, match="is parked, and has no memory: unpark it first"):
        loaded.refresh()
    loaded.lease.unpark()
    loaded.refresh()
    loaded.lease.close()
    with pytest.raises(vmmfd.Invalid, match="the lease is closed"):
        loaded.refresh()


def test_load_state_dict_does_not_write_to_the_memory(broker: vmmfd.Broker, name: str) -> None:
    class Outer(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.norm = nn.BatchNorm1d(4)

    broker.put(name, Outer())
    module = Outer()
    broker.load(name, module)
    other = Outer().state_dict()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with pytest.raises(vmmfd.ExportError) as raised:
        module.load_state_dict(other)
    assert str(raised.value).splitlines()[1:] == ["- inner.weight", "- inner.bias", "- norm.weight", "- norm.bias"]
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    # Nor through a module in it, or one that it is in.
    with pytest.raises(vmmfd.ExportError, match="assign=True"):
        module.inner.load_state_dict(nn.Linear(4, 4).state_dict())
    with pytest.raises(vmmfd.ExportError, match="0.inner.weight"):
        nn.Sequential(module).load_state_dict({f"0.{key}": value for key, value in other.items()})
    # What is no mapped memory is written as ever: a private copy, a module that was copied, one that has other memory by now.
    module.load_state_dict({"norm.running_mean": torch.full((4,), 7.0)}, strict=False)
    assert module.norm.running_mean[0] == 7
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module.inner))):
        copied.load_state_dict({key: value + 1 for key, value in copied.state_dict().items()})
    module.norm.double()
    module.norm.load_state_dict(nn.BatchNorm1d(4).state_dict())
    module.load_state_dict(other, assign=True)
    module.load_state_dict(other)
    assert torch.equal(module.inner.weight, other["inner.weight"])
    # To load again is no copy.
    other_module = Outer()
    broker.load(name, other_module)
    broker.load(name, other_module)
    assert len(other_module._load_state_dict_pre_hooks) == 1


def test_load_state_dict_into_what_state_dict_filled_is_refused(broker: vmmfd.Broker, name: str) -> None:
    def make() -> Any:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    broker.put(name, make())
    new = {key: value + 1 for key, value in make().state_dict().items()}
    with broker.get(name) as lease:
        module = make()
        module.load_state_dict(lease.state_dict(), assign=True)
        for of, prefix in ((module, ""), (module[0], "0.")):
            with pytest.raises(vmmfd.ExportError, match="assign=True") as raised:
                of.load_state_dict({key.removeprefix(prefix): value for key, value in new.items() if key.startswith(prefix)})
            assert str(raised.value).splitlines()[1:] == [f"- {'' if prefix else '0.'}{leaf}" for leaf in ("weight", "bias")]
        # As a parameter of any other module, in one that is made after it, and as buffers that are asked for as they are.
        other = nn.Linear(4, 4)
        other.weight = nn.Parameter(lease.state_dict()["0.weight"].view(4, 4), requires_grad=False)
        with pytest.raises(vmmfd.ExportError, match="- 0.weight$"):
            nn.Sequential(other).load_state_dict({"0.weight": torch.ones(4, 4)}, strict=False)
        other.load_state_dict({"bias": torch.ones(4)}, strict=False)
        norm = nn.BatchNorm1d(4)
        norm.running_mean = lease.state_dict(writable_buffers=False)["1.running_mean"]
        assert is_mapped(norm.running_mean, lease)
        with pytest.raises(vmmfd.ExportError, match="- running_mean$"):
            norm.load_state_dict(make()[1].state_dict())
        # What it has of its own it may write: buffers, a copy, memory that it moved to.
        module.load_state_dict({"1.running_mean": torch.full((4,), 7.0)}, strict=False)
        assert module[1].running_mean[0] == 7
        for own in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            own.load_state_dict(new)
        module.load_state_dict(new, assign=True)
        module.load_state_dict(make().state_dict())
    del module, other, norm, of, raised
    gc.collect()
    assert vmmfd._native._settle(10)
    assert len(broker.who(name).leases) == 0


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_weights_that_forward_writes_are_private_copies(broker: vmmfd.Broker, name: str, kind: str) -> None:
    def make() -> Any:
        module = nn.Sequential(getattr(nn, kind)(10, 4, max_norm=1.0), nn.Linear(4, 10, bias=False)).eval()
        module[1].weight = module[0].weight
        return module

    module = make()
    with torch.no_grad():
        module[0].weight.mul_(5)
    broker.put(name, module, copy=True)
    x, other = torch.arange(3).view(1, 3), make()
    loaded = broker.load(name, other)
    assert sorted(loaded.private) == ["0.weight", "1.weight"] and other[0].weight is other[1].weight
    assert torch.equal(other[0](x), module[0](x))
    broker.put(name, module, copy=True, replace=True)
    loaded.switch()
    assert torch.equal(other[0].weight, module[0].weight)
    assert isinstance(other[0].weight, nn.Parameter) and not is_mapped(other[0].weight, loaded.lease)
    third = make()
    third.load_state_dict(broker.state_dict(name, module=third), assign=True)
    third[0](x)


def test_private_names_what_is_copied(broker: vmmfd.Broker, name: str) -> None:
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
    with pytest.raises(vmmfd.Differs, match="nosuch: private= names it, and it does not come"):
        broker.load(name, Net(2), private=["nosuch"])
    with pytest.raises(vmmfd.Invalid, match="private= names 'nosuch', which the object has not"):
        broker.state_dict(name, private=["nosuch"])
    with pytest.raises(vmmfd.Invalid, match="is one name where a list belongs"):
        broker.load(name, Net(2), private="first")
    with pytest.raises(vmmfd.Invalid, match="private=5 is of type int: give a list of names"):
        broker.load(name, Net(2), private=5)  # type: ignore[arg-type]


def test_what_is_loaded_in_pieces_or_tied_later_is_not_written_either(broker: vmmfd.Broker, name: str) -> None:
    def two() -> Any:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    new = two().state_dict()
    for piece in "01":
        broker.put(f"{name}/{piece}", {key: value for key, value in new.items() if key.startswith(piece)})
    module = two()
    broker.load(f"{name}/0", module, strict=False)
    broker.load(f"{name}/1", module, strict=False)
    with pytest.raises(vmmfd.ExportError) as raised:
        module.load_state_dict(new)
    assert str(raised.value).splitlines()[1:] == ["- 0.weight", "- 0.bias", "- 1.weight", "- 1.bias"]
    module = two()
    broker.load(f"{name}/0", module, strict=False)
    module[1].load_state_dict({"weight": torch.ones(4, 4), "bias": torch.ones(4)})
    module[1].weight = module[0].weight
    with pytest.raises(vmmfd.ExportError, match="- weight$"):
        module[1].load_state_dict({"weight": torch.ones(4, 4)}, strict=False)
    # What has memory of its own by now can be written, and so can a copy of the module, which has the same hooks.
    module.share_memory()
    again = copy.copy(module)
    del module
    gc.collect()
    again.load_state_dict(new)
    again.load_state_dict(new, assign=True)
    assert torch.equal(again[0].weight, new["0.weight"])


def test_a_buffer_keeps_that_it_wants_a_gradient(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, {"x": torch.ones(3)})
    x = broker.state_dict(name)["x"].requires_grad_(True)
    module = nn.Module()
    module.register_buffer("x", x)
    assert module.x.requires_grad and module.x.is_leaf and module.x.data_ptr() != x.data_ptr()


def test_what_a_module_has_as_a_parameter_and_otherwise_too(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, nn.Linear(4, 4).state_dict())
    module = nn.Linear(4, 4)
    module.register_buffer("table", module.weight)
    module.__dict__["plain"] = module.weight
    loaded = broker.load(name, module, strict=False)
    assert is_mapped(module.weight, loaded.lease) and loaded.private == ["table", "plain"]
    module.table.add_(1)
    module.plain.add_(1)
    assert list(module.state_dict()) == ["weight", "bias", "table"] and type(module.plain) is torch.Tensor


def test_parameters_of_equal_attributes_stay_tied(broker: vmmfd.Broker, name: str) -> None:
    def two(other: object = None) -> Any:
        made = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
        for linear in made:
            linear.weight.sizes = tuple([1000, 2])
        made[1].weight.of = other
        made[0].nothing = made[1].nothing = nn.Parameter(torch.empty(0, 3))
        return made

    made = two()
    made[1].weight = made[0].weight
    broker.put(name, made)
    for other in (None, []):
        module = two(other)
        broker.load(name, module)
        assert module[0].weight is not module[1].weight
        assert module[0].weight.data_ptr() == module[1].weight.data_ptr() and module[0].nothing is module[1].nothing
    module = two()
    module[0].weight.of = None
    broker.load(name, module)
    assert module[0].weight is module[1].weight


def test_a_loaded_module_can_be_swapped(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, nn.Sequential(nn.Linear(4, 4)))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for change in (
            lambda module: module.to(torch.float64),
            lambda module: module.load_state_dict(nn.Sequential(nn.Linear(4, 4)).state_dict(), assign=True),
        ):
            module = nn.Sequential(nn.Linear(4, 4))
            loaded = broker.load(name, module)
            with pytest.raises(vmmfd.ExportError, match="0.weight"):
                module.load_state_dict(nn.Sequential(nn.Linear(4, 4)).state_dict())
            change(module)
            assert not is_mapped(module[0].weight, loaded.lease)
            module.load_state_dict(nn.Sequential(nn.Linear(4, 4)).state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    # What has no storage by now, or is not there, is none of the memory.
    module = nn.Sequential(nn.Linear(4, 4))
    broker.load(name, module)
    module[0].weight, module[0].bias = nn.Parameter(torch.ones(4, 4).to_sparse()), None
    module.load_state_dict({"0.weight": torch.zeros(4, 4).to_sparse(), "0.bias": torch.zeros(4)}, strict=False)
    assert module[0].weight.to_dense().sum() == 0


def test_a_state_dict_for_a_module_has_copies_of_its_buffers(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, Net(1).state_dict())
    with broker.get(name) as lease:
        assert is_mapped(lease.state_dict()["table"], lease)
        found = lease.state_dict(module=Net(2))
        assert not is_mapped(found["table"], lease) and is_mapped(found["first"], lease)
        assert is_mapped(lease.state_dict(module=Net(2), writable_buffers=False)["table"], lease)
    with pytest.raises(vmmfd.Invalid, match="module= takes a torch.nn.Module, and got a dict"):
        broker.state_dict(name, module={})  # type: ignore[arg-type]


class Counter(nn.Module):  # type: ignore[misc]
    """A module whose forward writes to its buffers, which no class of PyTorch's is known for, and two of which are tied."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, device=device)
        self.register_buffer("count", torch.zeros(4, device=device))
        self.register_buffer("tied", self.count)
        self.register_buffer("tail", self.count[2:])

    def forward(self, x: Any) -> Any:
        self.count.add_(1)
        return self.linear(x) + self.count


def test_a_forward_that_writes_buffers_of_a_plain_object_goes_on(
    broker: vmmfd.Broker, socket: str, name: str, tmp_path: Path, child: Callable[..., Child]
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    broker.put(name, Counter().state_dict())
    file = str(tmp_path / "x.safetensors")
    safetensors.save_file({key: value.clone() for key, value in Counter().state_dict().items()}, file)
    broker.put(f"{name}.file", vmmfd.load_safetensors(file, backend="host"))
    for of in (name, f"{name}.file"):
        child(
            """
            import sys, torch, vmmfd
            class Counter(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.linear = torch.nn.Linear(4, 4)
                    for key, size in {"count": 4, "tied": 4, "tail": 2}.items():
                        self.register_buffer(key, torch.zeros(size))
                def forward(self, x):
                    self.count += 1
                    return self.linear(x) + self.count
            broker = vmmfd.connect(sys.argv[1], backend="host")
            with torch.device("meta"):
                module = Counter()
            module.load_state_dict(broker.state_dict(sys.argv[2]), assign=True)
            module(torch.ones(1, 4))
            assert module.count.tolist() == [1.0] * 4
            """,
            socket,
            of,
        ).end()
        assert broker.state_dict(of)["count"].tolist() == [0.0] * 4


def test_what_becomes_a_buffer_is_a_copy(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, Counter().state_dict() | {"complex": torch.tensor([1 + 2j])})
    with broker.get(name) as lease:
        found = lease.state_dict()
        conjugated = found.pop("complex").conj()
        # As tensors they are the memory itself, and so are parameters.
        assert all(is_mapped(tensor, lease) for tensor in found.values()) and found["count"].sum() == 0
        for device in ("cpu", "meta"):
            module = Counter(device)
            module.load_state_dict(found, assign=True)
            assert is_mapped(module.linear.weight, lease) and is_mapped(module.linear.bias, lease)
            for _, buffer in module.named_buffers():
                assert not is_mapped(buffer, lease) and not buffer.requires_grad and type(buffer) is torch.Tensor
        # Each has its own, of its own bytes.
        storages = {buffer.untyped_storage().data_ptr() for _, buffer in module.named_buffers(remove_duplicate=False)}
        assert len(storages) == 3 and module.tail.untyped_storage().nbytes() == 8
        module(torch.ones(1, 4))
        assert module.count.tolist() == [1.0] * 4 and found["count"].sum() == 0
        other = Counter()
        other.count = found["count"]
        other.register_buffer("more", found["count"].view(2, 2)[1], persistent=False)
        other.more.add_(1)
        assert other.count.sum() == found["count"].sum() == 0 and other.more.tolist() == [1.0] * 2
        other.register_buffer("conjugated", conjugated)
        other.conjugated.add_(1)
        assert other.conjugated.tolist() == [2 - 2j] and conjugated.tolist() == [1 - 2j]
        if hasattr(nn, "Buffer"):
            other.new = nn.Buffer(found["count"], persistent=False)
            assert isinstance(other.new, nn.Buffer) and not is_mapped(other.new, lease) and "new" in other._non_persistent_buffers_set
        # What is no tensor of the lease stays what it is.
        mine, sparse = torch.ones(2), torch.ones(2).to_sparse()
        other.more, other.sparse = mine, nn.Parameter(mine)
        other.register_buffer("nothing", None)
        other.register_buffer("of_no_storage", sparse)
        assert other.more is mine and other.of_no_storage is sparse and other.nothing is None
        # What was written to one copy is in no later one: of the same module, of another, of another version.
        module.load_state_dict(found, assign=True)
        assert module.count.sum() == module.tied.sum() == 0
        module(torch.ones(1, 4))
        with torch.inference_mode():
            other.count = found["count"]
        assert other.count.sum() == 0 and not other.count.is_inference()
        newer = Counter()
        newer.count.add_(2)
        broker.put(name, newer.state_dict() | {"complex": torch.tensor([1 + 2j])}, replace=True)
        lease.switch(lease.prepare(), exported="valid").close()
        module.tied, other.count = found["tied"], found["count"]
        assert module.tied.tolist() == other.count.tolist() == [2.0] * 4 and module.count.tolist() == [1.0] * 4
        # Who asks for the memory itself has it.
        module.register_buffer("mapped", lease.state_dict(writable_buffers=False)["count"])
        assert is_mapped(module.mapped, lease)
    del found, module, other, buffer, conjugated
    gc.collect()
    assert vmmfd._native._settle(10)
    assert len(broker.who(name).leases) == 0


def test_a_parameter_that_becomes_a_buffer_is_a_copy(broker: vmmfd.Broker, name: str) -> None:
    trained, frozen = nn.Module(), nn.Module()
    trained.scale = nn.Parameter(torch.ones(4))
    frozen.register_buffer("scale", torch.zeros(4))
    broker.put(name, trained)
    with broker.get(name) as lease:
        found = lease.state_dict()
        frozen.load_state_dict(found, assign=True)
        assert is_mapped(found["scale"], lease) and not is_mapped(frozen.scale, lease)
    frozen.scale.mul_(2)
    assert frozen.scale.tolist() == [2.0] * 4


def test_a_fork_beside_a_copy_copies_too(socket: str, name: str, child: Callable[..., Child]) -> None:
    child(
        """
        import os, signal, sys, threading, torch, vmmfd
        begun, end = threading.Event(), threading.Event()
        class Slow(torch.Tensor):
            @classmethod
            def __torch_function__(cls, function, types, arguments=(), options=None):
                if function is torch.Tensor.clone:
                    begun.set()
                    end.wait()
                return super().__torch_function__(function, types, arguments, options or {})
        broker = vmmfd.connect(sys.argv[1], backend="host")
        broker.put(sys.argv[2], {"x": torch.ones(4)})
        found = broker.state_dict(sys.argv[2])
        slow = found["x"].as_subclass(Slow)
        module = torch.nn.Module()
        thread = threading.Thread(target=lambda: module.register_buffer("x", slow))
        thread.start()
        begun.wait()
        process = os.fork()
        if process == 0:
            signal.alarm(20)
            module = torch.nn.Module()
            module.register_buffer("x", found["x"])
            os._exit(module.x.data_ptr() == found["x"].data_ptr())
        end.set()
        thread.join()
        assert os.waitpid(process, 0)[1] == 0 and module.x.tolist() == [1.0] * 4
        """,
        socket,
        name,
    ).end()


def test_a_compiled_forward_may_assign_buffers(broker: vmmfd.Broker, name: str) -> None:
    class Sum(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("sum", torch.zeros(2))

        def forward(self, x: Any) -> Any:
            self.sum = self.sum + x
            return self.sum * 2

    broker.put(name, Sum().state_dict())
    module = Sum()
    module.load_state_dict(broker.state_dict(name), assign=True)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0] and compiled(torch.ones(2)).tolist() == [4.0, 4.0]


def test_a_private_copy_of_a_view_is_of_that_alone(broker: vmmfd.Broker, name: str) -> None:
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
    # Elements stay where the device wants them.
    found = broker.state_dict(name, private=["far"], writable_buffers=False)
    assert found["far"].storage_offset() == 0
    small = torch.arange(300)
    broker.put(name, {"a": small[:100], "b": small[101:103], "c": small[290:]}, replace=True)
    found = broker.state_dict(name, private=["b", "c"])
    assert torch.equal(found["b"], small[101:103]) and torch.equal(found["c"], small[290:])
    assert found["b"].storage_offset() == 101 % 32 and found["c"].untyped_storage().nbytes() == 300 * 8 - 2304


def test_a_table_that_lies_gives_what_is_there_or_an_error(broker: vmmfd.Broker, name: str) -> None:
    truth = torch.arange(1024, dtype=torch.float32)
    part, memories, _, _ = broker._native.plan([("x", truth.numpy())], "all")

    def put(*rows: tuple[int, int, dict[str, Any]]) -> None:
        """Arrays by where they begin, how many elements they have, and what is said of their storage."""
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
        with pytest.raises(vmmfd.Differs, match="'0' is of type"):
            broker.state_dict(name)


def test_buffers_that_modules_share_are_one_tensor(broker: vmmfd.Broker, name: str) -> None:
    def make(value: float) -> Any:
        module = nn.Sequential(nn.Module(), nn.Module())
        both = torch.full((2, 4), value)
        for each in module:
            each.register_buffer("both", both, persistent=False)
        module[0].register_buffer("first", both[0])
        module[1].last = both[1]
        return module

    broker.put(name, make(1), copy=True)
    module = make(0)
    loaded = broker.load(name, module)
    broker.put(name, make(2), copy=True, replace=True)
    loaded.switch().close()
    for each in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert each[0].both is each[1].both and len(list(each.named_buffers())) == 2 and each[1].last.sum() == 8
        each[0].both.add_(1)
        assert each[1].both.sum() == 24
    assert module[0].first.sum() == 12 and module[1].last.sum() == 12


def test_a_parameter_keeps_its_class(broker: vmmfd.Broker, name: str) -> None:
    class Loading(nn.Parameter):  # type: ignore[misc]
        """Made with more than a tensor, as engines do."""

        def __new__(cls, data: Any, **more: Any) -> Any:
            return super().__new__(cls, data, requires_grad=False)

        def __init__(self, data: Any, *, loader: Any) -> None:
            self._loader = loader

        @property
        def loader(self) -> Any:
            return self._loader

    class Handling(nn.Parameter):  # type: ignore[misc]
        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    module = nn.Module()
    module.a, module.b, module.c = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))
    broker.put(name, module)
    other = nn.Module()
    other.a, other.b = Loading(torch.zeros(2, device="meta"), loader=print), Handling(torch.zeros(3), requires_grad=False)
    other.c = nn.parameter.UninitializedParameter()
    for private in ([], ["a"]):
        loaded = broker.load(name, other, private=private)
        assert type(other.a) is Loading and other.a.loader is print and not other.a.requires_grad
        assert is_mapped(other.a, loaded.lease) is not bool(private) and other.a.sum() == 2
        assert type(other.b) is nn.Parameter and type(other.c) is nn.Parameter and other.c.sum() == 4
    # Tied in the object: one parameter where that is all the same to the module, else two in the same memory.
    module.b = module.c = module.d = module.a
    broker.put(name, module, replace=True)
    a, d = Loading(torch.zeros(2), loader=print), Loading(torch.zeros(2), loader=repr)
    for private in ([], ["a"]):
        other.a, other.b, other.c, other.d = a, *(nn.Parameter(torch.zeros(2)) for _ in range(2)), d
        broker.load(name, other, private=private)
        assert type(other.a) is type(other.d) is Loading and type(other.b) is nn.Parameter and other.b is other.c
        assert (other.a.loader, other.d.loader) == (print, repr)
        assert len({parameter.data_ptr() for parameter in (other.a, other.b, other.d)}) == 1 and other.d.sum() == 2


def test_a_switch_tells_what_moved_out_of_its_reach(broker: vmmfd.Broker, name: str) -> None:
    def make(value: float) -> Any:
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
        with torch.no_grad():
            for tensor in (*module.parameters(), module[1].running_mean):
                tensor.fill_(value)
        return module

    broker.put(name, make(1), copy=True)
    module = make(0)
    loaded = broker.load(name, module)
    broker.put(name, make(2), copy=True, replace=True)
    module[0].half()
    module[1].running_mean = torch.zeros(2)
    with pytest.raises(vmmfd.Differs) as raised:
        loaded.switch()
    assert str(raised.value).splitlines()[1:] == ["- 0.weight", "- 0.bias", "- 1.running_mean"]
    assert loaded.version == 1 and module[2].weight[0, 0] == 1
    with pytest.raises(vmmfd.Differs, match="0.weight"):
        loaded.refresh()
    with pytest.raises(vmmfd.Invalid, match="moved='all' is none of"):
        loaded.switch(moved="all")  # type: ignore[arg-type]
    loaded.switch(moved="ignore").close()
    assert loaded.version == 2 and module[2].weight[0, 0] == 2 and module[0].weight[0, 0] == 1
    # What is another name's by now, or is there no more, is no trouble.
    module[0] = nn.Linear(2, 2)
    module = make(0)
    loaded = broker.load(name, module)
    module[2].weight = module[0].weight
    del module[1]
    broker.put(name, make(3), copy=True, replace=True)
    loaded.switch().close()
    assert module[1].weight[0, 0] == 3


def test_attributes_come_only_where_the_module_has_tensors(broker: vmmfd.Broker, name: str) -> None:
    def make(**attributes: Any) -> Any:
        module = nn.Module()
        for key, value in attributes.items():
            setattr(module, key, value)
        return module

    broker.put(name, make(w=nn.Parameter(torch.ones(1)), last=torch.ones(5), table=torch.ones(3)))
    module = make(w=nn.Parameter(torch.zeros(1)), last=None, table=torch.zeros(2))
    loaded = broker.load(name, module)
    assert module.last is None and torch.equal(module.table, torch.ones(3)) and loaded.private == ["table"]
    # An attribute does not become a parameter of another shape, nor a parameter an attribute of one.
    broker.put(name, make(w=torch.ones(7)), replace=True)
    module = make(w=nn.Parameter(torch.ones(2)))
    with pytest.raises(vmmfd.Differs, match=r"w: shape \(7,\), and \(2,\) in the module"):
        broker.load(name, module)
    assert module.w.shape == (2,)


def test_a_module_that_refuses_a_tensor_is_as_it_was(broker: vmmfd.Broker, name: str) -> None:
    class Stubborn(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
            self.is_made = True

        def __setattr__(self, key: str, value: Any) -> None:
            if key == "b" and getattr(self, "is_made", False):
                raise RuntimeError("no")
            super().__setattr__(key, value)

    broker.put(name, {"a": torch.ones(1), "b": torch.ones(1)})
    module = Stubborn()
    a, b = module.a, module.b
    with pytest.raises(vmmfd.Differs, match="the Stubborn does not let its 'b' be set, and is as it was: no"):
        broker.load(name, module)
    assert module.a is a and module.b is b and a == 0
    gc.collect()
    assert vmmfd._native._settle(10)
    assert len(broker.who(name).leases) == 0


def test_arrays_of_others_are_tensors_too(broker: vmmfd.Broker, name: str) -> None:
    numpy = pytest.importorskip("numpy")
    whole = numpy.arange(24, dtype="f4").reshape(4, 6)
    broker.put(name, {"x": whole, "running_mean": whole[0]})
    with broker.get(name) as lease:
        found = lease.state_dict()
        assert numpy.array_equal(found["x"].numpy(), whole) and is_mapped(found["x"], lease)
        assert not is_mapped(found["running_mean"], lease)
    broker.put(name, {"x": numpy.arange(3, dtype=">f4")}, replace=True)
    with pytest.raises(vmmfd.Differs, match="is of type >float32, which PyTorch"):
        broker.state_dict(name)


def test_only_some_arrays_are_asked_for(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, Net(1))
    with broker.get(name, arrays=["last", "turned"]) as lease:
        found = lease.state_dict()
    # The others lie in the same segment.
    assert {"last", "turned"} <= found.keys()
    assert torch.equal(found["last"], Net(1).last) and torch.equal(found["turned"], Net(1).turned)


def test_a_sealed_put_of_copies_leaves_the_maker_as_it_was(broker: vmmfd.Broker, name: str) -> None:
    module = Net(1)
    broker.put(name, module, seal=True)
    with torch.no_grad():
        module.first.add_(1)
    assert torch.equal(broker.state_dict(name)["first"] + 1, module.first)


def test_a_pool_needs_a_gpu_and_says_so() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(vmmfd.Unsupported, match="needs a GPU"), vmmfd.torch.pool():
            pass
    for arena in (0, -1, 1.5, True, 1 << 60):
        with pytest.raises(vmmfd.Invalid, match="is no size of memory"):
            vmmfd.torch.pool(arena=arena)  # type: ignore[arg-type]
    assert vmmfd.torch.pool().figures == {"arenas": 0, "closed": 0, "bytes": 0, "blocks": 0, "used": 0}


def test_torch_is_not_imported_before_it_is_used(child: Callable[..., Child]) -> None:
    child(
        """
        import sys, vmmfd, vmmfd.torch
        assert "torch" not in sys.modules
        assert vmmfd.torch.pool().figures["arenas"] == 0
        assert "torch" not in sys.modules
        """
    ).end()


def test_a_process_may_end_with_tensors_of_the_broker_alive(
    broker: vmmfd.Broker, socket: str, name: str, child: Callable[..., Child]
) -> None:
    broker.put(name, Net(1))
    for kind in ("plain", "cycle", "thread"):
        child(
            """
            import sys, threading, torch, vmmfd
            broker = vmmfd.connect(sys.argv[1], backend="host")
            tensors = broker.state_dict(sys.argv[2])
            if sys.argv[3] == "cycle":
                tensors["self"] = tensors
            if sys.argv[3] == "thread":
                threading.Thread(target=threading.Event().wait, args=(0.5,), kwargs={}, daemon=True).start()
            """,
            socket,
            name,
            kind,
        ).end()
    assert len(broker.who(name).leases) == 0


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("example", ["share_torch.py", "weights_serve.py"])
def test_an_example_without_a_broker_says_so(example: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / example), "--socket", str(tmp_path / "none.sock"), "--backend", "host", "--timeout", "0.1"],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert ended.returncode == 1 and "Traceback" not in ended.stderr, ended.stderr
    assert ended.stderr.startswith(f"{example[:-3]}: ") and "none.sock" in ended.stderr


def run(*arguments: str) -> str:
    ended = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=LIMIT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_example_that_shares_a_module(socket: str) -> None:
    lines = run(str(EXAMPLES / "share_torch.py"), "--socket", socket, "--backend", "host").splitlines()
    assert lines[1].split()[0] == "result" and lines[1] == lines[3]


def test_the_example_that_serves_a_model(socket: str) -> None:
    program = [str(EXAMPLES / "weights_serve.py"), "--socket", socket, "--backend", "host"]
    assert run(*program, "--make", "1") == "put version 1\n"
    serving = subprocess.Popen([sys.executable, *program, "--until", "2"], stdout=subprocess.PIPE, text=True)
    try:
        assert serving.stdout is not None
        first = serving.stdout.readline()
        assert first.startswith("version 1 answers ")
        run(*program, "--make", "2")
        second, _ = serving.communicate(timeout=LIMIT)
        assert second.startswith("version 2 answers ") and second.split()[-1] != first.split()[-1]
        assert serving.returncode == 0
    finally:
        serving.kill()
        serving.wait()
