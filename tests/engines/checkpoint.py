"""Writes the checkpoint of a Llama with random weights and a tokenizer: checkpoint.py FOLDER SIZE KIND [SEED].

SIZE is `tiny`, `small` (938 MiB) or `large` (8.4 GB). KIND is `plain` (bfloat16), `block-fp8` (one scale for each 128 x 128 block, in
vLLM's own format), or `compressed-fp8` (compressed-tensors: vLLM does not declare that this format takes processed weights).
"""
import json
import pathlib
import sys

import torch
from safetensors.torch import save_file

VOCABULARY = 32000
SIZES = {
    "tiny": dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_hidden_layers=2),
    "small": dict(hidden_size=2048, intermediate_size=5632, num_attention_heads=16, num_key_value_heads=4, head_dim=128,
                  num_hidden_layers=8),
    "large": dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
                  num_hidden_layers=18),
}
COMPRESSED = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True},
    }},
}
QUANTISATION = {
    "plain": None,
    "block-fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "compressed-fp8": COMPRESSED,
}
FP8_LARGEST = 448
BLOCK = 128


def config(size, kind):
    values = dict(architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=VOCABULARY, max_position_embeddings=2048,
                  tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, hidden_act="silu", rms_norm_eps=1e-6, attention_bias=False,
                  mlp_bias=False, initializer_range=0.02, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, dtype="bfloat16")
    if QUANTISATION[kind]:
        values["quantization_config"] = QUANTISATION[kind]
    return values | SIZES[size]


def shapes(config):
    """Returns the name and shape of each tensor: a list of dicts, one per layer."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layers = [{"model.embed_tokens.weight": (VOCABULARY, hidden), "model.norm.weight": (hidden,), "lm_head.weight": (VOCABULARY, hidden)}]
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}."
        layers.append({
            at + "self_attn.q_proj.weight": (queries, hidden), at + "self_attn.k_proj.weight": (keys, hidden),
            at + "self_attn.v_proj.weight": (keys, hidden), at + "self_attn.o_proj.weight": (hidden, queries),
            at + "mlp.gate_proj.weight": (inner, hidden), at + "mlp.up_proj.weight": (inner, hidden),
            at + "mlp.down_proj.weight": (hidden, inner), at + "input_layernorm.weight": (hidden,),
            at + "post_attention_layernorm.weight": (hidden,),
        })
    return layers


def tensors(name, shape, kind, device):
    """Returns a tensor of the checkpoint by name, with its scale if it is quantised."""
    if len(shape) == 1:
        return {name: torch.ones(shape, dtype=torch.bfloat16)}
    values = torch.randn(shape, device=device, dtype=torch.float32) * 0.02
    if kind == "plain" or "_proj" not in name:
        return {name: values.to(torch.bfloat16).cpu()}
    if kind == "block-fp8":
        blocks = values.view(shape[0] // BLOCK, BLOCK, shape[1] // BLOCK, BLOCK)
        scale = blocks.abs().amax((1, 3)) / FP8_LARGEST
        quantised = (blocks / scale[:, None, :, None]).view(shape)
        scale_name = name + "_scale_inv"
    else:
        scale = (values.abs().max() / FP8_LARGEST).reshape(1)
        quantised = values / scale
        scale_name = name + "_scale"
    return {name: quantised.to(torch.float8_e4m3fn).cpu(), scale_name: scale.cpu()}


def write_tokenizer(folder):
    """Returns a tokenizer with the words t0 to t31999, so that a text is a list of tokens."""
    words = {f"t{index}": index for index in range(VOCABULARY)}
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "post_processor": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
    }))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "t1", "eos_token": "t2", "unk_token": "t0", "model_max_length": 2048,
    }))


def write(folder, size, kind, seed=0):
    """Writes the checkpoint, one file per layer as in a large model. Returns the size of the weight files in bytes."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    values = config(size, kind)
    layers = shapes(values)
    files = {}
    for index, layer in enumerate(layers):
        file = f"model-{index + 1:05}-of-{len(layers):05}.safetensors"
        content = {}
        for name, shape in layer.items():
            content |= tensors(name, shape, kind, device)
        save_file(content, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(content, file)
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": files}))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    write_tokenizer(folder)
    # Last: a folder with a config is complete.
    (folder / "config.json").write_text(json.dumps(values))
    return total


if __name__ == "__main__":
    print(write(*sys.argv[1:4], *map(int, sys.argv[4:5])), "bytes of weights")
