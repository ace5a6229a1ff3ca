"""Peak FLOP/s and peak memory: the table by device kind, and what a CPU answers. No speed is asserted."""

import jax
import numpy as np
import pytest

from siamese_jax.training import hardware


@pytest.mark.parametrize(
    "kind, tera",
    [
        ("TPU v3", 61.5),
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5", 459),
        ("TPU v5p", 459),
        ("TPU v6 lite", 918),
        ("TPU7x", 1153.5),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10G", 70),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H20", 148),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
    ],
)
def test_known_devices(kind, tera):
    flops, source = hardware.known_peak_flops(kind, "bfloat16")
    assert flops == pytest.approx(tera * 1e12)
    assert kind in source


def test_float32_is_tf32_on_gpus_and_bf16_passes_on_tpus():
    assert hardware.known_peak_flops("NVIDIA H200", np.float32)[0] == pytest.approx(494.7e12)
    assert hardware.known_peak_flops("TPU v4", np.float32)[0] == pytest.approx(275e12)


def test_unknown_gives_the_reason():
    flops, reason = hardware.known_peak_flops("Abacus 3", "bfloat16")
    assert flops is None and "Abacus 3" in reason
    flops, reason = hardware.known_peak_flops("NVIDIA H200", "float64")
    assert flops is None and "float64" in reason


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="asks the CPU")
def test_cpu_is_measured_once(monkeypatch):
    measured = []
    monkeypatch.setattr(hardware, "measured_matmul_flops", lambda: measured.append(1) or 8e9)
    flops, source = hardware.device_peak_flops("bfloat16")
    assert flops == 8e9 / jax.local_device_count()
    assert "measured" in source and measured == [1]


def test_measurement_is_cached():
    first = hardware.measured_matmul_flops(size=64, seconds=0.0)
    assert first > 0
    assert hardware.measured_matmul_flops(size=64, seconds=0.0) == first


class Device:
    def __init__(self, stats):
        self.stats = stats

    def memory_stats(self):
        return self.stats


def test_peak_memory_prefers_the_fullest_device(monkeypatch):
    devices = [Device({"peak_bytes_in_use": 5}), Device({"peak_bytes_in_use": 7}), Device(None)]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert hardware.peak_memory_bytes() == (7, "device memory, fullest local device")


def test_peak_memory_of_the_process(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(None)])
    peak, source = hardware.peak_memory_bytes()
    assert 10 * 2**20 < peak < 2**44
    assert source == "resident memory of the process"
