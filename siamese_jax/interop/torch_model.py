"""A small language model in plain PyTorch, to hold ours against: written from the equations, one step a line.

It has the reference's configuration keys and parameter names (OLMo v1, HybridNorm, arXiv 2602.08064 hybrid-pre),
so its state dict is a reference checkpoint. Speed is no concern here. Legend: B batch, L length, D width,
H query heads, J key/value heads, K head dim.
"""

import ast
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

HYBRID_KEYS = ("attn_norm", "attn_residual_after_norm", "ffn_norm", "ffn_residual_after_norm")
TRUNCATION = 3.0  # of initial weights, in standard deviations


class RMSNorm(nn.Module):
    """g * x * rsqrt(mean(x^2) + eps): statistics in float32 or wider, cast back, then the gain."""

    def __init__(self, size: int, epsilon: float):
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(size)), epsilon

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        with torch.autocast(x.device.type, enabled=False):
            normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * normalised.to(x.dtype)


def rotary_tables(length: int, head_dim: int, theta: float):
    """(sin, cos) [L, K] in float32, cat(freqs, freqs)."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.sin(), angles.cos()


def rotate(x, sin, cos):
    """x [B, heads, L, K] rotated, in float32 or wider; the output has x's type."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (wide * cos.to(wide.dtype) + turned * sin.to(wide.dtype)).to(x.dtype)


class Block(nn.Module):
    """One layer: two streams, HybridNorm's places, Pre-Norm or OLMo 2's, as the configuration says."""

    def __init__(self, config: Mapping[str, Any], index: int, two_stream: bool):
        super().__init__()
        self.config, self.index, self.two_stream = config, index, two_stream
        width, self.heads = config["d_model"], config["n_heads"]
        self.kv_heads = config["n_kv_heads"] or self.heads
        self.head_dim = width // self.heads
        self.hybrid = "attn_norm" in config
        self.places = _places(config, index) if self.hybrid else {"attn_norm": True, "ffn_norm": True}

        def norm(size: int = width):
            return RMSNorm(size, config["layer_norm_eps"])

        kv_width, fused = self.kv_heads * self.head_dim, config["mlp_hidden_size"]
        self.gated = config["activation_type"] == "swiglu"
        self.att_proj = nn.Linear(width, width + 2 * kv_width, bias=False)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.ff_proj = nn.Linear(width, fused, bias=False)
        self.ff_out = nn.Linear(fused // 2 if self.gated else fused, width, bias=False)
        for short, key in (("q", "query"), ("k", "key"), ("v", "value"), ("c", "context")):
            if config.get(f"use_{key}_norm"):
                setattr(self, f"{short}_norm", norm(self.head_dim))
        self.full_norms = not self.hybrid and config["attention_layer_norm"]
        if self.full_norms:
            self.q_norm, self.k_norm = norm(width), norm(kv_width)
        if self.places["attn_norm"]:
            self.attn_norm = norm()
        if self.places["ffn_norm"]:
            self.ff_norm = norm()
        if two_stream:
            self.attn_y_norm, self.ff_y_norm, self.ff_input_norm = norm(), norm(), norm()
            if not self.places["attn_norm"]:
                self.c1 = nn.Parameter(torch.ones(width))

    def attend(self, h, rotary):
        """Attention [B, L, D] -> [B, L, D]."""
        batch, length, width = h.shape
        kv_width = self.kv_heads * self.head_dim
        q, k, v = self.att_proj(h).split([width, kv_width, kv_width], dim=-1)
        if self.full_norms:
            q, k = self.q_norm(q), self.k_norm(k)

        def heads(x):
            return x.view(batch, length, -1, self.head_dim).transpose(1, 2)

        q, k, v = heads(q), heads(k), heads(v)
        if not self.full_norms:
            q, k, v = (self._head_norm(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        groups = self.heads // self.kv_heads  # query head j reads key/value head j // groups
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = (q @ k.transpose(-1, -2)) * self.head_dim**-0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = (
            scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(future, -math.inf).softmax(-1)
        )
        context = self._head_norm("c", weights.to(v.dtype) @ v)
        return self.attn_out(context.transpose(1, 2).reshape(batch, length, width))

    def _head_norm(self, name, x):
        return getattr(self, f"{name}_norm")(x).to(x.dtype) if hasattr(self, f"{name}_norm") else x

    def feed(self, h):
        """MLP [B, L, D] -> [B, L, D]."""
        up = self.ff_proj(h)
        if not self.gated:
            return self.ff_out(F.gelu(up))
        value, gate = up.chunk(2, dim=-1)
        return self.ff_out(F.silu(gate) * value)

    def forward(self, streams, rotary):
        if self.two_stream:
            return self._two_streams(*streams, rotary)
        x = streams[0]
        if self.hybrid:
            read = self.attn_norm(x) if self.places["attn_norm"] else x
            x = (read if self.places["attn_residual_after_norm"] else x) + self.attend(read, rotary)
            read = self.ff_norm(x) if self.places["ffn_norm"] else x
            return ((read if self.places["ffn_residual_after_norm"] else x) + self.feed(read),)
        if self.config["norm_after"]:
            x = x + self.attn_norm(self.attend(x, rotary))
            return (x + self.ff_norm(self.feed(x)),)
        x = x + self.attend(self.attn_norm(x), rotary)
        return (x + self.feed(self.ff_norm(x)),)

    def _two_streams(self, x, y, rotary):
        scale = 1 / math.sqrt(2 * (self.index + 1))
        read = self.attn_norm(x) if self.places["attn_norm"] else x * self.c1
        update = self.attend(read + self.attn_y_norm(y), rotary)
        base = read if self.places["attn_norm"] and self.places["attn_residual_after_norm"] else x
        x, y = base + update * scale, y + update
        normed = self.ff_norm(x) if self.places["ffn_norm"] else x
        update = self.feed(self.ff_input_norm(normed + self.ff_y_norm(y)))
        base = normed if self.places["ffn_residual_after_norm"] else x
        return base + update * scale, y + update


def _places(config: Mapping[str, Any], index: int) -> dict[str, bool]:
    """Where the hybrid blocks normalise in layer `index`."""
    places = {key: config[key] for key in HYBRID_KEYS}
    short = dict(zip(("attn_norm", "attn_residual", "ffn_norm", "ffn_residual"), HYBRID_KEYS, strict=True))
    special = config.get("norm_pos_special_config", "").strip("_")
    for layers, row in (ast.literal_eval(special) if special else {}).items():
        if index in (layers if isinstance(layers, tuple) else (layers,)):
            places |= {short[key]: value for key, value in row.items()}
    return places


class TorchLanguageModel(nn.Module):
    """tokens [B, L] -> logits [B, L, V]; `two_stream` makes it SiameseNorm's hybrid-pre."""

    def __init__(self, config: Mapping[str, Any], two_stream: bool):
        super().__init__()
        if config["layer_norm_type"] != "rms" or config["include_bias"] or config["bias_for_layer_norm"]:
            raise NotImplementedError("this model has RMSNorm and no biases")
        self.config, self.two_stream = dict(config), two_stream
        width, rows = config["d_model"], config["embedding_size"] or config["vocab_size"]
        parts = {"wte": nn.Embedding(rows, width), "ln_f": RMSNorm(width, config["layer_norm_eps"])}
        if two_stream:
            parts |= {name: RMSNorm(width, config["layer_norm_eps"]) for name in ("ln_y_f", "ln_final_f")}
        parts["blocks"] = nn.ModuleList(Block(config, i, two_stream) for i in range(config["n_layers"]))
        if not config["weight_tying"]:
            parts["ff_out"] = nn.Linear(width, rows, bias=False)
        self.transformer = nn.ModuleDict(parts)

    def forward(self, tokens, rotary=None, states: list | None = None):
        """Logits; `states` is filled with the streams that enter layer 0 and leave every layer."""
        top, config = self.transformer, self.config
        if rotary is None:
            rotary = rotary_tables(tokens.shape[1], config["d_model"] // config["n_heads"], config["rope_theta"])
        h = top.wte(tokens)
        streams = (h, h) if self.two_stream else (h,)
        for block in (None, *top.blocks):
            streams = streams if block is None else block(streams, rotary)
            if states is not None:
                states.append(streams)
        if self.two_stream:
            h = top.ln_final_f(top.ln_f(streams[0]) + top.ln_y_f(streams[1]))
        else:
            h = top.ln_f(streams[0])
        return F.linear(h, top.wte.weight if config["weight_tying"] else top.ff_out.weight)

    def loss(self, tokens, rotary=None):
        """Mean next-token cross-entropy over B(L - 1) positions."""
        rotary = None if rotary is None else tuple(table[:-1] for table in rotary)
        logits = self(tokens[:, :-1], rotary)
        return F.cross_entropy(
            logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1), tokens[:, 1:].flatten()
        )

    @torch.no_grad()
    def initialize(self, kind: str, std: float, generator: torch.Generator) -> None:
        """OLMo v1's initialisers: mitchell, normal, full_megatron, truncated at 3 sigma; gains 1."""
        top, width, num_layers = self.transformer, self.config["d_model"], self.config["n_layers"]
        mitchell, megatron = kind == "mitchell", kind == "full_megatron"
        base = width**-0.5 if mitchell else std

        def draw(module, sigma):
            nn.init.trunc_normal_(
                module.weight, 0, sigma, -TRUNCATION * sigma, TRUNCATION * sigma, generator=generator
            )

        draw(top.wte, base)
        if "ff_out" in top:
            draw(top.ff_out, width**-0.5 if mitchell or megatron else std)
        for i, block in enumerate(top.blocks):
            draw(block.att_proj, base)
            draw(block.ff_proj, base)
            for module in (block.attn_out, block.ff_out):
                sigma = std / math.sqrt(2 * num_layers) if megatron else std
                draw(module, 1 / math.sqrt(2 * module.in_features * (i + 1)) if mitchell else sigma)

    def decayed(self, decay_embedding: bool = True) -> set[str]:
        """The names of parameters with weight decay, as OLMo chooses: linear weights, the embedding by option."""
        names = set()
        for path, module in self.named_modules():
            if isinstance(module, nn.Linear) or (decay_embedding and isinstance(module, nn.Embedding)):
                names.add(f"{path}.weight")
        return names
