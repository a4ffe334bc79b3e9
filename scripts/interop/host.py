"""Tests both commands over host memory with a peer in plain Python. Needs no GPU.

Longer than 500 lines: one list of cases.

host.py FOLDER    the folder in which the commands producer and consumer are
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import support
import protocol
from support import Meeting, Unexpected, expect

MIB = 1 << 20
GRANULARITY = 2 * MIB


def content(segment: protocol.Segment, immutable: bool = False) -> bytes:
    """Maps a whole memfd. Kernels before 6.7 only map write-sealed memory privately."""
    protocol.check_host_segment(segment.fd, segment.size, immutable)
    flags = mmap.MAP_PRIVATE if immutable else mmap.MAP_SHARED
    with mmap.mmap(segment.fd, segment.size, flags, mmap.PROT_READ) as view:
        return bytes(view)


def bytes_of(offered: protocol.Offered) -> bytes:
    """Returns the bytes of an offer's segments."""
    return b"".join(content(segment, offered.memory.get("immutable", False)) for segment in offered.segments)


def asked_of(offered: protocol.Offered) -> bytes:
    """Returns the bytes of the requested range."""
    begin = offered.range[0] - offered.offer["part"]["offset"]
    return bytes_of(offered)[begin : begin + offered.range[1]]


def found_in(offered: protocol.Offered) -> protocol.Body:
    """Returns the result of checking the requested range."""
    return protocol.check(asked_of(offered), offered.check["salt"], offered.range[0])


def result(words: int, mismatches: int = 0) -> protocol.Body:
    """Returns the expected result, without the first mismatch."""
    return protocol.result(words, mismatches)


def expect_result(what: str, found: protocol.Body, expected: protocol.Body) -> None:
    figures = {**found.get("check", {}), "first_mismatch": None}
    expect(what, {**found, "check": figures} if "check" in found else found, expected)


# As a consumer, of a real producer


def plain(meeting: Meeting) -> None:
    """every byte of a real producer's buffer, and the zeros after it"""
    with meeting.producer("--size", "1000001", "--seed", "0x89abcdef") as producer:
        with meeting.consume() as consumer, consumer.request() as offered:
            expect("salt", offered.check["salt"], 0x89ABCDEF)
            expect("size of the segments", [segment.size for segment in offered.segments], [GRANULARITY])
            data = bytes_of(offered)
            expect("bytes behind the data that are not zero", len(data[1000001:].strip(b"\0")), 0)
            found = found_in(offered)
            expect_result("what is found", found, result(250001))
            expect_result("the producer's result", consumer.report(found), protocol.unchecked(True))
        producer.ends(0)


def round_trip(meeting: Meeting) -> None:
    """a round trip: the reply is written through a writable mapping, and the producer verifies it"""
    with meeting.producer("--size", "1MiB", "--round-trip") as producer:
        with meeting.consume() as consumer, consumer.request() as offered:
            expect("access offered", offered.offer["access"], "rw")
            found = found_in(offered)
            expect_result("what is found", found, result(MIB // 4))
            with mmap.mmap(offered.segments[0].fd, offered.segments[0].size) as view:
                view[:MIB] = protocol.pattern(offered.check["reply_salt"], 0, MIB // 4)
            expect_result("what the producer finds", consumer.report(found), result(MIB // 4))
        producer.ends(0)


def ignores(meeting: Meeting) -> None:
    """a consumer that ignores the check and writes no reply is accepted"""
    for options in [(), ("--round-trip",)]:
        with meeting.producer("--size", "1MiB", *options) as producer:
            with meeting.consume() as consumer, consumer.request() as offered:
                expect("the file is there", len(bytes_of(offered)) >= MIB, True)
                expect_result("the producer's result", consumer.report(protocol.unchecked(True)), protocol.unchecked(True))
            producer.ends(0)
    with meeting.producer("--size", "1MiB") as producer:
        with meeting.consume() as consumer, consumer.request():
            expect_result("the producer's result", consumer.report(protocol.unchecked(False)), protocol.unchecked(False))
        producer.ends(1)


def impatient(meeting: Meeting) -> None:
    """a real consumer with a short timeout receives enough `busy` records from a producer with a long timeout"""
    device = host_device(meeting)
    with memfds(SIZES, protocol.pattern_bytes(SALT, 0, DATA_SIZE)) as segments:
        patient = shared(device, segments, fill=lambda: time.sleep(7))
        with meeting.produce(30) as producer, meeting.consumer("--timeout", "3s") as consumer:
            expect_result("what it finds", producer.serve(patient)[0], result(DATA_SIZE // 4 + 1))
            consumer.ends(0)


def wrong_reply(meeting: Meeting) -> None:
    """a round trip without a reply: the producer reports that everything is wrong, and exits with 1"""
    with meeting.producer("--size", "1MiB", "--round-trip") as producer:
        with meeting.consume() as consumer, consumer.request() as offered:
            # Two salts differ in every word.
            expect_result("the producer's result", consumer.report(found_in(offered)), result(MIB // 4, MIB // 4))
        producer.ends(1)


def corrupt(meeting: Meeting) -> None:
    """a wrong byte is found and reported, and the producer exits with 1"""
    with meeting.producer("--size", "1MiB", "--corrupt") as producer:
        with meeting.consume() as consumer, consumer.request() as offered:
            found = found_in(offered)
            expect_result("what is found", found, result(MIB // 4, 1))
            first = found["check"]["first_mismatch"]
            expect("the first wrong word", first["index"], MIB // 8)
            expect("what belongs there", first["expected"], protocol.word(offered.check["salt"], MIB // 8))
            expect("the bits that differ", first["expected"] ^ first["found"], 1)
            expect_result("the producer's result", consumer.report(found), protocol.unchecked(False))
        producer.ends(1)


def chunks(meeting: Meeting) -> None:
    """a buffer of chunks, and a part of it, on one connection"""
    with meeting.producer("--size", "9MiB", "--chunk", "2MiB") as producer:
        with meeting.consume() as consumer:
            with consumer.request() as offered:
                expect("sizes of all segments", [segment.size for segment in offered.segments], [GRANULARITY] * 5)
                expect_result("what is found in all", found := found_in(offered), result(9 * MIB // 4))
                consumer.report(found)
            # From the middle of a word in the second chunk to the middle of a word in the fourth.
            with consumer.request(range=(3 * MIB + 1, 3 * MIB + 1)) as offered:
                part = {"first": 1, "segments": 3, "offset": GRANULARITY, "size": 3 * GRANULARITY}
                expect("the part that follows", offered.offer["part"], part)
                expect("how many segments follow", len(offered.segments), 3)
                expect_result("what is found in a part", found := found_in(offered), result(3 * MIB // 4 + 1))
                expect_result("the producer's result", consumer.report(found), protocol.unchecked(True))
        producer.ends(0)


def range_outside(meeting: Meeting) -> None:
    """a range outside the object is refused"""
    with meeting.producer("--size", "1MiB") as producer:
        expect("code of the error", refused(meeting, range=(MIB - 1, 2)), "range")
        producer.ends(4)


def refused(meeting: Meeting, **ask: object) -> str:
    """Returns the refusal code of a request."""
    with contextlib.suppress(protocol.PeerError), meeting.consume() as consumer:
        try:
            consumer.request(**ask).close()
        except protocol.PeerError as error:
            code = error.code
            raise
        raise Unexpected(f"{ask} was expected to be refused, and was not")
    return code


def sealed(meeting: Meeting) -> None:
    """sealed memory: rw is refused, and the kernel forbids writes through the descriptor"""
    with meeting.producer("--size", "1MiB", "--seal", "--consumers", "2") as producer:
        expect("code of the error", refused(meeting, access="rw"), "access")
        with meeting.consume() as consumer, consumer.request() as offered:
            expect("immutable", offered.memory["immutable"], True)
            fd, size = offered.segments[0]
            expect("a writable mapping", type(error_of(lambda: mmap.mmap(fd, size))), PermissionError)
            expect("a write", type(error_of(lambda: os.pwrite(fd, b"x", 0))), PermissionError)
            found = found_in(offered)
            expect_result("what is found", found, result(MIB // 4))
            consumer.report(found)
        # The refused request failed.
        producer.ends(4)


def error_of(action: Callable[[], object]) -> BaseException | None:
    try:
        action()
    except Exception as error:
        return error
    return None


def typed(meeting: Meeting) -> None:
    """the description of a typed array in Fortran order"""
    with meeting.producer("--dtype", "f32", "--shape", "6x7", "--order", "F") as producer:
        with meeting.consume() as consumer, consumer.request() as offered:
            array = offered.offer["array"]
            described = array["dtype"], array.get("byte_order"), array["shape"], array["strides"], array.get("offset") or 0
            expect("the array", described, ("float32", None, [6, 7], [4, 24], 0))
            expect("size", offered.memory["size"], 6 * 7 * 4)
            found = found_in(offered)
            expect_result("what is found", found, result(6 * 7))
            consumer.report(found)
        producer.ends(0)


def typed_bfloat16(meeting: Meeting) -> None:
    """the description of big-endian bfloat16 elements"""
    with meeting.producer("--dtype", ">bfloat16", "--shape", "2,3") as producer:
        with meeting.consume() as consumer, consumer.request() as offered:
            expect("the type", (offered.offer["array"]["dtype"], offered.offer["array"]["byte_order"]), ("bfloat16", "big"))
            expect("size", offered.memory["size"], 2 * 3 * 2)
            consumer.report(found_in(offered))
        producer.ends(0)


def waits_while_busy(meeting: Meeting) -> None:
    """a waiting consumer receives `busy`, and so waits longer than its timeout"""
    with meeting.producer("--round-trip", "--consumers", "2", "--timeout", "4s") as producer:
        with ThreadPoolExecutor(1) as pool:
            with meeting.consume(4) as first, first.request() as offered:
                second = pool.submit(take_turn, meeting)
                with first.working():
                    time.sleep(6)
                expect("the second one has been served", second.done(), False)
                expect("the first one's reply is right", reply(first, offered), True)
            expect("the second one's reply is right", second.result(60), True)
        producer.ends(0)


def take_turn(meeting: Meeting) -> bool:
    with meeting.consume(4) as consumer, consumer.request() as offered:
        return reply(consumer, offered)


def reply(consumer: protocol.Consumer, offered: protocol.Offered) -> bool:
    """Checks and replies. Returns whether both sides succeeded."""
    # Plain Python is slow on a busy machine.
    with consumer.working():
        found, size = found_in(offered), offered.memory["size"]
        with mmap.mmap(offered.segments[0].fd, offered.segments[0].size) as view:
            view[:size] = protocol.pattern_bytes(offered.check["reply_salt"], 0, size)
    return consumer.report(found)["verified"]


PAGE = Path(__file__).resolve().parents[2] / "docs" / "library.md"


def page(meeting: Meeting) -> None:
    """the consumer of docs/library.md takes a buffer"""
    if not PAGE.exists():
        print("left out, as there is no docs/library.md here: its consumer")
        return
    _, _, after = PAGE.read_text(encoding="utf-8").partition("<!-- python: consumer -->\n```python\n")
    program, _, _ = after.partition("```")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with meeting.producer() as producer:
        meeting.wait_for_socket()
        command = [sys.executable, "-B", "-c", program, meeting.path]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20)
        expect("what it prints", (ended.stdout, ended.stderr), ("True\n", ""))
        producer.ends(0)


# As a producer, to a real consumer


def host_device(meeting: Meeting) -> protocol.Body:
    """Returns the host device as a real producer names it."""
    with meeting.producer() as producer:
        with meeting.consume() as consumer, consumer.request() as offered:
            device = offered.memory["device"]
            consumer.report(found_in(offered))
        producer.ends(0)
    return device


@contextlib.contextmanager
def memfds(sizes: list[int], data: bytes) -> Iterator[list[protocol.Segment]]:
    """Creates memory that a consumer accepts: fully committed, unable to shrink, with final seals. It contains `data`, then zeros."""
    segments = []
    try:
        for size in sizes:
            segments.append(protocol.Segment(os.memfd_create("interop", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), size))
            os.posix_fallocate(segments[-1].fd, 0, size)
            os.pwrite(segments[-1].fd, data[:size], 0)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(segments[-1].fd, fcntl.F_ADD_SEALS, seals)
            data = data[size:]
        yield segments
    finally:
        protocol.close_all([segment.fd for segment in segments])


SALT = 0x12345678
SIZES = [GRANULARITY, 2 * GRANULARITY, GRANULARITY]
DATA_SIZE = 7 * MIB + 3


def shared(device: protocol.Body, segments: list[protocol.Segment], **more: object) -> protocol.Shared:
    memory = protocol.description("vmm", device, DATA_SIZE, sum(SIZES), segments=len(segments))
    return protocol.Shared(memory, segments, salt=SALT, **more)


def serves(meeting: Meeting) -> None:
    """a real consumer verifies a buffer of several segments, and a part of it"""
    device = host_device(meeting)
    with memfds(SIZES, protocol.pattern_bytes(SALT, 0, DATA_SIZE)) as segments:
        for options, words in [((), DATA_SIZE // 4 + 1), (("--range", "3MiB:1"), 1)]:
            with meeting.produce() as producer, meeting.consumer("--json", *options) as consumer:
                (found,) = producer.serve(shared(device, segments))
                expect_result("the consumer's result", found, result(words))
                report = json.loads(consumer.ends(0))
                expect("verified", report["verified"], True)
                expect("mapped size", report["mapped_size"], sum(SIZES))


def serves_typed(meeting: Meeting) -> None:
    """a real consumer prints typed arrays, and refuses an unknown type"""
    device = host_device(meeting)
    with memfds(SIZES, protocol.pattern_bytes(SALT, 0, DATA_SIZE)) as segments:
        for array, shown in [
            ({"dtype": "bfloat16", "shape": [2, 3]}, "array     bfloat16 2x3, strides 6x2: "),
            ({"dtype": "float32", "byte_order": "big", "shape": [5]}, "array     >float32 5, strides 4: "),
            ({"dtype": "float8_e5m2", "byte_order": None, "shape": [5]}, "array     float8_e5m2 5, strides 1: "),
        ]:
            with meeting.produce() as producer, meeting.consumer() as consumer:
                producer.serve(shared(device, segments, array=array))
                expect(f"the consumer shows {shown}", shown in consumer.ends(0), True)
        for fields, reason in [
            ({"dtype": "bf16"}, "`bf16` is not a dtype: write its name in NumPy or ml_dtypes"),
            ({"typestr": "<f4"}, "missing field `dtype`"),
            ({"dtype": "uint8", "byte_order": "big"}, "a byte_order of `big` is invalid for uint8"),
        ]:
            with meeting.produce() as producer, meeting.consumer() as consumer:
                try:
                    producer.serve(shared(device, segments, array={"shape": [5], **fields}))
                except protocol.PeerError as error:
                    expect("code of the error", error.code, "protocol")
                else:
                    raise Unexpected(f"{fields} was expected to be refused, and was not")
                expect(f"the consumer tells why: {reason}", reason in consumer.ends(4), True)


def serves_wrong_byte(meeting: Meeting) -> None:
    """a real consumer finds a wrong byte, and exits with 1"""
    device = host_device(meeting)
    data = bytearray(protocol.pattern_bytes(SALT, 0, DATA_SIZE))
    data[5 * MIB] ^= 0x80
    with memfds(SIZES, bytes(data)) as segments, meeting.produce() as producer, meeting.consumer() as consumer:
        (found,) = producer.serve(shared(device, segments))
        expect_result("the consumer's result", found, result(DATA_SIZE // 4 + 1, 1))
        expect("the first wrong word", found["check"]["first_mismatch"]["index"], 5 * MIB // 4)
        consumer.ends(1)


def asks_for_reply(meeting: Meeting) -> None:
    """a real consumer replies, and this side verifies it; it receives `busy` during a long check"""
    device = host_device(meeting)
    with memfds(SIZES, protocol.pattern_bytes(SALT, 0, DATA_SIZE)) as segments:

        def read(offset: int, length: int) -> bytes:
            return b"".join(map(content, segments))[offset : offset + length]

        offering = shared(device, segments, access="rw", reply_salt=~SALT & 0xFFFF_FFFF, read=read)
        offering.fill = lambda: time.sleep(6)
        with meeting.produce(4) as producer, meeting.consumer("--timeout", "4s") as consumer:
            expect_result("what this side finds", producer.serve(offering)[0], result(DATA_SIZE // 4 + 1))
            consumer.ends(0)


def lies(meeting: Meeting) -> None:
    """a real consumer refuses memory of another size than offered, and exits with 4"""
    device = host_device(meeting)
    with memfds(SIZES, b"") as segments:
        for fd, said in [(segments[0].fd, segments[1].size), (segments[1].fd, segments[0].size)]:
            memory = protocol.description("vmm", device, said, said, segments=1)
            with meeting.produce() as producer, meeting.consumer() as consumer:
                try:
                    producer.serve(protocol.Shared(memory, [(fd, said)], salt=SALT))
                except protocol.PeerError as error:
                    expect("code of the error", error.code, "protocol")
                else:
                    raise Unexpected(f"{said} bytes were expected to be refused, and were not")
                expect("the consumer tells why", f"bytes where {said} were claimed" in consumer.ends(4), True)


def refuses(meeting: Meeting) -> None:
    """this side refuses rw access to read-only memory, and a real consumer reports it"""
    device = host_device(meeting)
    with memfds(SIZES, b"") as segments, meeting.produce() as producer, meeting.consumer("--access", "rw") as consumer:
        try:
            producer.serve(shared(device, segments))
        except protocol.Refusal as refusal:
            expect("code of the error", refusal.code, "access")
        else:
            raise Unexpected("rw was expected to be refused, and was not")
        expect("the consumer tells why", "rw was asked for" in consumer.ends(4), True)


def golden(_: Meeting) -> None:
    """this side produces the page's golden records and values"""
    path = Path(__file__).resolve().parents[2] / "docs/golden.json"
    if not path.exists():
        print("left out, as there are no docs here: the golden records")
        return
    records = json.loads(path.read_text(encoding="utf-8"))
    for record in records["records"]:
        message = protocol.decode(bytes.fromhex(record["hex"]), [0] * record["descriptors"])
        expect(record["name"], (message.kind, message.body), (record["kind"], record["body"]))
    for record in records["refused"]:
        error = error_of(lambda record=record: protocol.decode(bytes.fromhex(record["hex"]), [0] * record["descriptors"]))
        expect(f"{record['name']} is refused", isinstance(error, (protocol.ProtocolError, protocol.VersionError)), True)
    for value in records["words"]:
        expect(f"word {value['index']}", protocol.word(value["salt"], value["index"]), value["word"])
    for value in records["bytes"]:
        found = protocol.pattern_bytes(value["salt"], value["offset"], value["size"])
        expect(f"bytes from {value['offset']} on", found.hex(), value["hex"])


# Both sides in Python


def many(meeting: Meeting) -> None:
    """more segments than a record may carry, and a pool in two offers, between two Python sides"""
    device = {"uuid": "00000000-0000-0000-0000-000000000000", "name": ""}
    with open(os.devnull, "rb") as null, ThreadPoolExecutor(1) as pool:
        segments = [(null.fileno(), 3)] * 300
        offering = protocol.Shared(protocol.description("vmm", device, 900, 900, segments=300), segments)
        with meeting.produce() as producer:
            served = pool.submit(producer.serve, offering)
            with meeting.consume() as consumer, consumer.request(range=(6, 890)) as offered:
                expect("how many segments came", len(offered.segments), 297)
                consumer.report(protocol.unchecked(True))
            expect("how many results", len(served.result(10)), 1)
        memory = protocol.description("pool", device, 5, 5, pool=7, pointer=bytes(range(64)))
        with meeting.produce() as producer:
            served = pool.submit(producer.serve, protocol.Shared(memory, pool_fd=null.fileno()))
            with meeting.consume() as consumer:
                offers = []
                for _ in range(2):
                    offers.append(consumer.request())
                    consumer.report(protocol.unchecked(True))
                expect("the pointer", offers[0].pointer, bytes(range(64)))
                expect("the pool is the same", offers[0].pool_fd, offers[1].pool_fd)
            expect("how many results", len(served.result(10)), 2)


def broken(_: Meeting) -> None:
    """a record that breaks the protocol is refused, and all its descriptors are closed"""
    good = protocol.encode("segments", {"first": 0, "sizes": [1]})
    busy = protocol.encode("busy", {})
    # Each record has only the named fault.
    for name, record, fds in [
        ("magic", b"X" + good[1:], 1),
        ("version", good[:4] + b"\2" + good[5:], 1),
        ("kind", good[:6] + b"\x0f" + good[7:], 1),
        ("length", good[:8] + b"\1" + good[9:], 1),
        ("cut", good[:-1], 1),
        ("header", good[:15], 1),
        ("claimed count", good[:12] + b"\2" + good[13:], 1),
        ("count", good, 2),
        ("none", good, 0),
        ("with busy", busy, 1),
        ("claimed with busy", busy[:12] + b"\1" + busy[13:], 1),
        ("sizes", protocol.encode("segments", {"first": 0, "sizes": [-1]}), 1),
        ("no object", busy.replace(b"{}", b"[]"), 0),
        ("no JSON", busy.replace(b"{}", b"{]"), 0),
        ("too long", struct.pack("<4sHHII", b"VMFD", 1, 7, 65538, 0) + b"{}".ljust(65538), 0),
    ]:
        error, left_open = on_receiving(record, fds)
        kind = protocol.VersionError if name == "version" else protocol.ProtocolError
        expect(f"{name}: refused, and descriptors left open", (type(error), left_open), (kind, 0))
    error, left_open = on_receiving(b"", 1)
    expect("nothing: hung up, and descriptors left open", (type(error), left_open), (protocol.PeerGone, 0))


def cut_off(_: Meeting) -> None:
    """descriptors beyond this process's limit are detected, and the received ones are closed"""
    record = protocol.encode("segments", {"first": 0, "sizes": [1] * 50})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        # Room for the two sockets and some of fifty descriptors: numbers above the lowest free number may be in use.
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 10, hard))
        error, left_open = on_receiving(record, 50)
        expect("the reason", "descriptors were cut off" in str(error), True)
        expect("descriptors left open", left_open, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_fds() -> set[int]:
    # The listing's own descriptor is already closed.
    return {fd for fd in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{fd}")}


def on_receiving(record: bytes, fds: int) -> tuple[BaseException | None, int]:
    """Returns a channel's reaction to a record, and the number of descriptors that it leaves open."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        socket.send_fds(theirs, [record], [theirs.fileno()] * fds)
        before = open_fds()
        found = error_of(protocol.Channel(ours, 1.0).receive)
        return found, len(open_fds() - before)


def close_on_exec(meeting: Meeting) -> None:
    """received descriptors are not inherited by other programs"""
    with meeting.producer() as producer:
        with meeting.consume() as consumer, consumer.request() as offered:
            expect("inheritable", os.get_inheritable(offered.segments[0].fd), False)
            consumer.report(found_in(offered))
        producer.ends(0)


def patterns(_: Meeting) -> None:
    """the pattern keeps its values, with numpy and without"""
    expect("the classic pattern", protocol.pattern(0, 0, 2), struct.pack("<2I", 1337 ^ 0xDEADBEEF, 1339 ^ 0xDEADBEEF))
    # Once i * 2 has wrapped, mix makes the difference: mix(1) is the finalizer's value of 1.
    expect("behind 8 GiB", protocol.word(SALT, 1 << 31), 1337 ^ 0xDEADBEEF ^ SALT ^ 0x514E28B7)
    try:
        import numpy
    except ModuleNotFoundError:
        print("left out, as there is no numpy: its pattern")
        return
    for first in (0, 12345, (1 << 31) - 50, (1 << 62) - 50):
        expect(f"from {first} on", protocol.numpy_pattern(SALT, first, 100).tobytes(), protocol.pattern(SALT, first, 100))
    for wrong in ([], [7], [0, 99]):
        words = protocol.numpy_pattern(SALT, 0, 100)
        words[numpy.array(wrong, int)] ^= numpy.uint32(1)
        expect(f"{wrong} wrong", protocol.numpy_check(words, SALT), protocol.check(words.tobytes(), SALT))


CHECKS = [
    patterns,
    golden,
    broken,
    cut_off,
    many,
    plain,
    close_on_exec,
    round_trip,
    ignores,
    wrong_reply,
    corrupt,
    chunks,
    range_outside,
    sealed,
    typed,
    typed_bfloat16,
    waits_while_busy,
    page,
    serves,
    serves_typed,
    serves_wrong_byte,
    asks_for_reply,
    impatient,
    lies,
    refuses,
]

if __name__ == "__main__":
    support.run("host", CHECKS, timeout=30.0)
