"""Trains a language, image or diffusion model with any residual scheme; the same command continues a run.

    python train.py --config=configs/quickstart.py --workdir=runs/quickstart
    python train.py --config=configs/quickstart.py --config.model.residual=pre --workdir=runs/pre

The run folder gets config.json, metrics.jsonl, TensorBoard events, checkpoints/ and summary.json. Ctrl-C or
SIGTERM saves and stops; exit codes: 0 done, 2 wrong configuration or input, 1 anything else.

Several processes, one on each host, share a run and its folder. SLURM (srun) and TPU slices tell them where they
are; elsewhere start each with --coordinator=HOST:PORT --processes=N --process=I. --config.mesh.data, .fsdp and
.tensor divide the devices; --show_sharding shows where every array would lie, and trains nothing.
"""

import sys

from absl import flags

from siamese_jax import program
from siamese_jax.evaluation.validation import make_validation
from siamese_jax.parallel import start_up
from siamese_jax.training.loop import train
from siamese_jax.training.report import format_summary
from siamese_jax.training.sharding import format_sharding, sharding_of

flags.DEFINE_string("workdir", None, "Folder of the run; made where it is missing, continued where it is not.")
flags.DEFINE_bool("show_sharding", False, "Show every array with its partition and bytes per device, then stop.")
program.define_config_flag()
program.define_json_flag()
start_up.define_flags()


def main() -> None:
    config = flags.FLAGS.config
    if flags.FLAGS.show_sharding:
        program.required("config")
        start_up.start_processes(program.facts(config), program.say_here)
        program.answer(sharding_of(config), format_sharding)
        return
    workdir = program.required("workdir")
    program.required("config")
    start_up.start_processes(program.facts(config, workdir=workdir), program.say_here)
    result = train(config, workdir, make_validation=make_validation, say=program.say)
    program.answer(result, lambda result: format_summary(result, sys.argv))


if __name__ == "__main__":
    program.run(main)
