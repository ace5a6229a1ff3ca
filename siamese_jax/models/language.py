"""The decoder-only language model: embedding, stack, head, under any residual scheme.

Legend: B batch, L length, D width, V padded vocabulary.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from siamese_jax.errors import InputError
from siamese_jax.layers.embedding import Embedding, Head
from siamese_jax.layers.rotary import rotary_tables
from siamese_jax.models.loss import logits_of, token_losses
from siamese_jax.models.stack import Context
from siamese_jax.models.transformer import (
    TransformerConfig,
    TransformerModel,
    check_one_of,
    check_positive,
    check_transformer,
)

INITIALIZERS = ("mitchell", "normal", "full_megatron")


@dataclasses.dataclass(frozen=True)
class LanguageConfig(TransformerConfig):
    """Every option of the language model, with its default; `model.*` of a configuration file."""

    rope_theta: float = 10_000.0
    vocab_size: int = 257
    vocab_multiple: int = 64
    tie_embedding: bool = False
    init: str = "mitchell"
    init_std: float = 0.02
    loss_slice: int = 128  # positions whose logits exist at once; 0 = all

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding table."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def depth_scaled(self) -> tuple[str, ...]:
        """Path endings whose standard deviation is divided by sqrt(i + 1) in layer i."""
        return ("attention/out/kernel", "mlp/down/kernel") if self.init == "mitchell" else ()

    def initial_stds(self) -> dict[str, float]:
        """Path ending -> standard deviation of the initial parameters, as OLMo v1 names its initialisers."""
        width = self.width**-0.5
        if self.init == "mitchell":
            return {
                "embedding/table": width, "head/kernel": width, "attention/qkv/kernel": width,
                "attention/out/kernel": width / math.sqrt(2), "mlp/up/kernel": width,
                "mlp/down/kernel": (2 * self.mlp_hidden) ** -0.5,
            }  # fmt: skip
        std = self.init_std
        out = std / math.sqrt(2 * self.num_layers) if self.init == "full_megatron" else std
        head = width if self.init == "full_megatron" else std
        return {
            "embedding/table": std, "head/kernel": head, "attention/qkv/kernel": std,
            "attention/out/kernel": out, "mlp/up/kernel": std, "mlp/down/kernel": out,
        }  # fmt: skip


def check_language(config: LanguageConfig) -> None:
    """InputError with one line for the first thing that cannot work."""
    check_transformer(config)
    check_positive(config, "vocab_size", "vocab_multiple")
    if config.loss_slice < 0:
        raise InputError(f"model.loss_slice is {config.loss_slice}: it must not be negative")
    if config.key_dim % 2:
        raise InputError(f"the head dim is {config.key_dim}: rotary positions need an even one")
    for field in ("init_std", "rope_theta"):
        if not getattr(config, field) > 0:
            raise InputError(f"model.{field} is {getattr(config, field)}: it must be above 0")
    check_one_of(config, "init", INITIALIZERS)


class LanguageModel(TransformerModel):
    """tokens [B, L] -> logits [B, L, V]; `losses` never builds them whole."""

    config: LanguageConfig

    def setup(self):
        config = self.config
        self.embedding = Embedding(config.padded_vocab, config.width, config.stream_type)
        if not config.tie_embedding:
            self.head = Head(config.padded_vocab, config.width)
        self.make_stack(config.stack(causal=True))

    def hidden(self, tokens_BL, *, positions_BL=None, segments_BL=None, rotary=None, starts_B=None, watch=None):
        """(normed output [B, L, D] in the compute type, what `watch` saw of the streams leaving each layer).

        positions: 0, 1, ... unless given (they restart in packed documents); segments: document numbers,
        across which nothing attends; rotary: (sin, cos) tables to use in place of computed ones;
        starts: position of each row's first token, where a cache holds those before it (see Attention);
        watch: {stream name: [B, L, D]} -> arrays, stacked over layers in the result.
        """
        if rotary is None:
            positions = jnp.arange(tokens_BL.shape[1]) if positions_BL is None else positions_BL
            if starts_B is not None:
                positions = starts_B[:, None] + positions
            rotary = rotary_tables(positions, self.config.key_dim, self.config.rope_theta)
        return self.through_layers(self.embedding(tokens_BL), Context((rotary, segments_BL, starts_B)), watch)

    def kernel_DV(self) -> jax.Array:
        """The output kernel: the head's own, or the transposed embedding table."""
        return self.embedding.table.T if self.config.tie_embedding else self.head()

    def losses(self, tokens_BL, targets_BL, **options):
        """(cross-entropy [B, L], log partition [B, L]) in nats; options as for `hidden`."""
        hidden_BLD, _ = self.hidden(tokens_BL, **options)
        return token_losses(
            hidden_BLD, self.kernel_DV(), targets_BL,
            vocab_size=self.config.vocab_size, slice_length=self.config.loss_slice,
        )  # fmt: skip

    def next_logits(self, tokens_BL, last_B, **options):
        """Logits [B, V] of the token after number last[b] of row b; options as for `hidden`."""
        hidden_BLD, _ = self.hidden(tokens_BL, **options)
        read_B1D = jnp.take_along_axis(hidden_BLD, last_B[:, None, None], axis=1)
        return logits_of(read_B1D, self.kernel_DV(), self.config.vocab_size)[:, 0]

    def __call__(self, tokens_BL, **options):
        hidden_BLD, _ = self.hidden(tokens_BL, **options)
        return logits_of(hidden_BLD, self.kernel_DV(), self.config.vocab_size)


def document_options(batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """What the model takes beside tokens when the documents of a batch's windows do not see each other."""
    return {f"{name}_BL": batch[name] for name in ("positions", "segments") if name in batch}
