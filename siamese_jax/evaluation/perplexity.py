"""Perplexity and bits per byte of a token store, per source and in total, whatever the batch size.

Legend: B batch, L length, P pieces (the targets of one document in one window), S sources.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from siamese_jax.data.loader import evaluation_batches, num_evaluation_windows
from siamese_jax.data.store import TokenStore
from siamese_jax.models.families import parameter_shapes
from siamese_jax.models.language import LanguageModel, document_options
from siamese_jax.parallel.mesh import batch_parts, batch_sharding, replicated
from siamese_jax.parallel.rules import parameter_shardings

Batch = dict[str, np.ndarray]


class Pieces(NamedTuple):
    """The counted targets of a batch, added up by document and window; each field [P]."""

    window: np.ndarray
    document: np.ndarray
    nats: np.ndarray
    tokens: np.ndarray


@dataclasses.dataclass
class Sums:
    """What is added up for each of several groups of documents; float64 and int64 on the host."""

    nats: np.ndarray
    tokens: np.ndarray
    text_bytes: np.ndarray
    instance_means: np.ndarray
    instances: np.ndarray

    @classmethod
    def zeros(cls, num_groups: int) -> "Sums":
        """Nothing yet."""
        kinds = (np.float64, np.int64, np.float64, np.float64, np.int64)
        return cls(*(np.zeros(num_groups, kind) for kind in kinds))

    def add(self, group_P: np.ndarray, pieces: Pieces, text_bytes_P: np.ndarray) -> None:
        """Adds pieces to their groups. The targets of one group in one window are one instance.

        All windows of a batch must come in one call, and each window in only one.
        """
        np.add.at(self.nats, group_P, pieces.nats)
        np.add.at(self.tokens, group_P, pieces.tokens)
        np.add.at(self.text_bytes, group_P, text_bytes_P)
        num_groups = len(self.nats)
        instances, of_piece = np.unique(pieces.window * num_groups + group_P, return_inverse=True)
        means = np.bincount(of_piece, pieces.nats) / np.bincount(of_piece, pieces.tokens)
        np.add.at(self.instance_means, instances % num_groups, means)
        np.add.at(self.instances, instances % num_groups, 1)

    def plus(self, other: "Sums") -> "Sums":
        """Both added up, group by group."""
        fields = (field.name for field in dataclasses.fields(self))
        return Sums(*(getattr(self, name) + getattr(other, name) for name in fields))

    def report(self, group: int) -> dict[str, float]:
        """The figures of a group: loss in nats a token; both perplexities; bits per byte of text."""
        nats, tokens = float(self.nats[group]), int(self.tokens[group])
        text_bytes, instances = float(self.text_bytes[group]), int(self.instances[group])
        return {
            "loss": nats / tokens,
            "perplexity": _exp(nats / tokens),
            "perplexity_by_instance": _exp(float(self.instance_means[group]) / instances),
            "bits_per_byte": nats / math.log(2) / text_bytes if text_bytes else math.nan,
            "tokens": tokens,
            "bytes": round(text_bytes),
            "instances": instances,
        }


def _exp(value: float) -> float:
    return math.inf if value > 700 else math.exp(value)  # and NaN stays NaN


def make_scorer(model: LanguageModel, mesh: Mesh) -> Callable:
    """Compiled (params, batch) -> cross-entropy of every target [B, L] in nats, whole on every device."""

    def score(params, batch):
        tokens = batch["inputs"], batch["targets"]
        return model.apply({"params": params}, *tokens, method="losses", **document_options(batch))[0]

    shardings = parameter_shardings(parameter_shapes(model.config), mesh), batch_sharding(mesh)
    scorer = jax.jit(score, in_shardings=shardings, out_shardings=replicated(mesh))

    def score_on_mesh(params, batch):
        with jax.set_mesh(mesh):
            return scorer(params, batch)

    return score_on_mesh


class Evaluator:
    """Evaluates parameters on one store again and again with one compiled program.

    Args:
        length: tokens of a window; each window is one instance of the reference's protocol.
        batch_size: windows at a time, rounded up to the parts that the mesh splits a batch into.
        max_windows: only the first so many (0 = all).
    """

    def __init__(
        self,
        model: LanguageModel,
        store: TokenStore,
        mesh: Mesh,
        *,
        length: int,
        batch_size: int,
        cross_documents: bool = True,
        max_windows: int = 0,
        score: Callable | None = None,
    ):
        self.store, self.mesh, self.length = store, mesh, length
        self.batch_size = -(-batch_size // batch_parts(mesh)) * batch_parts(mesh)
        self.cross_documents = cross_documents
        self.num_windows = num_evaluation_windows(store, length)
        if max_windows:
            self.num_windows = min(max_windows, self.num_windows)
        self.score = score or make_scorer(model, mesh)
        self._first_documents = np.array([first for first, _ in store.sources.values()], np.int64)

    def batches(self, num_windows: int) -> Iterator[Batch]:
        """The batches of a pass; windows beyond `num_windows` weigh nothing."""
        batches = evaluation_batches(self.store, self.length, self.batch_size, self.cross_documents)
        for batch in itertools.islice(batches, -(-num_windows // self.batch_size)):
            batch["weights"] = batch["weights"] * (batch["window"] < num_windows)[:, None]
            yield batch

    def __call__(self, params, progress: Callable[[int], None] | None = None, num_windows: int = 0) -> dict:
        """{'total': figures, 'sources': {name: figures}}; progress(windows done) is called batch by batch.

        num_windows: only the first so many; 0 = as the evaluator was made.
        """
        by_source, whole = self.sums(params, progress, num_windows)
        names = list(self.store.sources)
        seen = np.flatnonzero(by_source.tokens).tolist()
        return {"total": whole.report(0), "sources": {names[i]: by_source.report(i) for i in seen}}

    def sums(
        self, params, progress: Callable[[int], None] | None = None, num_windows: int = 0
    ) -> tuple[Sums, Sums]:
        """(sums of each source, of all of them), the arguments as for a call."""
        num_windows = num_windows or self.num_windows
        names = list(self.store.sources)
        by_source, whole = Sums.zeros(len(names)), Sums.zeros(1)
        for number, (batch, nats_BL) in enumerate(self._scored(params, num_windows), start=1):
            pieces = _pieces(nats_BL, batch)
            text_bytes_P = _text_bytes(self.store, pieces)
            # The documents of a source stand in one block, and the blocks in the order of the sources.
            source_P = np.searchsorted(self._first_documents, pieces.document, side="right") - 1
            by_source.add(source_P, pieces, text_bytes_P)
            whole.add(np.zeros_like(source_P), pieces, text_bytes_P)
            if progress:
                progress(min(number * self.batch_size, num_windows))
        return by_source, whole

    def _scored(self, params, num_windows: int) -> Iterator[tuple[Batch, np.ndarray]]:
        """(batch, nats [B, L]), fetched when the device works on the next batch already."""
        pending = None
        for batch in self.batches(num_windows):
            scored = batch, self.score(params, self._put(batch))
            if pending:
                yield pending[0], np.asarray(pending[1])
            pending = scored
        yield pending[0], np.asarray(pending[1])

    def _put(self, batch: Batch) -> dict[str, jax.Array]:
        """What the model reads of a batch; every process has it whole and gives its devices their rows."""
        sharding = batch_sharding(self.mesh)
        return {
            name: jax.make_array_from_callback(rows.shape, sharding, rows.__getitem__)
            for name, rows in batch.items()
            if name not in ("window", "document", "weights")
        }


class DomainsEvaluator:
    """Evaluates parameters on several named stores, each by itself, with one compiled program.

    stores: {name: store}; options as of `Evaluator`, max_windows counted for each store.
    """

    def __init__(self, model: LanguageModel, stores: Mapping[str, TokenStore], mesh: Mesh, **options):
        score = make_scorer(model, mesh)
        self.evaluators = {
            name: Evaluator(model, store, mesh, score=score, **options) for name, store in stores.items()
        }

    def num_windows(self, whole: bool = False) -> int:
        """Windows of a pass; whole: over all that there is, whatever max_windows."""
        return sum(
            num_evaluation_windows(one.store, one.length) if whole else one.num_windows
            for one in self.evaluators.values()
        )

    def __call__(self, params, progress: Callable[[int], None] | None = None, whole: bool = False) -> dict:
        """{'total': figures of all tokens, 'mean': of the domains, 'domains': {name: figures}}.

        The mean of perplexities is that of the domains' perplexities, as papers average them. progress is told the
        windows done, batch by batch.
        """
        total, domains, before = Sums.zeros(1), {}, 0
        for name, one in self.evaluators.items():
            windows = num_evaluation_windows(one.store, one.length) if whole else one.num_windows
            reached = functools.partial(_from, progress, before) if progress else None
            _, own = one.sums(params, reached, windows)
            domains[name], total, before = own.report(0), total.plus(own), before + windows
        mean = {name: float(np.mean([figures[name] for figures in domains.values()])) for name in MEANS}
        return {"total": total.report(0), "mean": mean, "domains": domains}


MEANS = ("loss", "bits_per_byte", "perplexity", "perplexity_by_instance")


def _from(progress: Callable[[int], None], before: int, done: int) -> None:
    progress(before + done)


def _pieces(nats_BL: np.ndarray, batch: Batch) -> Pieces:
    rows, columns = np.nonzero(batch["weights"])
    documents = batch["document"][rows, columns].astype(np.int64)
    opens = (np.diff(rows, prepend=-1) != 0) | (np.diff(documents, prepend=-1) != 0)
    starts = np.flatnonzero(opens)
    nats = nats_BL[rows, columns].astype(np.float64)
    return Pieces(
        window=batch["window"][rows[starts]],
        document=documents[starts],
        nats=np.add.reduceat(nats, starts),
        tokens=np.diff(starts, append=len(rows)),
    )


def _text_bytes(store: TokenStore, pieces: Pieces) -> np.ndarray:
    """Bytes of text of each piece [P]: those of a document are spread evenly over its tokens."""
    document = pieces.document
    lengths = store.document_starts[document + 1] - store.document_starts[document]
    return pieces.tokens * (store.document_bytes[document] / lengths)


def format_table(result: dict) -> str:
    """The figures as a table, the total last; of several domains the mean before it."""
    kind = "domain" if "domains" in result else "source"
    head = (kind, "tokens", "bits/byte", "loss", "perplexity", "by instance")
    rows = [*result[f"{kind}s"].items(), ("total", result["total"])]
    if "mean" in result:
        rows.insert(-1, ("mean", result["mean"]))
    width = max(len(name) for name, _ in [(head[0], None), *rows])
    lines = ["  ".join([head[0].ljust(width), f"{head[1]:>15}", *(f"{name:>11}" for name in head[2:])])]
    for name, r in rows:
        tokens = f"{r['tokens']:,}" if "tokens" in r else ""
        cells = (f"{tokens:>15}", f"{r['bits_per_byte']:>11.4f}", f"{r['loss']:>11.4f}",
                 f"{r['perplexity']:>11.4g}", f"{r['perplexity_by_instance']:>11.4g}")  # fmt: skip
        lines.append("  ".join([name.ljust(width), *cells]))
    return "\n".join(lines)
