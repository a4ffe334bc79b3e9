"""Memory of a pool from a real producer into cuda.core, and from a pool of cuda.core to a real consumer.

pool_cuda_core.py FOLDER    the folder in which the commands producer and consumer are
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import support
from support import Meeting, expect

try:
    import cuda_driver
    from cuda.core import Buffer, Device, DeviceMemoryResource, DeviceMemoryResourceOptions
except ModuleNotFoundError as missing:
    support.not_run(f"no module named {missing.name}")

import protocol

SIZE = 4 << 20
SALT = 0x5EED


@contextlib.contextmanager
def pool_buffer(device: Device, stream: Any, size: int) -> Iterator[tuple[DeviceMemoryResource, Buffer]]:
    """Creates a shareable pool and a buffer in it."""
    pool = DeviceMemoryResource(device, DeviceMemoryResourceOptions(ipc_enabled=True))
    try:
        buffer = pool.allocate(size, stream=stream)
        stream.sync()
        try:
            yield pool, buffer
        finally:
            buffer.close(stream)
            stream.sync()
    finally:
        pool.close()


def payload_of(buffer: Buffer) -> bytes:
    """Returns the 64 bytes of a buffer's descriptor, which only pickle exposes."""
    _, (payload, _) = buffer.ipc_descriptor.__reduce__()
    expect("the length of a descriptor's payload", len(payload), 64)
    return bytes(payload)


def descriptor(device: Device, stream: Any, payload: bytes, size: int) -> Any:
    """Creates a descriptor from these 64 bytes, with the function that pickle takes from another descriptor."""
    with pool_buffer(device, stream, 4096) as (_, buffer):
        rebuild, _ = buffer.ipc_descriptor.__reduce__()
        return rebuild(payload, size)


def consume(meeting: Meeting) -> None:
    """cuda.core imports a real producer's pool and pointer, verifies every word and replies"""
    take(meeting)


def take(meeting: Meeting) -> protocol.Body:
    """Returns the device, as the producer names it."""
    device = Device(0)
    device.set_current()
    stream = device.create_stream()
    options = "--mechanism", "pool", "--size", str(SIZE), "--seed", str(SALT), "--round-trip"
    with meeting.producer(*options) as producer:
        with meeting.consume() as consumer, consumer.request() as offered:
            expect("mechanism", offered.memory["mechanism"], "pool")
            expect("salt", offered.check["salt"], SALT)
            offset = offered.memory.get("offset", 0)
            with consumer.working():
                described = descriptor(device, stream, offered.pointer, offset + SIZE)
                pool = DeviceMemoryResource.from_allocation_handle(device, offered.pool_fd)
                expect("the pool is mapped", pool.is_mapped, True)
                buffer = Buffer.from_ipc_descriptor(pool, described, stream=stream)
                try:
                    stream.sync()
                    address = int(buffer.handle) + offset
                    found = protocol.numpy_check(cuda_driver.words_from(address, SIZE // 4), SALT)
                    reply = protocol.numpy_pattern(offered.check["reply_salt"], 0, SIZE // 4)
                    cuda_driver.put_words(address, reply)
                finally:
                    buffer.close(stream)
                    stream.sync()
                    pool.close()
            support.expect_verified("what is found", found, SIZE // 4)
            support.expect_verified("what the producer finds", consumer.report(found), SIZE // 4)
        producer.ends(0)
        return offered.memory["device"]


def produce(meeting: Meeting) -> None:
    """a real consumer imports a cuda.core pool, and a buffer of it"""
    named = take(meeting)
    device = Device(0)
    device.set_current()
    stream = device.create_stream()
    with pool_buffer(device, stream, SIZE) as (pool, buffer):
        cuda_driver.put_words(int(buffer.handle), protocol.numpy_pattern(SALT, 0, SIZE // 4))
        memory = protocol.description("pool", named, SIZE, SIZE, pool=0, pointer=payload_of(buffer))
        shared = protocol.Shared(memory, pool_fd=int(pool.allocation_handle), salt=SALT)
        with meeting.produce() as producer, meeting.consumer() as consumer:
            (found,) = producer.serve(shared)
            support.expect_verified("what the consumer finds", found, SIZE // 4)
            consumer.ends(0)


if __name__ == "__main__":
    support.run("cuda", [consume, produce])
