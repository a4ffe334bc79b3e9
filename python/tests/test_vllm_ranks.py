"""Agreement of an engine's ranks, in three processes over gloo, with the loops in which vLLM's executors read responses."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from conftest import PYTHON  # noqa: E402
from vllm_engine import STUB  # noqa: E402

SIZE = 3
WAITS = "s for another rank"
# A rank: calls the worker's methods that its stdin names, as vLLM's WorkerProc does, and answers each call on its stdout.
RANK = """
import json, os, signal, sys
from types import SimpleNamespace
sys.path.insert(0, sys.argv[1])
import torch
import vllm.distributed
from vllm.device_allocator.sleep_mode_backend import CuMemBackend
from vllm.v1.worker.gpu_worker import Worker
rank, size, store, reported = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
group = SimpleNamespace(rank_in_group=rank, world_size=size, cpu_group=torch.distributed.group.WORLD)
vllm.distributed.get_world_group = lambda: group
from vmmfd.engines import _vllm_ranks as ranks
from vmmfd.engines._vllm_sleep import SleepBackend
ranks._PATIENCE = 0.2
ranks.report_once(Worker, reported)
ranks.report_once(Worker, reported)


class Transfer:
    version, prepared, undone, case = 1, None, 0, {}

    def fail(self, step):
        if self.case.pop(step, None) == rank:
            self.prepared = None
            raise RuntimeError("too little memory")
        if self.case.get(f"signal in {step}") == rank:
            os.kill(os.getpid(), self.case["signal"])

    def undo(self):
        self.prepared, self.undone = None, self.undone + 1

    def start_weight_update(self):
        self.prepared = None

    def update_weights(self, info):
        self.case = info
        self.fail("alone")
        newest = ranks.first(lambda: self.fail("first") or 2)
        ranks.together(lambda: self.fail("prepare"), f"prepare version {newest}", self.undo)
        self.prepared = newest

    def finish_weight_update(self):
        ranks.together(lambda: self.fail("switch"), "switch", self.undo)
        self.version = self.prepared or self.version


def suspend(self, level=1):
    if level == rank + 10:
        raise RuntimeError("no memory on the host")


CuMemBackend.suspend = suspend
transfer = Transfer()
worker = Worker(transfer, SleepBackend())
print("ready", flush=True)
for line in sys.stdin:
    call = json.loads(line)
    try:
        getattr(worker, call["method"])(*call["arguments"])
        answer = {"state": [transfer.version, transfer.undone]}
    except Exception as error:
        answer = {"failure": str(error)}
    print(json.dumps({"number": call["number"]} | answer), flush=True)
"""


class Executor:
    """Sends a call to all ranks. Reads the responses in order and stops at the first failure, as vLLM's MultiprocExecutor, from which its
    executor for Ray is derived; or with `alone`, reads all: each process has an executor of its own."""

    def __init__(self, folder: Path, alone: bool) -> None:
        self.alone, self.number = alone, 0
        options = [str(SIZE), str(folder / "store"), str(1 if alone else SIZE)]
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.ranks = [
                subprocess.Popen(
                    [*PYTHON, "-c", textwrap.dedent(RANK), str(STUB), str(rank), *options],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1,
                )
                for rank in range(SIZE)
            ]
        assert [self.read(rank) for rank in self.ranks] == ["ready\n"] * SIZE, self.log.read_text()

    @staticmethod
    def read(rank: Any) -> str:
        ready, _, _ = select.select([rank.stdout], [], [], 60)
        assert ready, "a rank does not answer"
        return str(rank.stdout.readline())

    def send(self, method: str, *arguments: Any) -> None:
        self.number += 1
        for rank in self.ranks:
            rank.stdin.write(json.dumps({"number": self.number, "method": method, "arguments": arguments}) + "\n")

    def answers(self) -> list[Any]:
        found, failures = [], []
        for rank in self.ranks:
            answer = json.loads(self.read(rank))
            assert answer["number"] == self.number, f"the answer of another call: {answer}"
            if "failure" in answer:
                failures.append(answer["failure"])
                if not self.alone:
                    break
            else:
                found.append(answer["state"])
        if failures:
            # All, or the one that was read last.
            assert len(failures) == (SIZE if self.alone else 1)
            raise RuntimeError(failures[-1])
        return found

    def call(self, method: str, *arguments: Any) -> list[Any]:
        self.send(method, *arguments)
        return self.answers()

    def update(self, **case: Any) -> list[Any]:
        self.call("start_weight_update")
        self.call("update_weights", case)
        return self.call("finish_weight_update")

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.communicate()


@pytest.fixture(scope="module", params=[False, True], ids=["reads-in-order", "one-per-process"])
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    executor = Executor(tmp_path_factory.mktemp("ranks"), request.param)
    yield executor
    executor.close()


def works(executor: Executor) -> None:
    """All later calls get their own answers, and an update reaches all ranks."""
    executor.call("sleep")
    executor.call("wake_up")
    assert [version for version, _ in executor.update()] == [2] * SIZE


@pytest.mark.parametrize(
    ("step", "rank", "message", "undone"),
    [
        *(("alone", rank, f"^rank {rank} failed in update_weights: too little memory$", 0) for rank in range(SIZE)),
        ("first", 0, "^rank 0 could not find the version, so no rank changes its weights: too little memory$", 0),
        *(("prepare", rank, f"^rank {rank} could not prepare version 2, so no rank .*: too little memory$", 1) for rank in range(SIZE)),
    ],
)
def test_failed_update_leaves_engine_usable(executor: Executor, step: str, rank: int, message: str, undone: int) -> None:
    before = [count for _, count in executor.call("start_weight_update")]
    with pytest.raises(RuntimeError, match=message):
        executor.call("update_weights", {step: rank})
    after = [count for _, count in executor.call("sleep")]
    assert [new - old for old, new in zip(before, after, strict=True)] == [undone * (each != rank) for each in range(SIZE)]
    works(executor)


def test_failed_switch_leaves_engine_usable(executor: Executor) -> None:
    with pytest.raises(RuntimeError, match="^rank 1 could not switch, so no rank changes its weights: too little memory$"):
        executor.update(switch=1)
    # vLLM continues the session: it must be finished.
    with pytest.raises(RuntimeError, match="^rank 0 failed in start_weight_update: .*already active"):
        executor.call("start_weight_update")
    executor.call("finish_weight_update")
    works(executor)


@pytest.mark.parametrize("rank", range(SIZE))
def test_failed_sleep_leaves_engine_usable(executor: Executor, rank: int) -> None:
    with pytest.raises(RuntimeError, match=f"^rank {rank} could not sleep, .*: no memory on the host$"):
        executor.call("sleep", rank + 10)
    works(executor)


@pytest.mark.parametrize("step", ["alone", "prepare", "switch"])
def test_stopped_rank_is_awaited(executor: Executor, step: str) -> None:
    executor.call("start_weight_update")
    executor.send("update_weights", {f"signal in {step}": 1, "signal": signal.SIGSTOP})
    if step == "switch":
        executor.answers()
        executor.send("finish_weight_update")
    deadline, logged = time.monotonic() + 60, executor.log.read_text().count(WAITS)
    while executor.log.read_text().count(WAITS) == logged:
        assert time.monotonic() < deadline, executor.log.read_text()
        time.sleep(0.05)
    os.kill(executor.ranks[1].pid, signal.SIGCONT)
    executor.answers()
    if step != "switch":
        executor.call("finish_weight_update")
    assert [version for version, _ in executor.call("sleep")] == [2] * SIZE


def test_killed_rank_is_reported(tmp_path: Path) -> None:
    executor = Executor(tmp_path, alone=False)
    try:
        executor.call("start_weight_update")
        executor.send("update_weights", {"signal in prepare": 1, "signal": signal.SIGKILL})
        answers = [executor.read(rank) for rank in executor.ranks]
        assert not answers[1] and "a rank of the engine has ended" in answers[2]
    finally:
        executor.close()
