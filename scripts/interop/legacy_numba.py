"""Legacy memory (cuIpcMemHandle) from a real producer into Numba, and from Numba to a real consumer.

legacy_numba.py FOLDER    the folder in which the commands producer and consumer are
"""

from __future__ import annotations

import support
from support import Meeting, expect

try:
    import numpy
    from numba import cuda
except ModuleNotFoundError as missing:
    support.not_run(f"no module named {missing.name}")

import protocol

# A multiple of 2 MiB has its own block: the handle opens nothing else.
SIZE = 4 << 20
SALT = 0xBADCAFE


def consume(meeting: Meeting) -> None:
    """Numba's open_ipc_array opens a real producer's handle, verifies every word and replies"""
    take(meeting)


def take(meeting: Meeting) -> protocol.Body:
    """Returns the device, as the producer names it."""
    options = "--mechanism", "legacy", "--size", str(SIZE), "--seed", str(SALT), "--round-trip"
    with meeting.producer(*options) as producer:
        with meeting.consume() as consumer, consumer.request() as offered:
            expect("mechanism", offered.memory["mechanism"], "legacy")
            expect("salt", offered.check["salt"], SALT)
            offset = offered.memory.get("offset", 0)
            with consumer.working():
                # Only the handle's bytes are sent; the rest is known here.
                with cuda.open_ipc_array(offered.pointer, (SIZE // 4,), numpy.uint32, offset=offset) as words:
                    found = protocol.numpy_check(words.copy_to_host(), SALT)
                    words.copy_to_device(protocol.numpy_pattern(offered.check["reply_salt"], 0, SIZE // 4))
                    cuda.synchronize()
            support.expect_verified("what Numba finds", found, SIZE // 4)
            support.expect_verified("what the producer finds", consumer.report(found), SIZE // 4)
        producer.ends(0)
        return offered.memory["device"]


def produce(meeting: Meeting) -> None:
    """a real consumer opens the IPC handle of a Numba device array"""
    device = take(meeting)
    words = cuda.device_array((SIZE // 4,), numpy.uint32)
    words.copy_to_device(protocol.numpy_pattern(SALT, 0, SIZE // 4))
    cuda.synchronize()
    # The handle inside words.get_ipc_handle(), created in the context that `with` provides.
    handle = cuda.current_context().get_ipc_handle(words.gpu_data)
    pointer = bytes(handle.handle.reserved)
    memory = protocol.description("legacy", device, SIZE, SIZE, pointer=pointer, offset=handle.offset)
    with meeting.produce() as producer, meeting.consumer() as consumer:
        (found,) = producer.serve(protocol.Shared(memory, salt=SALT))
        support.expect_verified("what the consumer finds", found, SIZE // 4)
        consumer.ends(0)


if __name__ == "__main__":
    support.run("cuda", [consume, produce])
