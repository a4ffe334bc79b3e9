"""Shares an array of NumPy with other processes, through a broker that listens at this path: `vmmfd serve --socket ...`.

The lines from the second import on are all that a program needs. They put a new name: a second run finds that it exists.
"""

import sys, vmmfd


def say(kind, error, traceback):
    """Says in one sentence, without a traceback, what is wrong and what to do: no broker listens, or there is a `demo` already."""
    if issubclass(kind, vmmfd.Error):
        print(f"share_numpy: {error}: {error.hint}" if error.hint else f"share_numpy: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = say
vmmfd.connect("/run/vmmfd/broker.sock", timeout=1).close()  # To say so soon if there is none: by default it is waited for, 30 s.

import numpy as np, vmmfd
broker = vmmfd.connect("/run/vmmfd/broker.sock", backend="host")
broker.put("demo", {"x": np.arange(12, dtype="f4").reshape(3, 4)}, metadata={"step": 1})
with broker.get("demo", wait=5) as lease:
    x = np.from_dlpack(lease["x"])                    # the shared memory itself, read-only
    assert x.shape == (3, 4) and not x.flags.writeable and lease.metadata["step"] == 1
