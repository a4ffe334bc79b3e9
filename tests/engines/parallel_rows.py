"""The rows of the groups `parallel` and `parallel-suspend`: an engine whose ranks use all GPUs, its updates, its sleep, and failures of one
rank; and which of such engines can be suspended."""
import os
import signal
import time

from lab import Broker, Failed, whole_lines
from live_rows import MIB, Trainer, ask, command, deaths, side

UPDATES = 20


def parallel(lab):
    size = lab.memory.gpus
    if size < 2:
        raise Failed("this machine has one GPU, and the group needs several")
    last = size - 1
    lab.note("checkpoint")
    (model,) = lab.checkpoints(("large", "plain"))
    broker = Broker(lab, "parallel")
    options = dict(script="live.py", tensor_parallel_size=size)
    served = options | dict(weight_transfer_config={"backend": "vmmfd"}, enable_sleep_mode=True, sleep_mode_backend="vmmfd")
    disk = lab.engine("disk", model, **options)
    engine = lab.engine("maker", model, broker, **served)
    further = lab.engine("further", model, broker, extra={"on_missing": "fail", "wait": 0}, **served)
    trainer = Trainer(lab, broker, "model")
    with lab.row("parallel-start") as row:
        row["gpus"] = size
        for name, each in (("disk", disk), ("maker", engine), ("further", further)):
            each.imported()
            each.send("start")
            row[f"{name}_llm_s"] = round(each.started()["seconds"], 1)
            row[f"{name}_load_model_s"] = round(each.trace("Worker.load_model")["seconds"], 2)
            if each is disk:
                tokens = ask(disk, "tokens")["tokens"]
                disk.end()
                continue
            row.require(ask(each, "tokens")["tokens"] == tokens, f"{name}: other tokens than disk load")
            if each is engine:
                engine.kill()
    engine = further
    expected = {}
    with lab.row("parallel-update") as row:
        for half in ("low", "high"):
            made = trainer.ask(f"put {half}")
            row |= {f"trainer_{key}_ms": round(made[key] * 1000, 1) for key in ("copy", "put")}
            update(engine, made["version"])
            expected[half] = ask(engine, "tokens")["tokens"]
            row.require(all(side(each) == half for each in expected[half]), f"version {half} does not answer")
    with lab.row("parallel-failed-update") as row:
        made = trainer.ask("part low")
        failed = engine.ask(f"update {made['version']} wait")
        row["error"] = failed.get("error", "none")[:300]
        row.require("rank 0 could not prepare version" in row["error"], "the error does not name the rank")
        ask(engine, "sleep 1")
        ask(engine, "wake")
        row.require(ask(engine, "tokens")["tokens"] == expected["high"], "other tokens after the failed update")
        row.require("version 99" in engine.ask("update 99 wait").get("error", ""), "the second failure has another error")
        row.require(trainer.ask("rest")["version"] == made["version"], "the ranks' versions differ")
        update(engine, made["version"])
        row.require(ask(engine, "tokens")["tokens"] == expected["low"], "other tokens after the good update")
    with lab.row("parallel-updates-under-load") as row:
        ask(engine, "load")
        for turn in range(UPDATES):
            made = trainer.ask(f"put {'high' if turn % 2 else 'low'}")
            update(engine, made["version"])
            time.sleep(0.05)
        result = ask(engine, "rest")
        mixed = [answer for answer in result["answers"] if side(answer[1:]) is None]
        row["updates"], row["answers"], row["mixed"], row["failed"] = UPDATES, len(result["answers"]), len(mixed), len(result["failed"])
        row.require(not result["failed"] and not mixed, f"failed {result['failed'][:1]}, mixed {mixed[:3]}")
        row.require(ask(engine, "tokens")["tokens"] == expected["high"], "other tokens than after the first update")
    for rank in sorted({0, last}):
        with lab.row(f"parallel-rank-{rank}-stopped") as row:
            made = trainer.ask("put low")
            pid = worker(engine, rank)
            before = len(engine.reports("update"))
            os.kill(pid, signal.SIGSTOP)
            report = engine.begin(f"update {made['version']} wait")
            time.sleep(3)
            row.require(len(engine.reports("update")) == before, "the update did not wait")
            os.kill(pid, signal.SIGCONT)
            result = report(60)
            row.require("error" not in result, f"the update failed: {result}")
            row.require(ask(engine, "tokens")["tokens"] == expected["low"], "other tokens after the update")
            made = trainer.ask("put high")
            update(engine, made["version"])
            row.require(ask(engine, "tokens")["tokens"] == expected["high"], "other tokens after the next update")
    deaths(lab, broker, engine, trainer, expected, "parallel-", updates=6, spacing=0.006)
    with lab.row("parallel-rank-killed") as row:
        again = lab.engine("again", model, broker, extra={"on_missing": "fail", "wait": 0}, **served)
        again.imported()
        made = trainer.ask("put low")
        os.kill(worker(engine, last), signal.SIGKILL)
        result = engine.ask(f"update {made['version']} wait", 60)
        row["error"] = result.get("error", "none")[:200]
        row.require("error" in result, "the update of a dead engine succeeded")
        engine.kill()
        again.send("start")
        row["llm_s"] = round(again.started()["seconds"], 1)
        row.require(ask(again, "tokens")["tokens"] == expected["low"], "other tokens in the next engine")


def parallel_suspend(lab):
    """Engines whose ranks have each other's memory are refused unharmed; an engine whose ranks have not is suspended and continues."""
    size = lab.memory.gpus
    if size < 2:
        raise Failed("this machine has one GPU, and the group needs several")
    (model,) = lab.checkpoints(("large", "plain"))
    broker = Broker(lab, "apart")
    options = dict(script="live.py", tensor_parallel_size=size, enable_sleep_mode=True)
    apart = dict(disable_custom_all_reduce=True, environment={"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"})
    engines = {
        "of-vllm-alone": lab.engine("alone", model, **options),
        "default-options": lab.engine("default", model, broker, sleep_mode_backend="vmmfd", **options),
        "custom-all-reduce": lab.engine("custom", model, broker, sleep_mode_backend="vmmfd", **options, environment=apart["environment"]),
    }
    last = lab.engine("apart", model, broker, sleep_mode_backend="vmmfd", **options, **apart)
    for name, engine in engines.items():
        with lab.row(f"refused-{name}") as row:
            engine.imported()
            engine.send("start")
            row["llm_s"] = round(engine.started()["seconds"], 1)
            expected = ask(engine, "tokens")["tokens"]
            ask(engine, "sleep 1")
            row["says"] = "nothing"
            try:
                command(lab, "suspend", engine, "--own-copies")
            except Failed as error:
                row["says"] = str(error)[:500]
            ask(engine, "wake")
            row.require("NCCL_P2P_DISABLE" in row["says"] or "disable-custom-all-reduce" in row["says"], "no option is named")
            row.require(ask(engine, "tokens")["tokens"] == expected, "the refusal changed the engine")
        engine.end()
    with lab.row("suspended-apart") as row:
        last.imported()
        last.send("start")
        row["llm_s"] = round(last.started()["seconds"], 1)
        expected = ask(last, "tokens")["tokens"]
        for turn in range(2):
            ask(last, "sleep 1")
            asleep = lab.memory.settled()
            row["suspend_s"] = command(lab, "suspend", last)
            row["freed_beyond_sleep_mib"] = round((asleep - lab.memory.settled()) / MIB)
            row["resume_s"] = command(lab, "resume", last)
            ask(last, "wake")
            row.require(ask(last, "tokens")["tokens"] == expected, "other tokens than before")


def update(engine, version):
    return ask(engine, f"update {version} wait")


def worker(engine, rank):
    """Returns the pid of a rank's process."""
    return next(each["pid"] for each in whole_lines(engine.trace_file) if each["event"] == "Worker.load_model" and each["rank"] == rank)
