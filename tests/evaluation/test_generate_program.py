"""`python -m siamese_jax.evaluation.generate` on a tiny run: its answers, and one line for every wrong input."""

import io
import json
import os
import pty
import runpy
import subprocess
import sys
import types

import pytest
from programs import ROOT, SAMPLE, shared_place, undisturbed

from siamese_jax.data.tokenizer import ByteTokenizer
from siamese_jax.evaluation import generate

PROGRAM = "siamese_jax/evaluation/generate.py"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return shared_place(tmp_path_factory)


@pytest.fixture(scope="module")
def workdir(place):
    folder, ended = undisturbed(place)
    assert ended.code == 0, ended.err
    return folder


@pytest.fixture
def ask(place, workdir):
    """--json's object for these arguments."""

    def run(*arguments):
        ended = place.run(f"--workdir={workdir}", "--json", *arguments, program=PROGRAM)
        assert ended.code == 0, ended.err
        assert ended.out.count("\n") == 1
        return json.loads(ended.out)

    return run


def test_prompts_samples_counts_and_the_cache(ask, workdir):
    """More tokens than the context of 32 holds; in batches that do not come out even."""
    arguments = ("--prompt=abc", "--prompt=", "--num_samples=2", "--max_tokens=50", "--top_k=9", "--top_p=0.9")
    found = ask(*arguments, "--batch_size=3", "--nostop")
    assert [(row["prompt"], row["number"], row["sample"]) for row in found["results"]] == [
        ("abc", 0, 0), ("abc", 0, 1), ("", 1, 0), ("", 1, 1),
    ]  # fmt: skip
    assert all(row["tokens"] == len(row["ids"]) == 50 and row["finish"] == "length" for row in found["results"])
    assert (found["tokens"], found["prompt_tokens"], found["step"], found["cached"]) == (200, 3, 30, True)
    assert found["tokens_per_second"] == pytest.approx(200 / found["seconds"])
    assert found["checkpoint"] == str(workdir / "checkpoints" / "30")
    texts = [row["text"] for row in found["results"]]
    assert len(set(texts)) == 4
    again = ask(*arguments, "--nocache", "--nostop")
    assert [row["ids"] for row in again["results"]] == [row["ids"] for row in found["results"]]
    assert not again["cached"] and again["prefill_seconds"] > 0


def test_the_text_the_run_ended_with(ask, workdir):
    """summary.json's sample, of the same prompt, seed, temperature and number of tokens."""
    (sample,) = json.loads((workdir / "summary.json").read_text(encoding="utf-8"))["samples"]
    prompt = SAMPLE[0].partition("=")[2]
    (row,) = ask(f"--prompt={prompt}", "--max_tokens=5", "--temperature=0.8", "--nostop")["results"]
    assert sample == {"prompt": prompt, "text": row["text"]}


def test_files_of_prompts(ask, tmp_path):
    plain, rows = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    plain.write_bytes("\ufeffone é\r\n\n two\n".encode())
    lines = '{"prompt": "one é"}', '{"prompt": " two", "more": 1}', '{"prompt": "two\\nlines"}'
    rows.write_text("\n".join(lines), encoding="utf-8")
    first, second = (ask(f"--prompts={path}", "--max_tokens=4", "--temperature=0") for path in (plain, rows))
    assert [row["prompt"] for row in first["results"]] == ["one é", " two"]
    assert [row["prompt"] for row in second["results"]] == ["one é", " two", "two\nlines"]
    assert [row["ids"] for row in first["results"]] == [row["ids"] for row in second["results"][:2]]


def test_for_the_reader(place, workdir):
    """One text with its prompt in front, several with a heading each; the last line counts."""
    ended = place.run(f"--workdir={workdir}", "--prompt=abc", "--max_tokens=7", "--step=27", program=PROGRAM)
    assert ended.code == 0, ended.err
    *text, line = ended.out.splitlines()
    assert "\n".join(text).startswith("abc") and "tokens/s" in line and line.endswith("checkpoints/27")
    several = ("--prompt=a", "--prompt=b", "--num_samples=2", "--max_tokens=3", "--nostop")
    ended = place.run(f"--workdir={workdir}", *several, program=PROGRAM)
    assert ended.out.startswith("--- prompt 1, sample 1: 3 tokens") and ended.out.count("--- prompt") == 4
    assert ended.out.splitlines()[-1].startswith("12 tokens, ")


def test_on_a_terminal_the_text_comes_as_it_is_made(place, workdir):
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "siamese_jax.evaluation.generate", f"--workdir={workdir}"]
    with subprocess.Popen(
        [*command, "--prompt=abc", "--max_tokens=40", "--nostop"], cwd=ROOT, env=place.environment,
        stdout=slave, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        os.close(slave)
        parts = []
        while True:
            try:
                part = os.read(master, 4096)
            except OSError:  # the end of a terminal
                break
            if not part:
                break
            parts.append(part)
        assert process.wait(240) == 0, process.stderr.read()
    os.close(master)
    shown = b"".join(parts).decode()
    assert shown.startswith("abc") and shown.count("tokens/s") == 1


def test_every_token_is_shown_before_the_next_one_is_made(monkeypatch):
    class Terminal(io.StringIO):
        shown = ""

        def isatty(self):
            return True

        def flush(self):
            self.shown = self.getvalue()

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(generate.flags, "FLAGS", types.SimpleNamespace(num_samples=1, json=False))
    show, seen = generate.Show(types.SimpleNamespace(tokenizer=ByteTokenizer()), ["ab"], [list(b"ab")]), []
    for token in "cdé".encode():
        seen.append(terminal.shown)
        show(0, [token])
    assert [*seen, terminal.shown] == ["ab", "abc", "abcd", "abcd", "abcdé"]
    assert show.finish() == ["cdé"] and terminal.shown == "abcdé\n"


def test_help_teaches(place):
    ended = place.run("--help", program=PROGRAM)
    assert ended.code == 0 and ended.out.startswith("Text from a trained language model.")
    for option in ("workdir", "prompt", "prompts", "max_tokens", "temperature", "top_k", "top_p", "num_samples"):
        assert f"--{option}:" in ended.out


WRONG = [
    ((), ("there is no prompt", "--prompts=FILE")),
    (("--prompt=a", "--prompts=b.txt"), ("--prompt and --prompts",)),
    (("--prompt=" + 50 * "x",), ("has 51 tokens", "context is 32", "xxx...")),
    (("--prompt=a", "--temperature=-0.5"), ("temperature is -0.5",)),
    (("--prompt=a", "--temperature=nan"), ("temperature is nan",)),
    (("--prompt=a", "--top_p=0"), ("top_p is 0",)),
    (("--prompt=a", "--top_p=1.5"), ("top_p is 1.5",)),
    (("--prompt=a", "--top_k=-1"), ("top_k is -1",)),
    (("--prompt=a", "--top_k=258"), ("top_k is 258", "257")),
    (("--prompt=a", "--seed=-1"), ("seed is -1",)),
    (("--prompt=a", "--max_tokens=0"), ("max_tokens is 0",)),
    (("--prompt=a", "--num_samples=0"), ("num_samples is 0",)),
    (("--prompt=a", "--batch_size=0"), ("batch_size is 0",)),
    (("--prompt=a", "--step=4"), ("no checkpoint 4",)),
    (("--prompts=HERE/gone.txt",), ("cannot read", "gone.txt")),
    (("--prompts=~nobody/of/that/name",), ("cannot read",)),
    (("--prompts=HERE",), ("cannot read", "directory")),
    (("--prompts=HERE/empty.txt",), ("holds no prompt",)),
    (("--prompts=HERE/latin.txt",), ("is not UTF-8", "0xe9 at offset 4")),
    (("--prompts=HERE/other.jsonl",), ("line 2", 'no text in a field "prompt"')),
    (("--prompts=HERE/broken.jsonl",), ("line 1 is not JSON",)),
    (("--prompts=HERE/half.jsonl",), ("line 1", "no text")),
]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with files of prompts that are none."""
    folder = tmp_path_factory.mktemp("prompts")
    (folder / "empty.txt").write_text("\n \n")
    (folder / "latin.txt").write_bytes(b"abc \xe9")
    (folder / "other.jsonl").write_text('{"prompt": "a"}\n{"text": "a"}\n')
    (folder / "broken.jsonl").write_text("prompt\n")
    (folder / "half.jsonl").write_text('{"prompt": "\\ud83d"}\n')
    return folder


@pytest.mark.parametrize(("arguments", "said"), WRONG)
def test_wrong_input_is_one_line(place, workdir, here, arguments, said):
    words = [word.replace("HERE", str(here)) for word in arguments]
    ended = place.run(f"--workdir={workdir}", *words, program=PROGRAM)
    assert ended.code == 2 and ended.out == "" and ended.err.count("\n") == 1, ended
    assert ended.err.startswith("error: ") and all(word in ended.err for word in said), ended.err


def test_not_a_run_and_not_a_language_model(place, workdir, tmp_path):
    assert "is not a run folder" in place.run(f"--workdir={tmp_path}", "--prompt=a", program=PROGRAM).err
    assert "--workdir is missing" in place.run("--prompt=a", program=PROGRAM).err
    images = tmp_path / "images"
    (images / "checkpoints" / "1").mkdir(parents=True)
    config = runpy.run_path(str(ROOT / "configs/quickstart_images.py"))["get_config"]()
    (images / "config.json").write_text(config.to_json())
    ended = place.run(f"--workdir={images}", "--prompt=a", program=PROGRAM)
    assert ended.code == 2 and "holds a vision model" in ended.err, ended.err
