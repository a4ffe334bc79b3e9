"""Shares an array of NumPy with other processes, through a broker that listens at this path: `vmmfd serve --socket ...`."""

import numpy as np, vmmfd
broker = vmmfd.connect("/run/vmmfd/broker.sock", backend="host")
broker.put("demo", {"x": np.arange(12, dtype="f4").reshape(3, 4)}, metadata={"step": 1})
with broker.get("demo", wait=5) as lease:
    x = np.from_dlpack(lease["x"])                    # the shared memory itself, read-only
    assert x.shape == (3, 4) and not x.flags.writeable and lease.metadata["step"] == 1
