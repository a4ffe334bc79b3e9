"""Leases of a broker's objects, versions prepared for them, modules loaded from them, and claims.

PyTorch's half, `vmmfd.torch`, is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from . import _arguments, _native, _records
from . import _types as t
from ._closing import Closing
from ._errors import Invalid
from ._native import Array
from ._records import LeasedPart, Owner, Published


class Lease(Closing, Mapping[str, Array]):
    """A hold on a version of an object, with its memory mapped: a mapping of names to `Array`s. Made by `Broker.get`.

    A context manager: leaving it closes it. The lease ends then, or when the last array in it is gone, in any library: arrays and what
    other libraries made of them stay valid. The broker counts this process among the readers until then.

    Another version can take its place at the same addresses: `prepare`, `switch`, `park`, `unpark`.

    Once it is closed, and in a fork, all raise `Invalid`, but `is_held` is False, and `is_closed` and `repr` can be asked. The broker
    counts a lease until the forks of its process end too, if it was not closed.
    """

    __slots__ = ("__weakref__", "_client", "_native")

    def __init__(self, client: _native.Client, lease: _native.Lease) -> None:
        self._client = client
        self._native = lease

    def __getitem__(self, name: str, /) -> Array:
        """The array of a name, read-only unless the lease was got with `copy_on_write`. Raises `NoArray` (a `KeyError`) if there is none or
        it was not asked for, and `Invalid` if several parts have one of that name: see `array`."""
        return self._native.array(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._native.keys())

    def __len__(self) -> int:
        return len(self._native.keys())

    def __contains__(self, name: object, /) -> bool:
        return isinstance(name, str) and name in self._native

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return object.__hash__(self)

    def array(self, name: str, part: str | None = None) -> Array:
        """The array of a name, of the part that is named if several have one. Raises what `lease[name]` does."""
        return self._native.array(name, part)

    def attributes(self, name: str, part: str | None = None) -> dict[str, t.Any]:
        """What its maker says of an array; empty if nothing. Raises what `array` does."""
        return self._native.attributes(name, part) or {}

    def memory(self, part: str | None = None) -> list[Array]:
        """The memory of a part as bytes (`uint8`): one array, unless arrays were asked for that lie apart. The part can be left out where
        there is one."""
        return [array for _, array in self._native.memory(part)]

    def pieces(self, part: str | None = None) -> list[tuple[int, Array]]:
        """As `memory`, each with the byte of the part at which it begins."""
        return self._native.memory(part)

    @property
    def name(self) -> str:
        """The object's name."""
        return self._native.name

    @property
    def version(self) -> int:
        """Its version, counted from 1."""
        return self._native.version

    @property
    def id(self) -> str:
        """The version's UUID."""
        return self._native.id

    @property
    def created(self) -> t.datetime:
        """When it was published, in UTC."""
        return _records.time(self._native.created * 1000)

    @property
    def owner(self) -> Owner:
        """Whose it is."""
        uid, gid = self._native.owner
        return Owner(uid=uid, gid=gid)

    @property
    def metadata(self) -> dict[str, t.Any]:
        """What its maker says of it; empty if nothing. A new dict each time."""
        return self._native.metadata

    @property
    def parts(self) -> tuple[LeasedPart, ...]:
        """The parts that were asked for."""
        return tuple(
            LeasedPart(name=name, size=size, mapped_size=mapped, digest=digest, device=device, arrays=arrays)
            for name, size, mapped, digest, device, arrays in self._native.parts
        )

    @property
    def is_held(self) -> bool:
        """Whether the broker counts this process among the readers, as far as is known: False between a break of the connection and the
        moment when the lease was taken up again, if it is lost, once it is closed, and in a fork. Does not block."""
        return self._native.is_held

    @property
    def is_parked(self) -> bool:
        """Whether nothing is mapped at its addresses."""
        return self._native.is_parked

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._native.is_closed

    @property
    def exports(self) -> int:
        """How many exports of its arrays to other libraries are alive: tensors, arrays of NumPy, and the like."""
        return self._native.exports

    def prepare(
        self,
        name: str | None = None,
        *,
        version: int | None = None,
        newer_than: int | None = None,
        expect: t.Json | None = None,
        expect_owner: int | None = None,
        digest: t.Digest | None = None,
        wait: t.Time | None = None,
    ) -> Prepared:
        """Gets and imports a version that is to take the addresses of this one, which stays in use meanwhile: the device holds both.

        By default it is one that is newer than this; with `version` that one; with `name` that of another object. It must have the same
        parts, of each at least the same bytes, and each array that is mapped here, by name, with the same type, shape, strides and place;
        it may have more. Blocks for the driver's calls.

        Raises `Differs` with a list of what does not fit, and what `Broker.get` does.
        """
        if version is None and newer_than is None and name is None:
            newer_than = self.version
        version, newer_than = _arguments.whole(version, "version"), _arguments.whole(newer_than, "newer_than")
        prepared = self._client.prepare(
            self._native,
            name,
            version=version,
            newer_than=newer_than,
            expect=expect,
            expect_owner=_arguments.owner(expect_owner),
            digest=_arguments.digest(digest),
            wait=wait,
        )
        return Prepared(prepared)

    def switch(self, prepared: Prepared, *, exported: t.Literal["valid"] | None = None) -> Prepared:
        """Puts a version that was prepared at the addresses of this one, and returns the old one, which can be switched back to: close or drop
        it to end its lease and release its memory.

        Waits until all work of the devices' primary contexts is done. Arrays read the new version afterwards, and so do tensors, pointers
        and captured graphs that have the addresses. What was written to pages of a lease with `copy_on_write` is lost. **Nothing may use the
        memory while it runs**: on a GPU a kernel that does loses its context. While exports to other libraries are alive this is the caller's promise, which `exported="valid"` gives. Private copies,
        which `state_dict` makes and modules get as buffers, keep the old version's values; `Loaded.switch` fills its own anew.

        Raises `ExportError` (a `BufferError`) without that promise, where there are exports; `Invalid` if this is parked, or the version
        was prepared for another layout; `Error` if the driver fails: then the old version is mapped again, or this is parked.
        """
        return Prepared(self._native.switch(prepared._native, _arguments.promised(exported)))

    def park(self, *, keep_lease: bool = False, exported: t.Literal["valid"] | None = None) -> None:
        """Gives the memory back and keeps the addresses, for `unpark`. Meanwhile its arrays can't be read, and nothing may use their
        addresses.

        With `keep_lease` the broker keeps this version for this process. Without, the lease ends. Waits as `switch` does; `exported` is the
        same promise, until `unpark` has returned. Raises what `switch` does.
        """
        self._native.park(keep_lease, _arguments.promised(exported))

    def unpark(
        self,
        name: str | None = None,
        *,
        version: int | t.Literal["newest"] | None = None,
        expect: t.Json | None = None,
        expect_owner: int | None = None,
        digest: t.Digest | None = None,
        wait: t.Time | None = None,
    ) -> None:
        """Fills the addresses again: with the version that was there, another one, or the newest. It must fit as `prepare` says.

        Raises `Invalid` if this is not parked, and what `prepare` does. It stays parked then, and can be tried again.
        """
        if version is None and name is None:
            version = self.version
        number = None if version == "newest" else _arguments.whole(version, "version")
        self._client.unpark(
            self._native,
            name,
            version=number,
            expect=expect,
            expect_owner=_arguments.owner(expect_owner),
            digest=_arguments.digest(digest),
            wait=wait,
        )

    def state_dict(
        self,
        *,
        writable_buffers: bool = True,
        everything: bool = False,
        module: t.Module | None = None,
        private: Iterable[str] = (),
    ) -> dict[str, t.Tensor]:
        """Its tensors as PyTorch's, by name: for `module.load_state_dict(..., assign=True)`. They hold the memory and need no gradient. Tied
        names are tensors of one storage, and views are views of it.

        Parameters are the mapped memory itself, read-only: a write to them ends the CUDA context, on the host the process, and PyTorch
        does not know. So does a step of an optimizer: PyTorch gives parameters the `requires_grad` that the module's had, so call
        `module.requires_grad_(False)`. A `load_state_dict` without `assign=True` writes too; `vmmfd.torch.guard()` makes modules refuse it.

        All tensors that are not known to be parameters are private copies, which a model may write; with `writable_buffers=False` they are
        the memory too. What was put as a module, or as `nn.Parameter` (`state_dict(keep_vars=True)`), is known; of safetensors and plain
        state dicts nothing is, unless `module` is given: a module that the tensors are for, which then decides. Weights of its embeddings
        with `max_norm`, which PyTorch writes to, and tensors that `private` names are private copies too. Copies of more than 64 MiB are
        warned of. If the lease was got with `copy_on_write`, all tensors are the memory itself and may be written, and only those that
        `private` names are copied.

        What a `state_dict` does not have (buffers that are not persistent, tensors that are plain attributes of modules) comes with
        `everything=True`.

        Raises `Differs` for a type that PyTorch has not, `Unsupported` for an object on a GPU that PyTorch does not see, `Invalid` for
        names that several parts have, and for one in `private` that the object has not."""
        from .torch._get import _state_dict

        return _state_dict(self, writable_buffers=writable_buffers, everything=everything, module=module, private=private)

    def load(
        self, into: t.Module, *, strict: bool = True, writable_buffers: bool = True, private: Iterable[str] = ()
    ) -> Loaded:
        """Makes its tensors the parameters and buffers of a module of PyTorch, which may be on the meta device, and returns a
        `vmmfd.torch.Loaded`, with which another version can take their place.

        Parameters are the mapped memory itself, read-only, as `state_dict` says, and need no gradient. Names that are tied in the object, or
        in the module if the object has one of them, are one parameter afterwards; but two in the same memory if the class or the attributes
        of their parameters differ in the module. All else is a private copy: buffers, those in no
        `state_dict` too, and tensors that are plain attributes of modules; unless `writable_buffers=False`. So are the parameters that
        `private` names, and weights of embeddings with `max_norm`, which PyTorch writes to. Plain attributes come where the module has
        a tensor. A `load_state_dict` without `assign=True` raises `ExportError` from then on, as it would write to the memory; a step
        of an optimizer after `requires_grad_(True)` does write there, and ends the process. Copies of more than 64 MiB are warned of. If
        the lease was got with `copy_on_write`, all tensors are the memory itself and may be written.

        Raises `Differs` with a list of all names, types and shapes that do not fit; the module is as it was then. With `strict=False`
        names that only one of them has do not count, but for those that would stay on the meta device."""
        from .torch._module import _load

        return Loaded(self, into, _load(self, into, strict=strict, writable_buffers=writable_buffers, private=private))

    def close(self) -> None:
        """Ends the lease, and releases its memory: now if no array of it is alive, else when the last one is gone. To close twice does
        nothing."""
        self._native.close()

    def __repr__(self) -> str:
        try:
            if self.is_closed:
                return "<vmmfd.Lease: closed>"
            parked = ", parked" if self.is_parked else ""
            return f"<vmmfd.Lease: {self.name} version {self.version}{parked}>"
        except Invalid:  # Closed by another thread meanwhile, or in a fork.
            return "<vmmfd.Lease: not usable here>"

    def __reduce__(self) -> t.Any:
        raise TypeError("a Lease can't be pickled: call vmmfd.register_reducer() to send it with multiprocessing, or send its name and version")


class Prepared(Closing):
    """A version that is imported and mapped nowhere, ready to take the addresses of a lease: `Lease.switch`. It holds the version's lease
    and its memory until it is closed, dropped or switched to. A context manager, which closes it."""

    __slots__ = ("__weakref__", "_native")

    def __init__(self, prepared: _native.Prepared) -> None:
        self._native = prepared

    @property
    def name(self) -> str:
        """The object's name."""
        return self._native.name

    @property
    def version(self) -> int:
        """Its version."""
        return self._native.version

    @property
    def id(self) -> str:
        """The version's UUID."""
        return self._native.id

    @property
    def metadata(self) -> dict[str, t.Any]:
        """What its maker says of it; empty if nothing."""
        return self._native.metadata

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or switched to."""
        return self._native.is_closed

    def close(self) -> None:
        """Ends its lease, and releases its memory. To close twice, or after it was switched to, does nothing."""
        self._native.close()

    def __repr__(self) -> str:
        try:
            return "<vmmfd.Prepared: closed>" if self.is_closed else f"<vmmfd.Prepared: {self.name} version {self.version}>"
        except Invalid:  # Closed by another thread meanwhile, or in a fork.
            return "<vmmfd.Prepared: not usable here>"


class Loaded:
    """A module whose parameters are memory of the broker: what `broker.load` returns.

    `lease` is the lease, `module` the module, and `private` the names of the tensors that are private copies. The module keeps the memory
    by itself: this object is only needed to `switch` or `refresh`, and may be dropped.
    """

    def __init__(self, lease: Lease, module: t.Any, filled: t.Any) -> None:
        self.lease = lease
        self.module = module
        self.private: list[str] = filled.private
        self._filled = filled

    def refresh(self, *, moved: t.Literal["ignore"] | None = None) -> None:
        """Copies the current version's bytes into the private copies again, at their addresses: caches and statistics that the module has
        written there since are lost. Does not wait: the copies are in order on PyTorch's current stream. A module that was loaded with
        `copy_on_write` has no private copies but those that `private` names, and keeps what was written to its other tensors.

        Raises `vmmfd.Invalid` if the lease is closed or parked, and `vmmfd.Differs` as `switch` does if tensors moved."""
        if self.lease.is_closed:
            raise Invalid("the lease is closed: load the module anew")
        if self.lease.is_parked:
            raise Invalid(f"the lease of {self.lease.name!r} is parked, and has no memory: unpark it first")
        from .torch._module import _check_moved, _refresh

        _check_moved(self._filled.installed, moved)
        _refresh(self._filled.copies)

    @property
    def version(self) -> int:
        """The version that is there now."""
        return self.lease.version

    def prepare(self, name: str | None = None, **options: t.Any) -> Prepared:
        """Gets and imports a version that is to take the place of this one, which stays in use meanwhile: `Lease.prepare`."""
        return self.lease.prepare(name, **options)

    def switch(
        self,
        prepared: Prepared | None = None,
        *,
        exported: t.Literal["valid"] | None = "valid",
        refresh: bool = True,
        moved: t.Literal["ignore"] | None = None,
    ) -> Prepared:
        """Puts another version at the addresses of this one, and returns the old one, to switch back to or to close.

        `prepared` is what `prepare` returned; without it, the newest version is prepared first. Waits for the device's work, then
        for the driver's calls. Tensors, views and captured CUDA graphs have the new version's values from then on; so have the private
        copies, unless `refresh` is false. You promise that nothing uses the module meanwhile, in another thread or stream.

        Raises what `lease.prepare` and `lease.switch` raise; `vmmfd.Differs` for a version of another layout, and, unless
        `moved="ignore"`, with a list of the parameters and buffers in whose place the module has others now, as after `half()` or `to()`:
        the new version does not come there.
        """
        from .torch._module import _check_moved

        _check_moved(self._filled.installed, moved)
        if prepared is None:
            prepared = self.lease.prepare()
        old = self.lease.switch(prepared, exported=exported)
        if refresh:
            self.refresh(moved="ignore")
        return old

    def __repr__(self) -> str:
        return f"<vmmfd.torch.Loaded {type(self.module).__name__} of {self.lease!r}, {len(self.private)} private copies>"


class Claim(Closing):
    """The right to be the one that makes an object, or a part of it: `Broker.claim`. Others wait for it. To put the object ends it; to close
    or drop it passes it to the next that waits, and so do the end of this process and of the broker. A context manager, which closes it."""

    __slots__ = ("__weakref__", "_native", "_put", "name")

    def __init__(self, put: Callable[..., Published], name: str, claim: _native.Claim) -> None:
        # `Broker.put`.
        self._put = put
        self._native = claim
        self.name = name

    def put(self, value: t.Any, **options: t.Any) -> Published:
        """Puts the object, as `Broker.put` does with these options, and ends the claim. Raises `Invalid` once it is closed, and what
        `Broker.put` does: it is not ended then."""
        if self.is_closed:
            raise Invalid(f"the claim of {self.name!r} has ended, and another process may have it: claim it again")
        published = self._put(self.name, value, **options)
        self.close()
        return published

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._native.is_closed

    def close(self) -> None:
        """Passes it on. To close twice, or once the object is put, does nothing."""
        self._native.close()

    def __repr__(self) -> str:
        return f"<vmmfd.Claim: {self.name}{', closed' if self.is_closed else ''}>"
