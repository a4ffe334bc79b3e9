"""PyTorch: modules and tensors in memory that other processes map, without copies.

`pool` makes PyTorch allocate in memory that can be shared; `broker.put(name, module)` then hands that memory over as it is.
`broker.state_dict(name)` and `broker.load(name, into=module)` give tensors in that memory to other processes.

This module imports torch when it is first used, and not before.
"""

from __future__ import annotations

from ._get import _state_dict as _state_dict
from ._hooks import GuardHandle, guard
from ._module import Loaded
from ._module import _load as _load
from ._pool import Pool, pool
from ._put import _plan as _plan

__all__ = ["GuardHandle", "Loaded", "Pool", "guard", "pool"]
