"""Executes code with the `vmmfd` package of the Python that runs this file: one JSON string a line, answered with the value of `result`."""

import json
import sys
import threading
import time
import traceback

import numpy as np
import vmmfd

scope = {"np": np, "vmmfd": vmmfd, "threading": threading, "time": time}
for line in sys.stdin:
    scope["result"] = None
    try:
        exec(json.loads(line), scope)
        answer = {"result": scope["result"]}
    except Exception:
        answer = {"error": traceback.format_exc()}
    print(json.dumps(answer), flush=True)
