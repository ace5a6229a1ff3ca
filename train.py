"""Trains a language model with any residual scheme; the same command continues a run that was interrupted.

    python train.py --config=configs/quickstart.py --workdir=runs/quickstart
    python train.py --config=configs/quickstart.py --config.model.residual=pre --workdir=runs/pre

The run folder gets config.json, metrics.jsonl, TensorBoard events, checkpoints/ and summary.json. Ctrl-C or
SIGTERM saves and stops; exit codes: 0 done, 2 wrong configuration or input, 1 anything else.
"""

import json
import sys

from absl import flags

from siamese_jax import program
from siamese_jax.evaluation.generation import sample
from siamese_jax.evaluation.perplexity import Evaluator
from siamese_jax.training.loop import train
from siamese_jax.training.report import format_summary

flags.DEFINE_string("workdir", None, "Folder of the run; made where it is missing, continued where it is not.")
program.define_config_flag()
program.define_json_flag()


def main() -> None:
    workdir = program.required("workdir")
    program.required("config")
    result = train(flags.FLAGS.config, workdir, make_evaluator=Evaluator, sample=sample, say=program.say)
    if flags.FLAGS.json:
        print(json.dumps(result))
    else:
        program.say(format_summary(result, sys.argv))


if __name__ == "__main__":
    program.run(main)
