"""Loading PyTorch modules and switching their versions, on the host backend."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest

import vmmfd

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch_models import Net, X, assert_same, everything, is_mapped  # noqa: E402

nn = torch.nn


def test_load_into_meta_module(broker: vmmfd.Broker, name: str) -> None:
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
    # Everything else is a private copy, and writable.
    private = ["cache", "table", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "plain", "norm.note"]
    assert sorted(loaded.private) == sorted(private)
    tensors = everything(other)
    for key in private:
        assert not is_mapped(tensors[key], lease)
        tensors[key].add_(1)
    other.train()(X)
    # Other processes do not see the writes.
    again = Net(device="meta")
    broker.load(name, again)
    assert_same(module, again)
    assert repr(loaded).startswith(f"<vmmfd.torch.Loaded: {name} version 1, in a Net with ")
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="can't be copied or pickled"):
            duplicate(loaded)


def test_ties_views_and_strides_are_kept(broker: vmmfd.Broker, name: str) -> None:
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
    # Other tensors have separate storages, so that nothing looks tied.
    assert tensors["first"].untyped_storage().data_ptr() != tensors["turned"].untyped_storage().data_ptr()
    assert tensors["embed.weight"].untyped_storage().nbytes() == 11 * 8 * 4


def test_names_tied_in_module(broker: vmmfd.Broker, name: str) -> None:
    # As in weight files, which store tied tensors once.
    tensors = dict(Net(1).state_dict(keep_vars=True))
    del tensors["head.weight"]
    broker.put(name, tensors)
    other = Net(5)
    loaded = broker.load(name, other)
    assert other.head.weight is other.embed.weight and torch.equal(other.embed.weight, Net(1).embed.weight)
    assert is_mapped(other.head.weight, loaded.lease)
    # The module decides which tensors are parameters; all others are private copies.
    assert "table" in loaded.private and "norm.running_mean" in loaded.private


def test_misfits_are_one_error(broker: vmmfd.Broker, name: str) -> None:
    module = Net(1)
    module.more = nn.Parameter(torch.ones(2))
    module.head = nn.Linear(8, 12)
    broker.put(name, module)
    other = Net(2)
    other.first = nn.Parameter(torch.ones(3, 8))
    other.last = nn.Parameter(torch.ones(2, 8, dtype=torch.float16))
    other.other = nn.Linear(1, 1)
    before = {key: value.clone() for key, value in everything(other).items()}
    with pytest.raises(vmmfd.MismatchError) as raised:
        broker.load(name, other)
    lines = str(raised.value).splitlines()
    assert lines[0] == f"version 1 of {name!r} does not fit into the Net:"
    assert sorted(lines[1:]) == sorted(
        [
            "- more: the object has it (parameter), but the module does not",
            "- head.bias: the object has it (parameter), but the module does not",
            "- head.weight: shape (12, 8), but (11, 8) in the module",
            "- first: shape (2, 8), but (3, 8) in the module",
            "- last: type torch.float32, but torch.float16 in the module",
            "- other.weight: the module has it (parameter), but the object does not",
            "- other.bias: the module has it (parameter), but the object does not",
        ]
    )
    after = everything(other)
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert len(broker.who(name).leases) == 0
    # Without strict, only common names count.
    other.first, other.last, other.head = nn.Parameter(torch.ones(2, 8)), nn.Parameter(torch.ones(2, 8)), nn.Linear(8, 12)
    loaded = broker.load(name, other, strict=False)
    assert torch.equal(other.first, module.first) and torch.equal(other.other.weight, before["other.weight"])
    assert torch.equal(other.head.bias, module.head.bias)
    del loaded
    with pytest.raises(TypeError, match="into= takes a torch.nn.Module, not a dict"):
        broker.load(name, {})


def test_switch_under_module(broker: vmmfd.Broker, name: str) -> None:
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
    with pytest.raises(vmmfd.MismatchError):
        loaded.switch()
    assert_same(three, module)


def test_copy_on_write(broker: vmmfd.Broker, name: str) -> None:
    one, two = Net(1), Net(2)
    broker.put(name, one)
    module = Net(device="meta")
    loaded = broker.load(name, module, copy_on_write=True)
    tensors = everything(module)
    assert loaded.private == [] and all(is_mapped(tensor, loaded.lease) for tensor in tensors.values() if tensor.numel())
    assert module.head.weight is module.embed.weight
    # An optimizer, a forward that writes its buffers, and load_state_dict write to private pages.
    module.requires_grad_(True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.train()(X).sum().backward()
    optimizer.step()
    assert not torch.equal(module.first, one.first) and module.norm.num_batches_tracked == 1
    module.load_state_dict(two.state_dict())
    assert torch.equal(module.first, two.first)
    found = broker.state_dict(name, copy_on_write=True, private=["last"])
    for tensor in found.values():
        tensor.detach().add_(1)
    again = Net(device="meta")
    broker.load(name, again)
    assert_same(one, again)
    # Switching discards the writes, even to the same version.
    broker.put(name, two, replace=True)
    old = loaded.switch()
    assert_same(two, module)
    with torch.no_grad():
        module.first.zero_()
    loaded.switch(old)
    assert_same(one, module)


def test_parked_module_refuses_refresh(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, nn.BatchNorm1d(4))
    loaded = broker.load(name, nn.BatchNorm1d(4))
    loaded.lease.park(exports_unused=True)
    with pytest.raises(vmmfd.Invalid, match="is parked and has no memory: unpark it first"):
        loaded.refresh()
    loaded.lease.unpark()
    loaded.refresh()
    loaded.lease.close()
    with pytest.raises(vmmfd.Invalid, match="the lease is closed"):
        loaded.refresh()


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_weights_written_by_forward_are_private(broker: vmmfd.Broker, name: str, kind: str) -> None:
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


def test_tensor_as_parameter_and_attribute(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, nn.Linear(4, 4).state_dict())
    module = nn.Linear(4, 4)
    module.register_buffer("table", module.weight)
    module.__dict__["plain"] = module.weight
    loaded = broker.load(name, module, strict=False)
    assert is_mapped(module.weight, loaded.lease) and loaded.private == ["table", "plain"]
    module.table.add_(1)
    module.plain.add_(1)
    assert list(module.state_dict()) == ["weight", "bias", "table"] and type(module.plain) is torch.Tensor


def test_parameters_with_equal_attributes_stay_tied(broker: vmmfd.Broker, name: str) -> None:
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


def test_loaded_module_can_be_swapped(broker: vmmfd.Broker, name: str) -> None:
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
    # Tensors without storage, or missing ones, are not in the memory.
    module = nn.Sequential(nn.Linear(4, 4))
    broker.load(name, module)
    module[0].weight, module[0].bias = nn.Parameter(torch.ones(4, 4).to_sparse()), None
    module.load_state_dict({"0.weight": torch.zeros(4, 4).to_sparse(), "0.bias": torch.zeros(4)}, strict=False)
    assert module[0].weight.to_dense().sum() == 0


def test_shared_buffers_are_one_tensor(broker: vmmfd.Broker, name: str) -> None:
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


def test_parameter_keeps_its_class(broker: vmmfd.Broker, name: str) -> None:
    class Loading(nn.Parameter):  # type: ignore[misc]
        """Constructed with more arguments than a tensor, as in engines."""

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
    # Tied in the object: one parameter if the module does not distinguish them, else two with the same memory.
    module.b = module.c = module.d = module.a
    broker.put(name, module, replace=True)
    a, d = Loading(torch.zeros(2), loader=print), Loading(torch.zeros(2), loader=repr)
    for private in ([], ["a"]):
        other.a, other.b, other.c, other.d = a, *(nn.Parameter(torch.zeros(2)) for _ in range(2)), d
        broker.load(name, other, private=private)
        assert type(other.a) is type(other.d) is Loading and type(other.b) is nn.Parameter and other.b is other.c
        assert (other.a.loader, other.d.loader) == (print, repr)
        assert len({parameter.data_ptr() for parameter in (other.a, other.b, other.d)}) == 1 and other.d.sum() == 2


def test_switch_lists_replaced_tensors(broker: vmmfd.Broker, name: str) -> None:
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
    with pytest.raises(vmmfd.MismatchError) as raised:
        loaded.switch()
    assert str(raised.value).splitlines()[1:] == ["- 0.weight", "- 0.bias", "- 1.running_mean"]
    assert loaded.version == 1 and module[2].weight[0, 0] == 1
    with pytest.raises(vmmfd.MismatchError, match="0.weight"):
        loaded.refresh()
    with pytest.raises(TypeError, match="ignore_moved='all' has type str"):
        loaded.switch(ignore_moved="all")  # type: ignore[arg-type]
    loaded.switch(ignore_moved=True).close()
    assert loaded.version == 2 and module[2].weight[0, 0] == 2 and module[0].weight[0, 0] == 1
    # Renamed and removed tensors are no error.
    module[0] = nn.Linear(2, 2)
    module = make(0)
    loaded = broker.load(name, module)
    module[2].weight = module[0].weight
    del module[1]
    broker.put(name, make(3), copy=True, replace=True)
    loaded.switch().close()
    assert module[1].weight[0, 0] == 3


def test_attributes_need_existing_tensors(broker: vmmfd.Broker, name: str) -> None:
    def make(**attributes: Any) -> Any:
        module = nn.Module()
        for key, value in attributes.items():
            setattr(module, key, value)
        return module

    broker.put(name, make(w=nn.Parameter(torch.ones(1)), last=torch.ones(5), table=torch.ones(3)))
    module = make(w=nn.Parameter(torch.zeros(1)), last=None, table=torch.zeros(2))
    loaded = broker.load(name, module)
    assert module.last is None and torch.equal(module.table, torch.ones(3)) and loaded.private == ["table"]
    # An attribute does not become a parameter of another shape, and the reverse.
    broker.put(name, make(w=torch.ones(7)), replace=True)
    module = make(w=nn.Parameter(torch.ones(2)))
    with pytest.raises(vmmfd.MismatchError, match=r"w: shape \(7,\), but \(2,\) in the module"):
        broker.load(name, module)
    assert module.w.shape == (2,)


def test_refused_tensor_leaves_module_unchanged(broker: vmmfd.Broker, name: str) -> None:
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
    with pytest.raises(vmmfd.MismatchError, match="the Stubborn refuses to set 'b', and is unchanged: no"):
        broker.load(name, module)
    assert module.a is a and module.b is b and a == 0
    gc.collect()
    assert vmmfd._native._settle(10)
    assert len(broker.who(name).leases) == 0


def test_training_resumes_with_equal_losses(broker: vmmfd.Broker, name: str) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(4, 16)

    def start() -> tuple[nn.Module, Any]:
        module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(20)))
        return module, torch.optim.AdamW(module.parameters(), lr=0.01)

    def losses(module: nn.Module, optimizer: Any) -> list[float]:
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = module(inputs).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    module, optimizer = start()
    losses(module, optimizer)
    broker.put(name, {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3})
    expected = losses(module, optimizer)
    other, other_optimizer = start()
    with broker.get(name) as lease:
        tree = lease.tree(torch.from_dlpack, copy=True)
    other.load_state_dict(tree["model"])
    other_optimizer.load_state_dict(tree["optimizer"])
    assert losses(other, other_optimizer) == expected and tree["epoch"] == 3
