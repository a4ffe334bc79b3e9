"""The native extension. Internal, except `Array` and `Device`.

Longer than 500 lines: an extension module has one stub file.
"""

import datetime
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import EllipsisType
from typing import Any, Literal, SupportsIndex, TypeVar, final

from ._dtype import DType
from .records import Event

_T = TypeVar("_T")
_Index = SupportsIndex | slice | EllipsisType
_Path = str | os.PathLike[str]
_Time = float | datetime.timedelta
_DeviceName = int | str | Device
_Rdma = bool | Literal["auto"]
# A broker: path, backend, timeout in seconds, trusted user ids.
_Place = tuple[str, str, float, list[int]]

__version__: str

# Arrays

@final
class Device:
    """A CUDA device, or this machine's memory. Devices with the same UUID are equal.

    Attributes: `uuid`, `name` and `backend` (str), `ordinal` (int).
    """

    @property
    def uuid(self) -> str:
        """The UUID with its prefix, as in `nvidia-smi -L` and `CUDA_VISIBLE_DEVICES`; the same in every process."""

    @property
    def ordinal(self) -> int:
        """The ordinal in this process; other processes may number devices differently."""

    @property
    def name(self) -> str:
        """The name, such as `NVIDIA H200`."""

    @property
    def backend(self) -> Literal["cuda", "host"]:
        """Where the memory is: `host` is ordinary memory of this machine, not a GPU."""

    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...

@final
class Array:
    """A typed, strided view of memory that is shared between processes.

    The memory remains mapped while an `Array` of it, or an object that another library made from one, exists. Other libraries use it
    without a copy through `torch.from_dlpack`, `cupy.from_dlpack`, `jax.dlpack.from_dlpack`, `numpy.from_dlpack` (on the host backend),
    `__cuda_array_interface__` and, on the host backend, `__array_interface__` and the buffer protocol.

    `int`, `float`, `complex`, `bool` and `operator.index` convert the only element, and raise `TypeError` for another number of elements.

    Copies made by its methods are complete when the methods return. The caller must order work that other libraries queue on the memory.

    Attributes: `shape` and `strides` (tuples of int), `dtype` (`DType`), `itemsize`, `ndim`, `size`, `nbytes` and `address` (int),
    `readonly` and `is_mapped` (bool), `device` (`Device`), `T` (`Array`). An index (int, slice, one `...`, or a tuple of them) returns an
    `Array`, as does each step of an iteration along the first dimension.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of each dimension, in elements."""

    @property
    def dtype(self) -> DType:
        """The element type: a `DType`, a str such as `float32` or `bfloat16` that equals NumPy's types."""

    @property
    def __numpy_dtype__(self) -> Any:
        """The type as a `numpy.dtype`, read by NumPy 2.4 and newer. Raises `ImportError` without NumPy, or without ml_dtypes for its
        types."""

    @property
    def strides(self) -> tuple[int, ...]:
        """The step between elements along each dimension, in bytes."""

    @property
    def itemsize(self) -> int:
        """The size of an element, in bytes."""

    @property
    def ndim(self) -> int:
        """The number of dimensions."""

    @property
    def size(self) -> int:
        """The number of elements."""

    @property
    def nbytes(self) -> int:
        """The total size of its elements, in bytes."""

    @property
    def readonly(self) -> bool:
        """Whether this process may only read it. A write would destroy the CUDA context, or on the host backend kill the process."""

    @property
    def is_mapped(self) -> bool:
        """Whether another process created its memory."""

    @property
    def device(self) -> Device:
        """The device on which this process uses it."""

    @property
    def address(self) -> int:
        """The address of its first element: a `CUdeviceptr`, or on the host backend an address of this process.

        Raises `Error` while no memory is mapped there, and in a fork."""

    @property
    def _memory(self) -> Memory | None:
        """The memory that contains it, if this process created it and can publish it without a copy."""

    @property
    def T(self) -> Array:
        """The same elements with the axes in reverse order."""

    def transpose(self, *axes: int | Sequence[int]) -> Array:
        """The same elements with the `axes` (int) in this order; without arguments, in reverse order. Raises `Invalid` unless each axis appears
        once."""

    def reshape(self, *shape: int | Sequence[int]) -> Array:
        """The same elements in another shape, without a copy. `shape` is an int or a sequence of int; the length -1 takes the elements that are
        left. Raises `Invalid` if the elements do not fit the shape, or are not contiguous."""

    def __len__(self, /) -> int: ...
    def __getitem__(self, index: _Index | tuple[_Index, ...], /) -> Array:
        """A view selected by integers, slices and at most one ellipsis; a view even for a single element.

        Raises `IndexError` for an index out of range, `TypeError` for other kinds of index."""

    def __setitem__(self, index: _Index | tuple[_Index, ...], value: Any, /) -> None:
        """Sets the selected elements, as NumPy does: to a number, or to an array that can be broadcast to their shape. A value on a GPU must
        have their shape and type. Raises as `__getitem__` and `fill`."""

    def __iter__(self, /) -> Iterator[Array]: ...
    def reinterpret(self, dtype: Any, shape: int | Sequence[int] | None = None) -> Array:
        """A view of the same bytes as another element type.

        Without `shape`, the last dimension grows or shrinks. `dtype` is a name, or a dtype of NumPy, ml_dtypes, JAX or PyTorch. Raises
        `Invalid` if the size does not fit, or the elements are not contiguous."""

    def writable(self, *, never_written: bool = False) -> Array:
        """The same array, exported as writable although this process may only read it.
        
        For libraries without read-only arrays (DLPack consumers before version 1.0; PyTorch's `__cuda_array_interface__`).
        `never_written=True` (bool) is the caller's promise that nothing writes to it: a store into memory that is mapped read-only destroys
        the CUDA context of this process and everything in it (Xid 31), or on the host backend kills the process (SIGSEGV). `readonly` is
        unchanged. Raises `Invalid` without the promise."""

    def numpy(self) -> Any:
        """Returns a NumPy array of the same memory, without a copy; writable unless `readonly`. Raises `TypeError` for GPU memory, and without
        ml_dtypes for its types; `ImportError` without NumPy."""

    def tolist(self) -> Any:
        """Returns its elements as nested lists of Python numbers (bool, int, float, complex; bytes for void); for an array without
        dimensions, the number itself. Blocks while it copies, also from a GPU. Raises `TypeError` for the 8-bit floats without ml_dtypes."""

    def item(self) -> Any:
        """Returns the only element as a Python number, as `tolist` does. Raises `Invalid` unless `size` is 1."""

    def __int__(self, /) -> int: ...
    def __float__(self, /) -> float: ...
    def __complex__(self, /) -> complex: ...
    def __bool__(self, /) -> bool: ...
    def __index__(self, /) -> int: ...
    def copy_from(self, source: Any) -> None:
        """Copies the elements of another array, of the same shape and type, into it. `source` is any object that `asarray` accepts.

        Blocks, with the GIL released, until the copy is complete. An error or Ctrl-C leaves it partly written. Raises `Invalid` for another
        shape or type, for a copy between a GPU and the host, and if it is read-only."""

    def fill(self, value: Any) -> None:
        """Sets all elements to `value`, converted as NumPy does. Blocks. A GPU gets a copy of an array of this size that is filled in host
        memory. Raises `Invalid` if the array is read-only; `ImportError` without NumPy, or without ml_dtypes for its types; NumPy's
        `TypeError`, `ValueError` and `OverflowError` for a value that does not convert; and as `copy_from`."""

    def copy(self) -> Array:
        """Returns a contiguous copy in new shared memory of the same device, writable. Blocks, with the GIL released. Raises as `empty`."""

    def copy_to(self, destination: Any) -> None:
        """Copies its elements into another array, `destination`, which is writable and of the same shape and type. Blocks, with the GIL
        released, until the copy is complete. Raises as `copy_from`."""

    def tobytes(self) -> bytes:
        """Returns its elements as bytes, in C order. Blocks, with the GIL released."""

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Returns a DLPack capsule, as defined by the array API standard.

        On CUDA, `stream` is 1 (legacy default), 2 (per-thread default), a stream, -1 or `None`; 0 is an error. On the host it must be
        `None`. No stream waits: this process's copies are complete. An array of a sample that was received for another stream blocks until
        that stream is done, with the GIL released. `copy=True` returns a contiguous copy in new memory.

        Raises `BufferError` for read-only memory unless `max_version` is at least (1, 0) (see `writable`), for another `dl_device`, and for
        element types without a DLPack code; `Invalid` for an invalid stream, and `Unsupported` for a stream on the host."""

    def _capsule(self) -> Any:
        """Returns a DLPack capsule without the read-only flag; no stream waits. The caller promises not to write."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """The DLPack device type, and the device's ordinal in this process."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The CUDA array interface, version 3. Its `stream` is `None`, as all copies are complete; of a sample that was received for a stream, it
        is the stream.

        Raises `AttributeError` on the host backend and for element types without a typestr (`bfloat16`, the 8-bit floats)."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """NumPy's array interface, version 3. Raises `AttributeError` on a GPU and for element types without a typestr."""

    def __array__(self, dtype: Any = None, *, copy: bool | None = None) -> Any:
        """Returns a NumPy array of the same memory. NumPy calls it for ml_dtypes types. Raises `TypeError` for GPU memory, and without
        ml_dtypes for its types."""

    def __buffer__(self, flags: int, /) -> memoryview:
        """The buffer protocol, on the host backend. Raises `BufferError` on a GPU, for a writable view of read-only memory, and for element
        types without a format."""

    def __copy__(self) -> Any:
        """Raises `TypeError`: whether the copy would share the memory is not clear."""

    def __reduce__(self) -> Any:
        """Raises `TypeError`: memory can't be pickled."""

@final
class Memory:
    """Memory created by this process, in bytes. Internal: a put passes it to the broker."""

    def __new__(
        cls,
        size: int,
        *,
        device: _DeviceName | None = None,
        backend: str | None = None,
        segment: int | None = None,
        sealed: bool = False,
    ) -> Memory: ...
    def seal(self) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def mapped_size(self) -> int: ...
    @property
    def device(self) -> Device: ...
    @property
    def rdma(self) -> bool: ...
    @property
    def copied(self) -> bool: ...
    def array(
        self, dtype: Any, shape: int | Sequence[int], strides: Sequence[int] | None = None, offset: int = 0
    ) -> Array:
        """Returns an array at a byte offset in it."""

def share(value: Any, *, neighbours: bool = False) -> Any:
    """Shares arrays of other libraries on a GPU without a copy: returns an `Array` over the memory of `value`, or for a mapping of names to
    arrays a dict of such arrays, which `Broker.put` and `serve` publish as they are.

    For memory that was allocated with `cuMemCreate`: by PyTorch with `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, and by JAX. Such an
    allocation usually contains other arrays too, the neighbours, and **every process that receives the array can read and write them**:
    without `neighbours=True` the call fails unless the arrays fill their allocations. Share all arrays of an object in one call: each
    allocation is then shared once.

    The result is read-only here; write through the original. It keeps the memory and `value` alive. **Keep it for as long as another process
    uses the memory**, also after a put: once `value` is freed, its library puts other data there, and receivers see it. An `Array` in memory
    that this process created is returned as it is. Blocks for the driver, about 0.1 ms for each allocation, with the GIL released.

    Raises `Unsupported` for memory that can't be exported, with the reason and the remedy, also for arrays in the CPU's memory; `Invalid` for
    neighbours without `neighbours=True`; `TypeError` for an object that is not an array; `Error` for a driver error."""

def empty(
    shape: int | Sequence[int],
    dtype: Any = "float64",
    *,
    device: _DeviceName | None = None,
    backend: str | None = None,
    rdma: _Rdma = "auto",
) -> Array:
    """Creates an `Array` in new shared memory. Contents are undefined.

    `shape` (int, or a sequence of int) is in elements. `dtype` is a str (`"float32"`, `"bfloat16"`, `"float8_e4m3fn"`, `"<f4"`), or a dtype
    of NumPy, ml_dtypes, JAX or PyTorch; as in NumPy `float64` by default. `device` (int, str or `Device`) is an ordinal in this process, a UUID or its first characters, or a
    `Device`; the first device by default. `backend` (str or None) is `"cuda"`, `"host"`, or `"auto"`: CUDA, or the host if there is no
    driver or no device; by default the environment variable `VMMFD_BACKEND`, else `"auto"`. `rdma` is whether RDMA can reach the memory
    (`gpuDirectRDMACapable`), for network cards: `"auto"` where the device reports support, never on WSL2; `True` requires it; `False`
    never.

    Blocks, with the GIL released, while the driver allocates, and on first use while it starts. Raises `Invalid`, also for types that
    readers could not restore (with fields, below 8 bits, objects, strings, times); `OutOfMemory`; `NotFound` or `Error` for a missing
    device; `Unsupported`, also for `rdma=True` on a device without support, on WSL2 and on host memory."""

def asarray(object: Any, *, device: _DeviceName | None = None, backend: str | None = None) -> Array:
    """Copies an array of another library into new shared memory, in C order. Returns an `Array`.

    `object` supports the buffer protocol, NumPy's array interface, DLPack or the CUDA array interface; or it is a NumPy scalar, or an
    `Array`, which is copied too. On CUDA the copy is on the array's device, or on `device` (int, str or `Device`). `backend` (str or None)
    is as for `empty`. Blocks, with the GIL released, until the copy is complete. Raises as `empty`, `TypeError` for an object that is not an
    array, and `Invalid` for a GPU array with the host backend."""

def empty_like(object: Any, *, device: _DeviceName | None = None, backend: str | None = None) -> Array:
    """Creates an `Array` of the shape, type and device of another array in new shared memory. Contents are undefined.

    The arguments are those of `asarray`: `object`, `device` (int, str or `Device`) and `backend` (str or None). Returns an `Array`, in C
    order. Raises as `asarray`."""

def zeros(
    shape: int | Sequence[int],
    dtype: Any = "float64",
    *,
    device: _DeviceName | None = None,
    backend: str | None = None,
    rdma: _Rdma = "auto",
) -> Array:
    """Creates an `Array` in new shared memory, filled with zeros.

    The arguments are those of `empty`: `shape` (int, or a sequence of int), `dtype`, `device` (int, str or `Device`), `backend` (str or
    None) and `rdma`. Blocks, with the GIL released. Raises as `empty`."""

def devices(*, backend: str | None = None) -> list[Device]:
    """Returns the visible devices, a list of `Device` by ordinal: `CUDA_VISIBLE_DEVICES` applies. The first call starts the driver.
    `backend` (str) is as for `empty`. Raises `Error` if the driver does not start, `Invalid` for another `backend`."""

def activate(ordinal: int) -> None: ...
def device_uuid(ordinal: int = 0, *, backend: str | None = None) -> str:
    """Returns the UUID (str) of a device, with its prefix, from its `ordinal` in this process (int). `backend` (str) is as for `empty`.
    Raises `Error` if there is no such device."""

def same_device(
    a: Device | Array | int | str | bytes | object, b: Device | Array | int | str | bytes | object
) -> bool:
    """Returns whether two names identify the same device (bool).

    The names `a` and `b` are each a `Device`, an `Array`, an ordinal in this process (int), the 16 bytes of a UUID, or an object whose str
    is a UUID. A UUID (str) may be in any case, with or without `GPU-` or `MIG-`, or shortened to its first characters as in
    `CUDA_VISIBLE_DEVICES`. Raises `Invalid` for an argument that names no device."""

def _dtype_name(object: Any, strict: bool) -> str | None:
    """Returns the spelling of an object's type. For an object that is not a type, raises `TypeError` if `strict`, else returns None."""

def _settle(timeout: float) -> bool:
    """Waits until dropped memory is released. Returns False after `timeout` seconds."""

def _serve(
    path: _Path | None, array: Array, consumers: int, wait: _Time
) -> list[tuple[int, int, str | None]]: ...
def _take(
    path: _Path | None, device: _DeviceName | None, backend: str | None, readonly: bool, wait: _Time
) -> Array: ...

@final
class _OpenedHandle:
    @property
    def array(self) -> Array: ...
    def close(self, force: bool) -> None: ...

def _legacy_empty(
    shape: int | Sequence[int], dtype: Any, device: _DeviceName | None, backend: str | None
) -> Array: ...
def _legacy_handle(array: Array) -> tuple[bytes, int]: ...
def _legacy_open(
    handle: bytes,
    shape: int | Sequence[int],
    dtype: Any,
    strides: Sequence[int] | None,
    offset: int,
    device: _DeviceName | None,
    backend: str | None,
) -> _OpenedHandle: ...

@final
class _Pool:
    def __new__(cls, max_size: int | None, device: _DeviceName | None, backend: str | None) -> _Pool: ...
    @property
    def max_size(self) -> int | None: ...
    @property
    def used(self) -> int: ...
    @property
    def device(self) -> Device: ...
    def empty(self, shape: int | Sequence[int], dtype: Any) -> Array: ...
    def close(self) -> None: ...

# Streams

_Socket = socket.socket
# A subscriber: id, pid, uid, policy, length of its queue.
_Subscriber = tuple[int, int, int, str, int | None]
# Whether it is subscribed; the numbers of delivered and skipped buffers, of the buffers that it has, and of their bytes.
_Usage = tuple[_Subscriber, tuple[bool, int, int, int, int]]

# A stream's number with DLPack's meaning, and the object that keeps the stream.
_Given = tuple[int, object]
_Completion = Literal["done", "pending", "lost"]
_Order = tuple[str, str | None]

@final
class Timeline:
    def __new__(cls, device: _DeviceName | None, backend: str | None) -> Timeline: ...
    @staticmethod
    def open(fd: Any, device: _DeviceName | None, backend: str | None) -> Timeline: ...
    def record(self, stream: _Given) -> int: ...
    def wait(self, stream: _Given, value: int, timeout: _Time) -> None: ...
    def wait_cpu(self, value: int, timeout: _Time) -> bool: ...
    def completion(self, value: int) -> _Completion: ...
    @property
    def value(self) -> int: ...
    def release(self) -> None: ...
    def release_with(self, peer: Any) -> None: ...
    def fileno(self) -> int: ...
    @property
    def is_closed(self) -> bool: ...
    def close(self) -> None: ...

@final
class Publisher:
    def __new__(cls, place: _Path | _Socket | None, offer: dict[str, Any]) -> Publisher: ...
    @property
    def device(self) -> Device: ...
    @property
    def is_closed(self) -> bool: ...
    def admit(self, socket: _Socket) -> None: ...
    def open_topic(self, broker: Client, topic: str, mode: int | None) -> None: ...
    def set_format(self, arrays: list[tuple[str, Any, Any, int | None]], blob: bytes) -> int: ...
    def loan(self, size: int | None, wait: _Time | None) -> Buffer | None: ...
    def event(self) -> tuple[str, _Subscriber | None, bool | None, list[_Usage]] | None: ...
    def stats(self) -> tuple[int, int, list[_Usage]]: ...
    @property
    def order(self) -> _Order: ...
    def evict(self, id: int) -> bool: ...
    def finish(self, wait: _Time) -> tuple[int, int, list[_Usage]]: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...

@final
class Subscriber:
    def __new__(cls, place: _Path | _Socket | None, request: dict[str, Any]) -> Subscriber: ...
    def wait(self, wait: _Time) -> bool: ...
    def on_stream(self, stream: _Given) -> OnStream: ...
    @property
    def order(self) -> _Order: ...
    @property
    def taken(self) -> Buffer | None: ...
    @property
    def end(self) -> tuple[int, int] | tuple[()] | None: ...
    @property
    def held(self) -> int: ...
    @property
    def device(self) -> Device: ...
    @property
    def peer(self) -> tuple[int, int]: ...
    @property
    def is_closed(self) -> bool: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...

@final
class OnStream:
    def wait(self, wait: _Time) -> bool: ...
    @property
    def taken(self) -> Buffer | None: ...

# A topic, its publisher's epoch, the kind, the sample, the pid and uid of a crashed publisher, and an error: class, message, kind, hint.
_Update = tuple[str, int, str, Buffer | None, tuple[int, int] | None, tuple[str, str, str, str | None] | None]

@final
class TopicFollower:
    def __new__(cls, broker: Client, name: str, is_prefix: bool, request: dict[str, Any]) -> TopicFollower: ...
    def wait(self, wait: _Time) -> bool: ...
    @property
    def taken(self) -> _Update | None: ...
    def topics(self) -> list[str]: ...
    @property
    def is_closed(self) -> bool: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...

@final
class Buffer:
    def array(self, name: str) -> Array: ...
    def names(self) -> list[str]: ...
    @property
    def blob(self) -> bytes: ...
    @property
    def fields(self) -> tuple[int, float, int, bytes] | None: ...
    def memory(self) -> Array: ...
    @property
    def completion(self) -> _Completion: ...
    def publish(self, user: bytes, stream: _Given | None) -> tuple[int, int]: ...
    @property
    def is_closed(self) -> bool: ...
    def close(self) -> None: ...

# Broker

_Entry = tuple[str, str, list[int], list[int] | None, int, int, str | None]
_PartPlan = tuple[str, list[Memory], list[_Entry], str | None]
# All options of a get: see `vmmfd._arguments.options`.
_Options = dict[str, Any]

@final
class Client:
    def __new__(cls, path: _Path | None, backend: str | None, timeout: _Time, wait: _Time, trust: list[int]) -> Client: ...
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
        rdma: _Rdma = ...,
    ) -> _PartPlan: ...
    def get(self, name: str, options: _Options) -> Lease: ...
    def descriptor(self, name: str, options: _Options) -> int: ...
    def check_get(self, name: str, options: _Options) -> None: ...
    def get_all(self, requests: list[tuple[str, _Options]], options: _Options) -> list[Lease]: ...
    def claim(self, name: str, part: str | None, group: str | None, options: _Options) -> Lease | Claim: ...
    def prepare(self, lease: Lease, name: str | None, options: _Options) -> Prepared: ...
    def unpark(self, lease: Lease, name: str | None, options: _Options) -> None: ...
    def suspend(self, keep_lease: bool, exports_unused: bool, own_copies: bool) -> None: ...
    def resume(self, newest: bool) -> None: ...
    def shared(
        self, name: str, version: int, id: str, part: str, start: int, length: int
    ) -> Lease | None: ...
    def list(self, prefix: str) -> Iterator[dict[str, Any]]: ...
    def stat(self, name: str, version: int | None = None) -> dict[str, Any]: ...
    def who(self, prefix: str) -> dict[str, Any]: ...
    def recall(self, name: str, version: int | None, earlier: bool, wait: _Time) -> dict[str, Any]: ...
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
    def recalled(self) -> bool: ...
    def on_recall(self, call: Callable[[], object]) -> None: ...
    @property
    def is_parked(self) -> bool: ...
    @property
    def unparks(self) -> int: ...
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
    def layout(self) -> list[tuple[str, bool, str | None, list[int], list[tuple[_Entry, int]]]]: ...
    def keys(self) -> list[str]: ...
    def __contains__(self, name: str, /) -> bool: ...
    def array(self, name: str, part: str | None = None) -> Array: ...
    def arrays(self, part: str | None = None) -> Iterator[tuple[str, str, Array, dict[str, Any] | None, bool]]: ...
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
class Stop:
    def __new__(cls) -> Stop: ...
    def set(self) -> None: ...
    def run(self, call: Callable[[], _T]) -> _T: ...

@final
class Watch:
    def wait(self, wait: float) -> bool: ...
    @property
    def taken(self) -> Event | None: ...
    def fileno(self) -> int: ...
    @property
    def place(self) -> tuple[str, int]: ...
    @property
    def is_closed(self) -> bool: ...
    def close(self) -> None: ...

def _check_interpreter() -> None:
    """Raises `ImportError` in a sub-interpreter."""

def digest_of(memories: list[Memory]) -> str: ...
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

def torch_pool_open(device: int, arena: int, size: int | None = None, rdma: _Rdma = ...) -> None: ...
def torch_pool_find(address: int) -> tuple[Memory, int] | None: ...
def torch_pool_close(address: int) -> bool: ...
def torch_pool_figures(device: int) -> dict[str, int]: ...
def torch_pool_last_error() -> str | None: ...
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
    backend: str | None = None,
    device: _DeviceName | None = None,
    digest: bool = False,
    progress: Callable[[int, int], object] | None = None,
    threads: int | None = None,
    rdma: _Rdma = ...,
) -> Weights: ...
