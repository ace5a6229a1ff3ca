r"""The 17-layer model of the paper's 390M depth study (arXiv 2602.08064), siamese_hybrid, 12B tokens.

Aims at: average perplexity 15.69; Pre-Norm 17.23 (the paper's depth study, table 2; single-seed).

    parameters  17 layers x 16 x 1024^2 = 285,212,672, 2 x 50,304 x 1024 = 103,022,592
                together 388,235,264 = 388.2M
                + 96,640 gains and mixes = 388,331,904 (Pre-Norm: + 40,192)
    tokens      512 x 2048 = 1,048,576 an update x 11,444 = 12.0B
    FLOPs       6 x 336,723,968 + 12 x 17 x 1024 x 2048 = 2.45e9 a token, 2.94e19 in all

Not published: batch, heads, vocabulary; our fallbacks and why are in lm_390m.py.

    python train.py --config=configs/lm_390m_l17.py --workdir=runs/lm_390m_l17 \
        --config.data.source='/data/fineweb-edu/*.parquet' --config.data.tokenizer=/data/gpt-neox.json

The Pre-Norm baseline: --config.model.residual=pre --config.model.value_norm=none
"""

from configs import lm_390m


def get_config():
    return lm_390m.get_config(num_layers=17, width=1024)
