"""The families of models: which module a configuration describes, how it is checked, what it is called with."""

import dataclasses
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from siamese_jax.models.diffusion import DiffusionConfig, DiffusionModel, check_diffusion
from siamese_jax.models.language import LanguageConfig, LanguageModel, check_language
from siamese_jax.models.transformer import TransformerConfig
from siamese_jax.models.vision import VisionConfig, VisionModel, check_vision


@dataclasses.dataclass(frozen=True)
class Family:
    """A kind of model. inputs: configuration -> shapes of the smallest arguments of its module."""

    config: type[TransformerConfig]
    module: Callable[..., nn.Module]
    check: Callable[[TransformerConfig], None]
    inputs: Callable[[TransformerConfig], tuple[jax.ShapeDtypeStruct, ...]]


def _image(config) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, config.image_size, config.image_size, config.channels), jnp.float32)


_TOKENS = jax.ShapeDtypeStruct((1, 2), jnp.int32)
_NUMBER = jax.ShapeDtypeStruct((1,), jnp.int32)
FAMILIES = {
    "language": Family(LanguageConfig, LanguageModel, check_language, lambda config: (_TOKENS,)),
    "vision": Family(VisionConfig, VisionModel, check_vision, lambda config: (_image(config),)),
    "diffusion": Family(
        DiffusionConfig, DiffusionModel, check_diffusion, lambda config: (_image(config), _NUMBER, _NUMBER)
    ),
}


def family_of(config: TransformerConfig) -> Family:
    """The family that a model configuration belongs to."""
    return FAMILIES[family_name(config)]


def family_name(config: TransformerConfig) -> str:
    """Its name in configurations."""
    return next(name for name, family in FAMILIES.items() if family.config is type(config))


def make_model(config: TransformerConfig) -> nn.Module:
    """The module of a configuration."""
    return family_of(config).module(config)


def check_model(config: TransformerConfig) -> None:
    """InputError with one line for the first thing that cannot work."""
    family_of(config).check(config)


def parameter_shapes(config: TransformerConfig) -> dict:
    """The parameter tree as ShapeDtypeStructs, without computing anything."""
    inputs = family_of(config).inputs(config)
    return jax.eval_shape(make_model(config).init, jax.random.key(0), *inputs)["params"]
