"""Perplexity and bits per byte of a token store, per source and in total, whatever the batch size.

Legend: B batch, L length.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh

from siamese_jax.data.loader import evaluation_batches, num_evaluation_windows
from siamese_jax.data.store import TokenStore
from siamese_jax.models.language import LanguageModel
from siamese_jax.parallel.mesh import batch_sharding, put_batch, replicated


@dataclasses.dataclass
class Sums:
    """What is added up over one source; float64 on the host."""

    nats: float = 0.0
    tokens: int = 0
    text_bytes: float = 0.0
    instance_means: float = 0.0
    instances: int = 0

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def report(self) -> dict[str, float]:
        """The figures: loss in nats a token; both perplexities; bits per byte of text."""
        loss = self.nats / self.tokens
        by_instance = self.instance_means / self.instances
        return {
            "loss": loss,
            "perplexity": _exp(loss),
            "perplexity_by_instance": _exp(by_instance),
            "bits_per_byte": self.nats / math.log(2) / self.text_bytes if self.text_bytes else math.nan,
            "tokens": self.tokens,
            "bytes": round(self.text_bytes),
            "instances": self.instances,
        }


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def make_scorer(model: LanguageModel, mesh: Mesh) -> Callable:
    """Compiled (params, batch) -> cross-entropy of every target [B, L] in nats."""

    def score(params, batch):
        options = {f"{name}_BL": batch[name] for name in ("positions", "segments") if name in batch}
        return model.apply({"params": params}, batch["inputs"], batch["targets"], method="losses", **options)[0]

    shardings = (replicated(mesh), batch_sharding(mesh))
    return jax.jit(score, in_shardings=shardings, out_shardings=batch_sharding(mesh))


class Evaluator:
    """Evaluates parameters on one store again and again with one compiled program.

    Args:
        length: tokens of a window; each window is one instance of the reference's protocol.
        batch_size: windows at a time, rounded up to the devices of the mesh.
        max_windows: only the first so many (0 = all).
    """

    def __init__(self, model: LanguageModel, store: TokenStore, mesh: Mesh, *, length: int, batch_size: int,
                 cross_documents: bool = True, max_windows: int = 0, score: Callable | None = None):
        self.store, self.mesh, self.length = store, mesh, length
        self.batch_size = -(-batch_size // mesh.size) * mesh.size
        self.cross_documents = cross_documents
        self.num_windows = num_evaluation_windows(store, length)
        if max_windows:
            self.num_windows = min(max_windows, self.num_windows)
        self.score = score or make_scorer(model, mesh)

    def batches(self) -> Iterator[dict[str, np.ndarray]]:
        """The batches of a pass; windows beyond `num_windows` weigh nothing."""
        for batch in evaluation_batches(self.store, self.length, self.batch_size, self.cross_documents):
            if batch["window"].min() >= self.num_windows:
                return
            batch["weights"] = batch["weights"] * (batch["window"] < self.num_windows)[:, None]
            yield batch

    def __call__(self, params, progress: Callable[[int], None] | None = None) -> dict:
        """{'total': figures, 'sources': {name: figures}}; progress(windows done) is called after each batch."""
        totals, whole = {name: Sums() for name in self.store.sources}, Sums()
        done = 0
        for batch in self.batches():
            on_device = put_batch({k: v for k, v in batch.items() if k not in ("window", "document")}, self.mesh)
            nats_BL = np.asarray(self.score(params, on_device), np.float64)
            whole += _sums(self.store, nats_BL, batch, batch["weights"])
            first, last = _range(batch)
            for name, (low, high) in self.store.sources.items():
                if low <= last and high >= first:
                    own = (batch["document"] >= low) & (batch["document"] <= high)
                    totals[name] += _sums(self.store, nats_BL, batch, batch["weights"] * own)
            done += int((batch["window"] >= 0).sum())
            if progress:
                progress(done)
        sources = {name: sums.report() for name, sums in totals.items() if sums.tokens}
        return {"total": whole.report(), "sources": sources}


def _range(batch) -> tuple[int, int]:
    documents = batch["document"][batch["weights"] > 0]
    return int(documents.min()), int(documents.max())


def _sums(store: TokenStore, nats_BL: np.ndarray, batch: dict, weights_BL: np.ndarray) -> Sums:
    """The sums of the weighted targets; a document's bytes are spread evenly over its tokens."""
    counted = weights_BL > 0
    documents = batch["document"][counted]
    lengths = np.diff(store.document_starts)
    rows = counted.sum(axis=1)
    nats_B = np.where(counted, nats_BL, 0.0).sum(axis=1)
    return Sums(
        nats=float(nats_B.sum()),
        tokens=int(rows.sum()),
        text_bytes=float((store.document_bytes[documents] / lengths[documents]).sum()),
        instance_means=float((nats_B[rows > 0] / rows[rows > 0]).sum()),
        instances=int((rows > 0).sum()),
    )


def format_table(result: dict) -> str:
    """The figures as a table, the total last."""
    head = ("source", "tokens", "bits/byte", "loss", "perplexity", "by instance")
    rows = [*result["sources"].items(), ("total", result["total"])]
    width = max(len(name) for name, _ in [(head[0], None), *rows])
    lines = ["  ".join([head[0].ljust(width), *(f"{name:>11}" for name in head[1:])])]
    for name, r in rows:
        cells = (f"{r['tokens']:>11,}", f"{r['bits_per_byte']:>11.4f}", f"{r['loss']:>11.4f}",
                 f"{r['perplexity']:>11.4g}", f"{r['perplexity_by_instance']:>11.4g}")  # fmt: skip
        lines.append("  ".join([name.ljust(width), *cells]))
    return "\n".join(lines)
