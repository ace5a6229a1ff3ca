"""What a run is validated with: for every family, figures during the run and all that its end tells.

`size` counts `unit`s of the whole pass at the end.
"""

import pathlib
from collections.abc import Callable
from typing import Any

import jax

from siamese_jax.errors import InputError
from siamese_jax.evaluation.classification import ClassificationEvaluator, names_of
from siamese_jax.evaluation.diffusion import NoiseEvaluator, Sampler
from siamese_jax.evaluation.generation import sample
from siamese_jax.evaluation.perplexity import DomainsEvaluator
from siamese_jax.evaluation.pictures import check_grid, confusion_matrix, sample_grid

Progress = Callable[[int], None]


class LanguageValidation:
    """Loss, bits per byte and perplexity, of several sets each by itself too; at the end a sampled text."""

    unit = "window"

    def __init__(self, parts: Any):
        self.parts, config = parts, parts.config
        self.evaluator = DomainsEvaluator(
            parts.model, parts.data.validation, parts.mesh, length=config.data.length,
            batch_size=config.eval.batch_size, cross_documents=config.data.cross_documents,
            max_windows=config.eval.max_windows,
        )  # fmt: skip
        self.size = self.evaluator.num_windows(whole=True)

    def figures(self, params, progress: Progress) -> dict[str, float]:
        """The metrics of a validation during the run."""
        found, names = self.evaluator(params, progress), ("loss", "bits_per_byte", "perplexity")
        metrics = {name: found["total"][name] for name in names}
        if len(found["domains"]) > 1:
            metrics |= {
                f"{name}/{domain}": figures[name] for domain, figures in found["domains"].items() for name in names
            }
        return metrics

    def samples(self, params) -> list[dict[str, str]]:
        """What the model puts after each prompt: {prompt, text}. Nothing of the training's is drawn from."""
        config, parts = self.parts.config, self.parts
        prompts = config.eval.prompt.split("|") if config.eval.prompt else []
        with jax.set_mesh(parts.mesh):
            texts = sample(
                parts.model, params, parts.data.tokenizer, prompts, length=config.data.length,
                num_tokens=config.eval.sample_tokens, temperature=config.eval.temperature, seed=config.seed,
            )  # fmt: skip
        return [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]

    def finish(self, params, workdir: str, progress: Progress) -> dict:
        """The whole validation set, and what the model puts after eval.prompt."""
        found = self.evaluator(params, progress, whole=True)
        several = {name: found[name] for name in ("domains", "mean")} if len(found["domains"]) > 1 else {}
        return {"validation": found["total"], **several, "samples": self.samples(params)}


class VisionValidation:
    """Loss, top-1 and top-5; at the end a picture of what is taken for what."""

    unit = "image"

    def __init__(self, parts: Any):
        self.parts, config = parts, parts.config
        self.evaluator = ClassificationEvaluator(
            parts.model, parts.data.validation, parts.data.loader.augmentation, parts.mesh, config.eval.batch_size,
            config.data.workers,
        )  # fmt: skip
        self.size = len(parts.data.validation)
        self.part = min(config.eval.max_images or self.size, self.size)

    def figures(self, params, progress: Progress) -> dict[str, float]:
        """The metrics of a validation during the run."""
        total = self.evaluator(params, progress, self.part)["total"]
        return {name: total[name] for name in ("loss", "top1", "top5")}

    def finish(self, params, workdir: str, progress: Progress) -> dict:
        """The whole validation set, and its confusion matrix as a picture."""
        result, images = self.evaluator(params, progress, self.size), self.parts.data.validation
        pictures, num_classes = [], self.parts.model_config.num_classes
        if num_classes <= MOST_CLASSES:
            pictures = [str(pathlib.Path(workdir) / "confusion.png")]
        if pictures and jax.process_index() == 0:
            title = f"{images.name}, {self.parts.model_config.residual}"
            confusion_matrix(pictures[0], result["confusion"], names_of(images, num_classes), title)
        return {"validation": result["total"], "pictures": pictures}


MOST_CLASSES = 100  # that a picture of a confusion matrix can show


class DiffusionValidation:
    """The error of the noise on images held out; at the end a picture of samples."""

    unit = "image"

    def __init__(self, parts: Any):
        self.parts, config = parts, parts.config
        self.evaluator = NoiseEvaluator(
            parts.model, parts.data.validation, parts.data.loader.augmentation, parts.mesh, config.eval.batch_size,
            config.training.diffusion_steps, config.data.workers,
        )  # fmt: skip
        self.size = len(parts.data.validation)
        self.part = min(config.eval.max_images or self.size, self.size)
        images, model = parts.data.train, parts.model_config
        self.each = config.eval.samples_per_class if images.shows_pixels and model.channels in (1, 3) else 0
        self.classes = range(min(images.num_classes, config.eval.classes))
        if self.each:
            try:
                check_grid(len(self.classes), self.each, model.image_size)
            except InputError as error:
                raise InputError(f"eval.samples_per_class {self.each}, eval.classes: {error}") from error

    def figures(self, params, progress: Progress) -> dict[str, float]:
        """The metrics of a validation during the run."""
        total = self.evaluator(params, progress, self.part)
        return {name: total[name] for name in ("loss", "vb")}

    def finish(self, params, workdir: str, progress: Progress) -> dict:
        """The whole validation set, and samples of every class as a picture."""
        total, config = self.evaluator(params, progress, self.size), self.parts.config
        if not self.each:
            return {"validation": total, "pictures": []}
        sampler = Sampler(
            self.parts.model, self.parts.mesh, num_steps=config.training.diffusion_steps,
            sampling_steps=config.eval.sampling_steps, method=config.eval.sampler,
            guidance=config.eval.guidance, batch_size=config.eval.batch_size,
        )  # fmt: skip
        labels = [label for label in self.classes for _ in range(self.each)]
        made = sampler(params, labels, config.seed, lambda done: progress(self.size))  # a signal is heard there
        picture = str(pathlib.Path(workdir) / "samples.png")
        if jax.process_index() == 0:
            data, each = self.parts.data, self.each
            pixels, names = data.loader.augmentation.pixels(made), data.train.class_names
            rows = {names[i]: pixels[i * each : (i + 1) * each] for i in self.classes}
            title = f"{data.train.name}, {self.parts.model_config.residual}, guidance {config.eval.guidance:g}"
            sample_grid(picture, rows, title)
        return {"validation": total, "pictures": [picture]}


_VALIDATIONS = {"language": LanguageValidation, "vision": VisionValidation, "diffusion": DiffusionValidation}


def make_validation(parts: Any) -> Any:
    """The validation of a run, of which the parts are: its configuration, model, mesh and data."""
    return _VALIDATIONS[parts.config.family](parts)
