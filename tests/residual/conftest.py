"""What the residual tests share: two branches, random gains, and a model made of nothing but a scheme."""

import types

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from siamese_jax.residual import make_segments

NUM_LAYERS, BATCH, LENGTH, WIDTH = 3, 2, 3, 6
_random = np.random.default_rng(0)
MIXING = _random.normal(size=(LENGTH, LENGTH))
ATTENTION = _random.normal(size=(WIDTH, WIDTH)) / 2
UP, DOWN = _random.normal(size=(WIDTH, 9)) / 3, _random.normal(size=(9, WIDTH)) / 2


def attend(h, xp=np):
    """Something attention-like: mixes positions and channels, nonlinear."""
    return xp.einsum("ls,bsd->bld", MIXING, xp.tanh(h @ ATTENTION))


def feed(h, xp=np):
    """Something MLP-like: per position, nonlinear, another function than `attend`."""
    return xp.sin(h @ UP) @ DOWN


class Layer(nn.Module):
    """One layer of a scheme around the two branches."""

    make_residual: object

    def setup(self):
        self.residual = self.make_residual()

    def __call__(self, streams, depth):
        return self.residual.layer(streams, lambda h: attend(h, jnp), lambda h: feed(h, jnp), depth)


class Chain(nn.Module):
    """A whole stack of a scheme, unrolled; parameters `layer_I/residual/NORM/...` and `residual/NORM/...`."""

    segments: tuple

    def setup(self):
        self.residual = self.segments[-1][0]()
        self.first = self.segments[0][0]() if len(self.segments) > 1 else self.residual
        makers = [make for make, count in self.segments for _ in range(count)]
        self.layer = [Layer(make) for make in makers]

    def __call__(self, h):
        return self.close(self.run(self.first.open(h)))

    def run(self, streams):
        """The layers alone."""
        for depth, layer in enumerate(self.layer):
            streams = layer(streams, depth)
        return streams

    def close(self, streams):
        """The end of the scheme alone."""
        return self.residual.close(streams)


def make_chain(scheme, seed=1, norm=None, overrides="", **options):
    """(module, {path: random float64 array}) of a scheme; gains lie around 1 and differ everywhere."""
    norm = {} if norm is None else {"norm": norm}
    chain = Chain(make_segments(scheme, NUM_LAYERS, options=options, overrides=overrides, **norm))
    shapes = jax.eval_shape(chain.init, jax.random.key(0), jnp.zeros((BATCH, LENGTH, WIDTH)))["params"]
    random = np.random.default_rng(seed)
    flat = flax.traverse_util.flatten_dict(shapes, sep="/")
    return chain, {path: random.uniform(0.5, 1.5, leaf.shape) for path, leaf in flat.items()}


def apply(chain, flat, *args, **kwargs):
    """Applies a chain to flat parameters; numpy inputs go through the same arithmetic as JAX ones."""
    args = jax.tree.map(jnp.asarray, args)
    params = flax.traverse_util.unflatten_dict({k: jnp.asarray(v) for k, v in flat.items()}, sep="/")
    return chain.apply({"params": params}, *args, **kwargs)


@pytest.fixture
def wide():
    """64-bit types while a test runs."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture
def embedding():
    """The input of a chain, [B, L, D] float64."""
    return np.random.default_rng(2).normal(size=(BATCH, LENGTH, WIDTH))


@pytest.fixture
def lab():
    """Everything above by name."""
    return types.SimpleNamespace(
        num_layers=NUM_LAYERS, attend=attend, feed=feed, make_chain=make_chain, apply=apply
    )  # fmt: skip
