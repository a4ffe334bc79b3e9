"""A source that stops while a third node has the object: the pull goes on with that node."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import needs_nixl

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray==2.60.0")
np = pytest.importorskip("numpy")

import vmmfd._ray_agent as ray_agent  # noqa: E402
import vmmfd.ray  # noqa: E402

from ray_rig import MIB, STALL, Rig, get  # noqa: E402

SIZE = 512 * MIB


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path, places="abc", readers=0)
    try:
        yield rig
    finally:
        rig.close()


@needs_nixl
def test_other_node_replaces_stopped_source(rig: Rig) -> None:
    made = rig.brokers[0].put("weights", {"x": np.full(SIZE, 3, "u1")})
    a, b, c = (rig.ids[place] for place in "abc")
    vmmfd.ray.pull("weights", [b])
    reader = rig.actor("c")
    get(reader.nothing.remote())
    stopped = rig.pid("a")
    # Starts the third agent.
    assert rig.pulled("c") == []
    pull = vmmfd.ray.agents([c])[c].pull.options(concurrency_group="pull")
    call = pull.remote(ray_agent._Object("weights", 1, made.id, made.id, a), "weights", 60.0, STALL)
    while not any(ray_agent._ask([c], "is_pulling", made.id)):
        assert not ray.wait([call], timeout=0)[0], "it was pulled before the stop"
    os.kill(stopped, signal.SIGSTOP)
    try:
        began = time.monotonic()
        get(call)
        took = time.monotonic() - began
    finally:
        os.kill(stopped, signal.SIGCONT)
    (transfer,) = rig.pulled("c")
    assert transfer["source"] == b and transfer["origin"] == made.id and transfer["checked"] is False
    # The stop may come before the source's answer, after which another node is asked.
    assert ray_agent._ANSWER - 1 < took < STALL + 5, took
    assert get(reader.total.remote("weights")) == 3 * SIZE
    # The node whose agent was stopped is a source again.
    new = rig.brokers[0].put("weights", {"x": np.full(MIB, 4, "u1")}, replace=True)
    assert vmmfd.ray.pull("weights", [c], stall=STALL)[c].version == 2
    assert [(each["source"], each["origin"]) for each in rig.pulled("c")[1:]] == [(a, new.id)]
