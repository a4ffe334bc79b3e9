"""PyTorch support without a GPU, at process exit, and in the examples."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import LIMIT, PYTHON, Child

import vmmfd

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch_models import Net  # noqa: E402


def test_pool_needs_gpu() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(vmmfd.Unsupported, match="needs a GPU"), vmmfd.torch.pool():
            pass
    for arena, kind in ((0, vmmfd.Invalid), (-1, vmmfd.Invalid), (1 << 60, vmmfd.Invalid), (1.5, TypeError), (True, TypeError), (None, TypeError)):
        with pytest.raises(kind, match="arena="):
            vmmfd.torch.pool(arena=arena)  # type: ignore[arg-type]
    assert vmmfd.torch.pool().figures == {"arenas": 0, "closed": 0, "bytes": 0, "blocks": 0, "used": 0}


def test_torch_is_imported_lazily(child: Callable[..., Child]) -> None:
    child(
        """
        import sys, vmmfd, vmmfd.torch
        assert "torch" not in sys.modules
        assert vmmfd.torch.pool().figures["arenas"] == 0
        assert "torch" not in sys.modules
        """
    ).end()


def test_tensors_alive_at_exit(
    broker: vmmfd.Broker, socket: str, name: str, child: Callable[..., Child]
) -> None:
    broker.put(name, Net(1))
    for kind in ("plain", "cycle", "thread"):
        child(
            """
            import sys, threading, torch, vmmfd
            broker = vmmfd.connect(sys.argv[1], backend="host")
            tensors = broker.state_dict(sys.argv[2])
            if sys.argv[3] == "cycle":
                tensors["self"] = tensors
            if sys.argv[3] == "thread":
                threading.Thread(target=threading.Event().wait, args=(0.5,), kwargs={}, daemon=True).start()
            """,
            socket,
            name,
            kind,
        ).end()
    assert len(broker.who(name).leases) == 0


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("example", ["share_torch.py", "weights_serve.py"])
def test_examples_report_missing_broker(example: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [*PYTHON, str(EXAMPLES / example), "--socket", str(tmp_path / "none.sock"), "--backend", "host", "--timeout", "0.1"],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert ended.returncode == 1 and "Traceback" not in ended.stderr, ended.stderr
    assert ended.stderr.startswith(f"{example[:-3]}: ") and "none.sock" in ended.stderr


def run(*arguments: str) -> str:
    ended = subprocess.run([*PYTHON, *arguments], capture_output=True, text=True, timeout=LIMIT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_share_torch_example(socket: str) -> None:
    lines = run(str(EXAMPLES / "share_torch.py"), "--socket", socket, "--backend", "host").splitlines()
    assert lines[1].split()[0] == "result" and lines[1] == lines[3]


def test_weights_serve_example(socket: str) -> None:
    program = [str(EXAMPLES / "weights_serve.py"), "--socket", socket, "--backend", "host"]
    assert run(*program, "--make", "1") == "put version 1\n"
    serving = subprocess.Popen([*PYTHON, *program, "--until", "2"], stdout=subprocess.PIPE, text=True)
    try:
        assert serving.stdout is not None
        first = serving.stdout.readline()
        assert first.startswith("version 1 answers ")
        run(*program, "--make", "2")
        second, _ = serving.communicate(timeout=LIMIT)
        assert second.startswith("version 2 answers ") and second.split()[-1] != first.split()[-1]
        assert serving.returncode == 0
    finally:
        serving.kill()
        serving.wait()


def test_load_model_example(broker: vmmfd.Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = dict(hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4, vocab_size=512)
    config = transformers.LlamaConfig(**sizes, tie_word_embeddings=True, initializer_range=0.3, eos_token_id=None, pad_token_id=0)
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=8, do_sample=False)[0].tolist()
    broker.put("mine", model)
    config.save_pretrained(tmp_path)
    monkeypatch.setenv("VMMFD_BROKER_SOCKET", broker.path)
    assert run(str(EXAMPLES / "load_model.py"), str(tmp_path), "mine", "host").splitlines()[-1] == str(tokens)
