"""Names of several sources of text: those of a mixture, and those of validation sets."""

import re
from pathlib import Path

from siamese_jax.errors import InputError


def source_names(source: str) -> dict[str, str]:
    """{name: source} of a list by commas. The name is a path's last part, or all of it where two share that."""
    entries = [entry.strip() for entry in source.split(",") if entry.strip()]
    short = [
        entry if entry.startswith("tfds:") else Path(entry).name.partition(".")[0] or entry for entry in entries
    ]
    names = [one if one and short.count(one) == 1 else entry for one, entry in zip(short, entries, strict=True)]
    if len(set(names)) < len(names):
        raise InputError(f"data.source {source!r} names a source twice: name it once and add up its weights")
    return dict(zip(names, entries, strict=True))


def parse_domains(text: str, key: str) -> dict[str, str]:
    """{name: source} of NAME=SOURCE;NAME=SOURCE; InputError, naming the key, for anything else."""
    domains = {}
    for entry in filter(None, map(str.strip, text.split(";"))):
        name, equals, source = (part.strip() for part in entry.partition("="))
        if not (equals and source and re.fullmatch(r"[\w.:-]+", name)):
            raise InputError(
                f"{key} has {entry!r}: it must be NAME=SOURCE;NAME=SOURCE, names of letters, digits and . : - _"
            )
        if name in domains:
            raise InputError(f"{key} names {name!r} twice ({domains[name]} and {source}): use different names")
        domains[name] = source
    return domains
