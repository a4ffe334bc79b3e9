"""Objects of other machines: NIXL carries their memory into this machine's broker.

Needs the extra `vmmfd[nixl]`, which is imported by the first `Node`. **Any process with the bytes of an offer can read the object, and NIXL
over TCP checks no key**: send offers as secrets, and use a private network only.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from time import monotonic, sleep

from . import _arguments, _native
from . import _types as t
from ._broker import Broker
from ._closing import Closing
from ._copies import FORMAT, KINDS, Copy, Offer, Piece, Segment, Value, layouts, origin
from ._errors import AlreadyExists, Disconnected, Error, Invalid, NotFound, Timeout, Unsupported
from ._lease import Lease
from .records import Record

__all__ = ["Node", "Pulled"]

# Several reads hide the time between pieces.
_IN_FLIGHT = 4


class Pulled(Record):
    """The result of `Node.pull`: the object's `name`, `version` and version's UUID `id` in this machine's broker; its `origin`, a dict of
    the `id`, `version` and `node` that it came from; and `checked`, whether the maker's digest was compared for all parts. It is False if
    the maker gave no BLAKE3 digest."""

    name: str
    version: int
    id: str
    origin: dict[str, t.Any]
    checked: bool


class Node(Closing):
    """A machine's side of transfers: offers objects of its broker, and pulls offered objects into its broker. A context manager that closes
    it.

    `name` identifies the machine in the origin of its objects: by default its host name. The broker client stays the caller's.

    Use a process that does nothing else. Over TCP, UCX ends the process of a source (`abort`) if a reader went away while the source was
    stopped or cut off: its offers and leases then end. Thread-safe. In a fork, create another.

    Raises `Unsupported` if NIXL is not installed or has no UCX.
    """

    def __init__(self, broker: Broker, name: str | None = None) -> None:
        import socket

        self._broker = broker
        self.name: str = socket.gethostname() if name is None else _arguments.text(name, "name")
        self._lock = threading.Lock()
        self._closed = False
        # Without a transfer or a registration.
        self._readers = [_Agent(progress=False)]
        self._offers: dict[bytes, tuple[_Agent, Lease]] = {}

    def offer(self, name: str, version: int | None = None) -> bytes:
        """Leases an object and registers its memory, each segment once, for reads by other machines. Returns the bytes that `pull` needs.

        The object remains readable until `withdraw`, `close` or the end of this process. Each offer has its own port, and a thread of NIXL
        that polls and uses about one processor: withdraw it soon. Blocks for the broker and the registration.

        Raises as `Broker.get`; `Error` if NIXL can't register the memory; `Invalid` if the node is closed, or if the object's metadata has
        a key `origin` that is not a copy's: pulls would overwrite it.
        """
        import json
        from base64 import b64encode

        lease = self._broker.get(name, version=version)
        agent = None
        # Each offer needs its own agent: over TCP, a read of unmapped memory kills this process, and only closing the agent prevents reads.
        try:
            made = self._origin(name, lease)
            agent = _Agent(progress=True)
            parts, keys = [], []
            for part in layouts(lease):
                _warn_of_tcp(part["backend"])
                registered = agent.register(part["backend"], part["segments"], part["device"])
                keys.append(b64encode(agent.metadata(registered)).decode())
                parts.append(part)
            about = {"name": name, "node": self.name, "origin": made, "metadata": lease.metadata}
            offer = json.dumps({"vmmfd": FORMAT, **about, "parts": parts, "nixl": keys}).encode()
            with self._lock:
                self._check_open()
                self._offers[offer] = (agent, lease)
            return offer
        except BaseException:
            _end(agent, lease)
            raise

    def withdraw(self, offer: bytes) -> None:
        """Ends an offer: its registrations and its lease. A pull of it in progress fails. Does nothing if it is not an offer of this node,
        or withdrawn. Raises nothing."""
        with self._lock:
            found = self._offers.pop(offer, None)
        if found:
            _end(*found)

    def pull(
        self,
        offer: bytes,
        *,
        name: str | None = None,
        device: t.DeviceName | None = None,
        deadline: t.Time = 600,
        stall: t.Time = 10,
        replace: bool = False,
        replace_version: int | None = None,
        mode: int | None = None,
        lifetime: t.Literal["deleted", "maker", "leased"] | t.Time | None = None,
        keep: int | None = None,
    ) -> Pulled:
        """Reads an offered object into new memory, compares it with the maker's digest, and puts it into this machine's broker.

        The memory is private until the put: the object appears whole or not at all. It has the segments, arrays, attributes and digests of
        the original, and its metadata, where `origin` holds the original's `id`, `version` and `node`. `name` is the original's by default;
        `device` has the memory, if it is on a GPU. The other options are as for `Broker.put`.

        Blocks until the object is put: at most `deadline` seconds for the transfer, and `stall` seconds without a finished piece of 64 MiB,
        of which four are read at a time. Several threads can pull at once. NIXL reports nothing about a source that is stopped or cut off,
        so `stall` is the time after which the pull gives up. After an error this process holds no memory, name or registration of the pull.

        Raises `Timeout` for both limits; `Disconnected` if the source is gone or has withdrawn the offer; `MismatchError` if the bytes do
        not have the maker's digest; `AlreadyExists` if the name is taken; `Unsupported` if this machine can't allocate segments of these
        sizes; `Invalid` for bytes that are no offer and for limits of 0 or less; and as `Broker.put`.
        """
        ends, stall = monotonic() + _arguments.limit(deadline, "deadline"), _arguments.limit(stall, "stall")
        parsed = Offer(offer)
        name = parsed.name if name is None else name
        if replace is False and replace_version is None:
            self._check_free(name)
        copies: list[Copy] = []
        try:
            for part in parsed.parts:
                _warn_of_tcp(part["backend"])
                copies.append(Copy(part, device))
            self._read(parsed, copies, ends, stall)
            checked = [copy.finish(name) for copy in copies]
            published = self._broker.put(
                name,
                Value(copies),
                metadata={**parsed.metadata, "origin": parsed.origin},
                replace=replace,
                replace_version=replace_version,
                mode=mode,
                lifetime=lifetime,
                keep=keep,
            )
        finally:
            # Not by the frames of an exception that the caller keeps.
            for copy in copies:
                copy.memories.clear()
        return Pulled(name=name, version=published.version, id=published.id, origin=parsed.origin, checked=all(checked))

    def close(self) -> None:
        """Withdraws all offers. Pulls of them that are in progress fail. Closing twice does nothing. The broker client remains open."""
        with self._lock:
            self._closed = True
            offers, readers = list(self._offers.values()), self._readers[:]
            self._offers.clear()
            self._readers.clear()
        for offer in offers:
            _end(*offer)
        for reader in readers:
            reader.close()

    def __repr__(self) -> str:
        return f"<vmmfd.nodes.Node: {self.name}, {'closed' if self._closed else f'{len(self._offers)} offers'}>"

    def _check_open(self) -> None:
        if self._closed:
            raise Invalid("the node is closed: create another")

    def _origin(self, name: str, lease: Lease) -> dict[str, t.Any]:
        found = origin(lease.metadata)
        if found is None and "origin" in lease.metadata:
            raise Invalid(
                f"{name!r} has metadata['origin']={lease.metadata['origin']!r:.80}, where a pull writes the id, version and node of the first "
                "maker's object: put it with another key"
            )
        return found or {"id": lease.id, "version": lease.version, "node": self.name}

    def _check_free(self, name: str) -> None:
        """Raises `AlreadyExists` before the transfer. The put has the final say."""
        try:
            self._broker.stat(name)
        except NotFound:
            return
        raise AlreadyExists(f"{name!r} exists: give another name, or replace=True to add a version", kind="object")

    def _read(self, offer: Offer, copies: list[Copy], ends: float, stall: float) -> None:
        with self._lock:
            self._check_open()
            reader = self._readers.pop() if self._readers else None
        reader = reader or _Agent(progress=False)
        try:
            reader.read(offer, copies, ends, stall)
        except BaseException as error:
            # The end of the agent stops reads in flight, which would write to memory that is freed next. The exception's frames may have
            # references to the agent.
            import traceback

            linked: BaseException | None = error
            while linked is not None:
                traceback.clear_frames(linked.__traceback__)
                linked = linked.__cause__ or linked.__context__
            reader.close()
            raise
        with self._lock:
            if not self._closed:
                self._readers.append(reader)


class _Agent:
    """A NIXL agent. All calls to NIXL are here. Not thread-safe.

    With `progress`, a thread of NIXL answers other agents' reads. It never sleeps. Reads of this agent progress when their state is
    checked.
    """

    def __init__(self, *, progress: bool) -> None:
        import uuid

        nixl = _import_nixl()
        agent = nixl.nixl_agent(uuid.uuid4().hex, nixl.nixl_agent_config(enable_prog_thread=progress, backends=["UCX"]))
        if "UCX" not in agent.backends:
            raise Unsupported(f"NIXL has no UCX plug-in, only {', '.join(agent.get_plugin_list())}: install nixl from PyPI")
        self._agent = agent

    def register(self, backend: str, segments: list[Segment], device: int) -> t.Any:
        """Registers each segment by itself: UCX sees only the first allocation of a registration."""
        if backend == "cuda":
            _native.activate(device)
        described = [(address, size, device, "") for address, size in segments]
        try:
            return self._agent.register_memory(described, KINDS[backend], backends=["UCX"])
        except Exception as error:
            raise Error(f"NIXL can't register {len(segments)} segments of {backend} memory: {error}", kind="system") from error

    def metadata(self, registration: t.Any) -> bytes:
        """Returns the address of this process and the keys of these segments only."""
        return bytes(self._agent.get_partial_agent_metadata(registration, True, ["UCX"]))

    def read(self, offer: Offer, copies: list[Copy], ends: float, stall: float) -> None:
        """Reads all segments. Leaves no registration and no connection; after an exception, the caller must close the agent."""
        registered: list[t.Any] = []
        running: list[t.Any] = []
        peer = None
        try:
            registered = [self.register(copy.backend, copy.segments, copy.device) for copy in copies]
            for metadata in offer.nixl:
                peer = self._agent.add_remote_agent(metadata)
            pieces = (piece for copy in copies for piece in copy.pieces())
            self._read_pieces(offer, pieces, peer, running, ends, stall)
        except Error:
            raise
        except Exception as error:
            raise Disconnected(
                f"{offer.name!r} can't be read from {offer.node}: {error}",
                kind="peer",
                hint="the source has exited, has withdrawn the offer, or can't be reached: ask it for a new offer",
            ) from error
        finally:
            for handle in running:
                _try(self._agent.release_xfer_handle, handle)
            # Otherwise the source keeps the connection: its later readers could stall.
            if peer is not None:
                _try(self._agent.remove_remote_agent, peer)
            for registration in registered:
                _try(self._agent.deregister_memory, registration)

    def _read_pieces(
        self, offer: Offer, pieces: Iterator[Piece], peer: t.Any, running: list[t.Any], ends: float, stall: float
    ) -> None:
        agent, finished, last = self._agent, 0, monotonic()
        while True:
            while len(running) < _IN_FLIGHT and (piece := next(pieces, None)):
                kind, here, device, there, of, size = piece
                local = agent.get_xfer_descs([(here, size, device)], kind)
                remote = agent.get_xfer_descs([(there, size, of)], kind)
                running.append(agent.initialize_xfer("READ", local, remote, peer, b"", ["UCX"]))
                agent.transfer(running[-1])
            if not running:
                return
            now = monotonic()
            for handle in running[:]:
                state = agent.check_xfer_state(handle)
                if state == "ERR":
                    raise OSError("a read failed")
                if state == "DONE":
                    running.remove(handle)
                    agent.release_xfer_handle(handle)
                    finished, last = finished + 1, now
            if now > ends or now - last > stall:
                limit = "the deadline passed" if now > ends else f"no piece of 64 MiB finished in {stall:g} s"
                raise Timeout(
                    f"{offer.name!r} is not read from {offer.node}: {limit}, after {finished} pieces",
                    kind="peer",
                    hint="the source is stopped, cut off or slow: try another source, or give a longer stall or deadline",
                )
            # Shorter than a piece takes at 100 GB/s.
            sleep(0.0005)

    def close(self) -> None:
        """Ends the agent, with its threads, connections and registrations."""
        self._agent = None


def _end(agent: _Agent | None, lease: Lease) -> None:
    """Ends an offer: the reads first, then the memory that they read."""
    if agent is not None:
        agent.close()
    lease.close()


def _try(call: t.Any, *arguments: t.Any) -> None:
    """Cleans up. An error of NIXL here has no effect: the agent is closed after the first error."""
    try:
        call(*arguments)
    except Exception as error:
        del error


def _import_nixl() -> t.Any:
    from importlib import import_module

    # `nixl` chooses one of the others. Each of these can be installed alone.
    for package in ("nixl", "nixl_cu12", "nixl_cu13"):
        try:
            return import_module(f"{package}._api")
        except ModuleNotFoundError as error:
            if error.name not in (package, f"{package}._api", "nixl_meta_utils"):
                raise
    raise Unsupported("NIXL is not installed, which vmmfd.nodes needs: pip install 'vmmfd[nixl]'", hint="pip install 'vmmfd[nixl]'")


# The backends that were checked.
_warned: set[str] = set()


def _warn_of_tcp(backend: str) -> None:
    """Warns once for each backend that UCX reads over TCP."""
    import os
    import warnings

    if backend in _warned:
        return
    _warned.add(backend)
    if os.path.isdir("/sys/class/infiniband") and os.listdir("/sys/class/infiniband"):
        return
    reason = "this machine has no RDMA device (/sys/class/infiniband is empty), so NIXL reads over TCP, slower than a plain socket: "
    if backend == "cuda":
        # Measured with a UCX that has pidfd_getfd.
        reason += "CUDA does not export a broker's memory again, so UCX can't map it in another process: share one broker on each machine"
    else:
        reason += "Ray's own object store is faster here"
    warnings.warn(reason, RuntimeWarning, stacklevel=3)
