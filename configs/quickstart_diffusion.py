"""A siamese DiT on the pixels of Fashion-MNIST: about fifteen minutes on two cores.

    apt-get install dataset-fashion-mnist     # 31 MB; without it scikit-learn's digits are taken
    python train.py --config=configs/quickstart_diffusion.py --workdir=runs/quickstart_diffusion
    python eval.py --workdir=runs/quickstart_diffusion --samples_per_class=20 --classifier=runs/quickstart_images

The run ends with samples of every class in a picture. The aim is that the classifier of quickstart_images.py sees
the asked class in at least 80 % of the samples; the README says what it reached. Pre-Norm:
--config.model.residual=pre
"""

from siamese_jax.config import base_config


def get_config():
    config = base_config("diffusion")
    # Parameters: 4 layers x (attention 4 x 128^2, MLP 2 x 128 x 512, modulation 6 x 128^2) = 1.18M, and 0.1M around
    # them. A patch is 4 x 4 pixels, so there are 49: 251 MFLOP an image, 25.7 TFLOP in all.
    config.model.residual = "siamese"
    config.model.image_size = 28
    config.model.patch_size = 4
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

    config.training.batch_size = 64
    config.training.steps = 1600  # 1.7 epochs
    config.optimizer.kind = "muon"
    config.optimizer.weight_decay = 0.0
    config.optimizer.ema = 0.995
    config.schedule.peak = 3e-3
    config.schedule.warmup_steps = 50
    config.schedule.floor = 0.02

    config.eval.every = 400
    config.eval.batch_size = 250
    config.eval.max_images = 1000
    config.eval.samples_per_class = 10
    config.eval.sampling_steps = 50
    config.eval.guidance = 3.0
    config.checkpoint.every = 400
    return config
