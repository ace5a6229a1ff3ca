"""The diffusion process against the papers' equations, written down here number by number in float64."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from siamese_jax.errors import InputError
from siamese_jax.models.gaussian import Process, hybrid_losses, noised, sample

SHAPE = 5, 2, 3, 2
STEPS = np.array([0, 1, 2, 500, 999], np.int32)
MEAN, STD = 0.3, 0.5  # of the Gaussian data in the sampling tests


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def abar_of(timesteps=range(1000), num_steps=1000):
    """The share of signal after each of the timesteps, one multiplication at a time."""
    scale, shares, share = 1000 / num_steps, [], 1.0
    for t in range(num_steps):
        share *= 1 - scale * (1e-4 + (0.02 - 1e-4) * t / (num_steps - 1))
        shares.append(share)
    return [shares[t] for t in timesteps]


def constants(abar, t):
    """(abar_t, abar_{t-1}, beta_t, variance of the posterior)."""
    before = abar[t - 1] if t else 1.0
    beta = 1 - abar[t] / before
    return abar[t], before, beta, beta * (1 - before) / (1 - abar[t])


def log_variance_range(abar, t):
    """(least, largest); the first step has the second's least."""
    return math.log(constants(abar, max(t, 1))[3]), math.log(constants(abar, t)[2])


def posterior_mean(abar, t, x0, x_t):
    """Ho et al., eq 7."""
    share, before, beta, _ = constants(abar, t)
    of_x_t = math.sqrt(share / before) * (1 - before) / (1 - share) * x_t
    return math.sqrt(before) * beta / (1 - share) * x0 + of_x_t


def normal_cdf(x):
    return 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def bits(abar, t, x0, x_t, epsilon, v):
    """One number's term of the bound: Ho et al., eq 5 and 13; improved DDPM, eq 15."""
    x0_predicted = (x_t - math.sqrt(1 - abar[t]) * epsilon) / math.sqrt(abar[t])
    mean = posterior_mean(abar, t, x0_predicted, x_t)
    least, largest = log_variance_range(abar, t)
    log_variance = (1 + v) / 2 * largest + (1 - v) / 2 * least
    if t > 0:
        distance = (posterior_mean(abar, t, x0, x_t) - mean) ** 2 / math.exp(log_variance)
        nats = (log_variance - least + math.exp(least - log_variance) + distance - 1) / 2
        return nats / math.log(2)
    std = math.exp(log_variance / 2)
    upper = 1.0 if x0 > 0.999 else normal_cdf((x0 + 1 / 255 - mean) / std)
    lower = 0.0 if x0 < -0.999 else normal_cdf((x0 - 1 / 255 - mean) / std)
    return -math.log2(max(upper - lower, 1e-12))


def example(seed=0):
    """Images of 8-bit values, both outermost among them, their noise, and an output near it."""
    random = np.random.default_rng(seed)
    x0 = random.integers(0, 256, SHAPE) / 127.5 - 1
    x0[:, 0, 0] = -1, 1
    noise = random.normal(size=SHAPE)
    epsilon = noise + 0.1 * random.normal(size=SHAPE)
    return x0, noise, epsilon, random.uniform(-1.2, 1.2, SHAPE)


def losses_of(x0, noise, epsilon, v, process=Process(), dtype=np.float64):  # noqa: B008
    x0, noise, output = (a.astype(dtype) for a in (x0, noise, np.concatenate([epsilon, v], axis=-1)))
    return hybrid_losses(process, output, x0, noised(process, x0, STEPS, noise), STEPS, noise)


def test_process_is_a_hashable_value():
    assert Process() == Process(1000) and hash(Process()) == hash(Process(1000))
    assert Process().spaced(250, "ddpm") == Process().spaced(250, "ddpm") != Process()


@pytest.mark.parametrize("num_steps", [1000, 100])
def test_noise_has_the_published_moments(float64, num_steps):
    abar, times = np.array(abar_of(range(num_steps), num_steps)), np.arange(num_steps)
    ones, zeros = np.ones((num_steps, 1, 1, 1)), np.zeros((num_steps, 1, 1, 1))
    process = Process(num_steps)
    np.testing.assert_allclose(noised(process, ones, times, zeros)[:, 0, 0, 0], np.sqrt(abar), rtol=1e-11)
    np.testing.assert_allclose(noised(process, zeros, times, ones)[:, 0, 0, 0], np.sqrt(1 - abar), rtol=1e-11)


def test_first_and_last_noise_by_hand():
    ones, zeros = np.ones((2, 1, 1, 1), np.float32), np.zeros((2, 1, 1, 1), np.float32)
    ends = np.array([0, 999], np.int32)
    signal, noise = noised(Process(), ones, ends, zeros).ravel(), noised(Process(), zeros, ends, ones).ravel()
    assert signal.dtype == jnp.float32
    np.testing.assert_allclose(signal, [math.sqrt(0.9999), 0.006353], rtol=1e-4)
    np.testing.assert_allclose(noise, [0.01, 0.99998], rtol=1e-5)


def test_noised_images_have_the_mean_and_variance():
    x0 = np.full((1, 64, 64, 4), 0.7, np.float32)
    noise = np.random.default_rng(0).normal(size=x0.shape).astype(np.float32)
    x_t = noised(Process(), x0, np.array([300]), noise)
    share = abar_of()[300]
    np.testing.assert_allclose(x_t.mean(), math.sqrt(share) * 0.7, atol=0.02)
    np.testing.assert_allclose(x_t.var(), 1 - share, rtol=0.04)


def test_losses_are_those_of_the_equations(float64):
    x0, noise, epsilon, v = example()
    mse, bound = losses_of(x0, noise, epsilon, v)
    np.testing.assert_allclose(mse, ((noise - epsilon) ** 2).mean(axis=(1, 2, 3)), rtol=1e-12)
    expected, abar = np.zeros(SHAPE), abar_of()
    for place in itertools.product(*map(range, SHAPE)):
        t = int(STEPS[place[0]])
        x_t = math.sqrt(abar[t]) * x0[place] + math.sqrt(1 - abar[t]) * noise[place]
        expected[place] = bits(abar, t, x0[place], x_t, epsilon[place], v[place])
    np.testing.assert_allclose(bound, expected.mean(axis=(1, 2, 3)), rtol=1e-7)


def test_losses_in_float32_are_near_those_in_float64():
    narrow = losses_of(*example(), dtype=np.float32)
    with jax.enable_x64(True):
        wide = losses_of(*example())
    assert narrow[0].dtype == narrow[1].dtype == jnp.float32
    np.testing.assert_allclose(narrow, wide, rtol=2e-3)


def test_bound_is_zero_for_the_exact_posterior(float64):
    x0, noise, _, v = example()
    _, bound = losses_of(x0, noise, noise, np.full_like(v, -1))
    np.testing.assert_allclose(bound[1:], 0, atol=1e-9)
    assert bound[0] > 0


def test_bound_teaches_the_variance_only():
    x0, noise, epsilon, v = (a.astype(np.float32) for a in example())
    gradient = jax.grad(lambda e, r: losses_of_traced(x0, noise, e, r)[1].sum(), argnums=(0, 1))(epsilon, v)
    assert not np.any(gradient[0]) and np.all(np.isfinite(gradient[1])) and np.all(np.any(gradient[1], (1, 2, 3)))
    gradient = jax.grad(lambda e, r: losses_of_traced(x0, noise, e, r)[0].sum(), argnums=(0, 1))(epsilon, v)
    np.testing.assert_allclose(gradient[0], 2 * (epsilon - noise) / np.prod(SHAPE[1:]), rtol=1e-4, atol=1e-7)
    assert not np.any(gradient[1])


def losses_of_traced(x0, noise, epsilon, v):
    output = jnp.concatenate([epsilon, v], axis=-1)
    return hybrid_losses(Process(), output, x0, noised(Process(), x0, STEPS, noise), STEPS, noise)


def test_output_without_variance_has_no_bound():
    x0, noise, epsilon, _ = (a.astype(np.float32) for a in example())
    mse, bound = hybrid_losses(Process(), epsilon, x0, noised(Process(), x0, STEPS, noise), STEPS, noise)
    np.testing.assert_allclose(mse, ((noise - epsilon) ** 2).mean(axis=(1, 2, 3)), rtol=1e-5)
    assert bound.shape == mse.shape and not np.any(bound)


def test_even_spacing():
    kept = Process().spaced(250, "ddpm").kept
    assert len(kept) == len(set(kept)) == 250
    assert (kept[0], kept[-1]) == (0, 999)
    assert kept[:5] == (0, 4, 8, 12, 16)  # 999 / 249 = 4.012 apart
    assert Process().spaced(1000, "ddpm").kept == tuple(range(1000))
    assert Process(101).spaced(5, "ddpm").kept == (0, 25, 50, 75, 100)


def test_spacing_of_ddim():
    assert Process().spaced(50, "ddim").kept == tuple(range(0, 1000, 20))
    assert Process().spaced(250, "ddim").kept == tuple(range(0, 1000, 4))
    assert Process().spaced(334, "ddim").kept == tuple(range(0, 1000, 3))
    assert Process().spaced(2, "ddim").kept == (0, 500)  # the smallest stride that takes 2


@pytest.mark.parametrize(
    "count, kind, words",
    [
        (300, "ddim", ("300", "1000", "250", "334")),
        (1001, "ddpm", ("1001", "1000")),
        (1, "ddim", ("1", "1000")),
        (4, "x", ("'x'",)),
    ],
)
def test_spacing_that_cannot_be_is_told_in_one_line(count, kind, words):
    with pytest.raises(InputError) as error:
        Process().spaced(count, kind)
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words)


def one_sampler(process, predict, **options):
    return jax.jit(lambda noise, keys: sample(process, predict, noise, keys, **options))


def start(count, shape=(1, 1, 1), seed=0):
    """(noise [B, H, W, C], raw keys [B, 2])."""
    keys = jax.random.key_data(jax.random.split(jax.random.key(seed), count))
    return jax.random.normal(jax.random.key(seed + 1), (count, *shape)), keys


def share_at(t_B):
    return jnp.asarray(abar_of())[t_B][:, None, None, None]


@pytest.mark.parametrize("kind, method", [("ddpm", "ddim"), ("ddim", "ddim"), ("ddpm", "ddpm")])
def test_the_exact_noise_leads_back_to_the_image(kind, method):
    noise, keys = start(3, (2, 3, 2))
    x0 = np.random.default_rng(2).uniform(-1, 1, noise.shape).astype(np.float32)

    def predict(x, t):
        return (x - jnp.sqrt(share_at(t)) * x0) / jnp.sqrt(1 - share_at(t))

    made = one_sampler(Process().spaced(50, kind), predict, method=method)(noise, keys)
    np.testing.assert_allclose(made, x0, atol=2e-4)


def test_model_is_told_the_original_steps_from_high_to_low():
    process, told = Process().spaced(4, "ddpm"), []

    def predict(x, t):
        jax.debug.callback(lambda t: told.append(np.asarray(t)), t, ordered=True)
        return jnp.zeros_like(x)

    made = sample(process, predict, *start(2), method="ddim")
    jax.block_until_ready(made)
    jax.effects_barrier()
    np.testing.assert_array_equal(told, [[t, t] for t in (999, 666, 333, 0)])
    assert told[0].dtype == np.int32


def learned(predict):
    """With a variance some way between the least and the largest."""
    return lambda x, t: jnp.concatenate([predict(x, t), jnp.full_like(x, 0.3)], axis=-1)


@pytest.mark.parametrize(
    "method, eta, learns", [("ddpm", 0.0, False), ("ddpm", 0.0, True), ("ddim", 0.0, True), ("ddim", 0.6, False)]
)
def test_a_chain_is_that_of_the_equations(float64, method, eta, learns):
    """Every number of a chain of 4 steps, from a model that is not right, in numpy."""

    def predict(x, t):
        return 0.5 * x + 1e-3 * t[:, None, None, None]

    noise, keys = start(2, (1, 2, 1))
    process = Process().spaced(4, "ddpm")
    model = learned(predict) if learns else predict
    made = one_sampler(process, model, method=method, eta=eta)(noise, keys)

    abar, expected = abar_of(process.kept), np.array(noise)
    for t in reversed(range(4)):
        drawn = [
            jax.random.normal(jax.random.fold_in(jax.random.wrap_key_data(key), t), noise.shape[1:]) for key in keys
        ]
        for place in itertools.product(*map(range, noise.shape)):
            x, z = expected[place], float(drawn[place[0]][place[1:]]) if t else 0.0
            epsilon = 0.5 * x + 1e-3 * process.kept[t]
            expected[place] = step_of(abar, t, x, epsilon, z, method, eta, learns)
    np.testing.assert_allclose(made, expected, rtol=1e-9)


def step_of(abar, t, x, epsilon, z, method, eta, learns):
    """x_{t-1}: Ho et al., algorithm 2; Song et al., eq 12 and 16."""
    share, before, beta, posterior = constants(abar, t)
    x0 = (x - math.sqrt(1 - share) * epsilon) / math.sqrt(share)
    if method == "ddim":
        std = eta * math.sqrt(posterior)
        return math.sqrt(before) * x0 + math.sqrt(max(1 - before - std**2, 0)) * epsilon + std * z
    least, largest = log_variance_range(abar, t)
    log_variance = 0.65 * largest + 0.35 * least if learns else math.log(beta)
    return posterior_mean(abar, t, x0, x) + math.exp(log_variance / 2) * z


def exact_noise(x, t):
    """E[epsilon | x_t] of data N(MEAN, STD^2): -sqrt(1 - abar) times the score of N(sqrt(abar) MEAN, ...)."""
    share = share_at(t)
    return jnp.sqrt(1 - share) * (x - jnp.sqrt(share) * MEAN) / (share * STD**2 + 1 - share)


def exact_model(abar, x, t):
    """The exact noise, and the v with which p(x_{t-1} | x_t) has its exact variance; t of a whole chain."""
    rows = []
    for step in range(len(abar)):
        share, before, beta, posterior = constants(abar, step)
        unsure = STD**2 * (1 - share) / (share * STD**2 + 1 - share)  # variance of x_0 given x_t
        exact = posterior + before * beta**2 / (1 - share) ** 2 * unsure
        least, largest = log_variance_range(abar, step)
        rows.append(2 * (math.log(exact) - least) / (largest - least) - 1 if step else 0.0)
    v = jnp.broadcast_to(jnp.asarray(rows, x.dtype)[t][:, None, None, None], x.shape)
    return jnp.concatenate([exact_noise(x, t), v], axis=-1)


def test_ddpm_samples_gaussian_data_from_the_exact_score():
    """With exact variances the chain is exact for Gaussian data; 20,000 samples give 2 % of a deviation."""
    noise, keys = start(20_000)
    made = one_sampler(Process(), functools.partial(exact_model, abar_of()))(noise, keys)
    np.testing.assert_allclose(made.mean(), MEAN, atol=0.015)
    np.testing.assert_allclose(made.std(), STD, rtol=0.02)


@pytest.mark.parametrize("method, eta", [("ddpm", 0.0), ("ddim", 0.0), ("ddim", 1.0)])
def test_fewer_steps_are_near_the_same_distribution(method, eta):
    noise, keys = start(4000)
    made = one_sampler(Process().spaced(250, "ddpm"), exact_noise, method=method, eta=eta)(noise, keys)
    np.testing.assert_allclose(made.mean(), MEAN, atol=0.03)
    np.testing.assert_allclose(made.std(), STD, rtol=0.06)


def test_a_sample_depends_on_its_own_key_only():
    noise, keys = start(4, (2, 2, 1))
    make = one_sampler(Process().spaced(10, "ddpm"), learned(exact_noise))
    together = make(noise, keys)
    np.testing.assert_allclose(make(noise[2:3], keys[2:3]), together[2:3], rtol=1e-5, atol=1e-6)
    other = make(noise, keys[::-1])
    assert np.all(np.any(np.asarray(other != together), axis=(1, 2, 3)))


def test_ddim_without_eta_draws_nothing():
    noise, keys = start(3, (2, 2, 1))
    process = Process().spaced(10, "ddim")
    make = one_sampler(process, learned(exact_noise), method="ddim")
    np.testing.assert_array_equal(make(noise, keys), make(noise, keys[::-1]))
    loud = one_sampler(process, learned(exact_noise), method="ddim", eta=1.0)
    assert np.any(np.asarray(loud(noise, keys) != loud(noise, keys[::-1])))


@pytest.mark.parametrize("count", [21, 23, 31, 250])
def test_even_spacing_rounds_halves_as_the_reference(count):
    place, expected = 0.0, []
    for _ in range(count):
        expected.append(round(place))
        place += 999 / (count - 1)
    assert Process().spaced(count, "ddpm").kept == tuple(expected)


@pytest.mark.parametrize("method", ["ddpm", "ddim"])
def test_clipped_images_stay_in_range(method):
    process, (noise, keys) = Process().spaced(10, "ddpm"), start(3, (2, 2, 1))

    def of(x0):
        return lambda x, t: (x - jnp.sqrt(share_at(t)) * x0) / jnp.sqrt(1 - share_at(t))

    clipped = one_sampler(process, of(3.0), method=method, clip=True)(noise, keys)
    np.testing.assert_allclose(clipped, 1, atol=2e-3)
    same = one_sampler(process, of(0.5), method=method, clip=True)(noise, keys)
    np.testing.assert_allclose(same, one_sampler(process, of(0.5), method=method)(noise, keys), atol=2e-3)


WRONG_SAMPLING = {
    "method": ({"method": "dpm"}, 2, 1, "'dpm'"),
    "eta": ({"method": "ddim", "eta": 5.0}, 2, 1, "eta is 5.0"),
    "eta of ddpm": ({"eta": 0.5}, 2, 1, "eta is 0.5"),
    "keys": ({}, 1, 1, "1 random keys for 2 images"),
    "channels": ({}, 2, 3, "has 3 channels and the images have 1"),
}


@pytest.mark.parametrize("options, num_keys, channels, words", WRONG_SAMPLING.values(), ids=WRONG_SAMPLING)
def test_wrong_sampling_is_told_in_one_line(options, num_keys, channels, words):
    noise, keys = start(2)
    with pytest.raises(InputError, match=words) as error:
        sample(Process(), lambda x, t: jnp.tile(x, channels), noise, keys[:num_keys], **options)
    assert "\n" not in str(error.value)


def test_too_few_steps_and_wrong_outputs_are_told():
    with pytest.raises(InputError, match="has 20 steps: set 21 or more"):
        Process(20)
    x = np.zeros((2, 1, 1, 2), np.float32)
    with pytest.raises(InputError, match="has 3 channels and the images have 2"):
        hybrid_losses(Process(), np.zeros((2, 1, 1, 3), np.float32), x, x, np.array([1, 2]), x)
