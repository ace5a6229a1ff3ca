"""What the update of a run is made of, apart from data: checked, and compiled, without computing anything.

The mesh may be of devices that are elsewhere, so a step can be compiled for a pod on a laptop.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from siamese_jax.config import check_config, language_config
from siamese_jax.models.initialize import parameter_shapes
from siamese_jax.models.language import LanguageConfig, LanguageModel
from siamese_jax.parallel.mesh import batch_sharding, micro_batches, replicated
from siamese_jax.parallel.rules import state_shardings, with_shardings
from siamese_jax.training.metrics import flops_per_token
from siamese_jax.training.optimizer import make_optimizer
from siamese_jax.training.schedule import make_schedule
from siamese_jax.training.state import TrainState, initial_state
from siamese_jax.training.step import make_train_step


@dataclasses.dataclass
class Plan:
    """The update of a configuration on a mesh, in `accumulation` micro-batches; state_shapes: with shardings."""

    config: ml_collections.ConfigDict
    model_config: LanguageConfig
    model: LanguageModel
    mesh: jax.sharding.Mesh
    accumulation: int
    schedule: Callable
    optimizer: Any
    state_shapes: TrainState


def make_plan(config: ml_collections.ConfigDict, mesh: jax.sharding.Mesh) -> Plan:
    """The plan of a configuration; InputError for the first thing that cannot work, on this mesh too."""
    check_config(config)
    accumulation = micro_batches(config.training, mesh)
    model_config = language_config(config)
    schedule = make_schedule(config.schedule, config.training.steps)
    shapes = parameter_shapes(model_config)
    optimizer = make_optimizer(config.optimizer, schedule, shapes)
    state = jax.eval_shape(lambda: _initial_state(config, model_config, optimizer))
    state = with_shardings(state, state_shardings(state, shapes, mesh))
    return Plan(config, model_config, LanguageModel(model_config), mesh, accumulation, schedule, optimizer, state)


def _initial_state(config, model_config, optimizer) -> TrainState:
    return initial_state(model_config, optimizer, config.seed, config.optimizer.ema > 0)


def fresh_state(plan: Plan) -> TrainState:
    """The state before the first update, born where it belongs: no device ever holds the whole of it."""

    def make():
        return _initial_state(plan.config, plan.model_config, plan.optimizer)

    return jax.jit(make, out_shardings=_shardings(plan.state_shapes))()


def _shardings(shapes):
    return jax.tree.map(lambda leaf: leaf.sharding, shapes)


def batch_shapes(plan: Plan) -> dict[str, jax.ShapeDtypeStruct]:
    """A training batch as shapes with shardings, as the loader makes it."""
    shape = plan.config.training.batch_size, plan.config.data.length
    kinds = {"inputs": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    if not plan.config.data.cross_documents:
        kinds |= {"segments": jnp.int32, "positions": jnp.int32}
    sharding = batch_sharding(plan.mesh)
    return {name: jax.ShapeDtypeStruct(shape, kind, sharding=sharding) for name, kind in kinds.items()}


def jit_step(plan: Plan) -> Any:
    """The jitted update (state, batch) -> (state, metrics); the state is donated. To be traced under the mesh."""
    config, state = plan.config, _shardings(plan.state_shapes)
    step = make_train_step(
        plan.model, plan.optimizer, plan.schedule, num_parts=plan.accumulation,
        z_loss=config.training.z_loss, ema=config.optimizer.ema, shardings=state.params,
    )  # fmt: skip
    in_shardings = state, batch_sharding(plan.mesh)
    return jax.jit(step, donate_argnums=0, in_shardings=in_shardings, out_shardings=(state, replicated(plan.mesh)))


def compile_step(plan: Plan) -> Any:
    """The compiled update for the devices that are here."""
    with jax.set_mesh(plan.mesh):
        return jit_step(plan).lower(plan.state_shapes, batch_shapes(plan)).compile()


def count_matrix_parameters(model: LanguageConfig, shapes) -> int:
    """Parameters that multiply every token: all kernels, and the table where it is the head too."""
    flat = jax.tree_util.tree_leaves_with_path(shapes)
    kernels = sum(leaf.size for path, leaf in flat if path[-1].key == "kernel")
    return kernels + (shapes["embedding"]["table"].size if model.tie_embedding else 0)


def token_flops(model: LanguageConfig, length: int) -> int:
    """FLOPs of forward and backward for one token (PaLM's convention, the causal half not taken off)."""
    matrices = count_matrix_parameters(model, parameter_shapes(model))
    return flops_per_token(matrices, model.num_layers, model.num_heads * model.key_dim, length)
