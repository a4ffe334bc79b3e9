"""Writes to a module's mapped tensors: which are refused, and by which hooks.

It has more than 500 lines: its tests share the guard, its modules and their parameters.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Child

import vmmfd

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch_models import is_mapped  # noqa: E402

nn = torch.nn


@pytest.fixture
def guard() -> Iterator[vmmfd.torch.GuardHandle]:
    with vmmfd.torch.guard() as handle:
        yield handle


def registration_hooks() -> int:
    hooks = torch.nn.modules.module
    return len(hooks._global_parameter_registration_hooks) + len(hooks._global_buffer_registration_hooks)


def test_only_guard_installs_process_wide_hooks(broker: vmmfd.Broker, name: str) -> None:
    broker.put(name, nn.BatchNorm1d(4))
    before = registration_hooks()
    module = nn.BatchNorm1d(4)
    broker.load(name, module)
    module.load_state_dict(broker.state_dict(name), assign=True)
    assert registration_hooks() == before
    with vmmfd.torch.guard() as handle:
        assert registration_hooks() == before + 2
        another = vmmfd.torch.guard()
        handle.remove()
        assert registration_hooks() == before + 2
    another.remove()
    another.remove()
    assert registration_hooks() == before


@pytest.mark.parametrize("use", ["load", "state_dict"])
def test_compiled_modules_are_not_recompiled(
    broker: vmmfd.Broker, socket: str, name: str, child: Callable[..., Child], use: str
) -> None:
    broker.put(name, nn.BatchNorm1d(4))
    # On some machines PyTorch writes warnings to stderr.
    output = child(
        """
        import sys, torch, vmmfd
        class Sum(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = torch.nn.Linear(2, 2)
                self.register_buffer("sum", torch.zeros(2))
            def forward(self, x):
                self.sum = self.sum + x
                return self.linear(self.sum)
        compiled = [torch.compile(module, backend="eager", fullgraph=True) for module in (Sum(), torch.nn.Linear(2, 2))]
        def call():
            for module in compiled:
                module(torch.ones(2))
        call()
        call()
        broker = vmmfd.connect(sys.argv[1], backend="host")
        module = torch.nn.BatchNorm1d(4)
        if sys.argv[3] == "load":
            broker.load(sys.argv[2], module)
        else:
            module.load_state_dict(broker.state_dict(sys.argv[2]), assign=True)
        with torch.compiler.set_stance("fail_on_recompile"):
            call()
            print("not recompiled", flush=True)
            vmmfd.torch.guard()
            try:
                call()
            except RuntimeError:
                print("recompiled by guard", flush=True)
        """,
        socket,
        name,
        use,
    ).end(None)
    assert output.split("\n")[:2] == ["not recompiled", "recompiled by guard"], output


def test_load_state_dict_refuses_mapped_memory(broker: vmmfd.Broker, name: str) -> None:
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
    # Also through a submodule, or a parent module.
    with pytest.raises(vmmfd.ExportError, match="assign=True"):
        module.inner.load_state_dict(nn.Linear(4, 4).state_dict())
    with pytest.raises(vmmfd.ExportError, match="0.inner.weight"):
        nn.Sequential(module).load_state_dict({f"0.{key}": value for key, value in other.items()})
    # Other memory can still be written: a private copy, a copied module, a module with new memory.
    module.load_state_dict({"norm.running_mean": torch.full((4,), 7.0)}, strict=False)
    assert module.norm.running_mean[0] == 7
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module.inner))):
        copied.load_state_dict({key: value + 1 for key, value in copied.state_dict().items()})
    module.norm.double()
    module.norm.load_state_dict(nn.BatchNorm1d(4).state_dict())
    module.load_state_dict(other, assign=True)
    module.load_state_dict(other)
    assert torch.equal(module.inner.weight, other["inner.weight"])
    # Loading the module again is not a copy.
    other_module = Outer()
    broker.load(name, other_module)
    broker.load(name, other_module)
    assert len(other_module._load_state_dict_pre_hooks) == 1


def test_guard_refuses_writes_to_state_dicts(broker: vmmfd.Broker, name: str, guard: vmmfd.torch.GuardHandle) -> None:
    def make() -> Any:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    broker.put(name, make())
    new = {key: value + 1 for key, value in make().state_dict().items()}
    with broker.get(name) as lease:
        module = make()
        module.load_state_dict(lease.state_dict(), assign=True)
        # Guards outlive the hooks.
        guard.remove()
        for of, prefix in ((module, ""), (module[0], "0.")):
            with pytest.raises(vmmfd.ExportError, match="assign=True") as raised:
                of.load_state_dict({key.removeprefix(prefix): value for key, value in new.items() if key.startswith(prefix)})
            assert str(raised.value).splitlines()[1:] == [f"- {'' if prefix else '0.'}{leaf}" for leaf in ("weight", "bias")]
        # As a parameter of another module, of a module created later, and as buffers requested without copies.
        again = vmmfd.torch.guard()
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
        again.remove()
        # It may write its own memory: buffers, a copy, memory after a move.
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


def test_pieces_and_later_ties_are_guarded(broker: vmmfd.Broker, name: str) -> None:
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
    with vmmfd.torch.guard():
        module[1].weight = module[0].weight
    with pytest.raises(vmmfd.ExportError, match="- weight$"):
        module[1].load_state_dict({"weight": torch.ones(4, 4)}, strict=False)
    # A module with new memory can be written, and so can a copy of the module, which has the same hooks.
    module.share_memory()
    again = copy.copy(module)
    del module
    gc.collect()
    again.load_state_dict(new)
    again.load_state_dict(new, assign=True)
    assert torch.equal(again[0].weight, new["0.weight"])


def test_copied_buffer_keeps_requires_grad(broker: vmmfd.Broker, name: str, guard: vmmfd.torch.GuardHandle) -> None:
    broker.put(name, {"x": nn.Parameter(torch.ones(3))})
    x = broker.state_dict(name)["x"].requires_grad_(True)
    module = nn.Module()
    module.register_buffer("x", x)
    assert module.x.requires_grad and module.x.is_leaf and module.x.data_ptr() != x.data_ptr()


class Counter(nn.Module):  # type: ignore[misc]
    """A module whose forward writes its buffers, two of which are tied. No PyTorch class is known for that."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, device=device)
        self.register_buffer("count", torch.zeros(4, device=device))
        self.register_buffer("tied", self.count)
        self.register_buffer("tail", self.count[2:])

    def forward(self, x: Any) -> Any:
        self.count.add_(1)
        return self.linear(x) + self.count


def test_forward_may_write_copied_buffers(
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


def parameters(module: Any) -> dict[str, Any]:
    """Returns a module's tensors, all put as parameters, so that they are mapped."""
    tensors = module.state_dict() | {"complex": torch.tensor([1 + 2j])}
    return {key: nn.Parameter(tensor, requires_grad=False) for key, tensor in tensors.items()}


def test_guard_copies_buffers(broker: vmmfd.Broker, name: str, guard: vmmfd.torch.GuardHandle) -> None:
    broker.put(name, parameters(Counter()))
    with broker.get(name) as lease:
        found = lease.state_dict()
        conjugated = found.pop("complex").conj()
        # As tensors they are the mapped memory, and so are parameters.
        assert all(is_mapped(tensor, lease) for tensor in found.values()) and found["count"].sum() == 0
        for device in ("cpu", "meta"):
            module = Counter(device)
            module.load_state_dict(found, assign=True)
            assert is_mapped(module.linear.weight, lease) and is_mapped(module.linear.bias, lease)
            for _, buffer in module.named_buffers():
                assert not is_mapped(buffer, lease) and not buffer.requires_grad and type(buffer) is torch.Tensor
        # Each module has its own copy.
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
        # Other tensors are unchanged.
        mine, sparse = torch.ones(2), torch.ones(2).to_sparse()
        other.more, other.sparse = mine, nn.Parameter(mine)
        other.register_buffer("nothing", None)
        other.register_buffer("of_no_storage", sparse)
        assert other.more is mine and other.of_no_storage is sparse and other.nothing is None
        # Writes to one copy are not in later copies: of the same module, another module, or another version.
        module.load_state_dict(found, assign=True)
        assert module.count.sum() == module.tied.sum() == 0
        module(torch.ones(1, 4))
        with torch.inference_mode():
            other.count = found["count"]
        assert other.count.sum() == 0 and not other.count.is_inference()
        newer = Counter()
        newer.count.add_(2)
        broker.put(name, parameters(newer), replace=True)
        lease.switch(lease.prepare(), exports_unused=True).close()
        module.tied, other.count = found["tied"], found["count"]
        assert module.tied.tolist() == other.count.tolist() == [2.0] * 4 and module.count.tolist() == [1.0] * 4
        # Buffers requested as mapped memory are mapped and guarded.
        module.register_buffer("mapped", lease.state_dict(writable_buffers=False)["count"])
        assert is_mapped(module.mapped, lease)
        with pytest.raises(vmmfd.ExportError, match="- mapped$"):
            module.load_state_dict({"mapped": torch.ones(4)}, strict=False)
    del found, module, other, buffer, conjugated
    gc.collect()
    assert vmmfd._native._settle(10)
    assert len(broker.who(name).leases) == 0


def test_guard_works_in_fork(socket: str, name: str, child: Callable[..., Child]) -> None:
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
        vmmfd.torch.guard()
        broker.put(sys.argv[2], {"x": torch.nn.Parameter(torch.ones(4))})
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


def test_compiled_forward_may_assign_buffers(broker: vmmfd.Broker, name: str, guard: vmmfd.torch.GuardHandle) -> None:
    class Sum(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("sum", torch.zeros(2))

        def forward(self, x: Any) -> Any:
            self.sum = self.sum + x
            return self.sum * 2

    broker.put(name, {"sum": nn.Parameter(torch.zeros(2))})
    module = Sum()
    module.load_state_dict(broker.state_dict(name), assign=True)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0] and compiled(torch.ones(2)).tolist() == [4.0, 4.0]


def filled(broker: vmmfd.Broker, name: str, make: Callable[[], Any], **options: Any) -> Any:
    """Returns a guarded module with the tensors of a state dict."""
    broker.put(name, make(), replace=True)
    module = make()
    with vmmfd.torch.guard():
        module.load_state_dict(broker.state_dict(name, **options), assign=True)
    return module


def linear() -> Any:
    return nn.Linear(4, 4)


class Decoded(torch.Tensor):  # type: ignore[misc]
    """A tensor whose values differ from its bytes."""


def test_no_op_loads_are_allowed(broker: vmmfd.Broker, name: str) -> None:
    module = filled(broker, name, linear)
    before = module.weight.data_ptr()
    # Onto itself, from another tensor of the same memory, and into another module with it.
    module.load_state_dict(module.state_dict())
    other = linear()
    other.load_state_dict({key: value.view(-1).view_as(value) for key, value in module.state_dict().items()}, assign=True)
    other.load_state_dict(module.state_dict())
    loaded = linear()
    broker.load(name, loaded)
    loaded.load_state_dict(loaded.state_dict())
    assert module.weight.data_ptr() == other.weight.data_ptr() == before
    with pytest.raises(vmmfd.ExportError, match="- weight$"):
        module.load_state_dict({"weight": module.weight.T}, strict=False)
    with pytest.raises(vmmfd.ExportError, match="- weight$"):
        module.load_state_dict({"weight": module.weight.detach()._neg_view()}, strict=False)
    for other_value in (torch.ones(8, 8), torch.ones(4, 4).to_sparse(), module.weight.detach().as_subclass(Decoded), [1.0] * 4):
        with pytest.raises(vmmfd.ExportError, match="- weight$"):
            module.load_state_dict({"weight": other_value}, strict=False)
    # It ignores tensors outside of state dicts.
    module.register_buffer("note", broker.state_dict(name, writable_buffers=False)["bias"], persistent=False)
    assert module.load_state_dict({"note": torch.ones(4)}, strict=False).unexpected_keys == ["note"]
    broker.put(name, {"scalar": nn.Parameter(torch.tensor(1.0))}, replace=True)
    module.scalar = nn.Parameter(broker.state_dict(name)["scalar"], requires_grad=False)
    with pytest.raises(vmmfd.ExportError, match="- scalar$"):
        module.load_state_dict({"scalar": torch.ones(1)}, strict=False)


def test_guard_tracks_current_tensors(broker: vmmfd.Broker, name: str) -> None:
    class Scaled(nn.Sequential):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(linear(), linear(), linear())
            self.scale = nn.Parameter(torch.ones(1))

    for loads in (False, True):
        module = filled(broker, name, Scaled)
        if loads:
            broker.load(name, module)
        module.scale = nn.Parameter(torch.ones(1))
        # This replaces the dict of submodules.
        del module[0]
        module[0], module[1] = linear(), linear()
        gc.collect()
        assert vmmfd._native._settle(10)
        assert len(broker.who(name).leases) == 0
        module.load_state_dict({key: value.clone() for key, value in module.state_dict().items()})
    # A copy that is filled again is guarded again.
    module = copy.deepcopy(filled(broker, name, Scaled))
    module.load_state_dict({key: value + 1 for key, value in module.state_dict().items()})
    broker.load(name, module)
    with pytest.raises(vmmfd.ExportError, match="- 0.weight"):
        nn.Sequential(module[0]).load_state_dict({"0.weight": torch.ones(4, 4)}, strict=False)
    # A shallow copy is guarded even after the module is gone, also in a collected cycle.
    class Wrapper(nn.Linear):  # type: ignore[misc]
        def __init__(self, of: Any) -> None:
            self.__dict__.update(of.__dict__)

    class Last:
        def __init__(self, of: Any) -> None:
            self.module, self.cycle = of, self

        def __del__(self) -> None:
            with pytest.raises(vmmfd.ExportError, match="- weight"):
                self.module.load_state_dict({"weight": torch.ones(4, 4)}, strict=False)
            refused.append(True)

    refused: list[bool] = []
    for load in (lambda: filled(broker, name, linear), lambda: broker.load(name, linear()).module):
        for wrap in (copy.copy, Wrapper):
            with pytest.raises(vmmfd.ExportError, match="- weight"):
                wrap(load()).load_state_dict({"weight": torch.ones(4, 4)}, strict=False)
        Last(load())
    gc.collect()
    assert refused == [True, True]
    # A former buffer name is now a parameter's.
    module = linear()
    module.register_buffer("late", torch.ones(4), persistent=False)
    del module._buffers["late"]
    with vmmfd.torch.guard():
        module.register_parameter("late", nn.Parameter(broker.state_dict(name)["bias"], requires_grad=False))
    with pytest.raises(vmmfd.ExportError, match="- late"):
        module.load_state_dict({"late": torch.ones(4)}, strict=False)


def test_hooks_ignore_other_objects(broker: vmmfd.Broker, name: str, guard: vmmfd.torch.GuardHandle) -> None:
    from torch.overrides import TorchFunctionMode

    seen: list[str] = []

    class Mode(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            seen.append(function.__name__)
            return function(*arguments, **(options or {}))

    class Duck:
        def __getattr__(self, key: str) -> Any:
            return lambda *_: Duck()

        @classmethod
        def __torch_function__(cls, *_: Any) -> Any:
            return cls()

    for options in ({}, {"writable_buffers": False}):
        mapped = filled(broker, name, lambda: nn.BatchNorm1d(4), **options)
        module = Counter()
        # Proxies have every attribute.
        traced = torch.fx.symbolic_trace(module)
        assert traced(torch.ones(1, 4)).shape == (1, 4)
        module.register_buffer("duck", Duck())
        with Mode():
            module.weight = nn.Parameter(torch.ones(2))
            module.register_buffer("more", torch.ones(2))
        assert "untyped_storage" not in seen
        scripted = torch.jit.script(nn.BatchNorm1d(4))
        scripted.register_parameter("weight", nn.Parameter(mapped.weight.detach(), requires_grad=False))
        bare = nn.Module.__new__(nn.Module)
        bare.__dict__.update({key: value for key, value in mapped.__dict__.items() if key != "_load_state_dict_pre_hooks"})
        bare.register_parameter("weight", nn.Parameter(mapped.weight.detach(), requires_grad=False))


def test_tensors_and_modules_can_be_traced(broker: vmmfd.Broker, name: str, guard: vmmfd.torch.GuardHandle) -> None:
    given: list[Any] = []

    class Traced(nn.Module):  # type: ignore[misc]
        def __init__(self, x: Any) -> None:
            super().__init__()
            self.x = x

        def forward(self, y: Any) -> Any:
            thread = threading.Thread(target=lambda: given.append(filled(broker, name, linear)))
            thread.start()
            thread.join()
            return y + self.x

    mapped = filled(broker, name, linear)
    exported = torch.export.export(Traced(mapped.bias.detach()), (torch.ones(4),), strict=False)
    assert torch.equal(exported.module()(torch.ones(4)), mapped.bias + 1)
    # Loads of other threads are guarded too.
    for module in given:
        with pytest.raises(vmmfd.ExportError, match="- 0.weight"):
            nn.Sequential(module).load_state_dict({"0.weight": torch.ones(4, 4)}, strict=False)
    assert given
