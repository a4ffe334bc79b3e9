"""The native half, internal but for `Array` and `Device`.

Longer than 500 lines: an extension module has one stub file.
"""

import datetime
import os
from builtins import list as List
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import EllipsisType
from typing import Any, Literal, SupportsIndex, final

from ._dtype import DType

_Index = SupportsIndex | slice | EllipsisType
_Path = str | os.PathLike[str]
_Time = float | datetime.timedelta
_DeviceName = int | str | Device
# A broker: its path, the backend, the timeout in seconds, and the users that it may belong to.
_Place = tuple[str, str, float, list[int]]

__version__: str

# Arrays

@final
class Device:
    """A device: of CUDA, or this machine's memory. Equal are those with the same UUID.

    Attributes: `uuid`, `name` and `backend` (str), `ordinal` (int).
    """

    @property
    def uuid(self) -> str:
        """Its UUID with its prefix, as `nvidia-smi -L` prints it and `CUDA_VISIBLE_DEVICES` takes it; the same in every process."""

    @property
    def ordinal(self) -> int:
        """Its number in this process, which may be another in another one."""

    @property
    def name(self) -> str:
        """Its name, such as `NVIDIA H200`."""

    @property
    def backend(self) -> Literal["cuda", "host"]:
        """Where its memory is: `host` is ordinary memory of this machine, and no GPU."""

    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...

@final
class Array:
    """A typed, strided view of memory that is shared between processes.

    It keeps the memory, and only it does: the memory stays for as long as an array of it, or what another library made of one, is there.
    Other libraries take it without a copy: `torch.from_dlpack`, `cupy.from_dlpack`, `jax.dlpack.from_dlpack`, `numpy.from_dlpack` (on the
    host backend), and what reads `__cuda_array_interface__` or, on the host backend, `__array_interface__` and the buffer protocol.

    All that this process copied with its methods is there when they return. What other libraries queue on the memory is theirs to order.

    Attributes: `shape` and `strides` (tuples of int), `dtype` (`DType`), `itemsize`, `ndim`, `size`, `nbytes` and `address` (int), `readonly`
    and `is_mapped` (bool), `device` (`Device`), `T` (`Array`). An index (int, slice, one `...`, or a tuple of them) gives an `Array`, and so
    does each step of an iteration along the first dimension.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of each dimension, in elements."""

    @property
    def dtype(self) -> DType:
        """The type of each element: a `DType`, which is a str such as `float32` or `bfloat16`, and equals the types of NumPy."""

    @property
    def __numpy_dtype__(self) -> Any:
        """The type as a `numpy.dtype`: NumPy 2.4 and newer read it. Raises `ImportError` without NumPy, or without ml_dtypes for its types."""

    @property
    def strides(self) -> tuple[int, ...]:
        """The step from an element to the next along each dimension, in bytes."""

    @property
    def itemsize(self) -> int:
        """The size of an element, in bytes."""

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""

    @property
    def size(self) -> int:
        """How many elements it has."""

    @property
    def nbytes(self) -> int:
        """The size of all its elements together, in bytes."""

    @property
    def readonly(self) -> bool:
        """Whether this process may only read it. A store all the same ends the CUDA context, or on the host backend the process."""

    @property
    def is_mapped(self) -> bool:
        """Whether another process made its memory."""

    @property
    def device(self) -> Device:
        """The device that uses it here."""

    @property
    def address(self) -> int:
        """The address of its first element: a `CUdeviceptr`, or on the host backend an address of this process.

        Raises `Error` while nothing is mapped there, and in a fork."""

    @property
    def _memory(self) -> Memory | None:
        """The memory of this process's own that it is in, which a broker can be given without a copy."""

    @property
    def T(self) -> Array:
        """The same elements with the axes in reverse order."""

    def transpose(self, *axes: int | Sequence[int]) -> Array:
        """The same elements with the axes in this order; without any, in reverse order. Raises `Invalid` unless each is named once."""

    def __len__(self, /) -> int: ...
    def __getitem__(self, index: _Index | tuple[_Index, ...], /) -> Array:
        """The part of it that whole numbers, slices and one ellipsis select: a view, also of one element.

        Raises `IndexError` for what is outside, `TypeError` for other indices."""

    def __iter__(self, /) -> Iterator[Array]: ...
    def reinterpret(self, dtype: Any, shape: int | Sequence[int] | None = None) -> Array:
        """The same bytes as elements of another type: a view.

        Without a `shape` the last dimension grows or shrinks. `dtype` is a name, or a dtype of NumPy, ml_dtypes, JAX or PyTorch. Raises
        `Invalid` if the bytes do not fit, or the elements have gaps between them."""

    def writable(self, by: Literal["promise"]) -> Array:
        """The same array, said to be writable to other libraries although it may only be read here.

        For libraries that know no read-only arrays (a consumer of DLPack before version 1.0; PyTorch's `__cuda_array_interface__`). The
        word is the caller's promise that nothing writes to it: a store into memory that is mapped read-only ends the CUDA context of
        this process, with all that is in it (Xid 31), and on the host backend the process (SIGSEGV). `readonly` stays as it is."""

    def copy_from(self, source: Any) -> None:
        """Copies the elements of another array of this shape and type into it: of anything that `asarray` takes.

        Blocks, with the GIL released, until they are there. What Ctrl-C or an error ends leaves it partly written. Raises `Invalid` for
        another shape or type, and for an array that is on a GPU while this one is not or the other way round; `Denied` or `Error` if it may
        only be read."""

    def copy_to(self, destination: Any) -> None:
        """Copies its elements into another array of this shape and type, which is writable. Blocks, with the GIL released, until they are
        there. Raises as `copy_from`."""

    def tobytes(self) -> bytes:
        """Its elements as bytes, in C order. Blocks, with the GIL released."""

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule for another library, as the array API standard has it.

        On CUDA `stream` is 1 (legacy default), 2 (per-thread default), a stream, -1 or `None`; 0 is an error, and on the host anything but
        `None`. No stream waits: what this process copied is there. `copy=True` is a contiguous copy in new memory.

        Raises `BufferError` for read-only memory unless `max_version` is at least (1, 0) (see `writable`), for another `dl_device`, and
        for elements that DLPack has no code for; `Invalid` for a stream that is none."""

    def _capsule(self) -> Any:
        """A capsule of DLPack without the read-only flag, for which no stream waits: the caller promises not to write."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's type of device, and its number in this process."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The CUDA array interface, version 3; its `stream` is `None`, as all is synchronised.

        Raises `AttributeError` on the host backend and for elements without a typestr (`bfloat16`, the 8-bit floats)."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """NumPy's array interface, version 3. Raises `AttributeError` on a GPU and for elements without a typestr."""

    def __array__(self, dtype: Any = None, *, copy: bool | None = None) -> Any:
        """The elements as an array of NumPy, in the same memory. NumPy calls it for types of ml_dtypes, and for memory of a GPU: raises
        `TypeError` for that, and without ml_dtypes."""

    def __buffer__(self, flags: int, /) -> memoryview:
        """The buffer protocol, on the host backend. Raises `BufferError` on a GPU, for a view to write of read-only memory, and for
        elements without a format."""

    def __reduce__(self) -> Any:
        """Raises `TypeError`: memory can't be pickled."""

@final
class Memory:
    """Memory of this process's own, in bytes. Internal: what the broker is given."""

    def __new__(cls, size: int, *, device: _DeviceName | None = None, backend: str = "auto") -> Memory: ...
    @property
    def address(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def mapped_size(self) -> int: ...
    @property
    def device(self) -> Device: ...
    def array(
        self, dtype: Any, shape: int | Sequence[int], strides: Sequence[int] | None = None, offset: int = 0
    ) -> Array:
        """An array in it, `offset` bytes from its beginning."""

def empty(
    shape: int | Sequence[int], dtype: Any, *, device: _DeviceName | None = None, backend: str = "auto"
) -> Array:
    """Makes an `Array` in new shared memory. Contents are undefined.

    `shape` (int, or a sequence of int) is in elements. `dtype` is a str (`"float32"`, `"bfloat16"`, `"float8_e4m3fn"`, `"<f4"`), or a dtype
    of NumPy, ml_dtypes, JAX or PyTorch. `device` (int, str or `Device`) is a number in this process, a UUID or the beginning of one, or a
    `Device`; the first one by default. `backend` (str) is `"cuda"`, `"host"`, or `"auto"`: CUDA, and the host only where there is no driver
    or no device.

    Blocks, with the GIL released, while the driver allocates, and the first time while it starts. Raises `Invalid`, also for types that
    readers would not get back as they are (with fields, of less than 8 bits, objects, strings, times); `OutOfMemory`; `NotFound` or `Error`
    for a device that is not there; `Unsupported`."""

def asarray(object: Any, *, device: _DeviceName | None = None, backend: str = "auto") -> Array:
    """Copies an array of another library into new shared memory, in C order. Returns an `Array`.

    `object` speaks the buffer protocol, NumPy's array interface, DLPack or the CUDA array interface; or is an `Array`, which is copied
    too, or a scalar of NumPy. On CUDA the copy is on the device that the array is on, or on `device` (int, str or `Device`). `backend` (str) is
    as for `empty`. Blocks, with the GIL released, until it is there. Raises as `empty`, and `Invalid` for an object that is no array, and
    for one on a GPU while `backend` is the host."""

def devices(backend: str = "auto") -> list[Device]:
    """The devices that this process sees, a list of `Device` by number: `CUDA_VISIBLE_DEVICES` is applied. The first time it starts the driver."""

def device_uuid(ordinal: int = 0, *, backend: str = "auto") -> str:
    """The UUID (str) of a device by its number in this process (int), with its prefix. Raises `Error` if there is none."""

def same_device(
    a: Device | Array | int | str | bytes | object, b: Device | Array | int | str | bytes | object
) -> bool:
    """Whether two names are of one device (bool).

    A name is a `Device`, an `Array`, a number in this process (int), a UUID (str) in any case, with or without `GPU-` or `MIG-` before it, or the
    beginning of one, as `CUDA_VISIBLE_DEVICES` has it; the 16 bytes of one; or what prints itself as one. Raises `Invalid` for what
    names none."""

def _dtype_name(object: Any, strict: bool) -> str | None:
    """The spelling of the type that an object is. With `strict` raises `Invalid` for an object that is no type, without it returns None."""

def _settle(timeout: float) -> bool:
    """Waits until the memory that was dropped is given back. False if that took longer than `timeout` seconds."""

def _serve(
    path: _Path | None, array: Array, consumers: int, timeout: _Time
) -> list[tuple[int, int, str | None]]: ...
def _take(
    path: _Path | None, device: _DeviceName | None, backend: str, readonly: bool, wait: _Time
) -> Array: ...

@final
class _OpenedHandle:
    @property
    def array(self) -> Array: ...
    def close(self, force: bool) -> None: ...

def _legacy_empty(
    shape: int | Sequence[int], dtype: Any, device: _DeviceName | None, backend: str
) -> Array: ...
def _legacy_handle(array: Array) -> tuple[bytes, int]: ...
def _legacy_open(
    handle: bytes,
    shape: int | Sequence[int],
    dtype: Any,
    strides: Sequence[int] | None,
    offset: int,
    device: _DeviceName | None,
    backend: str,
) -> _OpenedHandle: ...

@final
class _Pool:
    def __new__(cls, max_size: int | None, device: _DeviceName | None, backend: str) -> _Pool: ...
    @property
    def max_size(self) -> int | None: ...
    @property
    def used(self) -> int: ...
    @property
    def device(self) -> Device: ...
    def empty(self, shape: int | Sequence[int], dtype: Any) -> Array: ...
    def close(self) -> None: ...

# Broker

_Expected = Mapping[str, Any]
_Digest = str | Mapping[str, str]
_Entry = tuple[str, str, list[int], list[int] | None, int, int, str | None]
_PartPlan = tuple[str, list[Memory], list[_Entry], str | None]
_Request = tuple[
    str, int | None, int | None, list[str] | None, list[str] | None, _Expected | None, int | None, _Digest | None
]

@final
class Client:
    def __new__(cls, path: _Path | None, backend: str, timeout: _Time, trust: list[int]) -> Client: ...
    @property
    def path(self) -> os.PathLike[str]: ...
    @property
    def backend(self) -> str: ...
    @property
    def place(self) -> _Place: ...
    @property
    def is_closed(self) -> bool: ...
    def close(self) -> None: ...
    def put(
        self,
        name: str,
        parts: list[_PartPlan],
        *,
        replace: bool | int | None = None,
        metadata: Mapping[str, Any] | None = None,
        mode: int | None = None,
        lifetime: str | _Time | None = None,
        keep: int | None = None,
        announced: list[str] | None = None,
        group: str | None = None,
        wait: _Time | None = None,
    ) -> tuple[int, str]: ...
    def plan(
        self,
        values: list[tuple[str, Any]],
        part: str,
        *,
        device: _DeviceName | None = None,
        copy: bool | None = None,
    ) -> _PartPlan: ...
    def get(
        self,
        name: str,
        *,
        version: int | None = None,
        newer_than: int | None = None,
        parts: list[str] | None = None,
        arrays: list[str] | None = None,
        expect: _Expected | None = None,
        expect_owner: int | None = None,
        digest: _Digest | None = None,
        wait: _Time | None = None,
        device: _DeviceName | None = None,
        copy_on_write: bool = False,
    ) -> Lease: ...
    def get_all(
        self,
        requests: list[_Request],
        *,
        wait: _Time | None = None,
        device: _DeviceName | None = None,
        copy_on_write: bool = False,
    ) -> list[Lease]: ...
    def claim(
        self,
        name: str,
        *,
        part: str | None = None,
        group: str | None = None,
        expect: _Expected | None = None,
        expect_owner: int | None = None,
        digest: _Digest | None = None,
        parts: list[str] | None = None,
        arrays: list[str] | None = None,
        wait: _Time | None = None,
        device: _DeviceName | None = None,
        copy_on_write: bool = False,
    ) -> Lease | Claim: ...
    def prepare(
        self,
        lease: Lease,
        name: str | None = None,
        *,
        version: int | None = None,
        newer_than: int | None = None,
        expect: _Expected | None = None,
        expect_owner: int | None = None,
        digest: _Digest | None = None,
        wait: _Time | None = None,
    ) -> Prepared: ...
    def unpark(
        self,
        lease: Lease,
        name: str | None = None,
        *,
        version: int | None = None,
        expect: _Expected | None = None,
        expect_owner: int | None = None,
        digest: _Digest | None = None,
        wait: _Time | None = None,
    ) -> None: ...
    def shared(
        self, name: str, version: int, id: str, part: str, start: int, length: int
    ) -> Lease | None: ...
    def list(self, prefix: str) -> List[dict[str, Any]]: ...
    def stat(self, name: str, version: int | None = None) -> dict[str, Any]: ...
    def who(self, prefix: str) -> tuple[List[dict[str, Any]], List[dict[str, Any]]]: ...
    def delete(self, name: str) -> None: ...
    def watch(self, prefix: str, after: tuple[str, int] | None = None) -> Watch: ...
    def on_lost(self, call: Callable[[str, int, str, str, str], object]) -> None: ...
    def on_restored(self, call: Callable[[str, int, str, bool], object]) -> None: ...

@final
class Lease:
    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def id(self) -> str: ...
    @property
    def created(self) -> float: ...
    @property
    def owner(self) -> tuple[int, int]: ...
    @property
    def metadata(self) -> dict[str, Any]: ...
    @property
    def is_held(self) -> bool: ...
    @property
    def is_parked(self) -> bool: ...
    @property
    def is_closed(self) -> bool: ...
    @property
    def copy_on_write(self) -> bool: ...
    @property
    def exports(self) -> int: ...
    @property
    def selection(self) -> tuple[list[str] | None, list[str] | None]: ...
    @property
    def parts(self) -> list[tuple[str, int, int, str | None, str, int]]: ...
    def keys(self) -> list[str]: ...
    def __contains__(self, name: str, /) -> bool: ...
    def array(self, name: str, part: str | None = None) -> Array: ...
    def arrays(self, part: str | None = None) -> list[tuple[str, str, Array, dict[str, Any] | None, bool]]: ...
    def attributes(self, name: str, part: str | None = None) -> dict[str, Any] | None: ...
    def memory(self, part: str | None = None) -> list[tuple[int, Array]]: ...
    def view(
        self, part: str, dtype: str, shape: list[int], strides: list[int] | None, offset: int
    ) -> Array: ...
    def switch(self, prepared: Prepared, promised: bool) -> Prepared: ...
    def park(self, keep_lease: bool, promised: bool) -> None: ...
    def close(self) -> None: ...

@final
class Prepared:
    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def id(self) -> str: ...
    @property
    def metadata(self) -> dict[str, Any]: ...
    @property
    def is_closed(self) -> bool: ...
    def close(self) -> None: ...

@final
class Claim:
    @property
    def is_closed(self) -> bool: ...
    def close(self) -> None: ...

@final
class Watch:
    def next(self, timeout: _Time | None) -> dict[str, Any] | None: ...
    @property
    def place(self) -> tuple[str, int]: ...
    @property
    def is_closed(self) -> bool: ...
    def close(self) -> None: ...

def _check_interpreter() -> None:
    """Raises `ImportError` in a sub-interpreter."""

def origin(array: Array) -> (
    tuple[
        _Place,
        tuple[str, int, str],
        tuple[str, int, int],
        tuple[str, list[int], list[int] | None, int],
    ]
    | None
): ...

# PyTorch

def torch_pool_open(device: int, arena: int, size: int | None = None) -> None: ...
def torch_pool_find(address: int) -> tuple[Memory, int] | None: ...
def torch_pool_close(address: int) -> bool: ...
def torch_pool_figures(device: int) -> dict[str, int]: ...
def torch_pool_trouble() -> str | None: ...
def make_read_only(memory: Memory, promised: bool = False) -> None: ...
def check_read_only(memories: list[Memory], promised: bool = False) -> None: ...

# Weights

@final
class Weights:
    def names(self) -> list[str]: ...
    def __len__(self) -> int: ...
    def __contains__(self, name: object, /) -> bool: ...
    def __getitem__(self, name: object, /) -> Array: ...
    @property
    def memory(self) -> Memory: ...
    @property
    def metadata(self) -> str: ...
    @property
    def files(self) -> list[str]: ...
    @property
    def digest(self) -> str | None: ...
    def entries(self) -> list[_Entry]: ...

def load_safetensors(
    paths: Sequence[str],
    *,
    backend: str = "auto",
    device: _DeviceName | None = None,
    digest: bool = False,
    progress: Callable[[int, int], object] | None = None,
    threads: int | None = None,
) -> Weights: ...
