"""A trainer in a process of its own, driven by lines on stdin: trainer.py REPORT BROKER NAME.

    put low | put high    puts the next version of the object: its head can only choose tokens of the lower, or of the upper half
    delete                deletes the object
    ipc FOLDER FILE       loads a checkpoint, and writes the update for vLLM's own engine `ipc`, which copies it
"""
import json
import sys
import time

import torch

import vmmfd
import vmmfd.engines.vllm as engine


def main():
    path, socket, name = sys.argv[1:]
    broker = vmmfd.connect(socket)
    name = f"{name}/{vmmfd.device_uuid(0)}"
    head = None

    def report(**values):
        with open(path, "a") as file:
            file.write(json.dumps({"at": time.monotonic()} | values) + "\n")

    report(event="imported")
    for line in sys.stdin:
        command, *arguments = line.split()
        begin = time.monotonic()
        if command == "delete":
            broker.delete(name)
            report(event=command)
            continue
        if command == "ipc":
            kept = ipc(*arguments)
            report(event=command, tensors=len(kept))
            continue
        with engine.next_version(broker, name) as version:
            tensor = version.tensors["lm_head.weight"]
            if head is None:
                head = tensor.clone()
            tensor.copy_(head)
            half = len(tensor) // 2
            (tensor[half:] if arguments[0] == "low" else tensor[:half]).zero_()
            torch.cuda.synchronize()
            copied = time.monotonic()
            # A tensor keeps its memory.
            del tensor
            number = version.put().version
            report(event=command, version=number, copy=copied - begin, put=time.monotonic() - copied)


def ipc(folder, file):
    """Returns the tensors, which must outlive the update."""
    import base64
    import pathlib
    import pickle

    from safetensors.torch import load_file
    from torch.multiprocessing.reductions import reduce_tensor

    kept = {name: tensor for path in sorted(pathlib.Path(folder).glob("*.safetensors")) for name, tensor in load_file(path, device="cuda").items()}
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    handles = [{uuid: reduce_tensor(tensor)[1]} for tensor in kept.values()]
    torch.cuda.synchronize()
    pathlib.Path(file).write_text(json.dumps({
        "names": list(kept), "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in kept.values()],
        "shapes": [list(tensor.shape) for tensor in kept.values()],
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
    }))
    return kept


if __name__ == "__main__":
    main()
