"""The numbers of a run on their way out: metrics.jsonl, TensorBoard, the log line, speed and FLOPs.

metrics.jsonl has one JSON object a line, step first and each step once. JSON has no NaN: a value that is not
finite is written as null and spelled out under the key `non_finite`; `read_metrics` puts it back.
"""

import collections
import contextlib
import json
import math
import os
import time

import jax
import numpy as np
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2
from tensorboardX.summary import scalar, text

from siamese_jax.errors import FaultError, InputError


class MetricWriter:
    """Writes a run's metrics to `workdir/metrics.jsonl` and TensorBoard events beside it, from one process.

    Args:
        workdir: the run folder, made where it is missing.
        resume_step: updates already done. Lines that a killed run left beyond it are cut off; 0: all.
    """

    def __init__(self, workdir: str | os.PathLike, resume_step: int = 0):
        self.path = os.path.join(workdir, "metrics.jsonl")
        try:
            os.makedirs(workdir, exist_ok=True)
            self._last_step = _cut_after(self.path, resume_step)
            self._file = open(self.path, "a", encoding="utf-8")
            self._board = Board(workdir, resume_step + 1 if resume_step > 0 else 0)
        except OSError as error:
            raise FaultError(f"cannot write {self.path}: {error.strerror}") from error

    @property
    def last_step(self) -> int:
        """The step of the last line; -1 where there is none."""
        return self._last_step

    def write(self, step: int, metrics: dict) -> None:
        """Appends the line of a step: {name: host number}, all that belongs to the step at once."""
        if step <= self._last_step:
            raise ValueError(f"step {step} after step {self._last_step} in {self.path}: write each step once")
        values = {name: np.asarray(value).item() for name, value in metrics.items()}
        try:
            self._file.write(_to_line({"step": int(step), **values}))
            self._file.flush()
            self._board.write(step, values)
        except OSError as error:
            raise FaultError(f"cannot write {self.path} at step {step}: {error.strerror}") from error
        self._last_step = step

    def write_texts(self, step: int, texts: dict[str, str]) -> None:
        """Texts of a step by name, for TensorBoard alone."""
        try:
            self._board.write_texts(step, texts)
        except OSError as error:
            raise FaultError(f"cannot write events beside {self.path} at step {step}: {error.strerror}") from error

    def close(self):
        self._file.close()
        self._board.close()


class Board:
    """TensorBoard events, written before `write` returns.

    tensorboardX's SummaryWriter writes from a thread: on a full disk that dies and the next call waits for ever.

    Args:
        first_step: TensorBoard hides the events that a killed run wrote from this step on.
    """

    def __init__(self, workdir: str | os.PathLike, first_step: int):
        self._events = EventsWriter(os.path.join(workdir, "events"), f".{os.getpid()}")
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._events.write_event(event_pb2.Event(wall_time=time.time(), step=first_step, session_log=start))
        self._events.flush()

    def write(self, step: int, values: dict) -> None:
        """One event for each value of the step; OSError where the disk does not take it."""
        for name, value in values.items():
            self._add(step, scalar(name, value))
        self._events.flush()

    def write_texts(self, step: int, texts: dict[str, str]) -> None:
        """The same for texts."""
        for name, value in texts.items():
            self._add(step, text(name, value))
        self._events.flush()

    def _add(self, step: int, summary) -> None:
        self._events.write_event(event_pb2.Event(wall_time=time.time(), step=int(step), summary=summary))

    def close(self) -> None:
        """Flushes and closes the file."""
        self._events.close()


def read_metrics(path: str | os.PathLike) -> list[dict]:
    """The records of a metrics.jsonl as dicts, non-finite values restored; a torn last line is left out."""
    return [record for _, record in _read_lines(path)]


class Throughput:
    """Tokens or images per second, step time, MFU and time to go over the last `window` steps; pauses do not count.

    Call `tick(step)` when the results of a step have arrived, and `pause()` only after those of the last
    dispatched step: what the device still computes in a pause is missed. The first tick sets the zero, so
    compilation does not count.

    Args:
        units_per_step: tokens or images of one update over all devices.
        num_steps: updates of the whole run.
        flops_per_unit: forward and backward, see flops_per_token and flops_per_image.
        peak_flops: FLOP/s of all devices together; None leaves the MFU out.
        unit: token or image.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        units_per_step: int,
        num_steps: int,
        flops_per_unit: float | None = None,
        peak_flops: float | None = None,
        *,
        unit: str = "token",
        window: int = 50,
        clock=time.monotonic,
    ):
        self._units, self._num_steps, self._unit = units_per_step, num_steps, unit
        self._flops, self._peak = flops_per_unit, peak_flops
        self._clock = clock
        self._ticks = collections.deque(maxlen=window + 1)
        self._paused_at, self._paused_seconds = None, 0.0

    def tick(self, step: int) -> None:
        self._ticks.append((step, self._clock() - self._paused_seconds))

    def pause(self):
        if self._paused_at is not None:
            raise RuntimeError("paused already: pauses do not nest, call resume() first")
        self._paused_at = self._clock()

    def resume(self):
        self._paused_seconds += self._clock() - self._paused_at
        self._paused_at = None

    @contextlib.contextmanager
    def paused(self):
        """pause() and resume() around a block."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def summary(self) -> dict[str, float]:
        """tokens_per_second (or images_...), step_seconds, eta_seconds, mfu with a known peak; {} before two ticks.

        The time to go is that of the training steps alone, without validations and checkpoints to come.
        """
        if len(self._ticks) < 2:
            return {}
        (first_step, first_time), (last_step, last_time) = self._ticks[0], self._ticks[-1]
        step_seconds = (last_time - first_time) / (last_step - first_step)
        rate = self._units / step_seconds
        summary = {
            f"{self._unit}s_per_second": rate,
            "step_seconds": step_seconds,
            "eta_seconds": (self._num_steps - last_step) * step_seconds,
        }
        if self._flops and self._peak:
            summary["mfu"] = rate * self._flops / self._peak
        return summary


def flops_per_token(
    num_matrix_params: int, num_layers: int, attention_width: int, length: int, *, causal: bool = False
) -> int:
    """FLOPs of forward and backward for one token: 6 a matrix parameter and 12 N (H K) L for the attention.

    The convention of PaLM (Chowdhery et al., arXiv 2204.02311, appendix B). It counts the whole L x L square
    although a causal mask discards half of it, as published MFU figures do; causal=True counts half of it.

    Args:
        num_matrix_params: parameters that multiply every token: all kernels and the head, a tied one too;
            not the embedding lookup, norms and biases.
        num_layers: N.
        attention_width: H * K.
        length: L.
    """
    attention = 12 * num_layers * attention_width * length
    return 6 * num_matrix_params + (attention // 2 if causal else attention)


def flops_per_image(model, shapes, num_tokens: int) -> int:
    """FLOPs of forward and backward for one image, counted as `flops_per_token` counts.

    The matrices of attention and MLP multiply every token, those of `model.per_patch` every patch, others once.

    Args:
        model: its configuration. shapes: its parameters. num_tokens: positions of the stack.
    """
    total = 12 * model.num_layers * model.num_heads * model.key_dim * num_tokens**2
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        names = [part.key for part in path]
        if names[-1] != "kernel":
            continue
        times = num_tokens if {"attention", "mlp"} & set(names) else 1
        if names[0] in model.per_patch:
            times = model.num_patches
        total += 6 * times * math.prod(leaf.shape)
    return total


_LINE = {
    "loss": "loss {:.4f}".format,
    "validation/loss": "validation {:.4f}".format,
    "validation/top1": "top-1 {:.2%}".format,
    "learning_rate": "lr {:.2e}".format,
    "grad_norm": "grad {:.3f}".format,
    "tokens_per_second": lambda value: f"{format_count(value)} tokens/s",
    "images_per_second": lambda value: f"{format_count(value)} images/s",
    "mfu": "mfu {:.1%}".format,
    "eta_seconds": lambda value: f"{format_duration(value)} left",
}


def format_line(step: int, num_steps: int, metrics: dict) -> str:
    """The log line of a step, from metrics named as in metrics.jsonl; missing ones are left out."""
    parts = [f"step {step:>{len(str(num_steps))}}/{num_steps}"]
    parts += [text(metrics[name]) for name, text in _LINE.items() if name in metrics]
    return "  ".join(parts)


def format_count(value: float) -> str:
    """A count in three digits: 950, 12.3k, 4.56M."""
    for unit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * unit:  # 999,900 rounds to 1.00M
            return f"{value / unit:#.3g}".rstrip(".") + suffix
    return f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """Seconds in the two units that matter: 0.4s, 45s, 3m20s, 2h03m, 4d06h."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 10:
        return f"{seconds:.1f}s"
    seconds = round(seconds)
    for large, small, names in ((86400, 3600, "dh"), (3600, 60, "hm"), (60, 1, "ms")):
        if seconds >= large:
            return f"{seconds // large}{names[0]}{seconds % large // small:02d}{names[1]}"
    return f"{seconds}s"


def _to_line(record):
    spelling = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    non_finite = {name: spelling[str(value)] for name, value in record.items() if not math.isfinite(value)}
    if non_finite:
        record = {**record, **dict.fromkeys(non_finite), "non_finite": non_finite}
    return json.dumps(record, allow_nan=False) + "\n"


def _read_lines(path):
    """(line, record) for every whole line."""
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                message = f"{path} line {number} is not JSON ({line[:40]!r}): remove that line"
                raise InputError(message) from None
            spelled = record.pop("non_finite", {})
            yield line, {**record, **{name: float(value) for name, value in spelled.items()}}


def _cut_after(path, resume_step):
    """Cuts the file back to the steps a resumed run has done; returns the last step it keeps, -1 for none."""
    if not os.path.exists(path):
        return -1
    # A run that starts at 0 keeps nothing, so that it need not read what is there.
    lines = list(_read_lines(path)) if resume_step > 0 else []
    kept = [(line, record["step"]) for line, record in lines if record["step"] <= resume_step]
    with open(path + ".cut", "w", encoding="utf-8") as file:
        file.writelines(line for line, _ in kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".cut", path)
    return kept[-1][1] if kept else -1
