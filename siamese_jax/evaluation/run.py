"""A trained run, opened for evaluation: its configuration, model and parameters, on the devices here.

The mesh and the attention kernel of the training run do not matter: a checkpoint opens on any machine.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_collections
from jax.sharding import Mesh
from tqdm import tqdm

from siamese_jax.checkpoint import Checkpoints, available_steps, first_process_first
from siamese_jax.config import model_config
from siamese_jax.data.loader import check_vocabulary
from siamese_jax.data.naming import parse_domains
from siamese_jax.data.prepared import open_domains, open_sources, own_part, prepare_store
from siamese_jax.data.store import TokenStore
from siamese_jax.data.tokenizer import make_tokenizer
from siamese_jax.errors import InputError
from siamese_jax.evaluation.perplexity import DomainsEvaluator, Evaluator
from siamese_jax.layers.attention import NEEDS
from siamese_jax.layers.platform import target_platform
from siamese_jax.models.families import make_model, parameter_shapes
from siamese_jax.models.transformer import TransformerModel
from siamese_jax.parallel.mesh import make_mesh
from siamese_jax.parallel.rules import parameter_shardings, widest_fsdp, with_shardings
from siamese_jax.run_folder import CHECKPOINTS, read_config


@dataclasses.dataclass
class OpenRun:
    """A run without its parameters: what can be checked in a moment."""

    workdir: str
    config: ml_collections.ConfigDict
    model: TransformerModel
    tokenizer: Any  # None where there is no text
    mesh: Mesh

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return Path(self.workdir) / CHECKPOINTS


@dataclasses.dataclass
class Weights:
    """Parameters of one checkpoint. averaged: whether they are the running average of the run.

    class_names: of the images that it was trained on; none of text, and where that is not known.
    """

    params: Any
    step: int
    path: str
    averaged: bool
    class_names: tuple[str, ...] = ()


def open_run(workdir: str, step: int | None = None) -> OpenRun:
    """Reads a run folder; InputError where it is none, or has no checkpoint (of that step)."""
    config = read_config(workdir)
    own = model_config(config)
    if NEEDS.get(own.attention, target_platform()) != target_platform():
        own = dataclasses.replace(own, attention="auto")  # a kernel of the training's machine
    folder = Path(workdir) / CHECKPOINTS
    steps = available_steps(folder)
    if not steps:
        raise InputError(f"there is no checkpoint in {folder}: train first, or correct --workdir")
    if step is not None and step not in steps:
        listed = ", ".join(map(str, steps))
        raise InputError(f"there is no checkpoint {step} in {folder}; there are: {listed}")
    is_text = config.family == "language"
    tokenizer = make_tokenizer(config.data.tokenizer, config.data.end_of_text) if is_text else None
    fsdp = widest_fsdp(parameter_shapes(own), jax.device_count())
    mesh = make_mesh({"data": -1, "fsdp": fsdp, "tensor": 1})
    return OpenRun(str(workdir), config, make_model(own), tokenizer, mesh)


def restore_weights(
    run: OpenRun, step: int | None = None, say: Callable[[str], None] = print, average: bool = True
) -> Weights:
    """The parameters of a checkpoint, None = the newest sound one; the running average where the run has it, unless
    `average` is False.

    InputError where there is none, `step` is broken, none is sound, or the run was trained on other tokens
    than the tokenizer makes now. A broken checkpoint that is passed over is named through `say`.
    """
    shapes = parameter_shapes(run.model.config)
    shapes = with_shardings(shapes, parameter_shardings(shapes, run.mesh))
    averaged = average and run.config.optimizer.ema > 0
    target = {"ema": {"params": shapes}} if averaged else {"params": shapes}
    with Checkpoints(run.checkpoints, log=say) as checkpoints:
        found = checkpoints.restore(target, step, partial=True)
    if found is None:
        raise InputError(f"there is no checkpoint in {run.checkpoints}: train first, or correct --workdir")
    found_step, state, about = found
    trained = about["data"]["tokenizer"]
    if run.tokenizer is not None and trained != run.tokenizer.fingerprint:
        raise InputError(
            f"the tokenizer changed: {run.workdir} was trained with {trained}, "
            f"{run.config.data.tokenizer} is {run.tokenizer.fingerprint} now: restore the file"
        )
    names = tuple(about["data"].get("class_names", ()))
    params = state["ema"]["params"] if averaged else state["params"]
    return Weights(params, found_step, str(run.checkpoints / str(found_step)), averaged, names)


def open_store(
    run: OpenRun, split: str, source: str | None = None, cache_dir: str | None = None, field: str | None = None
) -> TokenStore:
    """The token store of a split of the run's own data, or of another source, in the run's tokens."""
    data = run.config.data
    prepare = functools.partial(
        prepare_store,
        data.source if source is None else source, split, tokenizer=run.tokenizer, field=field or data.field,
        cache_dir=data.cache_dir if cache_dir is None else cache_dir,
        validation_source=data.validation_source if source is None else "",
        validation_fraction=data.validation_fraction, data_dir=data.data_dir,
    )  # fmt: skip
    return _checked(run, {"": first_process_first(prepare)})[""]


def open_stores(
    run: OpenRun, split: str, domains: str = "", cache_dir: str | None = None, field: str | None = None
) -> dict[str, TokenStore]:
    """{name: store} of validation sets NAME=SOURCE;NAME=SOURCE, or of a split of the run's own data without any."""
    data = run.config.data.copy_and_resolve_references()
    data.update({"cache_dir": data.cache_dir if cache_dir is None else cache_dir, "field": field or data.field})
    named = parse_domains(domains, "--domains")
    if not named and split == "validation":
        named = parse_domains(run.config.eval.domains, "eval.domains")
    if named:
        return _checked(run, first_process_first(lambda: open_domains(named, data, run.tokenizer)))
    return _checked(run, first_process_first(lambda: open_sources(data, split, run.tokenizer)))


def _own_source(config: ml_collections.ConfigDict, split: str) -> str:
    """What a split of a run's own data is read from."""
    for_validation = config.eval.domains or config.data.validation_source
    return for_validation if split == "validation" and for_validation else config.data.source


def _checked(run: OpenRun, stores: dict[str, TokenStore]) -> dict[str, TokenStore]:
    for store in stores.values():
        check_vocabulary(store, run.config.model.vocab_size)
    return stores


@contextlib.contextmanager
def progress_bar(total: int, unit: str):
    """A function (so many are done) that shows a bar after two seconds, in process 0."""
    others = jax.process_index() != 0
    with tqdm(total=total, unit=unit, delay=2, leave=False, dynamic_ncols=True, disable=others) as bar:
        yield lambda done: bar.update(done - bar.n)


def told(run: OpenRun, weights: Weights) -> dict[str, Any]:
    """What every result tells of the model."""
    return {
        "workdir": run.workdir,
        "family": run.config.family,
        "step": weights.step,
        "checkpoint": weights.path,
        "averaged": weights.averaged,
        "residual": run.config.model.residual,
    }


def evaluate_language(
    run: OpenRun,
    *,
    step: int | None = None,
    average: bool = True,
    split: str | None = None,
    sources: Sequence[str] = (),
    domains: str = "",
    batch_size: int | None = None,
    max_windows: int = 0,
    cache_dir: str | None = None,
    field: str | None = None,
    say: Callable[[str], None] = print,
) -> dict:
    """What eval.py finds of a language model, as JSON can hold it; 'total' and 'sources' hold the figures.

    Args:
        step: of the checkpoint; None = the newest sound one.
        average: whether the running average is taken where the run keeps one.
        split: None = 'validation' of the run's own data, 'all' of given sources.
        sources: files, folders, globs, lists of these by commas; none = the run's own data.
        domains: validation sets NAME=SOURCE;NAME=SOURCE, each evaluated by itself.
        batch_size, cache_dir, field: None = that of the run.
        max_windows: only the first so many (0 = all).
    """
    for name, value, least in (("batch_size", batch_size, 1), ("max_windows", max_windows, 0)):
        if value is not None and value < least:
            raise InputError(f"{name} is {value}: it must be at least {least}")
    if domains and (sources or split):
        raise InputError("domains name what is evaluated: leave --data.source and --split out")
    source = ",".join(sources) if sources else None
    split = split or (own_part(source) if sources else "validation")
    options = {
        "length": run.config.data.length, "cross_documents": run.config.data.cross_documents,
        "batch_size": run.config.eval.batch_size if batch_size is None else batch_size, "max_windows": max_windows,
    }  # fmt: skip
    if source is None:
        stores = open_stores(run, split, domains, cache_dir, field)
    else:
        stores = {"": open_store(run, split, source, cache_dir, field)}
    if len(stores) > 1 or domains:
        evaluator = DomainsEvaluator(run.model, stores, run.mesh, **options)
        num_windows = evaluator.num_windows()
    else:
        (store,) = stores.values()
        evaluator = Evaluator(run.model, store, run.mesh, **options)
        num_windows = evaluator.num_windows
    weights = restore_weights(run, step, say, average)
    with progress_bar(num_windows, "window") as progress:
        figures = evaluator(weights.params, progress)
    return {
        **told(run, weights),
        "source": source or domains or _own_source(run.config, split),
        "split": split,
        "length": run.config.data.length,
        "windows": num_windows,
        **figures,
    }
