"""A trainer in a process of its own, driven by lines on stdin: trainer.py REPORT BROKER NAME.

    put low | put high    puts the next version of all ranks' objects: their head can only choose tokens of the lower, or of the upper half
    part low | part high  the same for the last rank only
    rest                  for the remaining ranks
    delete                deletes the objects
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
    heads, versions = {}, None

    def report(**values):
        with open(path, "a") as file:
            file.write(json.dumps({"at": time.monotonic()} | values) + "\n")

    report(event="imported")
    for line in sys.stdin:
        command, *arguments = line.split()
        begin = time.monotonic()
        if command == "delete":
            for each in broker.list(f"{name}/"):
                broker.delete(each.name)
            report(event=command)
            continue
        if command == "ipc":
            kept = ipc(*arguments)
            report(event=command, tensors=len(kept))
            continue
        if command != "rest":
            versions = engine.next_versions(broker, name)
            for place, version in enumerate(reversed(versions.objects.values())):
                change(version.tensors["lm_head.weight"], heads, place, len(versions.objects), arguments[0])
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
        copied = time.monotonic()
        if command == "part":
            number = next(iter(versions.objects.values())).put().version
        else:
            number = versions.put()
        report(event=command, version=number, copy=copied - begin, put=time.monotonic() - copied)


def change(tensor, heads, rank, size, half):
    """Zeroes the rows of this rank's part of the head that lie in the other half of the vocabulary."""
    rows = len(tensor)
    heads.setdefault(rank, tensor.clone())
    tensor.copy_(heads[rank])
    middle = min(max(size * rows // 2 - rank * rows, 0), rows)
    (tensor[middle:] if half == "low" else tensor[:middle]).zero_()


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
