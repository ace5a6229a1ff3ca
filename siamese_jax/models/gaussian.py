"""The diffusion process of DiT: noise in 1000 steps, the hybrid loss, sampling by DDPM and DDIM.

Ho et al., arXiv 2006.11239; Nichol and Dhariwal, arXiv 2102.09672; Song et al., arXiv 2010.02502.
Legend: B batch, H height, W width, C channels, T steps.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from siamese_jax.errors import InputError
from siamese_jax.layers.norms import statistics_type

Array = jax.Array
FIRST_BETA, LAST_BETA = 1e-4, 0.02  # of 1000 steps
SAMPLERS = ("ddpm", "ddim")
MIN_STEPS = 21  # with 20, the betas scaled to so few steps end at 1: no signal would be left
HALF_BIN = 1 / 255  # pixels lie from -1 to 1 in 256 steps


@dataclasses.dataclass(frozen=True)
class Process:
    """q(x_t | x_0) = N(sqrt(abar_t) x_0, 1 - abar_t), linear betas; kept: the steps that sampling takes."""

    num_steps: int = 1000
    kept: tuple[int, ...] | None = None

    def __post_init__(self):
        if self.num_steps < MIN_STEPS:
            raise InputError(f"a diffusion process has {self.num_steps} steps: set {MIN_STEPS} or more")

    @functools.cached_property
    def steps(self) -> np.ndarray:
        """The original step of every step, int32 [T]: what the model is told."""
        return np.arange(self.num_steps, dtype=np.int32) if self.kept is None else np.array(self.kept, np.int32)

    @functools.cached_property
    def abar(self) -> np.ndarray:
        """The share of the signal's variance that is left after each step, float64 [T]."""
        scale = 1000 / self.num_steps
        betas = np.linspace(scale * FIRST_BETA, scale * LAST_BETA, self.num_steps)
        return np.cumprod(1 - betas)[self.steps]

    @functools.cached_property
    def abar_before(self) -> np.ndarray:
        """The same after the step before, 1 in front of the first."""
        return np.append(1.0, self.abar[:-1])

    @functools.cached_property
    def betas(self) -> np.ndarray:
        """The variance that each step adds, float64 [T]."""
        return 1 - self.abar / self.abar_before

    @functools.cached_property
    def posterior_variance(self) -> np.ndarray:
        """Of q(x_(t-1) | x_t, x_0), float64 [T]; 0 for the first step."""
        return self.betas * (1 - self.abar_before) / (1 - self.abar)

    @functools.cached_property
    def posterior_log_variance(self) -> np.ndarray:
        """Its logarithm; the first step takes that of the second."""
        return np.log(np.append(self.posterior_variance[1:2], self.posterior_variance[1:]))

    def spaced(self, num_steps: int, method: str) -> "Process":
        """The process that sampling in fewer steps follows: evenly spread for ddpm, every k-th step for ddim."""
        _check_method(method)
        if not 2 <= num_steps <= self.num_steps:
            raise InputError(
                f"{num_steps} sampling steps do not fit a process of {self.num_steps}: take 2 to that many"
            )
        return dataclasses.replace(self, kept=_SPACINGS[method](self.num_steps, num_steps))


def _evenly(total: int, num_steps: int) -> tuple[int, ...]:
    """From the first step to the last, as improved-diffusion rounds them."""
    # Added up, not multiplied out: where a step falls on a half, it is this sum that the reference rounds.
    places = np.cumsum(np.append(0.0, np.full(num_steps - 1, (total - 1) / (num_steps - 1))))
    return tuple(int(place) for place in np.rint(places))


def _every(total: int, num_steps: int) -> tuple[int, ...]:
    """Every k-th step from the first."""
    strides = {len(range(0, total, stride)): stride for stride in range(total, 0, -1)}
    if num_steps not in strides:
        near = sorted(strides, key=lambda count: abs(count - num_steps))[:2]
        raise InputError(
            f"ddim cannot take {num_steps} steps of {total} at one distance: take "
            f"{' or '.join(map(str, sorted(near)))}"
        )
    return tuple(range(0, total, strides[num_steps]))


_SPACINGS = {"ddpm": _evenly, "ddim": _every}


def _at(table: np.ndarray, t_B: Array, like: Array) -> Array:
    """Table values [B, 1, 1, 1] of the steps, in float32 or wider."""
    return jnp.asarray(table, statistics_type(like.dtype))[t_B][:, None, None, None]


def noised(process: Process, x0_BHWC: Array, t_B: Array, noise_BHWC: Array) -> Array:
    """sqrt(abar_t) x_0 + sqrt(1 - abar_t) noise."""
    signal, spread = np.sqrt(process.abar), np.sqrt(1 - process.abar)
    return _at(signal, t_B, x0_BHWC) * x0_BHWC + _at(spread, t_B, x0_BHWC) * noise_BHWC


def _clean(process: Process, x_t: Array, t_B: Array, noise: Array) -> Array:
    """The x_0 that x_t and its noise belong to."""
    return _at(np.sqrt(1 / process.abar), t_B, x_t) * x_t - _at(np.sqrt(1 / process.abar - 1), t_B, x_t) * noise


def _posterior_mean(process: Process, x0: Array, x_t: Array, t_B: Array) -> Array:
    before, abar = process.abar_before, process.abar
    of_clean = process.betas * np.sqrt(before) / (1 - abar)
    of_noised = (1 - before) * np.sqrt(1 - process.betas) / (1 - abar)
    return _at(of_clean, t_B, x_t) * x0 + _at(of_noised, t_B, x_t) * x_t


def _log_variance(process: Process, output: Array, t_B: Array, channels: int) -> Array:
    """The model's: between that of the posterior and beta, as its second half of channels says; else the larger."""
    largest = np.log(np.append(process.posterior_variance[1:2], process.betas[1:]))
    if output.shape[-1] == channels:
        return jnp.broadcast_to(_at(largest, t_B, output), output.shape)
    share = (output[..., channels:] + 1) / 2
    log_beta, log_least = np.log(process.betas), process.posterior_log_variance
    return share * _at(log_beta, t_B, output) + (1 - share) * _at(log_least, t_B, output)


def hybrid_losses(
    process: Process, output_BHWX: Array, x0_BHWC: Array, x_t: Array, t_B: Array, noise_BHWC: Array
) -> tuple[Array, Array]:
    """(mean squared error of the noise [B], variational bound [B] in bits per dimension).

    The bound teaches the variance alone: its gradient does not reach the noise. It is 0 where the output has only
    the C channels of the noise. DiT's loss is the sum of both.
    """
    channels = x0_BHWC.shape[-1]
    _check_channels(output_BHWX, channels)
    wide = output_BHWX.astype(statistics_type(output_BHWX.dtype))
    mse_B = jnp.mean(jnp.square(wide[..., :channels] - noise_BHWC), axis=(1, 2, 3))
    if output_BHWX.shape[-1] == channels:
        return mse_B, jnp.zeros_like(mse_B)
    noise = jax.lax.stop_gradient(wide[..., :channels])
    mean = _posterior_mean(process, _clean(process, x_t, t_B, noise), x_t, t_B)
    log_variance = _log_variance(process, wide, t_B, channels)
    true_mean = _posterior_mean(process, x0_BHWC, x_t, t_B)
    true_log_variance = _at(process.posterior_log_variance, t_B, x_t)
    divergence = 0.5 * (
        log_variance - true_log_variance - 1 + jnp.exp(true_log_variance - log_variance)
        + jnp.square(true_mean - mean) * jnp.exp(-log_variance)
    )  # fmt: skip
    likelihood = _log_likelihood(x0_BHWC, mean, 0.5 * log_variance)
    nats = jnp.where((t_B == 0)[:, None, None, None], -likelihood, divergence)
    return mse_B, jnp.mean(nats, axis=(1, 2, 3)) / np.log(2)


def _cdf(x: Array) -> Array:
    """Of the standard normal, to within 1e-3, with a cheap gradient: the reference's."""
    return 0.5 * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _log_likelihood(x0: Array, mean: Array, log_scale: Array) -> Array:
    """log p of pixels that were rounded to 256 values, the first and the last open to the outside."""
    inverse, centred = jnp.exp(-log_scale), x0 - mean
    above, below = _cdf(inverse * (centred + HALF_BIN)), _cdf(inverse * (centred - HALF_BIN))
    inside = jnp.where(x0 < -0.999, above, jnp.where(x0 > 0.999, 1 - below, above - below))
    return jnp.log(jnp.maximum(inside, 1e-12))


def sample(
    process: Process,
    predict: Callable[[Array, Array], Array],
    noise_BHWC: Array,
    keys_B2: Array,
    *,
    method: str = "ddpm",
    eta: float = 0.0,
    clip: bool = False,
) -> Array:
    """x_0 from noise along a process that `Process.spaced` made.

    predict(x_t, original steps int32 [B]) -> output. keys: a raw random key for every row, uint32 [B, 2], so that a
    sample does not depend on the batch that it is made in. eta: of ddim, 0 = no further noise.
    clip: holds each predicted x_0 within -1 and 1. InputError for a method, eta, keys or output that cannot be.
    """
    check_sampling(method, eta)
    if len(keys_B2) != len(noise_BHWC):
        raise InputError(f"{len(keys_B2)} random keys for {len(noise_BHWC)} images: give every image its own")
    wide = statistics_type(noise_BHWC.dtype)
    update = _ddpm if method == "ddpm" else functools.partial(_ddim, eta=eta)
    original = jnp.asarray(process.steps)

    def one(x_t, step):
        t_B = jnp.full(len(x_t), step)
        output = predict(x_t, original[t_B]).astype(wide)
        _check_channels(output, x_t.shape[-1])
        if clip:
            output = _clipped(process, output, x_t, t_B)

        def draw(key_2):
            return jax.random.normal(jax.random.fold_in(jax.random.wrap_key_data(key_2), step), x_t.shape[1:], wide)

        fresh = jnp.where(step > 0, jax.vmap(draw)(keys_B2), 0)
        return update(process, output, x_t, t_B, fresh), None

    return jax.lax.scan(one, noise_BHWC.astype(wide), jnp.arange(len(process.steps))[::-1])[0]


def _check_method(method: str) -> None:
    if method not in SAMPLERS:
        raise InputError(f"the sampling method is {method!r}: choose one of {', '.join(map(repr, SAMPLERS))}")


def check_sampling(method: str, eta: float) -> None:
    """InputError for a method that is not known, or noise that it does not take."""
    _check_method(method)
    if not 0 <= eta <= (method == "ddim"):
        raise InputError(
            f"eta is {eta} with the sampling method {method!r}: set it to 0, or from 0 to 1 with 'ddim'"
        )


def _check_channels(output: Array, channels: int) -> None:
    if output.shape[-1] not in (channels, 2 * channels):
        raise InputError(
            f"the model's output has {output.shape[-1]} channels and the images have {channels}: it needs "
            f"{channels}, or {2 * channels} with a learned variance"
        )


def _clipped(process: Process, output: Array, x_t: Array, t_B: Array) -> Array:
    """The output with the noise that leads to the clipped x_0."""
    channels = x_t.shape[-1]
    x0 = jnp.clip(_clean(process, x_t, t_B, output[..., :channels]), -1, 1)
    signal, spread = _at(np.sqrt(process.abar), t_B, x_t), _at(np.sqrt(1 - process.abar), t_B, x_t)
    return jnp.concatenate([(x_t - signal * x0) / spread, output[..., channels:]], axis=-1)


def _ddpm(process: Process, output: Array, x_t: Array, t_B: Array, fresh: Array) -> Array:
    channels = x_t.shape[-1]
    mean = _posterior_mean(process, _clean(process, x_t, t_B, output[..., :channels]), x_t, t_B)
    return mean + jnp.exp(0.5 * _log_variance(process, output, t_B, channels)) * fresh


def _ddim(process: Process, output: Array, x_t: Array, t_B: Array, fresh: Array, eta: float) -> Array:
    noise = output[..., : x_t.shape[-1]]
    x0, abar, before = _clean(process, x_t, t_B, noise), process.abar, process.abar_before
    spread = eta * np.sqrt((1 - before) / (1 - abar)) * np.sqrt(1 - abar / before)
    direction = np.sqrt(np.maximum(1 - before - spread**2, 0))
    return _at(np.sqrt(before), t_B, x_t) * x0 + _at(direction, t_B, x_t) * noise + _at(spread, t_B, x_t) * fresh
