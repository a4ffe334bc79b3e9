"""vLLM's load format with PyTorch on the host backend, with a stand-in for vLLM: publishing, attaching and refusals.

It has more than 500 lines: all its tests share its engines and their models."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vmmfd

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from conftest import Child, Server  # noqa: E402
from torch_models import is_mapped  # noqa: E402
from vllm_engine import STUB, configure  # noqa: E402
from vllm_models import Method, Model, ScaledKernel, describe, digest, load, tensors  # noqa: E402
from vmmfd.torch import _exact  # noqa: E402
from vmmfd.engines import _vllm_loader  # noqa: E402
from vllm.model_executor.model_loader import default_loader, get_model_loader, utils  # noqa: E402

nn = torch.nn


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    default_loader.read.clear()
    yield
    _vllm_loader._found.clear()


@pytest.fixture
def one(socket: str, folder: Path, name: str) -> Callable[..., Any]:
    """Creates engine configurations with a shared model and broker."""

    def make(model: Callable[[], Any] = Model, **extra: Any) -> Any:
        return configure(folder, {"broker": socket, "name": name, **extra}, model, torch.bfloat16)

    return make


def object_of(name: str) -> str:
    """Returns the object with a user's name."""
    return f"{name}/{vmmfd.device_uuid(0, backend='host')}"


def attach(config: Any) -> tuple[Any, vmmfd.Lease]:
    """Returns a model that maps the object, and its lease."""
    assert get_model_loader(config.load_config).get_external_weight_memory(config) > 0
    (found,) = _vllm_loader._found.values()
    return load(config), found.held


def from_disk(config: Any) -> Any:
    """Returns the model as vLLM's own loader leaves it."""
    config.load_config.load_format, config.load_config.model_loader_extra_config = "auto", {}
    return load(config)


# Publish and attach


def test_attached_tensors_equal_disk_load(one: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm.vmmfd")
    expected = describe(from_disk(one()))
    assert len(default_loader.read) == 1 and len(expected) > 15
    maker = load(one())
    assert len(default_loader.read) == 2 and "loaded and published" in caplog.text
    attached, lease = attach(one())
    assert len(default_loader.read) == 2 and lease.version == 1
    for model in (maker, attached):
        assert describe(model) == expected
        assert not model.training and not any(module.training for module in model.modules())
    assert not any(tensor.requires_grad for _, (_, tensor) in tensors(attached).items())


def test_parameters_are_mapped_and_others_private(one: Callable[..., Any], name: str) -> None:
    load(one())
    attached, lease = attach(one())
    for key, (kind, tensor) in tensors(attached).items():
        shared = kind == "parameter" or key.endswith(".row")
        assert is_mapped(tensor, lease) == shared or tensor.numel() == 0, key
        if not shared:
            tensor.add_(1)
    assert torch.equal(attached.layers[0].folded, torch.full((6, 1), 2.0, dtype=torch.bfloat16))
    again, _ = attach(one())
    assert torch.equal(again.layers[0].folded, torch.ones(6, 1, dtype=torch.bfloat16))


def test_ties_and_views_are_kept(one: Callable[..., Any]) -> None:
    load(one())
    attached, _ = attach(one())
    assert attached.head.weight is attached.embed.weight
    for layer in attached.layers:
        assert layer.weight.stride() == (1, 32)
        assert layer.row.data_ptr() == layer.weight[1].data_ptr()
        assert layer.row.untyped_storage().data_ptr() == layer.weight.untyped_storage().data_ptr()
    assert attached.window.data_ptr() == attached.cache[1].data_ptr()
    attached.cache.zero_()
    assert attached.window.sum() == 0
    assert "cache" not in attached.state_dict() and "layers.0.folded" in attached.state_dict()


def test_maker_buffers_stay_private(one: Callable[..., Any], broker: vmmfd.Broker) -> None:
    """A put contains the memory of parameters and their views, and one copy of each other storage."""
    maker = load(one())
    put = {item.name: item.tensor for item in _exact.Exact(broker, maker, torch.device("cpu"))._items}
    assert put.keys() == tensors(maker).keys()
    for key, (kind, tensor) in tensors(maker).items():
        shared = kind == "parameter" or key.endswith(".row")
        assert tensor.numel() == 0 or (put[key].data_ptr() == tensor.data_ptr()) == shared, key
        assert torch.equal(put[key], tensor) and put[key].stride() == tensor.stride(), key
    assert put["window"].data_ptr() == put["cache"][1].data_ptr()
    maker.cache.zero_()
    attached, _ = attach(one())
    assert attached.cache.sum() > 0


def test_removed_tensors_and_state_are_restored(
    one: Callable[..., Any], broker: vmmfd.Broker, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm.vmmfd")
    maker = load(one())
    attached, _ = attach(one())
    for model in (maker, attached):
        for layer in model.layers:
            assert not hasattr(layer, "raw_scale") and "raw_scale" not in layer._parameters
            assert layer.input_scale is None
            assert layer.quant_method.scaled.size == 32
            assert layer.ceiling == float("inf") and layer.is_folded is True
    assert not any(tensor.is_meta for _, tensor in tensors(attached).values())
    # Tensors that the engine created and the maker removed are reported.
    line = next(record.getMessage() for record in caplog.records if "attached" in record.getMessage())
    left = "layers.0.raw_scale, layers.0.input_scale, layers.1.raw_scale, layers.1.input_scale"
    assert line.endswith(f"left on meta: {left}")
    assert "read 0 bytes of files" in line
    # The metadata is limited: no row per module.
    recorded = broker.stat(object_of(name)).metadata["vllm"]["state"]
    assert {attribute for _, attribute, _ in recorded} == {"ceiling", "is_folded", "quant_method.scaled.size"}


def test_attached_model_keeps_the_lease(one: Callable[..., Any], broker: vmmfd.Broker, name: str) -> None:
    load(one())
    attached, lease = attach(one())
    assert len(broker.who(name).leases) == 1
    broker.delete(object_of(name))
    expected = attached.embed.weight.sum()
    gc.collect()
    assert lease.is_held and attached.embed.weight.sum() == expected
    del attached
    gc.collect()
    assert lease.is_closed and vmmfd._native._settle(10)
    assert not broker.who(name).leases


# External memory


def test_external_memory_is_object_size(
    one: Callable[..., Any], broker: vmmfd.Broker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = one()
    assert get_model_loader(config.load_config).get_external_weight_memory(config) == 0
    with monkeypatch.context() as without:
        without.delattr(vmmfd, "connect")
        # The model is loaded with this claim.
        load(config)
    assert not _vllm_loader._found and len(default_loader.read) == 1
    config = one()
    mapped = get_model_loader(config.load_config).get_external_weight_memory(config)
    assert mapped == broker.bytes_of(object_of(name)) > 0
    assert get_model_loader(config.load_config).get_external_weight_memory(config) == mapped
    monkeypatch.delattr(vmmfd, "connect")
    load(config)
    assert not _vllm_loader._found and len(default_loader.read) == 1


def test_brokers_are_distinguished(one: Callable[..., Any], server: Server) -> None:
    """Brokers may have objects of the same name."""
    load(one())
    config, other = one(), one(broker=server.path)
    assert get_model_loader(config.load_config).get_external_weight_memory(config) > 0
    assert get_model_loader(other.load_config).get_external_weight_memory(other) == 0
    assert len(_vllm_loader._found) == 2


def test_deleted_object_is_still_attached(one: Callable[..., Any], broker: vmmfd.Broker, name: str) -> None:
    expected = digest(load(one()))
    config = one()
    assert get_model_loader(config.load_config).get_external_weight_memory(config) > 0
    broker.delete(object_of(name))
    assert digest(load(config)) == expected and len(default_loader.read) == 1


# Refusals


@contextlib.contextmanager
def refused(kind: type[vmmfd.Error], text: str) -> Iterator[None]:
    """An error, and nothing is read from disk."""
    before = len(default_loader.read)
    with pytest.raises(kind, match=text):
        yield
    assert len(default_loader.read) == before


class Undeclared(Method):
    supports_pre_processed_weights = False


def test_undeclared_method_is_refused_early(one: Callable[..., Any], broker: vmmfd.Broker, name: str) -> None:
    config = one(lambda: Model(method=Undeclared()))
    with refused(vmmfd.Unsupported, r"layer layers\.1: Undeclared does not declare .* \"on_unsupported\": \"load\""):
        load(config)
    # The claim passes on.
    with broker.claim(object_of(name)) as claim:
        assert isinstance(claim, vmmfd.Claim)


def test_undeclared_method_may_load_from_disk(
    one: Callable[..., Any], broker: vmmfd.Broker, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    claims = []

    class Watched(Model):
        def read(self, folder: str) -> None:
            # Other engines need not wait.
            claims.append(broker.claim(object_of(name)))
            super().read(folder)

    model = load(one(lambda: Watched(method=Undeclared()), on_unsupported="load"))
    assert len(default_loader.read) == 1 and describe(model) == describe(from_disk(one(lambda: Model(method=Undeclared()))))
    assert isinstance(claims[0], vmmfd.Claim) and not broker.list(name)
    assert "is loaded for this engine only, and not published: layer layers.1: Undeclared" in caplog.text
    claims[0].close()


@pytest.mark.parametrize(
    ("config", "field", "value", "reason"),
    [
        ("parallel_config", "enable_eplb", True, "EPLB"),
        (None, "weight_transfer_config", SimpleNamespace(backend="nccl"), "the weight transfer engine 'nccl' writes"),
        ("offload_config.uva", "cpu_offload_gb", 4, "offloading"),
        ("offload_config.prefetch", "offload_group_size", 2, "offloading"),
    ],
)
def test_unshareable_configuration_is_refused(
    one: Callable[..., Any], broker: vmmfd.Broker, name: str, config: str | None, field: str, value: Any, reason: str
) -> None:
    def changed(**extra: Any) -> Any:
        made = one(**extra)
        setattr(functools.reduce(getattr, config.split(".") if config else [], made), field, value)
        return made

    with refused(vmmfd.Unsupported, f"this model can't be shared: {reason} .*on_unsupported"):
        load(changed())
    made = changed(on_unsupported="load", broker="/absent")
    assert get_model_loader(made.load_config).get_external_weight_memory(made) == 0
    load(made)
    assert len(default_loader.read) == 1 and not broker.list(name)


def test_draft_loads_from_disk(one: Callable[..., Any]) -> None:
    config = one(broker="/absent")
    config.speculative_config = SimpleNamespace(draft_model_config=config.model_config)
    load(config)
    assert len(default_loader.read) == 1


def test_load_in_place_is_refused(one: Callable[..., Any]) -> None:
    config = one()
    model = load(config)
    with refused(vmmfd.Unsupported, "does not load into a model in place"):
        get_model_loader(config.load_config).load_weights(model, config.model_config)


def test_missing_object_fails_at_once(one: Callable[..., Any], name: str) -> None:
    with refused(vmmfd.NotFound, re.escape(f"there is no object `{object_of(name)}`")):
        load(one(on_missing="fail", wait=0))
    with refused(vmmfd.Timeout, re.escape(f"there is no object `{object_of(name)}`: waited")):
        load(one(on_missing="fail", wait=0.1))


def test_wait_option_limits_wait(one: Callable[..., Any], broker: vmmfd.Broker, name: str) -> None:
    with broker.claim(object_of(name)):
        for wait, error in ((0, vmmfd.NotFound), (0.1, vmmfd.Timeout)):
            with refused(error, re.escape(object_of(name))):
                load(one(wait=wait))


def test_mismatch_never_loads_from_disk(one: Callable[..., Any], broker: vmmfd.Broker, name: str, folder: Path) -> None:
    load(one())
    config = one(on_unsupported="load")
    config.model_config.dtype = torch.float16
    with refused(vmmfd.MismatchError, "dtype: 'torch.bfloat16' in the object, 'torch.float16' here"):
        load(config)
    with refused(vmmfd.MismatchError, "dtype"):
        get_model_loader(config.load_config).get_external_weight_memory(config)
    (folder / "model.safetensors").write_bytes(b"WEIGHTS")
    with refused(vmmfd.MismatchError, "contents: model.safetensors has other bytes"):
        load(one())
    gc.collect()
    assert vmmfd._native._settle(10) and not broker.who(name).leases


def test_missing_broker_is_named(one: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vmmfd, "connect", functools.partial(vmmfd.connect, wait=0.1))
    with refused(vmmfd.NotFound, re.escape(f"no broker on {tmp_path / 'absent'}")):
        load(one(broker=str(tmp_path / "absent"), on_unsupported="load"))


def test_other_limits_are_refused(one: Callable[..., Any], broker: vmmfd.Broker, name: str) -> None:
    """A buffer of the maker's size would be too small for the engine's tokens."""
    load(one())
    with refused(vmmfd.MismatchError, r"picked: attribute \(8, 2\) of torch.int32 in the object, attribute \(16, 2\) of torch.int32 here"):
        load(one(lambda: Model(tokens=16)))
    gc.collect()
    assert vmmfd._native._settle(10) and not broker.who(name).leases
    assert describe(load(one())) == describe(load(one()))


def test_other_modules_are_refused(one: Callable[..., Any]) -> None:
    load(one())

    def smaller() -> Any:
        model = Model()
        del model.embed
        return model

    with refused(vmmfd.MismatchError, r"lacks the submodules for arrays of .*\n- embed\.weight"):
        load(one(smaller))


def test_other_backends_are_refused(one: Callable[..., Any]) -> None:
    load(one())

    class OtherKernel(ScaledKernel):
        pass

    def make() -> Any:
        method = Method()
        method.scaled = OtherKernel()
        return Model(method=method)

    with refused(vmmfd.MismatchError, r"other backends \(Method OtherKernel in 0 layers of the object, 1 here; Method ScaledKernel in 2 layers"):
        load(one(make))


class Attention(nn.Module):  # type: ignore[misc]
    """Creates a tensor during weight processing, and has an object with the same tensors, as in vLLM's attention."""

    is_attention = True

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.empty(4), requires_grad=False)
        self.impl = SimpleNamespace(sinks=self.sinks)
        # On a named device, so with bytes even in a model on meta; another object holds it too.
        self.indices = torch.zeros(3, device="cpu")
        self.impl.indices = self.indices

    def make_tensors(self) -> None:
        if "absorbed" in self._parameters:
            self.absorbed.data.copy_(self.sinks.detach() * 2)
        else:
            self.absorbed = nn.Parameter(self.sinks.detach() * 2, requires_grad=False)


class Attending(Model):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()


def test_attention_uses_object_tensors(one: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    process = utils.process_weights_after_loading

    def processed(model: Any, *arguments: Any) -> None:
        process(model, *arguments)
        model.attention.make_tensors()

    monkeypatch.setattr(utils, "process_weights_after_loading", processed)
    maker = load(one(Attending))
    attached, lease = attach(one(Attending))
    attention = attached.attention
    assert torch.equal(attention.absorbed, maker.attention.absorbed)
    assert is_mapped(attention.absorbed, lease) and is_mapped(attention.sinks, lease)
    assert attention.impl.sinks is attention.sinks
    assert attention.impl.indices is attention.indices and not is_mapped(attention.indices, lease)


def test_remaining_meta_tensors_are_refused(one: Callable[..., Any]) -> None:
    def make() -> Any:
        model = Model()
        model.layers[0].impl = SimpleNamespace(lost=torch.ones(4))
        return model

    load(one(make))
    with refused(vmmfd.Unsupported, r"can't be attached: processing did not create objects .*layers\.0: SimpleNamespace\.lost"):
        load(one(make))


def test_models_refuse_new_weights(one: Callable[..., Any]) -> None:
    for model in (load(one()), load(one())):
        with pytest.raises(vmmfd.Unsupported, match="does not load into a model in place"):
            model.load_weights([])


def test_tensors_in_lists_are_refused(one: Callable[..., Any]) -> None:
    def make() -> Any:
        model = Model()
        model.layers[0].tables = {"a": [], "b": torch.ones(3)}
        return model

    load(one(make))
    with refused(vmmfd.MismatchError, r"tensors in lists or dicts, which cannot be shared:\n- layers\.0\.tables"):
        load(one(make))


def test_missing_state_is_refused(one: Callable[..., Any]) -> None:
    class Late(Method):
        """Creates an object only during processing."""

        def process_weights_after_loading(self, layer: Any) -> None:
            before = self.scaled.size
            super().process_weights_after_loading(layer)
            if self.scaled.size != before:
                self.plan = object()

    load(one(lambda: Model(method=Late())))
    with refused(vmmfd.Unsupported, r"has: layers\.1\.quant_method\.plan, a object"):
        load(one(lambda: Model(method=Late())))


# Failures to publish


def test_engine_over_quota_serves_alone(folder: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(tmp_path, "--quota", "bytes=1")
    try:
        config = configure(folder, {"broker": server.path, "name": name}, Model, torch.bfloat16)
        model = load(config)
        assert describe(model) == describe(from_disk(config))
        assert f"{object_of(name)} is loaded for this engine only, and not published: " in caplog.text
        with vmmfd.connect(server.path, backend="host") as broker:
            assert not broker.list()
            with broker.claim(object_of(name)) as claim:
                assert isinstance(claim, vmmfd.Claim)
    finally:
        server.end()


def test_file_changed_during_load_prevents_publish(
    one: Callable[..., Any], broker: vmmfd.Broker, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Changing(Model):
        def read(self, folder: str) -> None:
            super().read(folder)
            (Path(folder) / "model.safetensors").write_bytes(b"other weights")

    load(one(Changing))
    assert "not published: " in caplog.text and "model.safetensors was changed while it was loaded" in caplog.text
    assert not broker.list(name)


def test_failed_publish_keeps_engine_serving(
    one: Callable[..., Any], broker: vmmfd.Broker, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(_exact, "_apart", full)
    load(one())
    assert "not published: out of memory" in caplog.text and not broker.list(name)


# Several processes

ENGINE = """
import logging, sys
from pathlib import Path
sys.path[:0] = sys.argv[1].split(":")
from vllm_engine import configure
from vllm_models import Model, digest, load, torch
from vmmfd.engines import _vllm_loader  # noqa: E402
from vllm.model_executor.model_loader import default_loader

class Printing(logging.Handler):
    def emit(self, record):
        print("waiting" if "waiting up to" in record.getMessage() else "", flush=True)

logging.getLogger("vllm.vmmfd").addHandler(Printing())
logging.getLogger("vllm.vmmfd").setLevel(logging.INFO)

class Held(Model):
    def read(self, folder):
        if "hold" in sys.argv:
            print("reading", flush=True)
            sys.stdin.read()
        super().read(folder)

print("started", flush=True)
if "start" in sys.argv:
    sys.stdin.readline()
model = load(configure(sys.argv[2], {"broker": sys.argv[3], "name": sys.argv[4]}, Held, torch.bfloat16))
print("loaded" if default_loader.read else "attached", digest(model), flush=True)
"""


@pytest.fixture
def start(child: Callable[..., Child], socket: str, folder: Path, name: str) -> Callable[..., Child]:
    paths = f"{STUB}:{Path(__file__).parent}"
    return lambda *options: child(ENGINE, paths, str(folder), socket, name, *options, env={"OMP_NUM_THREADS": "1"})


def test_one_of_four_engines_loads(start: Callable[..., Child]) -> None:
    engines = [start("start") for _ in range(4)]
    for each in engines:
        each.wait_for("started")
    for each in engines:
        assert each.process.stdin is not None
        each.process.stdin.write("\n")
        each.process.stdin.flush()
    ends = [each.end().split() for each in engines]
    assert sorted(end[-2] for end in ends) == ["attached"] * 3 + ["loaded"]
    assert len({end[-1] for end in ends}) == 1


def test_killed_loader_is_replaced(start: Callable[..., Child]) -> None:
    first = start("hold")
    first.wait_for("reading")
    others = [start() for _ in range(2)]
    for each in others:
        each.wait_for("waiting")
    first.signal(signal.SIGKILL)
    first.end(None)
    ends = [each.end().split() for each in others]
    assert sorted(end[-2] for end in ends) == ["attached", "loaded"]
    assert ends[0][-1] == ends[1][-1]


def test_interrupt_stops_waiting(start: Callable[..., Child]) -> None:
    first = start("hold")
    first.wait_for("reading")
    second = start()
    second.wait_for("waiting")
    second.signal(signal.SIGINT)
    second.end(-signal.SIGINT)
    # The loader still holds the claim.
    assert first.end().split()[-2] == "loaded"
