"""Training from start to end: check, open, restore, step, watch, validate, save, and say how to go on."""

import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import ml_collections
import numpy as np
from tqdm import tqdm

from siamese_jax import __version__
from siamese_jax.checkpoint import Checkpoints, vote
from siamese_jax.config import resolved
from siamese_jax.data.loader import Prefetcher
from siamese_jax.models.initialize import count_parameters
from siamese_jax.parallel.mesh import replicated
from siamese_jax.run_folder import CHECKPOINTS, open_run_folder, read_summary, write_summary
from siamese_jax.training.hardware import peak_memory_bytes
from siamese_jax.training.metrics import format_duration
from siamese_jax.training.parts import Parts, build, describe
from siamese_jax.training.plan import compile_step
from siamese_jax.training.recorder import Recorder
from siamese_jax.training.samples import write_samples
from siamese_jax.training.shared_folder import check_shared_folder
from siamese_jax.training.signals import Stopped, StopRequest
from siamese_jax.training.start import find_start, make_state
from siamese_jax.training.state import TrainState
from siamese_jax.training.step import make_stream_watch


def train(
    config: ml_collections.ConfigDict,
    workdir: str,
    *,
    make_validation: Callable,
    say: Callable[[str], None] = print,
) -> dict:
    """Trains until training.steps, or until a signal; returns the summary.

    make_validation(parts) comes from the evaluation room, which training does not import. Of what it makes are used
    figures(params, progress), the metrics of a validation during the run, samples(params), {prompt, text} each,
    where eval.sample_every asks for them, and `unit`, `size` and finish(params, workdir, progress): the whole of it
    at the end, what the summary tells of it.
    """
    parts = build(config, workdir)  # before signals wait: a long tokenisation is worth nothing half done
    check_shared_folder(workdir)
    with StopRequest() as stop:
        summary = read_summary(workdir)
        if vote("complete" if summary else None):  # a shared folder may show it to some processes later
            return (summary or {}) | {"status": "complete already"}
        validation = make_validation(parts)
        folder = pathlib.Path(workdir) / CHECKPOINTS
        kept = {"keep": config.checkpoint.keep, "keep_every": config.checkpoint.keep_every}
        with Checkpoints(folder, **kept, strict=config.checkpoint.strict, log=say) as checkpoints:
            found = find_start(parts, checkpoints, say)
            if jax.process_index() == 0:
                open_run_folder(workdir, config)
            say(describe(parts))
            state = make_state(parts, found)
            start = int(state.step)
            say(f"starting at step {start} of {config.training.steps} from {found.origin}")
            with Recorder(parts, workdir, start, say, found, checkpoints) as recorder:
                state, done = _steps(parts, state, start, checkpoints, recorder, validation, stop, say)
            checkpoints.wait()
            try:
                if done < config.training.steps:
                    raise Stopped
                result = _summary(parts, workdir, state, validation, recorder, stop, say)
            except Stopped:
                return {"status": "stopped", "step": done, "steps": config.training.steps, "workdir": workdir}
        if jax.process_index() == 0:
            if result.get("samples"):
                write_samples(workdir, result["step"], result["samples"])
            write_summary(workdir, result)
        return result


def _about(parts: Parts, step: int, recorder: Recorder) -> dict:
    """What a checkpoint tells beside its arrays. metrics: the last finite ones; owed: the line of the step
    where a signal cut its validation short, to be written when the run goes on and has made up for it;
    converted: the PyTorch checkpoint that the weights came from, None where they did not."""
    return {
        recorder.units: step * recorder.units_per_step,
        "metrics": recorder.last_finite,
        "owed": recorder.owed,
        "converted": recorder.converted,
        "config": resolved(parts.config),
        "data": {
            "seed": parts.config.seed,
            "fingerprint": parts.data.fingerprint,
            "tokenizer": parts.data.tokenizer and parts.data.tokenizer.fingerprint,
            "class_names": list(parts.data.class_names),
        },
        "library": __version__,
    }


def _steps(parts, state, start, checkpoints, recorder, validation, stop, say) -> tuple[TrainState, int]:
    """The loop: (state, updates done). The metrics of a step are fetched when the next one runs already."""
    config, num_steps = parts.config, parts.config.training.steps
    pending, done, saved = None, start, start
    watch = jax.jit(
        make_stream_watch(parts.task, config, parts.model, parts.accumulation),
        out_shardings=replicated(parts.mesh),
    )
    train_step = None

    def settle():
        nonlocal pending
        if pending is not None:
            recorder.record(*pending)
        pending = None

    def save():
        nonlocal saved
        settle()
        with recorder.speed.paused():
            checkpoints.save(done, state, _about(parts, done, recorder))
        saved = done

    if recorder.owed is not None and not stop.poll():
        figures = _validation(validation, state, stop, say)
        if figures is not None:
            recorder.settle_debt(figures)
    with Prefetcher(parts.data.loader.batch, start) as batches:
        while done < num_steps and not stop.poll():
            _, rows = next(batches)
            batch = parts.put(rows)
            if train_step is None:
                began = time.monotonic()
                train_step = compile_step(parts)
                say(f"compiled the step in {format_duration(time.monotonic() - began)}")
            checkpoints.check()
            state, metrics = train_step(state, batch)
            settle()
            done += 1
            extra: dict[str, Any] | None = {}
            streams_due, validation_due, samples_due = _due(config, done)
            if streams_due or validation_due or samples_due:
                jax.block_until_ready(metrics)
                with recorder.speed.paused():
                    extra = _stream_metrics(parts, watch, state, batch) if streams_due else {}
                    if samples_due:  # not cut short by a signal: they are made with a cache, in moments
                        recorder.samples(done, validation.samples(state.eval_params()))
                    figures = _validation(validation, state, stop, say) if validation_due else {}
                    extra = None if figures is None else extra | figures
            pending = (done, metrics, extra)
            if done % config.checkpoint.every == 0 or done == num_steps:
                save()
        settle()
        if done > saved:
            save()
    return state, done


def _due(config, step: int) -> tuple[bool, bool, bool]:
    """(Whether the streams are watched, there is a validation, there are samples) after a step.

    Of the last step validation and samples belong to the summary.
    """
    streams, validation, samples = config.logging.streams_every, config.eval.every, config.eval.get("sample_every")
    return (
        bool(streams and step % streams == 0),
        bool(validation and step % validation == 0 and step < config.training.steps),
        bool(samples and step % samples == 0 and step < config.training.steps),
    )


def _stream_metrics(parts, watch, state, batch) -> dict[str, float]:
    """post_rms/LAYER, pre_rms/LAYER and their ratio (stream_rms/LAYER with one stream)."""
    with jax.set_mesh(parts.mesh):
        seen = watch(state.params, batch)
    rms = {name: np.asarray(values, np.float64) for name, values in seen.items()}
    rows = {f"{name}_rms/{i}": value for name, values in rms.items() for i, value in enumerate(values)}
    if {"post", "pre"} <= rms.keys():
        rows |= {f"post_over_pre/{i}": value for i, value in enumerate(rms["post"] / rms["pre"])}
    return rows


def _validation(validation, state: TrainState, stop: StopRequest, say: Callable) -> dict[str, float] | None:
    """The validation figures of a step; None when a signal came in between."""
    try:
        figures = validation.figures(state.eval_params(), lambda _: stop.check())
    except Stopped:
        say("validation given up: it is done first when the run goes on")
        return None
    return {f"validation/{name}": value for name, value in figures.items()}


def _summary(parts, workdir, state, validation, recorder, stop, say) -> dict:
    """The figures of a finished run, with the whole validation set; Stopped at a signal."""
    config = parts.config
    say("evaluating the whole validation set")
    disable = None if jax.process_index() == 0 else True
    with tqdm(total=validation.size, unit=validation.unit, disable=disable, leave=False) as bar:

        def progress(done):
            stop.check()
            bar.update(done - bar.n)

        found = validation.finish(state.eval_params(), workdir, progress)
    if parts.data.broken:
        say(
            f"{len(parts.data.broken)} broken image(s), others took their place: {', '.join(parts.data.broken[:3])}"
        )
    memory, memory_kind = peak_memory_bytes()
    speed, rate = recorder.speed.summary(), f"{recorder.units}_per_second"
    return {
        "status": "complete",
        "family": config.family,
        "step": config.training.steps,
        recorder.units: config.training.steps * recorder.units_per_step,
        "parameters": count_parameters(parts.state_shapes.params),
        "train_loss": recorder.last_finite.get("loss"),
        rate: speed.get(rate),
        "mfu": speed.get("mfu"),
        "peak_flops_source": recorder.peak_source,
        "peak_memory_bytes": memory,
        "peak_memory_kind": memory_kind,
        **found,
        "broken": parts.data.broken,
        "workdir": str(workdir),
        "residual": parts.model_config.residual,
    }
