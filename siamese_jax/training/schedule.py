"""Learning-rate schedules: cosine, wsd and constant, each behind a linear warm-up.

Updates are numbered k = 1 .. num_steps (OLMo's convention): the first update already moves, k = warmup_steps
has exactly the peak, and the last update has exactly floor * peak. optax counts from 0, so k = count + 1.
"""

import difflib

import jax.numpy as jnp
import optax

from siamese_jax.errors import InputError

KINDS = ("cosine", "wsd", "constant")
DECAY_SHAPES = ("linear", "1-sqrt")


def make_schedule(config_schedule, num_steps: int) -> optax.Schedule:
    """The function from optax's 0-based update count to the learning rate, usable inside jit.

    Args:
        config_schedule: kind, peak, warmup_steps, floor (fraction of the peak), decay_steps and decay_shape;
            the last two count for wsd only, the floor not for constant.
        num_steps: updates of the whole run, warm-up and decay included.
    """
    check_schedule(config_schedule, num_steps)
    peak, warmup = config_schedule.peak, config_schedule.warmup_steps
    phases, boundaries = _after_warmup(config_schedule, num_steps)
    if warmup > 0:
        phases = [optax.linear_schedule(0.0, peak, warmup), *phases]
        boundaries = [warmup, *boundaries]
    by_k = optax.join_schedules(phases, boundaries)
    # As a float, so that rates are float64 where jax has that: from integers optax makes float32.
    return lambda count: by_k(jnp.asarray(count + 1, float))


def check_schedule(config_schedule, num_steps: int) -> None:
    """InputError unless the schedule fits a run of num_steps updates."""
    config = config_schedule
    warmup, decay = config.warmup_steps, config.decay_steps
    check_choice("schedule.kind", config.kind, KINDS)
    if not num_steps >= 1:
        raise InputError(f"the run has {num_steps} updates: set at least 1")
    for field in ("peak", "warmup_steps", "decay_steps"):
        value = getattr(config, field)
        if not value >= 0:
            raise InputError(f"schedule.{field} is {value}: set it to 0 or more")
    if not 0 <= config.floor <= 1:
        raise InputError(f"schedule.floor is {config.floor}: a fraction of the peak, set it from 0 to 1")
    if warmup > num_steps:
        raise InputError(
            f"schedule.warmup_steps is {warmup} but the run has {num_steps} updates: "
            "warm up for less or train for longer"
        )
    if config.kind == "cosine" and warmup == num_steps:
        raise InputError(
            f"schedule.warmup_steps is {warmup} and the run has {num_steps} updates, none left "
            "for the cosine: warm up for less or set schedule.kind to 'constant'"
        )
    if config.kind == "wsd":
        check_choice("schedule.decay_shape", config.decay_shape, DECAY_SHAPES)
        if decay == 0:
            raise InputError(
                "schedule.decay_steps is 0 but schedule.kind 'wsd' ends in a decay: "
                "set it to 1 or more, or schedule.kind to 'constant'"
            )
        if warmup + decay > num_steps:
            raise InputError(
                f"schedule.warmup_steps {warmup} + decay_steps {decay} = {warmup + decay} "
                f"but the run has {num_steps} updates: shorten one or train for longer"
            )


def check_choice(field: str, value, known: tuple[str, ...]) -> None:
    """InputError naming the nearest known value, unless the value is one of them."""
    if value in known:
        return
    nearest = difflib.get_close_matches(str(value), known, n=1, cutoff=0.0)[0]
    choices = ", ".join(map(repr, known))
    raise InputError(f"{field} is {value!r}: choose one of {choices} (nearest: {nearest!r})")


def _after_warmup(config, num_steps):
    """The phases after the warm-up, with the k at which each phase but the first begins."""
    if config.kind == "cosine":
        return [optax.cosine_decay_schedule(config.peak, num_steps - config.warmup_steps, config.floor)], []
    constant = optax.constant_schedule(config.peak)
    if config.kind == "constant":
        return [constant], []
    if config.decay_shape == "linear":
        decay = optax.linear_schedule(config.peak, config.floor * config.peak, config.decay_steps)
    else:
        decay = _one_minus_sqrt(config.peak, config.floor, config.decay_steps)
    return [constant, decay], [num_steps - config.decay_steps]


def _one_minus_sqrt(peak, floor, num_steps):
    """Decay by 1 - sqrt(fraction done): Haegele et al., arXiv 2405.18392."""

    def schedule(count):
        # join_schedules evaluates every phase at every count, also before it begins: sqrt needs the clip.
        done = jnp.clip(count / num_steps, 0.0, 1.0)
        return peak * (floor + (1 - floor) * (1 - jnp.sqrt(done)))

    return schedule
