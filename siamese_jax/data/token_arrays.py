"""Arrays of token ids that another code base wrote: OLMo's .npy (with or without a NumPy header), nanoGPT's .bin.

They are memory-mapped where they lie, one after the other, and never copied.
"""

import bisect
import dataclasses
import itertools
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from siamese_jax.errors import InputError

ENDINGS = (".npy", ".bin")

_MAGIC = b"\x93NUMPY"
_SHARD_MAGIC, _SHARD_HEADER = 20240520, 1024  # of llm.c and what followed it: 256 int32, then uint16
_PROBE_BYTES = 1 << 16
_BETWEEN, _BETWEEN_BYTES = 62, 1 << 12
_FEWEST_PAIRS = 16


@dataclasses.dataclass(frozen=True)
class TokenArray:
    """A part of a file. offset: in bytes; probe: a checksum of its first, its last and some bytes between them."""

    path: Path
    offset: int
    kind: str  # such as '<u2'
    num_tokens: int
    file_bytes: int
    probe: int

    @classmethod
    def find(cls, path: Path, vocab_size: int) -> "TokenArray":
        """The tokens of a file; vocab_size says how wide they are where the file does not. InputError."""
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                head = file.read(8)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}: check the file and its permissions") from error
        offset, kind = 0, np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
        if head.startswith(_MAGIC):
            offset, kind, size = _numpy_layout(path)
        elif len(head) == 8 and int.from_bytes(head[:4], "little") == _SHARD_MAGIC:
            offset, kind = _SHARD_HEADER, np.dtype("<u2")
        elif kind.itemsize == 2 and _are_halves(path):
            kind = np.dtype("<u4")
        data = size - offset
        if data <= 0 or data % kind.itemsize:
            raise InputError(
                f"{path} has {data} bytes of tokens, not a positive multiple of {kind.itemsize}, the bytes of an "
                f"id of {vocab_size}: it was cut off, or belongs to another tokenizer"
            )
        file_bytes = path.stat().st_size
        return cls(path, offset, kind.str, data // kind.itemsize, file_bytes, _probe(path, file_bytes))

    @classmethod
    def from_json(cls, entry: dict) -> "TokenArray":
        """What `to_json` stored; InputError where the file is not what it was."""
        known = cls(**entry | {"path": Path(entry["path"])})
        size = known.path.stat().st_size if known.path.is_file() else 0
        if size != known.file_bytes or _probe(known.path, size) != known.probe:
            how = (
                "its content differs" if size == known.file_bytes else f"{size} bytes now, {known.file_bytes} then"
            )
            raise InputError(
                f"{known.path} has changed since it was prepared ({how}): put the file back, or remove the store "
                "and prepare again"
            )
        return known

    def to_json(self) -> dict:
        """Plain values."""
        return dataclasses.asdict(self) | {"path": str(self.path)}

    def stamp(self) -> list:
        """What changes when the file does."""
        return [self.to_json(), self.path.stat().st_mtime_ns]

    def map(self) -> np.ndarray:
        """The tokens, memory-mapped, [num_tokens]."""
        try:
            return np.memmap(self.path, self.kind, "r", self.offset, (self.num_tokens,)).view(np.ndarray)
        except (OSError, ValueError) as error:  # gone, or shorter now
            raise InputError(f"cannot read {self.path}: {error}: put the file back") from error


def _numpy_layout(path: Path) -> tuple[int, np.dtype, int]:
    """(offset of the data, their type, where they end)."""
    try:
        array = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path} is damaged or no array of NumPy ({error}): write or fetch it again") from error
    if array.ndim != 1 or array.dtype.kind not in "ui" or not array.size:
        raise InputError(f"{path} is an array {array.shape} of {array.dtype}: tokens are one row of whole numbers")
    return array.offset, array.dtype, array.offset + array.nbytes


def _are_halves(path: Path) -> bool:
    """Whether a file without a header holds ids of four bytes: every second number of two bytes is then 0.

    InputError for ids of eight bytes, which nobody writes without a header.
    """
    with path.open("rb") as file:
        start = file.read(_PROBE_BYTES)
    pairs = np.frombuffer(start[: len(start) // 4 * 4], "<u2").reshape(-1, 2)
    if len(pairs) < _FEWEST_PAIRS or pairs[:, 1].any() or not pairs[:, 0].any():
        return False
    if not pairs[1::2, 0].any():
        raise InputError(f"{path} seems to hold ids of eight bytes: write it as uint16 or uint32")
    return True


def _probe(path: Path, size: int) -> int:
    """A checksum of both ends, and of blocks that are evenly spaced between them."""
    with path.open("rb") as file:
        found = zlib.crc32(file.read(_PROBE_BYTES))
        for number in range(1, _BETWEEN + 1):
            file.seek(size * number // (_BETWEEN + 1))
            found = zlib.crc32(file.read(_BETWEEN_BYTES), found)
        file.seek(max(0, size - _PROBE_BYTES))
        return zlib.crc32(file.read(), found)


class Joined:
    """Arrays one after the other, read by slices like one array [num_tokens]; only what is asked for is copied."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        self._arrays = arrays
        self._ends = list(itertools.accumulate(map(len, arrays)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, where: slice) -> np.ndarray:
        start, stop, step = where.indices(len(self))
        if step != 1:
            raise IndexError(f"tokens are read one after the other, not by steps of {step}")
        parts = []
        for number in range(bisect.bisect_right(self._ends, start), len(self._arrays)):
            array, end = self._arrays[number], self._ends[number]
            first = end - len(array)
            if first >= stop:
                break
            parts.append(array[max(start - first, 0) : stop - first])
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [self._arrays[0][:0]])


def join(arrays: Sequence[TokenArray]) -> np.ndarray | Joined:
    """The tokens of several arrays, mapped, as one."""
    mapped = [array.map() for array in arrays]
    return mapped[0] if len(mapped) == 1 else Joined(mapped)


def cut(
    arrays: list[tuple[str, TokenArray]], end_of_text: int, part: str, fraction: float
) -> list[tuple[str, TokenArray]]:
    """The head ('train') or about the last `fraction` of all tokens ('validation'), cut where a document ends."""
    total = sum(one.num_tokens for _, one in arrays)
    place = _end_of_document(join([one for _, one in arrays]), round((1 - fraction) * total), end_of_text)
    if place is None:
        raise InputError(
            f"{arrays[0][1].path} and what follows it hold one document ({total} tokens): name another source for "
            "validation"
        )
    first, kept = 0, []
    for name, one in arrays:
        start, stop = (first, min(place, first + one.num_tokens)) if part == "train" else (max(place, first), None)
        stop = first + one.num_tokens if stop is None else stop
        if start < stop:
            skipped = (start - first) * np.dtype(one.kind).itemsize
            kept.append((name, dataclasses.replace(one, offset=one.offset + skipped, num_tokens=stop - start)))
        first += one.num_tokens
    return kept


def _end_of_document(tokens, wanted: int, end_of_text: int) -> int | None:
    """The first place from `wanted` on, else the last before it, that follows an end of text; neither 0 nor all."""
    total, step = len(tokens), 1 << 20
    for first in range(max(wanted - 1, 0), total - 1, step):
        found = np.flatnonzero(tokens[first : min(first + step, total - 1)] == end_of_text)
        if len(found):
            return first + int(found[0]) + 1
    for stop in range(min(wanted, total - 1), 0, -step):
        first = max(stop - step, 0)
        found = np.flatnonzero(tokens[first:stop] == end_of_text)
        if len(found):
            return first + int(found[-1]) + 1
    return None
