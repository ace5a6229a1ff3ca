"""How well a language model answers published questions: what is counted as right, and the table of it.

The choices of a question are ranked by their log-probability, as it is, by character or by token.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from siamese_jax.checkpoint import check_same
from siamese_jax.errors import InputError
from siamese_jax.evaluation.frechet import check_output, whole_file
from siamese_jax.evaluation.run import OpenRun, progress_bar, restore_weights, told
from siamese_jax.evaluation.task_requests import (
    BITS,
    GREEDY,
    PER_CHARACTER,
    PER_TOKEN,
    RAW,
    Question,
    Task,
    find_files,
    read_tasks,
)
from siamese_jax.evaluation.task_scoring import Choice, Piece, Score, TaskScorer, encode_choices, score_choices


def characters(continuation: str) -> int:
    """Characters of a continuation without its leading blank; at least 1."""
    return max(1, len(continuation.removeprefix(" ")))


def rated(question: Question, scores: Sequence[Score], metric: str) -> np.ndarray:
    """What the choices of a question are ranked by, float64 [choices]."""
    log_probs = np.array([score.log_prob for score in scores], np.float64)
    if metric == PER_CHARACTER:
        return log_probs / [characters(continuation) for _, continuation in question.choices]
    return log_probs / [score.tokens for score in scores] if metric == PER_TOKEN else log_probs


def share(ratings: np.ndarray, label: int) -> float:
    """How far the question is answered rightly: 1, 0, or 1/k where the right choice is level with k - 1 others.

    Taking the first of equals instead would favour the tasks whose right choice stands there. A model that
    gives NaN or infinity for any choice has not answered.
    """
    best = ratings == ratings.max()
    return float(best[label] / best.sum()) if np.isfinite(ratings).all() else 0.0


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """(mean, its standard error): of right and wrong answers sqrt(p (1 - p) / (n - 1))."""
    error = np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(np.mean(values)), float(error)


def figures(task: Task, scores: dict[Choice, Score]) -> dict[str, Any]:
    """Everything that is told of a task; docs are in the help of eval.py."""
    of_question = [[scores[choice] for choice in question.choices] for question in task.questions]
    every = [score for some in of_question for score in some]
    gold = [some[question.label] for question, some in zip(task.questions, of_question, strict=True)]
    text_bytes = [len(question.choices[question.label][1].encode("utf-8")) for question in task.questions]
    bits = -np.array([score.log_prob for score in gold]) / math.log(2)
    per_question = {BITS: bits / text_bytes}
    if task.metric in (GREEDY, BITS):
        finite = [score.greedy and math.isfinite(score.log_prob) for score in gold]
        per_question[GREEDY] = np.array(finite, np.float64)
    else:
        asked = list(zip(task.questions, of_question, strict=True))
        for metric in (RAW, PER_CHARACTER, PER_TOKEN):
            shares = [share(rated(question, some, metric), question.label) for question, some in asked]
            per_question[metric] = np.array(shares)
    score, error = mean_and_error(per_question[task.metric])
    found = {
        "variant": task.variant,
        "questions": len(task.questions),
        "requests": len(every),
        "metric": task.metric,
        "score": score,
        "standard_error": error,
        **{metric: float(np.mean(values)) for metric, values in per_question.items() if metric != BITS},
        "bits_per_byte": float(bits.sum() / sum(text_bytes)),
        "bits_per_byte_by_question": float(np.mean(per_question[BITS])),
        "contexts_cut": sum(score.cut > 0 for score in every),
        "continuations_split": sum(score.pieces > 1 for score in every),
        "not_finite": sum(not all(math.isfinite(score.log_prob) for score in some) for some in of_question),
    }
    if task.metric in (GREEDY, BITS):
        nats = -np.mean([score.log_prob for score in gold])
        return found | {"perplexity": math.inf if nats > 700 else math.exp(nats)}
    found["chance"] = float(np.mean([1 / len(question.choices) for question in task.questions]))
    categories = [question.category for question in task.questions]
    if any(categories):
        found["categories"] = {
            name: _of_category(per_question[task.metric][np.array(categories) == name])
            for name in dict.fromkeys(categories)
        }
    return found


def _of_category(shares: np.ndarray) -> dict[str, Any]:
    score, error = mean_and_error(shares)
    return {"questions": len(shares), "score": score, "standard_error": error}


def mean_of(tasks: dict[str, dict]) -> dict[str, Any] | None:
    """Of the scores of all tasks that have choices, each task counting the same; None without such a task."""
    chosen = [found for found in tasks.values() if "chance" in found]
    if not chosen:
        return None
    errors = np.array([found["standard_error"] for found in chosen])
    return {
        "tasks": len(chosen),
        "score": float(np.mean([found["score"] for found in chosen])),
        "standard_error": float(np.sqrt(np.sum(errors**2)) / len(chosen)),
        "chance": float(np.mean([found["chance"] for found in chosen])),
    }


def saved_lines(task: Task, scores: dict[Choice, Score]) -> Iterator[dict[str, Any]]:
    """What --save_requests writes of each question; chosen: the first of equals, None where not all are finite."""
    for question in task.questions:
        some = [scores[choice] for choice in question.choices]
        ratings = rated(question, some, task.metric)
        yield {
            "task": task.name,
            "doc_id": question.doc_id,
            **({"category": question.category} if question.category else {}),
            "label": question.label,
            "chosen": int(np.argmax(ratings)) if np.isfinite(ratings).all() else None,
            "choices": [
                {
                    "log_prob": score.log_prob if math.isfinite(score.log_prob) else None,
                    "tokens": score.tokens,
                    "characters": characters(continuation),
                    "cut": score.cut,
                    "pieces": score.pieces,
                    "greedy": score.greedy,
                }
                for (_, continuation), score in zip(question.choices, some, strict=True)
            ],
        }


def evaluate_tasks(
    run: OpenRun,
    names: Sequence[str],
    *,
    step: int | None = None,
    average: bool = True,
    tasks_dir: str = "",
    max_questions: int = 0,
    batch_size: int | None = None,
    save_requests: str = "",
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """What eval.py finds on published tasks, as JSON can hold it; 'tasks' and 'mean' hold the figures.

    Args:
        names: as for `read_tasks`.
        step: of the checkpoint; None = the newest sound one.
        average: whether the running average is taken where the run keeps one.
        tasks_dir, max_questions: as for `find_files` and `read_tasks`.
        batch_size: requests of a whole window at a time; None = that of the run.
        save_requests: file to write every question with its scores to, one JSON line each; '' = none.
    """
    if save_requests:
        check_output("--save_requests", save_requests)
    tasks = read_tasks(find_files(tasks_dir), names, max_questions)
    check_same("the questions of the tasks", hashlib.sha256(repr(tasks).encode()).digest())
    window = run.config.data.length
    choices = [choice for task in tasks for question in task.questions for choice in question.choices]
    encoded = encode_choices(choices, run.tokenizer, window)
    pieces = [piece for one in encoded.values() for piece in one.pieces]
    _check_vocabulary(pieces, run)
    weights = restore_weights(run, step, say, average)
    batch_size = run.config.eval.batch_size if batch_size is None else batch_size
    scorer = TaskScorer(run.model, run.mesh, window=window, batch_size=batch_size)
    with progress_bar(len(pieces), "request") as progress:
        scores = score_choices(scorer, weights.params, encoded, progress)
    if save_requests and jax.process_index() == 0:
        with whole_file(save_requests) as file:
            for line in (line for task in tasks for line in saved_lines(task, scores)):
                file.write((json.dumps(line, allow_nan=False) + "\n").encode("utf-8"))
    found = {task.name: figures(task, scores) for task in tasks}
    mean = mean_of(found)
    return {
        **told(run, weights),
        "length": window,
        "tokens": sum(len(piece.inputs) for piece in pieces),
        "tasks": found,
        **({"mean": mean} if mean else {}),
        **({"save_requests": save_requests} if save_requests else {}),
    }


def _check_vocabulary(pieces: Sequence[Piece], run: OpenRun) -> None:
    largest = max(int(part.max()) for piece in pieces for part in piece)
    if largest >= run.config.model.vocab_size:
        raise InputError(
            f"the tokens of the tasks go up to {largest}, beyond model.vocab_size = {run.config.model.vocab_size} "
            f"of {run.workdir}: its tokenizer has grown"
        )


SHORT = {RAW: "raw", PER_CHARACTER: "per char", PER_TOKEN: "per token", GREEDY: "greedy", BITS: "bits/byte"}


def format_tasks(result: dict) -> str:
    """The figures as a table, the mean last, and what had to be cut."""
    head = ("questions", "ranked by", "score", "+-", "chance", "raw", "per char", "bits/byte", "cut")
    widths = (9, 9, 7, 6, 7, 7, 8, 9, 7)
    rows = []
    for name, found in result["tasks"].items():
        rows.append((name, _cells(found, SHORT[found["metric"]])))
        rows += [(f"  {part}", _cells(of, "")) for part, of in found.get("categories", {}).items()]
    if "mean" in result:
        rows.append((f"mean of {result['mean']['tasks']} task(s) with choices", _cells(result["mean"], "")))
    first = max(len(name) for name, _ in rows)
    lines = [
        "  ".join([name.ljust(first), *(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))])
        for name, cells in [("task", head), *rows]
    ]
    found = result["tasks"].values()
    split, lost = (sum(one[name] for one in found) for name in ("continuations_split", "not_finite"))
    if split:
        lines.append(f"{split:,} continuations are longer than the {result['length']} tokens of a window: in parts")
    if lost:
        lines.append(f"{lost:,} questions have a score that is not finite: they count as wrong")
    words = [f"{name}: last word, perplexity {one['perplexity']:.4g}"
             for name, one in result["tasks"].items() if one["metric"] == GREEDY]  # fmt: skip
    return "\n".join(lines + words)


def _cells(found: dict, ranked_by: str) -> list[str]:
    def percent(name: str, digits: int) -> str:
        return f"{100 * found[name]:.{digits}f}" if name in found else ""

    is_bits = found.get("metric") == BITS
    return [
        f"{found['questions']:,}" if "questions" in found else "",
        ranked_by,
        "" if is_bits else percent("score", 2),
        "" if is_bits else percent("standard_error", 2),
        percent("chance", 2),
        percent(RAW, 2),
        percent(PER_CHARACTER, 2),
        f"{found['bits_per_byte']:.4f}" if "bits_per_byte" in found else "",
        f"{found['contexts_cut']:,}" if "contexts_cut" in found else "",
    ]
