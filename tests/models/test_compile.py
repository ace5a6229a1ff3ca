"""A scanned stack is one layer's program whatever its depth."""

import re

import jax
import jax.numpy as jnp
import pytest

from siamese_jax.config import base_config, model_config
from siamese_jax.models.initialize import parameter_shapes
from siamese_jax.models.language import LanguageConfig, LanguageModel
from siamese_jax.training.language_task import language_loss
from siamese_jax.training.optimizer import make_optimizer
from siamese_jax.training.schedule import make_schedule
from siamese_jax.training.state import initial_state
from siamese_jax.training.step import make_train_step


def lowered_step(num_layers):
    """The AdamW train step of a tiny scanned model."""
    config = base_config()
    model = config.model
    model.num_layers, model.width, model.num_heads, model.mlp_hidden = num_layers, 16, 2, 64
    own = model_config(config)
    schedule = make_schedule(config.schedule, config.training.steps)
    optimizer = make_optimizer(config.optimizer, schedule, parameter_shapes(own))
    state = jax.eval_shape(lambda: initial_state(own, optimizer, 0, False))
    tokens = jax.ShapeDtypeStruct((2, 32), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens, "weights": jax.ShapeDtypeStruct((2, 32), jnp.float32)}
    step = make_train_step(language_loss(LanguageModel(own), 0.0), optimizer, schedule)
    return jax.jit(step, donate_argnums=0).lower(state, batch)


def num_instructions(lowered):
    """Lines of an HLO text that define a value."""
    return len(re.findall(r"^\s+(?:ROOT )?%?[\w.-]+ = ", lowered.as_text("hlo"), re.MULTILINE))


def test_the_program_of_80_layers_is_no_longer_than_that_of_10():
    short, long = num_instructions(lowered_step(10)), num_instructions(lowered_step(80))
    assert short > 500
    assert long == pytest.approx(short, rel=0.01)


def test_remat_saves_memory():
    tokens = jax.ShapeDtypeStruct((2, 32), jnp.int32)

    def temporary_bytes(remat):
        config = LanguageConfig(num_layers=8, width=16, num_heads=2, mlp_hidden=64, tie_embedding=True, remat=remat)

        def loss(params, tokens):
            return LanguageModel(config).apply({"params": params}, tokens, tokens, method="losses")[0].sum()

        lowered = jax.jit(jax.grad(loss)).lower(parameter_shapes(config), tokens)
        quick = {"xla_backend_optimization_level": 0}  # of LLVM; the buffers are XLA's
        return lowered.compile(quick).memory_analysis().temp_size_in_bytes

    assert temporary_bytes("full") < 0.7 * temporary_bytes("none")
