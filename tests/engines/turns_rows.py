"""The rows of the groups `turns` and `turns-eight`: engines of different models take turns on one GPU, and the others are suspended."""
import contextlib
import pathlib
import statistics
import time

from lab import Broker, Server
from live_rows import MIB, ask, command

TURNS = 50
PROMPT = "t1 t5 t12 t19 t26"
COUNT = 24


def turns(lab):
    """Two engines and a server of two models, beside a cold start, an attach and vLLM's own sleep."""
    lab.note("checkpoints")
    large, small = lab.checkpoints(("large", "plain"), ("small", "plain"))
    broker = Broker(lab, "turns")
    disk = lab.engine("disk", large, script="live.py", enable_sleep_mode=True)
    makers, engines = pairs(lab, broker, [large, small])
    with lab.row("cold-start-and-own-sleep") as row:
        empty = lab.memory.settled()
        row["import_s"] = round(disk.imported()["seconds"], 1)
        disk.send("start")
        row["llm_s"] = round(disk.started()["seconds"], 1)
        expected = ask(disk, "tokens")["tokens"]
        for level in (1, 2):
            row[f"sleep_{level}_s"] = round(ask(disk, f"sleep {level}")["seconds"], 2)
            row[f"asleep_{level}_mib"] = round((lab.memory.settled() - empty) / MIB)
            row[f"host_{level}_mib"] = resident(disk)
            row[f"wake_{level}_s"] = round(ask(disk, "wake")["seconds"], 2)
        disk.end()
    server = Server(lab, "serve", small, {"broker": str(broker.path), "name": "model-1", "on_missing": "fail", "wait": 60},
                    environment={"VLLM_SERVER_DEV_MODE": "1"}, enable_sleep_mode=True, sleep_mode_backend="vmmfd")
    tokens = start(lab, makers, engines)
    with lab.row("attached-tokens") as row:
        row.require(tokens[0] == expected, "other tokens than disk load")
    with lab.row("server-suspended") as row:
        server.ready(90)
        answer = server.complete(PROMPT, COUNT)
        row["suspend_s"] = command(lab, "suspend", server, "--http", f"http://127.0.0.1:{server.port}")
    take(lab, engines, tokens, lab.weights(broker), empty)
    suspended = engines[(TURNS - 1) % len(engines)]
    expected = tokens[engines.index(suspended)]
    with lab.row("broker-server-killed-while-suspended") as row:
        ask(suspended, "sleep 1")
        command(lab, "suspend", suspended)
        broker.kill_server()
        command(lab, "resume", suspended)
        row["wake_s"] = round(ask(suspended, "wake")["seconds"], 2)
        row.require(ask(suspended, "tokens")["tokens"] == expected, "other tokens after the server's death")
    with lab.row("server-resumed") as row:
        row["resume_s"] = command(lab, "resume", server, "--http", f"http://127.0.0.1:{server.port}")
        row.require(server.complete(PROMPT, COUNT) == answer, "other tokens than before")
    with lab.row("broker-replaced-while-suspended") as row:
        ask(suspended, "sleep 1")
        command(lab, "suspend", suspended)
        broker.end()
        Broker(lab, "turns")
        command(lab, "resume", suspended)
        row["wake_says"] = suspended.ask("wake").get("error", "")[:300]
        if row["wake_says"]:
            row.require("model-" in row["wake_says"], "the wake does not name the object")
        else:
            row.require(ask(suspended, "tokens")["tokens"] == expected, "other tokens with another broker")


def turns_eight(lab):
    """Eight engines of one architecture, each with other weights."""
    lab.note("checkpoints")
    models = lab.checkpoints(*(("small", "plain", seed) for seed in range(8)))
    broker = Broker(lab, "turns")
    empty = lab.memory.settled()
    makers, engines = pairs(lab, broker, models)
    tokens = start(lab, makers, engines)
    with lab.row("different-models") as row:
        row["models"] = len({str(each) for each in tokens})
        row.require(row["models"] == len(models), "two models give the same tokens")
    take(lab, engines, tokens, lab.weights(broker), empty)


def pairs(lab, broker, models):
    """Returns two engines for each model: a maker, which loads and puts it, and an engine that attaches. They have not started yet."""
    options = dict(script="live.py", enable_sleep_mode=True, sleep_mode_backend="vmmfd")
    makers = [lab.engine(f"maker-{place}", model, broker, extra={"name": f"model-{place}"}, script="live.py")
              for place, model in enumerate(models)]
    engines = [lab.engine(f"engine-{place}", model, broker, extra={"name": f"model-{place}", "on_missing": "fail", "wait": 60}, **options)
               for place, model in enumerate(models)]
    return makers, engines


def start(lab, makers, engines):
    """Replaces each maker by its engine: a maker could only be suspended with --own-copies. Returns the tokens of each engine."""
    with lab.row("turns-start") as row:
        row["maker_llm_s"] = built(makers)
        for engine in makers:
            engine.end()
        row["engine_llm_s"] = built(engines)
        return [ask(engine, "tokens")["tokens"] for engine in engines]


def built(engines):
    for engine in engines:
        engine.imported(180)
        engine.send("start")
    return str([round(engine.started()["seconds"], 1) for engine in engines])


def take(lab, engines, tokens, weights, empty):
    """The engines take turns: each answers alone on the GPU, and all others are suspended."""
    parts = {"sleep": [], "suspend": [], "resume": [], "wake": [], "turn": [], "back": []}
    awake = engines[-1]
    with lab.row("suspended-memory") as row:
        row["host_awake_mib"], row["weights_mib"] = resident(awake), round(weights / MIB)
        for engine in engines:
            ask(engine, "sleep 1")
            command(lab, "suspend", engine)
        left = lab.memory.settled() - empty - weights
        row["gpu_mib_beyond_weights"] = round(left / MIB)
        row["host_suspended_mib"] = str([resident(engine) for engine in engines])
        # Allocations of the broker are rounded up.
        row.require(left <= 64 * MIB, "suspended engines hold memory of the GPU")
        command(lab, "resume", awake)
        ask(awake, "wake")
    with lab.row("turns") as row:
        for turn in range(TURNS):
            following, place = engines[turn % len(engines)], turn % len(engines)
            times = [time.monotonic()]
            for step in (lambda: ask(awake, "sleep 1"), lambda: command(lab, "suspend", awake),
                         lambda: command(lab, "resume", following), lambda: ask(following, "wake")):
                step()
                times.append(time.monotonic())
            for part, begin, end in zip(parts, times, times[1:]):
                parts[part].append(end - begin)
            parts["turn"].append(times[-1] - times[0])
            parts["back"].append(times[-1] - times[2])
            awake = following
            row.require(ask(awake, "tokens")["tokens"] == tokens[place], f"turn {turn}: other tokens than before")
            row["turns"] = turn + 1
        for part, values in parts.items():
            row[f"{part}_s"], row[f"{part}_longest_s"] = round(statistics.median(values), 2), round(max(values), 2)
        row["awake_mib"] = round((lab.memory.settled() - empty - weights) / MIB)


def resident(engine):
    """Returns the host memory of a process and its children in MiB, each shared page divided by its users."""
    total = 0
    for pid in family(engine.child.pid):
        for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1])
    return total >> 10


def family(pid):
    """Returns the pids of a process and its children. See proc_pid_stat(5)."""
    parents = {}
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found
