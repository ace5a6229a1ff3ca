"""The quickstart's task with a larger model for longer: below bzip2 -9 (2.05 bits per byte) in 15 to 30 minutes.

    python train.py --config=configs/sotu_long.py --workdir=runs/sotu_long

The README says what it reached.
"""

from configs.quickstart import get_config as quickstart


def get_config():
    config = quickstart()
    # Parameters: 6 layers x (attention 4 x 192^2 = 147k, SwiGLU 3 x 192 x 576 = 332k) + 2 x 264 x 192 = 2.98M.
    config.model.num_layers = 6
    config.model.width = 192
    config.model.num_heads = 3
    config.model.mlp_hidden = 576

    # Tokens: 2,048 an update, 2.5M in all = 0.21 epochs; 21.1 MFLOP a token, 52 TFLOP in all.
    config.training.steps = 1200
    config.schedule.warmup_steps = 50
    config.eval.every = 200
    config.checkpoint.every = 200
    return config
