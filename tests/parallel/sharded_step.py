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


OWN = {
    "language": {"loss_slice": 8},
    "vision": {"image_size": 16, "patch_size": 4, "num_classes": 10, "drop_path": 0.3},
    "diffusion": {"image_size": 16, "patch_size": 4, "num_classes": 10},
}


def config(residual: str, family: str = "language", **changes):
    made = base_config(family)
    # Shards of 8 columns and more: jax 0.12 on a CPU rounds a logarithm of 4 numbers otherwise than one of 8.
    sizes = {"residual": residual, "num_layers": 4, "width": 64, "num_heads": 4, "mlp_hidden": 128}
    made.model.update(sizes | OWN[family])
    made.training.batch_size, made.training.steps, made.schedule.warmup_steps = BATCH, STEPS, 2
    if family == "language":
        made.data.length = LENGTH
    if family == "vision":
        made.training.update({"mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1})
    made.update_from_flattened_dict(changes)
    return made


def batches(plan):
    """What there is to be learned: few tokens, or images that are as bright as their label says."""
    draw, config = np.random.default_rng(0), plan.config
    if config.family != "language":
        for _ in range(STEPS):
            batch = plan.task.random_batch(config, plan.model_config)
            labels = draw.integers(10, size=BATCH).astype(np.int32)
            noise = draw.standard_normal(batch["images"].shape, np.float32)
            yield {"images": 0.1 * noise + labels[:, None, None, None] / np.float32(10), "labels": labels}
        return
    length = config.data.length
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
    for batch in batches(plan):
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
