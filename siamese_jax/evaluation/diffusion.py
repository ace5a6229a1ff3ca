"""What a diffusion model makes: the error of its noise on images held out, and samples of classes.

Legend: B batch, N samples, H height, W width, C channels.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from siamese_jax.config import check_guidance
from siamese_jax.data.augment import Augmentation
from siamese_jax.data.image_loader import evaluation_batches
from siamese_jax.data.images import ImageSet
from siamese_jax.evaluation.classification import compiled_on_mesh
from siamese_jax.models.diffusion import DiffusionModel, guided
from siamese_jax.models.gaussian import Process, check_sampling, hybrid_losses, noised, sample
from siamese_jax.parallel.mesh import batch_parts, own_rows, put_batch

STEP_SEED, NOISE_SEED, SAMPLE_SEED = 0, 1, 2
# The fraction of the golden ratio: multiples of it fill the interval evenly, however many there are.
GOLDEN = 0.6180339887498949


class NoiseEvaluator:
    """The hybrid loss on a set of images; number i of them always gets the same step and the same noise.

    batch_size: rounded up to the parts that the mesh splits a batch into.
    """

    def __init__(
        self, model: DiffusionModel, images: ImageSet, augmentation: Augmentation, mesh: Mesh, batch_size: int,
        num_steps: int, workers: int = 0,
    ):  # fmt: skip
        self.workers = workers
        self.images, self.augmentation, self.mesh = images, augmentation, mesh
        self.batch_size = -(-batch_size // batch_parts(mesh)) * batch_parts(mesh)
        process = Process(num_steps)

        def losses(params, batch):
            def draw(index):
                key = jax.random.fold_in(jax.random.key(NOISE_SEED), index)
                return jax.random.normal(key, batch["images"].shape[1:])

            noise = jax.vmap(draw)(batch["index"])
            x_t = noised(process, batch["images"], batch["t"], noise)
            output = model.apply({"params": params}, x_t, batch["t"], batch["labels"])
            both = hybrid_losses(process, output, batch["images"], x_t, batch["t"], noise)
            return [jnp.sum(loss * batch["weights"]) for loss in both]

        self.num_steps = num_steps
        self._losses = compiled_on_mesh(losses, model, mesh)

    def __call__(self, params, progress: Callable[[int], None] | None = None, num_images: int = 0) -> dict:
        """{'loss': mean squared error of the noise, 'vb': bits per dimension, 'images'}; num_images: 0 = all."""
        size, sums = num_images or len(self.images), np.zeros(2)
        rows = own_rows(self.mesh, self.batch_size)
        batches = evaluation_batches(self.images, self.augmentation, self.batch_size, rows, size, self.workers)
        for number, batch in enumerate(batches, start=1):
            index = np.maximum(batch["index"], 0)
            batch |= {
                "index": index.astype(np.int32),
                "t": np.floor((index + 0.5) * GOLDEN % 1 * self.num_steps).astype(np.int32),
            }
            put = put_batch(batch, self.mesh, rows, self.batch_size)
            sums += [float(value) for value in self._losses(params, put)]
            if progress:
                progress(min(number * self.batch_size, size))
        return {"loss": float(sums[0] / size), "vb": float(sums[1] / size), "images": size}


class Sampler:
    """Samples of asked classes, made batch by batch with one compiled program.

    guidance: 1 = none. method: ddim (eta 0 unless given) or ddpm. A sample depends on its number, its label and the
    seed, not on the batch size.
    """

    def __init__(
        self, model: DiffusionModel, mesh: Mesh, *, num_steps: int, sampling_steps: int, method: str,
        guidance: float, batch_size: int, eta: float = 0.0,
    ):  # fmt: skip
        config = model.config
        check_guidance("the guidance scale", guidance, config.label_dropout)
        check_sampling(method, eta)
        process = Process(num_steps).spaced(sampling_steps, method)
        self.mesh, self.batch_size = mesh, -(-batch_size // batch_parts(mesh)) * batch_parts(mesh)
        shape = config.image_size, config.image_size, config.channels

        def make(params, batch):
            def predict(x, t, labels):
                return model.apply({"params": params}, x, t, labels)

            follow = functools.partial(predict, labels=batch["labels"])
            if guidance != 1:
                follow = guided(predict, batch["labels"], config.null_label, guidance, config.channels)

            def start(key_2):
                return jax.random.normal(jax.random.wrap_key_data(key_2), shape)

            return sample(process, follow, jax.vmap(start)(batch["keys"]), batch["keys"], method=method, eta=eta)

        self._make = compiled_on_mesh(make, model, mesh)

    def __call__(
        self, params, labels: Sequence[int], seed: int = 0, progress: Callable[[int], None] | None = None
    ) -> np.ndarray:
        """One sample for each label, as the model makes them, float32 [N, H, W, C]."""
        labels = np.asarray(labels, np.int32)
        root = jax.random.fold_in(jax.random.key(seed), SAMPLE_SEED)
        keys = jax.vmap(lambda number: jax.random.fold_in(root, number))(np.arange(len(labels)))
        keys, made = np.asarray(jax.random.key_data(keys)), []
        rows = own_rows(self.mesh, self.batch_size)
        for first in range(0, len(labels), self.batch_size):
            place = np.minimum(first + rows, len(labels) - 1)
            put = put_batch({"labels": labels[place], "keys": keys[place]}, self.mesh, rows, self.batch_size)
            made.append(np.asarray(self._make(params, put)))
            if progress:
                progress(min(first + self.batch_size, len(labels)))
        return np.concatenate(made)[: len(labels)]
