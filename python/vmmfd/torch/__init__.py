"""PyTorch modules and tensors in memory that other processes map, without copies.

`pool` makes PyTorch allocate memory that can be shared; `broker.put(name, module)` then shares that memory without a copy.
`broker.state_dict(name)` and `broker.load(name, into=module)` map it in other processes.

This module imports torch on first use.
"""

from __future__ import annotations

from .._lease import Loaded
from ._hooks import GuardHandle, guard
from ._pool import Pool, pool

__all__ = ["GuardHandle", "Loaded", "Pool", "guard", "pool"]
