"""Rank and size of each kind of parallelism, which tests set."""

from types import SimpleNamespace

tensor, pipeline, data, prefill = ([0, 1] for _ in range(4))


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
