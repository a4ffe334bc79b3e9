"""The groups of ranks, which tests set."""

_groups: dict = {}
