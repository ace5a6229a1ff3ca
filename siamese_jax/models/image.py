"""What the models of images share: the options of a picture cut into patches, and their check."""

import dataclasses

from siamese_jax.errors import InputError
from siamese_jax.models.transformer import TransformerConfig, check_positive, check_transformer


@dataclasses.dataclass(frozen=True)
class ImageConfig(TransformerConfig):
    """The options that models of images have beside those of all."""

    residual: str = "siamese"
    num_layers: int = 12
    activation: str = "gelu"
    norm: str = "layer"
    norm_epsilon: float = 1e-6
    query_norm: str = "none"
    key_norm: str = "none"
    use_bias: bool = True
    image_size: int = 224  # pixels, or numbers of a latent, of a side
    patch_size: int = 16
    channels: int = 3
    num_classes: int = 1000

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def patch_features(self) -> int:
        """Numbers in a patch."""
        return self.patch_size**2 * self.channels


def check_image(config: ImageConfig) -> None:
    """InputError with one line for the first of the shared options that cannot work."""
    check_transformer(config)
    check_positive(config, "image_size", "patch_size", "channels", "num_classes")
    if config.image_size % config.patch_size:
        raise InputError(
            f"model.patch_size {config.patch_size} does not divide model.image_size {config.image_size}: "
            "change one of them"
        )
