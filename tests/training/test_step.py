"""One update: accumulation, metrics, running average, streams, every scheme, and one device = eight."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs import records, shared_place

from siamese_jax.models.initialize import initial_parameters
from siamese_jax.models.language import LanguageConfig, LanguageModel
from siamese_jax.residual.scheme import known_schemes
from siamese_jax.training.language_task import LanguageTask, language_loss
from siamese_jax.training.optimizer import init_ema
from siamese_jax.training.state import TrainState
from siamese_jax.training.step import accumulated_gradient, make_stream_watch, make_train_step

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def config(**options) -> LanguageConfig:
    small = dict(width=16, num_layers=2, num_heads=2, mlp_hidden=32, vocab_size=32, vocab_multiple=32)
    return LanguageConfig(**small | options)


@pytest.fixture(scope="module")
def model():
    return LanguageModel(config())


def make_params(model):
    return jax.jit(lambda: initial_parameters(model.config, jax.random.key(0)), compiler_options=QUICK)()


@pytest.fixture(scope="module")
def params(model):
    return make_params(model)


@pytest.fixture(scope="module", params=known_schemes())
def scheme(request):
    """(model, parameters) of every scheme in turn."""
    model = LanguageModel(config(residual=request.param))
    return model, make_params(model)


@pytest.fixture(scope="module")
def batch():
    """8 rows whose weights are very unequal: row i has 1 + 3 * (i % 4) targets of 16, the other four none."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 32, (8, 17), dtype=np.int32)
    weights = (np.arange(16) < 1 + 3 * (np.arange(8) % 4)[:, None]).astype(np.float32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def norm(tree) -> float:
    return float(np.sqrt(sum(np.sum(np.square(np.asarray(leaf, np.float64))) for leaf in jax.tree.leaves(tree))))


def assert_close(tree, other, rtol):
    for leaf, twin in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(leaf, twin, rtol=rtol, atol=rtol * float(np.abs(twin).max()))


def make_state(params, optimizer, with_ema=False):
    step, key = jnp.zeros((), jnp.int32), jnp.zeros(2, jnp.uint32)
    return TrainState(step, params, optimizer.init(params), key, init_ema(params) if with_ema else None)


def test_accumulation_by_four_equals_one(model, params, batch):
    """Averaging the averages of micro-batches would fail: theirs have from 1 to 10 targets a row."""
    loss = language_loss(model, z_loss=1e-3)
    taken = {
        parts: jax.jit(accumulated_gradient, static_argnums=(0, 3), compiler_options=QUICK)(
            loss, params, batch, parts
        )
        for parts in (1, 2, 4)
    }
    for parts in (2, 4):
        assert_close(taken[parts], taken[1], 1e-5)
    losses = np.asarray(
        model.apply({"params": params}, batch["inputs"], batch["targets"], method="losses")[0], np.float64
    )
    whole = (losses * batch["weights"]).sum() / batch["weights"].sum()
    np.testing.assert_allclose(taken[4][0][1], whole, rtol=1e-6)
    by_part = [losses[a::4][batch["weights"][a::4] > 0].mean() for a in range(4)]
    assert abs(np.mean(by_part) - whole) > 1e-3 * whole  # so the wrong average would be seen


def test_norms_in_the_metrics_equal_numpy(model, params, batch):
    schedule = lambda count: 0.5 / (count + 1)  # noqa: E731
    optimizer = optax.sgd(schedule)
    state = make_state(params, optimizer)
    step = jax.jit(make_train_step(language_loss(model, 0.0), optimizer, schedule), compiler_options=QUICK)
    after, metrics = step(state, batch)
    loss = lambda params: language_loss(model, 0.0)(params, batch, batch["weights"].sum())[0]  # noqa: E731
    gradient = jax.jit(jax.grad(loss), compiler_options=QUICK)(state.params)
    update = jax.tree.map(lambda new, old: np.float64(new) - np.float64(old), after.params, state.params)
    np.testing.assert_allclose(metrics["grad_norm"], norm(gradient), rtol=1e-5)
    np.testing.assert_allclose(metrics["param_norm"], norm(after.params), rtol=1e-6)
    np.testing.assert_allclose(metrics["update_norm"], norm(update), rtol=1e-4)
    np.testing.assert_allclose(metrics["learning_rate"], 0.5)
    assert int(after.step) == 1 and float(metrics["loss"]) == float(metrics["objective"])


def test_the_running_average_follows_and_does_not_steer(model, params, batch):
    """Debiased: the average of parameters p_1 .. p_t with weights decay^(t - i), divided by their sum."""
    optimizer, schedule, decay = optax.sgd(0.5), lambda count: 0.5, 0.9
    followed, plain = make_state(params, optimizer, True), make_state(params, optimizer)
    with_ema = jax.jit(
        make_train_step(language_loss(model, 0.0), optimizer, schedule, ema=decay), compiler_options=QUICK
    )
    without = jax.jit(make_train_step(language_loss(model, 0.0), optimizer, schedule), compiler_options=QUICK)
    seen = []
    for _ in range(4):
        followed, _ = with_ema(followed, batch)
        plain, _ = without(plain, batch)
        seen.append(jax.device_get(followed.params))
    assert_close(followed.params, plain.params, 1e-6)
    weights = decay ** np.arange(3, -1, -1)
    weights /= weights.sum()
    mean = jax.tree.map(lambda *ps: sum(w * np.float64(p) for w, p in zip(weights, ps, strict=True)), *seen)
    assert_close(followed.eval_params(), mean, 1e-5)
    assert plain.eval_params() is plain.params
    assert norm(jax.tree.map(lambda a, b: a - b, followed.eval_params(), followed.params)) > 1e-3


def test_the_loss_falls_on_a_fixed_batch(scheme, batch):
    """Every scheme learns 8 rows by heart, a little, in 10 steps of Adam."""
    model, params = scheme
    optimizer = optax.adam(1e-2)
    state = make_state(params, optimizer)
    step = jax.jit(
        make_train_step(language_loss(model, 0.0), optimizer, lambda count: 1e-2), compiler_options=QUICK
    )
    losses = []
    for _ in range(10):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.8 * losses[0]


def test_the_stream_watch_equals_numpy(scheme, batch):
    model, params = scheme
    watched = jax.jit(make_stream_watch(LanguageTask(), None, model), compiler_options=QUICK)(params, batch)
    _, streams = model.apply({"params": params}, batch["inputs"], watch=lambda streams: streams, method="hidden")
    segments = streams if isinstance(streams, list) else [streams]
    assert watched.keys() == segments[0].keys()
    for name, values in watched.items():
        states = np.concatenate([np.asarray(segment[name], np.float64) for segment in segments])
        assert states.shape == (2, 8, 16, 16)
        np.testing.assert_allclose(values, np.sqrt(np.mean(states**2, axis=(1, 2, 3))), rtol=1e-5)


def test_documents_that_do_not_see_each_other_reach_the_model(model, params, batch):
    """Segments and positions of a batch change the loss; without them it is that of one document."""
    segments = np.repeat([[1] * 6 + [2] * 10], 8, axis=0).astype(np.int32)
    positions = np.repeat([[*range(6), *range(10)]], 8, axis=0).astype(np.int32)
    loss, total = language_loss(model, 0.0), jnp.sum(batch["weights"])
    apart = loss(params, batch | {"segments": segments, "positions": positions}, total)[0]
    one = loss(params, batch | {"segments": np.ones_like(segments)}, total)[0]
    np.testing.assert_allclose(one, loss(params, batch, total)[0], rtol=1e-6)
    assert abs(float(apart - one)) > 1e-4


@pytest.mark.slow  # tests/parallel compares more of it
def test_eight_devices_equal_one(tmp_path_factory):
    """Whole runs with accumulation, each in its own process, on one and on eight virtual CPU devices."""
    place = shared_place(tmp_path_factory)
    overrides = ("training.batch_size=16", "training.accumulation=2", "eval.every=4", "training.steps=6")
    quick = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK.items())
    started, lines = {}, {}
    for devices in (1, 8):
        arguments = place.arguments(place.folder / f"devices{devices}", *overrides)
        flags = f"--xla_force_host_platform_device_count={devices} {quick}"
        started[devices] = place.start(*arguments, environment={"XLA_FLAGS": flags})
    for devices, process in started.items():
        ended = process.ended()
        assert ended.code == 0, ended.err
        assert f"devices: {devices} x cpu" in ended.out
        lines[devices] = records(place.folder / f"devices{devices}")
    assert [line["step"] for line in lines[8]] == list(range(1, 7))
    for one, eight in zip(lines[1], lines[8], strict=True):
        assert one.keys() == eight.keys()
        for name, value in one.items():
            assert eight[name] == pytest.approx(value, rel=1e-5), name
