"""Small image data, a configuration of each image family on them, and their runs; what tests of programs share."""

import json

import numpy as np

SIZE = {"image_size": 8, "patch_size": 4, "channels": 1, "num_classes": 3, "num_layers": 2, "width": 16,
        "num_heads": 2, "mlp_hidden": 32}  # fmt: skip
COMMON = f"""
from siamese_jax.config import base_config


def get_config():
    config = base_config(FAMILY)
    config.model.update({SIZE})
    config.data.source = IMAGES
    config.training.steps = 24
    config.training.batch_size = 8
    config.schedule.warmup_steps = 2
    config.checkpoint.every = 3
    config.eval.every = 9
    config.eval.batch_size = 7
    config.logging.every = 1
    config.logging.streams_every = 5
"""
VISION = (
    COMMON
    + """
    config.model.drop_path = 0.2
    config.data.crop, config.data.padding = "pad", 1
    config.data.flip, config.data.erase = True, 0.5
    config.data.rand_augment_layers = 1
    config.training.mixup, config.training.cutmix, config.training.label_smoothing = 0.8, 1.0, 0.1
    config.optimizer.ema = 0.9
    return config
"""
)
DIFFUSION = (
    COMMON
    + """
    config.data.flip = True
    config.training.diffusion_steps = 100
    config.optimizer.ema = 0.9
    config.eval.sampling_steps, config.eval.samples_per_class = 5, 2
    return config
"""
)
CLASSES = ("dark", "light", "left")


def write_images(path, count=90, side=8, seed=0):
    """Three classes that a small model can tell apart: dark, light, and light on the left."""
    random = np.random.default_rng(seed)
    labels = np.arange(count) % 3
    images = random.integers(0, 60, (count, side, side, 1))
    images[labels == 1] += 180
    images[labels == 2, :, : side // 2] += 180
    np.savez(path, images=images.astype(np.uint8), labels=labels, class_names=np.array(CLASSES))
    return path


def mean_pixels(images_NHWC):
    """Features of a user: the mean of every row of pixels."""
    return images_NHWC.mean(axis=(2, 3))


class Images:
    """The shared place, with image data and a configuration of each family."""

    def __init__(self, place):
        self.place, self.folder = place, place.folder / "images"
        self.folder.mkdir(exist_ok=True)
        self.data = write_images(self.folder / "data.npz")
        for family, text in (("vision", VISION), ("diffusion", DIFFUSION)):
            text = text.replace("FAMILY", repr(family)).replace("IMAGES", repr(str(self.data)))
            (self.folder / f"{family}.py").write_text(text)

    def arguments(self, family, workdir, *overrides):
        keys = [f"--config.{override}" for override in overrides]
        return [f"--config={self.folder / family}.py", f"--workdir={workdir}", *keys]

    def finished(self, family):
        """The folder of a run that nobody disturbed."""
        workdir = self.folder / f"run_{family}"
        if not (workdir / "summary.json").exists():
            ended = self.place.run(*self.arguments(family, workdir))
            assert ended.code == 0, ended.err
        return workdir

    def evaluate(self, workdir, *arguments):
        """The one object that eval.py --json prints."""
        ended = self.place.run(f"--workdir={workdir}", "--json", *arguments, program="eval.py")
        assert ended.code == 0, ended.err
        return json.loads(ended.out)
