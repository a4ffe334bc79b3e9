"""Invalid, overlapping and badly timed arrays and descriptions."""

from __future__ import annotations

import ctypes
import datetime
import functools
import os
import threading
from typing import Any

import numpy as np
import pytest

import vmmfd
import vmmfd.legacy
import vmmfd.pool


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("kind", ctypes.c_int),
        ("id", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


BYTES = (ctypes.c_float * 4)(1, 2, 3, 4)
SHAPE = (ctypes.c_int64 * 1)(4)
STRIDES = (ctypes.c_int64 * 1)(2**61)


class Producer:
    """Four float32 by DLPack, with changed fields."""

    def __init__(self, **changed: object) -> None:
        self.tensor = _Tensor(ctypes.addressof(BYTES), 1, 0, 1, 2, 32, 1, ctypes.addressof(SHAPE), None, 0, None, None)
        for name, value in changed.items():
            setattr(self.tensor, name, value)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **_options: object) -> object:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), b"dltensor", None)


def test_valid_producer() -> None:
    assert np.asarray(vmmfd.asarray(Producer(), backend="host")).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"ndim": 2**30}, "1073741824 dimensions"),
        ({"ndim": 65}, "65 dimensions"),
        ({"ndim": -1}, "-1 dimensions"),
        ({"shape": None}, "without a shape"),
        ({"data": None}, "a tensor that has no data"),
        ({"kind": 2}, r"on device \(2, 0\), but __dlpack_device__ returned \(1, 0\)"),
        ({"strides": ctypes.addressof(STRIDES)}, "can't start at address"),
        ({"lanes": 4}, "4 lanes"),
    ],
)
def test_invalid_tensor_is_refused(changed: dict[str, object], says: str) -> None:
    with pytest.raises((vmmfd.Error, ValueError, BufferError), match=says):
        vmmfd.asarray(Producer(**changed), backend="host")


class Interface:
    def __init__(self, dtype: object = None, **changed: object) -> None:
        self.held = np.zeros(4, "u1")
        self.__array_interface__ = {**self.held.__array_interface__, **changed}
        if dtype is not None:
            self.dtype = dtype

    def __setitem__(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    ("dtype", "changed", "says"),
    [
        (None, {"data": (0, False)}, "can't start at address 0x0"),
        ("float64", {}, "but its typestr is"),
        (None, {"shape": (1,) * 65}, "65 dimensions"),
        (None, {"shape": (2,), "strides": (1, 1)}, "numbers of strides"),
        (None, {"shape": (2,), "strides": (-(2**62),)}, "can't start at address"),
        (None, {"shape": (2**63,), "strides": (2**62,)}, "."),
    ],
)
def test_invalid_interface_is_refused(dtype: object, changed: dict[str, object], says: str) -> None:
    with pytest.raises((ValueError, BufferError), match=says):
        vmmfd.asarray(Interface(dtype, **changed), backend="host")


def test_endless_dtype(child: Any) -> None:
    child(
        """
        import vmmfd
        class Endless:
            @property
            def dtype(self):
                return self
        try:
            vmmfd.empty(3, Endless(), backend="host")
        except TypeError as error:
            assert "is not a supported element type" in str(error), error
        else:
            raise AssertionError
        """
    ).end()


# More bytes than a copy gathers in one buffer.
N = 20_000


def test_overlapping_copies() -> None:
    array = vmmfd.empty(N, "i4", backend="host")
    view = np.from_dlpack(array)
    numbers = np.arange(N, dtype="i4")
    view[:] = numbers
    array.copy_from(array[::-1])
    assert (view == numbers[::-1]).all()
    view[:] = numbers
    array[::-1].copy_to(view)
    assert (view == numbers[::-1]).all()
    view[:] = numbers
    array[1:].copy_from(array[:-1])
    assert (view[1:] == numbers[:-1]).all() and view[0] == 0
    view[:] = numbers
    array[:-1].copy_from(view[1:])
    assert (view[:-1] == numbers[1:]).all()
    view[:] = numbers
    array[1:].copy_from(memoryview(array)[:-1])
    assert (view[1:] == numbers[:-1]).all()
    view[:] = numbers
    array.copy_to(view[::-1])
    assert (view == numbers[::-1]).all()
    array.copy_from(array)
    array.copy_to(view)
    assert (view == numbers[::-1]).all()


@pytest.mark.fake
def test_overlapping_gpu_copies(child: Any) -> None:
    child(
        """
        import numpy as np, vmmfd
        numbers = np.arange(100_000, dtype="i4")
        array = vmmfd.asarray(numbers)
        array.copy_from(array[::-1])
        assert (np.frombuffer(array.tobytes(), "i4") == numbers[::-1]).all()
        array[1:].copy_from(array[:-1])
        assert (np.frombuffer(array[1:].tobytes(), "i4") == numbers[::-1][:-1]).all()
        """
    ).end()


def test_zero_stride_destination_is_refused() -> None:
    memory = vmmfd.empty(64, "u1", backend="host")._memory
    assert memory is not None
    wide = memory.array("u1", (2**34, 2), (0, 2))
    with pytest.raises(vmmfd.Invalid, match="stride of 0"):
        wide.copy_from(np.broadcast_to(np.zeros(2, "u1"), (2**34, 2)))
    with pytest.raises(vmmfd.Invalid, match="stride of 0"):
        vmmfd.empty((4, 2), "u1", backend="host").copy_to(memory.array("u1", (4, 2), (0, 1)))
    assert vmmfd.asarray(memory.array("u1", (3, 2), (0, 1)), backend="host").shape == (3, 2)


LONG_COPIES = {
    "copy_from": ("array.copy_from(source)", "np.asarray(array)[-1, 0] == 0"),
    "copy_to": ("array.copy_to(source)", "source[-1, 0] == 1"),
    # All of its memory is allocated from the start, but only copied pages are touched.
    "tobytes": ("array.tobytes()", "peak() - before < array.nbytes * 3 // 4"),
}


@pytest.mark.parametrize("copy", LONG_COPIES)
def test_signal_interrupts_long_copy(child: Any, copy: str) -> None:
    """The signal arrives when the copy releases the GIL, and the copy must not complete."""
    call, unfinished = LONG_COPIES[copy]
    if "peak" in unfinished and not os.path.exists("/proc/self/clear_refs"):
        pytest.skip("the kernel does not clear the peak of a process's memory (/proc/self/clear_refs)")
    child(
        f"""
        import signal, sys, threading, numpy as np, vmmfd
        class Raised(Exception): pass
        def handler(*_):
            raise Raised
        def peak():
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))
        def cleared_peak():
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
            return peak()
        def send():
            going.wait()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
        signal.signal(signal.SIGALRM, handler)
        # The other thread only runs when this one releases the GIL.
        sys.setswitchinterval(60)
        array = vmmfd.empty((1 << 27, 2), "u1", backend="host")[:, ::2]
        source = np.ones((1 << 27, 2), "u1")[:, ::2]
        for attempt in range(10):
            np.asarray(array)[-1, 0] = 0
            source[-1, 0] = 1
            going = threading.Event()
            thread = threading.Thread(target=send)
            thread.start()
            before = {"cleared_peak()" if "peak" in unfinished else 0}
            interrupted = False
            try:
                going.set()
                {call}
            except Raised:
                interrupted = {unfinished}
            try:
                thread.join()
            except Raised:
                pass
            if interrupted:
                break
        else:
            raise AssertionError("it completed each time")
        """,
        # The allocator of `-X dev` fills new memory: all of it would count in the peak.
        env={"PYTHONMALLOC": "default"},
    ).end()


@pytest.mark.parametrize("what", ["total_seconds", "repr", "index", "getbuffer"])
def test_interrupt_is_passed_on(what: str) -> None:
    class Number:
        def total_seconds(self) -> float:
            raise KeyboardInterrupt

        def __float__(self) -> float:
            raise TypeError

    class Shown:
        def __repr__(self) -> str:
            raise KeyboardInterrupt

    class Index:
        def __index__(self) -> int:
            raise KeyboardInterrupt

    class Described:
        @property
        def name(self) -> str:
            raise MemoryError

    array = vmmfd.empty(4, "u1", backend="host")
    if what == "total_seconds":
        with pytest.raises(KeyboardInterrupt):
            vmmfd.take("/nowhere/at/all", backend="host", wait=Number())  # type: ignore[arg-type]
    elif what == "repr":
        for call in (lambda: vmmfd.empty(Shown(), "f4", backend="host"), lambda: array[Shown()]):  # type: ignore
            with pytest.raises(KeyboardInterrupt):
                call()
    elif what == "index":
        for call in (lambda: vmmfd.empty(Index(), "f4", backend="host"), lambda: array[Index()]):  # type: ignore
            with pytest.raises(KeyboardInterrupt):
                call()
    else:
        with pytest.raises(MemoryError):
            vmmfd.empty(1, Described(), backend="host")  # type: ignore[arg-type]


def test_wrapped_old_producer_is_retried() -> None:
    """The wrapper raises the error, without a message."""

    class Old(Producer):
        def __dlpack__(self, *, stream: int | None = None) -> object:
            return super().__dlpack__()

        @functools.wraps(__dlpack__)
        def wrapper(self, **options: object) -> object:
            if options:
                raise TypeError
            return super().__dlpack__()

        __dlpack__ = wrapper  # type: ignore[assignment]

    assert np.asarray(vmmfd.asarray(Old(), backend="host")).tolist() == [1, 2, 3, 4]


def test_producer_type_error_is_not_retried() -> None:
    calls = []

    class Broken:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

        def __dlpack__(self, **options: object) -> object:
            calls.append(options)
            raise TypeError("inside of it")

    with pytest.raises(TypeError, match="inside of it"):
        vmmfd.asarray(Broken(), backend="host")
    assert len(calls) == 1


@pytest.mark.parametrize("wait", [0, 0.01, np.float64(0.01), datetime.timedelta(milliseconds=5)])
def test_valid_times(wait: Any) -> None:
    with pytest.raises(vmmfd.Error) as raised:
        vmmfd.take("/nowhere/at/all", backend="host", wait=wait)
    assert "is not a time" not in str(raised.value)


def test_fork_during_calls_of_threads(child: Any) -> None:
    child(
        """
        import os, sys, threading, time, vmmfd, warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and newer advise against it.
        def work():
            while True:
                vmmfd.devices(backend="host")
        for _ in range(3):
            threading.Thread(target=work, daemon=True).start()
        for number in range(200):
            pid = os.fork()
            if pid == 0:
                vmmfd.empty(3, "f4", backend="host")
                os._exit(0)
            end = time.monotonic() + 30
            while True:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    assert status == 0, status
                    break
                if time.monotonic() > end:
                    os.kill(pid, 9)
                    print("fork", number, "hangs")
                    sys.stdout.flush()
                    os._exit(1)
                time.sleep(0.001)
        os._exit(0)
        """
    ).end()


@pytest.mark.fake
def test_pool_limit_holds_for_threads() -> None:
    for _ in range(20):
        pool = vmmfd.pool.Pool(max_size=1 << 20)
        made: list[vmmfd.Array] = []
        start = threading.Barrier(8)

        def work() -> None:
            start.wait()
            for _ in range(8):
                try:
                    made.append(pool.empty(200_000, "u1"))
                except vmmfd.OutOfMemory:
                    return

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(made) == 5 and pool.used == 1_000_000


@pytest.mark.fake
def test_failed_wait_keeps_handle_open(child: Any) -> None:
    array = vmmfd.legacy.empty(4, "u1")
    array.copy_from(b"abcd")
    child(
        """
        import pickle, sys, vmmfd, vmmfd.legacy
        opened = vmmfd.legacy.open_ipc_array(bytes.fromhex(sys.argv[1]), 4, "u1", offset=int(sys.argv[2]))
        try:
            opened.close()
        except vmmfd.Error as error:
            assert "999" in str(error) or "UNKNOWN" in str(error), error
        else:
            raise AssertionError
        assert opened.array.tobytes() == b"abcd"
        opened.close()
        """,
        (handle := vmmfd.legacy.get_ipc_handle(array)).handle.hex(),
        str(handle.offset),
        env={"FAKECUDA_FAIL": "cuMemFreeHost:1:999"},
    ).end()


@pytest.mark.fake
def test_copy_stays_on_its_device(child: Any) -> None:
    child(
        """
        import vmmfd
        class Foreign:
            def __init__(self, array):
                self.array = array
                self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "stream": 1}
        for ordinal in (0, 1):
            source = vmmfd.empty(4, "u1", device=ordinal)
            source.copy_from(b"abcd")
            copy = vmmfd.asarray(Foreign(source))
            assert copy.device.ordinal == ordinal and copy.tobytes() == b"abcd", copy
        try:
            vmmfd.asarray(type("Lies", (), {"__cuda_array_interface__": {"shape": (4,), "typestr": "|u1", "data": (4096, False), "version": 3}})())
        except vmmfd.Error as error:
            assert "cuPointerGetAttribute" in str(error), error
        else:
            raise AssertionError
        """,
        env={"FAKECUDA_DEVICES": "2"},
    ).end()
