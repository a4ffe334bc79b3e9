"""The rows of the group `live`: new versions under load, sleep, and deaths of the broker's server meanwhile."""
import re
import statistics
import subprocess
import sys
import time

from lab import HERE, Broker, Failed, Process, whole_lines

MIB = 1 << 20
HALF = 16000
UPDATES = 50
SWITCHED = re.compile(r"vmmfd: switched \S+ from version (\d+) to \d+ in [0-9.]+ s, ([0-9.]+) s of it unmapped")
PARKED = re.compile(r"vmmfd: (parked|unparked) \S+ version \d+ in ([0-9.]+) s")


class Trainer(Process):
    def __init__(self, lab, broker, name):
        self.report = lab.folder / f"trainer-{name}.report"
        super().__init__(lab, f"trainer-{name}", [sys.executable, HERE / "trainer.py", self.report, broker.path, name])

    def ask(self, line, seconds=60):
        before = len(whole_lines(self.report))
        self.child.stdin.write(line + "\n")
        self.child.stdin.flush()
        return self.wait_for(f"report of {line!r}", lambda: whole_lines(self.report)[before:], seconds)[0]


def ask(engine, line, seconds=120):
    """Sends a command. Raises for an error that it reports."""
    result = engine.ask(line, seconds)
    if "error" in result:
        raise Failed(f"{engine.name}: {line}: {result['error']}")
    return result


def side(tokens):
    """Returns the half of the vocabulary that all tokens come from, or None."""
    low, high = min(tokens), max(tokens)
    return "low" if high < HALF else "high" if low >= HALF else None


def figures(engine, pattern):
    return [(match[1], float(match[2])) for match in pattern.finditer(engine.text())]


def milliseconds(row, name, values):
    row[f"{name}_ms"] = round(statistics.median(values) * 1000, 2)
    row[f"{name}_longest_ms"] = round(max(values) * 1000, 2)


def live(lab):
    lab.note("checkpoint")
    (model,) = lab.checkpoints(("large", "plain"))
    broker = Broker(lab, "live")
    options = dict(script="live.py", weight_transfer_config={"backend": "vmmfd"}, enable_sleep_mode=True, sleep_mode_backend="vmmfd")
    engine = lab.engine("live", model, broker, **options)
    newest = lab.engine("newest", model, broker, extra={"wake": "newest", "on_missing": "fail", "wait": 60}, **options)
    trainer = Trainer(lab, broker, "model")
    other = lab.engine("ipc", model, script="live.py", weight_transfer_config={"backend": "ipc"},
                       environment={"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"})
    with lab.row("live-start") as row:
        for each in (engine, newest, other):
            each.imported()
        engine.send("start")
        row["llm_s"] = round(engine.started()["seconds"], 1)
        newest.send("start")
        other.send("start")
        trainer.wait_for("imports", lambda: whole_lines(trainer.report), 60)
    with lab.row("live-update") as row:
        made = trainer.ask("put low")
        row["trainer_copy_ms"], row["trainer_put_ms"] = round(made["copy"] * 1000, 1), round(made["put"] * 1000, 1)
        first = ask(engine, f"update {made['version']} wait")
        row |= {key: round(first[key] * 1000, 2) for key in ("pause", "prepare", "finish")}
        expected = {"low": ask(engine, "tokens")["tokens"]}
        row.require(all(side(each) == "low" for each in expected["low"]), "the new version does not answer")
        made = trainer.ask("put high")
        ask(engine, f"update {made['version']} wait")
        expected["high"] = ask(engine, "tokens")["tokens"]
        row.require(all(side(each) == "high" for each in expected["high"]), "the second version does not answer")
    updates(lab, engine, trainer, expected)
    with lab.row("pause-between-tokens") as row:
        gaps, parts = [], []
        for turn in range(5):
            made = trainer.ask(f"put {'high' if turn % 2 else 'low'}")
            result = ask(engine, f"stream {made['version']}")
            gaps.append(result["gap_of_update"])
            parts.append(result["prepare"] + result["finish"])
            row["median_gap_ms"] = round(result["median_gap"] * 1000, 2)
        milliseconds(row, "gap_of_update", gaps)
        milliseconds(row, "prepare_and_finish", parts)
    with lab.row("pause-with-ipc-of-vllm") as row:
        other.started()
        file = lab.folder / "ipc.json"
        trainer.ask(f"ipc {model} {file}")
        before = ask(other, "tokens")["tokens"]
        gaps, parts = [], []
        for _ in range(3):
            result = ask(other, f"stream {file}")
            gaps.append(result["gap_of_update"])
            parts.append(result["prepare"] + result["finish"])
            row["median_gap_ms"] = round(result["median_gap"] * 1000, 2)
        milliseconds(row, "gap_of_update", gaps)
        milliseconds(row, "prepare_and_finish", parts)
        row["tokens_equal"] = ask(other, "tokens")["tokens"] == before
    other.end()
    newest.started()
    deaths(lab, broker, engine, trainer, expected)
    sleep(lab, engine, trainer, expected, newest)


def switch(lab):
    """One engine: the pause of an update that prepares before it or in it, and a switch beside the driver's calls alone."""
    (model,) = lab.checkpoints(("large", "plain"))
    broker = Broker(lab, "switch")
    engine = lab.engine("switch", model, broker, script="live.py", weight_transfer_config={"backend": "vmmfd"})
    trainer = Trainer(lab, broker, "model")
    engine.start()
    trainer.wait_for("imports", lambda: whole_lines(trainer.report), 60)

    def traced(event, since):
        return [each["seconds"] for each in whole_lines(engine.trace_file)[since:] if each["event"] == event]

    with lab.row("pieces") as row:
        for which in ("loaded", "put"):
            floor = ask(engine, "floor")
            row[f"{which}_pieces"] = len(floor["sizes"])
            row[f"{which}_mib"] = round(sum(floor["sizes"]) / MIB)
            row[f"{which}_driver_ms"] = [round(floor[each] * 1000, 3) for each in ("median", "shortest")]
            before = len(figures(engine, SWITCHED))
            for turn in range(1 if which == "loaded" else 20):
                made = trainer.ask(f"put {'high' if turn % 2 else 'low'}")
                ask(engine, f"update {made['version']} wait")
            milliseconds(row, f"{which}_unmapped", [seconds for _, seconds in figures(engine, SWITCHED)[before:]])
        row["put_times_the_driver"] = round(row["put_unmapped_ms"] / row["put_driver_ms"][0], 2)
    with lab.row("pause-between-tokens") as row:
        results = {"late": [], "": []}
        since = len(whole_lines(engine.trace_file))
        for turn in range(16):
            late = "late" if turn % 2 else ""
            made = trainer.ask(f"put {'high' if turn % 4 < 2 else 'low'}")
            results[late].append(ask(engine, f"stream {made['version']} {late}"))
        for late, each in results.items():
            for key in ("gap_of_update", "prepare", "pause", "finish"):
                milliseconds(row, f"{key}{late and '_' + late}", [result[key] for result in each])
        row["median_gap_ms"] = round(results[""][0]["median_gap"] * 1000, 2)
        for event in ("Worker.finish_weight_update", "Live.prepare", "Live.switch", "Live._exchange", "Live.refill", "Prepared.close"):
            milliseconds(row, event, traced(event, since))


def updates(lab, engine, trainer, expected):
    """An engine under load changes its version, 50 times."""
    with lab.row("updates-under-load") as row:
        before = len(figures(engine, SWITCHED))
        captures = engine.text().count("Graph capturing finished")
        ask(engine, "load")
        parts = {"pause": [], "prepare": [], "finish": []}
        for turn in range(UPDATES):
            made = trainer.ask(f"put {'high' if turn % 2 else 'low'}")
            result = ask(engine, f"update {made['version']} wait")
            for part, values in parts.items():
                values.append(result[part])
            time.sleep(0.05)
        result = ask(engine, "rest")
        answers = result["answers"]
        mixed = [answer for answer in answers if side(answer[1:]) is None]
        row["updates"], row["answers"], row["mixed"], row["failed"] = UPDATES, len(answers), len(mixed), len(result["failed"])
        row["low"], row["high"] = (sum(side(answer[1:]) == half for answer in answers) for half in ("low", "high"))
        for part, values in parts.items():
            milliseconds(row, part, values)
        switches = [seconds for _, seconds in figures(engine, SWITCHED)[before:]]
        milliseconds(row, "unmapped", switches)
        row["median_gap_ms"] = round(result["median_gap"] * 1000, 2)
        places = {each["addresses"] for each in whole_lines(engine.trace_file) if each["event"] == "Worker.finish_weight_update"}
        row["addresses"] = len(places)
        row["captures"] = engine.text().count("Graph capturing finished")
        row.require(not result["failed"], f"requests failed: {result['failed'][:1]}")
        row.require(not mixed, f"answers of two versions: {mixed[:3]}")
        row.require(row["low"] and row["high"], "the load saw one version only")
        row.require(len(switches) == UPDATES and len(places) == 1, "other addresses, or fewer switches")
        row.require(row["captures"] == captures, "graphs were captured again")
        row.require(ask(engine, "tokens")["tokens"] == expected["high"], "other tokens than after the first update")


def sleep(lab, engine, trainer, expected, newest):
    made = trainer.ask("put low")
    for each in (engine, newest):
        ask(each, f"update {made['version']} wait")
    ask(newest, "sleep 1")
    for level in (1, 2):
        with lab.row(f"sleep-level-{level}") as row:
            used = lab.memory.settled()
            ask(engine, f"sleep {level}")
            row["freed_mib"] = round((used - lab.memory.settled()) / MIB)
            ask(engine, "wake")
            row |= {f"{what}_ms": round(seconds * 1000, 2) for what, seconds in figures(engine, PARKED)[-2:]}
            row.require(ask(engine, "tokens")["tokens"] == expected["low"], "other tokens than before")
            row.require(all(seconds <= 0.010 for _, seconds in figures(engine, PARKED)[-2:]), "our part takes more than 10 ms")
    with lab.row("versions-while-asleep") as row:
        ask(engine, "sleep 1")
        made = trainer.ask("put high")
        ask(engine, "wake")
        ask(newest, "wake")
        row["own"], row["newest"] = (side(ask(each, "tokens")["tokens"][0]) for each in (engine, newest))
        row.require(row["own"] == "low" and ask(engine, "tokens")["tokens"] == expected["low"], "not its own version")
        row.require(row["newest"] == "high" and ask(newest, "tokens")["tokens"] == expected["high"], "not the newest version")
    suspended(lab, engine, made["version"], expected["high"])
    with lab.row("memory-of-weights-while-asleep") as row:
        # Asleep, `newest` holds no version: without the name nothing holds the weights.
        used = lab.memory.settled()
        ask(newest, "sleep 1")
        row["asleep_mib"] = round((used - lab.memory.settled()) / MIB)
        row["suspend_s"] = command(lab, "suspend", newest)
        row["suspended_mib"] = round((used - lab.memory.settled()) / MIB)
        row["resume_s"] = command(lab, "resume", newest)
        trainer.ask("delete")
        row["asleep_and_deleted_mib"] = round((used - lab.memory.settled()) / MIB)
        row["wake_says"] = newest.ask("wake").get("error", "")[:300]
        row.require(row["asleep_and_deleted_mib"] - row["asleep_mib"] > 7900, "the weights are not free")
        row.require("there is no object" in row["wake_says"], "the wake does not say what is missing")


def command(lab, verb, engine, *options):
    """Runs `vmmfd suspend` or `resume` for an engine. Returns its seconds."""
    begin = time.monotonic()
    run = subprocess.run([lab.command, verb, str(engine.child.pid), *options], capture_output=True, text=True, timeout=60)
    if run.returncode:
        raise Failed(f"vmmfd {verb} exited with {run.returncode}: {run.stderr}"[:600])
    return round(time.monotonic() - begin, 2)


def suspended(lab, engine, version, expected):
    """The engine that made the object, without its GPU memory: woken again, and killed in this state."""
    ask(engine, f"update {version} wait")
    for level in (1, 2):
        with lab.row(f"suspended-level-{level}") as row:
            ask(engine, f"sleep {level}")
            asleep = lab.memory.settled()
            # It keeps the first arena of the pool that it was loaded into.
            row["suspend_s"] = command(lab, "suspend", engine, "--own-copies")
            row["freed_beyond_sleep_mib"] = round((asleep - lab.memory.settled()) / MIB)
            row["resume_s"] = command(lab, "resume", engine)
            begin = time.monotonic()
            ask(engine, "wake")
            row["wake_s"] = round(time.monotonic() - begin, 2)
            row.require(ask(engine, "tokens")["tokens"] == expected, "other tokens than before")
    with lab.row("killed-while-suspended") as row:
        try:
            command(lab, "suspend", engine, "--own-copies")
        except Failed as error:
            row["awake_says"] = str(error)[:200]
        row.require("of other processes" in row["awake_says"], "an engine that is awake was not refused")
        row.require(ask(engine, "tokens")["tokens"] == expected, "the refusal changed the engine")
        ask(engine, "sleep 1")
        command(lab, "suspend", engine, "--own-copies")
        used = lab.memory.settled()
        engine.end()
        row["left_while_suspended_mib"] = round((used - lab.memory.settled()) / MIB)
        row.require(row["left_while_suspended_mib"] <= 1024 + 8, "a suspended engine has more than the arena")


def deaths(lab, broker, engine, trainer, expected, prefix="", updates=10, spacing=0.004):
    """SIGKILL of the broker's server, at increasing times during an update and during sleep."""
    with lab.row(f"{prefix}server-killed-during-update") as row:
        row["new"] = row["old"] = 0
        for turn in range(updates):
            half, other = ("high", "low") if turn % 2 else ("low", "high")
            made = trainer.ask(f"put {half}")
            report = engine.begin(f"update {made['version']} wait")
            time.sleep(spacing * turn)
            broker.kill_server()
            result = report(60)
            tokens = ask(engine, "tokens")["tokens"]
            new = "error" not in result
            row["new" if new else "old"] += 1
            row.require(tokens == expected[half if new else other], f"other tokens than version {half}: {result}")
            if not new:
                row["error"] = result["error"][:200]
                ask(engine, f"update {made['version']} wait")
    with lab.row(f"{prefix}server-killed-while-asleep") as row:
        ask(engine, "sleep 1")
        broker.kill_server()
        ask(engine, "wake")
        row["tokens_equal"] = ask(engine, "tokens")["tokens"] == expected["high"]
        row.require(row["tokens_equal"], "other tokens after the server's death")
