"""Golden files of language models against ours.

Legend: B batch, L length, K head dim.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from siamese_jax.errors import InputError
from siamese_jax.interop import reference
from siamese_jax.interop.layout import join_all, split_all
from siamese_jax.interop.recorded import (
    Golden,
    Row,
    Settings,
    difference,
    gradient_rows,
    opened_by,
    output_rows,
    stream_states,
)
from siamese_jax.layers.rotary import rotary_tables
from siamese_jax.models.families import check_model
from siamese_jax.models.language import LanguageConfig, LanguageModel


def compare_language(golden: Golden, settings: Settings) -> tuple[str, list[Row]]:
    """(what the model is, rows) of a language model's file."""
    dtype, atol, rtol = settings.dtype, settings.atol, settings.rtol
    weights = golden.group("param")
    config = reference.language_config(golden.config, reference.shapes_of(weights))
    config = dataclasses.replace(config, dtype=dtype, scan=settings.scan)
    check_model(config)
    layout = reference.layout(config)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), join_all(layout, config, weights))
    tokens = _tokens(golden, config)
    rows, tables = [], golden.group("rope")
    rotary = ours = rotary_tables(jnp.arange(tokens.shape[1]), config.key_dim, config.rope_theta)
    if tables:
        if set(tables) != {"sin", "cos"}:
            raise InputError(f"{golden.path} has the tables rope/{', rope/'.join(sorted(tables))}, not sin and cos")
        rotary = tables["sin"], tables["cos"]
        limit = tokens.shape[1] * 2.0**-23  # one rounding of the largest angle, in float32
        rows += [
            difference(f"rope/{name}", *both, "abs", limit)
            for name, *both in zip(("sin", "cos"), ours, rotary, strict=True)
        ]
    outputs = language_outputs(config, params, tokens, rotary)
    rows += output_rows(golden, {name: outputs[name] for name in ("logits", "loss")}, outputs["states"], atol)
    if golden.group("grad"):
        rows += gradient_rows(golden, split_all(layout, config, outputs["gradients"]), rtol)
    return f"language model, {config.residual}", rows


def _tokens(golden: Golden, config: LanguageConfig) -> jax.Array:
    inputs = golden.group("in")
    if set(inputs) != {"input_ids"}:
        raise InputError(f"{golden.path} has the inputs {', '.join(sorted(inputs)) or 'none'}, not input_ids alone")
    tokens = inputs["input_ids"]
    if (
        tokens.ndim != 2
        or not np.issubdtype(tokens.dtype, np.integer)
        or min(tokens.shape) < 1
        or tokens.shape[1] < 2
    ):
        raise InputError(
            f"{golden.path}: input_ids are {tokens.dtype} of shape {tokens.shape}; they must be whole numbers of "
            "shape (batch, length) with at least two of them"
        )
    if tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise InputError(
            f"{golden.path}: input_ids from {tokens.min()} to {tokens.max()} do not fit a vocabulary of "
            f"{config.vocab_size}"
        )
    return jnp.asarray(tokens, jnp.int32)


@functools.partial(jax.jit, static_argnums=0)  # files of one configuration share one compilation
def _compute(config: LanguageConfig, params, tokens_BL, rotary):
    """(logits, streams entering layer 0, streams leaving the layers, loss, gradients)."""
    model, variables = LanguageModel(config), {"params": params}

    def mean_loss(params):
        losses, _ = model.apply(
            {"params": params}, tokens_BL[:, :-1], tokens_BL[:, 1:],
            rotary=tuple(table[:-1] for table in rotary), method="losses",
        )  # fmt: skip
        return losses.mean()

    logits = model.apply(variables, tokens_BL, rotary=rotary)
    first = model.apply(variables, tokens_BL, method=opened_by(lambda model, tokens: model.embedding(tokens)))
    _, rest = model.apply(variables, tokens_BL, rotary=rotary, watch=lambda streams: streams, method="hidden")
    return logits, first, rest, *jax.value_and_grad(mean_loss)(params)


def language_outputs(config: LanguageConfig, params, tokens_BL, rotary) -> dict[str, Any]:
    """logits, states by the file's names, loss (mean over the L - 1 next tokens) and gradients of ours."""
    rotary = tuple(jnp.asarray(table) for table in rotary)
    logits, first, rest, loss, gradients = _compute(config, params, tokens_BL, rotary)
    states = stream_states(first, rest)
    return {"logits": logits, "states": states, "loss": loss, "gradients": gradients}
