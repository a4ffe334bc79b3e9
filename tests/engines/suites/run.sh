#!/bin/sh
# Runs other projects' tests with vmmfd's arrays and transports, by the shims beside it, on host memory.
#
#   run.sh PYTHON FOLDER    PYTHON has vmmfd, pytest, hypothesis, numpy 2.4, and for the later suites PyTorch, Ray, tensordict and vLLM.
#                           FOLDER has the checkouts array-api-tests (with its submodule), ray, and vllm (or its sdist, unpacked): those
#                           that are absent are left out. Stays out of the repository, for their licences.
set -u

python=$(realpath -s "$1")
sources=$(realpath "$2")
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
work=$(mktemp -d)
export VMMFD_BROKER_SOCKET="$work/broker.sock" VMMFD_BACKEND=host CUDA_VISIBLE_DEVICES= RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1
"$(dirname "$python")/vmmfd" serve >"$work/broker.log" 2>&1 &
broker=$!
trap 'kill "$broker"; rm -rf "$work"' EXIT
cp "$here"/*.py "$work"
cd "$work" || exit

# NAME PATH SCRIPT: the suite, edited by sed.
adapt() {
    [ -f "$2" ] || { echo "LEFT OUT: there is no $2"; return 1; }
    sed -e "$3" "$2" >"$1"
    echo "== $1"
}
run() {
    timeout 600 "$python" -m pytest -q -rfs -p no:cacheprovider "$@" 2>&1 | grep -E '^(FAILED|ERROR|SKIPPED|[0-9]+ (passed|failed|error))'
}

numpy=$("$python" -c 'import numpy, os; print(os.path.dirname(numpy.__file__))')
! adapt test_numpy.py "$numpy/_core/tests/test_dlpack.py" 's/^import numpy as np/import numpy_shim as np/' || run test_numpy.py
if [ -d "$sources/array-api-tests" ]; then
    echo "== array-api-tests"
    (cd "$sources/array-api-tests" && PYTHONPATH=$work ARRAY_API_TESTS_MODULE=array_api_shim run array_api_tests/test_dlpack.py)
fi
rdt=$sources/ray/python/ray/tests/rdt
! adapt test_rdt_custom.py "$rdt/test_rdt_custom.py" '0,/^def test_\|^class Slow/s//from ray_shim import SharedMemoryTransport\n\n&/' || run test_rdt_custom.py
! adapt test_rdt_gloo.py "$rdt/test_rdt_gloo.py" 's/"gloo"/"vmmfd_torch"/; s/^from ray.experimental.collective/from ray_shim/' ||
    run test_rdt_gloo.py -k "send_fails or dies_before or duplicate"
! adapt test_weight_transfer.py "$sources/vllm/tests/distributed/test_weight_transfer.py" '' || run test_weight_transfer.py
