"""Checkpoints written and read array by array, for weights that should not be in memory twice.

On disk they are like all others. One process does this: it is for converters, not for training.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import type_handlers

from siamese_jax.checkpoint import arrays as bits
from siamese_jax.checkpoint import seal as seals
from siamese_jax.checkpoint.seal import one_line
from siamese_jax.errors import FaultError, InputError

LOG = logging.getLogger(__name__)
# Orbax would make every array one chunk, compressed as a whole: the largest array three times in memory.
CHUNK_BYTES = 64 << 20


class _Lazy:
    """An array that is made when its turn to be written comes."""

    def __init__(self, name: str, leaf: jax.ShapeDtypeStruct, read: Callable[[str], np.ndarray]):
        self.name, self.shape, self.dtype, self._read = name, leaf.shape, np.dtype(leaf.dtype), read
        self.sum = self.failure = None

    def make(self) -> np.ndarray:
        try:
            array = self._read(self.name)
            if array.shape != self.shape or array.dtype != self.dtype:
                raise ValueError(f"{self.name} is {array.dtype}{array.shape}, not {self.dtype}{self.shape}")
        except BaseException as failure:
            self.failure = failure
            raise
        self.sum = host_bit_sum(array)
        return array


class _LazyHandler(type_handlers.NumpyHandler):
    """Orbax's handler of numpy arrays, one array after the other."""

    def __init__(self):
        super().__init__(deepcopy_host_arrays=False)

    async def serialize(self, values, infos, args=None):
        for value, info, arg in zip(values, infos, args or [ocp.SaveArgs()] * len(values), strict=True):
            for commit in await super().serialize([value.make()], [info], [arg]):
                await asyncio.to_thread(commit.result)
        return []


def host_bit_sum(array: np.ndarray) -> int:
    """`arrays.bit_sum` of a numpy array, without a copy of it."""
    word = {1: np.uint8, 2: np.uint16}.get(array.dtype.itemsize, np.uint32)
    words = np.ascontiguousarray(array).reshape(-1).view(word)
    return int(np.sum(words, dtype=np.uint64)) & 0xFFFFFFFF


def write_weights(folder, step: int, shapes: Any, read: Callable[[str], np.ndarray], about: Mapping) -> None:
    """Writes the checkpoint `step`, which must not exist, from `read`, called once for every array's name.

    `shapes` is a tree of ShapeDtypeStructs; names are its paths ('params/layers/mlp/up/kernel'). What `read`
    raises comes through; FaultError where the disk does not take it. Neither leaves anything behind.
    """
    folder = epath.Path(folder).absolute()
    about = json.loads(json.dumps(dict(about)))  # fails before the work, not after it
    seals.quiet_orbax()
    leaves = {name: _Lazy(name, leaf, read) for name, leaf in bits.named(shapes).items()}
    if (folder / str(step)).exists():
        raise InputError(f"checkpoint {step} exists in {folder}: name another folder")
    saving = folder / f"{step}.saving"
    registry = type_handlers.create_type_handler_registry((_Lazy, _LazyHandler()))
    save_args = {name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for name in leaves}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry)) as writer:
            writer.save(saving, args=ocp.args.PyTreeSave(leaves, save_args=save_args), force=True)
        table = {name: bits.entry(leaf) | {"sum": leaf.sum} for name, leaf in leaves.items()}
        seals.write(saving, about, table)
        saving.rename(folder / str(step))
    except BaseException as error:
        for path in folder.iterdir() if folder.exists() else []:
            if path.name.startswith(f"{step}.saving"):  # Orbax's own unfinished folder has a longer name
                path.rmtree()
        failure = next((leaf.failure for leaf in leaves.values() if leaf.failure is not None), None)
        if failure is not None:
            raise failure from None
        if not isinstance(error, Exception):
            raise
        raise FaultError(f"checkpoint {step} could not be saved in {folder} ({one_line(error)})") from error


def _stored_shape(entry: Mapping) -> jax.ShapeDtypeStruct:
    """Of the words, where `entry` is of random keys."""
    if "random_key" not in entry:
        return jax.ShapeDtypeStruct(tuple(entry["shape"]), entry["dtype"])
    words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=entry["random_key"])))
    return jax.ShapeDtypeStruct((*entry["shape"], *words.shape), words.dtype)


class OpenWeights:
    """A sound checkpoint: `step`, `about`, `shapes` (name -> ShapeDtypeStruct), and its arrays one at a time."""

    def __init__(self, folder: epath.Path, step: int, seal: Mapping):
        self.step, self.about, self._table = step, seal["about"], seal["arrays"]
        self._folder = folder / str(step)
        self.shapes = {name: _stored_shape(entry) for name, entry in self._table.items()}
        self._reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())

    def __enter__(self) -> "OpenWeights":
        return self

    def __exit__(self, *error) -> None:
        self._reader.close()

    def read(self, name: str) -> np.ndarray:
        """One array, held against its bit sum; InputError if it is not what was saved."""
        places = {name: ocp.RestoreArgs(restore_type=np.ndarray)}
        wanted = {name: self.shapes[name]}
        try:
            array = self._reader.restore(
                self._folder, args=ocp.args.PyTreeRestore(wanted, places, partial_restore=True)
            )[name]
        except MemoryError:
            raise
        except Exception as error:
            raise InputError(f"checkpoint {self._folder} is broken ({name}: {one_line(error)})") from error
        if host_bit_sum(array) != self._table[name]["sum"]:
            raise InputError(f"checkpoint {self._folder} is broken ({name} is altered)")
        return array


def open_weights(folder, step: int | None = None, *, log: Callable[[str], None] = LOG.warning) -> OpenWeights:
    """The newest sound checkpoint in `folder`, or that of `step`; its files are verified here, once.

    InputError if there is none, the one asked for is broken, or none is sound. `log` gets one line for each
    broken one passed over.
    """
    folder = epath.Path(folder).absolute()
    seals.quiet_orbax()
    failure = f"no checkpoint asked for in {folder} is sound"
    return OpenWeights(folder, *seals.newest_seal(folder, step, seals.verified, failure, log))
