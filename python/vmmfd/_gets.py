"""Gets of named objects: leases of their versions."""

from __future__ import annotations

from builtins import list as List
from collections.abc import Iterable, Iterator, Mapping
from time import monotonic

from . import _arguments
from . import _types as t
from ._closing import Closing
from ._errors import NotFound, Timeout
from ._lease import Lease, Loaded
from ._native import Client, Stop
from ._watch import Watch


class Gets(Closing):
    """The gets of a `Broker`."""

    __slots__ = ()

    _native: Client

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
        wait: t.Time = 0,
        device: t.DeviceName | None = None,
        copy_on_write: bool = False,
    ) -> Lease:
        """Leases an object and maps its memory: read-only, unless `copy_on_write` is true.

        Returns the current version, unless `version` names another available version; `newer_than` requires a later one. `parts` and
        `arrays` limit the mapping to the segments that contain them. `expect` gives metadata fields and the values they must have, compared
        as JSON: 1 differs from 1.0, and a nested mapping must have the same fields. `expect_owner` is the user id that must own the name.
        `digest` is the expected digest of the only part, or a mapping of parts to digests. `device` maps the memory on another device that
        can access it. `wait` is how long to wait for the object, in seconds or a `timedelta`: 0 does not wait, `float("inf")` waits for
        ever.

        With `copy_on_write=True` the arrays are writable and the writes private to this process, as with `torch.load(mmap=True)`: the
        kernel copies each page at its first write. `switch` and `park` discard the writes. Host backend only.

        Raises `NotFound` if there is no such object, `Timeout` if none appeared in time, `Differs` if it is not as expected, `Denied`,
        `Invalid`, and `Unsupported` if no device of this process can access it, or for `copy_on_write` with GPU memory, which CUDA cannot
        map this way.
        """
        options = {
            "version": version,
            "newer_than": newer_than,
            "parts": parts,
            "arrays": arrays,
            "expect": expect,
            "expect_owner": expect_owner,
            "digest": digest,
            "wait": wait,
            "device": device,
            "copy_on_write": copy_on_write,
        }
        return self._got(name, options)

    async def get_async(self, name: str, **options: t.Unpack[t.GetOptions]) -> Lease:
        """As `get`, for asyncio: the event loop runs other tasks meanwhile. Each call in progress has its own thread and connection.

        If the task is cancelled, no lease is left: the wait ends within 40 ms, and a lease that arrives anyway is closed. Raises as `get`,
        and `RuntimeError` without a running event loop.
        """
        from ._async import in_thread

        stop = Stop()
        return await in_thread(lambda: self._got(name, options, stop), stop)

    def _got(self, name: str, options: Mapping[str, t.Any], stop: Stop | None = None) -> Lease:
        return Lease(self._native, self._native.get(name, _arguments.options(options), stop))

    def get_all(
        self,
        wanted: Iterable[str] | Mapping[str, Mapping[str, t.Any]],
        *,
        wait: t.Time = 0,
        device: t.DeviceName | None = None,
        copy_on_write: bool = False,
    ) -> List[Lease]:
        """Leases several objects as of one moment, all or none. Returns the leases in the order of `wanted`.

        `wanted` is a sequence of unique names, or a mapping of names to `get`'s options `version`, `newer_than`, `parts`, `arrays`,
        `expect`, `expect_owner` and `digest`. Waits up to `wait`, in seconds or a `timedelta`, until all exist. `copy_on_write` applies to
        all of them. Raises as `get`.
        """
        requests = _arguments.requests(wanted)
        options = _arguments.options({"wait": wait, "device": device, "copy_on_write": copy_on_write})
        leases = self._native.get_all(requests, options)
        return [Lease(self._native, lease) for lease in leases]

    def follow(
        self,
        name: str,
        *,
        parts: Iterable[str] | None = None,
        arrays: Iterable[str] | None = None,
        expect: t.Json | None = None,
        expect_owner: int | None = None,
        wait: t.Time | None = None,
        device: t.DeviceName | None = None,
    ) -> Iterator[Lease]:
        """Yields a lease of each new version of an object, for `for lease in broker.follow(name)`: the current version first, or the first
        version that is put.

        It is the same lease each time, switched to the new version in place (`Lease.switch`): arrays, and the views that other libraries
        made of them, keep their addresses and read the new version. So finish all work on them before the next step: **asking for the next
        version is the promise that nothing uses them until it is there.** If versions are put faster than the loop runs, it skips to the
        newest. An object that is deleted and put again is followed too. The lease is closed after the loop.

        Blocks until there is a version, for at most `wait` seconds each time; None waits for ever. The iteration stops when the wait
        expires. The other arguments are as for `get`.

        Raises `Differs` if a new version has another layout: leave the loop and follow again. Raises as `get` and `Lease.prepare`.
        """
        options: dict[str, t.Any] = {"expect": expect, "expect_owner": expect_owner}
        with Watch(self._native.watch(name, None), None) as events:
            try:
                lease = self.get(
                    name, parts=parts, arrays=arrays, wait=_arguments.endless(wait), device=device, **options
                )
            except (Timeout, NotFound) as error:
                if _is_absent(error):
                    return
                raise
            with lease:
                yield lease
                while self._next_version(lease, events, _arguments.endless(wait), options):
                    yield lease

    @staticmethod
    def _next_version(lease: Lease, events: Watch, wait: t.Time, options: dict[str, t.Any]) -> bool:
        """Switches a lease to the next version. Returns False if none was put in time."""
        ends = monotonic() + _arguments.seconds(wait)
        while event := events.next(max(0.0, ends - monotonic())):
            is_new = event.kind in ("published", "replaced") and event.name == lease.name and event.id != lease.id
            if not is_new and event.kind != "lost":
                continue
            try:
                prepared = lease.prepare(lease.name, **options)
            except NotFound as error:
                if _is_absent(error):  # Deleted again.
                    continue
                raise
            with prepared:
                if prepared.id != lease.id:
                    lease.switch(prepared, exports_unused=True).close()
                    return True
        return False

    def state_dict(
        self,
        name: str,
        *,
        writable_buffers: bool = True,
        everything: bool = False,
        module: t.Module | None = None,
        private: Iterable[str] = (),
        **options: t.Unpack[t.GetOptions],
    ) -> dict[str, t.Tensor]:
        """Returns the object's tensors by name, as PyTorch tensors for `module.load_state_dict(..., assign=True)`. They hold the lease.

        Parameters are mapped; all other tensors are private copies. Safetensors and plain state dicts do not say which tensors are
        parameters, so all would be copied: use `load` for them, or give `module=`. A write to a mapped tensor kills the process. PyTorch
        gives parameters the module's previous `requires_grad`, so call `module.requires_grad_(False)` before an optimizer step. On the host
        backend `copy_on_write=True` makes all tensors writable without copies. See `Lease.state_dict`; the other arguments and errors are
        those of `get`."""
        with self.get(name, **options) as lease:
            return lease.state_dict(
                writable_buffers=writable_buffers, everything=everything, module=module, private=private
            )

    def load(
        self,
        name: str,
        into: t.Module,
        *,
        strict: bool = True,
        writable_buffers: bool = True,
        private: Iterable[str] = (),
        **options: t.Unpack[t.GetOptions],
    ) -> Loaded:
        """Installs an object's tensors as the parameters and buffers of a PyTorch module. Returns a `Loaded`, which can switch to another
        version. The module holds the lease. See `Lease.load`; the other arguments and errors are as for `get`."""
        lease = self.get(name, **options)
        try:
            return lease.load(into, strict=strict, writable_buffers=writable_buffers, private=private)
        except BaseException:
            lease.close()
            raise


def _is_absent(error: Timeout | NotFound) -> bool:
    """Returns whether an error means that there is no such object: not that there is no broker, or no such array."""
    return type(error) is Timeout or type(error) is NotFound and error.kind == "object"
