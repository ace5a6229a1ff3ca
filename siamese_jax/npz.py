"""Reading .npz files of others: whole, or one line that says what is wrong."""

import os
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path

import numpy as np

from siamese_jax.errors import InputError

# What numpy and zipfile bring up for files that are cut off, damaged, of another kind or of Python objects.
_BROKEN = (OSError, ValueError, TypeError, AttributeError, EOFError, RuntimeError, NotImplementedError, zlib.error,
           zipfile.BadZipFile)  # fmt: skip


def read_npz(path: str | os.PathLike, what: str, only: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """The arrays of a .npz file by name, those of `only` where it is given; `what` it should be, for the message.

    Raises InputError where the file is missing or cannot be read.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{what} {path} is not there (looked in {os.getcwd()}): correct the path")
    try:
        file = np.load(path, allow_pickle=False)
        if isinstance(file, np.ndarray):
            raise ValueError("it holds one array, as .npy files do")
        with file:
            return {name: file[name] for name in file.files if only is None or name in only}
    except _BROKEN as error:
        reason = " ".join(str(error).split())[:100]
        raise InputError(f"{path} cannot be read as a {what} (.npz): {reason}") from error
