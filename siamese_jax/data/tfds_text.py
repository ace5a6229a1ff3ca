"""Text of TensorFlow Datasets as a corpus, read example by example without TensorFlow."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from siamese_jax.data.sources import Part, Reading, checked
from siamese_jax.data.tfds_builder import NOT_TRAINING, find_builder, how_to_prepare
from siamese_jax.errors import InputError

_BLOCK = 256  # examples read at a time


@dataclass(frozen=True)
class TfdsCorpus:
    """The examples of a split in their order, and the part of them that is meant."""

    name: str
    examples: Any
    version: str
    part: Part
    folder: str  # of its files
    unit = "example"

    @property
    def size(self) -> int:
        """Examples of the split."""
        return len(self.examples)

    def stamp(self) -> list:
        """What changes when the data set does."""
        files = sorted(path for path in Path(self.folder).iterdir() if path.is_file())
        stats = [(path.name, path.stat()) for path in files]
        return ["tfds", self.version, len(self.examples), *((name, s.st_size, s.st_mtime_ns) for name, s in stats)]

    def documents(self, field: str = "text", reading: Reading | None = None) -> Iterator[tuple[str, str]]:
        """Yields (name, text); InputError for a missing field, one that is no text, and broken files."""
        reading = reading or Reading()
        return self.part.of(self._all(field, reading), reading)

    def _all(self, field: str, reading: Reading) -> Iterator[tuple[str, str]]:
        for first in range(0, len(self.examples), _BLOCK):
            numbers = range(first, min(first + _BLOCK, len(self.examples)))
            try:
                block = self.examples.__getitems__(list(numbers))
            except Exception as error:  # whatever the readers of broken files bring up
                reason = " ".join(str(error).split())[:90]
                raise InputError(f"{self.name}, examples {first} and on, cannot be read: {reason}") from error
            for number, example in zip(numbers, block, strict=True):
                yield self.name, _text_of(example, field, f"{self.name}, example {number}")
            reading.place = numbers.stop


def _text_of(example: dict, field: str, place: str) -> str:
    if field not in example:
        names = ", ".join(f'"{name}"' for name in example)
        raise InputError(f'{place} has no field "{field}"; its fields are {names}: name one of them as field')
    value = example[field]
    value = value.item() if getattr(value, "ndim", None) == 0 else value
    if isinstance(value, str):
        return value
    if not isinstance(value, bytes):
        raise InputError(
            f'{place}: field "{field}" is a {type(value).__name__}, not a string: name a field with text'
        )
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f'{place}: field "{field}" is not UTF-8 at byte offset {error.start}: mend the data set'
        ) from error


def find_tfds_text(source: str, data_dir: str, part: Part, whole: str = "") -> TfdsCorpus:
    """The corpus of 'tfds:NAME', 'tfds:NAME:SPLIT' (any split of TFDS, as train[:10%]) or of a prepared folder.

    With a SPLIT, `part` is of its examples; else of the set's own splits where it has some beside train.
    whole: the split that is meant by all of a set, '' = every one. InputError at once for what is unknown or not
    prepared.
    """
    plain, split = source, ""
    if source.startswith("tfds:"):
        plain, _, split = source.removeprefix("tfds:").partition(":")
        plain = f"tfds:{plain}"
    builder = find_builder(plain, data_dir)
    splits = list(builder.info.splits)
    if not split:
        own = [name for name in NOT_TRAINING if name in splits]
        if "train" not in splits and not own:
            raise InputError(f"{source} has the splits {', '.join(splits) or 'none'}: name one, as {plain}:SPLIT")
        if part.name == "all":
            split = whole or "+".join(splits)
        elif own:
            split, part = own[0] if part.name == "validation" else "train", Part(unique=part.unique)
        else:
            split = "train"
    try:
        examples = builder.as_data_source(split=split)
        length = len(examples)
    except Exception as error:  # an unknown split, another file format, files that are missing or broken
        reason = " ".join(str(error).split())[:90]
        raise InputError(
            f"{source}: the split {split!r} cannot be read ({reason}); its splits are {', '.join(splits)}; "
            f"{how_to_prepare(builder.name, data_dir)}"
        ) from error
    if not length:
        raise InputError(f"{source}: the split {split!r} has no example: name another one")
    version = f"{builder.data_path} {builder.name} {builder.info.config_name or ''} {builder.version} {split}"
    return TfdsCorpus(f"{plain} {split}", examples, version, checked(part), str(builder.data_path))
