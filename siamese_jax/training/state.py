"""The state of training: one pytree that a step maps to the next, and that a checkpoint holds."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from siamese_jax.models.initialize import initial_parameters
from siamese_jax.models.transformer import TransformerConfig
from siamese_jax.training.optimizer import Ema, init_ema


@flax.struct.dataclass
class TrainState:
    """step: updates done (int32). key: raw random key (uint32). ema: running average, None when off."""

    step: jax.Array
    params: Any
    opt_state: Any
    key: jax.Array
    ema: Ema | None = None

    def eval_params(self) -> Any:
        """The parameters to evaluate: the running average where there is one."""
        return self.params if self.ema is None else self.ema.params


def initial_state(
    model: TransformerConfig, optimizer: optax.GradientTransformation, seed: int, with_ema: bool
) -> TrainState:
    """The state before the first update: a pure function, to be jitted with output shardings."""
    key = jax.random.key(seed)
    params = initial_parameters(model, key)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        key=jax.random.key_data(key),
        ema=init_ema(params) if with_ema else None,
    )
