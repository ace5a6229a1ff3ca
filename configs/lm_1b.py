r"""The paper's 1.3B language model (arXiv 2602.08064), siamese_hybrid, 100B tokens of FineWeb-Edu.

Aims at: average perplexity 10.43 at this peak learning rate, 1e-3 (10.57 at 4e-4, 10.48 at 2e-3); Pre-Norm
10.84, 11.21, 10.89; 9.42 after 350B tokens at 2e-3, Pre-Norm 9.67 (the paper's figures, single-seed).

    parameters  16 layers x 16 x 2048^2 = 1,073,741,824 (attention 4 d^2, SwiGLU of hidden 4 d 12 d^2)
                + 2 x 50,304 rows x 2048 =  206,045,184 (embedding and untied head)
                                         = 1,279,787,008 = 1,279.8M, the published size
                + 176,128 gains and mixes = 1,279,963,136 (Pre-Norm: + 71,680)
    tokens      2048 x 2048 = 4,194,304 an update x 23,842 = 100.0B
    FLOPs       6 x 1,176,764,416 + 12 x 16 x 2048 x 2048 = 7.87e9 a token, 7.87e20 in all

The vocabulary is inferred: of the usual tables only 50,304 untied rows (GPT-NeoX, as OLMo v1) give 1,279.8M;
100,352 tied rows would be 1,279.3M. Not published, and OLMo-1B's values here: batch of 2,048 sequences,
Adam's eps, floor of 0.1, decay on matrices (the embedding too) and not on gains, RoPE's theta. The paper
says QK-norm; HybridNorm's blocks, and so its siamese_hybrid, normalise v too.

    python train.py --config=configs/lm_1b.py --workdir=runs/lm_1b \
        --config.data.source='/data/fineweb-edu/*.parquet' --config.data.tokenizer=/data/gpt-neox.json

The Pre-Norm baseline:  --config.model.residual=pre --config.model.value_norm=none
The long run:           --config.schedule.peak=2e-3 --config.training.steps=83446
"""

from siamese_jax.config import base_config


def get_config():
    config = base_config()
    config.model.residual = "siamese_hybrid"
    config.model.num_layers = 16
    config.model.width = 2048
    config.model.num_heads = 16  # of 128
    config.model.mlp_hidden = 8192
    config.model.query_norm = config.model.key_norm = config.model.value_norm = "head"
    config.model.norm_epsilon = 1e-5
    config.model.rope_theta = 10_000.0
    config.model.vocab_size = 50_280  # GPT-NeoX's tokens as OLMo v1 counts them
    config.model.vocab_multiple = 128  # 50,304 rows
    config.model.tie_embedding = False
    config.model.init = "mitchell"
    config.model.dtype = "bfloat16"
    config.model.stream_dtype = "float32"  # as the reference's streams are under bf16 autocast
    config.model.remat = "inputs"  # keeps 26 d bytes a token and layer: 1.7 GB a sequence
    config.model.offload_streams = True  # 8 d bytes a token and layer wait on the host: 0.5 GB a sequence

    # Neither the text nor the tokenizer is bundled: set both to what you have.
    config.data.source = "/data/fineweb-edu/*.parquet"
    config.data.tokenizer = "/data/gpt-neox.json"  # a Hugging Face `tokenizers` file
    config.data.length = 2048

    config.training.batch_size = 2048  # sequences
    # At once; accumulation follows from the mesh. As it is, parallel.compile finds 10.67 GiB a chip on v5e:4x4 and
    # 9.07 on v5e:16x16, 1.024 times Pre-Norm's (remat full: 3.78 and 1.071; one sequence: 4.18 and 1.009).
    config.training.sequences_per_device = 4
    config.mesh.data, config.mesh.fsdp = 1, -1
    config.training.steps = 23_842

    config.optimizer.kind = "adamw"
    config.optimizer.b1, config.optimizer.b2, config.optimizer.eps = 0.9, 0.95, 1e-8
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0
    config.schedule.kind = "cosine"
    config.schedule.peak = 1e-3
    config.schedule.warmup_steps = 2000
    config.schedule.floor = 0.1

    config.eval.every = 1000
    config.eval.batch_size = 64
    config.eval.max_windows = 2048
    config.checkpoint.every = 1000
    return config
