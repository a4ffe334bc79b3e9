"""A C program and Python at two ends of a handoff: with_python.py PROGRAMS FOLDER"""

import os
import subprocess
import sys
import threading

import numpy as np
import vmmfd

programs, folder = sys.argv[1:]

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
