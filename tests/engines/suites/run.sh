#!/bin/sh
# Runs other projects' tests with vmmfd's arrays, transports and memory, by the shims beside it: on host memory, and cuda.core's on a GPU.
#
#   run.sh PYTHON FOLDER [SUITE]    PYTHON has vmmfd, pytest, hypothesis, numpy 2.4, and for the later suites PyTorch, Ray, tensordict, vLLM and
#                                   cuda.core. FOLDER has the checkouts array-api-tests (with its submodule), ray, vllm (or its sdist,
#                                   unpacked) and cuda-python: those that are absent are left out, and cuda-python without a GPU too. Stays
#                                   out of the repository, for their licences. SUITE is one name of the output, such as test_rdt_gloo.py
#                                   or cuda_core.
#
# In the environment, LIMIT is the seconds for each suite (1200), and LOGS a folder for pytest's whole output.
set -u

python=$(realpath -s "$1")
sources=$(realpath "$2")
only=${3-}
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
work=$(mktemp -d)
logs=${LOGS:-$work}
export VMMFD_BROKER_SOCKET="$work/broker.sock" VMMFD_BACKEND=host CUDA_VISIBLE_DEVICES=
export RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0 VLLM_NO_USAGE_STATS=1
PATH=$(dirname "$python"):$PATH vmmfd serve >"$work/broker.log" 2>&1 &
broker=$!
trap 'kill "$broker"; rm -rf "$work"' EXIT
cp "$here"/*.py "$work"
cd "$work" || exit

# NAME: whether this suite runs.
wanted() {
    [ "${only:-$1}" = "$1" ]
}
# NAME PATH SCRIPT: the suite, edited by sed.
adapt() {
    wanted "$1" || return 1
    [ -f "$2" ] || { echo "LEFT OUT: there is no $2"; return 1; }
    sed -e "$3" "$2" >"$1"
    echo "== $1"
}
# NAME ARGUMENTS: pytest, with its whole output in a file of this name.
run() {
    log=$logs/$1.log
    shift
    timeout "${LIMIT:-1200}" "$python" -m pytest -q -rfs --disable-warnings -p no:cacheprovider "$@" >"$log" 2>&1
    grep -E '^(FAILED|ERROR|SKIPPED|[0-9]+ (passed|failed|skipped|error))' "$log" || tail -n 20 "$log"
}

numpy=$("$python" -c 'import numpy, os; print(os.path.dirname(numpy.__file__))')
! adapt test_numpy.py "$numpy/_core/tests/test_dlpack.py" 's/^import numpy as np/import numpy_shim as np/' || run numpy test_numpy.py
if wanted array-api-tests && [ -d "$sources/array-api-tests" ]; then
    echo "== array-api-tests"
    (cd "$sources/array-api-tests" && PYTHONPATH=$work ARRAY_API_TESTS_MODULE=array_api_shim run array-api array_api_tests/test_dlpack.py)
fi
rdt=$sources/ray/python/ray/tests/rdt
! adapt test_rdt_custom.py "$rdt/test_rdt_custom.py" '0,/^def test_\|^class Slow/s//from ray_shim import SharedMemoryTransport\n\n&/' ||
    run rdt_custom test_rdt_custom.py
# Left out are tests of a group of both sides: that it exists, its metadata, and that its other side dies too.
! adapt test_rdt_gloo.py "$rdt/test_rdt_gloo.py" 's/"gloo"/"vmmfd_torch"/g; s/GLOO/VMMFD_TORCH/g; s/^from ray.experimental.collective/from ray_shim/' ||
    run rdt_gloo test_rdt_gloo.py -k "not before_group and not out_of_band and not before_ref and not recv_actor_dies"
! adapt test_weight_transfer.py "$sources/vllm/tests/distributed/test_weight_transfer.py" '' || run weight_transfer test_weight_transfer.py

# MEMORY: cuda.core's tests in a copy of their own, with this memory of the shim in place of a pool, or with cuda.core's `own`.
cuda() {
    mkdir "$work/$1"
    cp -r "$sources/cuda-python" "$work/$1"
    cd "$work/$1/cuda-python/cuda_core/tests" || return
    # These send a buffer. The others test cuda.core's handles, descriptors, registry, events and access of other GPUs.
    sent="ipcmempool or SendBuffers or (pass_object and buffer and not buffer_desc)"
    case $1 in
        own) run "cuda_core_$1" memory_ipc; return ;;
        share)
            # Memory of vmmfd.share is read-only in the other process: it must not write.
            sed -i '/fill_buffer(buffer, seed=True)/d; s/verify_buffer(buffer, seed=True)/verify_buffer(buffer, seed=False)/' memory_ipc/test_*.py
            sent="($sent) and not Multiple"
            ;;
        *) sent="$sent or Reexport or (IpcWorkerPool and not Descriptors)" ;;
    esac
    MEMORY=$1 PYTHONPATH=$work${PYTHONPATH:+:$PYTHONPATH} run "cuda_core_$1" -p cuda_core_shim memory_ipc -k "($sent) and not PinnedMR"
}
if wanted cuda_core && ! { [ -d "$sources/cuda-python" ] && nvidia-smi; } >/dev/null 2>&1; then
    echo "LEFT OUT: there is no $sources/cuda-python or no GPU"
elif wanted cuda_core; then
    unset CUDA_VISIBLE_DEVICES VMMFD_BACKEND
    started=
    for memory in own empty pool share; do
        cuda $memory >$memory.txt &
        started="$started $!"
    done
    wait $started
    for memory in own empty pool share; do
        echo "== cuda_core $memory"
        cat $memory.txt
    done
fi
