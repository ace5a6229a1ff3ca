"""SiameseNorm with some gains at zero is an older scheme; its state Jacobian in blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from siamese_jax.layers.norms import RMSNorm, rms_norm
from siamese_jax.residual import Streams, functional

pytestmark = pytest.mark.usefixtures("wide")
BARE = {"input_norm": False, "final_norm": False}


def with_gains(flat, ending, value, layers=range(99)):
    """The parameters with every gain of that ending, in these layers and at the top, set to a value."""
    chosen = ("residual/", *(f"layer_{i}/" for i in layers))
    return {
        path: np.full_like(leaf, value) if ending in path and path.startswith(chosen) else leaf
        for path, leaf in flat.items()
    }


def renamed(flat, **names):
    """{path: gain} of another scheme: `attention_norm='attention_pre'` takes that gain for this one."""
    return {
        path.replace(old, new): leaf for path, leaf in flat.items() for new, old in names.items() if old in path
    }


PRE_NAMES = {"attention_norm": "attention_pre", "mlp_norm": "mlp_pre", "final": "final_pre"}


def test_lazy_without_post_gains_is_pre_norm(lab, embedding):
    siamese, flat = lab.make_chain("siamese", **BARE)
    pre, _ = lab.make_chain("pre")
    actual = lab.apply(siamese, with_gains(flat, "_post/", 0.0), embedding)
    np.testing.assert_array_equal(actual, lab.apply(pre, renamed(flat, **PRE_NAMES), embedding))


def test_eager_without_post_gains_from_an_empty_post_stream_is_pre_norm(lab, embedding):
    siamese, flat = lab.make_chain("siamese", post_norm="write", **BARE)
    pre, _ = lab.make_chain("pre")
    flat = with_gains(flat, "_post/", 0.0)
    streams = Streams(jnp.zeros_like(embedding), jnp.asarray(embedding))
    streams = lab.apply(siamese, flat, streams, method="run")
    np.testing.assert_array_equal(streams.post, 0.0)
    actual = lab.apply(siamese, flat, streams, method="close")
    np.testing.assert_array_equal(actual, lab.apply(pre, renamed(flat, **PRE_NAMES), embedding))


@pytest.mark.parametrize("scheme", ["siamese", "siamese_hybrid"])
def test_norms_of_norms_with_unit_gains_change_nothing(scheme, lab, embedding):
    tiny = functools.partial(RMSNorm, epsilon=1e-14)
    siamese, flat = lab.make_chain(scheme, norm=tiny)
    pre, _ = lab.make_chain("pre", norm=tiny)
    flat = with_gains({path: np.ones_like(leaf) for path, leaf in flat.items()}, "post/", 0.0)
    actual = lab.apply(siamese, flat, embedding)
    expected = lab.apply(pre, renamed(flat, **PRE_NAMES), embedding)
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-11)


def test_eager_without_pre_gains_is_post_norm(lab, embedding):
    siamese, flat = lab.make_chain("siamese", post_norm="write", depth_scale="none", **BARE)
    post, _ = lab.make_chain("post")
    actual = lab.apply(siamese, with_gains(flat, "_pre/", 0.0), embedding)
    names = {"attention_norm": "attention_post", "mlp_norm": "mlp_post"}
    np.testing.assert_array_equal(actual, lab.apply(post, renamed(flat, **names), embedding))


@pytest.mark.parametrize("post_norm", ["write", "read"])
def test_without_pre_gains_it_is_depth_scaled_post_norm(post_norm, lab, embedding):
    siamese, flat = lab.make_chain("siamese", post_norm=post_norm, depth_scale="layer2", **BARE)
    actual = lab.apply(siamese, with_gains(flat, "_pre/", 0.0), embedding)
    gains = [
        flat[f"layer_{i}/residual/{f}_post/scale"] for i in range(lab.num_layers) for f in ("attention", "mlp")
    ]
    x = embedding if post_norm == "write" else rms_norm(jnp.asarray(embedding), gains[0])
    after = gains if post_norm == "write" else [*gains[1:], flat["residual/final_post/scale"]]
    for k, gain in enumerate(after):
        branch = lab.feed if k % 2 else lab.attend
        x = rms_norm(x + branch(x, jnp) / np.sqrt(2 * (k // 2 + 1)), gain)
    np.testing.assert_allclose(actual, x, rtol=1e-12, atol=1e-13)


def test_depth_scaling_is_the_alpha_of_deepnorm(lab, embedding):
    tiny = functools.partial(RMSNorm, epsilon=1e-14)
    deepnorm, flat = lab.make_chain("deepnorm", norm=tiny)
    alpha = (2 * lab.num_layers) ** 0.25
    post, pre = jnp.asarray(embedding), jnp.zeros_like(embedding)
    for i in range(lab.num_layers):
        for name, branch in (("attention", lab.attend), ("mlp", lab.feed)):
            post, pre = functional.siamese_eager(
                post,
                pre,
                lambda h, branch=branch: branch(h, jnp),
                post_norm=lambda h, i=i, name=name: rms_norm(
                    h, jnp.asarray(flat[f"layer_{i}/residual/{name}_norm/scale"]), 1e-14
                ),
                pre_norm=functional.nothing,
                scale=1 / alpha,
            )
    np.testing.assert_allclose(post, lab.apply(deepnorm, flat, embedding), rtol=1e-10, atol=1e-11)


def test_a_pre_stream_that_is_summed_but_not_read_is_resi_dual(lab, embedding):
    resi_dual, flat = lab.make_chain("resi_dual")

    def norm(path):
        return lambda h: rms_norm(h, jnp.asarray(flat[path]))

    post = pre = jnp.asarray(embedding)
    for i in range(lab.num_layers):
        for name, branch in (("attention", lab.attend), ("mlp", lab.feed)):
            post, pre = functional.siamese_eager(
                post,
                pre,
                lambda h, branch=branch: branch(h, jnp),
                post_norm=norm(f"layer_{i}/residual/{name}_norm/scale"),
                pre_norm=functional.nothing,
            )
    out = functional.merge(post, pre, post_norm=functional.identity, pre_norm=norm("residual/final_pre/scale"))
    np.testing.assert_array_equal(out, lab.apply(resi_dual, flat, embedding))


@pytest.mark.parametrize("num_post", [0, 1, 2, 3])
def test_zeroing_layer_by_layer_gives_a_schedule_of_post_and_pre_layers(num_post, lab, embedding):
    siamese, flat = lab.make_chain("siamese", depth_scale="none", **BARE)
    layers = range(lab.num_layers)
    mixed = with_gains(flat, "_pre/", 0.0, layers[:num_post]) | {
        path: flat[path] for path in flat if path.startswith("residual/")
    }
    zeroed = with_gains(mixed, "_post/", 0.0, layers[num_post:])
    gains = {path: jnp.asarray(leaf) for path, leaf in flat.items()}

    post = jnp.asarray(embedding)
    pre = jnp.asarray(embedding)
    for i in layers:
        for name, branch in (("attention", lab.attend), ("mlp", lab.feed)):
            if i < num_post:  # Post-Norm, normalised when read; the pre stream sums its updates all the same
                post = rms_norm(post, gains[f"layer_{i}/residual/{name}_post/scale"])
                update = branch(post, jnp)
                post, pre = post + update, pre + update
            else:  # Pre-Norm that goes on from the sum
                pre = pre + branch(rms_norm(pre, gains[f"layer_{i}/residual/{name}_pre/scale"]), jnp)
    out = rms_norm(pre, gains["residual/final_pre/scale"])
    np.testing.assert_allclose(lab.apply(siamese, zeroed, embedding), out, rtol=1e-12, atol=1e-13)


def test_state_jacobian_of_algorithm_1_is_its_block_formula(lab):
    random = np.random.default_rng(5)
    post, pre, gain_post, gain_pre = (jnp.asarray(random.normal(size=6)) for _ in range(4))
    norm_post, norm_pre = (functools.partial(rms_norm, scale=gain) for gain in (gain_post, gain_pre))

    def branch(h):
        return lab.feed(h, jnp)

    def step(state):
        return jnp.stack(
            functional.siamese_eager(state[0], state[1], branch, post_norm=norm_post, pre_norm=norm_pre)
        )

    actual = jax.jit(jax.jacfwd(step))(jnp.stack([post, pre]))
    read = post + norm_pre(pre)
    j_branch, j_pre = jax.jacfwd(branch)(read), jax.jacfwd(norm_pre)(pre)
    j_post = jax.jacfwd(norm_post)(post + branch(read))
    one = np.eye(6)
    expected = [
        [j_post @ (one + j_branch), j_post @ j_branch @ j_pre],
        [j_branch, one + j_branch @ j_pre],
    ]
    for row in (0, 1):
        for column in (0, 1):
            np.testing.assert_allclose(
                actual[row, :, column],
                expected[row][column],
                rtol=1e-11,
                atol=1e-12,
                err_msg=f"{row}{column}",
            )
