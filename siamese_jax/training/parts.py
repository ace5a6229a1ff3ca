"""What a run is made of, built and checked before anything is computed, and told to the reader."""

import dataclasses
from typing import Any

import jax
import ml_collections
import numpy as np

from siamese_jax.checkpoint import first_process_first
from siamese_jax.config import flat_items, resolved
from siamese_jax.data.loader import WindowLoader, check_vocabulary
from siamese_jax.data.store import TokenStore, prepare_store
from siamese_jax.data.tokenizer import make_tokenizer
from siamese_jax.errors import InputError
from siamese_jax.layers.attention import NEEDS, choose_implementation
from siamese_jax.layers.platform import target_platform
from siamese_jax.models.initialize import count_parameters
from siamese_jax.parallel.mesh import make_mesh, own_rows, put_batch
from siamese_jax.run_folder import check_run_folder
from siamese_jax.training.metrics import format_count
from siamese_jax.training.optimizer import describe_groups
from siamese_jax.training.plan import Plan, count_matrix_parameters, make_plan


@dataclasses.dataclass
class Parts(Plan):
    """A plan with its data. rows: those of every batch that the devices of this process hold."""

    tokenizer: Any
    train_store: TokenStore
    validation_store: TokenStore
    loader: WindowLoader

    def put(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """What the loader read as global arrays."""
        return put_batch(batch, self.mesh, self.loader.rows, self.config.training.batch_size)


def open_stores(config, split_names=("train", "validation")) -> tuple[Any, list[TokenStore]]:
    """(tokenizer, stores of the splits) of a configuration's data."""
    data = config.data
    tokenizer = make_tokenizer(data.tokenizer, data.end_of_text)

    def prepare() -> list[TokenStore]:
        return [
            prepare_store(
                data.source, split, tokenizer=tokenizer, field=data.field, cache_dir=data.cache_dir,
                validation_source=data.validation_source, validation_fraction=data.validation_fraction,
            )
            for split in split_names
        ]  # fmt: skip

    stores = first_process_first(prepare)
    for store in stores:
        check_vocabulary(store, config.model.vocab_size)
    return tokenizer, stores


def plan_here(config: ml_collections.ConfigDict) -> Plan:
    """The plan on the devices that are here; InputError for what cannot work."""
    plan = make_plan(config, make_mesh(config.mesh))
    kernel, platform = plan.model_config.attention, target_platform()
    if NEEDS.get(kernel, platform) != platform:
        raise InputError(
            f"model.attention is {kernel}, which needs a {NEEDS[kernel]}, not {platform}: set it to auto"
        )
    return plan


def build(config: ml_collections.ConfigDict, workdir: str) -> Parts:
    """Everything that can be wrong with the input is found here, in seconds: InputError. Writes nothing."""
    plan = plan_here(config)
    check_run_folder(workdir, config)
    tokenizer, (train_store, validation_store) = open_stores(config)
    loader = WindowLoader(
        train_store, config.data.length, config.training.batch_size, seed=config.seed,
        cross_documents=config.data.cross_documents, rows=own_rows(plan.mesh, config.training.batch_size),
    )  # fmt: skip
    return Parts(
        **vars(plan), tokenizer=tokenizer, train_store=train_store, validation_store=validation_store, loader=loader
    )


def describe(parts: Parts) -> str:
    """What is about to run, for the reader."""
    config, model, shapes = parts.config, parts.model_config, parts.state_shapes.params
    lines = ["configuration"]
    for group, values in resolved(config).items():
        text = " ".join(f"{k}={v}" for k, v in flat_items(values).items()) if isinstance(values, dict) else values
        lines.append(f"  {group}: {text}")
    tokens = config.training.batch_size * config.data.length
    total = tokens * config.training.steps
    attention = choose_implementation(
        model.attention, target_platform(), model.dtype, config.data.length, model.key_dim,
        not config.data.cross_documents,
    )  # fmt: skip
    mesh = " x ".join(f"{axis} {size}" for axis, size in parts.mesh.shape.items() if size > 1)
    lines += [
        describe_groups(config.optimizer, shapes),
        f"model: {count_parameters(shapes):,} parameters, {model.residual}, "
        f"{count_matrix_parameters(model, shapes):,} multiply each token",
        f"data: {parts.train_store.num_tokens:,} training and {parts.validation_store.num_tokens:,} "
        f"validation tokens; an update takes {tokens:,}, the run {format_count(total)} "
        f"({total / parts.train_store.num_tokens:.2f} epochs)",
        f"devices: {parts.mesh.size} x {jax.devices()[0].device_kind}{f' ({mesh})' if mesh else ''}, "
        f"compute {model.dtype}, attention {attention}",
    ]
    return "\n".join(lines)
