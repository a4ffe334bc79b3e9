"""PyTorch: modules and tensors in memory that other processes map, without copies.

`pool` makes PyTorch allocate in memory that can be shared; `broker.put(name, module)` then hands that memory over as it is.
`broker.state_dict(name)` and `broker.load(name, into=module)` give tensors in that memory to other processes.

This module imports torch when it is first used, and not before.
"""

from __future__ import annotations

from .._lease import Loaded
from ._hooks import GuardHandle, guard
from ._pool import Pool, pool

__all__ = ["GuardHandle", "Loaded", "Pool", "guard", "pool"]
