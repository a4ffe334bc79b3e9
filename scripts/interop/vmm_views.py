"""Memory of a real producer, mapped with cuda.bindings, and seen by CuPy and, through DLPack, by PyTorch: no byte is
copied on the way.

vmm_views.py FOLDER    the folder in which the commands producer and consumer are
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import support
from support import Meeting, expect

try:
    import cupy
    import numpy
    import torch
    from cuda.bindings import driver
    from cuda_driver import call
except ModuleNotFoundError as missing:
    support.not_run(f"no module named {missing.name}")

import protocol

SHAPE = (1024, 1024)
COUNT = SHAPE[0] * SHAPE[1]
SIZE = 4 * COUNT
SALT = 0xF00D
OPTIONS = "--chunk", "2MiB", "--dtype", "f32", "--shape", "1024x1024", "--seed", str(SALT)

FD = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
ACCESS = {
    "ro": driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ,
    "rw": driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
}


def ordinal_of(uuid: str) -> int:
    """Returns this process's ordinal of a device."""
    call(driver.cuInit(0))
    uuids = []
    for ordinal in range(call(driver.cuDeviceGetCount())):
        device = call(driver.cuDeviceGet(ordinal))
        uuids.append(bytes(call(driver.cuDeviceGetUuid(device)).bytes).hex())
    wanted = uuid.replace("-", "")
    if wanted not in uuids:
        raise support.Unexpected(f"the memory's device: expected one of {uuids}, found {wanted}")
    return uuids.index(wanted)


@contextlib.contextmanager
def primary_context(ordinal: int) -> Iterator[None]:
    """Returns the context that CuPy and PyTorch use too. It is never released: both keep it until exit."""
    device = call(driver.cuDeviceGet(ordinal))
    call(driver.cuCtxSetCurrent(call(driver.cuDevicePrimaryCtxRetain(device))))
    with cupy.cuda.Device(ordinal), torch.cuda.device(ordinal):
        yield


@contextlib.contextmanager
def mapped(offered: protocol.Offered, ordinal: int) -> Iterator[int]:
    """Maps the segments side by side and returns the address. Closes their descriptors: the handles keep the memory."""
    total = sum(segment.size for segment in offered.segments)
    with contextlib.ExitStack() as undo:
        base = int(call(driver.cuMemAddressReserve(total, 0, 0, 0)))
        undo.callback(lambda: call(driver.cuMemAddressFree(base, total)))
        at = base
        for fd, size in offered.segments:
            map_segment(undo, fd, at, size)
            at += size
        offered.close()
        call(driver.cuMemSetAccess(base, total, [access_of(ordinal, offered.offer["access"])], 1))
        yield base


def map_segment(undo: contextlib.ExitStack, fd: int, address: int, size: int) -> None:
    handle = call(driver.cuMemImportFromShareableHandle(fd, FD))
    undo.callback(lambda: call(driver.cuMemRelease(handle)))
    call(driver.cuMemMap(address, size, 0, handle, 0))
    undo.callback(lambda: call(driver.cuMemUnmap(address, size)))


def access_of(ordinal: int, access: str) -> driver.CUmemAccessDesc:
    description = driver.CUmemAccessDesc()
    description.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    description.location.id = ordinal
    description.flags = ACCESS[access]
    return description


def look(address: int, ordinal: int, reply_salt: int | None) -> protocol.Body:
    """Verifies the memory with CuPy and PyTorch, and each writes half of the reply. No view outlives the call."""
    memory = cupy.cuda.UnownedMemory(address, SIZE, None, ordinal)
    array = cupy.ndarray(SHAPE, cupy.float32, cupy.cuda.MemoryPointer(memory, 0))
    tensor = torch.from_dlpack(array)
    expect("CuPy's address", array.data.ptr, address)
    expect("PyTorch's address", tensor.data_ptr(), address)
    expect("PyTorch's shape and type", (tuple(tensor.shape), tensor.dtype), (SHAPE, torch.float32))

    # As integers: the pattern contains NaNs, which equal nothing.
    cupy_words, torch_words = array.view(cupy.uint32).reshape(COUNT), tensor.view(torch.int32).view(COUNT)
    expect("the address of the words", (cupy_words.data.ptr, torch_words.data_ptr()), (address, address))
    found = protocol.numpy_check(cupy.asnumpy(cupy_words), SALT)
    by_torch = protocol.numpy_check(torch_words.cpu().numpy().view(numpy.uint32), SALT)
    expect("what PyTorch finds", by_torch, found)

    if reply_salt is not None:
        reply, half = protocol.numpy_pattern(reply_salt, 0, COUNT), COUNT // 2
        cupy_words[:half].set(reply[:half])
        torch_words[half:].copy_(torch.from_numpy(reply[half:].view(numpy.int32)))
    cupy.cuda.Device(ordinal).synchronize()
    torch.cuda.synchronize(ordinal)
    return found


def take(meeting: Meeting, *options: str) -> None:
    with meeting.producer(*OPTIONS, *options) as producer:
        with meeting.consume() as consumer, consumer.request() as offered:
            array = offered.offer["array"]
            expect("the array", (array["dtype"], array.get("byte_order"), tuple(array["shape"])), ("float32", None, SHAPE))
            expect("sizes of the segments", [segment.size for segment in offered.segments], [2 << 20] * 2)
            reply_salt = offered.check.get("reply_salt")
            expect("a reply is asked for", reply_salt is not None, bool(options))
            with consumer.working():
                ordinal = ordinal_of(offered.memory["device"]["uuid"])
                with primary_context(ordinal), mapped(offered, ordinal) as address:
                    found = look(address, ordinal, reply_salt)
            support.expect_verified("what is found", found, COUNT)
            support.expect_verified("what the producer finds", consumer.report(found), COUNT if options else 0)
        producer.ends(0)


def read(meeting: Meeting) -> None:
    """CuPy and PyTorch see a real producer's array in place, mapped read-only"""
    take(meeting)


def round_trip(meeting: Meeting) -> None:
    """CuPy and PyTorch write a reply in place, and the producer verifies it"""
    take(meeting, "--round-trip")


if __name__ == "__main__":
    support.run("cuda", [read, round_trip])
