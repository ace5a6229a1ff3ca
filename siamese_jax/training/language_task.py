"""Training language models: windows of a token store, next-token cross-entropy.

Legend: B windows, L length.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from siamese_jax.checkpoint import first_process_first
from siamese_jax.data.loader import WindowLoader, check_vocabulary
from siamese_jax.data.mixture import MixtureLoader, parse_weights
from siamese_jax.data.naming import parse_domains
from siamese_jax.data.prepared import open_domains, open_sources
from siamese_jax.data.store import TokenStore
from siamese_jax.data.tokenizer import make_tokenizer
from siamese_jax.models.families import parameter_shapes
from siamese_jax.models.initialize import count_kernels
from siamese_jax.models.language import LanguageConfig, LanguageModel, document_options
from siamese_jax.models.loss import weighted_sums
from siamese_jax.training.metrics import flops_per_token, format_count
from siamese_jax.training.task import Data, Loss, Task


class LanguageTask(Task):
    """The language model."""

    unit = "token"

    def units_per_example(self, config):
        return config.data.length

    def positions(self, config, model):
        return config.data.length

    def batch_shapes(self, config, model):
        shape = config.training.batch_size, config.data.length
        kinds = {"inputs": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
        if not config.data.cross_documents:
            kinds |= {"segments": jnp.int32, "positions": jnp.int32}
        return {name: (shape, kind) for name, kind in kinds.items()}

    def make_loss(self, model, config):
        return language_loss(model, config.training.z_loss)

    def watch(self, config, model, params, batch, look):
        options = document_options(batch)
        return model.apply({"params": params}, batch["inputs"], watch=look, method="hidden", **options)[1]

    def flops_per_unit(self, config, model):
        return token_flops(model, config.data.length)

    def open_data(self, config, model, rows):
        tokenizer, train, validation = open_stores(config)
        options = {"seed": config.seed, "cross_documents": config.data.cross_documents, "rows": rows}
        shape = config.data.length, config.training.batch_size
        if config.data.weights:
            loader = MixtureLoader(train, parse_weights(config.data.weights, list(train)), *shape, **options)
        else:
            loader = WindowLoader(train[""], *shape, **options)
        return Data(loader, train, validation, loader.fingerprint, tokenizer)

    def describe(self, config, data):
        tokens = config.training.batch_size * config.data.length
        total = tokens * config.training.steps
        train, validation = (
            sum(store.num_tokens for store in stores.values()) for stores in (data.train, data.validation)
        )
        line = (
            f"data: {train:,} training and {validation:,} validation tokens; an update takes {tokens:,}, the run "
            f"{format_count(total)} ({total / train:.2f} epochs)"
        )
        for name, taken in data.loader.tokens_by_source(config.training.steps).items():
            there = data.train[name].num_tokens
            line += (
                f"\n  {name}: {taken / total:.2%} of the run, {format_count(taken)} tokens of "
                f"{format_count(there)} ({taken / there:.2f} epochs)"
            )
        return line

    def random_batch(self, config, model):
        """Random tokens; where documents are kept apart, each window is one document."""
        shape = config.training.batch_size, config.data.length
        tokens = np.random.default_rng(config.seed).integers(model.vocab_size, size=(2, *shape))
        inputs, targets = tokens.astype(np.int32)
        batch = {"inputs": inputs, "targets": targets, "weights": np.ones(shape, np.float32)}
        if config.data.cross_documents:
            return batch
        positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
        return batch | {"segments": np.ones(shape, np.int32), "positions": positions}


def language_loss(model: LanguageModel, z_loss: float) -> Loss:
    """The mean cross-entropy of the next token; z_loss: weight of the squared log partition in the objective."""

    def loss(params, batch, total_weight):
        losses = model.apply(
            {"params": params}, batch["inputs"], batch["targets"], method="losses", **document_options(batch)
        )
        objective, cross_entropy, _ = weighted_sums(losses, batch["weights"], z_loss)
        return objective / total_weight, cross_entropy / total_weight

    return loss


def open_stores(config) -> tuple[Any, dict[str, TokenStore], dict[str, TokenStore]]:
    """(tokenizer, stores to train on by name, stores to validate on by name) of a configuration."""
    data = config.data
    tokenizer = make_tokenizer(data.tokenizer, data.end_of_text)
    domains = parse_domains(config.eval.domains, "eval.domains")

    def prepare() -> tuple[dict, dict]:
        train = open_sources(data, "train", tokenizer)
        return train, open_domains(domains, data, tokenizer) or open_sources(data, "validation", tokenizer)

    train, validation = first_process_first(prepare)
    for store in (*train.values(), *validation.values()):
        check_vocabulary(store, config.model.vocab_size)
    return tokenizer, train, validation


def count_matrix_parameters(model: LanguageConfig, shapes) -> int:
    """Parameters that multiply every token: all kernels, and the table where it is the head too."""
    return count_kernels(shapes) + (shapes["embedding"]["table"].size if model.tie_embedding else 0)


def token_flops(model: LanguageConfig, length: int) -> int:
    """FLOPs of forward and backward for one token (PaLM's convention, the causal half not taken off)."""
    matrices = count_matrix_parameters(model, parameter_shapes(model))
    return flops_per_token(matrices, model.num_layers, model.num_heads * model.key_dim, length)
