"""New versions and sleep of a served model, with PyTorch on the host backend and a stand-in for vLLM; agreement of ranks over gloo."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vmmfd

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from conftest import PYTHON  # noqa: E402
from torch_models import is_mapped  # noqa: E402
from vllm_engine import STUB, configure  # noqa: E402
from vllm_models import Model, describe, load, tensors  # noqa: E402
from vmmfd.engines import _vllm_live, _vllm_loader  # noqa: E402
from vmmfd.engines import vllm as engine  # noqa: E402
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
    assert {lease.version for lease in broker.who(object_of(name)).leases} == {2}


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
    assert {lease.version for lease in broker.who(object_of(name)).leases} == {1}


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
    with pytest.raises(vmmfd.Differs):
        update(started)
    with engine.next_version(broker, of, version=1) as version:
        recorded = version._metadata["vllm"]
        recorded["backends"] = {"other": 1}
        version.put(replace_version=2)
    with pytest.raises(vmmfd.Differs, match=r"version 3 .* not made from the engine's version 1 \(different: backends\)"):
        update(started)
    assert describe(started.model) == before


def test_only_updating_engines_take_updates(start: Callable[..., Any], broker: vmmfd.Broker, name: str) -> None:
    start()
    train(broker, name, 1.0)
    with pytest.raises(vmmfd.Differs, match="a trainer has changed them, and this engine was started without --weight-transfer-config"):
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
    with pytest.raises(vmmfd.Differs, match="not published by load format vmmfd"):
        engine.next_version(broker, f"{name}/plain")


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
    with pytest.raises(vmmfd.Differs):
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


RANKS = """
import datetime, os, signal, sys
from types import SimpleNamespace
sys.path.insert(0, sys.argv[1])
import torch
import vllm.distributed
rank, store, case = int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
group = SimpleNamespace(rank_in_group=rank, world_size=2, cpu_group=torch.distributed.group.WORLD)
vllm.distributed.get_world_group = lambda: group
from vmmfd.engines import _vllm_ranks as ranks
ranks._PATIENCE = datetime.timedelta(seconds=3)
undone = []

def work():
    if case == "fails" and rank == 1:
        raise ValueError("too little memory")
    if case == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "stopped" and rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return rank

try:
    print(rank, ranks.first(lambda: 5 + rank), ranks.together(work, "switch", lambda: undone.append(1)), undone)
except Exception as error:
    print(rank, type(error).__name__, str(error).splitlines()[0], undone)
"""


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("works", ["0 5 0 []", "1 5 1 []"]),
        ("fails", ["0 Error rank 1 could not switch, so no rank changes its weights: too little memory [1]", "1 ValueError too little memory []"]),
        ("killed", ["0 Error a rank of the engine does not answer, so no rank changes its weights: ", ""]),
        ("stopped", ["0 Error a rank of the engine does not answer, so no rank changes its weights: ", ""]),
    ],
)
def test_ranks_agree(tmp_path: Path, case: str, expected: list[str]) -> None:
    command = [*PYTHON, "-c", textwrap.dedent(RANKS), str(STUB)]
    running = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store"), case], stdout=subprocess.PIPE, text=True) for rank in range(2)
    ]
    try:
        for rank, process in enumerate(running):
            if case == "stopped" and rank == 1:
                process.kill()
            output = process.communicate(timeout=60)[0].strip()
            assert output.startswith(expected[rank]) and (not expected[rank]) == (not output), output
            assert case in ("works", "fails") or rank == 1 or output.endswith("[1]")
    finally:
        for process in running:
            process.kill()
            process.wait()
