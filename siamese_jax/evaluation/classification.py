"""Top-1, top-5 and the confusion matrix of images: each counts exactly once, whatever the batch size.

Legend: B batch, K classes.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from siamese_jax.data.augment import Augmentation
from siamese_jax.data.image_loader import evaluation_batches
from siamese_jax.data.images import ImageSet
from siamese_jax.models.families import parameter_shapes
from siamese_jax.models.vision import VisionModel
from siamese_jax.parallel.mesh import batch_parts, batch_sharding, own_rows, put_batch, replicated
from siamese_jax.parallel.rules import parameter_shardings

MOST_GUESSES = 5


def compiled_on_mesh(function: Callable, model, mesh: Mesh) -> Callable:
    """function(params, batch), compiled for the mesh; what it returns is whole on every device."""
    shardings = parameter_shardings(parameter_shapes(model.config), mesh), batch_sharding(mesh)
    compiled = jax.jit(function, in_shardings=shardings, out_shardings=replicated(mesh))

    def on_mesh(params, batch):
        with jax.set_mesh(mesh):
            return compiled(params, batch)

    return on_mesh


def classify(model: VisionModel, params, batch) -> dict[str, jax.Array]:
    """guess [B], the likeliest class; rank [B], of the true class, from 0; nats [B], its cross-entropy."""
    logits_BK = model.apply({"params": params}, batch["images"]).astype(jnp.float32)
    labels = batch["labels"][:, None]
    own = jnp.take_along_axis(logits_BK, labels, axis=-1)
    # Of equal logits the class with the smaller number is said to be likelier, as in argmax.
    ahead = (logits_BK > own) | ((logits_BK == own) & (jnp.arange(logits_BK.shape[-1]) < labels))
    # NaN is ahead of nothing: a model that gives it is wrong, whatever the guess.
    finite = jnp.all(jnp.isfinite(logits_BK), axis=-1)
    rank = jnp.where(finite, jnp.sum(ahead, axis=-1), logits_BK.shape[-1])
    nats = jax.nn.logsumexp(logits_BK, axis=-1) - own[:, 0]
    return {"guess": jnp.argmax(logits_BK, axis=-1), "rank": rank, "nats": nats}


def names_of(images: ImageSet, num_classes: int) -> list[str]:
    """A name for each of the model's classes: that of the set, or its number where the set has fewer."""
    return [images.class_names[k] if k < images.num_classes else str(k) for k in range(num_classes)]


class ClassificationEvaluator:
    """Evaluates parameters on one set of images again and again with one compiled program.

    batch_size: rounded up to the parts that the mesh splits a batch into. workers: threads that decode.
    """

    def __init__(
        self,
        model: VisionModel,
        images: ImageSet,
        augmentation: Augmentation,
        mesh: Mesh,
        batch_size: int,
        workers: int = 0,
    ):
        self.images, self.augmentation, self.mesh, self.workers = images, augmentation, mesh, workers
        self.num_classes = model.config.num_classes
        self.batch_size = -(-batch_size // batch_parts(mesh)) * batch_parts(mesh)
        self._classify = compiled_on_mesh(lambda params, batch: classify(model, params, batch), model, mesh)

    def __call__(self, params, progress: Callable[[int], None] | None = None, num_images: int = 0) -> dict:
        """{'total': figures, 'confusion': counts [K, K] of (true, guessed)}; num_images: evenly spaced, 0 = all."""
        size = num_images or len(self.images)
        confusion = np.zeros((self.num_classes, self.num_classes), np.int64)
        nats, top1, top5 = 0.0, 0, 0
        for done, label, seen in self._seen(params, size):
            np.add.at(confusion, (label, seen["guess"]), 1)
            nats += float(np.sum(seen["nats"], dtype=np.float64))
            top1 += int(np.sum(seen["rank"] == 0))
            top5 += int(np.sum(seen["rank"] < MOST_GUESSES))
            if progress:
                progress(done)
        total = {"loss": nats / size, "top1": top1 / size, "top5": top5 / size, "images": size}
        return {"total": {k: float(v) if k != "images" else v for k, v in total.items()}, "confusion": confusion}

    def _seen(self, params, size: int):
        """(images done, their labels, what the model made of them), of real images only."""
        rows = own_rows(self.mesh, self.batch_size)
        batches = evaluation_batches(self.images, self.augmentation, self.batch_size, rows, size, self.workers)
        pending = None
        for number, batch in enumerate(batches):
            put = put_batch({k: batch[k] for k in ("images", "labels")}, self.mesh, rows, self.batch_size)
            # Labels come back with the rest: another process may have read theirs.
            seen = self._classify(params, put) | {"label": self._whole(put["labels"])}
            if pending:
                yield self._fetched(*pending, size)
            pending = number, seen
        yield self._fetched(*pending, size)

    def _whole(self, x: jax.Array) -> jax.Array:
        return jax.jit(lambda x: x, out_shardings=replicated(self.mesh))(x)

    def _fetched(self, number: int, seen, size: int):
        real = min(self.batch_size, size - number * self.batch_size)
        host = {name: np.asarray(values)[:real] for name, values in seen.items()}
        return number * self.batch_size + real, host.pop("label"), host
