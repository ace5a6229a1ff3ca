r"""The 10-layer model of the paper's 390M depth study (arXiv 2602.08064), siamese_hybrid, 12B tokens.

Aims at: average perplexity 16.15; Pre-Norm 17.47 (the paper's depth study, table 2; single-seed).

    parameters  10 layers x 16 x 1280^2 = 262,144,000, 2 x 50,304 x 1280 = 128,778,240
                together 390,922,240 = 390.9M
                + 71,680 gains and mixes = 390,993,920 (Pre-Norm: + 29,440)
    tokens      512 x 2048 = 1,048,576 an update x 11,444 = 12.0B
    FLOPs       6 x 326,533,120 + 12 x 10 x 1280 x 2048 = 2.27e9 a token, 2.73e19 in all

Not published: batch, heads, vocabulary; our fallbacks and why are in lm_390m.py.

    python train.py --config=configs/lm_390m_l10.py --workdir=runs/lm_390m_l10 \
        --config.data.source='/data/fineweb-edu/*.parquet' --config.data.tokenizer=/data/gpt-neox.json

The Pre-Norm baseline: --config.model.residual=pre --config.model.value_norm=none
"""

from configs import lm_390m


def get_config():
    return lm_390m.get_config(num_layers=10, width=1280)
