"""What the update of a run is made of, apart from data: checked, and compiled, without computing anything.

The mesh may be of devices that are elsewhere, so a step can be compiled for a pod on a laptop.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import ml_collections

from siamese_jax.config import check_config, model_config
from siamese_jax.models.families import make_model, parameter_shapes
from siamese_jax.models.transformer import TransformerConfig, TransformerModel
from siamese_jax.parallel.mesh import batch_sharding, micro_batches, replicated
from siamese_jax.parallel.rules import state_shardings, with_shardings
from siamese_jax.training.optimizer import make_optimizer
from siamese_jax.training.schedule import make_schedule
from siamese_jax.training.state import TrainState, initial_state
from siamese_jax.training.step import make_train_step
from siamese_jax.training.task import Task
from siamese_jax.training.tasks import TASKS


@dataclasses.dataclass
class Plan:
    """The update of a configuration on a mesh, in `accumulation` micro-batches; state_shapes: with shardings."""

    config: ml_collections.ConfigDict
    task: Task
    model_config: TransformerConfig
    model: TransformerModel
    mesh: jax.sharding.Mesh
    accumulation: int
    schedule: Callable
    optimizer: Any
    state_shapes: TrainState

    @property
    def units_per_step(self) -> int:
        """Tokens or images of one update."""
        return self.config.training.batch_size * self.task.units_per_example(self.config)

    @property
    def flops_per_unit(self) -> int:
        """FLOPs of forward and backward for one token or image."""
        return self.task.flops_per_unit(self.config, self.model_config)


def make_plan(config: ml_collections.ConfigDict, mesh: jax.sharding.Mesh) -> Plan:
    """The plan of a configuration; InputError for the first thing that cannot work, on this mesh too."""
    check_config(config)
    accumulation = micro_batches(config.training, mesh)
    own = model_config(config)
    schedule = make_schedule(config.schedule, config.training.steps)
    shapes = parameter_shapes(own)
    optimizer = make_optimizer(config.optimizer, schedule, shapes)
    state = jax.eval_shape(lambda: _initial_state(config, own, optimizer))
    state = with_shardings(state, state_shardings(state, shapes, mesh))
    task = TASKS[config.family]
    return Plan(config, task, own, make_model(own), mesh, accumulation, schedule, optimizer, state)


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
    shapes = plan.task.batch_shapes(plan.config, plan.model_config)
    sharding = batch_sharding(plan.mesh)
    return {name: jax.ShapeDtypeStruct(*shape, sharding=sharding) for name, shape in shapes.items()}


def jit_step(plan: Plan) -> Any:
    """The jitted update (state, batch) -> (state, metrics); the state is donated. To be traced under the mesh."""
    config, state = plan.config, _shardings(plan.state_shapes)
    step = make_train_step(
        plan.task.make_loss(plan.model, config), plan.optimizer, plan.schedule,
        prepare=functools.partial(plan.task.prepare, config), num_parts=plan.accumulation,
        ema=config.optimizer.ema, shardings=state.params,
    )  # fmt: skip
    in_shardings = state, batch_sharding(plan.mesh)
    return jax.jit(step, donate_argnums=0, in_shardings=in_shardings, out_shardings=(state, replicated(plan.mesh)))


def compile_step(plan: Plan) -> Any:
    """The compiled update for the devices that are here."""
    with jax.set_mesh(plan.mesh):
        return jit_step(plan).lower(plan.state_shapes, batch_shapes(plan)).compile()
