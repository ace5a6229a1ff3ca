"""From the metrics of finished steps to metrics.jsonl, TensorBoard, the log line and the progress bar.

Every process checks them, process 0 writes and shows them.
"""

import contextlib
import math
import time
from collections.abc import Callable

import jax
from tqdm import tqdm

from siamese_jax.checkpoint import Checkpoints
from siamese_jax.errors import FaultError
from siamese_jax.training.hardware import device_peak_flops
from siamese_jax.training.metrics import MetricWriter, Throughput, format_line
from siamese_jax.training.parts import Parts
from siamese_jax.training.samples import write_samples
from siamese_jax.training.start import Start

SECONDS_BETWEEN_LINES = 10.0


class Recorder:
    """Fetches the metrics of finished steps, checks that they are finite, and writes and shows them."""

    def __init__(
        self, parts: Parts, workdir: str, start: int, say: Callable, found: Start, checkpoints: Checkpoints
    ):
        config = parts.config
        self.steps, self.every = config.training.steps, config.logging.every
        peak, self.peak_source = device_peak_flops(parts.model_config.dtype)
        self.speed = Throughput(
            parts.units_per_step, self.steps, parts.flops_per_unit, peak and peak * parts.mesh.size,
            unit=parts.task.unit,
        )  # fmt: skip
        self.by_source = getattr(parts.data.loader, "tokens_by_source", lambda steps: {})
        self.units_per_step, self.units = parts.units_per_step, f"{parts.task.unit}s"
        is_main = jax.process_index() == 0
        self.writer = MetricWriter(workdir, start) if is_main else None
        disable = None if is_main else True
        self.bar = tqdm(total=self.steps, initial=start, unit="step", disable=disable, dynamic_ncols=True)
        self.say, self.start, self.last_line = say, start, -math.inf
        self.last_finite, self.owed, self.converted = found.metrics, found.owed, found.converted
        self.checkpoints, self.workdir = checkpoints, workdir
        if is_main:
            write_samples(workdir, start + 1, [])  # what a killed run left behind its last checkpoint

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.bar.close()
        if self.writer is None:
            return
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
        taken = {f"tokens/{name}": count for name, count in self.by_source(step).items()}
        line = {self.units: step * self.units_per_step, **taken, **host, **self.speed.summary(), **(extra or {})}
        if extra is None and finite:
            self.owed = line
        elif step % self.every == 0 or step in (1, self.steps) or extra or not finite:
            self._write(step, line)
        if not finite:
            raise FaultError(self._not_finite(step, host))
        self.last_finite = {"step": step, **host}
        self.bar.update(step - self.bar.n)

    def settle_debt(self, validation: dict) -> None:
        """Writes the line that is owed, its validation made up for; once, however often it is made up for."""
        # A start killed before its first save leaves the line behind.
        if self.writer and self.writer.last_step < self.start:
            self._write(self.start, {**self.owed, **validation})
        self.owed = None

    def samples(self, step: int, samples: list[dict[str, str]]) -> None:
        """Writes what the model put after its prompts."""
        if self.writer is not None:
            write_samples(self.workdir, step, samples)
            texts = {f"sample/{i}": sample["prompt"] + sample["text"] for i, sample in enumerate(samples)}
            self.writer.write_texts(step, texts)

    def _write(self, step: int, line: dict) -> None:
        if self.writer is None:
            return
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
        with contextlib.suppress(FaultError):
            self.checkpoints.wait()  # one may be on its way to the disk
        steps = self.checkpoints.steps()
        back = f"checkpoint {steps[-1]} is the one to return to" if steps else "there is no checkpoint yet"
        return (
            f"training stopped at step {step}: {names}; last finite metrics: {last}; {back}; "
            "lower schedule.peak, raise schedule.warmup_steps or set optimizer.clip_norm, in a new --workdir"
        )
