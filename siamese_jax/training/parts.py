"""What a run is made of, built and checked before anything is computed, and told to the reader."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import ml_collections

from siamese_jax.config import check_config, flat_items, language_config, resolved
from siamese_jax.data.loader import WindowLoader, check_vocabulary
from siamese_jax.data.store import TokenStore, prepare_store
from siamese_jax.data.tokenizer import make_tokenizer
from siamese_jax.errors import InputError
from siamese_jax.layers.attention import choose_implementation
from siamese_jax.layers.platform import target_platform
from siamese_jax.models.initialize import count_parameters, parameter_shapes
from siamese_jax.models.language import LanguageConfig, LanguageModel
from siamese_jax.parallel.mesh import batch_sharding, make_mesh, replicated
from siamese_jax.run_folder import check_run_folder
from siamese_jax.training.metrics import flops_per_token, format_count
from siamese_jax.training.optimizer import describe_groups, make_optimizer
from siamese_jax.training.schedule import make_schedule
from siamese_jax.training.step import make_train_step


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
    if model_config.attention == "cudnn" and target_platform() != "gpu":
        raise InputError(f"model.attention is cudnn, which needs a GPU, not {target_platform()}: set it to auto")
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


def compile_step(parts: Parts, state, batch) -> Any:
    """The compiled update: (state, batch) -> (state, metrics); the state is donated."""
    config, whole = parts.config, replicated(parts.mesh)
    step = make_train_step(
        parts.model, parts.optimizer, parts.schedule, num_parts=config.training.accumulation,
        z_loss=config.training.z_loss, ema=config.optimizer.ema,
    )  # fmt: skip
    shardings = {"in_shardings": (whole, batch_sharding(parts.mesh)), "out_shardings": (whole, whole)}
    return jax.jit(step, donate_argnums=0, **shardings).lower(state, batch).compile()


def describe(parts: Parts) -> str:
    """What is about to run, for the reader."""
    config, model, shapes = parts.config, parts.model_config, parameter_shapes(parts.model_config)
    lines = ["configuration"]
    for group, values in resolved(config).items():
        text = " ".join(f"{k}={v}" for k, v in flat_items(values).items()) if isinstance(values, dict) else values
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
