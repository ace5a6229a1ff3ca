"""Schemes with two coupled residual streams: `post` is normalised at every step, `pre` never on its own path.

Both streams share every branch by construction: it is evaluated once. Legend: B batch, L length, D width.
"""

from typing import Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from siamese_jax.residual import functional
from siamese_jax.residual.functional import depth_scale, identity, merge
from siamese_jax.residual.scheme import Residual, register

DepthScale = Literal["layer2", "layer", "subblock", "none"]


class Streams(NamedTuple):
    """The two residual streams, each [B, L, D]: the paper's X and Y."""

    post: jax.Array
    pre: jax.Array


class TwoStream(Residual):
    """What every two-stream scheme shares: both streams start as the embedding."""

    stream_names = ("post", "pre")

    def open(self, h_BLD):
        return Streams(post=h_BLD, pre=h_BLD)


@register("resi_dual")
class ResiDual(TwoStream):
    """ResiDual (arXiv 2304.14802): X = LN(X + F(X)); Y = Y + F(X); out = X + LN(Y)."""

    def setup(self):
        self.attention_norm, self.mlp_norm, self.final_pre = self.norm(), self.norm(), self.norm()

    def layer(self, streams, attend, feed, depth):
        streams = functional.resi_dual(*streams, attend, self.attention_norm)
        return Streams(*functional.resi_dual(*streams, feed, self.mlp_norm))

    def close(self, streams):
        return merge(*streams, post_norm=identity, pre_norm=self.final_pre)


@register("siamese")
class Siamese(TwoStream):
    """SiameseNorm, post-pre (arXiv 2602.08064, Algorithm 1 with normalised input and depth scaling).

        X = LN_X(X);  O = F(LN_in(X + LN_Y(Y)));  X = X + s O;  Y = Y + O          for both sub-blocks
        out = LN_out(LN_X'(X) + LN_Y'(Y))

    `post_norm='read'` normalises X when it is read, as the reference code does (the embedding too, and once
    more for the head); 'write' is Algorithm 1 as printed: X = LN_X(X + s O), out = LN_out(X + LN_Y'(Y)).
    """

    depth_scale: DepthScale = "layer2"
    input_norm: bool = True
    final_norm: bool = True
    post_norm: Literal["read", "write"] = "read"

    model_options = ("final_norm", "post_norm")
    replaced_options = ("input_norm", "final_norm")

    def setup(self):
        self.attention_post, self.attention_pre, self.mlp_post, self.mlp_pre = (self.norm() for _ in range(4))
        self.attention_input = self.reading_norm(self.input_norm)
        self.mlp_input = self.reading_norm(self.input_norm)
        self.final_post = self.optional_norm(self.post_norm == "read")
        self.final_pre = self.norm()
        self.final = self.reading_norm(self.final_norm)

    def layer(self, streams, attend, feed, depth):
        step = functional.siamese if self.post_norm == "read" else functional.siamese_eager
        streams = step(
            *streams,
            attend,
            post_norm=self.attention_post,
            pre_norm=self.attention_pre,
            input_norm=self.attention_input,
            scale=depth_scale(self.depth_scale, depth, 0),
        )
        streams = step(
            *streams,
            feed,
            post_norm=self.mlp_post,
            pre_norm=self.mlp_pre,
            input_norm=self.mlp_input,
            scale=depth_scale(self.depth_scale, depth, 1),
        )
        return Streams(*streams)

    def close(self, streams):
        return merge(*streams, post_norm=self.final_post, pre_norm=self.final_pre, final_norm=self.final)


class Mix(nn.Module):
    """A learned gain per channel, c * X, without a norm; c [D] starts at 1."""

    @nn.compact
    def __call__(self, x):
        gain = self.param("gain", nn.initializers.ones, x.shape[-1:], jnp.float32)
        return x * gain.astype(x.dtype)


@register("siamese_hybrid")
class SiameseHybrid(TwoStream):
    """SiameseNorm, hybrid-pre: the post stream follows HybridNorm; the paper's language-model headline variant.

        O = Attn(c * X + LN(Y));                       X = X + s O;    Y = Y + O
        X = LN(X);  O = MLP(LN_in(X + LN(Y)));         X = X + s O;    Y = Y + O
        out = LN_out(LN(X) + LN(Y))

    Options as in the reference code: `attn_norm` reads LN(X) in place of c * X (and with
    `attn_residual_after_norm` continues from it), `ffn_norm` is the one X-norm of the layer,
    `ffn_residual_after_norm` whether the normalised X is the residual, `input_norm` is LN_in.
    Its attention normalises q, k and v per head: the branch's option, not the scheme's.
    """

    depth_scale: DepthScale = "layer2"
    input_norm: bool = True
    final_norm: bool = True
    attn_norm: bool = False
    attn_residual_after_norm: bool = False
    ffn_norm: bool = True
    ffn_residual_after_norm: bool = True

    model_options = ("final_norm",)
    replaced_options = ("input_norm", "final_norm")

    def setup(self):
        self.attention_post = self.norm() if self.attn_norm else Mix()
        self.attention_pre, self.mlp_pre = self.norm(), self.norm()
        self.mlp_post = self.optional_norm(self.ffn_norm)
        self.mlp_input = self.reading_norm(self.input_norm)
        self.final_post, self.final_pre = self.norm(), self.norm()
        self.final = self.reading_norm(self.final_norm)

    def layer(self, streams, attend, feed, depth):
        streams = functional.siamese(
            *streams,
            attend,
            post_norm=self.attention_post,
            pre_norm=self.attention_pre,
            scale=depth_scale(self.depth_scale, depth, 0),
            residual_after_norm=self.attn_norm and self.attn_residual_after_norm,
        )
        streams = functional.siamese(
            *streams,
            feed,
            post_norm=self.mlp_post,
            pre_norm=self.mlp_pre,
            input_norm=self.mlp_input,
            scale=depth_scale(self.depth_scale, depth, 1),
            residual_after_norm=self.ffn_residual_after_norm,
        )
        return Streams(*streams)

    def close(self, streams):
        return merge(*streams, post_norm=self.final_post, pre_norm=self.final_pre, final_norm=self.final)
