"""Loads a transformers model from the broker: its parameters are the broker's memory.

    python load_model.py MODEL_FOLDER NAME cuda|host

The folder needs only the model's config. First another process puts the model: `broker.put(NAME, model)`.
"""

import sys, torch, vmmfd
from transformers import AutoConfig, AutoModelForCausalLM

folder, name, backend = sys.argv[1:4]
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
vmmfd.connect(backend=backend).load(name, into=model)
model.tie_weights()
tokens = torch.tensor([[1, 2, 3]], device=model.device)
print(model.generate(tokens, max_new_tokens=8, do_sample=False)[0].tolist())
