"""Every test runs on the CPU, whatever the machine has."""

import gc
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
gc.set_threshold(200_000, 20, 100)  # tracing makes many objects, few of them garbage: a tenth of the time otherwise
