"""The seal of a checkpoint, `about.json`: what the caller tells of the run, the arrays, a CRC-32 per file.

It guards itself too: read and written again, it must give the same text, checksum and spaces included.
"""

import json
import logging
import zlib

import jax
from etils import epath

from siamese_jax.errors import InputError

LOG = logging.getLogger(__name__)
SEAL = "about.json"
# With several processes, the first one alone reads the files back to seal them. Larger ones would cross the
# network twice; they are array data, which the bit sums guard as well.
READ_BACK_BYTES = 64 << 20


class Broken(Exception):
    """This checkpoint cannot be used; the message is one line."""


def available_steps(folder):
    """The complete checkpoints in `folder`, oldest first; none if there is no such folder. Only looks."""
    folder = epath.Path(folder)
    paths = folder.iterdir() if folder.exists() else []
    return sorted(int(path.name) for path in paths if path.name.isdecimal())


def read_about(folder, step=None, *, log=LOG.warning):
    """(step, about) of the newest checkpoint whose about.json is sound, or of `step`, without reading arrays.

    InputError if there is none (of that step) or none can be read. Array data are not looked at:
    a later `restore` may still go back further. `log` gets one line for each checkpoint passed over.
    """
    found, seal = newest_seal(folder, step, read, f"no checkpoint can be read in {folder}", log)
    return found, seal["about"]


def newest_seal(folder, step, look, failure, log):
    """(step, seal) of the newest checkpoint, or of `step`, for which look(its folder) does not raise Broken.

    InputError if there is none (of that step), or, beginning with `failure`, if all are broken.
    """
    steps = available_steps(folder)
    if not steps or step not in (None, *steps):
        which = "checkpoint" if step is None else f"checkpoint {step}"
        raise InputError(f"there is no {which} in {folder}; there are: {spell(steps)}")
    broken = {}
    for candidate in [step] if step is not None else reversed(steps):
        try:
            seal = look(epath.Path(folder) / str(candidate))
        except Broken as fault:
            broken[candidate] = str(fault)
            continue
        for lost, reason in broken.items():
            log(f"checkpoint {lost} is broken ({reason}); reading {candidate}")
        return candidate, seal
    reasons = "; ".join(f"{lost}: {reason}" for lost, reason in broken.items())
    raise InputError(f"{failure} ({reasons})")


def write(folder, about, table):
    """Seals the folder: to be called when all else in it is written."""
    paths = list(_walk(folder))
    if jax.process_count() > 1:
        paths = [path for path in paths if path.stat().length <= READ_BACK_BYTES]
    files = {str(path.relative_to(folder)): file_sum(path) for path in sorted(paths)}
    (folder / SEAL).write_text(_render({"about": about, "arrays": table, "files": files}))


def read(folder):
    """The seal: about, arrays and files. Broken if it is not sound."""
    try:
        text = (folder / SEAL).read_text()
        seal = json.loads(text)
        del seal["crc32"]
    except Exception as fault:
        raise Broken(f"{SEAL} cannot be read, {one_line(fault)}") from fault
    if _render(seal) != text:
        raise Broken(f"{SEAL} is altered")
    return seal


def verified(folder):
    """The seal, after the listed files were held against it; each process reads its share of them."""
    seal = read(folder)
    for name in sorted(seal["files"])[jax.process_index() :: jax.process_count()]:
        if not (folder / name).exists():
            raise Broken(f"{name} is missing")
        size, checksum = file_sum(folder / name)
        if size != seal["files"][name][0]:
            raise Broken(f"{name} has {size} bytes instead of {seal['files'][name][0]}")
        if checksum != seal["files"][name][1]:
            raise Broken(f"{name} is altered")
    return seal


def file_sum(path):
    """[bytes, CRC-32] of a file."""
    size, checksum = 0, 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            size, checksum = size + len(piece), zlib.crc32(piece, checksum)
    return [size, checksum]


def one_line(fault):
    """What went wrong, in some 200 characters; Orbax and TensorStore fill pages."""
    while isinstance(fault, BaseExceptionGroup):
        fault = fault.exceptions[0]
    text = " ".join(str(fault).split())
    if isinstance(fault, Broken):
        return text
    text = f"{type(fault).__name__}: {text}"
    return text if len(text) <= 240 else f"{text[:120]} ... {text[-110:]}"  # the cause may stand at either end


def quiet_orbax():
    """Drops Orbax's chatter, and its tracebacks: what it raises is told in one line here."""
    logging.getLogger("absl").addFilter(_is_worth_reading)


def spell(steps):
    """'10, 20, 30', or 'none'."""
    return ", ".join(map(str, steps)) or "none"


# Warnings of what `weights` does on purpose: arrays that are no jax.Array, a killed write's folder replaced.
CHATTER = ("ArrayMetadata persistence is disabled", "which already exists. Removing existing directory")


def _is_worth_reading(record):
    if any(part in record.getMessage() for part in CHATTER):
        return False
    return "/orbax/" not in record.pathname or (record.levelno >= logging.WARNING and not record.exc_info)


def _walk(folder):
    for path in folder.iterdir():
        yield from _walk(path) if path.is_dir() else [path]


def _render(seal):
    checksum = zlib.crc32(json.dumps(seal).encode())
    return json.dumps({"crc32": checksum, **seal}, indent=1)
