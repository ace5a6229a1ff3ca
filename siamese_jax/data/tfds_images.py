"""Images of TensorFlow Datasets, read at random places from array_record files without TensorFlow.

Shapes: H height, W width, C channels.
"""

import difflib
import importlib.util

import numpy as np
from absl import logging as absl_logging

from siamese_jax.data.image_set import ImageSet, held_out
from siamese_jax.errors import InputError

IMAGES = ("image", "latent")
NOT_TRAINING = ("validation", "test")


class TfdsImages(ImageSet):
    """A split of a prepared data set, or the part of its training split that is held out of it."""

    def __init__(
        self, name: str, source, feature: str, class_names: tuple[str, ...], index: np.ndarray, version: str
    ):
        super().__init__()
        self.name, self.class_names = name, class_names
        self._source, self._feature, self._index = source, feature, index
        self.shows_pixels = feature == "image"
        self.fingerprint = f"tfds {version} {len(index)} of {len(source)}"

    def __len__(self) -> int:
        return len(self._index)

    def read(self, index):
        example = self._source[int(self._index[index])]
        image = np.asarray(example[self._feature])
        return image if image.dtype == np.uint8 else image.astype(np.float32), int(example["label"])


def open_tfds(source: str, split: str, data_dir: str, fraction: float) -> ImageSet:
    """The images of 'tfds:NAME' or of a prepared folder; InputError at once where they are not prepared."""
    if importlib.util.find_spec("tensorflow_datasets") is None:
        raise InputError(f"data.source {source} needs pip install tensorflow-datasets")
    import tensorflow_datasets as tfds

    if source.startswith("tfds:"):
        builder = _builder(tfds, source.removeprefix("tfds:"), data_dir)
    else:
        builder = tfds.builder_from_directory(source)
    feature, class_names = _features(source, builder)
    has = [name for name in NOT_TRAINING if name in builder.info.splits]
    own = "train" if split == "train" or not has else has[0]
    if own not in builder.info.splits:
        raise InputError(f"{source} has the splits {', '.join(builder.info.splits) or 'none'}: it needs train")
    try:
        examples = builder.as_data_source(split=own)
    except (NotImplementedError, ValueError) as error:
        raise InputError(
            f"{source} cannot be read at random places: {' '.join(str(error).split())[:90]}; "
            f"{_how(builder.name, data_dir)}"
        ) from error
    index = np.arange(len(examples))
    if not has:
        out = held_out(index, fraction)
        index = index[out if split == "validation" else ~out]
    if not len(index):
        raise InputError(f"{source} has no image for {split}: change data.validation_fraction {fraction}")
    version = f"{builder.name} {builder.version} {own}"
    return TfdsImages(f"{source} {split}", examples, feature, class_names, index, version)


def _builder(tfds, name: str, data_dir: str):
    verbosity = absl_logging.get_verbosity()
    absl_logging.set_verbosity(absl_logging.ERROR)  # of a missing folder it warns, beside our own line
    try:
        builder = tfds.builder(name, data_dir=data_dir or None, file_format="array_record")
        is_prepared = builder.is_prepared()
    except tfds.core.registered.DatasetNotFoundError as error:
        known = tfds.list_builders(with_community_datasets=False)
        near = ", ".join(difflib.get_close_matches(name.partition("/")[0], known, n=3, cutoff=0.3)) or "none"
        raise InputError(f"TFDS has no data set {name!r} (nearest: {near}): correct data.source") from error
    except (ValueError, AssertionError, FileNotFoundError) as error:
        raise InputError(f"data.source tfds:{name}: {' '.join(str(error).split())[:120]}") from error
    finally:
        absl_logging.set_verbosity(verbosity)
    if not is_prepared:
        # Asked for its data it would try to download them, for minutes where there is no network.
        raise InputError(
            f"tfds:{name} is not prepared in {builder.data_path.parent.parent}: {_how(name, data_dir)}"
        )
    return builder


def _how(name: str, data_dir: str) -> str:
    place = f", data_dir={data_dir!r}" if data_dir else ""
    return (
        'prepare it with  python -c "import tensorflow_datasets as tfds; '
        f"tfds.builder({name!r}{place}, file_format='array_record').download_and_prepare()\""
    )


def _features(source: str, builder) -> tuple[str, tuple[str, ...]]:
    """(name of the image's feature, names of the classes)."""
    features = builder.info.features
    feature = next((name for name in IMAGES if name in features), None)
    if feature is None or "label" not in features:
        raise InputError(f"{source} has the features {', '.join(features)}: it needs image (or latent) and label")
    names = getattr(features["label"], "names", None)
    if not names:
        raise InputError(f"{source}: its label is {features['label']!r:.60}, not a ClassLabel with all its classes")
    return feature, tuple(names)
