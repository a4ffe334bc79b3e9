"""New versions and sleep of a served model, with PyTorch on the host backend and a stand-in for vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vmmfd

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch_models import is_mapped  # noqa: E402
from vllm_engine import configure  # noqa: E402
from vllm_models import Model, describe, load, tensors  # noqa: E402
from vmmfd.engines import _vllm_live, _vllm_loader  # noqa: E402
from vmmfd.engines import vllm as engine  # noqa: E402
import vllm.distributed  # noqa: E402
from vllm.device_allocator import sleep_mode_backend  # noqa: E402
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # noqa: E402


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    _vllm_loader._found.clear()
    sleep_mode_backend.asked.clear()


@pytest.fixture
def start(socket: str, tmp_path: Path, name: str) -> Callable[..., Any]:
    """Starts an engine: its model, and its weight transfer engine if it has one."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")

    def started(*, updates: bool = True, **extra: Any) -> Any:
        config = configure(tmp_path, {"broker": socket, "name": name, **extra}, Model, torch.bfloat16)
        config.model_config.sleep_mode_backend = "vmmfd"
        config.compilation_config = SimpleNamespace(static_forward_context={})
        if updates:
            config.weight_transfer_config = SimpleNamespace(backend="vmmfd")
        model = load(config)
        create = WeightTransferEngineFactory.create_engine
        transfer = create(config.weight_transfer_config, config, torch.device("cpu"), model) if updates else None
        return SimpleNamespace(model=model, transfer=transfer, sleep=sleep_mode_backend.SleepModeBackendFactory.create_backend(config.model_config))

    return started


def object_of(name: str) -> str:
    return f"{name}/{vmmfd.device_uuid(0, backend='host')}"


def versions(broker: vmmfd.Broker, name: str) -> set[int]:
    return {lease.version for lease in broker.who(object_of(name)).leases}


def train(broker: vmmfd.Broker, name: str, by: float) -> int:
    """Puts a version whose weights and scales are larger. Returns its number."""
    with engine.next_version(broker, object_of(name)) as version:
        version.tensors["embed.weight"].add_(by)
        version.tensors["layers.0.weight"].add_(by)
        version.tensors["layers.0.scale"].add_(by)
        return int(version.put().version)


def update(started: Any, **info: Any) -> None:
    started.transfer.start_weight_update()
    started.transfer.update_weights(info)
    started.transfer.finish_weight_update()


def addresses(model: Any) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, (_, tensor) in tensors(model).items()}


def test_engines_answer_from_new_version(start: Callable[..., Any], broker: vmmfd.Broker, name: str) -> None:
    maker, other = start(), start()
    before, at = describe(maker.model), [addresses(each.model) for each in (maker, other)]
    assert train(broker, name, 1.0) == 2
    assert describe(maker.model) == before
    update(maker)
    weights, scales = maker.model.embed.weight.clone(), maker.model.layers[0].scale.clone()
    assert torch.equal(weights, other.model.embed.weight + 1) and torch.equal(scales, other.model.layers[0].scale + 1)
    # A view of a parameter, and a tied parameter.
    assert torch.equal(maker.model.layers[0].row, other.model.layers[0].row + 1) and maker.model.head.weight is maker.model.embed.weight
    update(other, version=2)
    assert [addresses(each.model) for each in (maker, other)] == at
    assert describe(other.model) == describe(maker.model) != before
    # The old version is released by another thread.
    deadline = time.monotonic() + 10
    while versions(broker, name) != {2} and time.monotonic() < deadline:
        time.sleep(0.01)
    assert versions(broker, name) == {2}


def test_old_version_serves_until_finish(start: Callable[..., Any], broker: vmmfd.Broker, name: str) -> None:
    started = start()
    before = describe(started.model)
    train(broker, name, 1.0)
    started.transfer.start_weight_update()
    started.transfer.update_weights({"version": 2})
    assert describe(started.model) == before
    # Begun again: the prepared version is dropped.
    started.transfer.start_weight_update()
    started.transfer.finish_weight_update()
    assert describe(started.model) == before
    assert versions(broker, name) == {1}


def test_refused_version_leaves_old_one(start: Callable[..., Any], broker: vmmfd.Broker, name: str) -> None:
    started = start()
    before, of = describe(started.model), object_of(name)
    with pytest.raises(vmmfd.NotFound, match="version 7"):
        update(started, version=7)
    with pytest.raises(vmmfd.Timeout):
        update(started, version=2, wait=0.05)
    with broker.get(of) as lease:
        same = {key: lease[key] for key in lease}
        broker.put(of, {key: vmmfd.asarray(array, backend="host") for key, array in same.items()}, replace=True)
        del same
    with pytest.raises(vmmfd.MismatchError):
        update(started)
    with engine.next_version(broker, of, version=1) as version:
        recorded = version._metadata["vllm"]
        recorded["backends"] = {"other": 1}
        version.put(replace_version=2)
    with pytest.raises(vmmfd.MismatchError, match=r"version 3 .* not made from the engine's version 1 \(different: backends\)"):
        update(started)
    assert describe(started.model) == before


def test_only_updating_engines_take_updates(start: Callable[..., Any], broker: vmmfd.Broker, name: str) -> None:
    start()
    train(broker, name, 1.0)
    with pytest.raises(vmmfd.MismatchError, match="a trainer has changed them, and this engine was started without --weight-transfer-config"):
        start(updates=False)
    assert describe(start().model)


def test_trainers_do_not_overwrite_each_other(start: Callable[..., Any], broker: vmmfd.Broker, name: str) -> None:
    started = start()
    one, two = (engine.next_version(broker, object_of(name)) for _ in range(2))
    assert one.put().version == 2 and one.is_closed
    with pytest.raises(vmmfd.Error, match="version"):
        two.put()
    two.close()
    with pytest.raises(vmmfd.Invalid, match="put or closed"):
        two.put()
    # A copy that is not changed is the version itself.
    before = describe(started.model)
    update(started)
    assert describe(started.model) == before
    broker.put(f"{name}/plain", {"x": vmmfd.empty(3, "float32", backend="host")})
    with pytest.raises(vmmfd.MismatchError, match="not published by load format vmmfd"):
        engine.next_version(broker, f"{name}/plain")


@pytest.fixture
def objects(start: Callable[..., Any], name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The objects that two ranks have published."""
    for rank in range(2):
        monkeypatch.setattr(vllm.distributed, "tensor", [rank, 2])
        start()
    return [f"{object_of(name)}/tp{rank}of2" for rank in range(2)]


def test_ranks_get_one_version(objects: list[str], broker: vmmfd.Broker, name: str) -> None:
    with pytest.raises(vmmfd.NotFound, match="no engine has published objects under"):
        engine.next_versions(broker, f"{name}/other")
    with engine.next_versions(broker, name) as versions:
        # The first rank's is put last.
        assert list(versions.objects) == objects[::-1]
        for copy in versions.objects.values():
            copy.tensors["embed.weight"].add_(1)
        assert versions.put() == 2 and versions.is_closed
    versions, other = engine.next_versions(broker, name), engine.next_version(broker, objects[0])
    other.put()
    # The last rank's object has version 3, and the first rank's had it already.
    with pytest.raises(vmmfd.Error, match="version"):
        versions.put()
    versions.close()
    assert [broker.stat(each).summary.version for each in objects] == [3, 3]
    engine.next_version(broker, objects[1]).put()
    with pytest.raises(vmmfd.MismatchError, match="newest versions differ .*remove the objects and restart"):
        engine.next_versions(broker, name)


def test_failed_put_of_a_rank_is_repeated(
    objects: list[str], broker: vmmfd.Broker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine.next_versions(broker, name) as versions:
        put, first = vmmfd.Broker.put, objects[0]

        def fail(self: Any, key: str, *arguments: Any, **named: Any) -> Any:
            if key == first:
                raise vmmfd.Disconnected("the broker is gone")
            return put(self, key, *arguments, **named)

        monkeypatch.setattr(vmmfd.Broker, "put", fail)
        with pytest.raises(vmmfd.Disconnected):
            versions.put()
        assert broker.stat(first).summary.version == 1
        monkeypatch.setattr(vmmfd.Broker, "put", put)
        assert versions.put() == 2 and broker.stat(first).summary.version == 2


def test_next_version_equals_object(start: Callable[..., Any], broker: vmmfd.Broker, name: str) -> None:
    model = start().model
    with engine.next_version(broker, object_of(name)) as version:
        for key, (_, tensor) in tensors(model).items():
            assert torch.equal(version.tensors[key], tensor) and version.tensors[key].stride() == tensor.stride(), key
        assert version.tensors["head.weight"].data_ptr() == version.tensors["embed.weight"].data_ptr()


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_keeps_own_version(start: Callable[..., Any], broker: vmmfd.Broker, name: str, level: int) -> None:
    started = start()
    before, at = describe(started.model), addresses(started.model)
    started.sleep.suspend(level)
    (live,) = [_vllm_live.of(started.model)]
    assert live is not None and live._lease.is_parked and len(broker.who(object_of(name)).leases) == 1
    train(broker, name, 1.0)
    if level == 2:
        started.model.cache.fill_(9)
    started.sleep.resume(["kv_cache"])
    assert live._lease.is_parked
    started.sleep.resume()
    assert describe(started.model) == before and addresses(started.model) == at
    assert sleep_mode_backend.asked == [("suspend", level), ("resume", ["kv_cache"]), ("resume", None)]
    update(started)
    assert describe(started.model) != before


def test_sleeper_may_wake_with_newest(start: Callable[..., Any], broker: vmmfd.Broker, name: str) -> None:
    started, other = start(wake="newest"), start()
    at = addresses(started.model)
    started.sleep.suspend()
    other.sleep.suspend()
    # It holds no version, unlike the other.
    assert len(broker.who(object_of(name)).leases) == 1
    train(broker, name, 1.0)
    started.sleep.resume()
    other.sleep.resume()
    assert torch.equal(started.model.layers[0].weight, other.model.layers[0].weight + 1) and addresses(started.model) == at
    assert torch.equal(started.model.layers[0].scale, other.model.layers[0].scale + 1)
    started.sleep.suspend()
    broker.put(object_of(name), {"x": vmmfd.empty(3, "float32", backend="host")}, replace=True)
    with pytest.raises(vmmfd.MismatchError):
        started.sleep.resume()
    live = _vllm_live.of(started.model)
    assert live is not None and live._lease.is_parked


def test_discard_of_weights_is_refilled(start: Callable[..., Any]) -> None:
    started = start()
    before = describe(started.model)
    started.sleep.discard(("weights",))
    started.model.cache.zero_()
    started.sleep.resume(["weights"])
    assert describe(started.model) == before


def test_failed_suspend_wakes_again(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    started = start()
    before = describe(started.model)

    def fail(self: Any, level: int = 1) -> None:
        raise RuntimeError("no memory on the host")

    monkeypatch.setattr(sleep_mode_backend.CuMemBackend, "suspend", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        started.sleep.suspend()
    assert describe(started.model) == before


def test_maker_maps_the_object(start: Callable[..., Any]) -> None:
    maker = start()
    live = _vllm_live.of(maker.model)
    assert live is not None and is_mapped(maker.model.embed.weight, live._lease)


def test_transfer_needs_the_load_format(start: Callable[..., Any]) -> None:
    config = SimpleNamespace(backend="vmmfd")
    with pytest.raises(vmmfd.Unsupported, match="--load-format vmmfd"):
        WeightTransferEngineFactory.create_engine(config, SimpleNamespace(), torch.device("cpu"), torch.nn.Linear(1, 1))
