"""Files of PyTorch weights, read and written tensor by tensor, so that memory holds one tensor at a time.

.safetensors needs no PyTorch. .pt and .bin do: torch.load with weights_only, so that no pickle runs code.
"""

import collections
import errno
import json
import math
import os
import pathlib
import re
import struct
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from siamese_jax.errors import FaultError, InputError
from siamese_jax.interop.keys import Doubled, read_json

Shape = tuple[int, ...]
SAFETENSORS = ".safetensors"
PICKLES = (".pt", ".bin", ".pth")
INDEX = ".index.json"
# What a folder may hold, the first one found counts.
IN_FOLDER = (
    "model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin",
    "model.pt",
)  # fmt: skip
TYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64",
}  # fmt: skip
WRITTEN = {"float32": ("F32", np.float32), "bfloat16": ("BF16", ml_dtypes.bfloat16), "float16": ("F16", np.float16)}
READABLE = ("float32", "bfloat16", "float16")
WRAPPERS = ("module.", "_orig_mod.", "model.")  # of names; what DataParallel, compile and transformers prepend
NESTED = ("state_dict", "model")  # the one key under which some files keep their tensors


def open_weights_file(path: str | os.PathLike) -> "WeightsFile":
    """The weights of a file, of an index of several, or of a folder with one; InputError where there is none."""
    path = pathlib.Path(path)
    if path.is_dir():
        found = [path / name for name in IN_FOLDER if (path / name).is_file()]
        if not found:
            raise InputError(f"{path} has no weights (looked for {', '.join(IN_FOLDER)}): name the file itself")
        path = found[0]
    if not path.is_file():
        raise InputError(f"there is no weights file {path}")
    shards = _read_index(path) if path.name.endswith(INDEX) else {path: None}
    parts = [_open_part(shard, names) for shard, names in shards.items()]
    return WeightsFile(path, parts)


class WeightsFile:
    """Tensors by name: `shapes`, `types` and `size` (bytes) without reading them, `read` one at a time.

    A tensor of a .pt or .bin file is given away: reading it again loads the file again.
    """

    def __init__(self, path: pathlib.Path, parts: list["_Part"]):
        self.path = path
        self._parts: dict[str, tuple[_Part, str]] = {}
        owners = [(name, part) for part in parts for name in part.entries]
        doubled = [name for name, count in collections.Counter(name for name, _ in owners).items() if count > 1]
        if doubled:
            raise InputError(f"{path}: the tensor {doubled[0]} is in two of its files")
        if not owners:
            raise InputError(f"{path} holds no tensors")
        names = _unwrapped([name for name, _ in owners])
        self._parts = {short: (part, name) for short, (name, part) in zip(names, owners, strict=True)}
        entries = {short: part.entries[name] for short, (part, name) in self._parts.items()}
        self.shapes: dict[str, Shape] = {name: shape for name, (_, shape, _) in entries.items()}
        self.types: dict[str, str] = {name: kind for name, (kind, _, _) in entries.items()}
        self.size = sum(size for _, _, size in entries.values())

    def __enter__(self) -> "WeightsFile":
        return self

    def __exit__(self, *error) -> None:
        for part, _ in self._parts.values():
            part.close()

    def check_type(self, name: str) -> None:
        """InputError where a tensor holds no floating-point numbers, or such that float32 would round."""
        kind = self.types[name]
        if kind not in READABLE:
            raise InputError(
                f"{self.path}: {name} is {kind}; parameters here are float32: "
                f"convert it to one of {', '.join(READABLE)}"
            )

    def read(self, name: str) -> np.ndarray:
        """One tensor as float32; InputError as of `check_type`."""
        self.check_type(name)
        part, stored = self._parts[name]
        return part.read(stored)


def _unwrapped(names: list[str]) -> list[str]:
    """The names without the prefixes that all of them have."""
    for prefix in (*WRAPPERS, *WRAPPERS):
        if all(name.startswith(prefix) for name in names):
            short = [name.removeprefix(prefix) for name in names]
            # transformers' own names start with `model.` too, and keep it.
            if prefix != "model." or all(name.startswith("transformer.") for name in short):
                names = short
    return names


def _read_index(path: pathlib.Path) -> dict[pathlib.Path, list[str]]:
    """{file: the names that the index says are in it}."""
    try:
        table = read_json(path.read_text(encoding="utf-8"))["weight_map"]
        shards: dict[pathlib.Path, list[str]] = {}
        for name, file in table.items():
            shards.setdefault(path.parent / file, []).append(name)
    except Doubled as error:
        raise InputError(f"{path}: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not an index of weights (a JSON object with a weight_map)") from error
    for shard in shards:
        if not shard.is_file():
            raise InputError(f"{path} names {shard.name}, which does not exist beside it")
    return shards


def _open_part(path: pathlib.Path, names: list[str] | None) -> "_Part":
    """One file, of which an index wants `names` (None: all that it holds)."""
    if path.suffix == SAFETENSORS:
        part: _Part = _Safetensors(path)
    elif path.suffix in PICKLES:
        part = _Pickle(path)
    else:
        raise InputError(f"{path} is no weights file: known are {SAFETENSORS}, {', '.join(PICKLES)} and *{INDEX}")
    for name in names or ():
        if name not in part.entries:
            raise InputError(f"{path} lacks the tensor {name}, which the index says is in it")
    return part


class _Part:
    """One file: entries, name -> (type, shape, bytes), and its tensors."""

    entries: dict[str, tuple[str, Shape, int]]

    def read(self, name: str) -> np.ndarray:
        raise NotImplementedError

    def close(self) -> None:
        """Lets go of what is held."""


class _Safetensors(_Part):
    """A .safetensors file. Opened anew for every tensor: an open one is mapped, and counts as memory once read."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}
                self.entries = {
                    name: _entry(TYPES.get(found.get_dtype(), found.get_dtype()), found.get_shape())
                    for name, found in slices.items()
                }
            with path.open("rb") as file:
                read_json(file.read(*struct.unpack("<Q", file.read(8))))
        except Doubled as error:
            raise InputError(f"{path}: {error}") from error
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise InputError(f"{path} is not a whole .safetensors file: {_one_line(error)}") from error

    def read(self, name: str) -> np.ndarray:
        try:
            with safetensors.safe_open(self._path, framework="numpy") as file:
                return np.asarray(file.get_tensor(name)).astype(np.float32, copy=False)
        except (safetensors.SafetensorError, OSError) as error:
            raise InputError(f"{self._path}: {name} cannot be read: {_one_line(error)}") from error


class _Pickle(_Part):
    """A .pt or .bin file. PyTorch reads it whole, and every tensor is let go once it is given away."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._tensors: dict[str, Any] | None = self._load()
        self.entries = {
            name: _entry(str(tensor.dtype).removeprefix("torch."), tensor.shape)
            for name, tensor in self._tensors.items()
        }

    def _load(self) -> dict[str, Any]:
        try:
            import torch
        except ImportError as error:
            raise InputError(
                f"reading {self._path} needs PyTorch: pip install torch (or save it as .safetensors)"
            ) from error
        try:
            found = torch.load(self._path, map_location="cpu", weights_only=True)
        except MemoryError:
            raise
        except Exception as error:
            raise InputError(
                f"{self._path} cannot be read as a file of tensors alone: {_refusal(error)}"
            ) from error
        for key in NESTED:
            if isinstance(found, Mapping) and list(found) == [key] and isinstance(found[key], Mapping):
                found = found[key]
        if not isinstance(found, Mapping):
            raise InputError(f"{self._path} holds a {type(found).__name__}, not a table of tensors by name")
        for name, tensor in found.items():
            if not isinstance(name, str):
                raise InputError(f"{self._path} names a tensor {name!r}, a {type(name).__name__}, not a string")
            if not isinstance(tensor, torch.Tensor):
                raise InputError(
                    f"{self._path} holds {name!r}, a {type(tensor).__name__}, beside tensors: "
                    "save the state dict alone"
                )
            if tensor.layout is not torch.strided or tensor.device.type != "cpu":
                raise InputError(
                    f"{self._path} holds {name!r}, a tensor of layout {tensor.layout} on {tensor.device}: "
                    "save it as a dense one with values"
                )
        return dict(found)

    def read(self, name: str) -> np.ndarray:
        import torch

        if self._tensors is None or name not in self._tensors:
            self._tensors = None  # before the file is in memory again
            self._tensors = self._load()
        tensor = self._tensors.pop(name).detach()
        array = tensor.to(torch.float32).contiguous().numpy()
        array.flags.writeable = False  # its memory may be another tensor's too, and a copy would be one too many
        return array

    def close(self) -> None:
        self._tensors = None


def _entry(kind: str, shape) -> tuple[str, Shape, int]:
    shape = tuple(int(size) for size in shape)
    digits = re.search(r"\d+", kind)  # the first: float8_e4m3fn has others
    return kind, shape, math.prod(shape) * (int(digits[0]) if digits else 8) // 8


def _refusal(error: Exception) -> str:
    """Why torch.load refused; its own text fills pages, and advises to run whatever the file holds."""
    text = str(error)
    if found := re.search(r"GLOBAL (\S+)", text):
        return f"it holds {found[1][:60]}, which is no tensor: save the state dict alone"
    text = text.rpartition("WeightsUnpickler error:")[2].partition("Check the documentation")[0]
    return f"it is damaged, or no PyTorch file: {' '.join([type(error).__name__, *text.split()])[:90]}"


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 120 else f"{text[:117]}..."


class SafetensorsWriter:
    """Writes a .safetensors file tensor by tensor, in any order; the file appears when all are written.

    The library itself takes all tensors at once from memory. The format: the length of a JSON header in
    eight bytes, the header (name -> type, shape, place), the data.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        shapes: Mapping[str, Shape],
        dtype: str = "float32",
        metadata: Mapping[str, str] | None = None,
    ):
        self._path, self._shapes = pathlib.Path(path), dict(shapes)
        self._part = self._path.with_name(f".{self._path.name}.{os.getpid()}.part")
        if "__metadata__" in self._shapes:
            raise ValueError("the format has no tensor of the name __metadata__")
        self._dtype, (self._code, self._type) = dtype, WRITTEN[dtype]
        header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
        place = 0
        for name, shape in self._shapes.items():
            size = int(np.prod(shape, dtype=np.int64)) * np.dtype(self._type).itemsize
            header[name] = {"dtype": self._code, "shape": list(shape), "data_offsets": [place, place + size]}
            place += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header = struct.pack("<Q", len(text)) + text
        self._places = {name: len(self._header) + header[name]["data_offsets"][0] for name in self._shapes}
        self._missing = set(self._shapes)
        self._size = len(self._header) + place

    def __enter__(self) -> "SafetensorsWriter":
        if os.path.lexists(self._path):
            raise InputError(f"{self._path} exists: it is never written over; name another file or remove it")
        try:
            self._file = self._part.open("wb")
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._full(error) from error
            raise InputError(f"cannot write {self._path}: {error.strerror}: choose another place") from error
        try:
            self._put(0, self._header)
        except BaseException:
            self._discard()
            raise
        return self

    def write(self, name: str, array: np.ndarray) -> None:
        """One tensor, float32; rounded to nearest where the file's type is narrower."""
        if name not in self._missing or tuple(array.shape) != tuple(self._shapes[name]):
            raise ValueError(f"{name} of shape {array.shape} is not among the tensors still to write")
        with np.errstate(over="ignore"):
            narrow = np.ascontiguousarray(array).astype(self._type, copy=False).reshape(array.shape)
        if self._dtype == "float16" and not np.array_equal(np.isinf(narrow), np.isinf(array)):
            largest = np.abs(array[np.isfinite(array)]).max()
            raise InputError(f"{name} has a value beyond float16 ({largest:g}): write bfloat16 or float32")
        self._put(self._places[name], narrow.reshape(-1).view(np.uint8))
        self._missing.remove(name)

    def _put(self, place: int, data) -> None:
        try:
            self._file.seek(place)
            self._file.write(data)
        except OSError as error:
            raise self._full(error) from error

    def _full(self, error: OSError) -> FaultError:
        return FaultError(f"cannot write {self._path}: {error.strerror}: free space, then start again")

    def __exit__(self, kind, error, trace) -> None:
        if error is None and self._missing:
            self._discard()
            raise ValueError(f"{len(self._missing)} tensors were not written, {min(self._missing)} among them")
        if error is not None:
            self._discard()
            return
        try:
            self._file.truncate(self._size)
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._part.rename(self._path)
        except OSError as fault:
            self._discard()
            raise self._full(fault) from fault
        except BaseException:
            self._discard()
            raise

    def _discard(self) -> None:
        try:
            self._file.close()
        except OSError:
            pass  # what a full disk did not take is thrown away anyhow
        self._part.unlink(missing_ok=True)
