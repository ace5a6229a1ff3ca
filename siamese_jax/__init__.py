"""SiameseNorm for JAX and Flax (arXiv 2602.08064): residual schemes, models on them, programs that train them."""

__version__ = "0.1.0"
