"""Ray's fixtures with vmmfd's transports, and vmmfd's weight transfer engine in vLLM."""
import contextlib
import logging

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


# One Ray for all tests: a start takes longer than most tests.
@pytest.fixture(scope="session")
def ray_start_regular():
    yield ray.init(num_cpus=2, include_dashboard=False)
    ray.shutdown()


@pytest.fixture
def propagate_logs(monkeypatch):
    monkeypatch.setattr(logging.getLogger("ray"), "propagate", True)
