"""A trainer in a process of its own, driven by lines on stdin: trainer.py REPORT BROKER NAME.

    put low | put high    puts the next version of the object: its head can only choose tokens of the lower, or of the upper half
    delete                deletes the object
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
        with engine.next_version(broker, name) as version:
            tensor = version.tensors["lm_head.weight"]
            if head is None:
                head = tensor.clone()
            tensor.copy_(head)
            half = len(tensor) // 2
            (tensor[half:] if arguments[0] == "low" else tensor[:half]).zero_()
            torch.cuda.synchronize()
            copied = time.monotonic()
            number = version.put().version
            report(event=command, version=number, copy=copied - begin, put=time.monotonic() - copied)


if __name__ == "__main__":
    main()
