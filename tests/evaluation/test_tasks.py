"""What is counted as right, chance, standard errors, bits per byte; and `eval.py --tasks` from end to end."""

import json
import math

import jax
import numpy as np
import pytest
from programs import shared_place, undisturbed
from test_task_requests import question, write_mmlu, write_task

from siamese_jax.data.tokenizer import ByteTokenizer
from siamese_jax.evaluation.task_requests import BITS, GREEDY, PER_CHARACTER, PER_TOKEN, RAW, Question, Task
from siamese_jax.evaluation.task_scoring import Score, TaskScorer, encode_choices, score_choices
from siamese_jax.evaluation.tasks import figures, format_tasks, mean_and_error, mean_of, rated, saved_lines, share


def score(log_prob, tokens=1, greedy=False, cut=0, pieces=1):
    return Score(log_prob, greedy, tokens, cut, pieces)


def task(metric, *questions):
    return Task("made", "rc_0shot", metric, list(questions))


def test_the_three_ratings_by_hand():
    one = Question(0, 0, (("Q", " ab"), ("Q", " abcd"), ("Q", "é")))
    scores = [score(-6.0, 3), score(-8.0, 5), score(-5.0, 2)]
    assert rated(one, scores, RAW).tolist() == [-6, -8, -5]
    assert rated(one, scores, PER_CHARACTER).tolist() == [-3, -2, -5]
    assert rated(one, scores, PER_TOKEN).tolist() == [-2, -1.6, -2.5]
    blank = Question(0, 0, (("Q", " "), ("Q", "  x")))  # of nothing but a blank it is one character
    assert rated(blank, scores[:2], PER_CHARACTER).tolist() == [-6, -4]


def test_equals_share_the_answer_and_nan_has_none():
    assert [share(np.array([-1.0, -2.0]), label) for label in (0, 1)] == [1, 0]
    assert [share(np.array([-1.0, -1.0, -2.0]), label) for label in (0, 1, 2)] == [0.5, 0.5, 0]
    for lost in (np.nan, np.inf, -np.inf):
        assert share(np.array([-1.0, lost]), 0) == share(np.array([lost, -1.0]), 0) == 0


def test_the_standard_error_is_that_of_a_proportion():
    mean, error = mean_and_error(np.array([1.0] * 3 + [0.0] * 7))
    assert mean == pytest.approx(0.3) and error == pytest.approx(math.sqrt(0.3 * 0.7 / 9))
    assert math.isnan(mean_and_error(np.array([1.0]))[1])


def test_figures_by_hand():
    asked = [
        Question(0, 0, (("a", " x"), ("a", " yy")), "stem"),
        Question(1, 1, (("b", " x"), ("b", " é"), ("b", " zz"), ("b", " w")), "other"),
    ]
    of_choice = {
        ("a", " x"): score(-2.0), ("a", " yy"): score(-3.0, cut=4),
        ("b", " x"): score(-9.0), ("b", " é"): score(-4.0, pieces=2), ("b", " zz"): score(-3.0),
        ("b", " w"): score(-9.0),
    }  # fmt: skip
    found = figures(task(PER_CHARACTER, *asked), of_choice)
    assert (found["score"], found[RAW], found[PER_CHARACTER], found[PER_TOKEN]) == (0, 0.5, 0, 0.5)
    assert found["chance"] == (1 / 2 + 1 / 4) / 2 and found["metric"] == PER_CHARACTER
    assert (found["questions"], found["requests"]) == (2, 6)
    assert (found["contexts_cut"], found["continuations_split"], found["not_finite"]) == (1, 1, 0)
    assert found["bits_per_byte"] == pytest.approx(6 / math.log(2) / 5)  # ' x' and ' é' are 2 and 3 bytes
    assert found["bits_per_byte_by_question"] == pytest.approx((2 / 2 + 4 / 3) / 2 / math.log(2))
    raw = figures(task(RAW, *asked), of_choice)
    assert {name: part["score"] for name, part in raw["categories"].items()} == {"stem": 1, "other": 0}


def test_one_continuation_has_greedy_accuracy_perplexity_and_bits():
    asked = [Question(i, 0, (("a", f" word{i}"),)) for i in range(4)]
    of_choice = {q.choices[0]: score(-float(i), 6, greedy=i < 3) for i, q in enumerate(asked)}
    found = figures(task(GREEDY, *asked), of_choice)
    assert found["score"] == found[GREEDY] == 0.75 and found["perplexity"] == pytest.approx(math.exp(1.5))
    assert "chance" not in found and found["standard_error"] == pytest.approx(math.sqrt(0.75 * 0.25 / 3))
    bits = figures(task(BITS, *asked), of_choice)
    assert bits["score"] == pytest.approx(bits["bits_per_byte"]) == pytest.approx(1.5 / 6 / math.log(2))
    lost = figures(task(GREEDY, asked[0]), {asked[0].choices[0]: score(math.nan, greedy=True)})
    assert lost["score"] == 0 and lost["not_finite"] == 1 and math.isnan(lost["bits_per_byte"])


def test_the_mean_is_over_tasks_with_choices():
    first = {"score": 0.5, "standard_error": 0.03, "chance": 0.5}
    second = {"score": 0.25, "standard_error": 0.04, "chance": 0.2}
    mean = mean_of({"a": first, "b": second, "bits": {"score": 3.0, "standard_error": 1.0}})
    expected = {"tasks": 2, "score": 0.375, "standard_error": 0.025, "chance": 0.35}
    assert mean == pytest.approx(expected) and mean_of({"bits": {"score": 3.0}}) is None


def test_saved_lines_say_which_was_chosen():
    one = Question(5, 1, (("a", " x"), ("a", " yy")), "stem")
    (line,) = saved_lines(task(RAW, one), {("a", " x"): score(-2.0), ("a", " yy"): score(-1.0, 3, cut=4)})
    assert (line["task"], line["doc_id"], line["label"], line["chosen"], line["category"]) == (
        "made",
        5,
        1,
        1,
        "stem",
    )
    assert line["choices"][1] == {
        "log_prob": -1.0, "tokens": 3, "characters": 2, "cut": 4, "pieces": 1, "greedy": False,
    }  # fmt: skip
    (line,) = saved_lines(task(RAW, one), {choice: score(math.nan) for choice in one.choices})
    assert line["chosen"] is None and line["choices"][0]["log_prob"] is None


@pytest.fixture(scope="module")
def chance():
    """1,000 questions whose choices are drawn alike, and whose right one is any of them."""
    draw = np.random.default_rng(0)

    def word():
        return " " + "".join(draw.choice(list("abcdefgh"), 6))

    choices = [tuple((f"Question {i}:", word()) for _ in range(4)) for i in range(1000)]
    return task(RAW, *(Question(i, int(draw.integers(4)), some) for i, some in enumerate(choices)))


@pytest.fixture(scope="module")
def answered(chance, model, mesh):
    """Its figures by parameters; label: of every question, if not its own."""
    encoded = encode_choices([one for q in chance.questions for one in q.choices], ByteTokenizer(), 24)
    scorer = TaskScorer(model, mesh, window=24, batch_size=256)

    def figures_of(params, label=None):
        of = [q if label is None else q._replace(label=label) for q in chance.questions]
        return figures(task(RAW, *of), score_choices(scorer, params, encoded))

    return figures_of


def test_a_model_that_knows_nothing_is_at_chance(answered, params):
    found = answered(params)
    for metric in (RAW, PER_CHARACTER, PER_TOKEN):
        assert abs(found[metric] - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 1000), metric
    assert found["chance"] == 0.25 and found["standard_error"] == pytest.approx(0.0137, abs=0.001)


@pytest.mark.parametrize("label", [None, 0])
def test_equal_logits_give_exactly_chance(answered, params, label):
    """Even where the right choice is always the first, which argmax would take."""
    found = answered(jax.tree.map(np.zeros_like, params), label)
    assert found[RAW] == found[PER_CHARACTER] == found[PER_TOKEN] == 0.25
    assert found["bits_per_byte"] == pytest.approx(math.log2(257), rel=1e-6)


def test_a_model_that_gives_nan_is_always_wrong(answered, params):
    found = answered(jax.tree.map(lambda x: x * np.nan, params), 0)
    assert found[RAW] == found["score"] == 0 and found["not_finite"] == 1000


# The program, on a run that is shared with other tests.


TEXTS = " red", " a long answer that does not fit the window of the tiny model", " blue"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The place, with a folder of tasks in it."""
    place = shared_place(tmp_path_factory)
    root = place.folder / "tasks" / "olmo_eval"
    if not root.exists():
        some = [one for i in range(5) for one in question(i, i % 3, *TEXTS, context=f"Which colour has thing {i}?")]
        write_task(root, "piqa", some, "acc_per_char")
        few = [one for i in range(3) for one in question(i, i % 2, " yes", " no", context=f"Is it {i}?")]
        write_task(root, "arc_easy", few)
        words = [question(i, ["word"], " word", context="a b " * i)[0] for i in range(3)]
        write_task(root, "lambada", words, "logits_per_byte", "bpb_0shot")
        write_mmlu(root, "validation")
    return place


def evaluate(place, *arguments, code=0):
    workdir, _ = undisturbed(place)
    options = (f"--workdir={workdir}", f"--tasks_dir={place.folder}/tasks")
    ended = place.run(*options, *arguments, program="eval.py")
    assert ended.code == code, ended.err
    return ended


def test_the_program_prints_a_table_and_saves_every_question(place):
    saved = place.folder / "saved.jsonl"
    ended = evaluate(place, "--tasks=piqa,arc_easy,mmlu,lambada", f"--save-requests={saved}")
    lines = ended.out.splitlines()
    assert "checkpoints/30" in lines[0] and lines[1].split()[:3] == ["task", "questions", "ranked"]
    names = [line.split()[0] for line in lines[2:11]]
    categories = ["stem", "humanities", "social_sciences", "other"]
    assert names == ["piqa", "arc_easy", "mmlu", *categories, "lambada", "mean"]
    assert "5 continuations are longer than the 32 tokens of a window" in ended.out
    rows = [json.loads(line) for line in saved.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 5 + 3 + 57 + 3
    long = rows[0]["choices"][1]
    assert (rows[0]["task"], rows[0]["label"], long["tokens"], long["pieces"]) == ("piqa", 0, len(TEXTS[1]), 4)
    assert not list(place.folder.glob(".saved*"))


def test_one_json_object_the_same_on_four_devices(place):
    arguments = ("--tasks=piqa,lambada", "--json", "--max_questions=2", "--batch_size=3")
    one = json.loads(evaluate(place, *arguments).out)
    assert list(one["tasks"]) == ["piqa", "lambada"] and one["mean"]["tasks"] == 1
    assert one["tasks"]["piqa"]["questions"] == 2 and one["tasks"]["piqa"]["requests"] == 6
    assert one["tasks"]["lambada"].keys() >= {"score", "perplexity", "bits_per_byte", "greedy_accuracy"}
    workdir, _ = undisturbed(place)
    options = (f"--workdir={workdir}", f"--tasks_dir={place.folder}/tasks", *arguments)
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    ended = place.start(*options, program="eval.py", environment=devices).ended()
    assert ended.code == 0, ended.err
    four = json.loads(ended.out)
    for name, found in one["tasks"].items():
        numbers = {key: value for key, value in found.items() if isinstance(value, float)}
        assert {key: four["tasks"][name][key] for key in numbers} == pytest.approx(numbers, rel=1e-5), name


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--tasks=piqua",), "there is no task 'piqua'"),
        (("--tasks=",), "name tasks with commas"),
        (("--tasks=piqa", "--domains=a=b"), "--domains has no meaning with --tasks"),
        (("--tasks=piqa", "--save_requests=gone/x.jsonl"), "--save_requests is gone/x.jsonl: it must name a file"),
        (("--tasks_dir=", "--save-requests=x"), "--tasks_dir is about published tasks"),
    ],
)
def test_wrong_options_end_in_one_line(place, arguments, says):
    ended = evaluate(place, *arguments, code=2)
    assert ended.out == "" and ended.err.count("\n") == 1 and says in ended.err, ended.err


def test_the_table_of_bits_has_no_score():
    asked = [Question(i, 0, (("a", f" word{i}"),)) for i in range(2)]
    found = figures(task(BITS, *asked), {q.choices[0]: score(-3.0, 6) for q in asked})
    table = format_tasks({"tasks": {"coqa": found}, "length": 32}).splitlines()
    assert table[1].split() == ["coqa", "2", "bits/byte", "0.7213", "0"] and len(table) == 2
