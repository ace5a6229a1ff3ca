r"""DiT-B/2 on ImageNet-1k latents of 256 x 256 pixels (arXiv 2212.09748), siamese, with the official recipe.

Aims at: FID 40.31 after 400,000 updates, without guidance, 50,000 samples; Pre-Norm 42.43 (the paper's figures,
arXiv 2602.08064, single-seed; its authors took the official recipe unchanged).

    parameters  129,404,928 in matrices, 130,392,608 in all (Pre-Norm: 130,315,808)
    images      256 an update x 400,000 = 80 epochs of 1,281,167
    FLOPs       1.38e11 an image, forward and backward, 1.41e19 in all

From the official code: 1000 steps with linear betas, learned variance and the hybrid loss, labels hidden in a
tenth of the images, AdamW with a constant 1e-4 from the first update on, no decay, no clipping, average of
0.9999, flips. Latents are those of Stable Diffusion's autoencoder (sd-vae-ft-ema), times 0.18215, computed once
and stored; the official code encodes in every epoch. It needs PyTorch, so neither that nor the decoder is here:
`eval.py --samples_out` writes latents. Float32 products are what the platform makes of them, as there (TF32 on
GPUs, bfloat16 on TPUs).

    python train.py --config=configs/dit_b2.py --workdir=runs/dit_b2 --config.data.source=/data/latents/1.0.0

The source is a prepared TFDS folder in array_record format with the features `latent` (float32 [32, 32, 4]) and
`label` (a ClassLabel), or TRAIN.npz,VALIDATION.npz with `latents` and `labels`, which must fit into memory. The
Pre-Norm baseline: --config.model.residual=pre
"""

from siamese_jax.config import base_config


def get_config():
    config = base_config("diffusion")
    config.model.residual = "siamese"
    config.model.num_layers = 12
    config.model.width = 768
    config.model.num_heads = 12  # of 64
    config.model.mlp_hidden = 3072
    config.model.image_size = 32
    config.model.patch_size = 2
    config.model.channels = 4
    config.model.num_classes = 1000
    config.model.label_dropout = 0.1
    config.model.learn_sigma = True

    config.data.source = "/data/imagenet256_latents/1.0.0"
    config.data.latent_scale = 0.18215
    config.data.flip = True
    config.data.workers = 8

    config.training.batch_size = 256
    config.training.steps = 400_000
    config.training.diffusion_steps = 1000

    config.optimizer.kind = "adamw"
    config.optimizer.b1, config.optimizer.b2, config.optimizer.eps = 0.9, 0.999, 1e-8
    config.optimizer.weight_decay = 0.0
    config.optimizer.clip_norm = 0.0
    config.optimizer.ema = 0.9999
    config.schedule.kind = "constant"
    config.schedule.peak = 1e-4
    config.schedule.warmup_steps = 0

    config.eval.every = 10_000
    config.eval.batch_size = 256
    config.eval.max_images = 5120
    config.eval.sampler = "ddpm"
    config.eval.sampling_steps = 250
    config.eval.guidance = 4.0
    config.checkpoint.every = 10_000
    return config
