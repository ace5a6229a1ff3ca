"""What is done to one image before a model sees it: in training drawn at random, in evaluation always the same.

Pure functions of an image and a numpy Generator. Shapes: H height, W width, C channels, S the model's side.
"""

import dataclasses
import math

import numpy as np

from siamese_jax.data.rand_augment import jitter_colours, rand_augment
from siamese_jax.errors import InputError

RESIZED_AREA = (0.08, 1.0)  # share of the image, of a random resized crop
RESIZED_ASPECT = (3 / 4, 4 / 3)
ERASED_AREA = (0.02, 1 / 3)
ERASED_ASPECT = (0.3, 1 / 0.3)
TRIES = 10


def example_rng(seed: int, epoch: int, example: int) -> np.random.Generator:
    """The random numbers of one example: they depend on nothing else."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, (epoch << 40) + example], np.uint64)))


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """What becomes of images on the way to a model of S x S pixels and `channels` channels.

    mean, std: of each channel, whose values lie from 0 to 1. crop: 'none' (resized where that is needed),
    'random_resized' or 'pad' (random places of the image with `padding` zeros around it). erase: probability that a
    rectangle is filled with noise. Latents (floating) are only flipped, and multiplied by latent_scale.
    The others are the keys of a configuration's data group.
    """

    size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: str = "none"
    padding: int = 0
    flip: bool = False
    rand_augment_layers: int = 0
    rand_augment_magnitude: float = 9.0
    rand_augment_std: float = 0.5
    color_jitter: float = 0.0
    erase: float = 0.0
    eval_crop: float = 0.875
    grey_to_colour: bool = False
    latent_scale: float = 1.0

    @property
    def is_for_pixels(self) -> bool:
        """Whether training does with images what cannot be done with latents."""
        return self.crop != "none" or bool(self.erase or self.rand_augment_layers or self.color_jitter)

    def augment(self, image_HWC: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """The image as training sees it, normalised, float32 [S, S, C]."""
        image = self._checked(image_HWC)
        if image.dtype != np.uint8:
            image = image * np.float32(self.latent_scale)
            return _flipped(image) if self.flip and random.random() < 0.5 else image
        image = self._cropped(image, random)
        if self.flip and random.random() < 0.5:
            image = _flipped(image)
        fill = tuple(round(255 * mean) for mean in self.mean)
        if self.rand_augment_layers:
            image = rand_augment(
                image, random, self.rand_augment_layers, self.rand_augment_magnitude, self.rand_augment_std, fill
            )
        elif self.color_jitter:
            image = jitter_colours(image, random, self.color_jitter)
        image = self.normalised(image)
        return _erased(image, random) if self.erase and random.random() < self.erase else image

    def plain(self, image_HWC: np.ndarray) -> np.ndarray:
        """The image as evaluation sees it, normalised, float32 [S, S, C]: resized and cut around its centre."""
        image = self._checked(image_HWC)
        if image.dtype != np.uint8:
            return image * np.float32(self.latent_scale)
        return self.normalised(self._centre(image))

    def normalised(self, image_SSC: np.ndarray) -> np.ndarray:
        """(image / 255 - mean) / std, float32."""
        mean, std = np.asarray(self.mean, np.float32), np.asarray(self.std, np.float32)
        return (image_SSC.astype(np.float32) * np.float32(1 / 255) - mean) / std

    def pixels(self, images) -> np.ndarray:
        """The inverse of `normalised`, rounded and cut to 0 .. 255: uint8."""
        mean, std = np.asarray(self.mean, np.float32), np.asarray(self.std, np.float32)
        values = np.nan_to_num(np.asarray(images, np.float32) * std + mean)
        return np.clip(np.round(values * 255), 0, 255).astype(np.uint8)

    def stored_latents(self, latents) -> np.ndarray:
        """Latents as a model takes or makes them -> as they are stored, without latent_scale: float32."""
        return np.asarray(latents, np.float32) / np.float32(self.latent_scale)

    def _checked(self, image: np.ndarray) -> np.ndarray:
        """The image with the model's channels; InputError where it has others."""
        if image.dtype != np.uint8:
            wanted = (self.size, self.size, self.channels)
            if image.shape != wanted:
                raise InputError(
                    f"latents of shape {image.shape} do not fit the model's {wanted}: set model.image_size and "
                    "model.channels to them"
                )
            return image
        found = image.shape[-1]
        if found == 1 and self.channels == 3 and self.grey_to_colour:
            return np.repeat(image, 3, axis=-1)
        if found != self.channels:
            also = ", or data.grey_to_colour=True" if found == 1 and self.channels == 3 else ""
            raise InputError(
                f"images of {found} channel(s) do not fit model.channels {self.channels}: set it to {found}{also}"
            )
        return image

    def _cropped(self, image: np.ndarray, random: np.random.Generator) -> np.ndarray:
        if self.crop == "random_resized":
            return _resized(image, (self.size, self.size), _random_box(image.shape[:2], random))
        image = self._centre(image)
        if self.crop == "pad" and self.padding:
            around = ((self.padding, self.padding), (self.padding, self.padding), (0, 0))
            top, left = random.integers(0, 2 * self.padding + 1, 2)
            image = np.pad(image, around)[top : top + self.size, left : left + self.size]
        return image

    def _centre(self, image: np.ndarray) -> np.ndarray:
        """The middle of the image, its shorter side resized to S / eval_crop; untouched where it is S x S.

        Sizes and places are rounded as torchvision's Resize and CenterCrop round them.
        """
        height, width = image.shape[:2]
        if (height, width) == (self.size, self.size):
            return image
        shorter = max(self.size, math.floor(self.size / self.eval_crop))
        size = tuple(shorter * length // min(height, width) for length in (height, width))
        image = _resized(image, size, (0, 0, height, width))
        top, left = (round((length - self.size) / 2) for length in size)
        return image[top : top + self.size, left : left + self.size]


def _flipped(image: np.ndarray) -> np.ndarray:
    return image[:, ::-1]


def _resized(image: np.ndarray, size: tuple[int, int], box: tuple[int, int, int, int]) -> np.ndarray:
    """A box (top, left, height, width) of the image, bicubic, as `size` (height, width)."""
    from PIL import Image

    top, left, height, width = box

    def resized(pixels):
        picture = Image.fromarray(pixels).crop((left, top, left + width, top + height))
        return np.asarray(picture.resize(size[::-1], Image.Resampling.BICUBIC))

    if image.shape[-1] == 3:
        return resized(image)
    # Of two and four channels Pillow would take the last for transparency.
    channels = [resized(np.ascontiguousarray(image[..., c])) for c in range(image.shape[-1])]
    return np.stack(channels, axis=-1)


def _random_box(size: tuple[int, int], random: np.random.Generator) -> tuple[int, int, int, int]:
    """(top, left, height, width): a share of the area, a log-uniform aspect; the middle where ten tries fail."""
    height, width = size
    for _ in range(TRIES):
        area = height * width * random.uniform(*RESIZED_AREA)
        aspect = math.exp(random.uniform(*map(math.log, RESIZED_ASPECT)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(random.integers(0, height - h + 1)), int(random.integers(0, width - w + 1)), h, w
    low, high = RESIZED_ASPECT
    w = min(width, round(height * high)) if width / height > high else width
    h = min(height, round(width / low)) if width / height < low else height
    return (height - h) // 2, (width - w) // 2, h, w


def _erased(image_SSC: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """The normalised image with a rectangle of standard normal noise (arXiv 1708.04896, timm's mode 'pixel')."""
    height, width, channels = image_SSC.shape
    for _ in range(TRIES):
        area = height * width * random.uniform(*ERASED_AREA)
        aspect = math.exp(random.uniform(*map(math.log, ERASED_ASPECT)))
        h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < h < height and 0 < w < width:
            top, left = int(random.integers(0, height - h + 1)), int(random.integers(0, width - w + 1))
            image = image_SSC.copy()
            image[top : top + h, left : left + w] = random.standard_normal((h, w, channels), np.float32)
            return image
    return image_SSC
