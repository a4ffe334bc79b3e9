"""Shares a PyTorch module with other processes: all of them use one copy of its weights in GPU memory.

    vmmfd serve --socket /tmp/broker.sock &
    python share_torch.py --socket /tmp/broker.sock            # This process makes the module, a child loads it.

Without a GPU it runs on ordinary memory: `--backend host`.
"""

import argparse
import subprocess
import sys

import torch

import vmmfd


def make(device: str | None) -> torch.nn.Module:
    with torch.device(device) if device else torch.device("cpu"):
        model = torch.nn.Sequential(
            torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024), torch.nn.BatchNorm1d(1024)
        )
    return model.eval()


def put(broker: vmmfd.Broker, on_gpu: bool) -> float:
    torch.manual_seed(7)
    if on_gpu:
        with vmmfd.torch.pool():  # PyTorch allocates shareable memory here.
            model = make("cuda")
    else:
        model = make(None)
    published = broker.put("model", model, replace=True)  # On a GPU: no copy, and no second peak in memory.
    print(f"put version {published.version}: {broker.bytes_of('model') >> 20} MiB of memory", flush=True)
    return check(model)


def get(broker: vmmfd.Broker) -> float:
    model = make("meta")  # Shapes and types without memory.
    loaded = broker.load("model", into=model, wait=30)
    print(f"got version {loaded.version}; private copies: {', '.join(loaded.private)}", flush=True)
    return check(model)


def check(model: torch.nn.Module) -> float:
    device = next(model.parameters()).device
    with torch.no_grad():
        return float(model(torch.linspace(-1, 1, 2048, device=device).view(2, 1024)).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket", help="where the broker listens")
    parser.add_argument("--backend", default="auto", choices=["auto", "cuda", "host"])
    parser.add_argument("--get", action="store_true", help="only get the module that is there")
    parser.add_argument("--timeout", type=float, default=10, help="how many seconds to wait for the broker [default: 10]")
    options = parser.parse_args()
    on_gpu = options.backend != "host" and torch.cuda.is_available()
    with vmmfd.connect(options.socket, backend=options.backend, wait=options.timeout) as broker:
        if options.get:
            print(f"result {get(broker):.4f}")
            return
        mine = put(broker, on_gpu)
        print(f"result {mine:.4f}")
        child = subprocess.run([sys.executable, *sys.argv, "--get"], check=True, capture_output=True, text=True, timeout=120)
        print(child.stdout, end="")
        theirs = float(child.stdout.split()[-1])
        if abs(theirs - mine) > 1e-2:
            sys.exit(f"the other process computed {theirs}, and this one {mine}")


if __name__ == "__main__":
    try:
        main()
    except vmmfd.Error as error:
        sys.exit(f"share_torch: {error}" + (f"\n{error.hint}" if error.hint else ""))
