"""What the machine can do: peak FLOP/s of one device, and the most memory this process has used.

The vendor's dense figures (no sparsity), or on a CPU one short measurement.
"""

import functools
import re
import resource
import statistics
import sys
import time

import jax
import jax.numpy as jnp

TPU_DOCS = "cloud.google.com/tpu/docs"
NVIDIA = "NVIDIA data sheet"

# JAX's device_kind (whole words; the first row that matches counts) -> dense bf16 FLOP/s of one JAX DEVICE.
# v2, v3 and 7x show each of a chip's two cores as a device, so these rows hold half a chip.
PEAKS = (
    (r"TPU v2", 22.5e12, f"{TPU_DOCS}/v2, half a chip"),
    (r"TPU v3", 61.5e12, f"{TPU_DOCS}/v3, half a chip"),
    (r"TPU v4", 275e12, f"{TPU_DOCS}/v4"),
    (r"TPU v5 lite|TPU v5e", 197e12, f"{TPU_DOCS}/v5e"),
    (r"TPU v5|TPU v5p", 459e12, f"{TPU_DOCS}/v5p"),
    (r"TPU v6 lite|TPU v6e", 918e12, f"{TPU_DOCS}/v6e"),
    (r"TPU7x?|TPU v7x?", 1153.5e12, f"{TPU_DOCS}/tpu7x, half a chip"),
    (r"GB200|GB300", 2500e12, NVIDIA),
    (r"B200|B300", 2250e12, NVIDIA),
    (r"H100 PCIe", 756e12, NVIDIA),
    (r"H100 NVL", 835e12, NVIDIA),
    (r"H100|H200|H800|GH200", 989.4e12, NVIDIA),
    (r"H20", 148e12, NVIDIA),
    (r"A100|A800", 312e12, NVIDIA),
    (r"A10G", 70e12, NVIDIA),
    (r"A10", 125e12, NVIDIA),
    (r"L40S", 362e12, NVIDIA),
    (r"L40", 181e12, NVIDIA),
    (r"L4", 121e12, NVIDIA),
    (r"RTX 5090", 209.5e12, NVIDIA),
    (r"RTX 4090", 165.2e12, NVIDIA),
    (r"RTX 3090", 71e12, NVIDIA),
)


def device_peak_flops(dtype) -> tuple[float | None, str]:
    """(FLOP/s of one device, source) for matmuls computed in dtype; (None, reason) where it is not known."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        # Virtual CPU devices share the cores, so each has its part of what the process can do.
        flops = measured_matmul_flops() / jax.local_device_count()
        return flops, "measured: float32 matmul of 1024 x 1024 on this CPU"
    return known_peak_flops(device.device_kind, dtype)


def known_peak_flops(device_kind: str, dtype) -> tuple[float | None, str]:
    """(FLOP/s, source) out of the table for a device_kind; (None, reason) where the table has none."""
    name = jnp.dtype(dtype).name
    if name not in ("bfloat16", "float16", "float32"):
        return None, f"no peak known for {name}"
    for pattern, flops, source in PEAKS:
        if not re.search(rf"\b({pattern})\b", device_kind, re.IGNORECASE):
            continue
        if name != "float32":
            return flops, f"{device_kind}, {name}: {source}"
        if device_kind.startswith("TPU"):  # JAX's default precision there is one bf16 pass
            return flops, f"{device_kind}, float32 in bf16 passes: {source}"
        return flops / 2, f"{device_kind}, float32 as TF32, half of bf16: {source}"
    return None, f"no peak known for device {device_kind!r}"


@functools.cache
def measured_matmul_flops(size=1024, seconds=0.5) -> float:
    """float32 FLOP/s of this process on its CPU: the median matmul of about `seconds`, measured once."""
    cpu = jax.local_devices(backend="cpu")[0]
    matrix = jax.device_put(jnp.full((size, size), 1.0 / size, jnp.float32), cpu)
    multiply = jax.jit(lambda matrix: matrix @ matrix)
    multiply(matrix).block_until_ready()
    times, end = [], time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        multiply(matrix).block_until_ready()
        times.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(times)


def peak_memory_bytes() -> tuple[int, str]:
    """(bytes, what they are): the fullest local device where the backend counts, else this process."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [stat["peak_bytes_in_use"] for stat in stats if "peak_bytes_in_use" in stat]
    if peaks:
        return max(peaks), "device memory, fullest local device"
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return rss * (1 if sys.platform == "darwin" else 1024), "resident memory of the process"
