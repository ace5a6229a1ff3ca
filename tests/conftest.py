"""Every test runs on the CPU, whatever the machine has."""

import gc
import os
import pathlib

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
gc.set_threshold(200_000, 20, 100)  # tracing makes many objects, few of them garbage: a tenth of the time otherwise
_MUCH = 2 << 30  # bytes


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Compiled programs of earlier modules take gigabytes in the end, and nothing needs them any more."""
    yield
    statm = pathlib.Path("/proc/self/statm")
    if statm.exists() and int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") > _MUCH:
        import jax  # which reads the environment

        jax.clear_caches()
        gc.collect()
