"""Images of TensorFlow Datasets, read at random places from array_record files without TensorFlow.

Shapes: H height, W width, C channels.
"""

import numpy as np

from siamese_jax.data.image_set import Broken, ImageSet, part_of
from siamese_jax.data.tfds_builder import NOT_TRAINING, find_builder, how_to_prepare
from siamese_jax.errors import InputError

IMAGES = ("image", "latent")


class TfdsImages(ImageSet):
    """A split of a prepared data set, or the part of its training split that is held out of it."""

    def __init__(
        self,
        name: str,
        source,
        feature: str,
        class_names: tuple[str, ...],
        index: np.ndarray,
        version: str,
        on_broken: str,
    ):
        super().__init__()
        self.name, self.class_names, self.on_broken = name, class_names, on_broken
        self._source, self._feature, self._index = source, feature, index
        self.shows_pixels = feature == "image"
        self.fingerprint = f"tfds {version} {len(index)} of {len(source)}"

    def __len__(self) -> int:
        return len(self._index)

    def read(self, index):
        place = int(self._index[index])
        try:
            example = self._source[place]
            image, label = np.asarray(example[self._feature]), int(example["label"])
        except Exception as error:  # whatever the readers and decoders of broken files bring up
            raise Broken(f"{self.name}, example {place}", " ".join(str(error).split())[:80]) from error
        return image if image.dtype == np.uint8 else image.astype(np.float32), label


def find_tfds(source: str, data_dir: str, fraction: float, on_broken: str):
    """(whether it has a part for validation, split -> images) of 'tfds:NAME' or of a prepared folder.

    InputError at once where it is not prepared.
    """
    builder = find_builder(source, data_dir)
    has = [name for name in NOT_TRAINING if name in builder.info.splits]

    def open_part(split: str) -> TfdsImages:
        own = has[0] if has and split == "validation" else "train"
        return _open_split(source, builder, own, split if not has else "all", data_dir, fraction, on_broken)

    return bool(has), open_part


def _open_split(source: str, builder, own: str, part: str, data_dir: str, fraction: float, on_broken: str):
    """part: of the split `own`: train, validation, or all of it."""
    feature, class_names = _features(source, builder)
    if own not in builder.info.splits:
        raise InputError(f"{source} has the splits {', '.join(builder.info.splits) or 'none'}: it needs train")
    try:
        examples = builder.as_data_source(split=own)
        index = part_of(np.arange(len(examples)), part, fraction)
    except Exception as error:  # of another file format, or of files that are missing or broken
        raise InputError(
            f"{source} cannot be read at random places: {' '.join(str(error).split())[:90]}; "
            f"{how_to_prepare(builder.name, data_dir)}"
        ) from error
    if not len(index):
        raise InputError(f"{source} has no image for {part}: change data.validation_fraction {fraction}")
    version = f"{builder.name} {builder.version} {own}"
    name = f"{source} {own if part == 'all' else part}"
    return TfdsImages(name, examples, feature, class_names, index, version, on_broken)


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
