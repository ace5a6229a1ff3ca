"""A stack of Transformer layers under any residual scheme: scanned or unrolled, with rematerialisation by name.

Legend: N layers, B batch, L length, D width.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from siamese_jax.errors import InputError
from siamese_jax.layers.activations import constrain
from siamese_jax.layers.drop_path import DropPath
from siamese_jax.layers.modulation import modulated
from siamese_jax.layers.platform import target_platform
from siamese_jax.residual.scheme import Residual, Segments

Watch = Callable[[Mapping[str, jax.Array]], Any]

_policies = jax.checkpoint_policies
REMAT_POLICIES = {
    "none": None,
    "full": _policies.nothing_saveable,
    "matmuls": _policies.dots_with_no_batch_dims_saveable,
    "branches": _policies.save_only_these_names("attention_out", "mlp_out"),
    # Enough that no product with a weight is computed again.
    "inputs": _policies.save_only_these_names("qkv", "context", "attention_out", "mlp_up"),
}


def check_remat(name: str, offload_streams: bool) -> None:
    """InputError unless the policy is known and there is something to move."""
    if name not in REMAT_POLICIES:
        raise InputError(f"unknown remat policy {name!r}: model.remat must be one of {', '.join(REMAT_POLICIES)}")
    if offload_streams and name == "none":
        raise InputError("model.offload_streams needs a model.remat other than 'none', such as inputs")


def remat_policy(name: str, offload_streams: bool) -> Callable | None:
    """What of a layer is kept for the backward pass; None: everything.

    Whatever the policy, a layer is computed again from the streams that enter it. `offload_streams` moves these to
    the host's memory until then: a second stream costs the device next to nothing. On a CPU both memories are the
    same, and nothing is moved.
    """
    policy = REMAT_POLICIES[name]
    if not offload_streams or target_platform() == "cpu":
        return policy
    offload = _policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["stream"],
        offload_src="device", offload_dst="pinned_host",
    )  # fmt: skip

    def keep(primitive, *shapes, **params):
        chosen = offload if params.get("name") == "stream" else policy
        return chosen(primitive, *shapes, **params)

    return keep


class Context(NamedTuple):
    """What the layers take beside the streams, the same for all of them.

    attention: what attention takes beside its input; condition [B, D]: of the modulation, where there is one;
    keys: a raw random key for every row, uint32 [B, 2], for drop path, None = nothing is dropped.
    """

    attention: tuple = ()
    condition_BD: jax.Array | None = None
    keys_B2: jax.Array | None = None


class Branches(NamedTuple):
    """What makes the two branches of a layer, and what is wrapped around both of them."""

    attention: Callable[[], nn.Module]
    mlp: Callable[[], nn.Module]
    modulation: Callable[[], nn.Module] | None = None
    drop_path: DropPath | None = None


class Layer(nn.Module):
    """One scheme applied to two branches."""

    make_residual: Callable[[], Residual]
    make: Branches
    watch: Watch | None = None

    def setup(self):
        self.residual = self.make_residual()
        self.attention = self.make.attention()
        self.mlp = self.make.mlp()
        if self.make.modulation:
            self.modulation = self.make.modulation()

    def _branches(self, depth, context: Context):
        attend, feed = lambda h: self.attention(h, *context.attention), self.mlp
        if self.make.modulation:
            (attend_by, feed_by), epsilon = self.modulation(context.condition_BD), self.modulation.epsilon
            attend, feed = modulated(attend, attend_by, epsilon), modulated(feed, feed_by, epsilon)
        drop = self.make.drop_path
        if drop is None or context.keys_B2 is None:
            return attend, feed
        # A branch is evaluated once, so both streams of a pair lose the same updates.
        return drop.wrap(attend, context.keys_B2, depth, 0), drop.wrap(feed, context.keys_B2, depth, 1)

    def __call__(self, streams, depth, context):
        streams = jax.tree.map(lambda stream: checkpoint_name(stream, "stream"), streams)
        streams = self.residual.layer(streams, *self._branches(depth, context), depth)
        streams = jax.tree.map(lambda stream: constrain(stream, "batch"), streams)
        watched = self.watch(self.residual.named_streams(streams)) if self.watch else None
        return streams, watched


class Stack(nn.Module):
    """All layers of a model. Parameters stand under `layers` (scan) or `layer_0`, `layer_1`, ... (loop).

    A stack of several segments scans each one: `layers_from_0`, `layers_from_K`, ...; streams are handed
    over at the seam. `watch` maps
    {stream name: [B, L, D]} to arrays, returned stacked over the layers (a list of these, one a segment,
    where there are several).
    """

    segments: Segments
    make: Branches
    scan: bool = True
    remat: str = "none"
    offload_streams: bool = False

    def _layer_class(self):
        if self.remat == "none":
            return Layer
        policy = remat_policy(self.remat, self.offload_streams)
        # Under scan XLA cannot merge the recomputation with the forward pass, so no barrier is needed there.
        return nn.remat(Layer, policy=policy, prevent_cse=not self.scan)

    @nn.compact
    def __call__(self, streams, context: Context, watch: Watch | None = None):
        watched, first = [], 0
        for make_residual, count in self.segments:
            parts = (make_residual, self.make, watch)
            layer_class = self._layer_class()
            if self.scan:
                scanned = nn.scan(
                    layer_class,
                    variable_axes={"params": 0, "cache": 0},
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
