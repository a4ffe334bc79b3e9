"""Compares each tensor of a model from a broker with a load from disk: parity.py BROKER [FOLDER]. Exits with 1 if one differs.

FOLDER has a model in Hugging Face's format; without it, a Llama of one layer is made. A process loads it from disk with transformers and puts
it, and this one builds the model without memory and loads it from the broker. On host memory; needs PyTorch, transformers and blake3.
Prints the table of docs/for-maintainers.md.
"""
import json
import subprocess
import sys
import tempfile

import torch
from blake3 import blake3
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import vmmfd

NAME = "parity"


def rows(model):
    """Returns kind, name, shape, type, stride and BLAKE3 of each parameter and buffer."""
    for kind, tensors in (("parameter", model.named_parameters(remove_duplicate=False)), ("buffer", model.named_buffers(remove_duplicate=False))):
        for name, tensor in tensors:
            data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            yield [kind, name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."), list(tensor.stride()), blake3(data).hexdigest()]


def make(folder):
    """Writes a small model. Its bytes depend on no random generator."""
    config = LlamaConfig(hidden_size=64, intermediate_size=160, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
                         vocab_size=320, tie_word_embeddings=False, dtype="bfloat16")
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            values = torch.arange(parameter.numel()) * 2654435761 + number
            parameter.copy_((values % 65536 / 32768 - 1).view(parameter.shape))
    model.save_pretrained(folder)


def put(socket, folder):
    """The first process: the rows of a load from disk, which it puts."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    vmmfd.connect(socket, backend="host").put(NAME, model, replace=True)
    print(json.dumps(list(rows(model))))


def main(socket, folder=None):
    with tempfile.TemporaryDirectory() as made:
        if folder is None:
            make(made)
            folder = made
        disk = subprocess.run([sys.executable, __file__, "put", socket, folder], stdout=subprocess.PIPE, check=True, timeout=300).stdout
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
    vmmfd.connect(socket, backend="host").load(NAME, into=model)
    model.tie_weights()
    expected, found = json.loads(disk), list(rows(model))
    print("| Tensor | Shape | Type | Stride | BLAKE3 | From the broker |\n|---|---|---|---|---|---|")
    for before, after in zip(expected, found, strict=True):
        kind, name, shape, dtype, stride, digest = before
        print(f"| {kind} `{name}` | {shape} | {dtype} | {stride} | `{digest[:16]}` | {'equal' if after == before else f'differs: {after}'} |")
    return expected != found


if __name__ == "__main__":
    sys.exit(put(*sys.argv[2:]) if sys.argv[1] == "put" else main(*sys.argv[1:]))
