"""Every test runs on the CPU, whatever the machine has, and rank promotion in numpy style is an error."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
