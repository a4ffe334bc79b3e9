"""Legacy memory (cuIpcMemHandle) from a real producer into CuPy, and from CuPy to a real consumer.

legacy_cupy.py FOLDER    the folder in which the commands producer and consumer are
"""

from __future__ import annotations

import support
from support import Meeting, expect

try:
    import cupy
    import numpy
    from cupy.cuda import runtime
except ModuleNotFoundError as missing:
    support.not_run(f"no module named {missing.name}")

import protocol

# A multiple of 2 MiB has its own block: the handle opens nothing else.
SIZE = 4 << 20
SALT = 0xC0FFEE
DEVICE = 0


def words_at(address: int, size: int) -> cupy.ndarray:
    """Wraps foreign memory as a CuPy array, without a copy. CuPy never frees the memory."""
    memory = cupy.cuda.UnownedMemory(address, size, None, DEVICE)
    return cupy.ndarray((size // 4,), cupy.uint32, cupy.cuda.MemoryPointer(memory, 0))


def put(address: int, words: numpy.ndarray) -> None:
    """Copies into device memory. Blocks until the copy is complete."""
    words_at(address, words.nbytes).set(words)
    cupy.cuda.Device(DEVICE).synchronize()


def consume(meeting: Meeting) -> None:
    """CuPy opens a real producer's handle, verifies every word and replies"""
    take(meeting)


def take(meeting: Meeting) -> protocol.Body:
    """Returns the device, as the producer names it."""
    options = "--mechanism", "legacy", "--size", str(SIZE), "--seed", str(SALT), "--round-trip"
    with meeting.producer(*options) as producer:
        with meeting.consume() as consumer, consumer.request() as offered:
            expect("mechanism", offered.memory["mechanism"], "legacy")
            expect("salt", offered.check["salt"], SALT)
            with consumer.working():
                base = runtime.ipcOpenMemHandle(offered.pointer)
                try:
                    address = base + offered.memory.get("offset", 0)
                    found = protocol.numpy_check(cupy.asnumpy(words_at(address, SIZE)), SALT)
                    put(address, protocol.numpy_pattern(offered.check["reply_salt"], 0, SIZE // 4))
                finally:
                    runtime.ipcCloseMemHandle(base)
            support.expect_verified("what CuPy finds", found, SIZE // 4)
            support.expect_verified("what the producer finds", consumer.report(found), SIZE // 4)
        producer.ends(0)
        return offered.memory["device"]


def produce(meeting: Meeting) -> None:
    """a real consumer opens the handle of CuPy's memory; the data is its second half"""
    # Not getDeviceProperties(): it cuts the uuid at the first zero byte.
    device = take(meeting)
    # From the runtime: blocks of CuPy's pool hold other arrays too.
    block = runtime.malloc(2 * SIZE)
    try:
        put(block, numpy.zeros(SIZE // 4, numpy.uint32))
        put(block + SIZE, protocol.numpy_pattern(SALT, 0, SIZE // 4))
        handle = runtime.ipcGetMemHandle(block)
        memory = protocol.description("legacy", device, SIZE, SIZE, pointer=handle, offset=SIZE)
        with meeting.produce() as producer, meeting.consumer() as consumer:
            (found,) = producer.serve(protocol.Shared(memory, salt=SALT))
            support.expect_verified("what the consumer finds", found, SIZE // 4)
            consumer.ends(0)
    finally:
        runtime.free(block)


if __name__ == "__main__":
    support.run("cuda", [consume, produce])
