"""Evaluates a checkpoint of a run: bits per byte, loss and perplexity, for every source file and in total.

    python eval.py --workdir=runs/quickstart
    python eval.py --workdir=runs/quickstart --step=200 --split=train --max_windows=500
    python eval.py --workdir=runs/quickstart --data.source=one.txt --data.source=two.jsonl --json

Without --data.source the run's own data are read, the validation split unless --split says otherwise.
Where the run keeps a running average of its parameters (optimizer.ema), that is what is evaluated.

Every token counts exactly once, in windows of data.length tokens. The columns:
  bits/byte    bits per UTF-8 byte of text: comparable between tokenizers
  loss         nats per token
  perplexity   exp(loss), weighted by token
  by instance  exp of the mean over windows of the mean loss of a window: the protocol of the paper's code.
               Of a window that several sources share, each has its part as an instance.

--json prints one object with the same figures under "total" and "sources"; null stands for NaN and infinity.
Exit codes: 0 done, 2 wrong input (a broken checkpoint that --step asks for too), 1 anything else.
"""

import json

from absl import flags

from siamese_jax import program
from siamese_jax.data.sources import SPLITS
from siamese_jax.evaluation.perplexity import format_table
from siamese_jax.evaluation.run import evaluate_run

flags.DEFINE_string("workdir", None, "Folder of the run.")
flags.DEFINE_integer("step", None, "Step of the checkpoint; the newest sound one unless given.")
flags.DEFINE_enum("split", None, SPLITS, "Part of the data: validation, or all where --data.source is given.")
flags.DEFINE_multi_string(
    "data.source", [], "File, folder or glob to evaluate on; may be repeated or a list by commas."
)
flags.DEFINE_string("data.field", None, "Field of the text in .jsonl and .parquet; the run's own unless given.")
flags.DEFINE_string("data.cache_dir", None, "Folder for tokenised data; the run's own unless given.")
flags.DEFINE_integer("batch_size", None, "Windows at a time; eval.batch_size of the run unless given.")
flags.DEFINE_integer("max_windows", 0, "Only the first so many windows; 0 = all.")
program.define_json_flag()


def main() -> None:
    workdir = program.required("workdir")
    given = flags.FLAGS
    result = evaluate_run(
        workdir, step=given.step, split=given.split, sources=given["data.source"].value,
        batch_size=given.batch_size, max_windows=given.max_windows, cache_dir=given["data.cache_dir"].value,
        field=given["data.field"].value,
        say=program.say,
    )  # fmt: skip
    if given.json:
        print(json.dumps(program.json_values(result), allow_nan=False))
        return
    average = ", running average" if result["averaged"] else ""
    program.say(f"model: {result['checkpoint']}{average}")
    program.say(f"data:  {result['source']}, split {result['split']}")
    program.say(format_table(result))


if __name__ == "__main__":
    program.run(main)
