"""The agent of each node: the Ray actor that offers the objects of its broker to other nodes and pulls theirs."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ._broker import Broker, connect
from ._copies import origin
from ._errors import Disconnected, Error, NotFound, Timeout
from .records import Published

# Ray's namespace of the agents, and the prefix of the transports' names in the broker.
_NAMESPACE = "vmmfd"
_PREFIX = "ray/"
# Pulls of one object, each from another source or from a restarted one.
_TRIES = 3
# Seconds between questions to sources that all serve another reader.
_BUSY = 0.1
# Seconds to wait for an answer at a time, and between looks for offers that nobody reads.
_ANSWER = 3.0
# Seconds that a source may take beyond `stall`.
_GRACE = 4.0
# Seconds for a source's first answer to this node, at least: Ray may be starting its agent.
_START = 30.0

_brokers: dict[str, Broker] = {}
_brokers_lock = threading.Lock()


class _Object(NamedTuple):
    """An object in the broker of `node`. `origin` is the id of the version that it is, or that it is a copy of."""

    name: str
    version: int
    id: str
    origin: str
    node: str


class _Lent(NamedTuple):
    """An offer, the node that reads the object now, the time of the offer, and the reader's `stall`."""

    offer: bytes
    reader: str
    since: float
    stall: float

    def is_young(self) -> bool:
        return time.monotonic() - self.since < self.stall


def _agent(node: str) -> Any:
    # Sources answer while the node's own pulls wait.
    groups = ray.remote(concurrency_groups={"source": 4, "pull": 16})
    return groups(Agent).options(
        name=f"agent-{node}",
        namespace=_NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        max_restarts=-1,
        max_task_retries=_TRIES,
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    ).remote()


class _Pulling:
    """The pulls of one object to this node, one at a time, and the last failure: its time, the pull's arguments, and the error."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.failed: tuple[float, tuple[Any, ...], Error] | None = None


class Agent:
    """The actor of a node that offers its broker's objects to other nodes and pulls theirs. It owns leases and no memory: Ray restarts it
    at any time. Internal, except `pulled`."""

    def __init__(self) -> None:
        from .nodes import Node

        self._here = ray.get_runtime_context().get_node_id()
        self._broker = _broker()
        self._wire = Node(self._broker, self._here)
        self._lock = threading.Lock()
        # By origin.
        self._lent: dict[str, _Lent] = {}
        self._pulls: dict[str, _Pulling] = {}
        # The nodes whose agents have answered this one.
        self._heard: set[str] = set()
        self._done: deque[dict[str, Any]] = deque(maxlen=1000)
        threading.Thread(target=self._end_unread, daemon=True).start()

    def pulled(self) -> list[dict[str, Any]]:
        """Returns the last 1000 transfers to this node: the object's `name` and `origin` id, its `source` node,
        the `seconds`, and whether a digest was `checked`."""
        return list(self._done)

    def find(self, name: str, version: int | None) -> _Object | None:
        return _named(self._broker, name, version, self._here)

    def has(self, wanted: _Object) -> str | None:
        return self._here if _copy(self._broker, wanted) else None

    def pulling(self) -> list[str]:
        """Returns the origins of the objects that are being pulled."""
        return [origin for origin, each in list(self._pulls.items()) if each.lock.locked()]

    def offer(self, wanted: _Object, reader: str, stall: float) -> bytes | bool | Error:
        """Returns the offer, False while another node reads the object, True if this node does not have it, or the error."""
        own = _copy(self._broker, wanted)
        if own is None:
            return True
        with self._lock:
            lent = self._lent.get(wanted.origin)
            # The agent of the reader may have died, and its successor does not report the pull.
            if lent and lent.reader != reader and (lent.is_young() or wanted.origin in _pulled_by([lent.reader])):
                return False
            if lent:
                del self._lent[wanted.origin]
                self._wire.withdraw(lent.offer)
            try:
                offer = self._wire.offer(own.name, own.version)
            except NotFound:
                return True
            except Error as error:
                return error
            self._lent[wanted.origin] = _Lent(offer, reader, time.monotonic(), stall)
            return offer

    def end(self, origin: str, offer: bytes) -> None:
        with self._lock:
            if origin in self._lent and self._lent[origin].offer == offer:
                del self._lent[origin]
        self._wire.withdraw(offer)

    def _end_unread(self) -> None:
        """Ends the offers of readers that are gone: an offer keeps the object, and its thread uses a processor."""
        while True:
            time.sleep(_ANSWER)
            with self._lock:
                offers = {origin: lent for origin, lent in self._lent.items() if not lent.is_young()}
            # Ray's control store may be restarting.
            with suppress(Exception):
                limit = max((_ANSWER, *(lent.stall for lent in offers.values())))
                pulled = _pulled_by({lent.reader for lent in offers.values()}, limit)
                for origin in offers.keys() - pulled:
                    self.end(origin, offers[origin].offer)

    def pull(
        self,
        wanted: _Object,
        name: str,
        limit: float,
        stall: float,
        waited: float = 0.0,
        device: str | None = None,
        lifetime: float | None = None,
    ) -> Published:
        """Pulls the object under `name`, unless this node has it there. A caller that has `waited` for a pull that failed gets its error:
        callers that all try again would wait for each other."""
        now = time.monotonic()
        asked, deadline = now - waited, now + limit
        while True:
            with self._lock:
                pulling = self._pulls.setdefault(wanted.origin, _Pulling())
            # Another call may be pulling it.
            if not pulling.lock.acquire(timeout=max(deadline - time.monotonic(), 0)):
                raise Timeout(f"{wanted.name!r} is still being pulled after {limit:g} s: give a longer deadline", kind="peer")
            # A call that waited for a pull that succeeded has a lock that no other call sees.
            if self._pulls.get(wanted.origin) is pulling:
                break
            pulling.lock.release()
        try:
            own = _copy(self._broker, wanted, name)
            if own is not None:
                published = Published(name=own.name, version=own.version, id=own.id, copied=0, recall=None)
            else:
                what = name, stall, device
                if pulling.failed is not None and pulling.failed[0] > asked and pulling.failed[1] == what:
                    raise _again(pulling.failed[2])
                try:
                    published = self._pull(wanted, name, deadline, stall, device=device, lifetime=lifetime)
                except Error as error:
                    # Another caller may have a later deadline.
                    if time.monotonic() < deadline:
                        pulling.failed = time.monotonic(), what, _again(error)
                    raise
            with self._lock:
                del self._pulls[wanted.origin]
            return published
        finally:
            pulling.lock.release()

    def _pull(self, wanted: _Object, name: str, deadline: float, stall: float, **options: Any) -> Published:
        failed: list[str] = []
        error: Error = NotFound(f"no node has {wanted.name!r} of node {wanted.node} any more: put it again", kind="object")
        search = _Search(wanted, self._here, stall, self._heard)
        while len(failed) < _TRIES:
            source, offer = search.choose()
            began = time.monotonic()
            left = deadline - began
            if offer is True:
                break
            if offer is False:
                if left < 0:
                    raise Timeout(f"the nodes that have {wanted.name!r} still serve others: give a longer deadline", kind="peer")
                time.sleep(_BUSY)
                continue
            if offer is None:
                # Ray's own errors arrive at once.
                time.sleep(_BUSY)
                search.silent[source] += _BUSY
                if search.left(source) <= 0 or left < 0:
                    search.excluded.add(source)
                    error = Disconnected(f"its agent did not answer in {search.silent[source]:.0f} s", kind="peer")
                    failed.append(f"from node {source}: {error}")
                continue
            try:
                if isinstance(offer, Error):
                    raise offer
                patience = min(stall, max(search.left(source), 1.0))
                pulled = self._wire.pull(offer, name=name, deadline=max(left, 0.1), stall=patience, replace=True, **options)
            except (Timeout, Disconnected) as why:
                error = why
                failed.append(f"from node {source}: {why}")
                search.forget_answers()
                if isinstance(why, Timeout):
                    search.excluded.add(source)
                    # A peer that died can block NIXL in the source's process, which owns nothing.
                    ray.kill(_agent(source), no_restart=False)
            else:
                seconds = time.monotonic() - began
                done = {"name": name, "origin": wanted.origin, "source": source, "seconds": seconds, "checked": pulled.checked}
                self._done.append(done)
                return Published(name=name, version=pulled.version, id=pulled.id, copied=0, recall=None)
            finally:
                if isinstance(offer, bytes):
                    _agent(source).end.options(concurrency_group="source").remote(wanted.origin, offer)
        if not failed:
            raise error
        raise type(error)(f"{wanted.name!r} was not pulled: {'; '.join(failed)}", kind="peer", hint=error.hint) from error


class _Search:
    """The search for a source of one pull. Nodes in `excluded` are not asked. `silent` has the seconds before answers, by source.

    `heard` are the nodes whose agents have answered any pull. Other agents may be starting: they may take longer for the first answer, and
    that time is not counted."""

    def __init__(self, wanted: _Object, here: str, stall: float, heard: set[str]) -> None:
        self._wanted, self._here, self._stall = wanted, here, stall
        self._heard_by_all, self._heard = heard, set(heard)
        self.excluded = {here}
        self.silent: defaultdict[str, float] = defaultdict(float)
        # The calls that wait for an answer, by node.
        self._offers: dict[str, Any] = {}
        self._has: dict[str, Any] = {}

    def left(self, source: str) -> float:
        """The seconds that a source may still take, without an answer and without progress."""
        limit = self._stall + _GRACE
        return (limit if source in self._heard else max(_START, limit)) - self.silent[source]

    def choose(self) -> tuple[str, bytes | bool | Error | None]:
        """Returns a node and its offer. Without an offer: False if a node serves another reader now, its error, None if it does not answer,
        True if no other node has the object. Adds the time to that of each source that has not answered."""
        began = time.monotonic()
        source, offer = self._ask_sources()
        for node in {*self._offers, source} if offer is not False else self._offers:
            self.silent[node] += time.monotonic() - began
        return source, offer

    def _ask_sources(self) -> tuple[str, bytes | bool | Error | None]:
        wanted = self._wanted
        alive = {*_alive()} - self.excluded
        with_agents = {each["name"].removeprefix("agent-") for each in list_named_actors(True) if each["namespace"] == _NAMESPACE}
        # Agents that were stopped start again when they are asked.
        self._heard &= with_agents
        self._heard_by_all &= with_agents
        chosen: tuple[str, bytes | bool | Error | None] = (wanted.node, True)
        limit = min(_ANSWER, max(self.left(wanted.node), _BUSY))
        # The other nodes are asked only if the object's own node can't serve.
        for ask_others in (False, True):
            others = sorted(alive & with_agents - {wanted.node})
            for node in _ask(others, "has", wanted, limit=limit, waiting=self._has) if ask_others else alive & {wanted.node}:
                if node is None:
                    continue
                limit = min(_ANSWER, max(self.left(node), _BUSY))
                offer = next(iter(_ask([node], "offer", wanted, self._here, self._stall, limit=limit, waiting=self._offers)), None)
                if offer is not None and node not in self._heard:
                    self._heard.add(node)
                    self._heard_by_all.add(node)
                    self.silent[node] = 0.0
                if isinstance(offer, bytes):
                    return node, offer
                if chosen[1] is not False and offer is not True:
                    chosen = node, offer
        return chosen

    def forget_answers(self) -> None:
        """Drops answers that arrived during a transfer: they may no longer be true."""
        for calls in (self._offers, self._has):
            for node, call in list(calls.items()):
                if ray.wait([call], timeout=0)[0]:
                    del calls[node]


def _alive() -> list[str]:
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]


def _again(error: Error) -> Error:
    """Returns the error without its traceback, whose frames have memory."""
    return type(error)(str(error), kind=error.kind, hint=error.hint)


def _broker(backend: str = "auto") -> Broker:
    with _brokers_lock:
        if backend not in _brokers or _brokers[backend].is_closed:
            _brokers[backend] = connect(backend=backend)
        return _brokers[backend]


def _named(broker: Broker, name: str, version: int | None, node: str) -> _Object | None:
    try:
        stat = broker.stat(name, version)
    except NotFound:
        return None
    id = stat.summary.id
    return _Object(name, stat.summary.version, id, (origin(stat.metadata) or {"id": id})["id"], node)


def _copy(broker: Broker, wanted: _Object, name: str | None = None) -> _Object | None:
    """Returns this broker's object with the wanted bytes, under `name` only if it is given."""
    for each in (wanted.name, _PREFIX + wanted.origin) if name is None else (name,):
        found = _named(broker, each, None, wanted.node)
        if found is not None and found.origin != wanted.origin and each == wanted.name and found.version != wanted.version:
            # An older version, of this broker or another.
            found = _named(broker, each, wanted.version, wanted.node)
        if found is not None and found.origin == wanted.origin:
            return found
    return None


def _ask(nodes: Iterable[str], method: str, *arguments: Any, limit: float = _ANSWER, waiting: dict[str, Any] | None = None) -> list[Any]:
    """Calls a method of the nodes' agents at once, and returns the answers that arrive in time. `waiting` keeps the other calls, by node:
    the next question waits for them and makes no other."""
    waiting = {} if waiting is None else waiting
    calls = {}
    for node in nodes:
        call = waiting.pop(node, None)
        if call is None:
            call = getattr(_agent(node), method).options(concurrency_group="source").remote(*arguments)
        calls[call] = node
    done, rest = ray.wait(list(calls), num_returns=len(calls), timeout=limit) if calls else ([], [])
    waiting.update((calls[call], call) for call in rest)
    answers = []
    for call in done:
        with suppress(RayError):
            answers.append(ray.get(call))
    return answers


def _pulled_by(nodes: Iterable[str], limit: float = _ANSWER) -> set[str]:
    """Returns the origins of the objects that nodes pull now, as far as they answer."""
    return {origin for origins in _ask(nodes, "pulling", limit=limit) for origin in origins}


def _answer(call: Any, wanted: _Object, limit: float, grace: float = 0.0) -> Published:
    """Waits for an agent's pull. Raises the agent's error without Ray's wrapper."""
    try:
        published: Published = ray.get(call, timeout=limit + grace)
    except RayTaskError as error:
        raise error.cause from None
    except GetTimeoutError:
        raise Timeout(f"{wanted.name!r} was not pulled within {limit:g} s: give a longer deadline or pull it by name", kind="peer") from None
    except RayError as error:
        raise Disconnected(f"the agent that pulls {wanted.name!r} failed: {error}", kind="peer") from error
    return published


