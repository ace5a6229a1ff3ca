"""What differs between the families in training: their data, batches, losses and arithmetic.

The programs, the optimiser, the mesh, checkpoints and metrics are the same for all.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import ml_collections
import numpy as np

from siamese_jax.models.transformer import TransformerConfig

Batch = dict[str, jax.Array]
# (params, batch, total weight) -> (objective, loss), both divided by the total weight.
Loss = Callable[[Any, Batch, jax.Array], tuple[jax.Array, jax.Array]]


@dataclasses.dataclass
class Data:
    """The data of a run, opened and checked.

    loader: has `batch(step)` of the rows that this process holds, and `rows`. train, validation: sets of
    images, or stores by name ('' where there is only one). fingerprint: of what is trained on. tokenizer: None
    where there is no text.
    """

    loader: Any
    train: Any
    validation: Any
    fingerprint: str
    tokenizer: Any = None

    @property
    def class_names(self) -> tuple[str, ...]:
        """Of the images that are trained on; none of text."""
        return getattr(self.train, "class_names", ())

    @property
    def broken(self) -> list[str]:
        """Names of the images that could not be read so far and were passed over."""
        return sorted({name for part in (self.train, self.validation) for name in getattr(part, "broken", ())})


class Task:
    """A family in training; one instance serves all runs."""

    unit: ClassVar[str]  # what speed counts: token or image

    def units_per_example(self, config: ml_collections.ConfigDict) -> int:
        """Units of one row of a batch."""
        return 1

    def positions(self, config: ml_collections.ConfigDict, model: TransformerConfig) -> int:
        """Length of the sequences that attention sees."""
        raise NotImplementedError

    def batch_shapes(self, config: ml_collections.ConfigDict, model: TransformerConfig) -> dict[str, tuple]:
        """{name: (shape, dtype)} of a batch as the loader makes it."""
        raise NotImplementedError

    def prepare(self, config: ml_collections.ConfigDict, batch: Batch, key: jax.Array) -> Batch:
        """What is done to a whole batch on the devices before it is divided; key: of this update."""
        del config, key
        return batch

    def make_loss(self, model: Any, config: ml_collections.ConfigDict) -> Loss:
        """The function to be differentiated."""
        raise NotImplementedError

    def watch(
        self, config: ml_collections.ConfigDict, model: Any, params: Any, batch: Batch, look: Callable
    ) -> Any:
        """What `look` sees of the streams leaving each layer on a batch as the loader makes it."""
        raise NotImplementedError

    def flops_per_unit(self, config: ml_collections.ConfigDict, model: TransformerConfig) -> int:
        """FLOPs of forward and backward for one unit."""
        raise NotImplementedError

    def open_data(self, config: ml_collections.ConfigDict, model: TransformerConfig, rows: np.ndarray) -> Data:
        """Opens and checks the data; rows: those of a batch that this process reads."""
        raise NotImplementedError

    def describe(self, config: ml_collections.ConfigDict, data: Data) -> str:
        """A line about the data."""
        raise NotImplementedError

    def random_batch(self, config: ml_collections.ConfigDict, model: TransformerConfig) -> dict[str, np.ndarray]:
        """A whole batch of noise, to measure speed with."""
        raise NotImplementedError


def row_keys(key: jax.Array, num_rows: int) -> jax.Array:
    """A raw key for every row of a batch, uint32 [B, 2]: what is drawn for a row depends on nothing beside it."""
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jax.numpy.arange(num_rows))
    return jax.random.key_data(keys)
