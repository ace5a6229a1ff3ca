"""What images are judged by: a trained classifier of ours, or a function of the user's that makes features.

Legend: N images, H height, W width, C channels, F features.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np

from siamese_jax.data.image_loader import make_augmentation
from siamese_jax.errors import InputError
from siamese_jax.evaluation.classification import compiled_on_mesh
from siamese_jax.evaluation.run import open_run, restore_weights
from siamese_jax.parallel.mesh import batch_parts, own_rows, put_batch

Features = Callable[[np.ndarray], np.ndarray]  # uint8 [N, H, W, C] -> [N, F]


class Judge:
    """A classifier from a run folder: its guesses, and what its head reads, of uint8 images [N, H, W, C]."""

    def __init__(self, workdir: str, say: Callable[[str], None]):
        run = open_run(workdir)
        if run.config.family != "vision":
            raise InputError(f"--classifier {workdir} holds a {run.config.family} model, not an image classifier")
        self.augmentation = make_augmentation(run.config.data, run.model.config)
        self.num_classes, self.mesh = run.model.config.num_classes, run.mesh
        self.num_features = run.model.config.width
        self.batch_size = -(-run.config.eval.batch_size // batch_parts(run.mesh)) * batch_parts(run.mesh)
        weights = restore_weights(run, None, say)
        self.path, self.class_names, self._params = weights.path, weights.class_names, weights.params

        def look(params, batch):
            logits = run.model.apply({"params": params}, batch["images"])
            features = run.model.apply({"params": params}, batch["images"], method="features")
            return jnp.argmax(logits, axis=-1), features

        self._look = compiled_on_mesh(look, run.model, run.mesh)

    def _seen(self, images_NHWC: np.ndarray, part: int) -> np.ndarray:
        rows, found = own_rows(self.mesh, self.batch_size), []
        for first in range(0, len(images_NHWC), self.batch_size):
            place = np.minimum(first + rows, len(images_NHWC) - 1)
            batch = {"images": np.stack([self.augmentation.plain(images_NHWC[i]) for i in place])}
            put = put_batch(batch, self.mesh, rows, self.batch_size)
            found.append(np.asarray(self._look(self._params, put)[part]))
        return np.concatenate(found)[: len(images_NHWC)]

    def guesses(self, images_NHWC: np.ndarray) -> np.ndarray:
        """The likeliest class of every image, int [N]."""
        return self._seen(images_NHWC, 0)

    def features(self, images_NHWC: np.ndarray) -> np.ndarray:
        """What the head reads, float32 [N, F]."""
        return self._seen(images_NHWC, 1)


def load_features(name: str) -> Features:
    """The function that 'package.module:function' names; InputError where there is none."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise InputError(f"--features is {name!r}: write it as package.module:function")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise InputError(f"--features {name} cannot be loaded: {error}") from error
    finally:
        sys.path.pop(0)
    if not callable(function):
        raise InputError(f"--features {name} is a {type(function).__name__}, not a function")
    return function


def in_batches(
    image_of: Callable[[int], np.ndarray], count: int, features: Features, batch_size: int, progress: Callable
) -> Iterator[np.ndarray]:
    """Features [n, F] of the images 0 to count - 1, uint8 of one shape, batch by batch.

    InputError where the function gives something else.
    """
    for first in range(0, count, batch_size):
        batch = np.stack([image_of(i) for i in range(first, min(first + batch_size, count))])
        made = np.asarray(features(batch))
        if made.ndim != 2 or len(made) != len(batch):
            raise InputError(f"the function of features made {made.shape} of {len(batch)} images, not [N, F]")
        progress(first + len(batch))
        yield made
