"""One update, and one look at the streams: the two programs that training compiles.

Legend: A micro-batches, B windows of an update, L length, N layers.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from siamese_jax.training.optimizer import update_ema
from siamese_jax.training.state import TrainState
from siamese_jax.training.task import Batch, Loss, Task


def accumulated_gradient(loss: Loss, params, batch: Batch, num_parts: int, shardings=None):
    """((objective, loss), gradient) of a batch taken in `num_parts` micro-batches.

    Every part is divided by the weight of the WHOLE batch, so parts with fewer tokens count for less:
    the result is the gradient of one large batch. `shardings`: the tree of those of the parameters, if any.
    """
    total = jnp.sum(batch["weights"])
    whole_gradient = jax.value_and_grad(loss, has_aux=True)

    def gradient(params, batch, total):
        losses, gradients = whole_gradient(params, batch, total)
        if shardings is not None:  # each device keeps the sum of its own part, from the first micro-batch on
            gradients = jax.lax.with_sharding_constraint(gradients, shardings)
        return losses, gradients

    if num_parts == 1:
        return gradient(params, batch, total)
    # Part a holds rows a, a + A, ...: each device keeps its own rows whatever the number of parts.
    parts = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, num_parts, *x.shape[1:]), 1, 0), batch)

    def body(sums, part):
        return jax.tree.map(jnp.add, sums, gradient(params, part, total)), None

    zeros = ((jnp.zeros(()), jnp.zeros(())), jax.tree.map(jnp.zeros_like, params))
    return jax.lax.scan(body, zeros, parts)[0]


def make_train_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    schedule: Callable,
    *,
    prepare: Callable[[Batch, jax.Array], Batch] | None = None,
    num_parts: int = 1,
    ema: float = 0.0,
    shardings: Any = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """(state, batch) -> (state, metrics); the caller jits it and donates the state.

    prepare(batch, key): what is done to the whole batch first; the key is a function of the seed and the step.
    """

    def train_step(state: TrainState, batch: Batch):
        if prepare is not None:
            key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
            batch = prepare(batch, key)
        (objective, mean), gradient = accumulated_gradient(loss, state.params, batch, num_parts, shardings)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {
            "loss": mean,
            "objective": objective,
            "learning_rate": schedule(state.step),
            "grad_norm": optax.tree.norm(gradient),
            "param_norm": optax.tree.norm(params),
            "update_norm": optax.tree.norm(updates),
        }
        average = update_ema(state.ema, params, ema) if ema else None
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state, ema=average), metrics

    return train_step


def make_stream_watch(
    task: Task, config: Any, model: Any, num_parts: int = 1
) -> Callable[[dict, Batch], dict[str, jax.Array]]:
    """(params, batch) -> {stream: RMS [N] after each layer}: a forward pass of one micro-batch of `num_parts`."""

    def rms(streams):
        return {name: jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)))) for name, x in streams.items()}

    def watch(params, batch: Batch):
        seen = task.watch(config, model, params, {name: rows[::num_parts] for name, rows in batch.items()}, rms)
        segments = seen if isinstance(seen, list) else [seen]
        return {name: jnp.concatenate([part[name] for part in segments]) for name in segments[0]}

    return watch
