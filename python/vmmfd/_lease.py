"""Leases, versions prepared for them, modules loaded from them, and claims.

Functions import `vmmfd.torch` when they need it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping

from . import _arguments, _native, records
from . import _types as t
from ._closing import Closing
from ._errors import Invalid
from ._native import Array
from .records import LeasedPart, Owner, Published


_called: weakref.WeakSet[Lease] = weakref.WeakSet()
"""The leases with calls of `on_recall`."""


def keeping_calls(change: Callable[[], None]) -> None:
    """Calls `change`, which may unpark leases. Their calls of `on_recall` then follow the mapped version."""
    before = [(lease, lease._native.unparks) for lease in list(_called)]
    try:
        change()
    finally:
        for lease, unparks in before:
            if not lease.is_closed and lease._native.unparks != unparks:
                lease._version_changed()


class Lease(Closing, Mapping[str, Array]):
    """A lease of an object's version, with its memory mapped: a mapping of names to `Array`s. Returned by `Broker.get`.

    A context manager that closes it. The memory remains mapped until the last array of it, in any library, is gone: arrays and the views
    that other libraries made of them remain valid after `close`. Until then the broker counts this process as a reader.

    `prepare`, `switch`, `park` and `unpark` map another version at the same addresses.

    After `close`, and in a fork, every method raises `Invalid`, except that `is_held` is False and `is_closed` and `repr` work. A lease
    that was not closed also counts until the forks of its process use this package or exit.
    """

    __slots__ = ("__weakref__", "_calls", "_client", "_native")

    def __init__(self, client: _native.Client, lease: _native.Lease) -> None:
        self._client = client
        self._native = lease
        # The calls of `on_recall`, each with a key.
        self._calls: dict[object, Callable[[Lease], object]] = {}

    def __getitem__(self, name: str, /) -> Array:
        """Returns an array, read-only unless the lease was got with `copy_on_write`. Raises `NoArray` (a `KeyError`) if there is no such
        array or it was not requested, and `Invalid` if several parts have an array of this name: see `array`."""
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
        """Returns an array; `part` selects the part if several have an array of this name. Raises as `lease[name]`."""
        return self._native.array(name, part)

    def attributes(self, name: str, part: str | None = None) -> dict[str, t.Any]:
        """Returns the attributes that the maker gave an array, empty if none. Raises as `array`."""
        return self._native.attributes(name, part) or {}

    def tree(
        self, convert: Callable[[Array], t.Any] | None = None, *, copy: bool = False, part: str | None = None
    ) -> dict[str, t.Any]:
        """Returns the value that was put, nested as it was: dicts in their order, lists and tuples of arrays, and of the str, int, float,
        bool and None among them. For an object that was put flat, a dict of its arrays by name.

        `convert` is called with each `Array`, for example `torch.from_dlpack`, `jax.dlpack.from_dlpack` or `vmmfd.Array.numpy`; without it,
        the leaves are `Array`s. They are the mapped memory, which is read-only unless the lease was got with `copy_on_write`: **a write,
        such as an optimizer's step, kills the process**. With `copy=True` each array is copied, by the `clone` or `copy` of its converted
        form, and may be written; without `convert`, the copies share new memory of their device, which lives as long as one of them.

        Several parts become one value: their dicts are merged, and other values of one place must be equal. `part` selects one part. If the
        lease has only some arrays, the others are missing, and lists are shorter; without the first array of a part, so are its other
        values. Raises `Invalid`, with the parts and the place, if parts differ there, if the attributes `path` and `leaves` of an array
        describe no value, and after `close`; and as `convert`."""
        _arguments.flag(copy, "copy")
        if convert is not None:
            _arguments.function(convert, "convert")
        from ._tree import copies, restored

        copied = None
        if copy and convert is None:
            copied = copies([array for _, _, array, _, _ in self._native.arrays(part)])

        def converted(array: Array) -> t.Any:
            if copied is not None:
                return next(copied)
            made = array if convert is None else convert(array)
            if not copy:
                return made
            return made.clone() if hasattr(made, "clone") else made.copy()

        rows = ((of, name, array, attributes) for of, name, array, attributes, _ in self._native.arrays(part))
        return restored(rows, converted)

    def numpy(self, *, part: str | None = None) -> dict[str, t.Any]:
        """Returns the arrays as NumPy arrays of the same memory, without a copy, nested as they were put: `tree(Array.numpy)`. They are
        read-only, unless the lease was got with `copy_on_write`. Raises `TypeError` for GPU memory, and as `tree` and `Array.numpy`."""
        return self.tree(Array.numpy, part=part)

    def memory(self, part: str | None = None) -> list[Array]:
        """Returns a part's memory as bytes (`uint8`): one array, or several if the requested arrays are not adjacent. `part` may be omitted
        if there is only one. Raises `NoArray` if there is no such part, `Invalid` if the lease is parked or closed."""
        return [array for _, array in self._native.memory(part)]

    def pieces(self, part: str | None = None) -> list[tuple[int, Array]]:
        """As `memory`, with the byte offset of each array in the part."""
        return self._native.memory(part)

    @property
    def name(self) -> str:
        """The object's name."""
        return self._native.name

    @property
    def version(self) -> int:
        """The version, counted from 1."""
        return self._native.version

    @property
    def id(self) -> str:
        """The version's UUID."""
        return self._native.id

    @property
    def created(self) -> t.datetime:
        """The time of publication, in UTC."""
        return records.time(self._native.created * 1000)

    @property
    def owner(self) -> Owner:
        """The user and group that own the name."""
        return Owner(*self._native.owner)

    @property
    def metadata(self) -> dict[str, t.Any]:
        """The maker's metadata, empty if none. A new dict each time."""
        return self._native.metadata

    @property
    def parts(self) -> tuple[LeasedPart, ...]:
        """The requested parts."""
        return tuple(LeasedPart(*fields) for fields in self._native.parts)

    @property
    def is_held(self) -> bool:
        """Whether the broker counts this process as a reader, as far as this process knows: False while a broken connection is restored, if
        the lease is lost, after `close`, and in a fork. Does not block."""
        return self._native.is_held

    @property
    def recalled(self) -> bool:
        """Whether the owner of the object has asked its readers for this version's memory: close the lease, switch it to a newer version,
        or park it without `keep_lease`. The first use for a lease opens a second connection to the broker, which receives only
        recalls, and blocks meanwhile. Raises as any call of the broker."""
        return self._native.recalled

    def on_recall(self, call: Callable[[Lease], object]) -> Callable[[Lease], object]:
        """Calls `call` with this lease when its version is recalled, once for each version, and soon if it is recalled already: see
        `recalled`. Usable as a decorator.

        The call runs on a connection's own thread, which handles nothing else until it returns: return soon. It may close or park the lease
        if nothing uses the memory. Exceptions that it raises go to `sys.unraisablehook`. Not called after `close`."""
        _arguments.function(call, "call")
        self._add_recall(object(), call)
        return call

    async def recalled_async(self) -> None:
        """Returns when the version is recalled, for asyncio: see `recalled`. Raises as `recalled`, and `RuntimeError` without a running
        event loop."""
        from asyncio import Event, get_running_loop

        from ._async import in_thread

        loop, event, key = get_running_loop(), Event(), object()
        try:
            await in_thread(lambda: self._add_recall(key, lambda _: loop.call_soon_threadsafe(event.set)))
            await event.wait()
        finally:
            self._calls.pop(key, None)

    def _add_recall(self, key: object, call: Callable[[Lease], object]) -> None:
        self._calls[key] = call
        _called.add(self)
        # The extension holds no reference to this lease, which could otherwise not be collected.
        of, id = weakref.ref(self), self.id

        def recalled() -> None:
            lease = of()
            call = lease and not lease.is_closed and lease.id == id and lease._calls.get(key)
            if lease and call:
                call(lease)

        self._native.on_recall(recalled)

    def _version_changed(self) -> None:
        for key, call in list(self._calls.items()):
            self._add_recall(key, call)

    @property
    def is_parked(self) -> bool:
        """Whether its addresses have no memory mapped."""
        return self._native.is_parked

    @property
    def is_closed(self) -> bool:
        """Whether the lease is closed."""
        return self._native.is_closed

    @property
    def exports(self) -> int:
        """The number of live exports of its arrays to other libraries: tensors, NumPy arrays, and so on."""
        return self._native.exports

    def prepare(
        self,
        name: str | None = None,
        **options: t.Unpack[t.PrepareOptions],
    ) -> Prepared:
        """Gets and imports a version for `switch`. The current version remains in use; the device holds both.

        By default any version newer than this one; `version` selects one, and `name` selects another object. It must have the same parts
        with at least the same size each, and every array that is mapped here with the same name, type, shape, strides and offset; it may
        have more. `wait` is how long to wait for the version, in seconds or a `timedelta`; the other options are as for `Broker.get`.
        Blocks for the driver calls too.

        Raises `MismatchError` with a list of the differences, and as `Broker.get`.
        """
        if options.get("version") is None and options.get("newer_than") is None and name is None:
            options["newer_than"] = self.version
        given = _arguments.options(options, "parts", "arrays", "device", "copy_on_write")
        return Prepared(self._client.prepare(self._native, name, given))

    async def prepare_async(self, name: str | None = None, **options: t.Unpack[t.PrepareOptions]) -> Prepared:
        """As `prepare`, for asyncio. If the task is cancelled, no prepared version is left. Raises as `prepare`, and `RuntimeError` without
        a running event loop."""
        from ._async import in_thread

        return await in_thread(lambda: self.prepare(name, **options))

    def switch(self, prepared: Prepared, *, exports_unused: bool = False) -> Prepared:
        """Maps a prepared version at this lease's addresses. Returns the previous version, which can be switched back to; close or drop it
        to release its lease and its memory.

        Waits until all work in the devices' primary contexts is done. Arrays then read the new version, and so do tensors, pointers and
        captured graphs with these addresses. Writes to pages of a `copy_on_write` lease are lost. **Nothing may use the memory during the
        call**: on a GPU, a kernel that does loses its context. While other libraries hold exports, `exports_unused=True` is the caller's
        promise that they do not use them. Private copies, which `state_dict` makes and
        modules get as buffers, keep the previous version's values; `Loaded.switch` refills its own.

        Raises `ExportError` (a `BufferError`) if there are exports and no promise; `Invalid` if the lease is parked, or the version was
        prepared for another layout; `Error` if the driver fails: then the previous version is mapped again, or the lease is parked.
        """
        if not isinstance(prepared, Prepared):
            raise TypeError(f"prepared has type {type(prepared).__name__}: give the result of prepare()")
        previous = Prepared(self._native.switch(prepared._native, _arguments.flag(exports_unused, "exports_unused")))
        self._version_changed()
        return previous

    def park(self, *, keep_lease: bool = False, exports_unused: bool = False) -> None:
        """Unmaps the memory and keeps the addresses reserved for `unpark`. Until then its arrays cannot be read, and nothing may use their
        addresses.

        With `keep_lease` the broker keeps this version for this process; otherwise the lease is released. Waits as `switch` does;
        `exports_unused` is the same promise, and holds until `unpark` returns. Raises as `switch`.
        """
        self._native.park(keep_lease, _arguments.flag(exports_unused, "exports_unused"))

    def unpark(
        self,
        name: str | None = None,
        **options: t.Unpack[t.UnparkOptions],
    ) -> None:
        """Maps memory at the parked addresses: the parked version by default, another `version` (int), or the `"newest"`. It must fit as
        for `prepare`, whose other options are allowed.

        Raises `Invalid` if the lease is not parked, and as `prepare`. After an error the lease remains parked, and the call can be
        repeated.
        """
        if options.get("version") is None and name is None:
            options["version"] = self.version
        newest = options.get("version")
        if isinstance(newest, str):
            if newest != "newest":
                raise Invalid(f"version={_arguments.shown(newest)} is neither a number nor \"newest\"")
            options["version"] = None
        given = _arguments.options(options, "newer_than", "parts", "arrays", "device", "copy_on_write")
        self._client.unpark(self._native, name, given)
        self._version_changed()

    def state_dict(
        self,
        *,
        writable_buffers: bool = True,
        everything: bool = False,
        module: t.Module | None = None,
        private: Iterable[str] = (),
    ) -> dict[str, t.Tensor]:
        """Returns its tensors by name, as PyTorch tensors for `module.load_state_dict(..., assign=True)`. They hold the memory and need no
        gradient. Tied names share one storage, and views are views of it.

        Parameters are the mapped memory itself, read-only, which PyTorch cannot know: a write destroys the CUDA context, or on the host
        backend kills the process. An optimizer step writes too: PyTorch gives parameters the module's previous `requires_grad`, so call
        `module.requires_grad_(False)`. So does `load_state_dict` without `assign=True`; `vmmfd.torch.guard()` makes modules refuse it.

        Every tensor that is not known to be a parameter is a private copy, which a model may write; with `writable_buffers=False` it is the
        mapped memory too. Parameters are known if the object was put as a module or with `nn.Parameter` values
        (`state_dict(keep_vars=True)`). Safetensors and plain state dicts do not mark them: give the `module` that the tensors are for.
        Embedding weights with `max_norm`, which PyTorch writes to, and tensors named in `private` are also private copies. Copies of more
        than 64 MiB cause a warning. If the lease was got with `copy_on_write`, all tensors are the memory itself and writable, and only the
        `private` tensors are copied.

        `everything=True` adds the tensors that a `state_dict` omits: non-persistent buffers, and tensors that are plain attributes of
        modules.

        Raises `MismatchError` for a type that PyTorch lacks, `Unsupported` for an object on a GPU that PyTorch does not see, `Invalid` for
        names that several parts share, and for an unknown name in `private`."""
        from .torch._get import _state_dict

        return _state_dict(self, writable_buffers=writable_buffers, everything=everything, module=module, private=private)

    def load(
        self, into: t.Module, *, strict: bool = True, writable_buffers: bool = True, private: Iterable[str] = ()
    ) -> Loaded:
        """Installs its tensors as the parameters and buffers of a PyTorch module, which may be on the meta device. Returns a
        `vmmfd.torch.Loaded`, which can switch to another version.

        Parameters are the mapped memory itself, read-only, as for `state_dict`, and need no gradient. Names that are tied in the object, or
        in the module if the object has one of them, become one parameter; if their class or attributes differ in the module, they become
        two parameters with the same memory. Everything else is a private copy, unless `writable_buffers=False`: buffers, including those in
        no `state_dict`, and tensors that are plain attributes of modules. So are the parameters named in `private`, and embedding weights
        with `max_norm`, which PyTorch writes to. A plain attribute is set where the module has a tensor. From then on `load_state_dict`
        without `assign=True` raises `ExportError`, as it would write to the memory; an optimizer step after `requires_grad_(True)` does
        write there, and kills the process. Copies of more than 64 MiB cause a warning. If the lease was got with `copy_on_write`, all
        tensors are the memory itself and writable.

        Raises `MismatchError` with a list of all mismatched names, types and shapes; the module is then unchanged. `strict=False` ignores
        names that only one side has, except attributes that would remain on the meta device."""
        from .torch._module import _load

        return Loaded(self, into, _load(self, into, strict=strict, writable_buffers=writable_buffers, private=private))

    def close(self) -> None:
        """Closes the lease and releases its memory: now if no array of it is alive, else when the last one is gone. Closing twice does
        nothing."""
        self._native.close()

    def __repr__(self) -> str:
        try:
            if self.is_closed:
                return "<vmmfd.Lease: closed>"
            parked = ", parked" if self.is_parked else ""
            return f"<vmmfd.Lease: {self.name} version {self.version}{parked}>"
        except Invalid:  # Closed by another thread, or in a fork.
            return "<vmmfd.Lease: not usable here>"

    def __reduce__(self) -> t.Any:
        raise TypeError("a Lease can't be pickled: call vmmfd.register_reducer() to send it with multiprocessing, or send its name and version")


class Prepared(Closing):
    """An imported version without a mapping, ready for `Lease.switch`. It holds the version's lease and memory until it is closed, dropped
    or switched to. A context manager that closes it."""

    __slots__ = ("__weakref__", "_native")

    def __init__(self, prepared: _native.Prepared) -> None:
        self._native = prepared

    @property
    def name(self) -> str:
        """The object's name."""
        return self._native.name

    @property
    def version(self) -> int:
        """The version, counted from 1."""
        return self._native.version

    @property
    def id(self) -> str:
        """The version's UUID."""
        return self._native.id

    @property
    def metadata(self) -> dict[str, t.Any]:
        """The maker's metadata, empty if none."""
        return self._native.metadata

    @property
    def is_closed(self) -> bool:
        """Whether it is closed, or was switched to."""
        return self._native.is_closed

    def close(self) -> None:
        """Ends its lease and releases its memory. Does nothing if it is closed or was switched to."""
        self._native.close()

    def __repr__(self) -> str:
        try:
            return "<vmmfd.Prepared: closed>" if self.is_closed else f"<vmmfd.Prepared: {self.name} version {self.version}>"
        except Invalid:  # Closed by another thread, or in a fork.
            return "<vmmfd.Prepared: not usable here>"


class Loaded:
    """A module whose parameters are the broker's memory. Returned by `Broker.load` and `Lease.load`.

    `lease` is the lease, `module` the module, and `private` the names of the tensors that are private copies. The module itself keeps the
    memory: this object is only needed for `switch` and `refresh`, and may be dropped.
    """

    def __init__(self, lease: Lease, module: t.Any, filled: t.Any) -> None:
        self.lease = lease
        self.module = module
        self.private: list[str] = filled.private
        self._filled = filled

    def refresh(self, *, ignore_moved: bool = False) -> None:
        """Copies the current version's bytes into the private copies again, in place: caches and statistics that the module has written
        there are lost. Does not wait: the copies are ordered on PyTorch's current stream. If the module was loaded with `copy_on_write`,
        only the tensors named in `private` are refreshed; writes to its other tensors are kept.

        Raises `vmmfd.Invalid` if the lease is closed or parked, and `vmmfd.MismatchError` as `switch` if tensors were replaced,
        unless `ignore_moved=True`."""
        if self.lease.is_closed:
            raise Invalid("the lease is closed: load the module again")
        if self.lease.is_parked:
            raise Invalid(f"the lease of {self.lease.name!r} is parked and has no memory: unpark it first")
        from .torch._module import _check_moved, _refresh

        if not _arguments.flag(ignore_moved, "ignore_moved"):
            _check_moved(self._filled.installed)
        _refresh(self._filled.copies)

    @property
    def version(self) -> int:
        """The current version."""
        return self.lease.version

    def prepare(self, name: str | None = None, **options: t.Any) -> Prepared:
        """Gets and imports a version for `switch`. The current version remains in use: see `Lease.prepare`."""
        return self.lease.prepare(name, **options)

    def switch(
        self,
        prepared: Prepared | None = None,
        *,
        exports_unused: bool = True,
        refresh: bool = True,
        ignore_moved: bool = False,
    ) -> Prepared:
        """Maps another version at the module's addresses. Returns the previous version, to switch back to or to close.

        `prepared` is the result of `prepare`; without it, the newest version is prepared first. Waits for the device's work, then for the
        driver calls. Tensors, views and captured CUDA graphs then have the new version's values, and so do the private copies, unless
        `refresh` is false. The caller promises that no other thread or stream uses the module during the call (`exports_unused`).

        Raises as `lease.prepare` and `lease.switch`, and `vmmfd.MismatchError` for a version of another layout. Unless `ignore_moved=True`,
        also raises `vmmfd.MismatchError`, with a list, if the module has replaced loaded parameters or buffers, for example in `half()` or
        `to()`: the new version would not reach the replacements.
        """
        from .torch._module import _check_moved

        if not _arguments.flag(ignore_moved, "ignore_moved"):
            _check_moved(self._filled.installed)
        if prepared is None:
            prepared = self.lease.prepare()
        old = self.lease.switch(prepared, exports_unused=exports_unused)
        if _arguments.flag(refresh, "refresh"):
            self.refresh(ignore_moved=True)
        return old

    def __repr__(self) -> str:
        lease = repr(self.lease).removeprefix("<vmmfd.Lease: ").removesuffix(">")
        return f"<vmmfd.torch.Loaded: {lease}, in a {type(self.module).__name__} with {len(self.private)} private copies>"

    def __reduce__(self) -> t.Any:
        raise TypeError("a Loaded can't be copied or pickled: load the module again")


class Claim(Closing):
    """The right to create an object, or a part of it, while other claimants wait: `Broker.claim`. Putting the object releases the claim.
    Closing or dropping it, or the exit of this process or the broker, passes it to the next waiting claimant. A context manager that closes
    it."""

    __slots__ = ("__weakref__", "_native", "_put", "name")

    def __init__(self, put: Callable[..., Published], name: str, claim: _native.Claim) -> None:
        self._put = put
        self._native = claim
        self.name: str = name

    def put(self, value: t.Any, **options: t.Any) -> Published:
        """Puts the object with `Broker.put` and these options, and releases the claim. Raises `Invalid` if the claim is closed, and as
        `Broker.put`; the claim then remains open."""
        if self.is_closed:
            raise Invalid(f"the claim of {self.name!r} has ended, and another process may have it: claim it again")
        published = self._put(self.name, value, **options)
        self.close()
        return published

    @property
    def is_closed(self) -> bool:
        """Whether the claim is closed."""
        return self._native.is_closed

    def close(self) -> None:
        """Passes the claim on. Does nothing if it is closed, or the object is put."""
        self._native.close()

    def __repr__(self) -> str:
        return f"<vmmfd.Claim: {self.name}{', closed' if self.is_closed else ''}>"
