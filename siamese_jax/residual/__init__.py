"""Residual schemes: where normalisation sits, and what the residual streams are."""

from siamese_jax.residual import functional
from siamese_jax.residual.scheme import (
    Residual,
    known_schemes,
    make_segments,
    register,
    resolve_options,
    scheme_options,
)
from siamese_jax.residual.single_stream import DeepNorm, Hybrid, Peri, Post, Pre, Reordered, Scaled
from siamese_jax.residual.two_stream import ResiDual, Siamese, SiameseHybrid, Streams

__all__ = [
    "DeepNorm",
    "Hybrid",
    "Peri",
    "Post",
    "Pre",
    "Reordered",
    "ResiDual",
    "Residual",
    "Scaled",
    "Siamese",
    "SiameseHybrid",
    "Streams",
    "functional",
    "known_schemes",
    "make_segments",
    "register",
    "resolve_options",
    "scheme_options",
]
