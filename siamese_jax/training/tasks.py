"""The task of every family."""

from siamese_jax.training.diffusion_task import DiffusionTask
from siamese_jax.training.language_task import LanguageTask
from siamese_jax.training.task import Task
from siamese_jax.training.vision_task import VisionTask

TASKS: dict[str, Task] = {"language": LanguageTask(), "vision": VisionTask(), "diffusion": DiffusionTask()}
