"""Shared by the rows: processes with deadlines, a broker, engines, servers, and the GPU's used memory over time."""
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

HERE = pathlib.Path(__file__).parent
ATTACHED = "vmmfd: attached "
PUBLISHED = "vmmfd: loaded and published "
# The KV cache has a fixed size except in rows that measure vLLM's own budget: vLLM's profiling fails if other engines exit during it.
OPTIONS = dict(max_model_len=2048, max_num_seqs=8, max_num_batched_tokens=2048, gpu_memory_utilization=0.3, kv_cache_memory_bytes=1 << 30,
               dtype="bfloat16", seed=0, enable_prefix_caching=False)
GRAPH_SIZES = [1, 2, 4, 8]
POLL = 0.05


class Failed(Exception):
    """A requirement was not met."""


class Process:
    """A process group with a log file. `end` kills all of it."""

    def __init__(self, lab, name, command, **environment):
        self.lab, self.name = lab, name
        self.log = lab.folder / f"{name}.log"
        self.command, self.environment = [str(each) for each in command], os.environ | environment
        self.log.write_text("")
        self.launch()
        lab.processes.append(self)

    def launch(self):
        with open(self.log, "a") as log:
            self.child = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
                                          env=self.environment, start_new_session=True, text=True, bufsize=1)

    def text(self):
        return self.log.read_text(errors="replace")

    def last_lines(self, count=6):
        lines = [line.strip() for line in self.text().splitlines() if line.strip()]
        return " | ".join(lines[-count:])[-900:]

    def wait_for(self, what, found, seconds):
        """Polls until `found` returns a true value. Fails at the deadline, or if the process exits."""
        deadline = min(time.monotonic() + seconds, self.lab.deadline)
        while True:
            ended = self.has_ended()
            value = found()
            if value:
                return value
            if ended:
                raise Failed(f"{self.name} ended with {self.child.returncode} before {what}: {self.last_lines()}")
            if time.monotonic() > deadline:
                raise Failed(f"{self.name}: no {what} within {seconds} s: {self.last_lines()}")
            time.sleep(POLL)

    def has_ended(self):
        return self.child.poll() is not None

    def kill(self):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.close()

    def end(self):
        self.kill()
        if self in self.lab.processes:
            self.lab.processes.remove(self)


class Broker(Process):
    def __init__(self, lab, name):
        # A socket's path has at most 107 bytes.
        self.path = lab.sockets / f"{name}.sock"
        super().__init__(lab, f"broker-{name}", [lab.command, "serve", "--socket", self.path])
        self.wait_for("line that it listens", lambda: "listening" in self.text(), 20)

    def keepers(self):
        """Returns the pids of the keeper, which outlives the server, and of its twin, with the pid of each parent."""
        found = {}
        for entry in pathlib.Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if f"{self.path}.keeper".encode() in words:
                    found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        return found

    def keeper(self):
        found = self.keepers()
        return next(pid for pid, parent in found.items() if parent not in found)

    def kill_server(self):
        """Kills the server and starts the next one, which takes over from the keeper."""
        self.child.kill()
        self.child.wait()
        listening = self.text().count("listening")
        self.launch()
        self.wait_for("line that the next server listens", lambda: self.text().count("listening") > listening, 20)

    def kill(self):
        super().kill()
        # A twin continues when its keeper is killed.
        while found := self.keepers():
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL)

    def ask(self, *command):
        command = [*command, "--socket", str(self.path), "--json"]
        done = subprocess.run([self.lab.command, *command], capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise Failed(f"vmmfd {' '.join(command)} exited with {done.returncode}: {done.stdout}{done.stderr}"[:600])
        return json.loads(done.stdout)


class Engine(Process):
    """tests/engines/engine.py: one vllm.LLM in its default process model, or another script. Imports at once; `start` constructs the
    engine."""

    def __init__(self, lab, name, model, extra=None, load_format=None, mode=0, environment=None, script="engine.py", **options):
        self.report = lab.folder / f"{name}.report"
        self.trace_file = lab.folder / f"{name}.trace"
        self.asked = 0
        options = OPTIONS | dict(model=str(model), skip_tokenizer_init=True, disable_log_stats=True,
                                 compilation_config=compilation(mode)) | options
        if extra is not None:
            options |= dict(load_format="vmmfd", model_loader_extra_config=extra)
        elif load_format:
            options["load_format"] = load_format
        options = {key: value for key, value in options.items() if value is not None}
        super().__init__(lab, name, [sys.executable, HERE / script, self.report, json.dumps(options)],
                         ENGINES_TRACE=str(self.trace_file), **(environment or {}))

    def reports(self, event):
        return [each for each in whole_lines(self.report) if each["event"] == event]

    def imported(self, seconds=120):
        return self.wait_for("end of imports", lambda: self.reports("imported"), seconds)[0]

    def send(self, line):
        """Sends a command without waiting for its report."""
        try:
            self.child.stdin.write(line + "\n")
            self.child.stdin.flush()
        except BrokenPipeError:
            raise Failed(f"{self.name} has ended: {self.last_lines()}") from None

    def started(self, seconds=240):
        return self.wait_for("engine", lambda: self.reports("start"), seconds)[0]

    def start(self, seconds=240):
        self.imported()
        self.send("start")
        return self.started(seconds)

    def begin(self, line):
        """Sends a command. The returned function waits for its report."""
        event = line.split()[0]
        before = len(self.reports(event))
        self.send(line)
        return lambda seconds=120: self.wait_for(f"report of {event!r}", lambda: self.reports(event)[before:], seconds)[0]

    def ask(self, line, seconds=120):
        return self.begin(line)(seconds)

    def tokens(self, count=24):
        return self.ask(f"tokens {count}")

    def trace(self, event):
        """Returns the start and the seconds of an event of the worker, and its other fields."""
        found = [each for each in whole_lines(self.trace_file) if each["event"] == event]
        if not found:
            raise Failed(f"{self.name} has no event {event!r}")
        return found[-1]

    def traced(self, event):
        with contextlib.suppress(Failed):
            return self.trace(event)

    def line(self, start):
        """Returns the loader's line in the log."""
        found = [line for line in self.text().splitlines() if start in line]
        if not found:
            raise Failed(f"{self.name} logged no line {start!r}: {self.last_lines()}")
        return found[-1][found[-1].index(start):]

    def has_line(self, start):
        return start in self.text()

    def quit(self, seconds=60):
        """Shuts the engine down as a user's program does."""
        with contextlib.suppress(Failed):
            self.send("quit")
            self.child.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(seconds)
        self.end()


class Server(Process):
    """`vllm serve`."""

    def __init__(self, lab, name, model, extra, mode=0, environment=None, **more):
        self.port = free_port()
        self.model = str(model)
        options = []
        for key, value in (OPTIONS | more).items():
            flag = "--" + key.replace("_", "-")
            if isinstance(value, bool):
                options += [flag if value else flag.replace("--enable", "--no-enable")]
            else:
                options += [flag, str(value)]
        super().__init__(lab, name, [
            sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, "--host", "127.0.0.1", "--port", self.port,
            "--load-format", "vmmfd", "--model-loader-extra-config", json.dumps(extra),
            "--compilation-config", json.dumps(compilation(mode)), *options], ENGINES_TRACE=str(lab.folder / f"{name}.trace"),
            **(environment or {}))

    def ready(self, seconds=240):
        self.wait_for("answer to /health", lambda: healthy(self.port), seconds)

    def complete(self, prompt, count):
        """Returns the tokens of an HTTP completion."""
        body = dict(model=self.model, prompt=prompt, max_tokens=count, temperature=0, ignore_eos=True, return_token_ids=True)
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["choices"][0]["token_ids"]
        except urllib.error.HTTPError as error:
            raise Failed(f"HTTP {error.code}: {error.read()[:300]!r}") from None


class Memory:
    """The GPU's used memory, sampled every 2 ms by NVML. It includes all processes: rows that use it run alone."""

    def __init__(self):
        import pynvml

        pynvml.nvmlInit()
        self.gpus = pynvml.nvmlDeviceGetCount()
        self.handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        self.read = lambda: pynvml.nvmlDeviceGetMemoryInfo(self.handle).used
        self.name = pynvml.nvmlDeviceGetName(self.handle)
        self.driver = pynvml.nvmlSystemGetDriverVersion()
        self.samples = [(time.monotonic(), self.read())]
        threading.Thread(target=self.sample, daemon=True).start()

    def sample(self):
        while True:
            used = self.read()
            if used != self.samples[-1][1]:
                self.samples.append((time.monotonic(), used))
            time.sleep(0.002)

    def at(self, when):
        return next((used for at, used in reversed(list(self.samples)) if at <= when), self.samples[0][1])

    def during(self, event):
        """Returns the growth over an event of a trace, and at its peak, in bytes."""
        begin, end = event["at"], event["at"] + event["seconds"]
        before = self.at(begin)
        after = self.at(end + 0.01)
        peak = max([used for at, used in list(self.samples) if begin <= at <= end] + [before, after])
        return after - before, peak - before

    def settled(self, seconds=20):
        """Returns the used memory once it is constant for 2 seconds: an exited process's memory is freed with a delay."""
        begin = time.monotonic()
        while time.monotonic() - max(begin, self.samples[-1][0]) < 2 and time.monotonic() < begin + seconds:
            time.sleep(0.1)
        return self.read()


class Row(dict):
    """Figures of a row."""

    def require(self, condition, problem):
        if not condition:
            raise Failed(problem)


class Lab:
    def __init__(self, folder, command, seconds):
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.sockets = pathlib.Path(f"/tmp/engines-{os.getpid()}")
        self.sockets.mkdir(mode=0o700)
        self.command = command
        self.models = self.folder.parent / "models"
        self.begin = time.monotonic()
        self.deadline = self.begin + seconds
        self.processes, self.rows = [], []
        self.memory = Memory()

    def checkpoints(self, *wanted):
        """Returns the folders of checkpoints, each with a size, a kind and perhaps a seed. Writes missing ones, all at once. A killed run may
        have left a folder without weights."""
        folders = [self.models / "-".join(map(str, each)) for each in wanted]
        writing = [Process(self, f"write-{folder.name}", [sys.executable, HERE / "checkpoint.py", folder, *each])
                   for folder, each in zip(folders, wanted)
                   if not (folder / "config.json").exists() or not list(folder.glob("*.safetensors"))]
        for process in writing:
            process.wait_for("checkpoint", lambda process=process: process.child.poll() == 0, 120)
            process.end()
        return folders

    def weights(self, broker):
        """Returns the bytes that a broker holds on the GPU."""
        return sum(device["bytes"] for each in broker.ask("ls")["objects"] for device in each["devices"])

    def engine(self, name, model, broker=None, **options):
        """Starts an engine. With a broker its load format is vmmfd; `extra` adds fields to its extra config."""
        if broker:
            options["extra"] = {"broker": str(broker.path), "name": "model"} | options.get("extra", {})
        return Engine(self, name, model, **options)

    @contextlib.contextmanager
    def row(self, name):
        """A row: prints one line. A failure does not stop the group."""
        figures = Row()
        begin = time.monotonic()
        try:
            yield figures
            result, problem = "PASS", ""
        except Failed as error:
            result, problem = "FAIL", str(error)
        except Exception as error:  # noqa: BLE001 - a broken row must not hide the others
            result, problem = "FAIL", f"{type(error).__name__}: {error}"
        shown = " ".join(f"{key}={value}" for key, value in figures.items() if not isinstance(value, (list, dict)))
        print(f"ROW {name}: {result} {shown}{' ' if problem else ''}{problem}", flush=True)
        seconds = round(time.monotonic() - begin, 2)
        self.rows.append({"row": name, "result": result, "problem": problem, "seconds": seconds, "figures": figures})

    def note(self, text):
        print(f"== {time.monotonic() - self.begin:.0f} s {text}", flush=True)

    def close(self):
        for process in list(self.processes):
            process.end()
        for path in self.sockets.iterdir():
            path.unlink()
        self.sockets.rmdir()


def compilation(mode):
    """vLLM's compilation config. Mode None is its default."""
    return {"cudagraph_capture_sizes": GRAPH_SIZES} | ({} if mode is None else {"mode": mode})


def whole_lines(path):
    """Parses a JSON lines file that another process appends to. The last line may be incomplete."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def healthy(port):
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
        return answer.status == 200


def xids():
    """Returns the number of Xid errors in the kernel's log, or None if it can't be read."""
    done = subprocess.run(["dmesg"], capture_output=True, text=True)
    return sum("Xid" in line for line in done.stdout.splitlines()) if done.returncode == 0 else None
