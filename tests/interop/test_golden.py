"""The language models against outputs, streams and gradients recorded from the PyTorch reference."""

import dataclasses
import json
import pathlib

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from siamese_jax.interop.reference import from_reference, language_config, shapes_of
from siamese_jax.models.initialize import parameter_shapes
from siamese_jax.models.language import LanguageModel

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
CASES = [
    "a1_hybridpre_hybridnorm_tied",
    "a3_hybridpre_hybridnorm_gqa2_untied",
    "b1_olmo_prenorm_tied",
    "b3_olmo_prenorm_qknorm_gqa2",
    "b5_hybridnorm_singlestream_untied",
]
# (suffix, compute type, logits and streams absolute, gradients relative to the tensor's maximum)
PRECISIONS = [("", "float32", 2e-5, 1e-5), ("_f64", "float64", 1e-10, 1e-10)]


@pytest.fixture(params=PRECISIONS, ids=["float32", "float64"])
def precision(request):
    """The precision of a comparison, with 64-bit types switched on while it needs them."""
    jax.config.update("jax_enable_x64", request.param[1] == "float64")
    with jax.default_matmul_precision("highest"):
        yield request.param
    jax.config.update("jax_enable_x64", False)


def load(case: str, dtype: str):
    """(file, configuration, parameters) of a golden case."""
    golden = np.load(GOLDEN / f"{case}.npz")
    weights = {name[6:]: golden[name] for name in golden.files if name.startswith("param/")}
    config = language_config(json.loads(str(golden["config"])), shapes_of(weights))
    config = dataclasses.replace(config, dtype=dtype, loss_slice=7)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), from_reference(weights, config))
    return golden, config, params


def mean_loss(model, params, tokens, rotary):
    """Mean next-token cross-entropy over B(T-1) positions; the rotary tables are cut to T-1."""
    rotary = tuple(table[:-1] for table in rotary)
    losses, _ = model.apply({"params": params}, tokens[:, :-1], tokens[:, 1:], rotary=rotary, method="losses")
    return losses.mean()


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "loop"])
@pytest.mark.parametrize("case", CASES)
def test_golden(case, precision, scan):
    suffix, dtype, atol, gradient_tolerance = precision
    golden, config, params = load(case + suffix, dtype)
    model = LanguageModel(config)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, parameter_shapes(config))
    if not scan:
        from siamese_jax.models.stack import unstack_layers

        params = unstack_layers(params, config.segments())
        model = LanguageModel(dataclasses.replace(config, scan=False))
    tokens = jnp.asarray(golden["in/input_ids"], jnp.int32)
    rotary = (jnp.asarray(golden["rope/sin"]), jnp.asarray(golden["rope/cos"]))

    @jax.jit
    def outputs(params):
        logits = model.apply({"params": params}, tokens, rotary=rotary)
        _, states = model.apply(
            {"params": params}, tokens, rotary=rotary, watch=lambda streams: streams, method="hidden"
        )
        return logits, states

    logits, states = outputs(params)
    assert logits.dtype == dtype
    np.testing.assert_allclose(logits, golden["out/logits"], rtol=0, atol=atol)
    stream_keys = {"x": "post" if "post" in states else "stream", "y": "pre"}
    seen = [name for name in golden.files if name.startswith("state/") and not name.endswith("_0")]
    assert len(seen) == config.num_layers * len(states)
    for name in seen:
        stream, _, layer = name.removeprefix("state/").partition("_")
        actual = states[stream_keys[stream]][int(layer) - 1]
        np.testing.assert_allclose(actual, golden[name], rtol=0, atol=atol, err_msg=name)

    loss, gradient = jax.jit(jax.value_and_grad(lambda p: mean_loss(model, p, tokens, rotary)))(params)
    np.testing.assert_allclose(loss, golden["out/loss"], rtol=0, atol=atol)
    recorded = {name[5:]: golden[name] for name in golden.files if name.startswith("grad/")}
    recorded = from_reference(recorded, config)
    if not scan:
        recorded = unstack_layers(recorded, config.segments())
    recorded = flax.traverse_util.flatten_dict(recorded, sep="/")
    gradient = flax.traverse_util.flatten_dict(gradient, sep="/")
    assert recorded.keys() == gradient.keys()
    for name, expected in recorded.items():
        limit = gradient_tolerance * np.abs(expected).max()
        np.testing.assert_allclose(gradient[name], expected, rtol=0, atol=limit, err_msg=name)
