"""A small siamese ViT on Fashion-MNIST: about ten minutes on two cores.

apt-get install dataset-fashion-mnist     # 31 MB; without it scikit-learn's digits are taken
python train.py --config=configs/quickstart_images.py --workdir=runs/quickstart_images
"""

from siamese_jax.config import base_config


def get_config():
    config = base_config("vision")
    config.model.residual = "siamese"
    config.model.image_size = 28
    config.model.patch_size = 4
    config.model.channels = 1
    config.model.num_classes = 10
    config.model.num_layers = 4
    config.model.width = 96
    config.model.num_heads = 2
    config.model.mlp_hidden = 384
    config.model.scan = False

    config.data.source = "quickstart"
    config.data.crop = "pad"
    config.data.padding = 2
    config.data.flip = True

    config.training.batch_size = 128
    config.training.steps = 2000
    config.optimizer.kind = "muon"
    config.optimizer.weight_decay = 0.05
    config.schedule.peak = 3e-3
    config.schedule.warmup_steps = 50
    config.schedule.floor = 0.0
    config.eval.every = 400
    config.eval.batch_size = 250
    config.checkpoint.every = 400
    return config
