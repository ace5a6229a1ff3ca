"""Schemes with one residual stream. F is the attention or the MLP branch. Legend: B batch, L length, D width."""

import math

from siamese_jax.errors import InputError
from siamese_jax.residual import functional
from siamese_jax.residual.functional import add, depth_scale
from siamese_jax.residual.scheme import Residual, SchemeFactory, register, register_composite


@register("pre")
class Pre(Residual):
    """x = x + F(LN x); a final norm."""

    def setup(self):
        self.attention_norm, self.mlp_norm, self.final = (self.reading_norm() for _ in range(3))

    def layer(self, streams, attend, feed, depth):
        x = functional.pre(streams, attend, self.attention_norm)
        return functional.pre(x, feed, self.mlp_norm)

    def close(self, streams):
        return self.final(streams)


@register("post")
class Post(Residual):
    """x = LN(x + F(x)); the last layer's norm is the final one."""

    def setup(self):
        self.attention_norm, self.mlp_norm = self.norm(), self.norm()

    def layer(self, streams, attend, feed, depth):
        x = functional.post(streams, attend, self.attention_norm)
        return functional.post(x, feed, self.mlp_norm)


@register("deepnorm")
class DeepNorm(Residual):
    """x = LN(alpha x + F(x)), alpha = (2N)^(1/4); W_v, W_o and MLP start (8N)^(-1/4) smaller (arXiv 2203.00555).

    The constants are those of a decoder-only model of N layers.
    """

    def setup(self):
        self.attention_norm, self.mlp_norm = self.norm(), self.norm()

    def layer(self, streams, attend, feed, depth):
        alpha = (2 * self.num_layers) ** 0.25
        x = functional.post(streams, attend, self.attention_norm, alpha)
        return functional.post(x, feed, self.mlp_norm, alpha)

    @staticmethod
    def branch_gain(num_layers):
        return (8 * num_layers) ** -0.25


@register("hybrid")
class Hybrid(Residual):
    """HybridNorm (arXiv 2503.04598): y = x + Attn(x); z = LN(y); x' = z + MLP(z); a final norm.

    Its attention normalises q, k and v per head: that is the branch's option, not the scheme's.
    `attn_norm` reads LN(x) for the attention; the two `..._residual_after_norm` choose whether the
    normalised or the raw value is the residual.
    """

    attn_norm: bool = False
    attn_residual_after_norm: bool = False
    ffn_norm: bool = True
    ffn_residual_after_norm: bool = True

    def setup(self):
        self.attention_norm = self.optional_norm(self.attn_norm)
        self.mlp_norm = self.optional_norm(self.ffn_norm)
        self.final = self.reading_norm()

    def layer(self, streams, attend, feed, depth):
        step = functional.normalised_residual
        x = step(streams, attend, self.attention_norm, self.attn_residual_after_norm)
        return step(x, feed, self.mlp_norm, self.ffn_residual_after_norm)

    def close(self, streams):
        return self.final(streams)


@register("peri")
class Peri(Residual):
    """Peri-LN (arXiv 2502.02732): x = x + LN_out(F(LN_in x)), norms on the embedding and at the end.

    Without the embedding norm it is Sandwich-LN.
    """

    embedding_norm: bool = True

    model_options = ("embedding_norm",)
    why_no_norms_in_branches = "its norm of what a branch gives would undo the branch's gate"

    def setup(self):
        self.embedding = self.optional_norm(self.embedding_norm)
        self.attention_norm, self.attention_out_norm = self.norm(), self.norm()
        self.mlp_norm, self.mlp_out_norm, self.final = self.norm(), self.norm(), self.norm()

    def open(self, h_BLD):
        return self.embedding(h_BLD)

    def layer(self, streams, attend, feed, depth):
        x = add(streams, self.attention_out_norm(attend(self.attention_norm(streams))))
        return add(x, self.mlp_out_norm(feed(self.mlp_norm(x))))

    def close(self, streams):
        return self.final(streams)


@register("reordered")
class Reordered(Residual):
    """OLMo 2 (arXiv 2501.00656): x = x + LN(F(x)); a final norm."""

    why_no_norms_in_branches = "its norm of what a branch gives would undo the branch's gate"

    def setup(self):
        self.attention_norm, self.mlp_norm, self.final = self.norm(), self.norm(), self.norm()

    def layer(self, streams, attend, feed, depth):
        x = add(streams, self.attention_norm(attend(streams)))
        return add(x, self.mlp_norm(feed(x)))

    def close(self, streams):
        return self.final(streams)


@register("span")
class Span(Residual):
    """SpanNorm: y = LN(x + Attn(x)); x' = LN(x + MLP(y)): the MLP's skip starts at the layer's input.

    Its initialisation is not published in our sources; it starts like `post`.
    """

    def setup(self):
        self.attention_norm, self.mlp_norm = self.norm(), self.norm()

    def layer(self, streams, attend, feed, depth):
        y = functional.post(streams, attend, self.attention_norm)
        return self.mlp_norm(add(streams, feed(y)))


@register("scaled")
class Scaled(Residual):
    """LayerNorm Scaling (arXiv 2502.05795): x = x + F(LN(x) / sqrt(i + 1)); a final norm.

    Meant for an initialisation that does not itself shrink with depth (model.init = 'normal').
    """

    why_no_norms_in_branches = "a norm behind its scaling would undo that"

    def setup(self):
        self.attention_norm, self.mlp_norm, self.final = self.norm(), self.norm(), self.norm()

    def layer(self, streams, attend, feed, depth):
        scale = depth_scale("layer", depth, 0)
        x = functional.pre(streams, attend, lambda h: (scale * self.attention_norm(h)).astype(h.dtype))
        return functional.pre(x, feed, lambda h: (scale * self.mlp_norm(h)).astype(h.dtype))

    def close(self, streams):
        return self.final(streams)


@register_composite("hybrid_star")
def hybrid_star(num_layers, norm):
    """HybridNorm*: layer 0 is a Pre-Norm layer (y = x + Attn(LN x); x' = y + MLP(LN y)), then `hybrid`."""
    first = {"attn_norm": True, "ffn_residual_after_norm": False}
    return (
        (SchemeFactory(Hybrid, num_layers, norm, tuple(sorted(first.items()))), 1),
        (SchemeFactory(Hybrid, num_layers, norm), num_layers - 1),
    )


@register_composite("mix")
def mix(num_layers, norm, *, post_fraction: float = 0.25):
    """Mix-LN (arXiv 2412.13795): the first floor(a N) layers are `post`, the rest `pre`; a = post_fraction."""
    if not 0 <= post_fraction <= 1:
        raise InputError(f"model.residual_options.post_fraction is {post_fraction}: set it from 0 to 1")
    num_post = math.floor(post_fraction * num_layers + 1e-9)  # 0.29 * 100 is 28.999999999999996
    return (
        (SchemeFactory(Post, num_layers, norm), num_post),
        (SchemeFactory(Pre, num_layers, norm), num_layers - num_post),
    )
