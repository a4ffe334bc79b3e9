"""Shares a NumPy array with other processes, through a broker: `vmmfd serve`.

The lines from the second import on are all that a program needs. They put a new name: a second run fails, because the name exists.
"""

import sys, vmmfd
from typing import Any


def say(kind: Any, error: Any, traceback: Any) -> None:
    """Prints the error and the next step in one sentence, without a traceback: no broker listens, or `demo` exists already."""
    if issubclass(kind, vmmfd.Error):
        print(f"share_numpy: {error}: {error.hint}" if error.hint else f"share_numpy: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = say

import numpy as np, vmmfd
broker = vmmfd.connect(backend="host")
broker.put("demo", {"x": np.arange(12, dtype="f4").reshape(3, 4)}, metadata={"step": 1})
with broker.get("demo", wait=5) as lease:
    x = np.from_dlpack(lease["x"])                    # the shared memory itself, read-only
    assert x.shape == (3, 4) and not x.flags.writeable and lease.metadata["step"] == 1
