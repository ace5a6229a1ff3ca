"""What a run is made of, built and checked before anything is computed, and told to the reader."""

import dataclasses

import jax
import ml_collections
import numpy as np

from siamese_jax.config import flat_items, resolved
from siamese_jax.errors import InputError
from siamese_jax.layers.attention import NEEDS, choose_implementation
from siamese_jax.layers.platform import target_platform
from siamese_jax.models.initialize import count_kernels, count_parameters
from siamese_jax.parallel.mesh import make_mesh, own_rows, put_batch
from siamese_jax.run_folder import check_run_folder
from siamese_jax.training.metrics import format_count
from siamese_jax.training.optimizer import describe_groups
from siamese_jax.training.plan import Plan, make_plan
from siamese_jax.training.task import Data


@dataclasses.dataclass
class Parts(Plan):
    """A plan with its data."""

    data: Data

    def put(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """What the loader read as global arrays."""
        return put_batch(batch, self.mesh, self.data.loader.rows, self.config.training.batch_size)


def plan_here(config: ml_collections.ConfigDict) -> Plan:
    """The plan on the devices that are here; InputError for what cannot work."""
    plan = make_plan(config, make_mesh(config.mesh))
    kernel, platform = plan.model_config.attention, target_platform()
    if NEEDS.get(kernel, platform) != platform:
        raise InputError(
            f"model.attention is {kernel}, which needs a {NEEDS[kernel]}, not {platform}: set it to auto"
        )
    return plan


def build(config: ml_collections.ConfigDict, workdir: str) -> Parts:
    """Everything that can be wrong with the input is found here, in seconds: InputError. Writes nothing."""
    plan = plan_here(config)
    check_run_folder(workdir, config)
    rows = own_rows(plan.mesh, config.training.batch_size)
    return Parts(**vars(plan), data=plan.task.open_data(config, plan.model_config, rows))


def describe(parts: Parts) -> str:
    """What is about to run, for the reader."""
    config, model, shapes = parts.config, parts.model_config, parts.state_shapes.params
    lines = ["configuration"]
    for group, values in resolved(config).items():
        text = " ".join(f"{k}={v}" for k, v in flat_items(values).items()) if isinstance(values, dict) else values
        lines.append(f"  {group}: {text}")
    length = parts.task.positions(config, model)
    masked = not config.data.get("cross_documents", True)
    attention = choose_implementation(
        model.attention, target_platform(), model.dtype, length, model.key_dim, masked
    )
    mesh = " x ".join(f"{axis} {size}" for axis, size in parts.mesh.shape.items() if size > 1)
    lines += [
        describe_groups(config.optimizer, shapes),
        f"model: {count_parameters(shapes):,} parameters, {model.residual}, {count_kernels(shapes):,} in matrices; "
        f"{format_count(parts.flops_per_unit)}FLOP for one {parts.task.unit}, forward and backward",
        parts.task.describe(config, parts.data),
        f"devices: {parts.mesh.size} x {jax.devices()[0].device_kind}{f' ({mesh})' if mesh else ''}, "
        f"compute {model.dtype}, attention {attention}",
    ]
    return "\n".join(lines)
