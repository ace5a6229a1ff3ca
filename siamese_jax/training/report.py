"""The closing words of a training run: what it reached, where it lies, what to type next."""

import shlex
from collections.abc import Mapping, Sequence

from siamese_jax.training.metrics import format_count


def format_summary(result: Mapping, command: Sequence[str]) -> str:
    """The summary that `train` returned, as text; `command` is the command line that was typed."""
    typed = "python " + shlex.join(command)
    if result["status"] == "stopped":
        saved = "saved" if result["step"] else "nothing to save"
        return f"stopped at step {result['step']} of {result['steps']}, {saved}. To go on:\n  {typed}"
    workdir, family = result["workdir"], result.get("family", "language")
    unit = "token" if family == "language" else "image"
    rate = result.get(f"{unit}s_per_second")
    lines = [f"the run in {workdir} is complete" + (" already" if "already" in result["status"] else "")]
    lines.append(f"  validation   {_VALIDATION[family](result['validation'])}")
    if rate:
        mfu = f", MFU {result['mfu']:.1%}" if result["mfu"] else ""
        lines.append(f"  speed        {format_count(rate)} {unit}s/s{mfu}")
    lines += [
        f"  model        {result['parameters']:,} parameters, {result['residual']}, "
        f"{format_count(result[f'{unit}s'])} {unit}s seen",
        f"  files        {workdir}/metrics.jsonl, {workdir}/checkpoints/{result['step']}, {workdir}/summary.json",
    ]
    lines += [f"  picture      {path}" for path in result.get("pictures", [])]
    for sample in result.get("samples", []):
        lines += ["  sample", "    " + (sample["prompt"] + sample["text"]).replace("\n", "\n    ")]
    start_again = _with_workdir(command, workdir)
    lines += [
        "to evaluate:",
        f"  python eval.py --workdir={workdir}",
        "to train on from these weights, as a new run:",
        f"  {start_again}",
    ]
    return "\n".join(lines)


_VALIDATION = {
    "language": lambda total: (
        f"{total['bits_per_byte']:.4f} bits per byte, loss {total['loss']:.4f}, "
        f"perplexity {total['perplexity']:.3f} a token ({total['tokens']:,} tokens)"
    ),
    "vision": lambda total: (
        f"top-1 {total['top1']:.2%}, top-5 {total['top5']:.2%}, loss {total['loss']:.4f} "
        f"({total['images']:,} images)"
    ),
    "diffusion": lambda total: (
        f"noise error {total['loss']:.4f}, variational bound {total['vb']:.4f} bits per dimension "
        f"({total['images']:,} images)"
    ),
}


def _with_workdir(command: Sequence[str], workdir: str) -> str:
    """The same command in another folder, starting from the weights of this one."""
    kept, skip = [], False
    for word in command:
        flag, has_value, _ = word.lstrip("-").partition("=")
        if skip:
            skip = False
        elif flag in ("workdir", "config.training.init_from"):
            skip = not has_value
        else:
            kept.append(word)
    added = [f"--workdir={workdir.rstrip('/')}-2", f"--config.training.init_from={workdir}"]
    return "python " + shlex.join([*kept, *added])
