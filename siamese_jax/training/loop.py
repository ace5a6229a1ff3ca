"""Training from start to end: check, open, restore, step, watch, validate, save, and say how to go on."""

import dataclasses
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import ml_collections
import numpy as np
from tqdm import tqdm

from siamese_jax import __version__
from siamese_jax.checkpoint import Checkpoints, available_steps
from siamese_jax.config import check_config, flat_items, language_config, resolved
from siamese_jax.data.loader import Prefetcher, WindowLoader, check_vocabulary
from siamese_jax.data.store import TokenStore, prepare_store
from siamese_jax.data.tokenizer import make_tokenizer
from siamese_jax.errors import FaultError, InputError
from siamese_jax.layers.attention import choose_implementation
from siamese_jax.layers.platform import target_platform
from siamese_jax.models.initialize import count_parameters, parameter_shapes
from siamese_jax.models.language import LanguageConfig, LanguageModel
from siamese_jax.parallel.mesh import batch_sharding, make_mesh, put_batch, replicated
from siamese_jax.run_folder import (
    CHECKPOINTS,
    check_run_folder,
    open_run_folder,
    read_summary,
    write_summary,
)
from siamese_jax.training.hardware import device_peak_flops, peak_memory_bytes
from siamese_jax.training.metrics import (
    MetricWriter,
    Throughput,
    flops_per_token,
    format_count,
    format_duration,
    format_line,
)
from siamese_jax.training.optimizer import describe_groups, make_optimizer
from siamese_jax.training.schedule import make_schedule
from siamese_jax.training.signals import Stopped, StopRequest
from siamese_jax.training.state import TrainState, initial_state
from siamese_jax.training.step import make_stream_watch, make_train_step

SECONDS_BETWEEN_LINES = 10.0


@dataclasses.dataclass
class Parts:
    """What a run is made of, built and checked before anything is computed."""

    config: ml_collections.ConfigDict
    model_config: LanguageConfig
    model: LanguageModel
    tokenizer: Any
    train_store: TokenStore
    validation_store: TokenStore
    loader: WindowLoader
    mesh: jax.sharding.Mesh
    schedule: Callable
    optimizer: Any


def open_stores(config, split_names=("train", "validation")) -> tuple[Any, list[TokenStore]]:
    """(tokenizer, stores of the splits) of a configuration's data."""
    data = config.data
    tokenizer = make_tokenizer(data.tokenizer, data.end_of_text)
    stores = [
        prepare_store(
            data.source, split, tokenizer=tokenizer, field=data.field, cache_dir=data.cache_dir,
            validation_source=data.validation_source, validation_fraction=data.validation_fraction,
        )
        for split in split_names
    ]  # fmt: skip
    for store in stores:
        check_vocabulary(store, config.model.vocab_size)
    return tokenizer, stores


def build(config: ml_collections.ConfigDict, workdir: str) -> Parts:
    """Everything that can be wrong with the input is found here, in seconds: InputError. Writes nothing."""
    check_config(config)
    check_run_folder(workdir, config)
    model_config = language_config(config)
    tokenizer, (train_store, validation_store) = open_stores(config)
    loader = WindowLoader(
        train_store, config.data.length, config.training.batch_size, seed=config.seed,
        cross_documents=config.data.cross_documents,
    )  # fmt: skip
    mesh = make_mesh(config.mesh, config.training.batch_size, config.training.accumulation)
    schedule = make_schedule(config.schedule, config.training.steps)
    optimizer = make_optimizer(config.optimizer, schedule, parameter_shapes(model_config))
    return Parts(
        config, model_config, LanguageModel(model_config), tokenizer, train_store, validation_store, loader,
        mesh, schedule, optimizer,
    )  # fmt: skip


def _about(parts: Parts, step: int, recorder: "Recorder") -> dict:
    """What a checkpoint tells beside its arrays. metrics: the last finite ones; owed: the line of the step
    where a signal cut its validation short, to be written when the run goes on and has made up for it."""
    return {
        "tokens": step * recorder.tokens_per_step,
        "metrics": recorder.last_finite,
        "owed": recorder.owed,
        "config": resolved(parts.config),
        "data": {"seed": parts.config.seed, "fingerprint": parts.train_store.fingerprint},
        "library": __version__,
    }


def _state_shapes(parts: Parts) -> TrainState:
    """The state as shapes with shardings: every array on every device of the mesh."""
    make = _state_maker(parts)
    shapes = jax.eval_shape(make)
    whole = replicated(parts.mesh)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), shapes)


def _state_maker(parts: Parts) -> Callable[[], TrainState]:
    config = parts.config
    return lambda: initial_state(parts.model_config, parts.optimizer, config.seed, config.optimizer.ema > 0)


@dataclasses.dataclass
class Start:
    """Where a run starts: its own state, or only weights, or neither; `metrics` and `owed` as in `_about`."""

    origin: str
    state: TrainState | None = None
    weights: Any = None
    metrics: dict = dataclasses.field(default_factory=dict)
    owed: dict | None = None


def find_start(parts: Parts, checkpoints: Checkpoints, say: Callable) -> Start:
    """In this order: the run's own newest sound checkpoint, the weights of training.init_from, a fresh start.

    Compiles and writes nothing, so that an InputError leaves no trace.
    """
    restored = checkpoints.restore(_state_shapes(parts))
    if restored is not None:
        step, state, about = restored
        _check_same_data(parts, step, about["data"]["fingerprint"])
        return Start(f"checkpoint {step}", state, metrics=about.get("metrics", {}), owed=about.get("owed"))
    source = parts.config.training.init_from
    if not source:
        return Start("initial parameters")
    step, weights = _weights_of(source, _state_shapes(parts).params, say)
    return Start(f"the weights of {source}, checkpoint {step}", weights=weights)


def _check_same_data(parts: Parts, step: int, stored: str) -> None:
    now = parts.train_store.fingerprint
    if stored != now:
        raise InputError(
            f"the training data changed: checkpoint {step} was trained on data {stored[:12]}, "
            f"{parts.config.data.source} is {now[:12]} now: restore the data or use another --workdir"
        )


def _weights_of(source: str, shapes: Any, say: Callable) -> tuple[int, Any]:
    """(step, parameters) of the newest sound checkpoint of another run."""
    try:
        with Checkpoints(pathlib.Path(source) / CHECKPOINTS, log=say) as checkpoints:
            found = checkpoints.restore({"params": shapes}, partial=True)
    except InputError as error:
        raise InputError(f"training.init_from {source}: {error}") from error
    if found is None:
        raise InputError(f"training.init_from {source}: there is no checkpoint in {source}/{CHECKPOINTS}")
    return found[0], found[1]["params"]


def make_state(parts: Parts, start: Start) -> TrainState:
    """The state of the first update."""
    if start.state is not None:
        return start.state
    state = jax.jit(_state_maker(parts), out_shardings=replicated(parts.mesh))()
    return state if start.weights is None else state.replace(params=start.weights)


def describe(parts: Parts) -> str:
    """What is about to run, for the reader."""
    config, model, shapes = parts.config, parts.model_config, parameter_shapes(parts.model_config)
    lines = ["configuration"]
    for group, values in resolved(config).items():
        text = (
            " ".join(f"{k}={v}" for k, v in flat_items(values).items())
            if isinstance(values, dict)
            else values
        )
        lines.append(f"  {group}: {text}")
    tokens = config.training.batch_size * config.data.length
    total = tokens * config.training.steps
    attention = choose_implementation(
        model.attention, target_platform(), model.dtype, model.key_dim, not config.data.cross_documents
    )
    lines += [
        describe_groups(config.optimizer, shapes),
        f"model: {count_parameters(shapes):,} parameters, {model.residual}, "
        f"{count_matrix_parameters(model, shapes):,} multiply each token",
        f"data: {parts.train_store.num_tokens:,} training and {parts.validation_store.num_tokens:,} "
        f"validation tokens; an update takes {tokens:,}, the run {format_count(total)} "
        f"({total / parts.train_store.num_tokens:.2f} epochs)",
        f"devices: {parts.mesh.size} x {jax.devices()[0].device_kind}, compute {model.dtype}, "
        f"attention {attention}",
    ]
    return "\n".join(lines)


def count_matrix_parameters(model: LanguageConfig, shapes) -> int:
    """Parameters that multiply every token: all kernels, and the table where it is the head too."""
    flat = jax.tree_util.tree_leaves_with_path(shapes)
    kernels = sum(leaf.size for path, leaf in flat if path[-1].key == "kernel")
    return kernels + (shapes["embedding"]["table"].size if model.tie_embedding else 0)


def token_flops(model: LanguageConfig, length: int) -> int:
    """FLOPs of forward and backward for one token (PaLM's convention, the causal half not taken off)."""
    matrices = count_matrix_parameters(model, parameter_shapes(model))
    return flops_per_token(matrices, model.num_layers, model.num_heads * model.key_dim, length)


class Recorder:
    """Fetches the metrics of finished steps, checks that they are finite, and writes and shows them."""

    def __init__(self, parts: Parts, workdir: str, start: int, say: Callable, found: Start):
        config = parts.config
        self.steps, self.every = config.training.steps, config.logging.every
        peak, self.peak_source = device_peak_flops(parts.model_config.dtype)
        self.speed = Throughput(
            config.training.batch_size * config.data.length, self.steps,
            token_flops(parts.model_config, config.data.length), peak and peak * parts.mesh.size,
        )  # fmt: skip
        self.tokens_per_step = config.training.batch_size * config.data.length
        self.writer = MetricWriter(workdir, start)
        self.bar = tqdm(total=self.steps, initial=start, unit="step", disable=None, dynamic_ncols=True)
        self.say, self.start, self.last_line = say, start, -math.inf
        self.last_finite, self.owed = found.metrics, found.owed
        self.checkpoints = pathlib.Path(workdir) / CHECKPOINTS

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.bar.close()
        try:
            self.writer.close()
        except OSError as error:  # the lines that the disk did not take
            if kind is None:
                raise FaultError(f"cannot write {self.writer.path}: {error.strerror}") from error

    def record(self, step: int, metrics: dict, extra: dict | None) -> None:
        """Waits for a step's metrics; FaultError when they are not finite. `extra` is written with them;
        None means that a validation is missing in it, so the line is owed."""
        host = {name: float(value) for name, value in jax.device_get(metrics).items()}
        self.speed.tick(step)
        finite = all(math.isfinite(value) for value in host.values())
        line = {"tokens": step * self.tokens_per_step, **host, **self.speed.summary(), **(extra or {})}
        if extra is None and finite:
            self.owed = line
        elif step % self.every == 0 or step in (1, self.steps) or extra or not finite:
            self._write(step, line)
        if not finite:
            raise FaultError(self._not_finite(step, host))
        self.last_finite = {"step": step, **host}
        self.bar.update(step - self.bar.n)

    def settle_debt(self, validation: dict) -> None:
        """Writes the line that is owed, its validation made up for."""
        self._write(self.start, {**self.owed, **validation})
        self.owed = None

    def _write(self, step: int, line: dict) -> None:
        self.writer.write(step, line)
        self._show(step, line)

    def _show(self, step: int, line: dict) -> None:
        now = time.monotonic()
        due = now - self.last_line >= SECONDS_BETWEEN_LINES or "validation/loss" in line
        if due or step in (self.start + 1, self.steps):
            self.last_line = now
            with tqdm.external_write_mode():
                self.say(format_line(step, self.steps, line))

    def _not_finite(self, step: int, host: dict) -> str:
        names = ", ".join(f"{name} {value}" for name, value in host.items() if not math.isfinite(value))
        last = ", ".join(f"{name} {value:.6g}" for name, value in self.last_finite.items()) or "none"
        steps = available_steps(self.checkpoints)
        back = f"checkpoint {steps[-1]} is the one to return to" if steps else "there is no checkpoint yet"
        return (
            f"training stopped at step {step}: {names}; last finite metrics: {last}; {back}; "
            "lower schedule.peak, raise schedule.warmup_steps or set optimizer.clip_norm, in a new --workdir"
        )


def train(
    config: ml_collections.ConfigDict,
    workdir: str,
    *,
    make_evaluator: Callable,
    sample: Callable,
    say: Callable[[str], None] = print,
) -> dict:
    """Trains until training.steps, or until a signal; returns the summary.

    make_evaluator(model, store, mesh, length=, batch_size=, ...) and sample(model, params, tokenizer, prompt,
    ...) come from the evaluation room, which training does not import.
    """
    with StopRequest() as stop:
        parts = build(config, workdir)
        summary = read_summary(workdir)
        if summary is not None:
            return summary | {"status": "complete already"}
        evaluator = make_evaluator(
            parts.model, parts.validation_store, parts.mesh, length=config.data.length,
            batch_size=config.eval.batch_size, cross_documents=config.data.cross_documents,
            max_windows=config.eval.max_windows,
        )  # fmt: skip
        folder = pathlib.Path(workdir) / CHECKPOINTS
        kept = {"keep": config.checkpoint.keep, "keep_every": config.checkpoint.keep_every}
        with Checkpoints(folder, **kept, strict=config.checkpoint.strict, log=say) as checkpoints:
            found = find_start(parts, checkpoints, say)
            open_run_folder(workdir, config)
            say(describe(parts))
            state = make_state(parts, found)
            start = int(state.step)
            say(f"starting at step {start} of {config.training.steps} from {found.origin}")
            with Recorder(parts, workdir, start, say, found) as recorder:
                state, done = _steps(parts, state, start, checkpoints, recorder, evaluator, stop, say)
            checkpoints.wait()
            try:
                if done < config.training.steps:
                    raise Stopped
                result = _summary(parts, workdir, state, evaluator, sample, recorder, stop, say)
            except Stopped:
                return {"status": "stopped", "step": done, "steps": config.training.steps, "workdir": workdir}
        write_summary(workdir, result)
        return result


def compile_step(parts: Parts, state, batch) -> Any:
    """The compiled update: (state, batch) -> (state, metrics); the state is donated."""
    config, whole = parts.config, replicated(parts.mesh)
    step = make_train_step(
        parts.model, parts.optimizer, parts.schedule, num_parts=config.training.accumulation,
        z_loss=config.training.z_loss, ema=config.optimizer.ema,
    )  # fmt: skip
    shardings = {"in_shardings": (whole, batch_sharding(parts.mesh)), "out_shardings": (whole, whole)}
    return jax.jit(step, donate_argnums=0, **shardings).lower(state, batch).compile()


def _steps(parts, state, start, checkpoints, recorder, evaluator, stop, say) -> tuple[TrainState, int]:
    """The loop: (state, updates done). The metrics of a step are fetched when the next one runs already."""
    config, num_steps = parts.config, parts.config.training.steps
    pending, done, saved = None, start, start
    watch = jax.jit(make_stream_watch(parts.model))
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

    if recorder.owed is not None and not stop.requested:
        validation = _validation(evaluator, state, stop, say)
        if validation is not None:
            recorder.settle_debt(validation)
    with Prefetcher(parts.loader.batch, start) as batches:
        while done < num_steps and not stop.requested:
            _, rows = next(batches)
            batch = put_batch(rows, parts.mesh)
            if train_step is None:
                began = time.monotonic()
                train_step = compile_step(parts, state, batch)
                say(f"compiled the step in {format_duration(time.monotonic() - began)}")
            checkpoints.check()
            state, metrics = train_step(state, batch)
            settle()
            done += 1
            extra: dict[str, Any] | None = {}
            streams, validation = _due(config, done)
            if streams or validation:
                jax.block_until_ready(metrics)
                with recorder.speed.paused():
                    extra = _stream_metrics(watch(state.params, batch)) if streams else {}
                    figures = _validation(evaluator, state, stop, say) if validation else {}
                    extra = None if figures is None else extra | figures
            pending = (done, metrics, extra)
            if done % config.checkpoint.every == 0 or done == num_steps:
                save()
        settle()
        if done > saved:
            save()
    return state, done


def _due(config, step: int) -> tuple[bool, bool]:
    """(Whether the streams are watched, whether there is a validation) after a step other than the last."""
    streams, validation = config.logging.streams_every, config.eval.every
    return (
        bool(streams and step % streams == 0),
        bool(validation and step % validation == 0 and step < config.training.steps),
    )


def _stream_metrics(seen: dict[str, jax.Array]) -> dict[str, float]:
    """post_rms/LAYER, pre_rms/LAYER and their ratio (stream_rms/LAYER with one stream)."""
    rms = {name: np.asarray(values, np.float64) for name, values in seen.items()}
    rows = {f"{name}_rms/{i}": value for name, values in rms.items() for i, value in enumerate(values)}
    if {"post", "pre"} <= rms.keys():
        rows |= {f"post_over_pre/{i}": value for i, value in enumerate(rms["post"] / rms["pre"])}
    return rows


def _validation(evaluator, state: TrainState, stop: StopRequest, say: Callable) -> dict[str, float] | None:
    """The validation figures of a step; None when a signal came in between."""
    try:
        total = evaluator(state.eval_params(), lambda _: stop.check())["total"]
    except Stopped:
        say("validation given up: it is done first when the run goes on")
        return None
    return {f"validation/{name}": total[name] for name in ("loss", "bits_per_byte", "perplexity")}


def _summary(parts, workdir, state, evaluator, sample, recorder, stop, say) -> dict:
    """The figures of a finished run, the whole validation set and a sampled text; Stopped at a signal."""
    config = parts.config
    say("evaluating the whole validation set")
    evaluator.num_windows = -(-parts.validation_store.num_tokens // config.data.length)
    with tqdm(total=evaluator.num_windows, unit="window", disable=None, leave=False) as bar:

        def progress(done):
            stop.check()
            bar.update(done - bar.n)

        total = evaluator(state.eval_params(), progress)["total"]
    text = ""
    if config.eval.prompt:
        text = sample(
            parts.model, state.eval_params(), parts.tokenizer, config.eval.prompt, length=config.data.length,
            num_tokens=config.eval.sample_tokens, temperature=config.eval.temperature, seed=config.seed,
        )  # fmt: skip
    memory, memory_kind = peak_memory_bytes()
    speed = recorder.speed.summary()
    return {
        "status": "complete",
        "step": config.training.steps,
        "tokens": config.training.steps * recorder.tokens_per_step,
        "parameters": count_parameters(parameter_shapes(parts.model_config)),
        "train_loss": recorder.last_finite.get("loss"),
        "validation": total,
        "tokens_per_second": speed.get("tokens_per_second"),
        "mfu": speed.get("mfu"),
        "peak_flops_source": recorder.peak_source,
        "peak_memory_bytes": memory,
        "peak_memory_kind": memory_kind,
        "prompt": config.eval.prompt,
        "sample": text,
        "workdir": str(workdir),
        "residual": parts.model_config.residual,
    }
