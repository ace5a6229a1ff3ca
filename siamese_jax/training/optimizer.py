"""Optimisers by parameter NAME: clipping, then AdamW for everything, or Muon for the matrices of the layers.

Also the running average of the parameters. Shapes: N stacked layers, D width, H query heads, KV key heads,
G = H / KV, K head dim, F hidden, V vocabulary; (N,) stands where a scanned stack puts its layer axis.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

from siamese_jax.errors import InputError
from siamese_jax.names import ends_with, is_stacked, map_paths, one_row
from siamese_jax.training.schedule import check_choice

KINDS = ("adamw", "muon")
GROUPS = ("matrices", "patches", "head", "embedding", "gains", "biases")

# Path ending -> group; `*` stands for one path part. Every parameter must be matched by exactly one row.
GROUP_RULES = (
    ("embedding/table", "embedding"),  # [V, D]
    ("head/kernel", "head"),  # [D, V]
    ("attention/qkv/kernel", "matrices"),  # [(N,) D, KV, G + 2, K]
    ("attention/qkv/bias", "biases"),  # [(N,) KV, G + 2, K]
    ("attention/out/kernel", "matrices"),  # [(N,) H * K, D]
    ("attention/out/bias", "biases"),
    ("attention/*_norm/scale", "gains"),  # query, key, value, context
    ("attention/*_norm/bias", "biases"),  # with LayerNorm
    ("mlp/up/kernel", "matrices"),  # [(N,) D, 2, F] gated, [(N,) D, F] plain
    ("mlp/up/bias", "biases"),
    ("mlp/down/kernel", "matrices"),  # [(N,) F, D]
    ("mlp/down/bias", "biases"),
    ("patches/kernel", "patches"),  # [P * P * C, D]
    ("patches/bias", "biases"),
    ("tokens/*", "embedding"),  # [D]
    ("positions/table", "embedding"),  # [L, D]
    ("classifier/kernel", "head"),  # [D, classes]
    ("classifier/bias", "biases"),
    ("distillation_classifier/kernel", "head"),
    ("distillation_classifier/bias", "biases"),
    ("time/up/kernel", "matrices"),  # [features, D]
    ("time/up/bias", "biases"),
    ("time/down/kernel", "matrices"),  # [D, D]
    ("time/down/bias", "biases"),
    ("labels/table", "embedding"),  # [classes + 1, D]
    ("modulation/linear/kernel", "matrices"),  # [(N,) D, 6, D]
    ("modulation/linear/bias", "biases"),
    ("output_modulation/linear/kernel", "matrices"),  # [D, 2, D]
    ("output_modulation/linear/bias", "biases"),
    ("output/kernel", "head"),  # [D, P * P * C or twice that]
    ("output/bias", "biases"),
    ("residual/*/scale", "gains"),
    ("residual/*/bias", "biases"),
    ("residual/*/gain", "gains"),  # [(N,) D], the learned mix of siamese_hybrid
)

# (Path ending, axes of ONE layer) -> the matrix that Muon orthogonalises. All other axes are batch:
# the layers, the G + 2 slices of qkv (each group index of the queries, the keys, the values), the halves of a
# gated up kernel, the parts of a modulation.
MUON_AXES = {
    ("attention/qkv/kernel", 4): MuonDimensionNumbers(reduction_axis=-4, output_axis=(-3, -1)),
    ("attention/out/kernel", 2): MuonDimensionNumbers(reduction_axis=-2, output_axis=-1),
    ("mlp/up/kernel", 3): MuonDimensionNumbers(reduction_axis=-3, output_axis=-1),
    ("mlp/up/kernel", 2): MuonDimensionNumbers(reduction_axis=-2, output_axis=-1),
    ("time/up/kernel", 2): MuonDimensionNumbers(reduction_axis=-2, output_axis=-1),
    ("time/down/kernel", 2): MuonDimensionNumbers(reduction_axis=-2, output_axis=-1),
    ("modulation/linear/kernel", 3): MuonDimensionNumbers(reduction_axis=-3, output_axis=-1),
    ("output_modulation/linear/kernel", 3): MuonDimensionNumbers(reduction_axis=-3, output_axis=-1),
    ("mlp/down/kernel", 2): MuonDimensionNumbers(reduction_axis=-2, output_axis=-1),
}

# An orthogonal matrix has RMS 1 / sqrt(max(fan_in, fan_out)). Times 0.2 * sqrt(max(fan_in, fan_out)) it has
# RMS 0.2 whatever its shape, which is AdamW's usual one (Liu et al., arXiv 2502.16982): one peak learning
# rate and one weight decay serve both. optax's default, sqrt(max(1, fan_out / fan_in)), would need its own.
MUON_RMS = 0.2


def make_optimizer(config_optimizer, schedule: optax.Schedule, params_shapes) -> optax.GradientTransformation:
    """Clip by global norm, then each group's optimiser; decay is decoupled and scaled by the learning rate.

    Args:
        config_optimizer: kind, b1, b2, eps, weight_decay, clip_norm (0 = off), decay_embedding,
            muon_momentum, ema (0 = off; not read here).
        schedule: optax update count -> learning rate.
        params_shapes: the parameter tree, float32 arrays or ShapeDtypeStructs; the state takes their type.
    """
    config = config_optimizer
    check_optimizer(config)
    _check_types(params_shapes)
    groups = parameter_groups(params_shapes)

    decay_mask = functools.partial(weight_decay_mask, config)
    update = optax.adamw(
        schedule, config.b1, config.b2, config.eps, weight_decay=config.weight_decay, mask=decay_mask
    )
    if config.kind == "muon":
        muon_axes(params_shapes)  # a kernel of unknown shape ends here, before any compile
        labels = jax.tree.map(lambda group: _method(group, config), groups)
        update = optax.partition({"muon": _muon(config, schedule), "adamw": update}, labels)
    if config.clip_norm > 0:
        update = optax.chain(optax.clip_by_global_norm(config.clip_norm), update)
    return update


def weight_decay_mask(config_optimizer, params):
    """The tree of booleans: which parameters decay."""
    return map_paths(lambda path, _: _decays(group_of(path), config_optimizer), params)


def check_optimizer(config_optimizer) -> None:
    """InputError unless every field of the optimizer configuration is usable."""
    config = config_optimizer
    check_choice("optimizer.kind", config.kind, KINDS)
    for field in ("b1", "b2", "muon_momentum", "ema"):
        value = getattr(config, field)
        if not 0 <= value < 1:
            raise InputError(f"optimizer.{field} is {value}: set it to 0 or more and below 1")
    for field in ("weight_decay", "clip_norm"):
        value = getattr(config, field)
        if not value >= 0:
            raise InputError(f"optimizer.{field} is {value}: set it to 0 (off) or more")
    if not config.eps > 0:
        raise InputError(f"optimizer.eps is {config.eps}: set it above 0, for example 1e-8")


def group_of(path: str) -> str:
    """The group of a path such as `layers/mlp/up/kernel`; InputError unless exactly one row matches."""
    return one_row(path, GROUP_RULES, "GROUP_RULES in siamese_jax/training/optimizer.py")


def parameter_groups(params_shapes):
    """The tree of group names of a parameter tree."""
    return map_paths(lambda path, _: group_of(path), params_shapes)


def describe_groups(config_optimizer, params_shapes) -> str:
    """The table printed at the start: arrays, parameters, weight decay and optimiser of each group."""
    groups, leaves = jax.tree.leaves(parameter_groups(params_shapes)), jax.tree.leaves(params_shapes)
    line = "{:<10} {:>6} {:>15} {:>13}  {}".format
    table = [line("group", "arrays", "parameters", "weight decay", "optimiser")]
    for name in GROUPS:
        sizes = [leaf.size for leaf, group in zip(leaves, groups, strict=True) if group == name]
        if sizes:
            decay = config_optimizer.weight_decay if _decays(name, config_optimizer) else 0
            method = _method(name, config_optimizer)
            table.append(line(name, len(sizes), f"{sum(sizes):,}", f"{decay:g}", method))
    table.append(line("all", len(leaves), f"{sum(leaf.size for leaf in leaves):,}", "", "").rstrip())
    return "\n".join(table)


def muon_axes(params):
    """The tree of MuonDimensionNumbers, None for what AdamW updates; what a mask emptied stays empty."""

    def axes(path, leaf):
        if group_of(path) != "matrices":
            return None
        num_axes = leaf.ndim - is_stacked(path)
        for (ending, num), dimension_numbers in MUON_AXES.items():
            if num == num_axes and ends_with(path, ending):
                return dimension_numbers
        raise InputError(
            f"Muon knows no matrix in {path} of shape {leaf.shape}, {num_axes} axes a layer: "
            "add a row to MUON_AXES in training/optimizer.py or train with adamw"
        )

    return map_paths(axes, params)


class Ema(NamedTuple):
    """A running average of the parameters: zeros until the first update, ready to use ever after."""

    count: jax.Array
    params: dict


def init_ema(params) -> Ema:
    """An empty average. Zeros, not a copy: a step that donates its state must not get one buffer twice."""
    return Ema(jnp.zeros([], jnp.int32), jax.tree.map(jnp.zeros_like, params))


def update_ema(ema: Ema, params, decay: float) -> Ema:
    """The average after one more update; decay is a Python number above 0 and below 1.

    Debiased as Adam's moments are: the weights of all parameters seen sum to one, the start leaves no trace.
    The division happens in every update: at the t-th the new parameters weigh (1 - decay) / (1 - decay^t).
    """
    count = ema.count + 1
    # 1 - decay^t would cancel in float32 for a decay of 0.9999; expm1 does not.
    weight = (1 - decay) / -jnp.expm1(count * math.log(decay))
    averaged = jax.tree.map(lambda old, new: old + weight.astype(old.dtype) * (new - old), ema.params, params)
    return Ema(count, averaged)


def _muon(config, schedule):
    """Muon (Jordan et al., 2024) with Nesterov momentum, its update scaled to AdamW's RMS."""
    # optax.contrib.muon in one call would run Nesterov's Adam, without a decay mask, on the other groups.
    return optax.chain(
        _layer_by_layer(optax.contrib.scale_by_muon(beta=config.muon_momentum, weight_dimension_numbers=muon_axes)),
        optax.stateless(_scale_to_adam_rms),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(schedule),
    )


def _layer_by_layer(muon):
    """scale_by_muon with the layers of every stack one after the other, with the same state and the same result.

    Its matrices have to be whole: on a mesh all layers at once would be gathered at once.
    """

    def update(updates, state, params=None):
        del params
        stacks = [top for top in updates if is_stacked(top)]
        rest = {top: tree for top, tree in updates.items() if top not in stacks}
        rest_mu = {top: state.mu[top] for top in rest}
        done, new_state = muon.update(rest, state._replace(mu=rest_mu))
        mu = dict(new_state.mu)

        def one(layer):
            # Under a name that is no stack's, so that the axes are those of one layer.
            scaled, own = muon.update({"layer": layer[0]}, state._replace(mu={"layer": layer[1]}))
            return scaled["layer"], own.mu["layer"]

        for top in stacks:
            done[top], mu[top] = jax.lax.map(one, (updates[top], state.mu[top]))
        order = list(updates)
        ordered = [{top: tree[top] for top in order} for tree in (done, mu)]
        return ordered[0], new_state._replace(mu=ordered[1])

    return optax.GradientTransformation(muon.init, update)


def _scale_to_adam_rms(updates, params):
    del params

    def scale(update, axes):
        fans = [math.prod(update.shape[axis] for axis in np.atleast_1d(side)) for side in axes]
        return MUON_RMS * math.sqrt(max(fans)) * update

    return jax.tree.map(scale, updates, muon_axes(updates))


def _decays(group, config):
    return group in ("matrices", "patches", "head") or (group == "embedding" and bool(config.decay_embedding))


def _method(group, config):
    return "muon" if config.kind == "muon" and group == "matrices" else "adamw"


def _check_types(params_shapes):
    """The state takes the parameters' type, so half-precision parameters would get half-precision moments."""

    def check(path, leaf):
        if jnp.finfo(leaf.dtype).bits < 32:
            raise InputError(
                f"parameter {path} is {leaf.dtype} but the optimiser works in float32: keep the "
                "parameters in float32 and set only the compute type of the model lower"
            )

    map_paths(check, params_shapes)
