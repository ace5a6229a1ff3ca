"""The compile command: a small model for TPUs that are not here, its figures, and wrong inputs.

What compiles for a TPU needs libtpu, and runs in a process of its own: libtpu reads its settings once.
"""

import importlib.util
import json
import subprocess
import sys

import jax
import pytest
from programs import ROOT, shared_place

from siamese_jax.errors import InputError
from siamese_jax.parallel import topology
from siamese_jax.parallel.topology import CHIPS, find_topology
from siamese_jax.training.ahead import _needed_bytes
from siamese_jax.training.hardware import known_peak_flops

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
MODEL = (
    "model.width=256", "model.num_heads=2", "model.mlp_hidden=512", "model.num_layers=4", "model.dtype=bfloat16",
    "model.stream_dtype=float32", "model.remat=full", "model.offload_streams=True", "training.batch_size=8",
    "data.length=256", "mesh.data=1", "mesh.fsdp=4", "training.sequences_per_device=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return shared_place(tmp_path_factory)


def compile_for(place, name, *words, overrides=MODEL):
    keys = [f"--config.{override}" for override in overrides]
    command = [
        sys.executable,
        "-m",
        "siamese_jax.parallel.compile",
        f"--config={place.config}",
        f"--topology={name}",
    ]
    # Faster, and a fifth too low in memory: enough for what is asserted here.
    environment = place.environment | {"JAX_OPTIMIZATION_LEVEL": "O1"}
    return subprocess.run(
        [*command, *words, *keys],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def figures(place):
    ended = compile_for(place, "v5e:2x2", "--json", "--compare=pre")
    assert ended.returncode == 0, ended.stderr[-2000:]
    return json.loads(ended.stdout)


@needs_libtpu
def test_a_step_for_four_chips(figures):
    assert figures["fits"] is True and figures["devices"] == 4
    assert figures["mesh"] == {"data": 1, "fsdp": 4, "tensor": 1}
    assert figures["accumulation"] == 2 and figures["sequences_per_device"] == 1
    parts = [f"{name}_bytes_per_device" for name in ("parameter", "optimizer", "batch", "activation")]
    assert sum(figures[part] for part in parts) == figures["peak_bytes_per_device"]
    # Matrices, in quarters, of 4 bytes; gains and mixes are whole on every chip. AdamW keeps two moments.
    matrices = 4 * (4 * 256 * 256 + 3 * 256 * 512) + 2 * 320 * 256
    assert 0 <= figures["parameter_bytes_per_device"] - matrices < 100_000
    assert abs(figures["optimizer_bytes_per_device"] - 2 * figures["parameter_bytes_per_device"]) < 100
    assert figures["host_bytes_per_device"] > 0  # the streams
    assert figures["peak_bytes_per_device"] < 2**30 < figures["memory_bytes_per_device"]


@needs_libtpu
def test_its_arithmetic_and_traffic(figures):
    attention, up, down, head = 4 * 256 * 256, 2 * 256 * 512, 256 * 512, 256 * 320
    scores = 2 * 256 * 256  # multiplications of a token with the keys and values of a window, in one layer
    tokens, layers = 8 * 256, 4
    model = 6 * (layers * (attention + up + down + scores) + head)
    # Going back all is computed once more but the last product of a layer, which nothing in it depends on.
    again = 2 * (layers * (attention + up + scores) + head)
    assert figures["model_flops_per_step"] == tokens * model
    assert figures["executed_flops_per_step"] == tokens * (model + again)
    moved = figures["collectives"]
    assert moved["all-gather"]["count"] + moved["collective-permute"]["count"] > 0
    assert figures["memory_traffic_bytes_per_device"] > figures["parameter_bytes_per_device"]
    seconds = figures["seconds"]
    assert figures["step_seconds_overlapped"] == max(seconds.values())
    assert figures["step_seconds_serial"] == pytest.approx(sum(seconds.values()))
    (other,) = figures["compare"]
    assert other["residual"] == "pre" and 0.9 < other["peak_ratio"] < 1.5


@needs_libtpu
def test_what_does_not_fit(place):
    big = (
        "training.batch_size=32768", "training.sequences_per_device=8192", "data.length=2048", "model.remat=none",
        "model.offload_streams=False", "mesh.data=1", "mesh.fsdp=4",
    )  # fmt: skip
    ended = compile_for(place, "v5e:2x2", "--json", overrides=(*MODEL[:6], *big))
    assert ended.returncode == 0, ended.stderr[-2000:]
    figures = json.loads(ended.stdout)
    assert figures["fits"] is False
    assert figures["peak_bytes_per_device"] is None or figures["peak_bytes_per_device"] > 15 * 2**30


@needs_libtpu
@pytest.mark.slow
def test_a_search_lists_the_fastest_first(place):
    words = ("--search", "--search_meshes=4x1,2x1", "--search_remats=full,none", "--search_sequences=1,2", "--json")
    ended = compile_for(place, "v5e:2x2", *words)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(ended.stdout)
    rows = found["rows"]
    assert len(rows) == 2 * 3 * 2 and all(row["fits"] for row in rows)
    times = [row["step_seconds_serial"] for row in rows]
    assert times == sorted(times)


WRONG = [
    ("v5e:17x17x17", (), ("--topology 'v5e:17x17x17'", "v5e:16x16")),
    ("v9:2x2", (), ("--topology 'v9:2x2' is unknown", "v5p:2x2x2", "h200:2x8")),
    ("v5e:2x2", ("--compare=siameze",), ("--compare names 'siameze'", "siamese_hybrid")),
    ("v5e:2x2", ("--config.mesh.fsdp=3",), ("mesh.fsdp 3", "4 device(s)")),
    ("v5e:2x2", ("--config.mesh.fsdp=1",), ("mesh.data 1 x", "does not make the 4 device(s)")),
    ("v5e:2x2", ("--config.training.batch_size=6",), ("= 4 does not divide the 6 windows",)),
    ("v5e:2x2", ("--search", "--search_meshes=4"), ("--search_meshes has '4'", "16x1")),
]


@needs_libtpu
@pytest.mark.parametrize(("name", "words", "said"), WRONG)
def test_wrong_inputs(place, name, words, said):
    keys = [f"--config.{override}" for override in MODEL]
    arguments = [f"--config={place.config}", f"--topology={name}", *keys, *words]
    ended = place.run(*arguments, program="siamese_jax/parallel/compile.py")
    assert ended.code == 2 and ended.err.strip().count("\n") == 0, ended.err
    assert all(word in ended.err for word in said), ended.err


@pytest.mark.parametrize(
    ("versions", "name", "said"),
    [
        ({}, "v5e:2x2", ("libtpu is not installed", f"pip install 'jax[tpu]=={jax.__version__}'")),
        ({"libtpu": "0.0.1"}, "v6e:2x2", ("libtpu is 0.0.1", f"jax {jax.__version__} goes with 0.0.")),
        ({}, "h200:1x8", ("needs jax's CUDA plugin", f"jax-cuda12-plugin=={jax.__version__}")),
        ({"jax-cuda12-pjrt": "0.4.1"}, "h100:1x8", ("jax-cuda12-pjrt 0.4.1 is not that of jax",)),
    ],
)
def test_a_plugin_that_is_absent_or_of_another_version(monkeypatch, versions, name, said):
    monkeypatch.setattr(topology, "_version", versions.get)
    with pytest.raises(InputError) as caught:
        find_topology(name)
    assert all(word in str(caught.value) for word in said), caught.value


@pytest.mark.parametrize("chip", CHIPS)
def test_every_chip_has_its_peak(chip):
    names = {"v4": "TPU v4", "v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite"}
    peak, _ = known_peak_flops(names.get(chip, f"NVIDIA {chip.upper()}"), "bfloat16")
    assert peak > 1e14
    assert CHIPS[chip].memory_bandwidth > CHIPS[chip].link_bandwidth > 1e11


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("the total memory required for HLO temporaries (300.00G) exceeds available HBM (15.75G).", 300 * 2**30),
        ("Ran out of memory in memory space hbm. Used 24.50G of 15.75G hbm.", int(24.5 * 2**30)),
        ("RESOURCE_EXHAUSTED", None),
    ],
)
def test_how_much_was_needed(message, expected):
    assert _needed_bytes(message) == expected
