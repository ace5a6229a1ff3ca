r"""The 80-layer model of the paper's 390M depth study (arXiv 2602.08064), siamese_hybrid, 12B tokens.

Aims at: average perplexity 15.98; Pre-Norm 18.02 (the paper's depth study, table 2; single-seed).

    parameters  80 layers x 16 x 512^2 = 335,544,320, 2 x 50,304 x 512 = 51,511,296
                together 387,055,616 = 387.1M
                + 237,056 gains and mixes = 387,292,672 (Pre-Norm: + 102,912)
    tokens      512 x 2048 = 1,048,576 an update x 11,444 = 12.0B
    FLOPs       6 x 361,299,968 + 12 x 80 x 512 x 2048 = 3.17e9 a token, 3.81e19 in all

Not published: batch, heads, vocabulary; our fallbacks and why are in lm_390m.py.

    python train.py --config=configs/lm_390m_l80.py --workdir=runs/lm_390m_l80 \
        --config.data.source='/data/fineweb-edu/*.parquet' --config.data.tokenizer=/data/gpt-neox.json

The Pre-Norm baseline: --config.model.residual=pre --config.model.value_norm=none
"""

from configs import lm_390m


def get_config():
    return lm_390m.get_config(num_layers=80, width=512)
