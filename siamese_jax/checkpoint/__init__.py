"""Checkpoints, saved in the background and checked bit by bit when read. The only room that knows Orbax.

`FOLDER/STEP/` holds the arrays as Orbax writes them and, written last, `about.json` (seal.py): Orbax alone
restores flipped bits without a word. Its CheckpointManager is not used: it counts a step before that is on
disk, and its last two files come too late for a seal. So Orbax writes `STEP.saving`; sealed, that is renamed.
"""

from siamese_jax.checkpoint.checkpoints import Checkpoints
from siamese_jax.checkpoint.processes import barrier, check_same, first_process_first, vote
from siamese_jax.checkpoint.seal import available_steps, read_about
from siamese_jax.checkpoint.weights import OpenWeights, open_weights, write_weights

__all__ = [
    "Checkpoints",
    "OpenWeights",
    "available_steps",
    "barrier",
    "check_same",
    "first_process_first",
    "open_weights",
    "read_about",
    "vote",
    "write_weights",
]
