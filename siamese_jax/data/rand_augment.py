"""RandAugment (arXiv 1909.13719) as timm's 'rand-m9-mstd0.5-inc1' has it, and colour jitter.

All on Pillow images of one or three channels. Legend: H height, W width, C channels.
"""

from collections.abc import Callable

import numpy as np

MOST = 10.0  # the scale of magnitudes
APPLIED = 0.5  # probability of each operation that was drawn
FARTHEST = 0.45  # of a shift, share of the side


def rand_augment(
    image_HWC: np.ndarray, random: np.random.Generator, layers: int, magnitude: float, std: float, fill: tuple
) -> np.ndarray:
    """`layers` operations drawn one after the other, each applied with probability 1/2 at N(magnitude, std)."""
    picture = _to_picture(image_HWC)
    fill = fill if len(fill) > 1 else fill[0]
    for name in random.choice(len(OPERATIONS), layers):
        apply = random.random() < APPLIED
        level = float(np.clip(random.normal(magnitude, std), 0, MOST)) / MOST
        sign = 1.0 if random.random() < 0.5 else -1.0
        if apply:
            picture = OPERATIONS[name][1](picture, level, sign, fill)
    return _to_array(picture)


def jitter_colours(image_HWC: np.ndarray, random: np.random.Generator, strength: float) -> np.ndarray:
    """Brightness, contrast and saturation, in random order, each multiplied by 1 - strength to 1 + strength."""
    from PIL import ImageEnhance

    picture = _to_picture(image_HWC)
    kinds = [ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color]
    for i in random.permutation(len(kinds)):
        factor = random.uniform(max(0.0, 1 - strength), 1 + strength)
        if picture.mode == "RGB" or i != 2:
            picture = kinds[i](picture).enhance(factor)
    return _to_array(picture)


def _to_picture(image_HWC: np.ndarray):
    from PIL import Image

    return Image.fromarray(np.ascontiguousarray(image_HWC[..., 0] if image_HWC.shape[-1] == 1 else image_HWC))


def _to_array(picture) -> np.ndarray:
    pixels = np.asarray(picture)
    return pixels[..., None] if pixels.ndim == 2 else pixels


def _on_values(name: str) -> Callable:
    """An operation of Pillow that has no strength."""

    def apply(picture, level, sign, fill):
        from PIL import ImageOps

        return getattr(ImageOps, name)(picture)

    return apply


def _enhance(name: str) -> Callable:
    """Stronger or weaker by up to 0.9, never reversed."""

    def apply(picture, level, sign, fill):
        from PIL import ImageEnhance

        if name == "Color" and picture.mode != "RGB":
            return picture
        return getattr(ImageEnhance, name)(picture).enhance(max(0.1, 1 + sign * 0.9 * level))

    return apply


def _warp(matrix: Callable) -> Callable:
    """An affine map of positions, Pillow's six numbers from (signed level, width, height)."""

    def apply(picture, level, sign, fill):
        from PIL import Image

        numbers = matrix(sign * level, *picture.size)
        return picture.transform(
            picture.size, Image.Transform.AFFINE, numbers, Image.Resampling.BICUBIC, fillcolor=fill
        )

    return apply


def _rotate(picture, level, sign, fill):
    from PIL import Image

    return picture.rotate(30 * sign * level, Image.Resampling.BICUBIC, fillcolor=fill)


def _posterize(picture, level, sign, fill):
    from PIL import ImageOps

    bits = 4 - int(4 * level)
    return picture if bits >= 8 else ImageOps.posterize(picture, max(bits, 1))


def _solarize(picture, level, sign, fill):
    from PIL import ImageOps

    return ImageOps.solarize(picture, 256 - int(256 * level))


def _solarize_add(picture, level, sign, fill):
    """Darker half of the values made lighter by up to 110."""
    added = min(128, int(110 * level))
    table = [min(255, value + added) if value < 128 else value for value in range(256)]
    return picture.point(table * len(picture.getbands()))


OPERATIONS = (
    ("auto_contrast", _on_values("autocontrast")),
    ("equalize", _on_values("equalize")),
    ("invert", _on_values("invert")),
    ("rotate", _rotate),
    ("posterize", _posterize),
    ("solarize", _solarize),
    ("solarize_add", _solarize_add),
    ("color", _enhance("Color")),
    ("contrast", _enhance("Contrast")),
    ("brightness", _enhance("Brightness")),
    ("sharpness", _enhance("Sharpness")),
    ("shear_x", _warp(lambda level, width, height: (1, 0.3 * level, 0, 0, 1, 0))),
    ("shear_y", _warp(lambda level, width, height: (1, 0, 0, 0.3 * level, 1, 0))),
    ("translate_x", _warp(lambda level, width, height: (1, 0, FARTHEST * level * width, 0, 1, 0))),
    ("translate_y", _warp(lambda level, width, height: (1, 0, 0, 0, 1, FARTHEST * level * height))),
)
