"""The client of a broker: objects by name."""

from __future__ import annotations

from builtins import list as List
from collections.abc import Callable, Iterable, Mapping

from . import _arguments, _native, _records
from . import _types as t
from ._closing import Closing
from ._errors import Invalid, NoArray
from ._lease import Claim, Lease, Loaded, Prepared
from ._records import Holders, Lost, Published, Restored, Stat, Summary
from ._watch import Watch


def connect(
    path: t.Path | None = None,
    backend: str = "auto",
    *,
    timeout: t.Time = 30,
    trust: Iterable[int] = (),
) -> Broker:
    """Connects to the broker that listens at `path`.

    `path` is by default that of the environment variable `VMMFD_BROKER_SOCKET`, else `$XDG_RUNTIME_DIR/vmmfd/broker.sock`, else
    `/tmp/vmmfd-UID/broker.sock`, and if no broker listens there, that of the system's broker, `/run/vmmfd/broker.sock`, if it exists.
    `backend` is where memory is made and mapped: `"cuda"`, `"host"` (ordinary shared memory), or `"auto"`:
    what is got is used where it is, and what is copied goes to a GPU if there is one. No driver is loaded before memory is needed.
    `timeout`, in seconds or a `timedelta`, is the longest silence of the broker, and how long a broker is waited for, now and
    when it restarts. `trust` are the users, by number, that the broker may be of besides this process's and root.

    Blocks until the broker has answered. Ctrl-C ends it.

    Raises `NotFound` if no broker listens in time, `Denied` if this user may not connect or the broker is of a user
    that is not trusted, `Disconnected` if the process at the other end is
    no broker, `Invalid` for an argument that makes no sense.
    """
    return Broker(path, backend, timeout=timeout, trust=trust)


class Broker(Closing):
    """A client of a broker: see `connect`. A context manager, which closes it.

    It can be used by several threads at once: each call that is under way has a connection of its own. All waits and times are in seconds
    or a `timedelta`; None is not to wait, `float("inf")` is for ever. Calls release the GIL. In the main thread Ctrl-C ends any of
    them; `close` ends those of all threads. If the broker restarts, the connection is made again within the timeout, calls that were
    under way are repeated without harm, and leases go on.

    It belongs to the process that made it: in a fork every call fails. Connect in each process; `vmmfd.register_reducer` lets
    `multiprocessing` do it.

    Each call may raise `Disconnected` if the broker is gone or silent for longer than the timeout, `NotFound` if none listens any more, and
    `Interrupted` if it is closed meanwhile.
    """

    __slots__ = ("__weakref__", "_native")

    def __init__(
        self,
        path: t.Path | None = None,
        backend: str = "auto",
        *,
        timeout: t.Time = 30,
        trust: Iterable[int] = (),
    ) -> None:
        self._native = _native.Client(path, backend, timeout, list(trust))

    @property
    def path(self) -> str:
        """Where the broker listens."""
        return str(self._native.path)

    @property
    def backend(self) -> str:
        """`"auto"`, `"cuda"` or `"host"`, as it was given."""
        return self._native.backend

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._native.is_closed

    def close(self) -> None:
        """Ends the waits of other threads, which raise `Interrupted`, and the connections that no lease needs. Leases go on until they are
        closed themselves. Names with the lifetime `"maker"` go. To close twice does nothing. Does not block."""
        self._native.close()

    def __repr__(self) -> str:
        closed = ", closed" if self.is_closed else ""
        return f"<vmmfd.Broker: {self.path}, backend {self.backend}{closed}>"

    def __reduce__(self) -> t.Any:
        raise TypeError("a Broker can't be pickled: call vmmfd.register_reducer() to send it with multiprocessing, or connect anew")

    def put(
        self,
        name: str,
        value: t.Any,
        *,
        metadata: t.Json | None = None,
        replace: bool | int = False,
        mode: int | None = None,
        lifetime: t.Literal["deleted", "maker", "leased"] | t.Time | None = None,
        keep: int | None = None,
        part: str | None = None,
        parts: Iterable[str] | None = None,
        group: str | None = None,
        wait: t.Time | None = None,
        seal: bool = False,
        copy: bool | None = None,
        digest: str | None = None,
        device: t.DeviceName | None = None,
        exported: t.Literal["valid"] | None = None,
    ) -> Published:
        """Hands memory over under a name. When it returns the object is published, and this process may drop it, or end.

        `value` is a mapping of names to arrays: an `Array` of this process's own is handed over as it is, without a copy; anything
        else that speaks DLPack, an array interface or the buffer protocol is copied to new memory, of `device` if one is given. A module of
        PyTorch or its state dict, and `vmmfd.Weights`, are put without a copy where their memory can be shared. With `copy=False` what
        would be copied is refused; with `copy=True` all is copied, and `Weights` are refused: put `dict(weights)`. Do not write to
        memory that was put.

        `metadata` is what there is to say of it: a mapping that JSON can express, of at most 1 MiB. `replace=True` makes it the next version
        of a name that exists; a number replaces that version alone. `mode` is the permissions of a new name, `0o600` by default and `0o666` at
        most: `r` is get and list, `w` is replace. `lifetime` is how long the name stays: `"deleted"` (until it is deleted, the default),
        `"maker"` (until this Broker is closed), `"leased"` (until then, and until no lease is held), or so many seconds after its last
        lease. `keep` is how many older versions stay without a lease. `digest` is one of the bytes, in words that readers know, of at
        most 255 bytes.

        Several processes put one version together: each names its `part`, all `parts`, and a `group` that only these puts have, and waits
        up to `wait` until all are there. One of them brings the metadata.

        `seal=True` makes this process's own mapping of the memory read-only once it is put. A write by an address is a fault then: so it is
        refused while other libraries have views of it that may be written, unless `exported="valid"` promises that none is. What is
        copied on the host backend is sealed by the kernel in any case.

        Blocks until all work of the device is done, and the broker has answered. It synchronises the device's primary context, and so ends
        a capture of a CUDA graph that any thread of this process has under way there: put before or after a capture.

        Raises `Exists` if there is an object of the name, `Differs` if its version is another than the one to replace, `Denied` if it is another
        user's, `ExportError` (a `BufferError`) for what `copy=False` forbids and for `seal=True` with such views, `Invalid` for what makes no
        sense, `OutOfMemory`, `Timeout` if the other parts did not come, and `Error` if a quota or the broker is full.
        """
        if wait is not None and parts is None:
            raise Invalid(f"wait={wait!r} is how long the other parts are waited for: give part, parts and group too, or no wait")
        mode, keep = _arguments.mode(mode), _arguments.whole(keep, "keep", 32)
        if part is not None and _arguments.text(part, "part") == "":
            raise Invalid("part='' is no name: give the part one, or leave part out for an object of one part")
        if digest is not None:
            _arguments.text(digest, "digest")
        # Imported here, since most processes put nothing.
        from ._parts import plan

        plans, additions, keep_alive = plan(self._native, value, part=part, device=device, copy=copy, seal=seal)
        if digest is not None:
            if len(plans) != 1:
                raise Invalid(f"digest={digest!r} is of one part, and this value has {len(plans)}")
            plans = [(*plans[0][:3], digest)]
        listed = None if parts is None else _arguments.names(parts, "parts")
        # Of several puts of a version one alone can bring metadata.
        if additions and (listed is None or metadata is not None or listed[:1] == [part]):
            metadata = {**additions, **(metadata or {})}
        promised = _arguments.promised(exported)
        if seal:
            _native.check_read_only([memory for planned in plans for memory in planned[1]], promised)
        version, id = self._native.put(
            name,
            plans,
            replace=replace,
            metadata=metadata,
            mode=mode,
            lifetime=lifetime,
            keep=keep,
            announced=listed,
            group=group,
            wait=wait,
        )
        if seal:
            for planned in plans:
                for memory in planned[1]:
                    _native.make_read_only(memory, promised)
        del keep_alive
        return Published(name=name, version=version, id=id)

    def get(
        self,
        name: str,
        *,
        version: int | None = None,
        newer_than: int | None = None,
        parts: Iterable[str] | None = None,
        arrays: Iterable[str] | None = None,
        expect: t.Json | None = None,
        expect_owner: int | None = None,
        digest: t.Digest | None = None,
        wait: t.Time | None = None,
        device: t.DeviceName | None = None,
        copy_on_write: bool = False,
    ) -> Lease:
        """Gets a lease of an object, with its memory mapped: read-only, unless `copy_on_write` is true.

        It is the current version, unless `version` names another that is still there; with `newer_than` only a later one. Of `parts` and
        `arrays`, if given, only the segments in which these lie are mapped. `expect` names fields of the metadata and the values that
        they must have: equal as JSON, so that 1 is not 1.0, and a mapping in it has all fields of the other; `expect_owner` is the number
        of the user who must own the name; `digest` is that of the one part, or a mapping of parts to theirs. `device` uses the memory
        instead of the one that has it, if it can reach it. With `wait` the object may come so much later.

        With `copy_on_write=True` the arrays are writable, and this process alone sees what it writes, as with `torch.load(mmap=True)`: the
        kernel copies each page at the first write to it. `switch` and `park` discard what was written. The host backend alone has it.

        Raises `NotFound` if there is none, `Timeout` if none came in time, `Differs` if it is not as expected, `Denied`, `Invalid`,
        `Unsupported` if no device of this process can reach it, and with `copy_on_write` for memory of a GPU, which CUDA can't map so.
        """
        return Lease(
            self._native,
            self._native.get(
                name,
                version=_arguments.whole(version, "version"),
                newer_than=_arguments.whole(newer_than, "newer_than"),
                parts=_arguments.chosen(parts, "parts"),
                arrays=_arguments.chosen(arrays, "arrays"),
                expect=expect,
                expect_owner=_arguments.owner(expect_owner),
                digest=_arguments.digest(digest),
                wait=wait,
                device=device,
                copy_on_write=copy_on_write,
            ),
        )

    def get_all(
        self,
        wanted: Iterable[str] | Mapping[str, Mapping[str, t.Any]],
        *,
        wait: t.Time | None = None,
        device: t.DeviceName | None = None,
        copy_on_write: bool = False,
    ) -> List[Lease]:
        """Gets leases of several objects as they are at one moment, all or none, in their order.

        `wanted` are names, each once, or a mapping of names to what `get` takes of `version`, `newer_than`, `parts`, `arrays`, `expect`,
        `expect_owner` and `digest`. Waits up to `wait` until all are there. `copy_on_write` is of all. Raises what `get` does.
        """
        requests = _arguments.requests(wanted)
        leases = self._native.get_all(requests, wait=wait, device=device, copy_on_write=copy_on_write)
        return [Lease(self._native, lease) for lease in leases]

    def claim(
        self,
        name: str,
        *,
        part: str | None = None,
        group: str | None = None,
        parts: Iterable[str] | None = None,
        arrays: Iterable[str] | None = None,
        expect: t.Json | None = None,
        expect_owner: int | None = None,
        digest: t.Digest | None = None,
        wait: t.Time | None = None,
        device: t.DeviceName | None = None,
        copy_on_write: bool = False,
    ) -> Lease | Claim:
        """Gets a lease of an object, or the right to be the one that makes it.

        Of several processes that ask at once and find nothing one gets a `Claim`: it is to put the object. The others wait, up to `wait`, until
        it is put, or the claim passes on to one of them. A claim is of the whole object, or of one `part`, with the `group` of its version.
        Raises what `get` does.
        """
        found = self._native.claim(
            name,
            part=part,
            group=group,
            parts=_arguments.chosen(parts, "parts"),
            arrays=_arguments.chosen(arrays, "arrays"),
            expect=expect,
            expect_owner=_arguments.owner(expect_owner),
            digest=_arguments.digest(digest),
            wait=wait,
            device=device,
            copy_on_write=copy_on_write,
        )
        return Claim(self.put, name, found) if isinstance(found, _native.Claim) else Lease(self._native, found)

    def prepare(
        self,
        lease: Lease,
        name: str | None = None,
        *,
        version: int | None = None,
        newer_than: int | None = None,
        expect: t.Json | None = None,
        expect_owner: int | None = None,
        digest: t.Digest | None = None,
        wait: t.Time | None = None,
    ) -> Prepared:
        """As `Lease.prepare`."""
        return lease.prepare(
            name,
            version=version,
            newer_than=newer_than,
            expect=expect,
            expect_owner=expect_owner,
            digest=digest,
            wait=wait,
        )

    def switch(self, lease: Lease, prepared: Prepared, *, exported: t.Literal["valid"] | None = None) -> Prepared:
        """As `Lease.switch`."""
        return lease.switch(prepared, exported=exported)

    def park(self, lease: Lease, *, keep_lease: bool = False, exported: t.Literal["valid"] | None = None) -> None:
        """As `Lease.park`."""
        lease.park(keep_lease=keep_lease, exported=exported)

    def unpark(
        self,
        lease: Lease,
        name: str | None = None,
        *,
        version: int | t.Literal["newest"] | None = None,
        expect: t.Json | None = None,
        expect_owner: int | None = None,
        digest: t.Digest | None = None,
        wait: t.Time | None = None,
    ) -> None:
        """As `Lease.unpark`."""
        lease.unpark(name, version=version, expect=expect, expect_owner=expect_owner, digest=digest, wait=wait)

    def state_dict(
        self,
        name: str,
        *,
        version: int | None = None,
        newer_than: int | None = None,
        parts: Iterable[str] | None = None,
        arrays: Iterable[str] | None = None,
        expect: t.Json | None = None,
        expect_owner: int | None = None,
        digest: t.Digest | None = None,
        wait: t.Time | None = None,
        device: t.DeviceName | None = None,
        copy_on_write: bool = False,
        writable_buffers: bool = True,
        everything: bool = False,
        module: t.Module | None = None,
        private: Iterable[str] = (),
    ) -> dict[str, t.Tensor]:
        """The tensors of an object as PyTorch's, by name: for `module.load_state_dict(..., assign=True)`. They hold the lease.

        Parameters are mapped, and all other tensors are private copies. For safetensors and plain state dicts use `load`, or give
        `module=`: they do not say which tensors are parameters, so all would be copied. A write to a mapped tensor ends the process: PyTorch
        gives parameters the `requires_grad` that the module's had, so call `module.requires_grad_(False)` before a step of an optimizer. On
        the host backend `copy_on_write=True` makes all tensors writable, without copies. See `Lease.state_dict`; the other arguments and
        errors are `get`'s."""
        with self.get(
            name,
            version=version,
            newer_than=newer_than,
            parts=parts,
            arrays=arrays,
            expect=expect,
            expect_owner=expect_owner,
            digest=digest,
            wait=wait,
            device=device,
            copy_on_write=copy_on_write,
        ) as lease:
            return lease.state_dict(
                writable_buffers=writable_buffers, everything=everything, module=module, private=private
            )

    def load(
        self,
        name: str,
        into: t.Module,
        *,
        version: int | None = None,
        newer_than: int | None = None,
        parts: Iterable[str] | None = None,
        arrays: Iterable[str] | None = None,
        expect: t.Json | None = None,
        expect_owner: int | None = None,
        digest: t.Digest | None = None,
        wait: t.Time | None = None,
        device: t.DeviceName | None = None,
        copy_on_write: bool = False,
        strict: bool = True,
        writable_buffers: bool = True,
        private: Iterable[str] = (),
    ) -> Loaded:
        """Makes an object's tensors the parameters and buffers of a module of PyTorch, and returns what another version can take their place
        with. The module holds the lease. See `Lease.load`; the other arguments and errors are `get`'s."""
        lease = self.get(
            name,
            version=version,
            newer_than=newer_than,
            parts=parts,
            arrays=arrays,
            expect=expect,
            expect_owner=expect_owner,
            digest=digest,
            wait=wait,
            device=device,
            copy_on_write=copy_on_write,
        )
        try:
            return lease.load(into, strict=strict, writable_buffers=writable_buffers, private=private)
        except BaseException:
            lease.close()
            raise

    def list(self, prefix: str = "") -> List[Summary]:
        """The objects whose names begin with `prefix` and that this user may read, in the order of their names."""
        return [_records.summary(summary) for summary in self._native.list(prefix)]

    def stat(self, name: str, version: int | None = None) -> Stat:
        """All that is known of a version of an object, by default of the current one. Maps nothing: what it takes is in
        `stat(name).parts[0].mapped_size`. Raises `NotFound` if there is none."""
        return _records.stat(self._native.stat(name, _arguments.whole(version, "version")))

    def bytes_of(self, name: str, version: int | None = None, *, parts: Iterable[str] | None = None) -> int:
        """How many bytes of memory a get of an object, or of these parts of it, maps. Maps nothing. Raises `NotFound` if there is none,
        `NoArray` (a `KeyError`) if it has no such part."""
        sizes = {part.name: part.mapped_size for part in self.stat(name, version).parts}
        wanted = sizes if parts is None else dict.fromkeys(_arguments.names(parts, "parts"))
        for part in wanted:
            if part not in sizes:
                raise NoArray(f"{name!r} has no part {part!r}; it has {', '.join(sizes)}", kind="object")
        return sum(sizes[part] for part in wanted)

    def who(self, prefix: str = "") -> Holders:
        """The leases that are held of objects whose names begin with `prefix` and that this user may read, and what the broker holds for
        each user: for root and the broker's user of all users, for others their own."""
        return _records.holders(*self._native.who(prefix))

    def watch(self, prefix: str = "", *, after: str | None = None, timeout: t.Time | None = None) -> Watch:
        """Follows what happens to names that begin with `prefix` and that this user may read: from now on, or from the place `after` that an
        earlier watch had (`Watch.place`), also in another process. Iterate over it: each step waits for the next event, and the iteration
        ends if none comes within `timeout`; by default it waits for ever.

        Raises `Invalid` for what is no place, and for one that the broker has not come to yet.
        """
        if after is None:
            return Watch(self._native.watch(prefix, None), timeout)
        instance, _, seq = after.rpartition(":") if isinstance(after, str) else ("", "", "")
        if not instance or not seq.isdecimal() or len(seq) > 20:
            raise Invalid(f"after={after!r} is no place of a watch: give what Watch.place was, INSTANCE:NUMBER")
        # The broker would take a place that is ahead of it for its newest one.
        newest = self._native.watch(prefix, None)
        try:
            now, last = newest.place
        finally:
            newest.close()
        if instance == now and int(seq) > last:
            raise Invalid(f"after={after!r} is ahead of the broker, which is at {last}: give what Watch.place was")
        return Watch(self._native.watch(prefix, (instance, min(int(seq), (1 << 64) - 1))), timeout)

    def delete(self, name: str) -> None:
        """Takes a name away. Readers keep what they hold, and the broker keeps the memory until the last of them ends. Raises `NotFound`
        if there is none, `Denied` if it is another user's."""
        self._native.delete(name)

    def on_lost(self, call: Callable[[Lost], object]) -> Callable[[Lost], object]:
        """Calls this with a `Lost` for each lease that the broker does not count any more, although this process has not ended it. What is
        mapped stays mapped and valid. It can decorate a function.

        It is called on a thread of a connection's own, which meanwhile notices nothing else: return soon. What it raises goes to
        `sys.unraisablehook`. It is not called while the interpreter ends."""
        self._native.on_lost(
            lambda name, version, id, kind, reason: call(Lost(name=name, version=version, id=id, kind=kind, reason=reason))
        )
        return call

    def on_restored(self, call: Callable[[Restored], object]) -> Callable[[Restored], object]:
        """Calls this with a `Restored` for each lease that the broker counts again, after the connection broke: as `on_lost` does."""
        self._native.on_restored(
            lambda name, version, id, rebuilt: call(Restored(name=name, version=version, id=id, rebuilt=rebuilt))
        )
        return call
