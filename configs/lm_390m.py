"""What the four 390M models of the paper's depth study share (its table 2); each has a file of its own.

The recipe is that of lm_1b.py with another shape, learning rate 1e-3 and 12B tokens. The published table
gives layers, width, hidden 4 d, tokens and learning rate, and 390M for all four. With the 50,304 untied rows
of the 1.3B model they have 390.9M, 388.2M, 388.7M and 387.1M: about 388M. (100,352 tied rows would fit these
four as well; only the 1,279.8M of the 1.3B model tells the two apart.)

Not published: heads (128 wide here, as at 1.3B; the count does not depend on it) and the batch. OLMo-1B's
2,048 sequences would make 12B tokens 2,861 updates, 2,000 of them warm-up; 512 sequences make 11,444.
"""

from configs import lm_1b


def get_config(num_layers=17, width=1024):
    config = lm_1b.get_config()
    config.model.num_layers = num_layers
    config.model.width = width
    config.model.num_heads = width // 128
    config.model.mlp_hidden = 4 * width
    config.training.batch_size = 512  # sequences
    config.training.sequences_per_device = 4
    config.training.steps = 11_444
    config.schedule.peak = 1e-3
    return config
