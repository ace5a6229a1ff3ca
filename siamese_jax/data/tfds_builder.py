"""Data sets of TensorFlow Datasets, found without TensorFlow and without ever waiting for a network."""

import difflib
import importlib
import importlib.util
import os
import pkgutil

from absl import logging as absl_logging

from siamese_jax.errors import InputError

NOT_TRAINING = ("validation", "test")
# Without TensorFlow these rooms of the library register none of their data sets until one is imported.
_ROOMS = ("text", "question_answering", "summarization", "translate")


def find_builder(source: str, data_dir: str = ""):
    """The builder of 'tfds:NAME' (NAME may have a configuration and a version) or of a prepared folder.

    InputError, at once, where it is unknown (with the nearest names) or not prepared (with the command for it).
    """
    if importlib.util.find_spec("tensorflow_datasets") is None:
        raise InputError(f"data.source {source} needs pip install tensorflow-datasets")
    import tensorflow_datasets as tfds

    if source.startswith("tfds:"):
        return _named(tfds, source.removeprefix("tfds:"), data_dir)
    try:
        return tfds.builder_from_directory(os.path.expanduser(source))
    except Exception as error:  # whatever the readers of broken files bring up
        reason = " ".join(str(error).split())[:90]
        raise InputError(f"{source} is not a prepared data set of TFDS: {reason}") from error


def how_to_prepare(name: str, data_dir: str) -> str:
    """The command that downloads and prepares a data set."""
    place = f", data_dir={data_dir!r}" if data_dir else ""
    room = _room_of(name)
    also = f"import {room}; " if room else ""
    return (
        f'prepare it with  python -c "import tensorflow_datasets as tfds; {also}'
        f"tfds.builder({name!r}{place}, file_format='array_record').download_and_prepare()\""
    )


def _named(tfds, name: str, data_dir: str):
    verbosity = absl_logging.get_verbosity()
    absl_logging.set_verbosity(absl_logging.ERROR)  # of a missing folder it warns, beside our own line
    try:
        builder = _registered(tfds, name, data_dir)
        is_prepared = builder.is_prepared()
    except tfds.core.registered.DatasetNotFoundError as error:
        known = {*tfds.list_builders(with_community_datasets=False), *_unregistered()}
        near = (
            ", ".join(difflib.get_close_matches(name.partition("/")[0], sorted(known), n=3, cutoff=0.3)) or "none"
        )
        raise InputError(f"TFDS has no data set {name!r} (nearest: {near}): correct data.source") from error
    except (ValueError, AssertionError, FileNotFoundError) as error:
        raise InputError(f"data.source tfds:{name}: {' '.join(str(error).split())[:120]}") from error
    finally:
        absl_logging.set_verbosity(verbosity)
    if not is_prepared:
        # Asked for its data it would try to download them, for minutes where there is no network.
        raise InputError(
            f"tfds:{name} is not prepared in {builder.data_path.parent.parent}: {how_to_prepare(name, data_dir)}"
        )
    return builder


def _registered(tfds, name: str, data_dir: str):
    options = {"data_dir": data_dir or None, "file_format": "array_record"}
    try:
        return tfds.builder(name, **options)
    except tfds.core.registered.DatasetNotFoundError:
        room = _room_of(name)
        if not room:
            raise
        importlib.import_module(room)
        return tfds.builder(name, **options)


def _room_of(name: str) -> str:
    """The module that registers a data set which only its own import does, or nothing."""
    plain = name.partition("/")[0]
    return _unregistered().get(plain, "")


def _unregistered() -> dict[str, str]:
    """{data set: module} of the rooms that have one module a data set."""
    found = {}
    for room in _ROOMS:
        spec = importlib.util.find_spec("tensorflow_datasets")
        for root in spec.submodule_search_locations or ():
            for module in pkgutil.iter_modules([f"{root}/{room}"]):
                if not module.name.endswith("_test"):
                    found.setdefault(module.name, f"tensorflow_datasets.{room}.{module.name}")
    return found
