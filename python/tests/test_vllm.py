"""vLLM's load format without vLLM and without PyTorch: registration, options, the key, the identity of contents, names.

It has more than 500 lines: all its tests import the package beside the stand-in."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import vmmfd
from vmmfd.engines import _contents, _options, _state, _vllm_key, _vllm_object

from conftest import PYTHON
from vllm_engine import STUB, configure

DEVICE = "GPU-00000000-0000-0000-0000-000000000000"


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`import vllm` finds the stand-in."""
    monkeypatch.syspath_prepend(str(STUB))
    before = set(sys.modules)
    yield
    for module in [module for module in sys.modules.keys() - before if module.partition(".")[0] == "vllm"]:
        del sys.modules[module]
        # The package, which another file of tests may have imported, has it as an attribute too.
        package, _, name = module.rpartition(".")
        if package in before:
            delattr(sys.modules[package], name)


# Registration


def python(code: str, *arguments: str, **env: str) -> str:
    """Returns the output of a Python program without the stand-in."""
    done = subprocess.run([*PYTHON, "-c", code, *arguments], capture_output=True, text=True, timeout=60, env={**os.environ, **env})
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def test_import_loads_neither_vllm_nor_torch() -> None:
    code = "import sys, vmmfd.engines.vllm; print([name for name in ('vllm', 'torch', 'numpy') if name in sys.modules])"
    assert python(code, PYTHONPATH=os.pathsep.join([str(STUB), os.environ.get("PYTHONPATH", "")])) == "[]\n"


REGISTER = """
import ctypes, os, sys, types
from pathlib import Path
sys.path.insert(0, sys.argv[1])
sys.modules.setdefault("torch", types.ModuleType("torch"))
import vmmfd.engines.vllm as engine
import vmmfd
opened = lambda: {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
is_driver = lambda: "libcuda.so.1" in Path("/proc/self/maps").read_text()
before = opened()
engine.register()
from vllm.model_executor.model_loader import loaders
loader = loaders["vmmfd"]
engine.register()
assert loaders["vmmfd"] is loader and list(loaders) == ["auto", "vmmfd"]
assert opened() == before, opened() ^ before
assert not is_driver()
try:
    vmmfd.devices(backend="cuda")
except vmmfd.Error:
    pass
assert is_driver()
"""


def test_register_opens_nothing(tmp_path: Path) -> None:
    # A library that is loaded as the driver, so that a look-up is detected on any machine.
    import _ctypes

    shutil.copy(_ctypes.__file__, tmp_path / "libcuda.so.1")
    assert python(REGISTER, str(STUB), LD_LIBRARY_PATH=str(tmp_path)) == ""


def parameters(signature: str) -> list[str]:
    arguments = ast.parse(f"def f{signature.partition('(')[1]}{signature.partition('(')[2]}: ...").body[0]
    assert isinstance(arguments, ast.FunctionDef)
    return [each.arg for each in (*arguments.args.args, *arguments.args.kwonlyargs)]


def test_stub_has_recorded_signatures() -> None:
    """The stand-in's functions take what vLLM's do."""
    record = json.loads(Path(__file__).with_name("vllm_signatures.json").read_text())
    compared = []
    for file, names in record["signatures"].items():
        path = STUB / file.replace("parallel_state", "__init__")
        for name in names if path.is_file() else []:
            body: Any = ast.parse(path.read_text()).body
            for part in name.split("."):
                node = next((node for node in body if getattr(node, "name", None) == part), None)
                body = getattr(node, "body", [])
            if isinstance(node, ast.FunctionDef):
                compared.append(name)
                assert [each.arg for each in (*node.args.args, *node.args.kwonlyargs)] == parameters(names[name]), name
    assert len(compared) > 15 and "initialize_model" in compared and "BaseModelLoader.load_model" in compared


# Options


def test_options_default() -> None:
    assert _options.read({}) == _options.read(None) == {
        "broker": None, "trust": (), "owner": None, "name": None, "on_missing": "load", "wait": 600, "on_unsupported": "fail", "wake": "own"
    }  # fmt: skip
    given = {"broker": "/b", "trust": [5], "owner": 0, "name": "a/B.c_d-9", "on_missing": "fail", "wait": 0.5, "on_unsupported": "load", "wake": "newest"}
    assert _options.read(given) == given


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("broker", ["", 5, True, ["/b"], {"path": "/b"}]),
        ("trust", [5, "65532", ["65532"], [True], [-1], [1 << 32], [1.0], {"65532": 1}, None]),
        ("owner", ["root", "", True, -1, 1 << 32, 1.0, [5]]),
        ("name", ["", 5, [], "a b", "/a", "a/", "a//b", ".", "..", "a/../b", "./a", "ä", "a\n", "a\0", "n" * 151, "\ud800"]),
        ("on_missing", ["", "Load", None, 1, ["load"], {}]),
        ("on_unsupported", ["", "auto", None, True, ["fail"], {}]),
        ("wait", ["600", None, True, -1, float("nan"), float("inf"), 1e9, [600], 10**400]),
        ("on_mising", ["load"]),
        ("", [None]),
    ],
)
def test_wrong_option_is_named(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(vmmfd.Invalid, match=f"extra-config has {field!r}"):
            _options.read({field: value})


@pytest.mark.parametrize("given", [[], "", 0, False, "broker", ["broker"], 5])
def test_options_must_be_an_object(given: Any) -> None:
    with pytest.raises(vmmfd.Invalid, match="give a JSON object"):
        _options.read(given)


# The key


def set_config(path: str, value: Any) -> Callable[[Any, pytest.MonkeyPatch], None]:
    def change(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        *through, last = path.split(".")
        for step in through:
            config = getattr(config, step)
        setattr(config, last, value)

    return change


def set_stub(module: str, name: str, value: Any) -> Callable[[Any, pytest.MonkeyPatch], None]:
    return lambda config, monkeypatch: monkeypatch.setattr(f"{module}.{name}", value)


# One change of each field, of the configuration or of vLLM.
CHANGES: dict[str, Callable[[Any, pytest.MonkeyPatch], None]] = {
    "engine": set_stub("vllm", "__version__", "0.33.1"),
    "architectures": set_config("model_config.hf_config.architectures", ["Qwen3ForCausalLM"]),
    "dtype": set_config("model_config.dtype", "float16"),
    "quantization": set_config("model_config.quantization", "fp8"),
    "quantization_config": set_config("model_config.quantization_config", {"linear": {"weights": "fp8"}}),
    "config": set_config("model_config.hf_config.hidden_size", 65),
    "model_impl": set_config("model_config.model_impl", "transformers"),
    "convert": set_config("model_config.convert_type", "embed"),
    "kv_cache_dtype": set_config("cache_config.cache_dtype", "fp8"),
    "kv_cache_dtype_skip_layers": set_config("cache_config.kv_cache_dtype_skip_layers", ["0"]),
    "tensor_parallel": set_stub("vllm.distributed", "tensor", [0, 2]),
    "pipeline_parallel": set_stub("vllm.distributed", "pipeline", [1, 2]),
    "data_parallel": set_stub("vllm.distributed", "data", [1, 2]),
    "prefill_context_parallel": set_stub("vllm.distributed", "prefill", [1, 2]),
    "expert_parallel": set_config("parallel_config.enable_expert_parallel", True),
    "moe_backend": set_config("kernel_config.moe_backend", "marlin"),
    "linear_backend": set_config("kernel_config.linear_backend", "cutlass"),
    "linear_backend_per_quant": set_config("kernel_config.linear_backend_per_quant", {"fp8": "cutlass"}),
    "attention_backend": set_config("attention_config.backend", "FLASH_ATTN"),
    "lora": set_config("lora_config", object()),
    "variables": lambda config, monkeypatch: monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1"),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with two weight files."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model-1.safetensors").write_bytes(b"a" * 1000)
    (folder / "model-2.safetensors").write_bytes(b"b" * 2000)
    return folder


def key_of(config: Any) -> dict[str, Any]:
    return _vllm_key.key_of(config, config.model_config)


def publish(broker: vmmfd.Broker, name: str, key: dict[str, Any], contents: dict[str, Any], **more: Any) -> None:
    """An object as the load format publishes one."""
    recorded = {"key": key, "contents": contents, "none": [], "reshaped": [], "state": [], "backends": {}, "untied": False, **more}
    broker.put(name, {"weight": vmmfd.empty((4,), "float32", backend="host")}, metadata={"vllm": recorded})


def check(broker: vmmfd.Broker, name: str, key: dict[str, Any], contents: _contents.Contents) -> None:
    with broker.get(name) as lease:
        _vllm_object.check_key(_vllm_object.Found(broker, name, lease, key, contents, 0))


def differing(error: pytest.ExceptionInfo[vmmfd.MismatchError]) -> set[str]:
    """The fields that an error names."""
    listed = re.search(r"does not fit this engine \((.*)\)\. Choose another name, or remove it with `vmmfd rm ", str(error.value), re.DOTALL)
    assert listed, error.value
    return {each.partition(":")[0] for each in listed[1].split("; ")}


def test_each_key_field_is_tested(checkpoint: Path) -> None:
    assert key_of(configure(checkpoint, {})).keys() == CHANGES.keys()


@pytest.mark.parametrize("field", CHANGES)
def test_changed_field_is_refused_and_named(
    broker: vmmfd.Broker, name: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    import vllm.distributed  # noqa: F401

    config, contents = configure(checkpoint, {}), _contents.Contents(str(checkpoint))
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    publish(broker, name, key_of(config), contents.record())
    check(broker, name, key_of(config), contents)
    CHANGES[field](config, monkeypatch)
    with pytest.raises(vmmfd.MismatchError) as raised:
        check(broker, name, key_of(config), contents)
    # Fields of mappings are named, and the config has the architectures too.
    named = {each.partition(".")[0] for each in differing(raised)}
    assert named == {field} | ({"config"} if field == "architectures" else set())
    assert f"vmmfd rm {name}" in str(raised.value)


def test_changed_contents_are_refused_and_named(broker: vmmfd.Broker, name: str, checkpoint: Path) -> None:
    config = configure(checkpoint, {})
    publish(broker, name, key_of(config), _contents.Contents(str(checkpoint)).record())
    with open(checkpoint / "model-2.safetensors", "r+b") as file:
        file.seek(1999)
        file.write(b"c")
    with pytest.raises(vmmfd.MismatchError, match="contents: model-2.safetensors has other bytes") as raised:
        check(broker, name, key_of(config), _contents.Contents(str(checkpoint)))
    assert differing(raised) == {"contents"}
    # All that differs is in one error.
    config.model_config.dtype = "float16"
    with pytest.raises(vmmfd.MismatchError) as raised:
        check(broker, name, key_of(config), _contents.Contents(str(checkpoint)))
    assert differing(raised) == {"contents", "dtype"}


def test_key_survives_processes_and_paths() -> None:
    """The same configuration has the same key in each process: sets have no order, and a config names the folder that it came from."""
    code = """
import json, sys
sys.path[:0] = sys.argv[1:3]
from vllm_engine import configure
from vmmfd.engines._vllm_key import key_of
config = configure("/m", {})
config.model_config.hf_config.kinds = {f"kind{number}" for number in range(20)}
config.model_config.hf_config.limits = [0.0, float("inf"), float("nan"), 1 << 70]
config.model_config.hf_config.labels = {0: "a", "b": (1, 2), None: print}
config.model_config.hf_config._name_or_path = sys.argv[3]
config.model_config.quantization_config = {"ignored": frozenset("abcdefgh")}
print(json.dumps(key_of(config, config.model_config), sort_keys=True, allow_nan=False))
"""
    folder = str(Path(__file__).parent)
    keys = {python(code, str(STUB), folder, path, PYTHONHASHSEED=seed) for path, seed in (("/a", "1"), ("/b", "2"))}
    assert len(keys) == 1
    config = json.loads(keys.pop())["config"]
    assert config["limits"] == [0.0, "inf", "nan", str(1 << 70)] and config["labels"]["b"] == [1, 2]


RECORD = {"source": "/m", "commit": "0" * 40, "files": {}}
RECORDED = {"key": {}, "contents": RECORD, "none": [], "reshaped": [], "state": [], "backends": {}, "untied": False}


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"vllm": None},
        {"vllm": []},
        *({"vllm": {key: value for key, value in RECORDED.items() if key != absent}} for absent in RECORDED),
        *({"vllm": {**RECORDED, field: wrong}} for field in RECORDED for wrong in (5, "", None, [5], {"a": 5}) if (field, wrong) not in (("key", {"a": 5}), ("backends", {"a": 5}))),
        *({"vllm": {**RECORDED, "contents": {**RECORD, field: wrong}}} for field in RECORD for wrong in (5, [], {"a": 5}, {"a": {"stat": []}})),
        {"vllm": {**RECORDED, "contents": {**RECORD, "files": {"a": {"stat": [1, 2], "sha256": ""}}}}},
        {"vllm": {**RECORDED, "contents": {"source": "/m", "files": {}}}},
        *({"vllm": {**RECORDED, "state": [row]}} for row in ([], ["a"], ["a", "b"], ["a", 5, 5], ["a", "b", {}], ["a", "b", {"float": "x"}], {})),
    ],
)  # fmt: skip
def test_object_of_another_maker_is_refused(broker: vmmfd.Broker, name: str, metadata: dict[str, Any]) -> None:
    broker.put(name, {"weight": vmmfd.empty((4,), "float32", backend="host")}, metadata=metadata)
    with pytest.raises(vmmfd.MismatchError, match="was not published by load format vmmfd: choose another name"):
        check(broker, name, {}, _contents.Contents("/absent"))


# Contents


def difference(model: Path, recorded: dict[str, Any], commit: str | None = None) -> tuple[str | None, int]:
    """How a folder differs from a record, and how many bytes were read for that."""
    contents = _contents.Contents(str(model), commit)
    # As returned by the broker.
    return contents.difference(json.loads(json.dumps(recorded))), contents.read


def test_same_files_are_not_read(checkpoint: Path) -> None:
    contents = _contents.Contents(str(checkpoint))
    assert contents.nbytes == 3000 and contents.read == 0
    recorded = contents.record()
    assert contents.read == 3000 and _contents.is_record(recorded)
    assert difference(checkpoint, recorded) == (None, 0)
    (checkpoint.parent / "link").symlink_to(checkpoint)
    assert difference(checkpoint.parent / "link", recorded) == (None, 0)


def test_copied_files_are_read_and_accepted(checkpoint: Path, tmp_path: Path) -> None:
    recorded = _contents.Contents(str(checkpoint)).record()
    os.utime(checkpoint / "model-1.safetensors", ns=(0, 0))
    assert difference(checkpoint, recorded) == (None, 1000)
    shutil.copytree(checkpoint, tmp_path / "copy")
    assert difference(tmp_path / "copy", recorded) == (None, 3000)


def test_changed_bytes_and_sizes_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    recorded = _contents.Contents(str(checkpoint)).record()
    shutil.copytree(checkpoint, tmp_path / "copy")
    (tmp_path / "copy" / "model-1.safetensors").write_bytes(b"A" + b"a" * 999)
    assert difference(tmp_path / "copy", recorded) == ("model-1.safetensors has other bytes", 3000)
    # A file of another size is not read.
    (tmp_path / "copy" / "model-2.safetensors").write_bytes(b"b" * 2001)
    assert difference(tmp_path / "copy", recorded) == ("model-2.safetensors has another size", 0)


def test_large_file_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_contents, "_PIECE", 1000)
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"a" * 3500)
    recorded = _contents.Contents(str(tmp_path)).record()
    for place in (0, 999, 1000, 3499):
        file.write_bytes(b"a" * place + b"b" + b"a" * (3499 - place))
        assert difference(tmp_path, recorded) == ("model.safetensors has other bytes", 3500)
    # The order of the pieces counts.
    file.write_bytes(b"a" * 1000 + b"b" * 1000 + b"a" * 1500)
    recorded = _contents.Contents(str(tmp_path)).record()
    file.write_bytes(b"b" * 1000 + b"a" * 2500)
    assert difference(tmp_path, recorded)[0] == "model.safetensors has other bytes"


def test_files_are_read_beside_other_work(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = _contents.Contents(str(checkpoint))
    with contents.reading_beside():
        pass
    monkeypatch.setattr(_contents, "_piece", lambda *_: pytest.fail("a file was read again"))
    assert contents.record() == json.loads(json.dumps(contents.record())) and contents.read == 3000
    # A failed load does not wait for all files. One thread reads, so the others wait for it.
    monkeypatch.setattr(_contents, "_THREADS", 1)
    begun = []
    monkeypatch.setattr(_contents, "_piece", lambda path, _: (begun.append(path), time.sleep(0.2)))
    with pytest.raises(KeyError), _contents.Contents(str(checkpoint)).reading_beside():
        raise KeyError
    assert len(begun) <= 1


def test_missing_files_need_the_same_source(checkpoint: Path, tmp_path: Path) -> None:
    recorded = _contents.Contents(str(checkpoint)).record()
    for file in checkpoint.glob("*.safetensors"):
        file.unlink()
    assert difference(checkpoint, recorded) == (None, 0)
    other = tmp_path / "other"
    other.mkdir()
    assert difference(other, recorded) == (f"{other} has no weight files, and the object is from {checkpoint}", 0)
    shutil.rmtree(checkpoint)
    assert difference(checkpoint, recorded) == (None, 0)


def test_other_file_names_are_refused(checkpoint: Path) -> None:
    recorded = _contents.Contents(str(checkpoint)).record()
    (checkpoint / "model-2.safetensors").rename(checkpoint / "model-3.safetensors")
    assert difference(checkpoint, recorded) == ("other files: model-2.safetensors, model-3.safetensors", 0)


def test_index_names_the_files(checkpoint: Path) -> None:
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "absent.safetensors"}}))
    assert list(_contents.Contents(str(checkpoint)).files) == ["model-1.safetensors"]
    # The files of an index may be gone, and the index not.
    index.write_text(json.dumps({"weight_map": {"a": "absent.safetensors"}}))
    assert list(_contents.Contents(str(checkpoint)).files) == ["model-1.safetensors", "model-2.safetensors"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": 5}', '{"weight_map": {"a": 5}}', '{"weight_map": {"a": ["b"]}}', "\x80"])
def test_broken_index_is_refused(checkpoint: Path, text: str) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    with pytest.raises(vmmfd.Invalid, match="model.safetensors.index.json is not an index of weight files"):
        _contents.Contents(str(checkpoint))


def test_first_format_is_used(checkpoint: Path) -> None:
    (checkpoint / "pytorch_model.bin").write_bytes(b"c")
    assert len(_contents.Contents(str(checkpoint)).files) == 2
    for file in checkpoint.glob("*.safetensors"):
        file.unlink()
    assert list(_contents.Contents(str(checkpoint)).files) == ["pytorch_model.bin"]
    assert list(_contents.Contents(str(checkpoint / "pytorch_model.bin")).files) == ["pytorch_model.bin"]


def test_commit_identifies_a_repository(checkpoint: Path) -> None:
    one, two = "1" * 40, "2" * 40
    recorded = _contents.Contents("org/model", one).record()
    assert recorded == {"source": "org/model", "commit": one, "files": {}}
    assert _contents.Contents("org/mirror", one).difference(recorded) is None
    assert _contents.Contents("org/model", two).difference(recorded) == f"commit {two}, and {one} in the object"
    # A folder of Hugging Face's cache has its commit in the path.
    snapshot = checkpoint.parent / "snapshots" / one
    shutil.copytree(checkpoint, snapshot)
    (checkpoint.parent / "link").symlink_to(snapshot)
    for model in (snapshot, checkpoint.parent / "link"):
        assert difference(model, recorded) == (None, 0)
        assert _contents.Contents(str(model)).record()["files"] == {}


def test_local_folder_ignores_config_commit(checkpoint: Path) -> None:
    """A fine-tune's config may name the commit of its base."""
    recorded = _contents.Contents(str(checkpoint), "1" * 40).record()
    assert recorded["commit"] is None and len(recorded["files"]) == 2
    published = _contents.Contents("org/model", "1" * 40).record()
    assert difference(checkpoint, published, "1" * 40)[0] == f"the object is from commit {'1' * 40}, and the files of {checkpoint} have no commit"


def test_contents_need_commit_or_files(tmp_path: Path) -> None:
    for model in ("org/model", str(tmp_path)):
        with pytest.raises(vmmfd.Invalid, match="have neither a commit nor files that can be compared"):
            _contents.Contents(model).record()


def test_file_changed_during_load_is_refused(checkpoint: Path) -> None:
    for commit in (None, "1" * 40):
        contents = _contents.Contents(str(checkpoint))
        contents.commit = commit
        (checkpoint / "model-1.safetensors").write_bytes(b"d" * 1000)
        with pytest.raises(vmmfd.Invalid, match="model-1.safetensors was changed while it was loaded"):
            contents.record()
    contents = _contents.Contents(str(checkpoint))
    (checkpoint / "model-1.safetensors").unlink()
    with pytest.raises(vmmfd.Invalid, match="can't be read: .*No such file"):
        contents.record()


def test_unreadable_file_is_an_error(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = _contents.Contents(str(checkpoint)).record()
    os.utime(checkpoint / "model-1.safetensors", ns=(0, 0))

    def denied(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(_contents, "open", denied, raising=False)
    with pytest.raises(vmmfd.Invalid, match=re.escape(f"the weights of {checkpoint} can't be read: [Errno 13]")):
        difference(checkpoint, recorded)


# State


def test_state_survives_json() -> None:
    changed = _state.changes({("a", "x"): 1}, {("a", "x"): 1, ("a", "y"): float("inf"), ("", "z"): None, ("b", "m.k"): ["Kernel"]})
    assert changed == [["a", "y", {"float": "inf"}], ["", "z", None], ["b", "m.k", ["Kernel"]]]
    assert _state.is_changes(json.loads(json.dumps(changed, allow_nan=False)))


# Names


MODELS = [
    "/models/Llama 3.1 (8B)", "org/model", "/", "..", ".", "a/..", "/models/", "モデル", "m\n\0", "x" * 500, "s3://bucket/model", "C:\\model"
]  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_derived_name_is_valid(broker: vmmfd.Broker, model: str, checkpoint: Path) -> None:
    key = key_of(configure(model, {}))
    made = _vllm_key.object_name(_options.read({}), model, DEVICE, key)
    assert re.fullmatch(r"vllm/[A-Za-z0-9._-]+-[0-9a-f]{16}/GPU-[0-9-]+", made)
    with broker.claim(made) as claim:
        assert isinstance(claim, vmmfd.Claim)


def test_name_depends_on_model_and_key(broker: vmmfd.Broker, checkpoint: Path) -> None:
    options, config = _options.read({}), configure("org/model", {})
    key = key_of(config)
    names = [_vllm_key.object_name(options, model, DEVICE, key) for model in MODELS]
    names.append(_vllm_key.object_name(options, "org/model", "HOST-1", key))
    names.append(_vllm_key.object_name(options, "org/model", DEVICE, {**key, "dtype": "float16"}))
    names.extend(_vllm_key.object_name(options, "org/model", DEVICE, {**key, "data_parallel": [rank, 2]}) for rank in range(2))
    assert len(set(names)) == len(names)
    assert _vllm_key.object_name(options, "org/model", DEVICE, key) == names[1]


def test_user_name_gets_device_and_ranks(broker: vmmfd.Broker, checkpoint: Path) -> None:
    key = key_of(configure(checkpoint, {}))
    options = _options.read({"name": "prod/llama"})
    assert _vllm_key.object_name(options, "m", DEVICE, key) == f"prod/llama/{DEVICE}"
    parallel = ("tensor_parallel", "pipeline_parallel", "data_parallel", "prefill_context_parallel")
    many = {**key, **dict.fromkeys(parallel, [1023, 1024])}
    made = _vllm_key.object_name(_options.read({"name": "n" * 150}), "m", DEVICE, many)
    assert made == f"{'n' * 150}/{DEVICE}/tp1023of1024/pp1023of1024/dp1023of1024/pcp1023of1024"
    with broker.claim(made) as claim:
        assert isinstance(claim, vmmfd.Claim)


# Ranks


def test_first_rank_asks_before_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import distributed

    for rank, size, expected in ((0, 1, ["asked"]), (0, 2, ["asked", "barrier"]), (1, 2, ["barrier", "asked"])):
        order: list[str] = []
        monkeypatch.setattr(distributed, "world", [rank, size])
        monkeypatch.setattr(distributed, "barriers", order)
        with _vllm_object.in_turn():
            order.append("asked")
        assert order == expected, (rank, size)


def test_ranks_continue_after_first_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import distributed

    order: list[str] = []
    monkeypatch.setattr(distributed, "world", [0, 2])
    monkeypatch.setattr(distributed, "barriers", order)
    with pytest.raises(vmmfd.NotFound), _vllm_object.in_turn():
        raise vmmfd.NotFound("no broker")
    assert order == ["barrier"]
