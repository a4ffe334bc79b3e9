"""A vLLM plug-in that the tests install: it records the start and end of the worker's steps.

Each event is a line of JSON in the file that ENGINES_TRACE names: the event, the process, its start on the monotonic clock and its seconds.

- ENGINES_PROFILE=1 profiles Worker.load_model. The profile's most expensive functions are an event.
- ENGINES_PAUSE="SECONDS FILE" sleeps after the weights were read from disk, in the first process that creates FILE.
- ENGINES_EMPTY_CACHE=N empties PyTorch's cache by both entry points in every Nth step of the model.
"""
import cProfile
import functools
import hashlib
import importlib.abc
import importlib.util
import json
import os
import pstats
import sys
import time

WORKER = "vllm.v1.worker.gpu_worker"
STEPS = ("init_device", "load_model", "determine_available_memory", "initialize_from_config", "compile_or_warm_up_model")
_registered = False


def emit(event, begin, **more):
    line = json.dumps({"event": event, "pid": os.getpid(), "at": begin, "seconds": time.monotonic() - begin} | more) + "\n"
    with open(os.environ["ENGINES_TRACE"], "a") as file:
        file.write(line)


def register():
    """Traces the worker. vLLM's front end calls this too, and must not import the worker for it, which would change the times."""
    global _registered
    if _registered or "ENGINES_TRACE" not in os.environ:
        return
    _registered = True
    if WORKER in sys.modules:
        trace(sys.modules[WORKER])
    else:
        sys.meta_path.insert(0, AfterImport())


class AfterImport(importlib.abc.MetaPathFinder):
    """Traces the worker's module once it is imported, also in a fork."""

    def find_spec(self, name, path, target=None):
        if name != WORKER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            trace(module)

        spec.loader.exec_module = exec_module
        return spec


def trace(gpu_worker):
    from vllm.model_executor.model_loader import default_loader

    for step in STEPS:
        wrap(gpu_worker.Worker, step, prepare=trace_loader if step == "load_model" else None)
    wrap(default_loader.DefaultModelLoader, "load_weights", after=pause)
    trace_live()
    gpu_worker.Worker.driver_floor = driver_floor
    for step in ("finish_weight_update", "wake_up"):
        wrap(gpu_worker.Worker, step, record=addresses)
    every = int(os.environ.get("ENGINES_EMPTY_CACHE", "0"))
    if every:
        empty_caches(gpu_worker.Worker, every)


def addresses(worker):
    """Returns a digest of the addresses of the model's parameters."""
    model = worker.model_runner.model
    placed = sorted((name, parameter.data_ptr()) for name, parameter in model.named_parameters())
    return {"parameters": len(placed), "addresses": hashlib.sha256(repr(placed).encode()).hexdigest()[:16]}


def trace_live():
    """Traces the parts of a switch."""
    import vmmfd
    from vmmfd.engines import _vllm_live

    for step in ("prepare", "switch", "_exchange", "refill"):
        wrap(_vllm_live.Live, step)
    wrap(vmmfd.Prepared, "close")


def driver_floor(worker, times=20):
    """Returns the sizes of the pieces of the weights in this process, and the seconds of the driver's calls alone that replace pieces
    of these sizes: synchronize, unmap, map and set access."""
    import ctypes
    import statistics

    from vmmfd.engines import _vllm_live

    live = _vllm_live.of(worker.model_runner.model)
    sizes = [size for part in live._lease._native.layout() for size in part[3]]
    total = sum(sizes)
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(function, *arguments):
        code = getattr(cuda, function)(*arguments)
        if code:
            raise RuntimeError(f"{function} failed with {code}")

    integer, address = ctypes.c_uint64, ctypes.c_uint64()
    # CUmemAllocationProp: pinned, exported as a descriptor, on this device; CUmemAccessDesc: this device, for writes.
    wanted = (ctypes.c_int * 8)(1, 1, 1, worker.device.index)
    access = (ctypes.c_int * 3)(1, worker.device.index, 3)
    versions = [[integer() for _ in sizes] for _ in range(2)]
    for handle, size in zip(sum(versions, []), sizes * 2):
        call("cuMemCreate", ctypes.byref(handle), integer(size), wanted, integer(0))
    call("cuMemAddressReserve", ctypes.byref(address), integer(total), integer(0), integer(0), integer(0))

    def put(handles):
        at = address.value
        for handle, size in zip(handles, sizes):
            call("cuMemMap", integer(at), integer(size), integer(0), handle, integer(0))
            at += size
        call("cuMemSetAccess", address, integer(total), access, integer(1))

    put(versions[0])
    took = []
    for turn in range(times):
        # Used pages, and a driver that was idle, take longer.
        call("cuMemsetD8_v2", address, ctypes.c_uint8(turn), integer(total))
        call("cuCtxSynchronize")
        time.sleep(0.1)
        begin = time.perf_counter()
        call("cuCtxSynchronize")
        call("cuMemUnmap", address, integer(total))
        put(versions[(turn + 1) % 2])
        took.append(time.perf_counter() - begin)
    call("cuMemUnmap", address, integer(total))
    call("cuMemAddressFree", address, integer(total))
    for handle in sum(versions, []):
        call("cuMemRelease", handle)
    return {"sizes": sizes, "median": statistics.median(took), "shortest": min(took)}


def wrap(owner, name, prepare=None, after=None, record=None):
    original = getattr(owner, name)
    if getattr(original, "traced", False):
        return

    @functools.wraps(original)
    def traced(self, *arguments, **named):
        if prepare:
            prepare(self)
        profile = cProfile.Profile() if name == "load_model" and prepare and os.environ.get("ENGINES_PROFILE") else None
        begin = time.monotonic()
        emit(f"{owner.__name__}.{name} begins", begin)
        try:
            return profile.runcall(original, self, *arguments, **named) if profile else original(self, *arguments, **named)
        finally:
            emit(f"{owner.__name__}.{name}", begin, rank=getattr(self, "rank", None), **({"top": most_expensive(profile)} if profile else {}),
                 **(record(self) if record else {}))
            if after:
                after()

    traced.traced = True
    setattr(owner, name, traced)


def trace_loader(worker):
    """Traces load_model of the loader class that this engine uses."""
    from vllm.model_executor.model_loader import get_model_loader

    wrap(type(get_model_loader(worker.vllm_config.load_config)), "load_model")


def most_expensive(profile, count=25):
    """Returns functions by cumulative seconds: location, cumulative seconds, own seconds, calls."""
    rows = []
    for (file, line, function), (_, calls, own, cumulative, _) in pstats.Stats(profile).stats.items():
        place = "/".join(file.split("/")[-3:])
        rows.append([f"{place}:{line} {function}", round(cumulative, 4), round(own, 4), calls])
    return sorted(rows, key=lambda row: -row[1])[:count]


def pause():
    seconds, _, once = os.environ.get("ENGINES_PAUSE", "").partition(" ")
    if not seconds:
        return
    try:
        os.close(os.open(once, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    emit("pause begins", time.monotonic())
    time.sleep(float(seconds))


def empty_caches(worker, every):
    import torch

    original = worker.execute_model
    calls = 0

    @functools.wraps(original)
    def execute_model(self, *arguments, **named):
        nonlocal calls
        calls += 1
        if calls % every == 0:
            begin = time.monotonic()
            torch.cuda.empty_cache()
            torch.accelerator.empty_cache()
            emit("caches emptied", begin, calls=calls)
        return original(self, *arguments, **named)

    worker.execute_model = execute_model
