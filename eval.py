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
Several processes share the work as train.py's do (--coordinator, --processes, --process).
Exit codes: 0 done, 2 wrong input (a broken checkpoint that --step asks for too), 1 anything else.
"""

from absl import flags

from siamese_jax import program
from siamese_jax.data.sources import SPLITS
from siamese_jax.evaluation.perplexity import format_table
from siamese_jax.evaluation.run import evaluate_run
from siamese_jax.parallel import start_up

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
start_up.define_flags()


def main() -> None:
    workdir = program.required("workdir")
    given = flags.FLAGS
    start_up.start_processes(program.facts(arguments=program.shared_arguments()), program.say_here)
    result = evaluate_run(
        workdir, step=given.step, split=given.split, sources=given["data.source"].value,
        batch_size=given.batch_size, max_windows=given.max_windows, cache_dir=given["data.cache_dir"].value,
        field=given["data.field"].value,
        say=program.say,
    )  # fmt: skip
    program.answer(result, as_text)


def as_text(result: dict) -> str:
    """The result with its table."""
    average = ", running average" if result["averaged"] else ""
    return "\n".join([
        f"model: {result['checkpoint']}{average}",
        f"data:  {result['source']}, split {result['split']}",
        format_table(result),
    ])  # fmt: skip


if __name__ == "__main__":
    program.run(main)
