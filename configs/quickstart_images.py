"""A siamese ViT on Fashion-MNIST: about ten minutes on two cores.

    apt-get install dataset-fashion-mnist     # 31 MB; without it scikit-learn's digits are taken
    python train.py --config=configs/quickstart_images.py --workdir=runs/quickstart_images

The aim is at least 89 % of the test images right; the README says what it reached. The run ends with top-1, top-5
and a picture of what is taken for what. Pre-Norm: --config.model.residual=pre
"""

from siamese_jax.config import base_config


def get_config():
    config = base_config("vision")
    # Parameters: 4 layers x (attention 4 x 128^2, MLP 2 x 128 x 512) = 0.79M in matrices. A patch is 7 x 7 pixels,
    # so there are 16 and the class token: 83 MFLOP an image, 19.0 TFLOP in all.
    config.model.residual = "siamese"
    config.model.image_size = 28
    config.model.patch_size = 7
    config.model.channels = 1
    config.model.num_classes = 10
    config.model.num_layers = 4
    config.model.width = 128
    config.model.num_heads = 2
    config.model.mlp_hidden = 512
    # Unrolled layers take a tenth less time than scanned ones on a CPU; 4 of them still compile in seconds.
    config.model.scan = False

    config.data.source = "quickstart"  # fashion_mnist, or digits where that is not installed
    config.data.eval_crop = 1.0  # digits are resized whole
    config.data.flip = True  # clothes have no left and right; shifting them costs more epochs than there are

    config.training.batch_size = 128
    config.training.steps = 1800  # 3.84 epochs
    config.optimizer.kind = "muon"
    config.optimizer.weight_decay = 0.05
    config.schedule.peak = 3e-3
    config.schedule.warmup_steps = 50
    config.schedule.floor = 0.0

    config.eval.every = 450
    config.eval.batch_size = 250
    config.checkpoint.every = 450
    return config
