"""A small siamese DiT on the pixels of Fashion-MNIST: about fifteen minutes on two cores.

apt-get install dataset-fashion-mnist     # 31 MB; without it scikit-learn's digits are taken
python train.py --config=configs/quickstart_diffusion.py --workdir=runs/quickstart_diffusion
"""

from siamese_jax.config import base_config


def get_config():
    config = base_config("diffusion")
    config.model.residual = "siamese"
    config.model.image_size = 28
    config.model.patch_size = 4
    config.model.channels = 1
    config.model.num_classes = 10
    config.model.num_layers = 6
    config.model.width = 128
    config.model.num_heads = 2
    config.model.mlp_hidden = 512
    config.model.scan = False

    config.data.source = "quickstart"
    config.data.flip = False

    config.training.batch_size = 128
    config.training.steps = 2500
    config.optimizer.kind = "muon"
    config.optimizer.weight_decay = 0.0
    config.optimizer.ema = 0.995
    config.schedule.peak = 3e-3
    config.schedule.warmup_steps = 50
    config.schedule.floor = 0.02
    config.eval.every = 500
    config.eval.batch_size = 250
    config.eval.max_images = 1000
    config.eval.guidance = 2.0
    config.checkpoint.every = 500
    return config
