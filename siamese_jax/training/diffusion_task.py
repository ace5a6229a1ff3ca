"""Training diffusion models: a noised image, the noise to be predicted, and the hybrid loss of DiT.

Legend: B images, H height, W width, C channels.
"""

import jax
import jax.numpy as jnp

from siamese_jax.data.image_loader import open_image_data
from siamese_jax.models.families import parameter_shapes
from siamese_jax.models.gaussian import Process, hybrid_losses, noised
from siamese_jax.training.metrics import flops_per_image
from siamese_jax.training.task import Data, Task, row_keys
from siamese_jax.training.vision_task import describe_images, random_images

Array = jax.Array


class DiffusionTask(Task):
    """The diffusion model."""

    unit = "image"

    def positions(self, config, model):
        return model.num_patches

    def batch_shapes(self, config, model):
        batch = config.training.batch_size
        shape = batch, model.image_size, model.image_size, model.channels
        return {"images": (shape, jnp.float32), "labels": ((batch,), jnp.int32)}

    def prepare(self, config, batch, key):
        size = len(batch["labels"])
        return batch | {"weights": jnp.ones(size, jnp.float32), "keys": row_keys(key, size)}

    def make_loss(self, model, config):
        process = Process(config.training.diffusion_steps)

        def loss(params, batch, total_weight):
            drawn = draw_noise(batch["keys"], batch["images"].shape, process.num_steps)
            labels = hide_labels(batch["keys"], batch["labels"], model.config)
            mse_B, vb_B = noise_losses(model, params, process, batch["images"], labels, *drawn)
            mse = jnp.sum(mse_B * batch["weights"]) / total_weight
            return mse + jnp.sum(vb_B * batch["weights"]) / total_weight, mse

        return loss

    def watch(self, config, model, params, batch, look):
        key = jax.random.key(0)  # the same steps and noise at every look
        keys = row_keys(key, len(batch["labels"]))
        process = Process(config.training.diffusion_steps)
        t, noise = draw_noise(keys, batch["images"].shape, process.num_steps)
        x_t = noised(process, batch["images"], t, noise)
        return model.apply({"params": params}, x_t, t, batch["labels"], watch=look, method="hidden")[2]

    def flops_per_unit(self, config, model):
        return flops_per_image(model, parameter_shapes(model), model.num_patches)

    def open_data(self, config, model, rows):
        return Data(*open_image_data(config, model, rows))

    def describe(self, config, data):
        return describe_images(config, data)

    def random_batch(self, config, model):
        return random_images(config, model)


def draw_noise(keys_B2: Array, shape: tuple[int, ...], num_steps: int) -> tuple[Array, Array]:
    """(time steps int32 [B], standard normal noise of the images' shape), each row from its own key."""

    def one(key_2):
        step_key, noise_key, _ = jax.random.split(jax.random.wrap_key_data(key_2), 3)
        return jax.random.randint(step_key, (), 0, num_steps), jax.random.normal(noise_key, shape[1:])

    return jax.vmap(one)(keys_B2)


def hide_labels(keys_B2: Array, labels_B: Array, model) -> Array:
    """The labels, a share of them replaced by the one that stands for none."""
    if model.null_label is None:
        return labels_B

    def one(key_2):
        _, _, key = jax.random.split(jax.random.wrap_key_data(key_2), 3)
        return jax.random.bernoulli(key, model.label_dropout)

    return jnp.where(jax.vmap(one)(keys_B2), model.null_label, labels_B)


def noise_losses(model, params, process: Process, images_BHWC, labels_B, t_B, noise_BHWC) -> tuple[Array, Array]:
    """(mean squared error of the noise [B], variational bound in bits per dimension [B])."""
    x_t = noised(process, images_BHWC, t_B, noise_BHWC)
    output = model.apply({"params": params}, x_t, t_B, labels_B)
    return hybrid_losses(process, output, images_BHWC, x_t, t_B, noise_BHWC)
