"""Serves a model whose weights are in a broker, and switches to each new version in place while it runs.

    vmmfd serve --socket /tmp/broker.sock &
    python weights_serve.py --socket /tmp/broker.sock --make 1      # Puts a version, and exits.
    python weights_serve.py --socket /tmp/broker.sock &             # Gets it, and serves until it is stopped.
    python weights_serve.py --socket /tmp/broker.sock --make 2      # The running server switches to it without loading anything.

On a GPU a request is the replay of a CUDA graph, which is captured once: other versions are mapped at the same addresses. Without a GPU it
runs on ordinary memory: `--backend host`.
"""

import argparse
import sys

import torch

import vmmfd

NAME = "weights"


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(8))
        self.register_buffer("scale", torch.ones(512), persistent=False)  # In no state_dict; a private copy in readers.

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return x


def make(broker: vmmfd.Broker, seed: int) -> None:
    """Puts a version, which outlives this process."""
    torch.manual_seed(seed)
    model = Model()
    with torch.no_grad():
        model.scale.fill_(seed)
    # As copies: their layout depends only on order and sizes, so that the next version fits.
    published = broker.put(NAME, model, copy=True, replace=True, metadata={"seed": seed})
    print(f"put version {published.version}", flush=True)


class Service:
    """A model that is mapped once; on a GPU its graph is captured once."""

    def __init__(self, broker: vmmfd.Broker) -> None:
        with torch.device("meta"):
            self.model = Model().eval()
        self.loaded = broker.load(NAME, into=self.model, wait=30)
        device = self.model.scale.device
        self.x = torch.linspace(-1, 1, 512, device=device).view(1, 512)
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            with torch.no_grad():
                self.model(self.x)  # Once before the capture, to load libraries.
                torch.cuda.synchronize()
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph):
                    self.y = self.model(self.x)

    def answer(self) -> float:
        with torch.no_grad():
            if self.graph is None:
                self.y = self.model(self.x)
            else:
                self.graph.replay()
            return float(self.y.sum())

    def take_newest(self) -> None:
        """Imports the newest version while the old one serves, then switches between two requests."""
        with self.loaded.prepare() as prepared:
            self.loaded.switch(prepared).close()


def serve(broker: vmmfd.Broker, until: int) -> None:
    with broker.watch(NAME) as events:
        service = Service(broker)
        print(f"version {service.loaded.version} answers {service.answer():.4f}", flush=True)
        while service.loaded.version < until:
            event = events.next(wait=1)
            stat = broker.stat(NAME).summary
            if stat.version > service.loaded.version:
                service.take_newest()
                print(f"version {service.loaded.version} answers {service.answer():.4f}", flush=True)
            elif event is not None and event.kind == "deleted":
                break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket", help="where the broker listens")
    parser.add_argument("--backend", default="auto", choices=["auto", "cuda", "host"])
    parser.add_argument("--make", type=int, metavar="SEED", help="put a version made from this number, and end")
    parser.add_argument("--until", type=int, default=1 << 62, metavar="VERSION", help="serve until this version answered")
    parser.add_argument("--timeout", type=float, default=10, help="how many seconds to wait for the broker [default: 10]")
    options = parser.parse_args()
    with vmmfd.connect(options.socket, backend=options.backend, wait=options.timeout) as broker:
        if options.make is not None:
            make(broker, options.make)
        else:
            serve(broker, options.until)


if __name__ == "__main__":
    try:
        main()
    except vmmfd.Error as error:
        sys.exit(f"weights_serve: {error}" + (f"\n{error.hint}" if error.hint else ""))
