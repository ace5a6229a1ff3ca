"""Every test runs on the CPU, whatever the machine has."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
