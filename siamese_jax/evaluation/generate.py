"""Text from a trained language model.

    python -m siamese_jax.evaluation.generate --workdir=runs/quickstart --prompt="The state of the Union is "
    python -m siamese_jax.evaluation.generate --workdir=runs/quickstart --prompt="We must " --temperature=0
    python -m siamese_jax.evaluation.generate --workdir=runs/quickstart --prompts=prompts.txt --num_samples=4 \
        --top_k=50 --top_p=0.95 --seed=1 --json

On a terminal the text of one prompt appears as it is made; those of several follow a progress bar. --prompts names
a file with one prompt a line, or a .jsonl file with a field "prompt". An empty --prompt= starts from nothing.

How tokens are drawn: --temperature divides the logits (0 takes the likeliest token); --top_k leaves the so many
likeliest, then --top_p the likeliest that together have that probability. A text depends on its prompt, its number
in the call (prompts in order, the samples of each in a row), --seed and these, not on the prompts beside it. It
ends after --max_tokens, or where the model ends the text itself (--nostop goes on).

The context is data.length tokens, an end of text in front of the prompt included; a longer prompt is refused. Where
a text outgrows it, the last half of the context is read anew and the model goes on from there. Keys and values of
tokens that were read are kept, so a token costs one position; --nocache runs the whole window for every token, to
the same tokens, which takes long.

--json prints one object: under "results" prompt, sample (its number), text, ids, prompt_tokens, tokens and finish
("length" or "end_of_text") of every text, and the counts and seconds of all. Compiling is not counted in
tokens_per_second, reading the prompts is. Several processes share the work as train.py's do (--coordinator,
--processes, --process).
Exit codes: 0 done, 2 wrong input, 1 anything else.
"""

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import flags

from siamese_jax import program
from siamese_jax.errors import InputError
from siamese_jax.evaluation.generation import Generator, Made, check_contexts
from siamese_jax.evaluation.run import OpenRun, open_run, progress_bar, restore_weights, told
from siamese_jax.evaluation.sampling import TokenSampling
from siamese_jax.evaluation.text_stream import TextStream
from siamese_jax.parallel import start_up


def define_flags() -> None:
    """The options of the program."""
    flags.DEFINE_string("workdir", None, "Folder of the run.")
    flags.DEFINE_multi_string("prompt", [], "Text to go on from; may be repeated.")
    flags.DEFINE_string("prompts", None, 'File of prompts: one a line, or .jsonl with a field "prompt".')
    flags.DEFINE_integer("max_tokens", 256, "Tokens of a text at most.")
    flags.DEFINE_float("temperature", 0.8, "Divides the logits; 0 takes the likeliest token.")
    flags.DEFINE_integer("top_k", 0, "Draw from the so many likeliest tokens; 0 = all.")
    flags.DEFINE_float("top_p", 1.0, "Draw from the likeliest tokens that together have this probability.")
    flags.DEFINE_integer("seed", 0, "Of what is drawn.")
    flags.DEFINE_integer("num_samples", 1, "Texts for every prompt.")
    flags.DEFINE_integer("batch_size", 16, "Texts made at a time; does not change them.")
    flags.DEFINE_integer("step", None, "Step of the checkpoint; the newest sound one unless given.")
    flags.DEFINE_bool("average", True, "Take the running average of the parameters where the run keeps one.")
    flags.DEFINE_bool("stop", True, "End a text where the model ends it.")
    flags.DEFINE_bool("cache", True, "Keep keys and values; without it every token runs the whole window.")
    program.define_json_flag()
    start_up.define_flags()


def read_prompts(path: str) -> list[str]:
    """The prompts of a file, in order: its lines, or the field 'prompt' of each object of a .jsonl file.

    Lines of a text that are empty count as no prompt. InputError where the file cannot be read so, or has none.
    """
    try:
        text = Path(os.path.expanduser(path)).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"--prompts: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        byte = f"byte 0x{error.object[error.start]:02x} at offset {error.start}"
        raise InputError(f"--prompts: {path} is not UTF-8: {byte}: convert it") from error
    # Not splitlines: a prompt may hold other breaks, such as U+2028.
    lines = [(i, line.removesuffix("\r")) for i, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if path.endswith(".jsonl"):
        prompts = [_prompt_of(path, number, line) for number, line in lines]
    else:
        prompts = [line for _, line in lines]
    if not prompts:
        raise InputError(f"--prompts: {path} holds no prompt: write one a line")
    return prompts


def _prompt_of(path: str, number: int, line: str) -> str:
    where = f"--prompts: {path} line {number}"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f'{where} is not JSON ({line[:40]!r}): write {{"prompt": "..."}}') from error
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str):
        raise InputError(f'{where} has no text in a field "prompt": write {{"prompt": "..."}}')
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell half of a pair of surrogates
        raise InputError(f"{where} has a prompt that is no text: {error.reason}") from error
    return prompt


def _given_prompts() -> list[str]:
    given = flags.FLAGS
    if given.prompts is not None and given.prompt:
        raise InputError("--prompt and --prompts are both given: leave one out")
    if given.prompts is not None:
        return read_prompts(given.prompts)
    if not given.prompt:
        raise InputError("there is no prompt: give --prompt=TEXT (--prompt= starts from nothing) or --prompts=FILE")
    for i, prompt in enumerate(given.prompt, start=1):
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:  # bytes of a command line that are no UTF-8
            raise InputError(f"--prompt number {i} is not UTF-8: convert it") from error
    return given.prompt


def _checked_sampling() -> TokenSampling:
    given = flags.FLAGS
    for name in ("max_tokens", "num_samples", "batch_size"):
        if given[name].value < 1:
            raise InputError(f"{name} is {given[name].value}: it must be at least 1")
    return TokenSampling(given.temperature, given.top_k, given.top_p, given.seed)


def _open(workdir: str, prompts: Sequence[str], sampling: TokenSampling) -> tuple[OpenRun, list[list[int]]]:
    """(the run, the token ids of the prompts); InputError for what does not fit its model."""
    run = open_run(workdir, flags.FLAGS.step)
    if run.config.family != "language":
        raise InputError(f"{workdir} holds a {run.config.family} model: text comes from a language model")
    sampling.check(run.config.model.vocab_size)
    if run.tokenizer.vocab_size > run.config.model.vocab_size:
        raise InputError(
            f"the tokenizer {run.config.data.tokenizer} has {run.tokenizer.vocab_size} ids, the model of {workdir} "
            f"{run.config.model.vocab_size}: restore the file"
        )
    ids = [each.tolist() for each in run.tokenizer.encode_batch(prompts)]
    names = [f"the prompt {_short(prompt)}" for prompt in prompts]
    check_contexts([[run.tokenizer.end_of_text, *each] for each in ids], run.config.data.length, names)
    return run, ids


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


def generate(run: OpenRun, generator: Generator, prompt_ids: Sequence[Sequence[int]], sampling, watch) -> dict:
    """{made: a Made for every row, seconds, prefill_seconds, compile_seconds} of the texts of all prompts.

    watch(row, new ids) is called as tokens come.
    """
    given, end = flags.FLAGS, run.tokenizer.end_of_text
    contexts = [[end, *ids] for ids in prompt_ids for _ in range(given.num_samples)]
    size = min(given.batch_size, len(contexts))
    made: list[Made] = []
    spent = {"seconds": 0.0, "prefill_seconds": 0.0, "compile_seconds": 0.0}
    for first in range(0, len(contexts), size):
        rows = [min(first + i, len(contexts) - 1) for i in range(size)]  # the last batch is filled up
        batch, began = [contexts[row] for row in rows], time.perf_counter()
        generator.warm_up(batch, sampling, given.max_tokens)
        warm = time.perf_counter()
        here = generator(
            batch, sampling, max_tokens=given.max_tokens, stop=end if given.stop else None, numbers=rows,
            watch=lambda i, ids, first=first: first + i < len(contexts) and watch(first + i, ids),
        )  # fmt: skip
        made += here[: len(contexts) - first]
        spent["compile_seconds"] += warm - began
        spent["seconds"] += time.perf_counter() - warm
        spent["prefill_seconds"] += generator.prefill_seconds
    return {"made": made, **spent}


class Show:
    """Shows the only text as it is made, or how far several texts are; `text` says what to print at the end."""

    def __init__(self, run: OpenRun, prompts: Sequence[str], prompt_ids: Sequence[Sequence[int]]):
        given, self.num_samples = flags.FLAGS, flags.FLAGS.num_samples
        self.prompts, self.made_tokens = prompts, 0
        self.streams = [TextStream(run.tokenizer, ids) for ids in prompt_ids for _ in range(self.num_samples)]
        self.is_live = len(self.streams) == 1 and not given.json and start_up.is_main() and sys.stdout.isatty()
        self.progress: Callable[[int], None] | None = None
        if self.is_live:
            self._write(prompts[0])

    def __call__(self, row: int, ids: list[int]) -> None:
        new = self.streams[row].push(ids)
        self.made_tokens += len(ids)
        if self.is_live:
            self._write(new)
        if self.progress is not None:
            self.progress(self.made_tokens)

    def finish(self) -> list[str]:
        """The texts; what was held back of the only one is shown."""
        rest = [stream.push([], last=True) for stream in self.streams]
        if self.is_live:
            self._write(rest[0] + "\n")
        return [stream.shown for stream in self.streams]

    def text(self, result: dict) -> str:
        """The texts that were not shown yet, and the line about all of them."""
        average = ", running average" if result["averaged"] else ""
        finish = f", ended by the {_REASON[result['results'][0]['finish']]}" if len(self.streams) == 1 else ""
        line = (
            f"{result['tokens']} tokens{finish}, {result['tokens_per_second']:.4g} tokens/s, "
            f"prompts read in {result['prefill_seconds']:.3f} s, {result['checkpoint']}{average}"
        )
        if self.is_live:
            return line
        if len(self.streams) == 1:
            return f"{self.prompts[0]}{result['results'][0]['text']}\n{line}"
        blocks = [f"{_heading(row, self.num_samples)}\n{row['prompt']}{row['text']}" for row in result["results"]]
        return "\n".join([*blocks, line])

    @staticmethod
    def _write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


_REASON = {"length": "number of tokens", "end_of_text": "model"}


def _heading(row: dict, num_samples: int) -> str:
    sample = f", sample {row['sample'] + 1}" if num_samples > 1 else ""
    return f"--- prompt {row['number'] + 1}{sample}: {row['tokens']} tokens, ended by the {_REASON[row['finish']]}"


def main() -> None:
    workdir = program.required("workdir")
    given = flags.FLAGS
    sampling, prompts = _checked_sampling(), _given_prompts()
    digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
    start_up.start_processes(program.facts(arguments=program.shared_arguments(), prompts=digest), program.say_here)
    run, prompt_ids = _open(workdir, prompts, sampling)
    weights = restore_weights(run, given.step, program.say, given.average)
    generator = Generator(run.model, weights.params, run.mesh, length=run.config.data.length, cached=given.cache)
    show = Show(run, prompts, prompt_ids)
    total = len(prompts) * given.num_samples * given.max_tokens
    with contextlib.nullcontext() if show.is_live else progress_bar(total, "token") as progress:
        show.progress = progress
        spent = generate(run, generator, prompt_ids, sampling, show)
    texts, rows = show.finish(), []
    for row, (made, text) in enumerate(zip(spent.pop("made"), texts, strict=True)):
        number, sample = divmod(row, given.num_samples)
        rows.append({
            "prompt": prompts[number], "number": number, "sample": sample, "text": text, "ids": made.ids,
            "prompt_tokens": len(prompt_ids[number]), "tokens": len(made.ids), "finish": made.reason,
        })  # fmt: skip
    tokens = sum(row["tokens"] for row in rows)
    result = {
        **told(run, weights), "results": rows, "tokens": tokens,
        "prompt_tokens": sum(map(len, prompt_ids)),
        "tokens_per_second": tokens / spent["seconds"], **spent, "cached": given.cache,
    }  # fmt: skip
    program.answer(result, show.text)


if __name__ == "__main__":
    define_flags()
    program.run(main)
