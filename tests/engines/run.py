#!/usr/bin/env python3
"""Runs vmmfd's load format in the real vLLM on a GPU machine that needs no network: run.py [--strict] [GROUP...].

The groups are `tokens`, `first`, `large`, `failures`, `live`, `switch`, `turns` and `turns-eight` on one GPU, which run by default, and `parallel` and
`parallel-suspend` on all GPUs of a machine with several. Each takes at most 8 minutes. It uses the archives of `make engines-pack` in
dist-engines/packed and the wheel of `make wheel` in dist, and names those that are absent. Each row is a line of output; all figures are in one JSON file per group.
"""
import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DEFAULT = ("tokens", "first", "large", "failures", "live", "switch", "turns", "turns-eight")
GROUPS = (*DEFAULT, "parallel", "parallel-suspend")
ENVIRONMENT = dict(
    HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", VLLM_HOST_IP="127.0.0.1", GLOO_SOCKET_IFNAME="lo",
    VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_USE_DEEP_GEMM="0", TOKENIZERS_PARALLELISM="false", PYTHONUNBUFFERED="1",
)


def absent(packed, wheel):
    """Returns the reasons why the tests cannot run here, one sentence each."""
    if not list(packed.glob("*.tar.xz")):
        yield f"there are no archives of vLLM in {packed}: run make engines-pack"
    if wheel is None:
        yield "there is no wheel of vmmfd in dist: run make wheel"
    if sys.version_info[:2] != (3, 12) or platform.machine() != "x86_64":
        yield f"the archives are for Python 3.12 on x86_64, and this is {platform.python_version()} on {platform.machine()}"
    for name in ("torch", "transformers", "triton", "nvidia-ml-py"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield f"Python has no package {name}"
    try:
        gpu = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except OSError:
        gpu = None
    if gpu is None or gpu.returncode or "GPU 0" not in gpu.stdout:
        yield "there is no GPU"


def unpack(packed, site):
    """Unpacks the archives in parallel, unless already unpacked."""
    def one(archive):
        done = site / f".{archive.name}.{archive.stat().st_size}"
        if done.exists():
            return
        with tarfile.open(archive) as tar:
            tar.extractall(site, filter="tar")
        done.touch()

    site.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor() as threads:
        list(threads.map(one, sorted(packed.glob("*.tar.xz"))))
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-j0", site], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def install(wheel, package):
    """Unpacks the wheel into its own folder. Returns the command in it."""
    shutil.rmtree(package, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--target",
                    package, wheel], check=True)
    return package / "vmmfd" / "_bin" / "vmmfd"


def newest_wheel():
    found = sorted(ROOT.glob("dist/vmmfd-*-abi3-*x86_64.whl"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def run_group(group, work, command, out):
    """Runs a group in this process. Returns whether all its rows passed."""
    sys.path.insert(0, str(HERE))
    import lab as laboratory
    import rows

    function, seconds = rows.GROUPS[group]
    shutil.rmtree(work / group, ignore_errors=True)
    lab = laboratory.Lab(work / group, command, seconds)
    # Kills its processes also when a caller's time limit stops it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("run: terminated"))
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(f"run: {group} took more than {seconds + 30} s"))
    signal.alarm(seconds + 30)
    problem = None
    try:
        function(lab)
    except Exception as error:  # noqa: BLE001 - write the results so far
        problem = f"{type(error).__name__}: {error}"
        print(f"ROW {group}: FAIL {problem}", flush=True)
    finally:
        lab.close()
        signal.alarm(0)
        versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "triton", "vllm", "vmmfd")}
        machine = {"gpu": lab.memory.name, "driver": lab.memory.driver, "python": platform.python_version(), "cores": os.cpu_count()}
        out.mkdir(parents=True, exist_ok=True)
        result = {"group": group, "seconds": round(time.monotonic() - lab.begin, 1), "problem": problem, "machine": machine,
                  "versions": versions, "rows": lab.rows}
        (out / f"engines-{group}.json").write_text(json.dumps(result, indent=1) + "\n")
        with tarfile.open(out / f"engines-{group}-logs.tar.xz", "w:xz") as tar:
            for path in sorted((work / group).glob("*.log")):
                tar.add(path, path.name)
        lab.note("end")
    return problem is None and all(row["result"] == "PASS" for row in lab.rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"groups to run (default: {' '.join(DEFAULT)})")
    parser.add_argument("--strict", action="store_true", help="fail if something is absent, instead of a message")
    parser.add_argument("--packed", type=pathlib.Path, default=ROOT / "dist-engines" / "packed", help="the archives (default: %(default)s)")
    parser.add_argument("--wheel", type=pathlib.Path, default=newest_wheel(), help="the wheel of vmmfd (default: the newest in dist)")
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()) / "vmmfd-engines",
                        help="a folder for what is unpacked and for logs, which later runs use again (default: %(default)s)")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "dist-engines" / "results", help="the results (default: %(default)s)")
    options = parser.parse_args()
    groups = options.groups or DEFAULT
    unknown = [group for group in groups if group not in GROUPS]
    if unknown:
        parser.error(f"no group {unknown[0]}: the groups are {', '.join(GROUPS)}")
    missing = list(absent(options.packed, options.wheel))
    if missing:
        print("test-engines: LEFT OUT, the rows with a real engine: " + "; ".join(missing), file=sys.stderr)
        sys.exit(options.strict)
    begin = time.monotonic()
    site, package = options.work / "site", options.work / "package"
    unpack(options.packed, site)
    command = install(options.wheel, package)
    print(f"== unpacked in {time.monotonic() - begin:.0f} s", flush=True)
    paths = [str(HERE / "plugin"), str(package), str(site)]
    os.environ.update(ENVIRONMENT, PYTHONPATH=os.pathsep.join(paths), VLLM_CACHE_ROOT=str(options.work / "cache"))
    sys.path[:0] = paths
    importlib.invalidate_caches()
    passed = [run_group(group, options.work, command, options.out) for group in groups]
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
