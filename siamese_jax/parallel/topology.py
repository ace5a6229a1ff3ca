"""Devices that are not here: the chips we know, and jax devices of a topology, for ahead-of-time compiles.

Peak FLOP/s are in training/hardware.py; bandwidths below are the vendors', of one jax device, one direction.
"""

import fnmatch
import importlib.metadata
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from siamese_jax.errors import InputError

GIB = 2**30


class Chip(NamedTuple):
    """memory_bytes: what a program may use. Bandwidths, bytes/s: of the memory, of the links to other chips."""

    platform: str
    memory_bytes: int
    memory_bandwidth: float
    link_bandwidth: float
    example: str


# TPU memory: what libtpu itself gives as the limit. Bandwidths: cloud.google.com/tpu/docs, NVIDIA's data sheets.
CHIPS = {
    "v4": Chip("tpu", int(30.75 * GIB), 1228e9, 300e9, "v4:2x2x2"),
    "v5e": Chip("tpu", int(15.75 * GIB), 819e9, 200e9, "v5e:16x16"),
    "v5p": Chip("tpu", int(95.74 * GIB), 2765e9, 600e9, "v5p:2x2x2"),
    "v6e": Chip("tpu", int(31.25 * GIB), 1640e9, 400e9, "v6e:16x16"),
    "h100": Chip("cuda", int(0.92 * 80 * GIB), 3350e9, 450e9, "h100:2x8"),
    "h200": Chip("cuda", int(0.92 * 140.4 * GIB), 4800e9, 450e9, "h200:2x8"),
}
TARGETS = Path(__file__).parent / "targets"
# libtpu asks a metadata server that is not there, and forbids two compiles at once, unless told otherwise.
QUIET_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_ID": "0",
}


class Topology(NamedTuple):
    """Devices of a kind that may be elsewhere."""

    name: str
    chip: Chip
    devices: list[Any]


def find_topology(name: str) -> Topology:
    """The devices of a name such as v5e:16x16, v5p:2x2x4 or h200:2x8 (hosts x GPUs of a host).

    To be called before jax is used: it keeps to the CPU. InputError for an unknown name, and where the plugin
    that compiles for it is absent or of another version.
    """
    kind, _, grid = name.partition(":")
    if kind not in CHIPS or not re.fullmatch(r"\d+(x\d+){0,2}", grid):
        known = ", ".join(chip.example for chip in CHIPS.values())
        raise InputError(f"--topology {name!r} is unknown: use one like {known}")
    chip = CHIPS[kind]
    jax.config.update("jax_platforms", "cpu")
    make = _tpu_devices if chip.platform == "tpu" else _gpu_devices
    try:
        return Topology(name, chip, list(make(kind, grid)))
    except InputError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"--topology {name!r} cannot be made ({reason}): use one like {chip.example}") from error


def _tpu_devices(kind: str, grid: str):
    _check_version("libtpu", "jax[tpu]")
    os.environ.update({key: os.environ.get(key, value) for key, value in QUIET_LIBTPU.items()})
    dims = grid if kind in ("v5e", "v6e") or grid.count("x") == 2 else grid + "x1"
    # v4 otherwise shows the two cores of a chip as two devices with half of its memory each.
    options = {"chip_config_name": "megacore"} if kind == "v4" else {}
    return topologies.get_topology_desc(topology_name=f"{kind}:{dims}", platform="tpu", **options).devices


def _gpu_devices(kind: str, grid: str):
    plugins = [f"jax-cuda{major}-pjrt" for major in (13, 12) if _version(f"jax-cuda{major}-pjrt")]
    if not plugins:
        version = jax.__version__
        raise InputError(
            f"compiling for {kind} needs jax's CUDA plugin: pip install --no-deps jax-cuda12-plugin=={version} "
            f"jax-cuda12-pjrt=={version}"
        )
    if _version(plugins[0]) != jax.__version__:
        raise InputError(
            f"{plugins[0]} {_version(plugins[0])} is not that of jax {jax.__version__}: "
            f"pip install --no-deps {plugins[0]}=={jax.__version__} and its jax-cuda plugin"
        )
    hosts, _, gpus = grid.rpartition("x")
    target = (TARGETS / f"{kind}.txtpb").read_text()
    return topologies.get_topology_desc(
        platform="cuda", topology=f"1x{hosts or 1}x{gpus}", target_config=target
    ).devices


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_version(package: str, extra: str) -> None:
    """InputError unless the package is there in the version that this jax names for its extra."""
    install = f"pip install '{extra}=={jax.__version__}'"
    found = _version(package)
    if found is None:
        raise InputError(f"{package} is not installed, and compiles for TPUs: {install}")
    pinned = [re.search(rf"^{package}==([\w.*]+)", line) for line in importlib.metadata.requires("jax") or []]
    wanted = next((match.group(1) for match in pinned if match), found)
    if not fnmatch.fnmatchcase(found, wanted):
        raise InputError(f"{package} is {found}, but jax {jax.__version__} goes with {wanted}: {install}")
