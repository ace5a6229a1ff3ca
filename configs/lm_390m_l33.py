r"""The 33-layer model of the paper's 390M depth study (arXiv 2602.08064), siamese_hybrid, 12B tokens.

Aims at: average perplexity 15.64; Pre-Norm 17.29 (the paper's depth study, table 2; single-seed).

    parameters  33 layers x 16 x 768^2 = 311,427,072, 2 x 50,304 x 768 = 77,266,944
                together 388,694,016 = 388.7M
                + 141,696 gains and mixes = 388,835,712 (Pre-Norm: + 59,904)
    tokens      512 x 2048 = 1,048,576 an update x 11,444 = 12.0B
    FLOPs       6 x 350,060,544 + 12 x 33 x 768 x 2048 = 2.72e9 a token, 3.27e19 in all

Not published: batch, heads, vocabulary; our fallbacks and why are in lm_390m.py.

    python train.py --config=configs/lm_390m_l33.py --workdir=runs/lm_390m_l33 \
        --config.data.source='/data/fineweb-edu/*.parquet' --config.data.tokenizer=/data/gpt-neox.json

The Pre-Norm baseline: --config.model.residual=pre --config.model.value_norm=none
"""

from configs import lm_390m


def get_config():
    return lm_390m.get_config(num_layers=33, width=768)
