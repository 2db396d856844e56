"""What every test runs under: JAX on the CPU with the contract's flags in force, no network, examples drawn the same way.

GPU tests (tests/gpu) run by themselves: ISOMODEL_TEST_GPU=1 pytest tests/gpu.
"""

from __future__ import annotations

import os
import pathlib

GPU = os.environ.get("ISOMODEL_TEST_GPU") == "1"
if not GPU:
    os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.pop("ISOMODEL_NUMERICS", None)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["MPLBACKEND"] = "Agg"

import hypothesis  # noqa: E402
import pytest  # noqa: E402

import isomodel  # noqa: E402, F401  (sets XLA's flags before any test computes)
from pallas_kernels import environment, mosaic  # noqa: E402

hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.load_profile("same")

_ON_GPU = pathlib.Path(__file__).parent / "gpu"


def pytest_configure(config):
    """Kernels in JAX's GPU interpreter block a thread for each warpgroup: with as many threads as a small machine has cores
    they wait for each other for ever. They run by themselves, since tests of the environment count threads."""
    if config.args and all("test_hopper_" in arg for arg in config.args):
        os.environ.setdefault("PJRT_NPROC", str(mosaic.INTERPRETER_THREADS))


def pytest_sessionstart(session):
    """One clear error instead of one in each test, where the user's own XLA_FLAGS contradict the contract's."""
    try:
        environment.check()
    except environment.EnvironmentFault as e:
        raise pytest.UsageError(str(e)) from e


def pytest_collection_modifyitems(items):
    for item in items:
        if _ON_GPU in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not GPU:
                item.add_marker(pytest.mark.skip(reason="needs a GPU: ISOMODEL_TEST_GPU=1 pytest tests/gpu"))
