"""The rows with the real engine, in groups. `run` calls them on a GPU machine; each group has its own broker and deadline."""
import contextlib
import os
import re
import signal
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from engine import PROMPTS
from live_rows import live, switch
from parallel_rows import parallel, parallel_suspend
from turns_rows import turns, turns_eight
from lab import ATTACHED, PUBLISHED, Broker, Failed, Process, Server, free_port, healthy, xids

MIB = 1 << 20
LOAD = "VmmfdLoader.load_model"
WORKER_LOAD = "Worker.load_model"
FIGURE = re.compile(r"(find|meta build|bind|process) ([0-9.]+) s")
STEPS = 2000
REQUEST_TOKENS = 64
# vLLM's compilation modes: None is its default.
MODES = {None: "default-mode", 0: "mode-0"}


def parts(engine):
    """Returns the seconds in the loader's line."""
    return {name.replace(" ", "_"): float(seconds) for name, seconds in FIGURE.findall(engine.line(ATTACHED))}


def equal(row, engine, tokens):
    """Requires the tokens of another engine; for 20 concurrent prompts only reports them: the batches depend on arrival times."""
    mine = engine.tokens()
    row["together_equal"] = mine["together"] == tokens["together"]
    different = [index for index, (a, b) in enumerate(zip(mine["tokens"], tokens["tokens"])) if a != b]
    row["prompts"] = len(mine["tokens"])
    row.require(not different, f"other tokens than disk load for prompts {different}")
    return mine


def tokens(lab):
    """Equal tokens: in both compile modes, by HTTP, after SIGKILL, with FP8, and over 2,000 steps with emptied caches."""
    lab.note("checkpoints")
    small, fp8, unsafe = lab.checkpoints(("small", "plain"), ("small", "block-fp8"), ("tiny", "compressed-fp8"))
    broker = Broker(lab, "tokens")
    new, attached = lab.engine, {"on_missing": "fail", "wait": 0}
    disk = {mode: new(f"disk-{name}", small, mode=mode) for mode, name in MODES.items()}
    maker = new("maker", small, broker)
    attach = {mode: new(f"attach-{name}", small, broker, mode=mode, extra=attached) for mode, name in MODES.items()}
    again = new("restarted", small, broker, extra=attached)
    emptied = new("emptied", small, broker, extra=attached, environment={"ENGINES_EMPTY_CACHE": "10"})
    fp8_disk, fp8_maker = new("fp8-disk", fp8), new("fp8-maker", fp8, broker, extra={"name": "fp8"})
    fp8_attach = new("fp8-attach", fp8, broker, extra=attached | {"name": "fp8"})
    refused = new("refused", unsafe, broker, extra={"name": "unsafe"})
    alone = new("alone", unsafe, broker, extra={"name": "unsafe", "on_unsupported": "load"})
    # Cold: these fill the caches of compiled code.
    lab.note("cold engines")
    cold = (*disk.values(), maker)
    for engine in cold:
        engine.imported()
        engine.send("start")
    for engine in cold:
        engine.started()
    expected = {mode: engine.tokens() for mode, engine in disk.items()}
    with lab.row("published") as row:
        row["line"] = [maker.line(PUBLISHED)]
        equal(row, maker, expected[0])
    steps = disk[0].ask(f"decode {STEPS}")
    for engine in cold:
        engine.quit()
    lab.note("attach")
    server = Server(lab, "serve", small, attached | {"broker": str(broker.path), "name": "model"})
    for engine in (*attach.values(), fp8_disk):
        engine.send("start")
    for mode, name in MODES.items():
        with lab.row(f"tokens-{name}") as row:
            row["method"] = attach[mode].started()["method"]
            row["attached"] = [attach[mode].line(ATTACHED)]
            equal(row, attach[mode], expected[mode])
    http(lab, server, expected[0])
    killed_and_restarted(lab, small, attach[0], again, expected[0])
    for engine in (attach[None], again):
        engine.quit()
    lab.note("FP8")
    block_fp8(lab, fp8_disk, fp8_maker, fp8_attach)
    undeclared(lab, refused, alone)
    lab.note("emptied caches")
    emptied_caches(lab, emptied, steps)


def http(lab, server, expected):
    with lab.row("http") as row:
        server.ready()
        row["attached"] = server.text().count(ATTACHED)
        row.require(row["attached"] == 1, "the server did not attach")
        answers = [server.complete(prompt, len(expected["tokens"][0])) for prompt in PROMPTS]
        row.require(answers == expected["tokens"], "other tokens than disk load")
    server.end()


def killed_and_restarted(lab, model, victim, again, expected):
    """SIGKILL of an engine. Another engine starts while the weight files are away."""
    away = model.with_name("away")
    away.mkdir(exist_ok=True)
    files = sorted(model.glob("*.safetensors"))
    with lab.row("killed-and-restarted") as row:
        victim.kill()
        for file in files:
            file.rename(away / file.name)
        try:
            row["files_moved"] = len(files)
            row["llm_s"] = round(again.start()["seconds"], 2)
            row["bytes_read"] = int(re.search(r"read (\d+) bytes of files", again.line(ATTACHED))[1])
            row.require(row["bytes_read"] == 0, "the loader read weight files")
            equal(row, again, expected)
        finally:
            for file in files:
                (away / file.name).rename(file)


def block_fp8(lab, disk, maker, attach):
    with lab.row("fp8") as row:
        disk.started()
        expected = disk.tokens()
        maker.start()
        row["published"] = [maker.line(PUBLISHED)]
        maker.quit()
        attach.start()
        row["attached"] = [attach.line(ATTACHED)]
        row["kernels"] = sorted(set(re.findall(r"\w+ScaledMM\w*", attach.text())))
        equal(row, attach, expected)
    for engine in (disk, attach):
        engine.quit()


def undeclared(lab, refused, alone):
    """A quantisation that does not declare that it accepts processed weights."""
    with lab.row("undeclared-format-refused") as row:
        refused.send("start")
        alone.send("start")
        refused.wait_for("end", refused.has_ended, 120)
        row.require("CompressedTensorsLinearMethod does not declare" in refused.text(), f"no such refusal: {refused.last_lines()}")
        alone.started()
        row["alone_prompts"] = len(alone.tokens(4)["tokens"])
        row.require(not alone.has_line(ATTACHED), "attached")
    alone.quit()


def emptied_caches(lab, engine, expected):
    errors = xids()
    with lab.row("steps-with-emptied-caches") as row:
        engine.start()
        got = engine.ask(f"decode {STEPS}", 200)
        row["steps"], row["seconds"] = STEPS, round(got["seconds"], 2)
        row["emptied_at_step"] = engine.trace("caches emptied")["calls"]
        row.require(row["emptied_at_step"] >= STEPS, "the caches were not emptied throughout")
        row["xids_before"], row["xids_after"] = errors, xids()
        row.require(errors is not None, "the kernel's log can't be read, so an Xid would not be seen")
        row.require(row["xids_after"] == errors, "the kernel logged an Xid")
        row.require(got["tokens"] == expected["tokens"], "other tokens than disk load")


def used(lab, engine):
    """Returns memory after Worker.load_model and at its peak, and its seconds."""
    event = engine.trace(WORKER_LOAD)
    growth, peak = lab.memory.during(event)
    return {"growth_mib": round(growth / MIB, 1), "peak_mib": round(peak / MIB, 1), "load_model_s": round(event["seconds"], 4)}


def timed(row, engine, name):
    """One engine alone: seconds to import, to construct, to the first token, and of Worker.load_model."""
    imported = engine.imported()
    started = engine.start()
    row[f"{name}_import_s"] = round(imported["seconds"], 2)
    row[f"{name}_llm_s"] = round(started["seconds"], 2)
    row[f"{name}_first_token_s"] = round(started["first_token"], 3)
    load = engine.trace(WORKER_LOAD)["seconds"]
    row[f"{name}_load_model_s"] = round(load, 3)
    return started | {"load_model": load}


def first(lab):
    """The first engine, which loads 8.4 GB of weights and publishes them, beside vLLM's own loader: five pairs, in turn."""
    (model,) = lab.checkpoints(("large", "plain"))
    # The first engine on a machine compiles.
    warm = lab.engine("warm", model)
    warm.start()
    warm.quit()
    with lab.row("first-engine") as row:
        brokers = [Broker(lab, f"first-{turn}") for turn in range(5)]
        pairs = [(("disk", lab.engine(f"disk-{turn}", model)), ("publish", lab.engine(f"publish-{turn}", model, broker)))
                 for turn, broker in enumerate(brokers)]
        for _, engine in sum(pairs, ()):
            engine.imported()
        loads = {"disk": [], "publish": []}
        for turn, pair in enumerate(pairs):
            for name, engine in reversed(pair) if turn % 2 else pair:
                loads[name].append(timed(row, engine, f"{turn}_{name}")["load_model"])
                row[f"{turn}_{name}_says"] = engine.line(PUBLISHED) if name == "publish" else ""
                engine.quit()
                lab.memory.settled()
            brokers[turn].end()
            row[f"{turn}_more_s"] = round(loads["publish"][-1] - loads["disk"][-1], 3)
        for name, seconds in loads.items():
            row[f"{name}_median_s"] = round(statistics.median(seconds), 3)


def large(lab):
    """Times and memory with 8.4 GB of weights, beside vLLM's own loaders. One engine runs at a time."""
    lab.note("checkpoint")
    (model,) = lab.checkpoints(("large", "plain"))
    nbytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    broker = Broker(lab, "large")
    fail = {"on_missing": "fail", "wait": 0}
    budget = dict(kv_cache_memory_bytes=None, gpu_memory_utilization=0.5)
    empty = lab.memory.settled()
    with lab.row("times") as row:
        row["weights"] = nbytes
        # The first engine on a machine compiles, also in mode 0.
        warm = lab.engine("warm", model)
        warm.start()
        warm.quit()
        disk = lab.engine("disk", model, **budget)
        disk_blocks = timed(row, disk, "disk")["kv_blocks"]
        expected = disk.tokens()
        row["disk_growth_mib"] = used(lab, disk)["growth_mib"]
        disk.quit()
        lab.memory.settled()
        maker = lab.engine("maker", model, broker)
        timed(row, maker, "publish")
        row["published"] = [maker.line(PUBLISHED)]
        maker.quit()
        held = lab.memory.settled() - empty
        attach = lab.engine("attach", model, broker, extra=fail, **budget)
        blocks = timed(row, attach, "attach")["kv_blocks"]
        row["attached"] = [attach.line(ATTACHED)]
        equal(row, attach, expected)
    lab.note("imports of all others")
    profiled = lab.engine("profiled", model, broker, extra=fail, environment={"ENGINES_PROFILE": "1"})
    shared = [lab.engine(f"shared-{index}", model, broker, extra=fail) for index in range(3)]
    cache = dict(load_format="ipc_cache", model_loader_extra_config={"fallback": False, "state_timeout_s": 10})
    cached = [lab.engine(f"cached-{index}", model, **cache) for index in range(3)]
    orphan = lab.engine("orphan", model, **cache)
    fast = lab.engine("fast", model, load_format="fastsafetensors")
    single = [lab.engine(f"single-{index}", model) for index in range(3)]
    own_part(lab, attach, profiled)
    with lab.row("kv-budget") as row:
        row["disk_blocks"], row["attach_blocks"] = disk_blocks, blocks
        row.require(abs(blocks - disk_blocks) <= 0.02 * disk_blocks, "the KV cache of an attached engine differs by more than 2 %")
    attach.quit()
    totals = {"vmmfd": three_engines(lab, shared, expected, held, nbytes)}
    lab.note("vLLM's weight cache")
    totals["weight_cache"] = weight_cache(lab, model, cached, orphan, expected)
    lab.note("other loaders")
    others(lab, fast, single, totals)


def own_part(lab, attach, profiled):
    """Of Worker.load_model, the seconds of the loader, and, from a profile of another attach, the functions that take the rest."""
    with lab.row("own-part-of-attach") as row:
        own = parts(attach)
        row |= {f"{name}_ms": round(seconds * 1000, 2) for name, seconds in own.items()}
        worker, loader = attach.trace(WORKER_LOAD)["seconds"], attach.trace(LOAD)["seconds"]
        row["loader_s"], row["worker_load_model_s"], row["outside_loader_s"] = round(loader, 4), round(worker, 4), round(worker - loader, 4)
        beyond = loader - own["meta_build"] + own["find"]
        row["beyond_meta_build_ms"] = round(beyond * 1000, 2)
        profiled.start()
        row["profile"] = profiled.trace(WORKER_LOAD)["top"]
        row.require(beyond <= 0.050, "the loader takes more than 50 ms beside the meta build")
    profiled.end()


def three_engines(lab, engines, expected, held, nbytes):
    """Three engines that share the weights. Returns the memory of all three and of the weights."""
    base = lab.memory.settled()
    total = 0
    with lab.row("three-engines") as row:
        row["held_mib"], row["weights_mib"] = round(held / MIB, 1), round(nbytes / MIB, 1)
        for engine in engines:
            engine.start()
            row |= {f"{engine.name}_{key}": value for key, value in used(lab, engine).items()}
        total = lab.memory.settled() - base + held
        equal(row, engines[-1], expected)
        once = row["weights_once_mib"] = row["held_mib"] + sum(row[f"{engine.name}_growth_mib"] for engine in engines)
        row.require(once <= 1.02 * row["weights_mib"], f"{once} MiB for the weights of three engines")
        peak = row["peak_mib"] = max(row[f"{engine.name}_peak_mib"] for engine in engines)
        row.require(peak <= 64, f"{peak} MiB more at the peak of an attach")
    for engine in engines:
        engine.end()
    return total


def weight_cache(lab, model, engines, orphan, expected):
    """vLLM's own daemon with three engines, then its death. Returns the memory of all."""
    base = lab.memory.settled()
    total = 0
    with lab.row("compare-weight-cache") as row:
        port = free_port()
        daemon = Process(lab, "daemon", [
            sys.executable, "-m", "vllm.entrypoints.cli.main", "preload", "--model", model, "--weight-cache-health-host", "127.0.0.1",
            "--weight-cache-health-port", port, "--dtype", "bfloat16", "--max-model-len", "2048", "--skip-tokenizer-init"])
        daemon.wait_for("answer to /health", lambda: healthy(port), 150)
        row["daemon_mib"] = round((lab.memory.settled() - base) / MIB, 1)
        for engine in engines:
            engine.start()
            row |= {f"{engine.name}_{key}": value for key, value in used(lab, engine).items()}
        total = lab.memory.settled() - base
        equal(row, engines[0], expected)
        daemon.kill()
        row["tokens_after_owner_s_death"] = engines[0].tokens()["tokens"] == expected["tokens"]
        orphan.send("start")
        with contextlib.suppress(Failed):
            orphan.started(60)
        row["new_engine_after_owner_s_death"] = bool(orphan.reports("start"))
        row["new_engine_says"] = [line for line in orphan.text().splitlines() if "Error" in line][-3:]
    for engine in (*engines, orphan):
        engine.end()
    return total


def others(lab, fast, single, totals):
    lab.memory.settled()
    with lab.row("compare-fastsafetensors") as row:
        fast.start()
        row |= used(lab, fast)
    fast.end()
    base = lab.memory.settled()
    with lab.row("compare-auto") as row:
        for engine in single:
            engine.send("start")
        for engine in single:
            engine.started()
        totals["auto"] = lab.memory.settled() - base
        row |= {f"{name}_three_engines_mib": round(total / MIB) for name, total in totals.items()}
        row.require(0 < totals["vmmfd"] < totals["auto"], "three engines with shared weights use no less memory")


def race(lab, name, model, broker, environment=None):
    """Four engines started at once, by object name."""
    return [lab.engine(f"{name}-{index}", model, broker, extra={"name": name}, environment=environment) for index in range(4)]


def roles(engines):
    """Counts the engines that published and that attached."""
    return [sum(engine.has_line(start) for engine in engines) for start in (PUBLISHED, ATTACHED)]


def failures(lab):
    """Four engines at once, a loader killed half-way, and deaths of the broker's processes and of the maker under requests."""
    lab.note("checkpoint")
    (small,) = lab.checkpoints(("small", "plain"))
    broker, other = Broker(lab, "race"), Broker(lab, "requests")
    four = race(lab, "four", small, broker)
    once = lab.folder / "paused"
    once.unlink(missing_ok=True)
    halved = race(lab, "halved", small, broker, {"ENGINES_PAUSE": f"30 {once}"})
    maker, late = lab.engine("maker", small, other), lab.engine("late", small, other, extra={"on_missing": "fail", "wait": 0})
    with lab.row("four-at-once") as row:
        for engine in four:
            engine.imported()
        for engine in four:
            engine.send("start")
        row["llm_s"] = [round(engine.started()["seconds"], 2) for engine in four]
        row["published"], row["attached"] = roles(four)
        row.require(roles(four) == [1, 3], "not one that loads and three that attach")
        # From the engine that loaded from disk.
        (loader,) = [engine for engine in four if engine.has_line(PUBLISHED)]
        expected = loader.tokens()
        for engine in four:
            if engine is not loader:
                equal(row, engine, expected)
    for engine in four:
        engine.quit()
    lab.note("a loader that is killed")
    with lab.row("loader-killed-half-way") as row:
        for engine in halved:
            engine.imported()
        for engine in halved:
            engine.send("start")

        def paused():
            return [engine for engine in halved if engine.traced("pause begins")]

        (loader,) = halved[0].wait_for("loader", paused, 180)
        time.sleep(3)
        row["others_waited"] = roles(halved) == [0, 0]
        row.require(row["others_waited"], "another did not wait for the loader")
        killed = time.monotonic()
        loader.kill()
        rest = [engine for engine in halved if engine is not loader]
        for engine in rest:
            engine.started()
        row["seconds_to_all_ready"] = round(time.monotonic() - killed, 2)
        row["published"], row["attached"] = roles(rest)
        row.require(roles(rest) == [1, 2], "not one that takes over and two that attach")
        for engine in rest:
            equal(row, engine, expected)
    for engine in halved:
        engine.end()
    lab.note("deaths under requests")
    with lab.row("deaths-under-requests") as row:
        maker.start()
        server = Server(lab, "serve", small, {"broker": str(other.path), "name": "model", "on_missing": "fail", "wait": 0})
        server.ready()
        deaths(row, server, other, maker)
        row.require("vmmfd: attached" in server.text(), "the server did not attach")
        late.start()
        row["late_attached"] = late.has_line(ATTACHED)
        row.require(row["late_attached"], "a new engine did not attach afterwards")
        equal(row, late, expected)


def deaths(row, server, broker, maker, requests=200):
    """Eight threads send requests; meanwhile SIGKILL hits the broker's server, its keeper and the maker."""
    done, lock = [0], threading.Lock()

    def one(index):
        try:
            tokens = server.complete(PROMPTS[index % len(PROMPTS)], REQUEST_TOKENS)
            if len(tokens) != REQUEST_TOKENS:
                raise Failed(f"{len(tokens)} tokens")
        finally:
            with lock:
                done[0] += 1

    def kill(after, name, action):
        while done[0] < after:
            time.sleep(0.01)
        action()
        row[f"{name}_killed_after"] = done[0]

    with ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(one, index) for index in range(requests)]
        kill(requests // 5, "server", broker.kill_server)
        row["objects_after_server"] = len(broker.ask("ls")["objects"])
        keeper = broker.keeper()
        kill(requests // 2, "keeper", lambda: os.kill(keeper, signal.SIGKILL))
        broker.wait_for("new keeper", lambda: set(broker.keepers()) - {keeper}, 20)
        row["objects_after_keeper"] = len(broker.ask("ls")["objects"])
        kill(requests * 4 // 5, "maker", maker.kill)
        failed = [str(answer.exception())[:200] for answer in answers if answer.exception()]
    row["requests"], row["failed"] = requests, len(failed)
    row.require(not failed, f"{len(failed)} requests failed: {failed[:2]}")
    row.require(row["objects_after_server"] == row["objects_after_keeper"] == 1, "the broker lost the object")


GROUPS = {
    "tokens": (tokens, 480), "first": (first, 420), "large": (large, 500), "failures": (failures, 480), "live": (live, 420), "switch": (switch, 240),
    "turns": (turns, 360), "turns-eight": (turns_eight, 420), "parallel": (parallel, 420), "parallel-suspend": (parallel_suspend, 260),
}
