"""Trains one small model on 1 device and on meshes of 8 virtual ones; a program, for test_sharded_step.py.

Prints one JSON object: {mesh: {same_start, losses, gathered, parameters, split}}.
"""

import json
import os
import sys

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}

import jax
import numpy as np

from siamese_jax.config import base_config
from siamese_jax.names import path_name
from siamese_jax.parallel.mesh import AXES, make_mesh, own_rows, put_batch
from siamese_jax.parallel.program_text import gathered_shapes
from siamese_jax.training.plan import compile_step, fresh_state, make_plan

BATCH, LENGTH, STEPS = 16, 32, 20


def config(residual: str, **changes):
    made = base_config()
    # Shards of 8 columns and more: jax 0.12 on a CPU rounds a logarithm of 4 numbers otherwise than one of 8.
    made.model.update(
        {"residual": residual, "num_layers": 4, "width": 64, "num_heads": 4, "mlp_hidden": 128, "loss_slice": 8}
    )
    made.data.length, made.training.batch_size, made.training.steps = LENGTH, BATCH, STEPS
    made.schedule.warmup_steps = 2
    made.update_from_flattened_dict(changes)
    return made


def batches(length):
    draw = np.random.default_rng(0)
    weights = (draw.random((STEPS, BATCH, length)) < 0.9).astype(np.float32)
    tokens = draw.integers(257, size=(2, STEPS, BATCH, length)).astype(np.int32)
    for step in range(STEPS):
        yield {"inputs": tokens[0, step], "targets": tokens[1, step] // 4, "weights": weights[step]}


def run(made, sizes, devices) -> dict:
    made.mesh.update(dict(zip(AXES, sizes, strict=True)))
    plan = make_plan(made, make_mesh(made.mesh, devices))
    state = fresh_state(plan)
    start = jax.device_get(state.params)
    step, losses = compile_step(plan), []
    rows = own_rows(plan.mesh, BATCH)
    for batch in batches(made.data.length):
        state, metrics = step(state, put_batch(batch, plan.mesh, rows, BATCH))
        losses.append(float(metrics["loss"]))
    # What the compiled program itself says of its state, before and after the update.
    wanted = jax.tree.map(lambda leaf: leaf.sharding, plan.state_shapes)
    places = step.input_shardings[0][0], step.output_shardings[0]
    leaves = jax.tree_util.tree_leaves_with_path(plan.state_shapes)
    for place in places:
        same = jax.tree.map(
            lambda one, two, leaf: one.is_equivalent_to(two, leaf.ndim), place, wanted, plan.state_shapes
        )
        wrong = [path_name(path) for path, equal in jax.tree_util.tree_leaves_with_path(same) if not equal]
        assert not wrong, wrong
    return {
        "start": start,
        "losses": losses,
        "gathered": [list(shape) for _, shape in gathered_shapes(step.as_text())],
        "parameters": {path_name(path): list(leaf.shape) for path, leaf in leaves if path[0].name == "params"},
        "split": [path_name(path) for path, leaf in leaves if not leaf.sharding.is_fully_replicated],
    }


def main(residual: str, meshes: list[str], changes: dict) -> dict:
    alone = run(config(residual, **changes), (1, 1, 1), jax.devices()[:1])
    result = {}
    for mesh in meshes:
        row = run(config(residual, **changes), [int(size) for size in mesh.split("x")], jax.devices())
        same = jax.tree.map(lambda one, two: bool((one == two).all()), alone["start"], row.pop("start"))
        row["same_start"] = jax.tree.all(same)
        row["difference"] = float(np.abs(np.divide(row["losses"], alone["losses"]) - 1).max())
        result[mesh] = row
    return result


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2].split(","), json.loads(sys.argv[3]))))
