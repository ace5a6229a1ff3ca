"""The decoder-only language model: embedding, stack, head, under any residual scheme.

Legend: B batch, L length, D width, V padded vocabulary.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from siamese_jax.errors import InputError
from siamese_jax.layers.attention import IMPLEMENTATIONS, NORM_PLACES, Attention
from siamese_jax.layers.embedding import Embedding, Head
from siamese_jax.layers.mlp import ACTIVATIONS, MLP
from siamese_jax.layers.norms import norm_factory
from siamese_jax.layers.rotary import rotary_tables
from siamese_jax.models.loss import logits_of, token_losses
from siamese_jax.models.stack import Stack, check_remat
from siamese_jax.residual.scheme import Segments, make_segments

DTYPES = ("float32", "bfloat16", "float64")
INITIALIZERS = ("mitchell", "normal", "full_megatron")


@dataclasses.dataclass(frozen=True)
class LanguageConfig:
    """Every option of the language model, with its default; `model.*` of a configuration file."""

    residual: str = "siamese_hybrid"
    residual_options: tuple[tuple[str, Any], ...] = ()
    residual_overrides: str = ""  # of single layers: "{0: {'attn_norm': True}, (2, 3): {...}}"
    num_layers: int = 4
    width: int = 256
    num_heads: int = 4
    num_kv_heads: int = 0  # 0 = num_heads
    head_dim: int = 0  # 0 = width / num_heads
    mlp_hidden: int = 1024
    activation: str = "swiglu"
    norm: str = "rms"
    norm_epsilon: float = 1e-5
    query_norm: str = "head"
    key_norm: str = "head"
    value_norm: str = "none"
    context_norm: str = "none"
    use_bias: bool = False
    rope_theta: float = 10_000.0
    vocab_size: int = 257
    vocab_multiple: int = 64
    tie_embedding: bool = False
    init: str = "mitchell"
    init_std: float = 0.02
    scan: bool = True
    remat: str = "none"
    offload_streams: bool = False  # to the host, until the backward pass computes their layer again
    attention: str = "auto"  # plain, cudnn (GPU), splash (TPU), or auto: the best that fits
    dtype: str = "float32"
    stream_dtype: str = "compute"  # 'compute' or a type: the type of the residual streams
    loss_slice: int = 128  # positions whose logits exist at once; 0 = all

    @property
    def kv_heads(self) -> int:
        """Key/value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def key_dim(self) -> int:
        """Width of one head."""
        return self.head_dim or self.width // self.num_heads

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding table."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def segments(self) -> Segments:
        """The stack's residual schemes with their numbers of layers."""
        norm = norm_factory(self.norm, self.norm_epsilon)
        return make_segments(
            self.residual, self.num_layers, norm, dict(self.residual_options), self.residual_overrides
        )


def _one_of(config: LanguageConfig, field: str, choices) -> None:
    value = getattr(config, field)
    if value not in choices:
        raise InputError(f"model.{field} is {value!r}: it must be one of {', '.join(choices)}")


def check_model(config: LanguageConfig) -> None:
    """InputError with one line for the first thing that cannot work."""
    for field in ("num_layers", "width", "num_heads", "mlp_hidden", "vocab_size", "vocab_multiple"):
        if getattr(config, field) < 1:
            raise InputError(f"model.{field} is {getattr(config, field)}: it must be at least 1")
    for field in ("num_kv_heads", "head_dim", "loss_slice"):
        if getattr(config, field) < 0:
            raise InputError(f"model.{field} is {getattr(config, field)}: it must not be negative")
    if not config.head_dim and config.width % config.num_heads:
        raise InputError(
            f"model.num_heads {config.num_heads} does not divide model.width {config.width}: "
            "change one of them or set model.head_dim"
        )
    if config.num_heads % config.kv_heads:
        raise InputError(f"model.num_kv_heads {config.kv_heads} does not divide model.num_heads {config.num_heads}")
    if config.key_dim % 2:
        raise InputError(f"the head dim is {config.key_dim}: rotary positions need an even one")
    for field in ("query_norm", "key_norm", "value_norm", "context_norm"):
        _one_of(config, field, NORM_PLACES)
    _one_of(config, "activation", ACTIVATIONS)
    _one_of(config, "attention", IMPLEMENTATIONS)
    _one_of(config, "init", INITIALIZERS)
    _one_of(config, "dtype", DTYPES)
    _one_of(config, "stream_dtype", ("compute", *DTYPES))
    check_remat(config.remat, config.offload_streams)
    config.segments()


class LanguageModel(nn.Module):
    """tokens [B, L] -> logits [B, L, V]; `losses` never builds them whole."""

    config: LanguageConfig

    def setup(self):
        config = self.config
        norm = norm_factory(config.norm, config.norm_epsilon)
        self.embedding = Embedding(config.padded_vocab, config.width, self._stream_type())
        if not config.tie_embedding:
            self.head = Head(config.padded_vocab, config.width)
        attention = functools.partial(
            Attention,
            config.num_heads, config.kv_heads, config.key_dim,
            query_norm=config.query_norm, key_norm=config.key_norm,
            value_norm=config.value_norm, context_norm=config.context_norm,
            norm=norm, use_bias=config.use_bias, dtype=config.dtype, implementation=config.attention,
        )  # fmt: skip
        mlp = functools.partial(MLP, config.mlp_hidden, config.activation, config.use_bias, config.dtype)
        segments = config.segments()
        self.residual = segments[-1][0]()
        self.residual_open = self.residual if len(segments) == 1 else segments[0][0]()
        self.stack = Stack(
            segments, attention, mlp,
            scan=config.scan, remat=config.remat, offload_streams=config.offload_streams,
        )  # fmt: skip
        nn.share_scope(self, self.stack)  # parameters stand under `layers`, not `stack/layers`

    def _stream_type(self) -> str:
        config = self.config
        return config.dtype if config.stream_dtype == "compute" else config.stream_dtype

    def hidden(self, tokens_BL, *, positions_BL=None, segments_BL=None, rotary=None, watch=None):
        """(normed output [B, L, D] in the compute type, what `watch` saw of the streams leaving each layer).

        positions: 0, 1, ... unless given (they restart in packed documents); segments: document numbers,
        across which nothing attends; rotary: (sin, cos) tables to use in place of computed ones;
        watch: {stream name: [B, L, D]} -> arrays, stacked over layers in the result.
        """
        if rotary is None:
            positions = jnp.arange(tokens_BL.shape[1]) if positions_BL is None else positions_BL
            rotary = rotary_tables(positions, self.config.key_dim, self.config.rope_theta)
        streams = self.residual_open.open(self.embedding(tokens_BL))
        streams, watched = self.stack(streams, rotary, segments_BL, watch=watch)
        return self.residual.close(streams).astype(self.config.dtype), watched

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

    def __call__(self, tokens_BL, **options):
        hidden_BLD, _ = self.hidden(tokens_BL, **options)
        return logits_of(hidden_BLD, self.kernel_DV(), self.config.vocab_size)


def document_options(batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """What the model takes beside tokens when the documents of a batch's windows do not see each other."""
    return {f"{name}_BL": batch[name] for name in ("positions", "segments") if name in batch}
