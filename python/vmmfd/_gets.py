"""Gets of named objects: leases of their versions."""

from __future__ import annotations

from builtins import list as List
from collections.abc import Iterable, Mapping

from . import _arguments
from . import _types as t
from ._closing import Closing
from ._follow import Follower
from ._lease import Lease, Loaded
from ._native import Client


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

        Raises `NotFound` if there is no such object, `Timeout` if none appeared in time, `MismatchError` if it is not as expected,
        `PermissionDenied`, `Invalid`, and `Unsupported` if no device of this process can access it, or for `copy_on_write` with GPU memory,
        which CUDA cannot map this way.
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

        return await in_thread(lambda: self._got(name, options))

    def _got(self, name: str, options: Mapping[str, t.Any]) -> Lease:
        return Lease(self._native, self._native.get(name, _arguments.options(options)))

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
        newer_than: int | None = None,
        parts: Iterable[str] | None = None,
        arrays: Iterable[str] | None = None,
        expect: t.Json | None = None,
        expect_owner: int | None = None,
        wait: t.Time | None = None,
        device: t.DeviceName | None = None,
        copy_on_write: bool = False,
    ) -> Follower:
        """Follows the versions of an object: `for lease in broker.follow(name)`. See `Follower`.

        The first version is the current one, or the first that is put; with `newer_than`, a later one than this. Each step waits for at most
        `wait` seconds (or a `timedelta`); None waits for ever. The other arguments are as for `get`. Raises as any call.
        """
        expected = {"expect": expect, "expect_owner": expect_owner}
        mapping = {"parts": parts, "arrays": arrays, "device": device, "copy_on_write": copy_on_write}
        first = _arguments.options({**expected, **mapping, "newer_than": newer_than})
        self._native.check_get(name, first)
        return Follower(self._native, name, first, expected, _arguments.seconds(_arguments.endless(wait)))

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
