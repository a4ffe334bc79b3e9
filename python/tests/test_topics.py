"""Topics: a broker introduces publishers and followers, between processes."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import LIMIT, Child, Server, interrupted

import vmmfd

Start = Callable[..., Child]

PUBLISH = """
    import sys
    import vmmfd

    with vmmfd.connect(sys.argv[1], backend="host") as broker:
        publisher = vmmfd.publish(topic=sys.argv[2], broker=broker, size=64, count=8, history=4)
    publisher.set_format({"x": ("int32", (4,))})

    def publish(value):
        with publisher.loan() as loan:
            loan["x"].fill(value)
            loan.publish(b"%d" % value)

    publish(1)
    print("ready", flush=True)
    sys.stdin.readline()
"""


def publish(broker: vmmfd.Broker, topic: str, **options: Any) -> vmmfd.Publisher:
    return vmmfd.publish(topic=topic, broker=broker, size=64, count=16, history=4, **options)


def following(follower: vmmfd.TopicFollower, *kinds: str) -> list[vmmfd.Update]:
    """Receives updates of exactly these kinds."""
    updates = [follower.receive(LIMIT) for _ in kinds]
    assert [update.kind for update in updates] == list(kinds)
    return updates


def wait_for_end(broker: vmmfd.Broker, topic: str) -> None:
    """The broker learns of the end of a publisher a moment later."""
    deadline = time.monotonic() + LIMIT
    while broker.who(topic).topics:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_follower_outlives_publishers(socket: str, broker: vmmfd.Broker, name: str, child: Start) -> None:
    with broker.follow_topics(name, history=1) as follower:
        assert follower.try_receive() is None and follower.topics() == []
        first = child(PUBLISH, socket, name)
        joined, sampled = following(follower, "joined", "sample")
        assert (joined.topic, joined.sample, joined.peer, joined.error) == (name, None, None, None)
        with sampled:
            assert sampled.sample is not None and sampled.sample["x"].tolist() == [1] * 4
        assert sampled.sample.is_closed and sampled.sample.user == b"1"
        (topic,) = broker.who(name).topics
        assert (topic.name, topic.epoch, topic.pid, topic.followers) == (name, joined.epoch, first.pid, 1)
        assert follower.topics() == [name]
        first.wait_for()
        first.signal(signal.SIGKILL)
        (crashed,) = following(follower, "crashed")
        assert crashed.peer is not None and crashed.peer.pid == first.pid and crashed.epoch == joined.epoch
        wait_for_end(broker, name)
        second = child(PUBLISH + "    publisher.finish()\n", socket, name)
        reset, sampled = following(follower, "reset", "sample")
        assert reset.epoch == sampled.epoch != joined.epoch
        sampled.close()
        second.send_line()
        following(follower, "ended")
        second.end()
        assert follower.topics() == [] and follower.try_receive() is None


@pytest.mark.parametrize("on", ["host", pytest.param("cuda", marks=pytest.mark.fake)])
def test_prefix_joins_many_topics(broker: vmmfd.Broker, name: str, on: str) -> None:
    publishers = [publish(broker, f"{name}/{number}", backend=on) for number in range(3)]
    publishers[0].open_topic(broker, f"{name}/also")
    values: dict[str, bytes] = {}
    with broker.follow_topics(prefix=f"{name}/", backend=on) as follower:
        following(follower, *["joined"] * 4)
        for number, publisher in enumerate(publishers):
            publisher.loan().publish(b"%d" % number)
        for update in follower:
            assert update.sample is not None
            values[update.topic] = update.sample.user
            if len(values) == 4:
                break
        assert values == {f"{name}/also": b"0", **{f"{name}/{number}": b"%d" % number for number in range(3)}}
        assert sorted(follower.topics()) == sorted(values)
    for publisher in publishers:
        publisher.close()


def test_streams_outlive_the_broker(server: Server) -> None:
    with vmmfd.connect(server.path, backend="host") as broker:
        publisher, follower = publish(broker, "a/first"), broker.follow_topics(prefix="a/", held=1)
    following(follower, "joined")
    server.kill()
    publisher.loan().publish(b"without a broker")
    (sampled,) = following(follower, "sample")
    assert sampled.sample is not None and sampled.sample.user == b"without a broker"
    sampled.close()
    server.start()
    with vmmfd.connect(server.path, backend="host", wait=LIMIT) as broker:
        other = publish(broker, "a/second")
        (joined,) = following(follower, "joined")
        assert joined.topic == "a/second"
        other.finish(0)
        following(follower, "ended")
    follower.close()
    publisher.close()


def test_one_publisher_has_a_topic(broker: vmmfd.Broker, name: str, tmp_path: Path) -> None:
    # Also with a path.
    with publish(broker, name, path=str(tmp_path / "stream")) as first:
        vmmfd.subscribe(str(tmp_path / "stream"), wait=LIMIT, backend="host").close()
        with pytest.raises(vmmfd.AlreadyExists, match=name):
            publish(broker, name)
        with vmmfd.publish(tmp_path / "other", size=64, count=8, backend="host") as second:
            with pytest.raises(vmmfd.AlreadyExists):
                second.open_topic(broker, name)
            first.finish(0)
            wait_for_end(broker, name)
            second.open_topic(broker, name, mode=0o644)


def test_failed_updates_have_the_error(broker: vmmfd.Broker, name: str) -> None:
    with publish(broker, name), broker.follow_topics(name, policy="every") as follower:
        (failed,) = following(follower, "failed")
        assert type(failed.error) is vmmfd.PermissionDenied and "`every` is not allowed here" in str(failed.error)
        assert repr(failed) == f"<vmmfd.Update {name}: failed>" and failed.sample is None


def test_interrupts_lose_no_update(broker: vmmfd.Broker, name: str) -> None:
    publisher, numbers = publish(broker, name, every=LIMIT), []
    with broker.follow_topics(name, policy="every") as follower:
        following(follower, "joined")
        for number in range(100):
            publisher.loan().publish()
            update = interrupted(lambda: follower.receive(LIMIT), after=1e-4 + 2e-6 * number) or follower.receive(LIMIT)
            assert update.sample is not None
            numbers.append(update.sample.number)
            update.close()
    assert numbers == list(range(1, 101))
    publisher.close()


def test_close_ends_waits(broker: vmmfd.Broker, name: str) -> None:
    follower = broker.follow_topics(name)
    with pytest.raises(vmmfd.Timeout, match="no update arrived within 0 seconds"):
        follower.receive(0)
    updates: list[vmmfd.Update] = []
    thread = threading.Thread(target=lambda: updates.extend(follower))
    thread.start()
    follower.close()
    thread.join()
    assert updates == [] and follower.is_closed
    with pytest.raises(vmmfd.Invalid, match="the follower is closed"):
        follower.topics()


def test_tasks_follow_a_topic(broker: vmmfd.Broker, name: str) -> None:
    async def main() -> list[str]:
        kinds = []
        async with broker.follow_topics(name, history=1) as follower:
            asyncio.get_running_loop().call_later(0.01, lambda: publishers.append(publish(broker, name)))
            async for update in follower:
                kinds.append(update.kind)
                if update.kind == "joined":
                    publishers[0].loan().publish()
                elif update.kind == "sample":
                    publishers[0].close()
                else:
                    return kinds
        raise AssertionError

    publishers: list[vmmfd.Publisher] = []
    assert asyncio.run(main()) == ["joined", "sample", "crashed"]


def test_forks_are_refused(socket: str, name: str, child: Start) -> None:
    child(
        PUBLISH.replace("print", "0 and print").replace("sys.stdin.readline()", "")
        + """
    import os, warnings

    # Python warns of forks beside threads.
    warnings.simplefilter("ignore", DeprecationWarning)
    broker = vmmfd.connect(sys.argv[1], backend="host")
    follower = broker.follow_topics(sys.argv[2], history=1)
    kinds = [follower.receive().kind]
    pid = os.fork()
    if pid == 0:
        for use in (follower.receive, follower.try_receive, follower.topics, lambda: publisher.open_topic(broker, "other")):
            try:
                use()
            except vmmfd.Invalid as error:
                assert "is a fork of process" in str(error), error
            else:
                raise AssertionError(use)
        follower.close()
        publisher.close()
        del follower, publisher
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    kinds.append(follower.receive().kind)
    assert kinds == ["joined", "sample"], kinds
    # The process ends with the follower and the publisher open.
""",
        socket,
        name,
    ).end()


def test_wrong_arguments(broker: vmmfd.Broker, name: str) -> None:
    wrong: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: vmmfd.publish(topic=name, size=64, count=8), vmmfd.Invalid, "give topic and broker together"),
        (lambda: vmmfd.publish(broker=broker, size=64, count=8), vmmfd.Invalid, "give topic and broker together"),
        (lambda: vmmfd.publish("/x", mode=0o644, size=64, count=8), vmmfd.Invalid, "give topic and broker together"),
        (lambda: publish(broker, "/no"), vmmfd.Invalid, "/no"),
        (lambda: publish(broker, name, mode=0o700), vmmfd.Invalid, "mode=0o700 has bits other than read and write"),
        (lambda: publish(broker, name)._native.open_topic(broker._native, "other", 0o777), vmmfd.Invalid, "mode"),
        (lambda: publish(broker, 7), TypeError, "7 has type int: give a str"),
        (lambda: publish("broker", name), TypeError, "broker='broker' has type str: give a Broker"),
        (lambda: broker.follow_topics(), vmmfd.Invalid, "give name or prefix"),
        (lambda: broker.follow_topics(name, prefix=name), vmmfd.Invalid, "give name or prefix"),
        (lambda: broker.follow_topics("/no"), vmmfd.Invalid, "/no"),
        (lambda: broker.follow_topics(7), TypeError, "7 has type int: give a str"),
        (lambda: broker.follow_topics(name, held=0), vmmfd.Invalid, "a subscriber holds 1 to [0-9]+ buffers, not 0"),
        (lambda: broker.follow_topics(name, policy="all"), vmmfd.Invalid, "policy='all' is not"),
        (lambda: broker.follow_topics(name, backend="gpu"), vmmfd.Invalid, "is not one of auto, cuda, host"),
    ]
    for call, kind, sentence in wrong:
        with pytest.raises(kind, match=sentence) as caught:
            call()
        assert type(caught.value) is kind and "\n" not in str(caught.value)
    broker.close()
    with pytest.raises(vmmfd.Error, match="closed"):
        broker.follow_topics(name)
