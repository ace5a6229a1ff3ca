"""What `python -m siamese_jax.data.prepare` does; see there."""

import hashlib
import json
import os
import time
from pathlib import Path

from absl import flags

from siamese_jax import program
from siamese_jax.data import token_arrays
from siamese_jax.data.build import build_store, index_arrays
from siamese_jax.data.inspection import format_inspection, inspect_store
from siamese_jax.data.prepared import PARTS, find_arrays, is_prepared, is_token_arrays, own_part
from siamese_jax.data.sources import SPLITS, Reading, find_corpus
from siamese_jax.data.store import TokenStore, is_store, partial_of, read_meta
from siamese_jax.data.tokenizer import make_tokenizer
from siamese_jax.data.train_tokenizer import train_tokenizer
from siamese_jax.errors import InputError

BOTH = "both"
TOKENIZER = "tokenizer.json"
_FEW_BYTES = 8 << 20  # below, starting processes takes longer than they save
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
    flags.DEFINE_integer("workers", 0, "Processes that tokenise; 0 = one for each core.", 0)
    flags.DEFINE_bool("inspect", False, "Show what the stores hold.")
    flags.DEFINE_integer("samples", 3, "Documents that --inspect shows the beginning of.", 0)
    program.define_json_flag()


def main() -> None:
    given = flags.FLAGS
    out = Path(program.required("out")).expanduser()
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
    tokenizer = _choose_tokenizer(out)
    found = {
        part: _find(part, tokenizer) for part in parts
    }  # all that can be wrong with the input, before any work
    done = {part: _make(part, path, tokenizer, *found[part]) for part, path in parts.items()}
    return {
        "out": str(out),
        "tokenizer": tokenizer.spec,
        "vocab_size": tokenizer.vocab_size,
        "parts": done,
    }


def _check_layout(out: Path) -> None:
    """InputError where --out holds stores of the other layout, or something else in place of a part."""
    both = flags.FLAGS.split == BOTH
    if both and (is_store(out) or partial_of(out).exists()):
        raise InputError(
            f"{out} holds one store, not a train/ and a validation/: choose another --out or say --split"
        )
    if not both and any(is_store(out / part) or partial_of(out / part).exists() for part in PARTS):
        raise InputError(f"{out} holds train/ and validation/: choose another --out, or leave --split out")


def _choose_tokenizer(out: Path):
    given = flags.FLAGS
    if not given.train_tokenizer:
        return make_tokenizer(given.tokenizer, given.end_of_text)
    for name in ("tokenizer", "end_of_text"):
        if given[name].present:
            raise InputError(f"--train_tokenizer makes the tokenizer: leave --{name} out")
    if is_token_arrays(given.source):
        raise InputError(
            f"{given.source} holds tokens, not text: name the tokenizer it was made with (--tokenizer)"
        )
    path = out / TOKENIZER
    if not path.exists():
        own = "train" if given.split in (BOTH, "train") else given.split
        train_tokenizer(_corpus(own), given.field, given.train_tokenizer, path, program.say_here)
    tokenizer = make_tokenizer(str(path))
    if tokenizer.vocab_size > given.train_tokenizer:
        raise InputError(
            f"{path} is there and has {tokenizer.vocab_size} tokens, not {given.train_tokenizer}: remove it, or "
            f"give --tokenizer={path} in place of --train_tokenizer"
        )
    return tokenizer


def _corpus(part: str):
    given = flags.FLAGS
    return find_corpus(
        given.source, part, given.validation_source, given.validation_fraction, unique=given.deduplicate,
        data_dir=given.data_dir,
    )  # fmt: skip


def _find(part: str, tokenizer):
    """(arrays or a corpus, what meta.json tells of their origin)."""
    given = flags.FLAGS
    source, own = given.source, part
    if part == "validation" and given.validation_source:
        source, own = given.validation_source, own_part(given.validation_source)
    elif given.validation_source:
        own = "all"
    if is_prepared(source):
        raise InputError(f"{source} is prepared already: set data.source to it")
    if is_token_arrays(source):
        for name in ("deduplicate", "field", "workers"):
            if given[name].present:
                raise InputError(f"--{name} is about text, but {source} holds tokens: leave it out")
        found = find_arrays(source, tokenizer, own, given.validation_fraction)
        stamp = [(name, one.to_json()) for name, one in found]
    else:
        found = _corpus(part)
        stamp = [found.stamp(), found.part.name, found.part.fraction, found.part.unique, given.field]
    digest = hashlib.sha256(json.dumps(stamp).encode()).hexdigest()[:16]
    return found, {"source": source, "part": own, "digest": digest}


def _make(part: str, path: Path, tokenizer, found, origin: dict) -> dict:
    """The store of a part; what is there is taken if it was made from the same."""
    given, began = flags.FLAGS, time.monotonic()
    if is_store(path) and not partial_of(path).exists():
        meta = read_meta(path)
        if meta.get("origin") != origin or meta["tokenizer"]["fingerprint"] != tokenizer.fingerprint:
            raise InputError(
                f"{path} was made from {meta.get('origin', {}).get('source', 'something else')} with "
                f"{meta['tokenizer']['name']}, and its files, options or tokenizer were others than now: remove it "
                "or choose another --out"
            )
        return _told(TokenStore.open(path), None)
    if partial_of(path).exists():
        program.say_here(f"{path} was begun before: what is done is checked and kept")
    if isinstance(found, list) and isinstance(found[0][1], token_arrays.TokenArray):
        store = index_arrays(found, tokenizer, path, origin=origin)
    else:
        reading = Reading()
        store = build_store(
            found.documents(given.field, reading), tokenizer, path, workers=_workers(found),
            resume=True, reading=reading, total=found.size, unit=found.unit, origin=origin,
        )  # fmt: skip
    return _told(store, time.monotonic() - began)


def _workers(corpus) -> int:
    small = corpus.unit == "B" and corpus.size < _FEW_BYTES
    return flags.FLAGS.workers or (1 if small else os.cpu_count() or 1)


def _told(store: TokenStore, seconds: float | None) -> dict:
    """What the result tells of a store; seconds: that its making took, None where it was there."""
    return {
        "path": str(store.path),
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
    """The tokenizer that a store was made with; InputError where it cannot be had any more."""
    made = store.meta["tokenizer"]
    tokenizer = make_tokenizer(made.get("spec", made["name"]), made.get("end_of_text", ""))
    if tokenizer.fingerprint != made["fingerprint"]:
        raise InputError(f"{tokenizer.spec} has changed since {store.path} was made: restore the file")
    return tokenizer


def as_text(result: dict) -> str:
    """The result, and how to go on."""
    lines = []
    for name, part in result["parts"].items():
        took = "was there already" if part["seconds"] is None else f"{part['seconds']:.1f} s"
        duplicates = part["duplicates_left_out"]
        left_out = f", {duplicates:,} duplicates left out" if duplicates else ""
        lines.append(
            f"{name}: {part['documents']:,} documents, {part['tokens']:,} tokens, {part['bytes']:,} bytes{left_out}"
            f" in {part['path']} ({took}, fingerprint {part['fingerprint'][:16]})"
        )
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
