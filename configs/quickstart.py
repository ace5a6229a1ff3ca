"""A byte-level siamese_hybrid language model on the State of the Union speeches: about five minutes on two cores.

    python train.py --config=configs/quickstart.py --workdir=runs/quickstart

The aim is at most 2.6 bits per byte on the speeches of 2010 and later (xz -9 takes 2.31, bzip2 -9 2.05); the
README says what it reached. Many small updates beat few large ones at this size: 1.8M tokens in 900 updates.
`configs/sotu_long.py` is the longer variant.
"""

from siamese_jax.config import base_config


def get_config():
    config = base_config()
    # Parameters: 4 layers x (attention 4 x 128^2 = 66k, SwiGLU 3 x 128 x 384 = 147k) + 2 x 264 x 128 = 0.92M.
    config.model.num_layers = 4
    config.model.width = 128
    config.model.num_heads = 2
    config.model.mlp_hidden = 384
    config.model.value_norm = "head"
    config.model.vocab_multiple = 8
    # Unrolled layers take a tenth less time than scanned ones on a CPU; 4 of them still compile in seconds.
    config.model.scan = False

    # Tokens: 8 x 256 = 2,048 an update, 1.84M in all = 0.16 epochs; 6.9 MFLOP a token, 12.7 TFLOP in all.
    config.data.source = "sotu"
    config.data.length = 256
    config.training.batch_size = 8
    config.training.steps = 900

    config.optimizer.kind = "muon"
    config.schedule.peak = 0.01
    config.schedule.warmup_steps = 20
    config.schedule.floor = 0.05

    config.logging.streams_every = 50
    config.eval.every = 150
    config.eval.max_windows = 256
    config.eval.prompt = "The state of the Union is "
    config.checkpoint.every = 150
    return config
