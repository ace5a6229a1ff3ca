"""What the evaluation tests share: a tiny model, its parameters, and one device."""

import jax
import pytest

from siamese_jax.config import base_config
from siamese_jax.models.initialize import initial_parameters
from siamese_jax.models.language import LanguageConfig, LanguageModel
from siamese_jax.parallel.mesh import make_mesh


@pytest.fixture(scope="session")
def model():
    return LanguageModel(
        LanguageConfig(num_layers=1, width=8, num_heads=2, mlp_hidden=16, vocab_multiple=1, loss_slice=4)
    )


@pytest.fixture(scope="session")
def params(model):
    return jax.jit(initial_parameters, static_argnums=0)(model.config, jax.random.key(3))


@pytest.fixture(scope="session")
def mesh():
    return make_mesh(base_config().mesh)
