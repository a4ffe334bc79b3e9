"""`load_safetensors`: arrays of the files, refused files, and interruption."""

from __future__ import annotations

import copy
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import vmmfd
from conftest import PYTHON, Child, Server, command

# Host memory everywhere, CUDA on the installed driver.
BACKENDS = [
    "host",
    pytest.param("cuda", marks=pytest.mark.fake, id="fake"),
    pytest.param("cuda", marks=pytest.mark.cuda, id="cuda"),
]

Tensors = dict[str, tuple[str, list[int], bytes]]


def write(path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file by hand."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, (dtype, shape, bytes_) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(bytes_)]}
        data += bytes_
    write_raw(path, header, data)


def write_raw(path: Path, header: object, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def large(path: Path, size: int) -> None:
    """Writes a sparse file with one tensor."""
    write_raw(path, {"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}, b"")
    os.truncate(path, path.stat().st_size + size)


FIRST: Tensors = {
    "w": ("F32", [2, 3], struct.pack("<6f", *range(6))),
    "empty": ("F16", [0, 4], b""),
    "scalar": ("I64", [], struct.pack("<q", -7)),
    "bf16": ("BF16", [2, 2], bytes(range(8))),
}
SECOND: Tensors = {"noise": ("U8", [5_000_001], os.urandom(5_000_001)), "f8": ("F8_E4M3", [3], b"abc")}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder / "1.safetensors", FIRST, {"format": "pt"})
    write(folder / "2.safetensors", SECOND, {"format": "pt", "step": "3"})
    return folder


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("threads", [None, 1, 5])
def test_arrays_match_the_files(model: Path, backend: str, threads: int | None) -> None:
    weights = vmmfd.load_safetensors(model, backend=backend, threads=threads, digest=True)
    expected = FIRST | SECOND
    assert list(weights) == list(expected) and len(weights) == 6
    for name, (_, shape, bytes_) in expected.items():
        array = weights[name]
        assert array.shape == tuple(shape) and array.tobytes() == bytes_, name
        assert not bytes_ or array.address % 256 == 0
    types = {name: array.dtype for name, array in weights.items()}
    assert types == {
        "w": "float32",
        "empty": "float16",
        "scalar": "int64",
        "bf16": "bfloat16",
        "noise": "uint8",
        "f8": "float8_e4m3fn",
    }
    assert weights.metadata == {"format": "pt", "step": "3"}
    assert [Path(file).name for file in weights.files] == ["1.safetensors", "2.safetensors"]
    assert weights.device.backend == backend and weights.nbytes % 4096 == 0 and weights.nbytes > 5_000_001
    assert weights.digest is not None and len(weights.digest) == 71 and weights.digest.startswith("blake3:")
    assert vmmfd.load_safetensors(model, backend=backend).digest is None


def test_weights_are_a_mapping(model: Path) -> None:
    weights = vmmfd.load_safetensors([model / "1.safetensors"], backend="host")
    assert "w" in weights and "x" not in weights and 3 not in weights and weights.get("x") is None
    with pytest.raises(KeyError, match="x"):
        weights["x"]
    with pytest.raises(KeyError):
        weights[0]  # type: ignore[index]
    assert list(weights.keys()) == list(FIRST) and [array.nbytes for array in weights.values()] == [24, 0, 8, 8]
    assert repr(weights).startswith("<vmmfd.Weights: 1.safetensors, 4 arrays, ")
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="can't be copied or pickled"):
            duplicate(weights)
    assert weights.device == weights["w"].device


def test_array_keeps_the_memory(model: Path) -> None:
    array = vmmfd.load_safetensors(model, backend="host")["noise"]
    assert array.tobytes() == SECOND["noise"][2]


def test_numpy_shares_writable_memory(model: Path) -> None:
    np = pytest.importorskip("numpy")
    weights = vmmfd.load_safetensors(model, backend="host")
    w = np.from_dlpack(weights["w"])
    assert w.tolist() == [[0, 1, 2], [3, 4, 5]] and w.flags.writeable
    w[0, 0] = 9
    assert np.from_dlpack(weights["w"])[0, 0] == 9


def test_reads_files_of_safetensors_package(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    safetensors = pytest.importorskip("safetensors.numpy")
    tensors = {"a": np.arange(12, dtype="f4").reshape(3, 4), "b": np.ones((0, 2), "i8"), "c": np.array(3, "u1")}
    safetensors.save_file(tensors, tmp_path / "m.safetensors", metadata={"k": "v"})
    weights = vmmfd.load_safetensors(tmp_path / "m.safetensors", backend="host")
    assert weights.metadata == {"k": "v"} and set(weights) == set(tensors)
    for name, tensor in tensors.items():
        assert (np.from_dlpack(weights[name]) == tensor).all() and weights[name].dtype == tensor.dtype.name


def test_more_files_than_descriptors(tmp_path: Path, child: Callable[..., Child]) -> None:
    for number in range(60):
        write(tmp_path / f"{number:02}.safetensors", {f"t{number:02}": ("U8", [3], bytes([number] * 3))})
    child(
        """
        import resource, sys, vmmfd
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
        weights = vmmfd.load_safetensors(sys.argv[1], backend="host", threads=4)
        assert [array.tobytes()[0] for array in weights.values()] == list(range(60))
        """,
        str(tmp_path),
    ).end()


def test_path_types(model: Path) -> None:
    index = model / "m.safetensors.index.json"
    map_ = {name: "1.safetensors" for name in FIRST}
    index.write_text(json.dumps({"weight_map": map_}))
    for paths in (model, str(model), index, [str(index)], (model / "1.safetensors",)):
        assert list(vmmfd.load_safetensors(paths, backend="host")) == list(FIRST)
    index.write_text(json.dumps({"weight_map": map_ | {"gone": "3.safetensors"}}))
    with pytest.raises(vmmfd.NotFound, match="3.safetensors does not exist, and .*index.json names it"):
        vmmfd.load_safetensors(model, backend="host")


def test_invalid_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    both = [{"dtype": "U8", "shape": [2], "data_offsets": offsets} for offsets in ([0, 2], [1, 3])]
    for header, data, words in [
        ({"a": both[0], "b": both[1]}, b"123", "inside"),
        ({"a": both[1]}, b"123", "the bytes 0 to 1, before tensor"),
        ({"a": both[0]}, b"123", "its last 1 bytes belong to no tensor"),
        ({"a": both[0]}, b"1", "only 1 bytes follow the header"),
    ]:
        write_raw(path, header, data)
        with pytest.raises(vmmfd.Invalid, match=words) as raised:
            vmmfd.load_safetensors(path, backend="host")
        assert isinstance(raised.value, ValueError) and raised.value.kind == "usage" and str(path) in str(raised.value)
    path.write_bytes(b"no such thing")
    with pytest.raises(vmmfd.Invalid, match="is not a safetensors file"):
        vmmfd.load_safetensors(path, backend="host")
    os.remove(path)
    os.mkfifo(path)
    with pytest.raises(vmmfd.Invalid, match="not a regular file"):
        vmmfd.load_safetensors(path, backend="host")
    with pytest.raises(FileNotFoundError):
        vmmfd.load_safetensors(tmp_path / "none", backend="host")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"threads": 0}, vmmfd.Invalid, "threads=0"),
        ({"threads": -1}, vmmfd.Invalid, "threads=-1"),
        ({"threads": 1 << 40}, vmmfd.Invalid, "1 to 256"),
        ({"backend": "gpu"}, vmmfd.Invalid, "gpu"),
        ({"device": "x"}, vmmfd.Invalid, "device='x'"),
        ({"device": 7}, vmmfd.NotFound, "7"),
        ({"progress": 3}, TypeError, "progress=3 can't be called"),
        ({"paths": []}, vmmfd.Invalid, "a file or a folder"),
        ({"paths": 3}, TypeError, None),
        ({"paths": [None]}, TypeError, None),
        ({"paths": "a\0b"}, ValueError, None),
    ],
)
def test_invalid_arguments(model: Path, options: dict[str, Any], error: type[Exception], words: str | None) -> None:
    with pytest.raises(error, match=words) as raised:
        vmmfd.load_safetensors(**{"paths": model, "backend": "host", **options})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_progress_runs_in_this_thread(model: Path, backend: str) -> None:
    seen: list[tuple[int, int, int]] = []
    vmmfd.load_safetensors(
        model, backend=backend, progress=lambda done, all_: seen.append((done, all_, threading.get_ident()))
    )
    done = [some for some, _, _ in seen]
    assert done == sorted(done) and {ident for _, _, ident in seen} == {threading.get_ident()}
    assert seen[-1][0] == seen[-1][1] > 5_000_000


def in_use() -> int:
    """Returns the shared memory that this process has mapped or open."""
    return sum("vmmfd" in line or "memfd" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_progress_exception_stops_load(tmp_path: Path) -> None:
    large(tmp_path / "w.safetensors", 256 << 20)
    before = in_use()

    def enough(_done: int, _all: int) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        vmmfd.load_safetensors(tmp_path, backend="host", progress=enough)
    assert in_use() == before


class Alarm(Exception):
    pass


@pytest.fixture
def alarm() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Alarm

    old = signal.signal(signal.SIGALRM, ring)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, old)


def test_signal_interrupts_load(tmp_path: Path, alarm: None) -> None:
    large(tmp_path / "w.safetensors", 768 << 20)
    before = in_use()
    begun: list[bool] = []

    def progress(*_: object) -> None:
        if not begun:
            begun.append(True)
            signal.setitimer(signal.ITIMER_REAL, 0.001)

    with pytest.raises(Alarm):
        vmmfd.load_safetensors(tmp_path, backend="host", threads=1, progress=progress)
    assert in_use() == before


def test_ctrl_c_interrupts_load(tmp_path: Path) -> None:
    large(tmp_path / "w.safetensors", 768 << 20)
    program = f"""
import vmmfd
vmmfd.load_safetensors({str(tmp_path)!r}, backend="host", threads=1, progress=lambda *_: print("going", flush=True))
print("whole")
"""
    child = subprocess.Popen([*PYTHON, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "going\n"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=300)
    assert child.returncode == -signal.SIGINT and "KeyboardInterrupt" in err and "whole" not in out, (out, err)


@pytest.mark.parametrize("after", [0.0, 0.1])
def test_exit_during_load(tmp_path: Path, after: float) -> None:
    large(tmp_path / "w.safetensors", 768 << 20)
    program = f"""
import threading, time, vmmfd
def load():
    vmmfd.load_safetensors({str(tmp_path)!r}, backend="host", threads=1)
threading.Thread(target=load, daemon=True).start()
time.sleep({after})
"""
    ended = subprocess.run([*PYTHON, "-c", program], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_load_releases_the_gil(tmp_path: Path) -> None:
    large(tmp_path / "w.safetensors", 256 << 20)
    interval = sys.getswitchinterval()
    # The other thread only runs when this one releases the GIL.
    sys.setswitchinterval(6000)
    try:
        for _ in range(10):
            going, done = threading.Event(), threading.Event()
            meanwhile: list[bool] = []

            def look(going: threading.Event, done: threading.Event, meanwhile: list[bool]) -> None:
                going.wait()
                meanwhile.append(not done.is_set())

            thread = threading.Thread(target=look, args=(going, done, meanwhile))
            thread.start()
            going.set()
            weights = vmmfd.load_safetensors(tmp_path, backend="host", threads=1)
            done.set()
            thread.join()
            assert weights["w"].nbytes == 256 << 20
            if meanwhile[0]:
                break
        else:
            raise AssertionError("no other thread ran while it loaded")
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_are_put_without_a_copy(model: Path, backend: str, tmp_path: Path) -> None:
    # The server accepts the emulated driver's memory only with an option.
    emulated = backend == "cuda" and "FAKECUDA_DEVICES" in os.environ
    server = Server(tmp_path, *(["--emulated"] if emulated else []))
    try:
        broker = vmmfd.connect(server.path, backend=backend)
        weights = vmmfd.load_safetensors(model, backend=backend, digest=True)
        broker.put("m", weights, metadata={"engine": "x"}, copy=False)
        with broker.get("m") as lease:
            assert lease.metadata == {"engine": "x", "safetensors": {"format": "pt", "step": "3"}}
            assert sorted(lease) == sorted(weights) and lease.parts[0].digest == weights.digest
            for name, (_, shape, bytes_) in (FIRST | SECOND).items():
                array = lease[name]
                assert array.shape == tuple(shape) and array.tobytes() == bytes_ and array.readonly, name
            # It shares the memory.
            weights["f8"].reinterpret("uint8").copy_from(b"xyz")
            assert lease["f8"].tobytes() == b"xyz"
        broker.put("m", weights, replace=True, metadata={"safetensors": "mine"}, part="rank-0")
        with broker.get("m") as lease:
            assert lease.metadata == {"safetensors": "mine"} and lease.parts[0].name == "rank-0"
        # A put that conflicts with the weights is refused; redundant options are accepted.
        with pytest.raises(vmmfd.Invalid, match=r"copy=True is not supported .*put dict\(weights\)"):
            broker.put("m/copied", weights, copy=True)
        other = "01234567-89ab-cdef-0123-456789abcdef"
        for device in (3, other, True):
            with pytest.raises(vmmfd.Invalid, match=f"{device!r}"):
                broker.put("m/there", weights, device=device)
        assert [of.name for of in broker.list()] == ["m"]
        for index, same in enumerate((weights.device, weights.device.ordinal, weights.device.uuid)):
            broker.put(f"m/here/{index}", weights, device=same)
        broker.put("m/copied", dict(weights), copy=True)
        weights["f8"].reinterpret("uint8").copy_from(b"abc")
        assert broker.get("m/copied")["f8"].tobytes() == b"xyz" and broker.get("m/here/0")["f8"].tobytes() == b"abc"
    finally:
        server.end()


def test_command_puts_the_same(model: Path, server: Server) -> None:
    put = [*command(), "put", "m", "--safetensors", str(model), "--digest", "--backend", "host", "--socket", server.path]
    subprocess.run(put, check=True, capture_output=True)
    weights = vmmfd.load_safetensors(model, backend="host", digest=True)
    with vmmfd.connect(server.path, backend="host").get("m") as lease:
        assert lease.metadata == {"safetensors": weights.metadata} and lease.parts[0].digest == weights.digest
        for name, array in weights.items():
            other = lease[name]
            assert (other.dtype, other.shape, other.tobytes()) == (array.dtype, array.shape, array.tobytes())
