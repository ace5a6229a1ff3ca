"""What `python -m siamese_jax.data.prepare` does; see there."""

import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from siamese_jax import program
from siamese_jax.data.build import build_store
from siamese_jax.data.index import index_arrays
from siamese_jax.data.inspection import format_inspection, inspect_store
from siamese_jax.data.prepared import PARTS, find_arrays, is_prepared, is_token_arrays, own_part
from siamese_jax.data.sources import SPLITS, Reading, find_corpus
from siamese_jax.data.store import TokenStore, is_store, partial_of, read_meta
from siamese_jax.data.token_arrays import TokenArray
from siamese_jax.data.tokenizer import make_tokenizer
from siamese_jax.data.train_tokenizer import check_size, train_tokenizer
from siamese_jax.data.writing import check_begun, place_of, tidy
from siamese_jax.errors import InputError

BOTH = "both"
TOKENIZER = "tokenizer.json"
_FEW_BYTES = 64 << 20  # below, starting processes takes longer than they save
flags.disclaim_key_flags()  # the flags belong to the program, and to its --help


def define_flags() -> None:
    """The options of the program."""
    flags.DEFINE_string("source", "", "What to read; see above.")
    flags.DEFINE_string("out", None, "Folder of the stores.")
    flags.DEFINE_enum("split", BOTH, (BOTH, *SPLITS), "Parts to prepare; one part lies in --out itself.")
    flags.DEFINE_string("validation_source", "", "Another source for validation; '' holds out a part of --source.")
    flags.DEFINE_float("validation_fraction", 0.05, "Share of the documents that is held out.")
    flags.DEFINE_string("field", "text", "Field of .jsonl, .parquet and TFDS that holds the text.")
    flags.DEFINE_string("data_dir", "", "Folder of TFDS; its usual one unless given.")
    flags.DEFINE_string("tokenizer", "bytes", "Tokenizer; see above.")
    flags.DEFINE_string("end_of_text", "", "Token that closes a document; the usual ones are found.")
    flags.DEFINE_integer("train_tokenizer", 0, "Size of a vocabulary to train; 0 = take --tokenizer.", 0)
    flags.DEFINE_bool("deduplicate", False, "Leave out documents whose text has come before.")
    flags.DEFINE_integer("workers", 0, "Processes that tokenise; 0 = one for each core, or one for little text.", 0)
    flags.DEFINE_bool("inspect", False, "Show what the stores hold.")
    flags.DEFINE_integer("samples", 3, "Documents that --inspect shows the beginning of.", 0)
    program.define_json_flag()


def main() -> None:
    given = flags.FLAGS
    out = Path(os.path.realpath(os.path.expanduser(program.required("out"))))
    if not given.source and not given.inspect:
        raise InputError(
            "--source is missing: give it, or see --help (with --inspect alone, what is there is shown)"
        )
    result = prepare(out) if given.source else {"out": str(out), "parts": _parts_there(out)}
    if given.inspect:
        for name, part in result["parts"].items():
            store = TokenStore.open(part["path"])
            result["parts"][name] = part | {"inspection": inspect_store(store, _tokenizer_of(store), given.samples)}
    program.answer(result, as_text)


def prepare(out: Path) -> dict:
    """Makes what is not there yet of --out."""
    given = flags.FLAGS
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file: name a folder")
    parts = {part: out / part for part in PARTS} if given.split == BOTH else {given.split: out}
    _check_layout(out)
    # All that can be wrong with the input, before any work; of text a tokenizer is trained only after that.
    tokenizer = None if given.train_tokenizer else make_tokenizer(given.tokenizer, given.end_of_text)
    found = {part: _find(part, tokenizer) for part in parts}
    for part, path in parts.items():
        _check_same_input(path, found[part].origin)
    if tokenizer is None:
        tokenizer = _trained_tokenizer(out, parts.values())
    for path in parts.values():
        _check_same_tokenizer(path, tokenizer)
    done = {part: _make(path, tokenizer, found[part]) for part, path in parts.items()}
    return {
        "out": str(out),
        "tokenizer": tokenizer.spec,
        "vocab_size": tokenizer.vocab_size,
        "parts": done,
    }


def _check_layout(out: Path) -> None:
    """InputError where flags exclude each other, and where --out holds stores of the other layout."""
    if flags.FLAGS.train_tokenizer:
        check_size(flags.FLAGS.train_tokenizer)
        for name in ("tokenizer", "end_of_text"):
            if flags.FLAGS[name].present:
                raise InputError(f"--train_tokenizer makes the tokenizer: leave --{name} out")
    both = flags.FLAGS.split == BOTH
    if both and (is_store(out) or partial_of(out).exists()):
        raise InputError(
            f"{out} holds one store, not a train/ and a validation/: choose another --out or say --split"
        )
    if not both and any(is_store(out / part) or partial_of(out / part).exists() for part in PARTS):
        raise InputError(f"{out} holds train/ and validation/: choose another --out, or leave --split out")


def _trained_tokenizer(out: Path, stores: Iterable[Path]):
    """The tokenizer of --train_tokenizer; the one in --out if it was trained on the same."""
    given = flags.FLAGS
    size, path = given.train_tokenizer, out / TOKENIZER if given.split == BOTH else _beside(out)
    record = path.with_suffix(".trained_on.json")
    part = "train" if given.split in (BOTH, "train") else given.split
    corpus = _corpus(part)
    of_now = {"size": size, "source": given.source, "part": part, "digest": _digest(_stamp_of(corpus))}
    if not path.exists():
        if made := next((store for store in stores if _is_there(store)), None):
            raise InputError(f"{made} is there, but its tokenizer {path} is gone: put it back, or remove the store")
        train_tokenizer(corpus, given.field, size, path, record, of_now, program.say_here)
        return make_tokenizer(str(path))
    try:
        before = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = None
    if before != of_now:
        was = f"was trained to {before['size']} tokens on {before['source']}" if _is_record(before) else "is there"
        raise InputError(
            f"{path} {was}, and not on the same files and options as now ({size} tokens): remove it, choose "
            f"another --out, or give --tokenizer={path} in place of --train_tokenizer"
        )
    return make_tokenizer(str(path))


def _beside(store: Path) -> Path:
    """Where the tokenizer of a store lies whose folder is --out itself."""
    return store.with_name(f"{store.name}.{TOKENIZER}")


def _is_record(value) -> bool:
    return isinstance(value, dict) and {"size", "source"} <= value.keys()


def _corpus(part: str):
    given = flags.FLAGS
    return find_corpus(
        given.source, part, given.validation_source, given.validation_fraction, unique=given.deduplicate,
        data_dir=given.data_dir,
    )  # fmt: skip


class Found(NamedTuple):
    """What is to be made: of a corpus, or of [(name, array)]. origin: what meta.json tells of it."""

    corpus: Any
    arrays: list[tuple[str, TokenArray]]
    origin: dict


def _find(part: str, tokenizer) -> Found:
    """tokenizer: None where it is still to be trained."""
    given = flags.FLAGS
    source, own = given.source, part
    if part == "validation" and given.validation_source:
        source, own = given.validation_source, own_part(given.validation_source)
    elif given.validation_source:
        own = "all"
    if is_prepared(source):
        raise InputError(f"{source} is prepared already: set data.source to it")
    corpus, arrays = None, []
    if is_token_arrays(source):
        for name in ("deduplicate", "field", "workers"):
            if given[name].present:
                raise InputError(f"--{name} is about text, but {source} holds tokens: leave it out")
        if tokenizer is None:
            raise InputError(f"{source} holds tokens, not text: name the tokenizer it was made with (--tokenizer)")
        arrays = find_arrays(source, tokenizer, own, given.validation_fraction)
        stamp = [[name, *one.stamp()] for name, one in arrays]
    else:
        corpus = _corpus(part)
        stamp = _stamp_of(corpus)
    return Found(corpus, arrays, {"source": source, "part": own, "digest": _digest(stamp)})


def _stamp_of(corpus) -> list:
    part = corpus.part
    return [corpus.stamp(), part.name, part.fraction, part.unique, flags.FLAGS.field]


def _digest(stamp: list) -> str:
    return hashlib.sha256(json.dumps(stamp).encode()).hexdigest()[:16]


def _is_there(path: Path) -> bool:
    return is_store(path) and not partial_of(path).exists()


def _check_same_input(path: Path, origin: dict) -> None:
    """InputError where a store would be written over, or was made from something else."""
    if not _is_there(path):
        place_of(path)
        check_begun(partial_of(path), origin=origin)
        return
    meta = read_meta(path)
    if meta.get("origin") != origin:
        raise InputError(
            f"{path} was made from {meta.get('origin', {}).get('source', 'something else')}, and its files or "
            "options were others than now: remove it or choose another --out"
        )


def _check_same_tokenizer(path: Path, tokenizer) -> None:
    if not _is_there(path):
        check_begun(partial_of(path), tokenizer=tokenizer.fingerprint)
        return
    made = read_meta(path)["tokenizer"]
    if made["fingerprint"] != tokenizer.fingerprint:
        raise InputError(
            f"{path} was made with the tokenizer {made.get('spec', made['name'])} ({made['fingerprint']}), not "
            f"with {tokenizer.spec} ({tokenizer.fingerprint}): remove it or choose another --out"
        )


def _make(path: Path, tokenizer, found: Found) -> dict:
    """The store of a part; what is there was made from the same."""
    given, began = flags.FLAGS, time.monotonic()
    if _is_there(path):
        tidy(path)
        return _told(TokenStore.open(path), None)
    if partial_of(path).exists():
        program.say_here(f"{path} was begun before: what is done is checked and kept")
    if found.arrays:
        whole = found.origin["part"] == "all"
        store = index_arrays(found.arrays, tokenizer, path, origin=found.origin, whole=whole)
    else:
        corpus, reading = found.corpus, Reading()
        store = build_store(
            corpus.documents(given.field, reading), tokenizer, path, workers=_workers(corpus),
            resume=True, reading=reading, total=corpus.size, unit=corpus.unit, origin=found.origin,
        )  # fmt: skip
    return _told(store, time.monotonic() - began)


def _workers(corpus) -> int:
    small = corpus.unit == "B" and corpus.size < _FEW_BYTES
    return flags.FLAGS.workers or (1 if small else os.cpu_count() or 1)


def _told(store: TokenStore, seconds: float | None) -> dict:
    """What the result tells of a store; seconds: that its making took, None where it was there."""
    return {
        "path": str(store.path),
        "source": store.meta.get("origin", {}).get("source", ""),
        "documents": store.num_documents,
        "tokens": store.num_tokens,
        "bytes": store.num_bytes,
        "duplicates_left_out": store.meta.get("duplicates", 0),
        "fingerprint": store.fingerprint,
        "seconds": seconds,
    }


def _parts_there(out: Path) -> dict:
    if is_store(out) or partial_of(out).exists() or not is_prepared(str(out)):
        return {"all": _told(TokenStore.open(out), None)}
    parts = [part for part in PARTS if is_store(out / part) or partial_of(out / part).exists()]
    return {part: _told(TokenStore.open(out / part), None) for part in parts}


def _tokenizer_of(store: TokenStore):
    """The tokenizer that a store was made with, from its place or from beside the store; InputError without it."""
    made = store.meta["tokenizer"]
    spec = made.get("spec", made["name"])
    path = store.path.absolute()
    beside = [path / TOKENIZER, path.parent / TOKENIZER, _beside(path)]
    reason = None
    for one in (spec, *(str(path) for path in beside if path.exists())):
        try:
            tokenizer = make_tokenizer(one, made.get("end_of_text", ""))
        except InputError as error:
            reason = reason or error
            continue
        if tokenizer.fingerprint == made["fingerprint"]:
            return tokenizer
    why = str(reason) if reason else f"{spec} has changed since {store.path} was made: restore the file"
    raise InputError(f"{why} (the tokenizer of {store.path} is {made['fingerprint']})")


def as_text(result: dict) -> str:
    """The result, and how to go on."""
    lines = []
    for name, part in result["parts"].items():
        took = "was there already" if part["seconds"] is None else f"{part['seconds']:.1f} s"
        lines.append(
            f"{name}: {part['documents']:,} documents, {part['tokens']:,} tokens, {part['bytes']:,} bytes"
            f" in {part['path']} ({took}, fingerprint {part['fingerprint'][:16]})"
        )
    # Two parts of one stream leave the same ones out, which are in neither.
    duplicates = dict.fromkeys((part["source"], part["duplicates_left_out"]) for part in result["parts"].values())
    lines += [f"{number:,} duplicates left out of {source}" for source, number in duplicates if number]
    for part in result["parts"].values():
        if "inspection" in part:
            lines += ["", format_inspection(part["inspection"])]
    if "tokenizer" in result:
        lines += [
            "train on it:  python train.py --config=CONFIG --workdir=DIR "
            f"--config.data.source={result['out']} --config.data.tokenizer={result['tokenizer']} "
            f"--config.model.vocab_size={result['vocab_size']}",
        ]
    return "\n".join(lines)
