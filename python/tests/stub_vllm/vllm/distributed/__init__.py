"""Rank and size of each kind of parallelism, which tests set."""

from types import SimpleNamespace

tensor, pipeline, data, prefill, world = ([0, 1] for _ in range(5))
# Called when a rank waits for all others.
barriers: list = []


def get_tensor_model_parallel_rank() -> int:
    return tensor[0]


def get_tensor_model_parallel_world_size() -> int:
    return tensor[1]


def get_pp_group() -> "GroupCoordinator":
    return SimpleNamespace(rank_in_group=pipeline[0], world_size=pipeline[1])


def get_dp_group() -> "GroupCoordinator":
    return SimpleNamespace(rank_in_group=data[0], world_size=data[1])


def get_pcp_group() -> "GroupCoordinator":
    return SimpleNamespace(rank_in_group=prefill[0], world_size=prefill[1])


def get_world_group() -> "GroupCoordinator":
    return SimpleNamespace(
        rank_in_group=world[0], world_size=world[1], barrier=lambda: barriers.append("barrier"), cpu_group=None
    )
