"""The State of the Union in tokens of a byte-level BPE of 4,096, trained on the same speeches; on a laptop.

    python -m siamese_jax.data.prepare --source=sotu --train_tokenizer=4096 --out=stores/sotu_bpe
    python train.py --config=configs/sotu_bpe.py --workdir=runs/sotu_bpe

docs/data-and-evaluation.md goes through it, the README says what it reached.
"""

from siamese_jax.config import base_config


def get_config():
    config = base_config()
    config.model.residual = "siamese_hybrid"
    config.model.num_layers = 4
    config.model.width = 192
    config.model.num_heads = 3
    config.model.mlp_hidden = 512
    config.model.query_norm = config.model.key_norm = config.model.value_norm = "head"
    config.model.vocab_size = 4096
    config.model.scan = False  # few layers compile in seconds

    # Parameters: 4 layers x (attention 4 x 192^2 = 147k, SwiGLU 3 x 192 x 512 = 295k) + 2 x 4096 x 192 = 3.34M.
    # Tokens: 8 x 256 = 2,048 an update (about 8,800 bytes of text), 1.23M in all = 0.45 epochs.
    config.data.source = "stores/sotu_bpe"  # made by the first command above
    config.data.tokenizer = "stores/sotu_bpe/tokenizer.json"
    config.data.length = 256
    config.training.batch_size = 8
    config.training.steps = 600

    config.optimizer.kind = "muon"
    config.schedule.peak = 0.01
    config.schedule.warmup_steps = 20
    config.schedule.floor = 0.05

    config.logging.streams_every = 50
    config.eval.every = 150
    config.eval.max_windows = 256
    config.eval.prompt = "The state of the Union is"
    config.checkpoint.every = 150
    return config
