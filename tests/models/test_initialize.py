"""Initial parameters: standard deviations by group and layer, the cut at 3 sigma, and what seeds change."""

import dataclasses
import functools
import math

import flax.traverse_util
import jax
import numpy as np
import pytest

from siamese_jax.models.initialize import count_parameters, initial_parameters, parameter_shapes
from siamese_jax.models.language import LanguageConfig
from siamese_jax.models.stack import unstack_layers
from siamese_jax.residual import known_schemes

LAYERS, WIDTH, HIDDEN = 3, 32, 96
CONFIG = LanguageConfig(
    num_layers=LAYERS, width=WIDTH, num_heads=4, num_kv_heads=2, mlp_hidden=HIDDEN, vocab_size=64,
    use_bias=True, value_norm="head",
)  # fmt: skip
SEEDS = (0, 1, 2)
# Of a standard normal cut at 3 sigma: OLMo, and we, do not correct for it.
TRUNCATED = math.sqrt(1 - 6 * math.exp(-4.5) / math.sqrt(2 * math.pi) / math.erf(3 / math.sqrt(2)))


@functools.lru_cache
def drawn(**changes):
    """[{path: array} of each seed]."""
    config = dataclasses.replace(CONFIG, **changes)
    # Not jitted: the draws of each shape are compiled once for all configurations.
    trees = [initial_parameters(config, jax.random.key(seed)) for seed in SEEDS]
    return [flax.traverse_util.flatten_dict(tree, sep="/") for tree in trees]


def expected_stds(init, layer):
    """The initialisers of OLMo v1, by our names."""
    d, f = WIDTH, HIDDEN
    if init == "mitchell":
        wide, out, down = (
            1 / math.sqrt(d),
            1 / math.sqrt(2 * d * (layer + 1)),
            1 / math.sqrt(2 * f * (layer + 1)),
        )
        head = wide
    else:
        wide = 0.02
        out = down = 0.02 / math.sqrt(2 * LAYERS) if init == "full_megatron" else 0.02
        head = 1 / math.sqrt(d) if init == "full_megatron" else 0.02
    return {
        "embedding/table": wide,
        "head/kernel": head,
        "attention/qkv/kernel": wide,
        "attention/out/kernel": out,
        "mlp/up/kernel": wide,
        "mlp/down/kernel": down,
    }


def assert_std(values, std, where):
    """Standard deviation, mean and cut of truncated normal values, within four sampling errors."""
    values = np.asarray(values, np.float64).ravel() / std
    n = values.size
    assert np.std(values) == pytest.approx(TRUNCATED, abs=4 / math.sqrt(2 * n)), where
    assert np.mean(values) == pytest.approx(0, abs=4 / math.sqrt(n)), where
    assert np.abs(values).max() <= 3 + 1e-5, where
    assert np.abs(values).max() > 2.4, where


@pytest.mark.parametrize("init", ["mitchell", "normal", "full_megatron"])
def test_standard_deviations(init):
    for name in expected_stds(init, 0):
        for layer in range(LAYERS):
            std = expected_stds(init, layer)[name]
            if name in ("embedding/table", "head/kernel"):
                assert_std([params[name] for params in drawn(init=init)], std, name)
            else:
                rows = [params[f"layers/{name}"][layer] for params in drawn(init=init)]
                assert_std(rows, std, (name, layer))


def test_init_std_is_the_std_of_normal():
    for params in drawn(init="normal", init_std=0.5):
        assert_std(params["layers/mlp/up/kernel"], 0.5, "mlp/up/kernel")


def test_gains_start_at_1_and_biases_at_0():
    (params, *_) = drawn(init="mitchell")
    endings = {path.rsplit("/", 1)[-1] for path in params}
    assert endings == {"table", "kernel", "scale", "gain", "bias"}
    for path, leaf in params.items():
        if path.endswith(("scale", "gain")):
            np.testing.assert_array_equal(leaf, 1.0, err_msg=path)
        if path.endswith("bias"):
            np.testing.assert_array_equal(leaf, 0.0, err_msg=path)


def test_deepnorm_shrinks_values_outputs_and_mlp_but_not_queries_and_keys():
    beta = (8 * LAYERS) ** -0.25
    for plain, small in zip(
        drawn(init="normal", residual="post"), drawn(init="normal", residual="deepnorm"), strict=True
    ):
        assert plain.keys() == small.keys()
        for path, leaf in plain.items():
            factor = np.ones(leaf.shape, np.float32)
            if path.endswith(("attention/out/kernel", "mlp/up/kernel", "mlp/down/kernel")):
                factor[:] = beta
            if path.endswith("attention/qkv/kernel"):
                factor[..., -1, :] = beta  # [N, D, J, G + 2, K]: the queries of a group, its key, its value
            np.testing.assert_allclose(small[path], leaf * factor, rtol=1e-6, err_msg=path)


def test_seeds_layers_and_arrays_are_drawn_apart():
    first, second, _ = drawn(init="normal")
    assert np.abs(first["layers/mlp/up/kernel"] - second["layers/mlp/up/kernel"]).max() > 0.01
    kernel = first["layers/mlp/up/kernel"]
    assert np.abs(np.corrcoef(kernel.reshape(LAYERS, -1)) - np.eye(LAYERS)).max() < 0.1
    table, head = first["embedding/table"].ravel(), first["head/kernel"].T.ravel()
    assert abs(np.corrcoef(table, head)[0, 1]) < 0.1


def in_both_layouts(config, make):
    """(scanned parameters unstacked, unrolled parameters) of a configuration."""
    scanned, unrolled = (make(dataclasses.replace(config, scan=scan)) for scan in (True, False))
    return unstack_layers(scanned, config.segments()), unrolled


def test_both_layouts_of_several_segments_start_from_the_same_numbers():
    config = dataclasses.replace(CONFIG, residual="mix", num_layers=4)
    loose, unrolled = in_both_layouts(config, lambda config: initial_parameters(config, jax.random.key(3)))
    assert jax.tree.structure(loose) == jax.tree.structure(unrolled)
    jax.tree.map(np.testing.assert_array_equal, loose, unrolled)


def test_both_layouts_start_from_the_same_numbers_when_compiled():
    config = dataclasses.replace(CONFIG, residual="deepnorm", tie_embedding=True, num_layers=4)
    quick = {"xla_backend_optimization_level": 0}  # of LLVM; XLA's own rewriting of products stays on

    def make(config):
        return jax.jit(lambda key: initial_parameters(config, key), compiler_options=quick)(jax.random.key(3))

    loose, unrolled = in_both_layouts(config, make)
    jax.tree.map(np.testing.assert_array_equal, loose, unrolled)


@pytest.mark.parametrize("scheme", known_schemes())
def test_every_parameter_of_every_scheme_has_a_rule_and_its_shape(scheme):
    config = dataclasses.replace(CONFIG, residual=scheme, norm="layer", num_layers=4)
    made = jax.eval_shape(functools.partial(initial_parameters, config), jax.random.key(0))
    shapes = parameter_shapes(config)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), made) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), shapes
    )
    assert count_parameters(made) == sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
