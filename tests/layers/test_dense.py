"""Dense with several feature axes and a bias, its type, and the fence on its cotangent."""

import jax
import jax.numpy as jnp
import numpy as np

from siamese_jax.layers.dense import Dense, fence_cotangent
from siamese_jax.layers.platform import compiling_for, target_platform

random = np.random.default_rng(0)
X = random.normal(size=(2, 3, 5)).astype(np.float32)


def test_several_feature_axes_and_a_bias():
    module = Dense((4, 2, 3), use_bias=True)
    params = module.init(jax.random.key(0), X)["params"]
    assert params["kernel"].shape == (5, 4, 2, 3)
    np.testing.assert_array_equal(params["bias"], np.zeros((4, 2, 3)))
    params = {name: random.normal(size=leaf.shape).astype(np.float32) for name, leaf in params.items()}
    expected = np.einsum("bld,dxyz->blxyz", X, params["kernel"]) + params["bias"]
    np.testing.assert_allclose(module.apply({"params": params}, X), expected, rtol=1e-5, atol=1e-5)


def test_one_feature_axis_as_a_number():
    module = Dense(4)
    params = module.init(jax.random.key(0), X)["params"]
    assert params.keys() == {"kernel"}
    np.testing.assert_allclose(
        module.apply({"params": params}, X), X @ np.asarray(params["kernel"]), rtol=1e-5, atol=1e-6
    )


def test_compute_type_is_the_output_type_and_parameters_stay_float32():
    module = Dense(4, use_bias=True, dtype="bfloat16")
    params = module.init(jax.random.key(0), X)["params"]
    assert {leaf.dtype for leaf in params.values()} == {jnp.dtype("float32")}
    assert module.apply({"params": params}, X).dtype == jnp.bfloat16


def test_gradients_do_not_depend_on_the_platforms_fence():
    def loss(kernel):
        return jnp.sum(jnp.sin(fence_cotangent(X @ kernel)))

    kernel = random.normal(size=(5, 4)).astype(np.float32)
    fenced = jax.jit(jax.grad(loss))(kernel)
    with compiling_for("tpu"):
        assert target_platform() == "tpu"
        free = jax.jit(jax.grad(lambda kernel: loss(kernel)))(kernel)
    assert target_platform() == jax.default_backend()
    np.testing.assert_allclose(fenced, free, rtol=1e-6)
    np.testing.assert_allclose(free, np.einsum("bld,blf->df", X, np.cos(X @ kernel)), rtol=1e-4, atol=1e-5)
