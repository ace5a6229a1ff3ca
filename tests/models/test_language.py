"""The language model: causality, layouts, rematerialisation, precision, documents, vocabulary, checks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from siamese_jax.errors import InputError
from siamese_jax.models.families import check_model
from siamese_jax.models.initialize import parameter_shapes
from siamese_jax.models.language import LanguageConfig, LanguageModel
from siamese_jax.models.loss import weighted_sums
from siamese_jax.models.stack import REMAT_POLICIES, stack_layers, unstack_layers
from siamese_jax.residual import known_schemes

LENGTH = 6
TINY = LanguageConfig(
    num_layers=2, width=8, num_heads=2, num_kv_heads=1, mlp_hidden=12, vocab_size=13, vocab_multiple=1,
    loss_slice=4,
)  # fmt: skip
TOKENS = np.array([[3, 1, 4, 5, 9, 2], [6, 5, 3, 8, 7, 12]], np.int32)
TARGETS = np.array([[1, 4, 5, 9, 2, 6], [5, 3, 8, 7, 12, 0]], np.int32)


# These programs are tiny and many: what counts is the time that XLA takes to compile them.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def randomised(config, seed=0):
    """Parameters with every entry random, gains too: large enough that every path matters."""
    random = np.random.default_rng(seed)

    def draw(path, leaf):
        if path[-1].key in ("scale", "gain"):
            return random.uniform(0.5, 1.5, leaf.shape).astype(np.float32)
        return (random.normal(size=leaf.shape) * 0.5).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, parameter_shapes(config))


@pytest.mark.parametrize("scheme", known_schemes())
def test_no_logit_depends_on_a_later_token(scheme):
    config = dataclasses.replace(TINY, residual=scheme, scan=False)
    model, params = LanguageModel(config), jax.tree.map(jnp.asarray, randomised(config))
    tokens = jnp.arange(LENGTH)[None]  # all different: row s of the table is the embedding of position s
    weight = np.random.default_rng(1).normal(size=config.vocab_size).astype(np.float32)

    def scores(table):
        return model.apply({"params": params | {"embedding": {"table": table}}}, tokens)[0] @ weight

    slopes = np.abs(jax.jacrev(scores)(params["embedding"]["table"])).max(axis=-1)[:, :LENGTH]
    t, s = np.indices(slopes.shape)
    assert (slopes[s > t] == 0).all()
    assert (slopes[s <= t] > 1e-6).all()


@pytest.fixture
def wide():
    """64-bit types, for what must agree far beyond the rounding of float32."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@functools.lru_cache
def loss_and_gradient(residual, scan, remat="none"):
    """(loss, gradient in the unrolled layout) of the tiny model in float64."""
    options = (("post_fraction", 0.5),) if residual == "mix" else ()
    config = dataclasses.replace(
        TINY, dtype="float64", residual=residual, residual_options=options, scan=False, remat=remat
    )
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), randomised(config))
    if scan:
        params = stack_layers(params, config.segments())
        config = dataclasses.replace(config, scan=True)
    model = LanguageModel(config)

    def loss(params):
        losses = model.apply({"params": params}, TOKENS, TARGETS, method="losses")
        return weighted_sums(losses, np.ones(TARGETS.shape))[0]

    value, gradient = jit(jax.value_and_grad(loss))(params)
    return value, unstack_layers(gradient, config.segments()) if scan else gradient


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12), actual, expected)


@pytest.mark.parametrize("residual", ["mix", "scaled"])
def test_scan_is_loop(residual, wide):
    assert_same(loss_and_gradient(residual, True), loss_and_gradient(residual, False))


@pytest.mark.parametrize("remat", REMAT_POLICIES)
@pytest.mark.parametrize("scan", [True, False], ids=["scan", "loop"])
def test_no_remat_policy_changes_values_or_gradients(remat, scan, wide):
    assert_same(loss_and_gradient("siamese_hybrid", scan, remat), loss_and_gradient("siamese_hybrid", False))


@pytest.mark.parametrize(
    ("residual", "names"),
    [("siamese", {"layers"}), ("mix", {"layers_from_0", "layers_from_1"})],
)
def test_stack_and_unstack_are_inverses(residual, names):
    config = dataclasses.replace(TINY, residual=residual, num_layers=4)
    params = randomised(config)
    segments = config.segments()
    loose = unstack_layers(params, segments)
    assert params.keys() >= names and loose.keys() >= {f"layer_{i}" for i in range(4)}
    unrolled = parameter_shapes(dataclasses.replace(config, scan=False))
    assert jax.tree.map(jnp.shape, loose) == jax.tree.map(jnp.shape, unrolled)
    again = stack_layers(loose, segments)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_streams_may_stay_float32_under_bfloat16_compute():
    base = dataclasses.replace(TINY, width=32, mlp_hidden=64)
    params = randomised(base)

    def run(**changes):
        model, seen = LanguageModel(dataclasses.replace(base, **changes)), {}

        def watch(streams):
            seen.update({name: stream.dtype for name, stream in streams.items()})
            return 0.0

        hidden = jit(lambda p: model.apply({"params": p}, TOKENS, watch=watch, method="hidden")[0])(params)
        logits = jax.eval_shape(lambda p: model.apply({"params": p}, TOKENS), params)
        assert logits.dtype == jnp.float32
        assert seen.keys() == {"post", "pre"}
        return hidden.astype(np.float32), hidden.dtype, set(seen.values())

    full, hidden_type, stream_types = run()
    assert (hidden_type, stream_types) == (jnp.float32, {jnp.dtype("float32")})
    wide, hidden_type, stream_types = run(dtype="bfloat16", stream_dtype="float32")
    assert (hidden_type, stream_types) == (jnp.bfloat16, {jnp.dtype("float32")})
    half, hidden_type, stream_types = run(dtype="bfloat16")
    assert (hidden_type, stream_types) == (jnp.bfloat16, {jnp.dtype("bfloat16")})
    errors = [np.sqrt(np.mean((hidden - full) ** 2) / np.mean(full**2)) for hidden in (wide, half)]
    assert 0 < min(errors) and max(errors) < 0.03


def test_documents_of_a_window_do_not_see_each_other():
    positions = jnp.array([[0, 1, 2, 0, 1, 2]])
    segments = jnp.array([[4, 4, 4, 5, 5, 5]])
    params = jax.tree.map(jnp.asarray, randomised(TINY))
    model = LanguageModel(TINY)

    @jit
    def logits(tokens):
        return model.apply({"params": params}, tokens, positions_BL=positions, segments_BL=segments)[0]

    whole = logits(TOKENS[:1])
    first, second = TOKENS[:1].copy(), TOKENS[:1].copy()
    first[0, :3], second[0, 3:] = [7, 7, 0], [11, 0, 6]
    np.testing.assert_array_equal(logits(first)[3:], whole[3:])
    np.testing.assert_array_equal(logits(second)[:3], whole[:3])
    assert np.abs(logits(first)[:3] - whole[:3]).max() > 1e-2

    alone = jit(lambda tokens: model.apply({"params": params}, tokens)[0])
    np.testing.assert_allclose(alone(TOKENS[:1, 3:]), whole[3:], rtol=1e-5, atol=1e-5)
    assert np.abs(alone(TOKENS[:1])[3:] - whole[3:]).max() > 1e-2  # they do see each other without segments


def test_rows_that_pad_the_vocabulary_count_for_nothing():
    padded = dataclasses.replace(TINY, vocab_multiple=8)
    assert padded.padded_vocab == 16
    params = randomised(padded)
    cut = params | {
        "embedding": {"table": params["embedding"]["table"][:13]},
        "head": {"kernel": params["head"]["kernel"][:, :13]},
    }

    def run(config, params):
        def outputs(params):
            losses = LanguageModel(config).apply({"params": params}, TOKENS, TARGETS, method="losses")
            return losses, LanguageModel(config).apply({"params": params}, TOKENS)

        return jit(outputs)(params)

    losses, logits = run(padded, params)
    plain_losses, plain_logits = run(TINY, cut)
    assert np.isneginf(logits[..., 13:]).all()
    np.testing.assert_allclose(logits[..., :13], plain_logits, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 0}, "model.num_layers is 0: it must be at least 1"),
        ({"width": -8}, "model.width is -8: it must be at least 1"),
        ({"num_heads": 0}, "model.num_heads is 0: it must be at least 1"),
        ({"mlp_hidden": 0}, "model.mlp_hidden is 0: it must be at least 1"),
        ({"vocab_size": 0}, "model.vocab_size is 0: it must be at least 1"),
        ({"vocab_multiple": 0}, "model.vocab_multiple is 0: it must be at least 1"),
        ({"num_kv_heads": -1}, "model.num_kv_heads is -1: it must not be negative"),
        ({"head_dim": -1}, "model.head_dim is -1: it must not be negative"),
        ({"loss_slice": -1}, "model.loss_slice is -1: it must not be negative"),
        ({"num_heads": 3}, "model.num_heads 3 does not divide model.width 8"),
        ({"num_heads": 4, "num_kv_heads": 3}, "model.num_kv_heads 3 does not divide model.num_heads 4"),
        ({"num_heads": 8}, "the head dim is 1: rotary positions need an even one"),
        ({"head_dim": 5}, "the head dim is 5: rotary positions need an even one"),
        ({"query_norm": "heads"}, "model.query_norm is 'heads': it must be one of none, head, full"),
        ({"key_norm": True}, "model.key_norm is True: it must be one of none, head, full"),
        ({"value_norm": "all"}, "model.value_norm is 'all': it must be one of none, head, full"),
        ({"context_norm": ""}, "model.context_norm is '': it must be one of none, head, full"),
        ({"activation": "relu"}, "model.activation is 'relu': it must be one of swiglu, gelu, gelu_tanh"),
        ({"attention": "flash"}, "model.attention is 'flash': it must be one of auto, plain, cudnn, splash"),
        ({"init": "xavier"}, "model.init is 'xavier': it must be one of mitchell, normal, full_megatron"),
        ({"dtype": "float16"}, "model.dtype is 'float16': it must be one of float32, bfloat16, float64"),
        ({"stream_dtype": "half"}, "model.stream_dtype is 'half': it must be one of compute, float32"),
        ({"remat": "some"}, "unknown remat policy 'some': model.remat must be one of none, full, matmuls"),
        ({"norm": "batch"}, "unknown norm 'batch': model.norm must be one of rms, layer"),
        ({"residual": "siam"}, "unknown residual scheme 'siam'"),
        (
            {"residual_options": (("final_norms", True),)},
            "has no option 'final_norms'; its options: depth_scale",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(changes, words):
    config = dataclasses.replace(TINY, num_kv_heads=0)
    check_model(config)
    with pytest.raises(InputError) as caught:
        check_model(dataclasses.replace(config, **changes))
    assert words in str(caught.value) and "\n" not in str(caught.value)
