"""A stack of Transformer layers under any residual scheme: scanned or unrolled, with rematerialisation by name.

Legend: N layers, B batch, L length, D width.
"""

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from siamese_jax.errors import InputError
from siamese_jax.layers.activations import constrain
from siamese_jax.layers.platform import target_platform
from siamese_jax.residual.scheme import Residual, Segments

Watch = Callable[[Mapping[str, jax.Array]], Any]

_policies = jax.checkpoint_policies
REMAT_POLICIES = {
    "none": None,
    "full": _policies.nothing_saveable,
    "matmuls": _policies.dots_with_no_batch_dims_saveable,
    "branches": _policies.save_only_these_names("attention_out", "mlp_out"),
    "inputs": _policies.save_only_these_names("qkv", "context", "mlp_up"),
}
OFFLOADS = ("none", "extra", "streams")


def check_remat(name: str, offload: str) -> None:
    """InputError unless the policies are known and go together."""
    if name not in REMAT_POLICIES:
        raise InputError(f"unknown remat policy {name!r}: model.remat must be one of {', '.join(REMAT_POLICIES)}")
    if offload not in OFFLOADS:
        raise InputError(f"model.offload is {offload!r}: it must be one of {', '.join(OFFLOADS)}")
    if offload != "none" and name == "none":
        raise InputError(f"model.offload is {offload!r} but model.remat 'none': set model.remat, to inputs say")


def _stream_name(index: int) -> str:
    return f"stream_{index}"


def remat_policy(name: str, offload: str, num_streams: int) -> Callable | None:
    """What of a layer is kept for the backward pass; None: everything.

    Whatever the policy, a layer is recomputed from the streams that enter it. `offload` moves these to the host's
    memory until then: all ('streams'), or all but one ('extra'), so that two streams need no more memory on the
    device than one. On a CPU that is the same memory, and nothing is moved.
    """
    policy = REMAT_POLICIES[name]
    first_moved = {"none": num_streams, "extra": 1, "streams": 0}[offload]
    moved = [_stream_name(i) for i in range(first_moved, num_streams)]
    if not moved or target_platform() == "cpu":
        return policy
    offloading = _policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=moved,
        offload_src="device", offload_dst="pinned_host",
    )  # fmt: skip

    def keep(primitive, *shapes, **params):
        chosen = offloading if params.get("name") in moved else policy
        return chosen(primitive, *shapes, **params)

    return keep


class Layer(nn.Module):
    """One scheme applied to two branches."""

    make_residual: Callable[[], Residual]
    make_attention: Callable[[], nn.Module]
    make_mlp: Callable[[], nn.Module]
    watch: Watch | None = None

    def setup(self):
        self.residual = self.make_residual()
        self.attention = self.make_attention()
        self.mlp = self.make_mlp()

    def __call__(self, streams, depth, context):
        leaves, tree = jax.tree.flatten(streams)
        named = [checkpoint_name(stream, _stream_name(i)) for i, stream in enumerate(leaves)]
        streams = jax.tree.unflatten(tree, named)
        streams = self.residual.layer(streams, lambda h: self.attention(h, *context), self.mlp, depth)
        streams = jax.tree.map(lambda stream: constrain(stream, "batch"), streams)
        watched = self.watch(self.residual.named_streams(streams)) if self.watch else None
        return streams, watched


class Stack(nn.Module):
    """All layers of a model. Parameters stand under `layers` (scan) or `layer_0`, `layer_1`, ... (loop).

    A stack of several segments scans each one: `layers_from_0`, `layers_from_K`, ...; streams are handed
    over at the seam. `context` is what branches take beside their input. `watch` maps
    {stream name: [B, L, D]} to arrays, returned stacked over the layers (a list of these, one a segment,
    where there are several).
    """

    segments: Segments
    make_attention: Callable[[], nn.Module]
    make_mlp: Callable[[], nn.Module]
    scan: bool = True
    remat: str = "none"
    offload: str = "none"

    def _layer_class(self, num_streams: int):
        if self.remat == "none":
            return Layer
        policy = remat_policy(self.remat, self.offload, num_streams)
        # Under scan XLA cannot merge the recomputation with the forward pass, so no barrier is needed there.
        return nn.remat(Layer, policy=policy, prevent_cse=not self.scan)

    @nn.compact
    def __call__(self, streams, *context, watch: Watch | None = None):
        watched, first = [], 0
        for make_residual, count in self.segments:
            parts = (make_residual, self.make_attention, self.make_mlp, watch)
            layer_class = self._layer_class(len(jax.tree.leaves(streams)))
            if self.scan:
                scanned = nn.scan(
                    layer_class,
                    variable_axes={"params": 0},
                    split_rngs={"params": True},
                    in_axes=(0, nn.broadcast),
                    length=count,
                )
                layers = scanned(*parts, name=segment_name(self.segments, first))
                streams, seen = layers(streams, first + jnp.arange(count), context)
            else:
                seen = []
                for depth in range(first, first + count):
                    layer = layer_class(*parts, name=f"layer_{depth}")
                    streams, one = layer(streams, depth, context)
                    seen.append(one)
                seen = jax.tree.map(lambda *ones: jnp.stack(ones), *seen)
            watched.append(seen)
            first += count
        return streams, watched[0] if len(watched) == 1 else watched


def segment_name(segments: Segments, first: int) -> str:
    """The parameter name of the scanned segment that starts at layer `first`."""
    return "layers" if len(segments) == 1 else f"layers_from_{first}"


def segment_rows(segments: Segments) -> list[tuple[str, int, int]]:
    """(parameter name when scanned, first layer, number of layers) of every segment."""
    rows, first = [], 0
    for _, count in segments:
        rows.append((segment_name(segments, first), first, count))
        first += count
    return rows


def unstack_layers(params: Mapping, segments: Segments) -> dict:
    """Scanned parameters -> the unrolled layout (`layer_0`, `layer_1`, ...)."""
    rows = segment_rows(segments)
    loose = {name: value for name, value in params.items() if name not in {name for name, _, _ in rows}}
    for name, first, count in rows:
        for i in range(count):
            loose[f"layer_{first + i}"] = jax.tree.map(lambda leaf, i=i: leaf[i], params[name])
    return loose


def stack_layers(params: Mapping, segments: Segments) -> dict:
    """Unrolled parameters -> the scanned layout; the inverse of `unstack_layers`."""
    kept = {name: value for name, value in params.items() if not name.startswith("layer_")}
    for name, first, count in segment_rows(segments):
        layers = [params[f"layer_{depth}"] for depth in range(first, first + count)]
        kept[name] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    return kept
