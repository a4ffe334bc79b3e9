"""Ray's fixture with vmmfd's transports, and vmmfd's weight transfer engine in vLLM."""
import contextlib

import pytest

with contextlib.suppress(ImportError):
    import vmmfd.engines.vllm

    vmmfd.engines.vllm.register()

with contextlib.suppress(ImportError):
    import ray
    import ray_shim
    import vmmfd.ray

    vmmfd.ray.register()
    ray.cloudpickle.register_pickle_by_value(ray_shim)


@pytest.fixture
def ray_start_regular():
    yield ray.init(num_cpus=2)
    ray.shutdown()
