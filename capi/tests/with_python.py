"""A C program and Python at two ends of a broker and of a handoff: with_python.py PROGRAMS BROKER"""

import os
import subprocess
import sys
import threading

import numpy as np
import vmmfd

programs, socket = sys.argv[1:]
folder = os.path.dirname(socket)

# C publishes, Python reads.
path = os.path.join(folder, "python-frames")
publisher = subprocess.Popen([f"{programs}/publisher", socket, path, "8", "host"])
with vmmfd.Broker(socket) as broker:
    lease = broker.get("camera", wait=20)
    assert lease.metadata == {"encoding": "mono8"}, lease.metadata
    assert lease["frame3"].shape == (480, 640) and np.asarray(lease["frame3"]).dtype == np.uint8
    subscriber = subprocess.run([f"{programs}/subscriber", socket, path], timeout=60, check=True, capture_output=True)
    assert subscriber.stdout == b"received 8 frames\n", subscriber.stdout
    assert publisher.wait(60) == 0
    # Frame 7 was the last in this buffer.
    assert (np.asarray(lease["frame3"]) == 7).all()
    del lease

    # Python publishes, C reads.
    frames = {f"frame{i}": np.zeros((480, 640), np.uint8) for i in range(4)}
    broker.put("camera", frames, metadata={"encoding": "mono8"})
    # It finds no publisher at this path: the lease is what counts.
    watch = subprocess.Popen([f"{programs}/subscriber", socket, os.path.join(folder, "nobody")], stderr=subprocess.DEVNULL)
    with broker.watch("camera") as events:
        while not broker.who("camera").leases:
            assert events.next(wait=20) is not None
    watch.kill()
    watch.wait()

# Python serves, C takes.
path = os.path.join(folder, "python-handoff")
array = vmmfd.asarray(np.arange(1024, dtype=np.float32) * np.float32(0.5), backend="host")
serving = threading.Thread(target=vmmfd.serve, args=(path, array))
serving.start()
taken = subprocess.run([f"{programs}/handoff", "take", path, "host"], timeout=60, check=True, capture_output=True)
serving.join()
assert taken.stdout == b"took 1024 float32, the last is 511.5\n", taken.stdout

# C serves, Python takes.
serving = subprocess.Popen([f"{programs}/handoff", "serve", path, "host"])
values = np.asarray(vmmfd.take(path=path, backend="host"))
assert serving.wait(60) == 0
assert values.dtype == np.float32 and values[1023] == 511.5
print("test-capi: C and Python passed")
