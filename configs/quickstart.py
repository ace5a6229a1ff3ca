"""A small byte-level siamese_hybrid language model on the State of the Union speeches: minutes on a laptop."""

from siamese_jax.config import base_config


def get_config():
    config = base_config()
    config.model.width = 192
    config.model.num_layers = 4
    config.model.num_heads = 3
    config.model.mlp_hidden = 512
    config.model.value_norm = "head"
    config.model.vocab_multiple = 8
    config.data.length = 256
    config.training.steps = 300
    config.training.batch_size = 16
    config.optimizer.kind = "muon"
    config.schedule.peak = 3e-3
    config.schedule.warmup_steps = 20
    config.eval.every = 100
    config.eval.max_windows = 256
    config.eval.prompt = "The state of the Union is"
    config.checkpoint.every = 100
    return config
