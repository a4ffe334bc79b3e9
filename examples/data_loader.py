"""Loads batches once for several trainers: the workers of a PyTorch DataLoader publish them, and each trainer reads them without a copy.

    python data_loader.py                       # A loader with two workers, and two trainers.

Each worker has a stream of its own. The DataLoader itself receives only the numbers of the batches.
"""

import argparse
import multiprocessing
import select
import sys
import tempfile
from collections.abc import Iterator

import torch

import vmmfd

BATCH, BATCHES, WORKERS, TRAINERS, LIMIT = 32, 40, 2, 2, 60.0


def pixel(number: int, at: int) -> int:
    return (7 * number + at) % 251


class Published(torch.utils.data.IterableDataset):
    """The batches of one worker."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        # Each trainer holds two batches at most; one is being filled, and one is spare. `every`: a trainer skips no batch.
        count = 2 * TRAINERS + 2
        with vmmfd.publish(f"{self.folder}/{worker.id}", size=BATCH * 4096, count=count, every=LIMIT, backend="host") as publisher:
            publisher.set_format({"pixels": ("uint8", (BATCH, 3, 32, 32)), "labels": ("int64", (BATCH,))})
            joined = 0
            while joined < TRAINERS:
                select.select([publisher], [], [], LIMIT)
                joined += sum(event.kind == "joined" for event in publisher.events())
            for number in range(worker.id, BATCHES, worker.num_workers):
                with publisher.loan(wait=LIMIT) as loan:
                    pixels = torch.from_dlpack(loan["pixels"])
                    for at in range(BATCH):
                        pixels[at] = pixel(number, at)  # Your decoder and augmentation.
                    torch.from_dlpack(loan["labels"]).copy_(torch.arange(BATCH) + number)
                    loan.publish(number.to_bytes(4, "little"))
                yield number


def train(folder: str) -> None:
    seen = []
    streams = [vmmfd.subscribe(f"{folder}/{worker}", policy="every", backend="host", wait=LIMIT) for worker in range(WORKERS)]
    while streams:
        stream = streams.pop(0)  # The workers take turns.
        try:
            batch = stream.receive(LIMIT)
        except vmmfd.Ended:
            continue
        streams.append(stream)
        pixels, labels = (torch.from_dlpack(batch[name]) for name in ("pixels", "labels"))
        number = int.from_bytes(batch.user, "little")
        assert [int(image.unique()) for image in pixels] == [pixel(number, at) for at in range(BATCH)]
        assert labels.tolist() == [number + at for at in range(BATCH)]
        seen.append(number)  # Your training step.
    assert sorted(seen) == list(range(BATCHES)), seen


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        trainers = [spawn.Process(target=train, args=(folder,)) for _ in range(TRAINERS)]
        for trainer in trainers:
            trainer.start()
        loader = torch.utils.data.DataLoader(
            Published(folder), batch_size=None, num_workers=WORKERS, multiprocessing_context=spawn, timeout=LIMIT
        )
        published = len(list(loader))
        for trainer in trainers:
            trainer.join()
    if any(trainer.exitcode for trainer in trainers):
        sys.exit("data_loader: a trainer failed")
    print(f"published {published} batches to {TRAINERS} trainers, all as they should be")


if __name__ == "__main__":
    main()
