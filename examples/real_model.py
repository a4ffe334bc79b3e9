"""A real model in several processes, with one copy of its weights on the GPU.

    python real_model.py [--small] [--backend host] [--readers 3]

It needs torch, transformers and vmmfd, and downloads nothing: the model is built from a config, with about 1 GB of random weights. The
steps, each of which is checked:

1.  A maker builds the model, generates tokens, and puts it under a name.
2.  Three readers build the same model on the meta device, without memory, load all weights from the broker, and generate the same tokens.
3.  The maker is killed. The readers still work.
4.  A second maker puts the next version, with other weights, and is killed. The readers switch to it at the same addresses, and generate
its tokens.
5.  The broker's server is killed. The readers still work.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NAME = "models/real"
TOKENS = 24
STARTED = time.monotonic()


def config(small: bool) -> Any:
    """Returns a Llama-like model whose embedding is also its output layer."""
    from transformers import LlamaConfig

    sizes: dict[str, int] = (
        dict(hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4, vocab_size=512)
        if small
        else dict(
            hidden_size=2048, intermediate_size=5632, num_hidden_layers=8, num_attention_heads=16, vocab_size=32000
        )
    )
    return LlamaConfig(
        **sizes,
        num_key_value_heads=sizes["num_attention_heads"],
        max_position_embeddings=256,
        tie_word_embeddings=True,
        # Scaled so that all layers affect the output, not only the last token.
        initializer_range=0.3 if small else 0.04,
        bos_token_id=1,
        # With random weights, no token means the end of a text.
        eos_token_id=None,
        pad_token_id=0,
        attn_implementation="eager",
    )


def build(options: argparse.Namespace, device: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    dtype = torch.float32 if options.backend == "host" else torch.bfloat16
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config(options.small), dtype=dtype)
    return model.eval()


def generate(model: Any, device: str) -> list[int]:
    """Generates tokens greedily: equal weights produce equal tokens."""
    import torch

    prompt = torch.tensor([[1, 17, 23, 5, 42, 7, 99, 3]], device=device)
    with torch.inference_mode():
        made = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=TOKENS, do_sample=False, use_cache=True
        )
    tokens: list[int] = made[0, prompt.shape[1] :].tolist()
    return tokens


def say(**what: Any) -> None:
    """Sends a message to the parent."""
    print(json.dumps(what), flush=True)


def make(options: argparse.Namespace) -> None:
    """A maker: builds a model, puts its weights, and waits to be killed."""
    import torch

    import vmmfd
    import vmmfd.torch

    device = "cpu" if options.backend == "host" else "cuda"
    torch.manual_seed(options.seed)
    broker = vmmfd.connect(options.socket, backend=options.backend)
    if options.backend == "cuda":
        # PyTorch allocates shareable memory here: the put copies nothing.
        with vmmfd.torch.pool():
            model = build(options, device)
    else:
        model = build(options, device)
    tokens = generate(model, device)
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    begun = time.perf_counter()
    published = broker.put(NAME, model, replace=options.seed > 1, metadata={"seed": options.seed})
    took = time.perf_counter() - begun
    say(tokens=tokens, version=published.version, bytes=size, put_ms=round(1000 * took, 1))
    time.sleep(options.limit)


def read(options: argparse.Namespace) -> None:
    """A reader: builds the model on the meta device, loads the weights, and serves the parent's requests."""
    import torch

    import vmmfd

    device = "cpu" if options.backend == "host" else "cuda"
    broker = vmmfd.connect(options.socket, backend=options.backend)
    if options.backend == "cuda":
        torch.zeros(1, device=device)
    model = build(options, "meta")
    begun = time.perf_counter()
    loaded = broker.load(NAME, into=model, wait=60)
    model.tie_weights()
    took = time.perf_counter() - begun
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    left = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if not tied or left:
        sys.exit(f"the weights are {'tied' if tied else 'not tied'}, and on the meta device are {left}")
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    say(tokens=generate(model, device), version=loaded.lease.version, load_ms=round(1000 * took, 1))
    for line in sys.stdin:
        if line.strip() == "switch":
            begun = time.perf_counter()
            # The old version is freed when its last user is gone.
            loaded.switch().close()
            took = time.perf_counter() - begun
        moved = addresses != [parameter.data_ptr() for parameter in model.parameters()]
        say(tokens=generate(model, device), version=loaded.lease.version, moved=moved, ms=round(1000 * took, 1))


class Child:
    """A child process of this example. `name` is its name in the output."""

    def __init__(self, name: str, command: list[str], limit: float) -> None:
        self.name, self.deadline = name, time.monotonic() + limit
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def line(self) -> str:
        """Returns the next line that it prints."""
        assert self.process.stdout is not None
        text = b""
        while not text.endswith(b"\n"):
            left = self.deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                sys.exit(f"real_model: {self.name} said nothing in time")
            piece = os.read(self.process.stdout.fileno(), 1)
            if not piece:
                sys.exit(f"real_model: {self.name} ended with {self.process.wait()}")
            text += piece
        return text.decode().strip()

    def told(self) -> dict[str, Any]:
        """Returns the next JSON object that it prints."""
        while not (line := self.line()).startswith("{"):
            pass
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n".encode())
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def check(what: str, found: Any, expected: Any) -> None:
    if found != expected:
        sys.exit(f"real_model: {what}: found {found}, and expected {expected}")


def step(text: str) -> None:
    print(f"{time.monotonic() - STARTED:6.1f} s  {text}", flush=True)


def run(options: argparse.Namespace, children: list[Child], folder: Path) -> None:
    socket = str(folder / "broker.sock")

    def start(name: str, *arguments: str) -> Child:
        common = ["--socket", socket, "--backend", options.backend, "--limit", str(options.limit)]
        command = [sys.executable, __file__, *common, *(["--small"] if options.small else []), *arguments]
        children.append(Child(name, command, options.limit))
        return children[-1]

    given = os.environ.get("VMMFD_BIN")
    server_command = [given] if given else [sys.executable, "-m", "vmmfd._command"]
    # Without a keeper, nothing restarts the server after it is killed.
    server = Child("the server", [*server_command, "serve", "--socket", socket, "--no-keeper"], options.limit)
    children.append(server)
    server.line()

    maker = start("the maker", "--role", "make", "--seed", "1")
    first = maker.told()
    step(f"the maker put version {first['version']}: {first['bytes'] / 1e9:.2f} GB in {first['put_ms']} ms")
    step(f"its tokens: {first['tokens']}")

    readers = [start(f"reader {number}", "--role", "read") for number in range(1, options.readers + 1)]
    for reader in readers:
        told = reader.told()
        check(f"the tokens of {reader.name}", told["tokens"], first["tokens"])
        step(f"{reader.name} has the weights in {told['load_ms']} ms, and generates the same")

    def all_of_them(word: str, version: int, expected: list[int]) -> None:
        for reader in readers:
            reader.ask(word)
        for reader in readers:
            told = reader.told()
            check(f"the version of {reader.name}", told["version"], version)
            check(f"the tokens of {reader.name}", told["tokens"], expected)
            check(f"whether the weights of {reader.name} moved", told["moved"], False)
            if word == "switch":
                step(f"{reader.name} switched in {told['ms']} ms")

    maker.kill()
    all_of_them("generate", 1, first["tokens"])
    step("the maker was killed: the readers generate the same")

    second_maker = start("the second maker", "--role", "make", "--seed", "2")
    second = second_maker.told()
    second_maker.kill()
    if second["tokens"] == first["tokens"]:
        sys.exit("real_model: both versions give the same tokens: this would show nothing")
    step(f"a second maker put version {second['version']}, and was killed; its tokens: {second['tokens']}")
    all_of_them("generate", 1, first["tokens"])
    all_of_them("switch", 2, second["tokens"])
    step("the readers give the new version's tokens, at the same addresses")

    server.kill()
    all_of_them("generate", 2, second["tokens"])
    step("the broker's server was killed: the readers go on")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny model, to try it")
    parser.add_argument("--backend", choices=["cuda", "host"], default="cuda", help="host: on the CPU")
    parser.add_argument("--readers", type=int, default=3)
    parser.add_argument("--limit", type=float, default=300, help="seconds that all of it may take [default: 300]")
    parser.add_argument("--role", choices=["make", "read"], help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--socket", help=argparse.SUPPRESS)
    options = parser.parse_args()
    # The timer interrupts every wait.
    signal.setitimer(signal.ITIMER_REAL, options.limit)
    os.environ["TRANSFORMERS_OFFLINE"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if options.role:
        return make(options) if options.role == "make" else read(options)

    def over(*_: object) -> None:
        sys.exit(f"real_model: not done in {options.limit:g} s")

    signal.signal(signal.SIGALRM, over)
    children: list[Child] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            run(options, children, Path(folder))
        finally:
            for child in children:
                child.kill()
    step("all as it should be")


if __name__ == "__main__":
    main()
